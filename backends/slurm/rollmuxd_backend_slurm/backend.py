"""``SlurmBackend``: hosts that are nodes of a Slurm allocation, each reached through one kept step."""

import contextlib
import functools
import os
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

import anyio

from rollmuxd.spi import ContactLost, Finding, FoundHost, HostConfig, HostEnd, HostId
from rollmuxd_backend_local.agent import Reached
from rollmuxd_backend_slurm import controller
from rollmuxd_backend_slurm.controller import Node
from rollmuxd_backend_slurm.line import Line
from rollmuxd_backend_slurm.options import SlurmOptions
from rollmuxd_backend_slurm.steps import Steps


class SlurmBackend(Reached[SlurmOptions]):
    """Nodes of an allocation. Slurm is never asked to move a GPU: each step may use all that the allocation has there.

    One allocation has one owner, and only the owner can make steps in it: everything runs as that user.
    """

    name, kind, runs_as = "slurm", SlurmOptions, "the allocation's owner"

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, SlurmOptions], owner: str) -> None:
        super().__init__(hosts, options, owner)
        self._steps = Steps()

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """As all of them; Slurm is not asked.

        Raises:
            ValueError: an option that it does not know, or a value out of range; or no allocation is named.
        """
        opened = await super().open(hosts, options)
        for host, its in opened.options.items():
            if not _allocation(its):
                raise ValueError(
                    f"{host}: no allocation is named; start the daemon inside one (sbatch, salloc), or give its number "
                    'in [backends.slurm]: allocation = "4711"'
                )
        return opened

    @classmethod
    async def find(cls, where: str) -> tuple[FoundHost, ...]:
        """The nodes of an allocation, each component a kind of its own. The file is good for its next start as well.

        Raises:
            ValueError: no allocation is named, and this process is in none.
            ContactLost: as the controller has it, it is not there.
        """
        allocation = where or os.environ.get("SLURM_JOB_ID", "")
        if not allocation:
            raise ValueError("this is no Slurm allocation; give its number (rollmuxd init --slurm 4711)")
        found, named = await controller.components(allocation, ""), {"allocation": where} if where else {}
        hosts = []
        for number, component in sorted(found.items()):
            own = {**named, "component": number} if len(found) > 1 else named
            for name in await controller.names(component.nodes, ""):
                hosts.append(FoundHost(id=name, options=own, kind=number))
        return tuple(hosts)

    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float, user: str = "") -> dict[str, Any]:
        """Over the kept step; what starts a job's process, as a step of its own."""
        if question["ask"] != "start":
            return await super().ask(host, question, limit_s)
        options = self._of(host)
        run = functools.partial(self.run, host)
        return await self._steps.start(run, self._node(host), options, question, limit_s)

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The step, and what the node says of itself."""
        began = anyio.current_time()
        try:
            await self.run(host, ("true",))
        except ContactLost as error:
            return (Finding(what="step", level="bad", said=str(error)),)
        took_ms = (anyio.current_time() - began) * 1000
        line = self._line(host)
        said = f"in allocation {_allocation(self._of(host))}, answers in {took_ms:.0f} ms"
        found = [Finding(what="step", level="good", said=said)]
        with contextlib.suppress(ContactLost):  # the kept step does not need the controller
            found += self._time_left(host, await self.ends_at(host))
        if not line.tracked_by_cgroup:
            found.append(
                Finding(
                    what="tracking",
                    level="warning",
                    said="Slurm does not track processes by cgroup here: one that left its session outlives the "
                    "allocation",
                    remedy="the cluster's administrator can set ProctrackType=proctrack/cgroup",
                )
            )
        return (*found, *await super().check(host))

    async def ends_at(self, host: HostId) -> HostEnd | None:
        """As the controller has it now: an operator may lengthen an allocation."""
        options, node = self._of(host), self._node(host)
        try:
            at = (await controller.component(node, options.conf)).ends_at
        except ContactLost as error:
            raise ContactLost(f"{host}: {error}") from error
        if at is None:
            return None
        return HostEnd(at=at, drain_before_s=options.drain_before_s, what=f"allocation {node.allocation}")

    async def close(self) -> None:
        """End the kept steps. Steps of jobs stay."""
        self._steps.leave()
        await super().close()

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _time_left(self, host: HostId, end: HostEnd | None) -> tuple[Finding, ...]:
        if end is None:
            return (Finding(what="allocation", level="good", said="it has no time limit"),)
        left_s = end.at - time.time()
        said = f"{end.what} ends in {left_s / 3600:.1f} h"
        if left_s > self._of(host).drain_before_s:
            return (Finding(what="allocation", level="good", said=said),)
        remedy = "nothing new begins there; an operator can lengthen it (scontrol update TimeLimit), or start another"
        return (Finding(what="allocation", level="warning", said=said, remedy=remedy),)

    async def _look(self, host: HostId) -> dict[str, Any]:
        """The GPUs of the allocation; and a boot id that is another one when Slurm has ended everything.

        Slurm ends all processes of an allocation only where it tracks them by cgroup. Elsewhere some may be left.
        """
        looked = await super()._look(host)
        line = self._line(host)
        if line.tracked_by_cgroup:
            looked["boot_id"] += f"/{_allocation(self._of(host))}.{line.restarts}"
        own = line.environment.get("SLURM_STEP_GPUS", "").split(",")
        if all(number.isdecimal() for number in own) and len(looked["gpus"]) > len(own):
            # Where devices are not constrained, a look also sees GPUs that others have.
            looked["gpus"] = [one for one in looked["gpus"] if str(one["index"]) in own]
        return looked

    def _reach_s(self, host: HostId) -> float:
        return self._of(host).connect_s

    def _line(self, host: HostId, user: str = "") -> Line:
        options = self._of(host)
        if host not in self._lines:
            self._lines[host] = Line(self._node(host), options)
        line: Line = self._lines[host]  # type: ignore[assignment]  # no other is made here
        return line

    def _node(self, host: HostId) -> Node:
        options = self._of(host)
        return Node(host, options.node or host, _allocation(options), options.component)


def _allocation(options: SlurmOptions) -> str:
    return str(options.allocation) or os.environ.get("SLURM_JOB_ID", "")
