"""What ``rollmuxd doctor`` finds of engines: those that live jobs have declared, each asked through its host's backend.

Which those are is in the journal, which is read, and not disturbed, whether a daemon runs or not.
"""

import sqlite3
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec

from rollmuxd.core.apply import apply
from rollmuxd.core.ids import HostId
from rollmuxd.core.model import OrderKind
from rollmuxd.core.state import State
from rollmuxd.daemon.hosts.channel import ChannelHub
from rollmuxd.daemon.journal import file
from rollmuxd.daemon.journal.file import JournalError, connect
from rollmuxd.daemon.settings import Settings
from rollmuxd.spi import Backend, ExaminesStates, Finding, PluginError, StateOrder, discovery


class Engines:
    """What is declared, host by host, and the drivers that can tell something of it."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._state = State()
        self._drivers: dict[str, Any] = {}
        #: why it is not known what is declared
        self.unknown: Finding | None = None
        path = settings.daemon.state_dir / "journal.sqlite3"
        if path.is_file():
            self._read(path)

    def _read(self, path: Path) -> None:
        try:
            with closing(connect(path, readonly=True)) as connection:
                connection.execute("BEGIN")  # one moment of it
                self._state = replayed(connection, path)
        except (JournalError, sqlite3.Error) as error:
            said = f"which engines jobs have declared is not known: {error}"
            self.unknown = Finding("engines", "warning", said, "rollmuxd journal check")

    async def examine(self, backend: Backend, host: HostId) -> list[Finding]:
        """What drivers say of the states of live jobs on this host."""
        findings = [] if self.unknown is None else [self.unknown]
        for order in self._orders(backend, host):
            driver = await self._driver(order.state.driver)
            if isinstance(driver, ExaminesStates):
                findings.extend(await driver.examine(order))
        return findings

    async def close(self) -> None:
        """Let go of the drivers."""
        for driver in self._drivers.values():
            if driver is not None:
                await driver.close()

    def _orders(self, backend: Backend, host: HostId) -> Iterator[StateOrder]:
        """Each state as if it were to be loaded: what a driver is asked about."""
        for kept in self._state.states.values():
            node, job = self._state.nodes[kept.node], self._state.jobs[kept.job]
            if node.host == host and job.live:
                session = self._state.sessions.get(job.session or "")
                yield StateOrder(
                    order="doctor",
                    kind=OrderKind.LOAD,
                    job=job.id,
                    run=job.run,
                    owner=job.owner,
                    name=job.spec.name,
                    pool=kept.pool,
                    node=node.id,
                    host=host,
                    gpus=tuple(node.gpus),
                    state=kept.spec,
                    ranks=job.spec.ranks,
                    warm=False,
                    pid=0 if session is None else session.pid,
                    started="" if session is None else session.started,
                    backend=backend,
                )

    async def _driver(self, name: str) -> Any:
        """A driver that is installed and takes its options; None: the daemon says what is wrong with it."""
        if name not in self._drivers:
            options: Mapping[str, Any] = self._settings.residency.get(name, {})
            try:
                self._drivers[name] = await discovery.find_residency(name).open(ChannelHub(), options)
            except (PluginError, ValueError):
                self._drivers[name] = None
        return self._drivers[name]


def replayed(connection: sqlite3.Connection, path: Path) -> State:
    """The state that a journal comes to, read without disturbing the daemon that writes it. Raises JournalError."""
    begin, base = file.base_of(connection, path)
    state = State() if base is None else msgspec.json.decode(base, type=State)
    for seq, body in file.rows_after(connection, begin, path):
        apply(state, file.decode(path, seq, body))
    return state
