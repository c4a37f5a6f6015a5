"""A mock backend whose calls go wrong: from Python (:class:`Faults`), or by a file (option ``faults``).

As a program, ``faulty_mock.py daemon run ...`` is ``rollmuxd daemon run`` with this in the mock backend's place.

The file is JSON and read at each call, so it can be changed while a daemon runs; write it atomically (``write``
does). No file: no faults. A file that cannot be understood makes every call fail, so that it is noticed.

    {"faults":    [{"do": "lie", "method": "park", "host": "h1", "job": "math-7b", "times": 1}],
     "strangers": [{"gpu": "h1/gpu0", "mb": 30000, "process": "pid 4711 python"}],
     "given_back": [{"job": "math-7b", "gpu": "h1/gpu3"}]}
"""

import itertools
import os
import uuid
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias

import anyio
import msgspec
from made_up_mock import MadeUpResidency
from msgspec import Meta, Struct, structs

import rollmuxd_backend_mock
from rollmuxd.spi import ContactLost, GpuObservation, NotDone, Observation, Probed, Process, StateOrder
from rollmuxd_backend_mock import MockBackend
from rollmuxd_backend_mock.residency import mock_of

Do: TypeAlias = Literal["fail", "lose", "lose_after", "hang", "lie", "delay"]
Method: TypeAlias = Literal[
    "*",
    "inventory",
    "observe",
    "kill",
    "start",
    "stop",
    "alive",
    "run",
    "connect",
    "load",
    "park",
    "discard",
    "probe",
]


class Fault(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One thing that goes wrong, for the calls that match. The first match counts.

    - ``fail``: NotDone (ContactLost where a host is looked at, which knows no other error); nothing was done.
    - ``lose``: ContactLost; nothing was done. ``lose_after``: it was done, and ContactLost.
    - ``hang``: never comes back, until cancelled; nothing was done.
    - ``lie``: returns as if done, nothing was. ``observe`` shows every GPU clean, ``probe`` says done.
    - ``delay``: nothing but ``delay_s``, which comes before whatever else the fault does.
    """

    do: Do
    method: Method = "*"
    host: str = "*"
    #: the job's name or id; a fault that names one does not touch calls that are about no job
    job: str = "*"
    #: calls that it spoils; 0: all. Counts survive a restart where the host has a ``memory``
    times: Annotated[int, Meta(ge=0)] = 0
    #: matching calls that it lets pass first
    skip: Annotated[int, Meta(ge=0)] = 0
    delay_s: Annotated[float, Meta(ge=0)] = 0.0
    message: str = ""
    #: tells two equal faults apart: another id is counted anew
    id: str = ""

    def matches(self, method: str, host: str, order: StateOrder | None) -> bool:
        """Whether a call is of those that it spoils."""
        about = ("*",) if order is None else ("*", order.name, order.job)
        return self.method in ("*", method) and self.host in ("*", host) and self.job in about

    def text(self, method: str, host: str) -> str:
        """What the error says."""
        return self.message or f"{method} on {host}: fault {self.do} was injected"


class Stranger(Struct, frozen=True, forbid_unknown_fields=True):
    """A process of no job that uses a GPU."""

    gpu: str
    mb: int
    process: str = "pid 4711 stranger"


class GivenBack(Struct, frozen=True, forbid_unknown_fields=True):
    """A job has freed its bytes on a GPU by itself, as a shrunk tail does. By name or id."""

    job: str
    gpu: str


class Script(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a faults file holds."""

    faults: tuple[Fault, ...] = ()
    strangers: tuple[Stranger, ...] = ()
    given_back: tuple[GivenBack, ...] = ()


_NOTHING: Final = Script()


class Faults:
    """Faults of a backend that are set from Python; ``backend.faults`` is one."""

    def __init__(self) -> None:
        self._faults: list[Fault] = []
        self._strangers: dict[str, Stranger] = {}
        self._ids = itertools.count()

    def add(
        self,
        do: Do,
        method: Method = "*",
        *,
        host: str = "*",
        job: str = "*",
        times: int = 0,
        skip: int = 0,
        delay_s: float = 0.0,
        message: str = "",
    ) -> Fault:
        """Add a fault; those added earlier come first. The fault is for :meth:`remove`."""
        mark = f"python-{os.getpid()}-{next(self._ids)}"
        fault = Fault(do, method, host, job, times, skip, delay_s, message, id=mark)
        self._faults.append(fault)
        return fault

    def remove(self, fault: Fault) -> None:
        """Take one back."""
        self._faults.remove(fault)

    def clear(self) -> None:
        """Take all faults and strangers back."""
        self._faults.clear()
        self._strangers.clear()

    def occupy(self, gpu: str, mb: int, process: str = "pid 4711 stranger") -> None:
        """A stranger comes onto a GPU."""
        self._strangers[gpu] = Stranger(gpu, mb, process)

    def vacate(self, gpu: str) -> None:
        """The stranger leaves."""
        self._strangers.pop(gpu, None)

    @property
    def script(self) -> Script:
        """What is set now."""
        return Script(faults=tuple(self._faults), strangers=tuple(self._strangers.values()))


def write(path: str | os.PathLike[str], script: Script) -> None:
    """Put a faults file in place, at once: a reader sees the old one or the new one."""
    path = Path(path)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_bytes(msgspec.json.encode(script))
    beside.replace(path)


def read(path: str) -> Script:
    """What a faults file says now; nothing, where there is none.

    Raises:
        ContactLost: it cannot be read or understood.
    """
    if not path:
        return _NOTHING
    try:
        return msgspec.json.decode(Path(path).expanduser().read_bytes(), type=Script)
    except FileNotFoundError:
        return _NOTHING
    except (OSError, msgspec.DecodeError) as error:
        raise ContactLost(f"the faults file {path} cannot be understood: {error}") from error


def choose(
    faults: Iterable[Fault], method: str, host: str, order: StateOrder | None, fired: Mapping[str, int]
) -> tuple[Fault | None, tuple[str, ...]]:
    """The fault that this call meets, and the keys of the counts that it raises by one."""
    raised: list[str] = []
    for fault in faults:
        if not fault.matches(method, host, order):
            continue
        key = msgspec.json.encode(fault).decode()
        count = fired.get(key, 0)
        if fault.times and count >= fault.skip + fault.times:
            continue
        if fault.times or fault.skip:
            raised.append(key)
        if count >= fault.skip:
            return fault, tuple(raised)
    return None, tuple(raised)


def reboot(machine) -> None:
    """The machine was restarted: GPUs and RAM are empty, and its boot id is another one."""
    machine.hardware.states.clear()
    machine.hardware.done.clear()
    machine.hardware.boot_id = uuid.uuid4().hex
    machine.witness.write("boot", machine.id, boot_id=machine.hardware.boot_id)
    machine._changed()


def give_back(machine, job: str, gpu: str) -> None:
    """The job (name or id) frees its bytes on one GPU by itself, as a shrunk tail does."""
    for state in machine.hardware.states.values():
        if job in (state.job, state.name) and state.gpus.get(gpu):
            del state.gpus[gpu]
            machine._tell("given_back", state, (gpu,))
            machine._report_clean((gpu,))
            machine._changed()


class FaultyMock(MockBackend):
    """The mock backend, each call of which may meet a fault."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.faults = Faults()
        #: the faults file of each host
        self._files: dict[str, str] = {}
        self._fired: dict[str, int] = {}

    @classmethod
    async def open(cls, hosts, options):
        files, plain = {}, []
        for host in hosts:
            own = dict(host.options)
            files[host.id] = own.pop("faults", "")
            plain.append(structs.replace(host, options=own))
            try:
                read(files[host.id])
            except ContactLost as error:
                raise ValueError(f"{host.id}: options.faults: {error}") from error
        made = await super().open(plain, options)
        made._files = files
        for mock in made.hosts.values():
            if (path := fired_of(mock.store.path)) is not None and path.exists():
                made._fired.update(msgspec.json.decode(path.read_bytes()))
        return made

    def strangers(self, mock):
        both = (self.faults.script, read(self._files[mock.machine.id]))
        return tuple((one.gpu, one.mb, one.process) for script in both for one in script.strangers)

    def choose(self, method: str, mock, order: StateOrder | None = None) -> Fault | None:
        """The fault that a call meets, if any; counts it. Raises ContactLost for a file that cannot be understood."""
        script = read(self._files[mock.machine.id])
        for freed in script.given_back:
            give_back(mock.machine, freed.job, freed.gpu)
        fault, counted = choose(
            (*self.faults.script.faults, *script.faults), method, mock.machine.id, order, self._fired
        )
        for key in counted:
            self._fired[key] = self._fired.get(key, 0) + 1
        if counted and (path := fired_of(mock.store.path)) is not None:
            beside = path.with_name(f".{path.name}.new")
            beside.write_bytes(msgspec.json.encode(self._fired))
            beside.replace(path)
        return fault

    async def _meet(self, method: str, host: str, failed: Callable[[str], Exception] = ContactLost) -> str:
        """What a call's fault does to its answer ("": nothing). Most calls know one error only: contact lost."""
        fault = self.choose(method, self.host(host))
        if fault is None:
            return ""
        await anyio.sleep(fault.delay_s)
        if fault.do == "hang":
            await anyio.sleep_forever()
        if fault.do == "fail":
            raise failed(fault.text(method, host))
        if fault.do == "lose" or (fault.do == "lose_after" and failed is ContactLost):
            raise ContactLost(fault.text(method, host))
        return fault.do

    async def inventory(self, host):
        await self._meet("inventory", host)
        return await super().inventory(host)

    async def observe(self, host):
        do = await self._meet("observe", host)
        seen = await super().observe(host)
        if do != "lie":
            return seen
        return Observation(
            gpus=tuple(GpuObservation(gpu=one.gpu, used_mb=0) for one in seen.gpus), boot_id=seen.boot_id
        )

    async def kill(self, host, *given):
        return await self._meet("kill", host) == "lie" or await super().kill(host, *given)

    async def run(self, host, argv, **more):
        do = await self._meet("run", host, NotDone)
        ran = await super().run(host, argv, **more)
        if do == "lose_after":
            raise ContactLost(f"run on {host}: fault lose_after was injected")
        return ran

    async def exchange(self, host, *given, **more):
        await self._meet("exchange", host, NotDone)
        return await super().exchange(host, *given, **more)

    async def start(self, host, order):
        do = await self._meet("start", host, NotDone) if self.starts_on(host) else ""
        if do == "lie":
            return Process(pid=2**22, started="0")
        process = await super().start(host, order)
        if do == "lose_after":
            raise ContactLost(f"start on {host}: fault lose_after was injected")
        return process

    async def stop(self, host, launch):
        return await self._meet("stop", host) == "lie" or await super().stop(host, launch)

    async def alive(self, host, launch):
        await self._meet("alive", host)
        return await super().alive(host, launch)


class FaultyResidency(MadeUpResidency):
    """The mock's driver, each order of which may meet a fault of its backend."""

    async def probe(self, order):
        do = await self._meet("probe", order)
        return Probed(known=True, done=True) if do == "lie" else await super().probe(order)

    async def _perform(self, method, order, do):
        met = await self._meet(method, order)
        if met == "lie":
            return
        await super()._perform(method, order, do)
        if met == "lose_after":
            raise ContactLost(f"{method} on {order.host}: fault lose_after was injected")

    async def _meet(self, method: str, order: StateOrder) -> str:
        backend = mock_of(order)
        if not isinstance(backend, FaultyMock):
            return ""
        fault = backend.choose(method, backend.host(order.host), order)
        if fault is None:
            return ""
        await anyio.sleep(fault.delay_s)
        if fault.do == "hang":
            await anyio.sleep_forever()
        if fault.do == "fail" and method != "probe":
            raise NotDone(fault.text(method, order.host))
        if fault.do in ("lose", "fail") or (fault.do == "lose_after" and method == "probe"):
            raise ContactLost(fault.text(method, order.host))
        return fault.do


def fired_of(memory: Path | None) -> Path | None:
    """The file beside a memory file that counts the faults that were met."""
    return None if memory is None else memory.with_suffix(".fired")


if __name__ == "__main__":
    from rollmuxd.cli.main import main

    rollmuxd_backend_mock.MockBackend = FaultyMock
    rollmuxd_backend_mock.MockResidency = FaultyResidency
    main()
