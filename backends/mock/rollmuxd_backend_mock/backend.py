"""``MockBackend``: reaches hosts that do not exist."""

import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import anyio
import msgspec
from msgspec import Struct, field

from rollmuxd.spi import ContactLost, HostConfig, Inventory, Observation
from rollmuxd_backend_local import HostOptions
from rollmuxd_backend_local import options as option_tables
from rollmuxd_backend_local.backend import OnThisMachine
from rollmuxd_backend_local.onhost import ask
from rollmuxd_backend_mock import processes
from rollmuxd_backend_mock.machine import Hardware, Machine
from rollmuxd_backend_mock.options import MockOptions, with_memory
from rollmuxd_backend_mock.witness import Witness


class Memory(Struct):
    """What is in a memory file: the hardware of hosts, which does not forget when the daemon dies."""

    hosts: dict[str, Hardware] = field(default_factory=dict)
    #: what marks the processes that were started on them
    owner: str = field(default_factory=lambda: uuid.uuid4().hex)


class _Store:
    """A memory and its file, if it has one. Hosts that name the same file share it."""

    def __init__(self, path: Path | None, memory: Memory) -> None:
        self.path = path
        self.memory = memory

    def save(self) -> None:
        """Written beside and moved over, so that a kill at any instant leaves the old or the new one.

        Not synced: the daemon's death loses nothing that was written, and a dead machine's GPUs are empty anyway.
        """
        if self.path is not None:
            beside = self.path.with_name(f".{self.path.name}.new")
            beside.write_bytes(msgspec.json.encode(self.memory))
            beside.replace(self.path)


class MockHost:
    """What the backend and the residency driver share of one host."""

    def __init__(self, host: HostConfig, machine: Machine, store: _Store) -> None:
        self.machine = machine
        self.store = store
        #: marks the processes that were started here
        self.owner = f"{store.memory.owner}.{host.id}"
        #: one copy at a time between RAM and GPUs: it has the whole bandwidth, the others wait for their turn
        self.link = anyio.Lock(fast_acquire=True)
        #: orders being carried out by this process
        self.busy: set[str] = set()


class MockBackend(OnThisMachine[HostOptions]):
    """Mock hosts: see :class:`~rollmuxd_backend_mock.options.MockOptions` for what can be said of each.

    Their processes are real ones of this machine.
    """

    def __init__(self, hosts: Mapping[str, MockHost], witnesses: Sequence[Witness]) -> None:
        super().__init__({host: mock.machine.options.of_processes() for host, mock in hosts.items()}, "")
        self.hosts = hosts
        self._witnesses = witnesses

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the hosts as their options say; ``options`` are defaults for all of them.

        Raises:
            ValueError: an option that is not known or out of range, or a file that cannot be used; names host and key.
        """
        stores: dict[str, _Store] = {}
        witnesses: dict[str, Witness] = {}
        made: dict[str, MockHost] = {}
        defaults = with_memory(options)
        for host in hosts:
            said = option_tables.read(MockOptions, "mock", host.id, {**defaults, **host.options})
            store = _once(stores, host.id, "memory", said.memory, _open_store)
            witness = _once(witnesses, host.id, "record", said.record, Witness)
            made[host.id] = _make(host, said, store, witness)
        return cls(made, tuple(witnesses.values()))

    async def inventory(self, host: str) -> Inventory:
        """All GPUs of the host, whether the configuration names them or not."""
        return self.host(host).machine.inventory()

    async def observe(self, host: str) -> Observation:
        """The bytes on each GPU, strangers' included; first frees those whose process has died."""
        mock = self.host(host)
        return mock.machine.observe(self.strangers(mock))

    async def ask(self, host: str, question: Mapping[str, Any], limit_s: float, user: str = "") -> dict[str, Any]:
        """This machine, of the processes that were started on this host."""
        question = {**question, "owner": self.host(host).owner}
        if question["ask"] in ("start", "stop"):
            return await super().ask(host, question, limit_s, user)
        return ask.answer(question)  # no driver can hang here

    async def close(self) -> None:
        """Close the witness's files. Hardware and processes are left as they are. May be called twice."""
        for witness in self._witnesses:
            witness.close()

    # ---- for the driver, and for tests ----------------------------------------------------------------------------

    def host(self, host: str) -> MockHost:
        """One host. Raises ContactLost for one that this backend was not opened for."""
        if host not in self.hosts:
            raise ContactLost(f"host {host!r} is none of this backend's ({', '.join(self.hosts) or 'it has none'})")
        return self.hosts[host]

    def strangers(self, mock: MockHost) -> Sequence[tuple[str, int, str]]:
        """Processes of no job on a host: GPU, MB, process. There are none; the project's own tests add some."""
        return ()


def _make(host: HostConfig, said: MockOptions, store: _Store, witness: Witness) -> MockHost:
    hardware = store.memory.hosts.setdefault(host.id, Hardware(boot_id=uuid.uuid4().hex))
    alive = processes.alive if said.watch_pids else _trust
    machine = Machine(host, said, hardware, witness, changed=store.save, alive=alive)
    try:
        store.save()
    except OSError as error:
        raise ValueError(f"{host.id}: options.memory: {error}") from error
    return MockHost(host, machine, store)


def _trust(pid: int, started: str) -> bool:
    return True


def _open_store(path: Path | None) -> _Store:
    """The memory in a file. Raises ValueError when it is there and cannot be understood."""
    if path is None:
        return _Store(None, Memory())
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        return _Store(path, msgspec.json.decode(path.read_bytes(), type=Memory))
    except FileNotFoundError:
        return _Store(path, Memory())
    except msgspec.DecodeError as error:
        raise ValueError(f"{path} is no memory of mock hosts ({error}); delete it to start with empty GPUs") from error


def _once(made: dict[str, Any], host: str, key: str, path: str, make: Any) -> Any:
    """The store or witness of a path, made when it is first named, with the host and key in its errors."""
    name = str(Path(path).expanduser().absolute()) if path else ""
    if name not in made:
        try:
            made[name] = make(Path(name) if name else None)
        except (OSError, ValueError) as error:
            raise ValueError(f"{host}: options.{key}: {error}") from error
    return made[name]
