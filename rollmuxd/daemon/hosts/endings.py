"""Hosts that go away at a known time: nothing new begins on them shortly before, and their jobs hear of it.

The backend is asked again and again, since an operator may put the end off. Nodes that were drained for an end which is
put off, or which belonged to an earlier start of the host, may be used again.
"""

import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import anyio
import msgspec
import structlog

from rollmuxd.core.estimates import solo_ms
from rollmuxd.core.ids import HostId, NodeId
from rollmuxd.core.inputs import DrainNode, HostEnds, Input, UndrainNode
from rollmuxd.core.state import State
from rollmuxd.daemon import files
from rollmuxd.daemon.hosts.plugin_calls import ask, checked, said
from rollmuxd.spi import EndsSometime, HostEnd

log = structlog.get_logger("rollmuxd.endings")

#: between two questions to the backend, and what one may take
EVERY_S: Final = 60.0
ANSWER_S: Final = 30.0
#: a drain is never later than this after it is due
LOOK_S: Final = 1.0


class Endings:
    """When hosts end, and the nodes that were drained for it. ``kept``: a file for these, over restarts."""

    def __init__(
        self,
        backends: Mapping[HostId, EndsSometime],
        state: Callable[[], State],
        post: Callable[[Input], None],
        kept: Path,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._backends, self._state, self._post, self._kept, self._now = backends, state, post, kept, now
        #: what the backends said last; None: the host has no known end. One that does not answer may be right still.
        self.ends: dict[HostId, HostEnd | None] = {}
        self._drained = _read(kept)

    async def run(self) -> None:
        """Ask each backend once a minute, and drain nodes when it is time."""
        if not self._backends:
            return
        async with anyio.create_task_group() as tasks:
            for host in self._backends:
                tasks.start_soon(self._ask_again, host)
            while True:
                self.look()
                await anyio.sleep(LOOK_S)

    def look(self) -> None:
        """Tell the core of ends, drain the nodes whose time has come, and undrain those whose end was put off."""
        before, state = dict(self._drained), self._state()
        for host, end in self.ends.items():
            ends_at = None if end is None else round(end.at * 1000)
            if host in state.hosts and state.hosts[host].ends_at != ends_at:
                self._post(HostEnds(host, ends_at))
            nodes = [node for node in state.hosts[host].nodes if node in state.nodes] if host in state.hosts else []
            if end is not None and self._now() >= end.at - max(end.drain_before_s, _longest_s(state, nodes)):
                for node in nodes:
                    if self._drained.get(node) != end.at:
                        self._drain(node, end)
            else:
                for node in nodes:
                    if node in self._drained:
                        self._undrain(node)
        if self._drained != before:
            self._write()

    def _drain(self, node: NodeId, end: HostEnd) -> None:
        at = datetime.fromtimestamp(end.at, UTC).strftime("%Y-%m-%d %H:%M UTC")
        self._post(DrainNode(node=node, by=f"the end of {end.what} at {at}"))
        if self._state().nodes[node].drain:  # a lost node refuses, and is drained a second later
            self._drained[node] = end.at
            log.warning("host_ends", node=node, reason=f"{end.what} ends at {at}")

    def _undrain(self, node: NodeId) -> None:
        self._post(UndrainNode(node=node, by="the end of its host, which was put off"))
        if not self._state().nodes[node].drain:
            del self._drained[node]

    async def _ask_again(self, host: HostId) -> None:
        while True:
            try:
                answer = await ask(ANSWER_S, self._backends[host].ends_at(host))
                self.ends[host] = None if answer is None else checked(answer, HostEnd, "the end of the host")
            except Exception as error:
                log.warning("end_not_known", host=host, reason=said(error))
            await anyio.sleep(EVERY_S)

    def _write(self) -> None:
        try:
            files.write(self._kept, msgspec.json.encode(self._drained))
        except OSError as error:  # a restart leaves the nodes drained then, until an operator undrains them
            log.warning("endings_not_kept", file=str(self._kept), reason=said(error))


def _longest_s(state: State, nodes: list[NodeId]) -> float:
    """The longest iteration of the jobs on these nodes: one that begins later than this cannot end in time."""
    jobs = {job for node in nodes for job in state.nodes[node].pinned}
    return max((solo_ms(state.jobs[job]) or 0 for job in jobs if job in state.jobs), default=0) / 1000


def _read(kept: Path) -> dict[NodeId, float]:
    try:
        return msgspec.json.decode(kept.read_bytes(), type=dict[str, float])
    except (OSError, msgspec.MsgspecError):
        return {}
