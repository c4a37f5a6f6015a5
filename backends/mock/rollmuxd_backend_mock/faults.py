"""Breaking a mock host, call by call: from Python (:class:`Faults`) or by a file (option ``faults``).

The file is JSON and read at each call, so it can be changed while a daemon runs; write it atomically (``write``
does). No file: no faults. A file that cannot be understood makes every call fail, so that it is noticed.

    {"faults":    [{"do": "lie", "method": "park", "host": "h1", "job": "math-7b", "times": 1}],
     "strangers": [{"gpu": "h1/gpu0", "mb": 30000, "process": "pid 4711 python"}],
     "given_back": [{"job": "math-7b", "gpu": "h1/gpu3"}]}
"""

import itertools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

import msgspec
from msgspec import Meta, Struct

from rollmuxd.spi import ContactLost, StateOrder

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
    - ``lie``: returns as if done, nothing was. ``observe`` shows every GPU clear, ``probe`` says done.
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
