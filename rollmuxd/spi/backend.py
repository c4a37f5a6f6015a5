"""How to reach a host: the Backend protocol, as a contract in prose.

One backend object serves all hosts of its kind for the daemon's life. Every method may be called at any time after
``open``, concurrently, repeatedly, and for a host that is away. None may block the event loop. The daemon puts a time
limit on every call by cancelling it. So a method must be cancellable at each of its awaits and must leave no half-open
thing behind. What a backend cannot know it must say it does not know (raise :class:`~rollmuxd.spi.errors.ContactLost`):
*unknown is never free*.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, Self, runtime_checkable

from msgspec import Struct

from rollmuxd.core.ids import GpuId, HostId, JobId, LaunchId
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.spi.errors import NotDone

#: of each of a command's outputs, what is kept: they are for answers, not for data
OUTPUT_KEPT: Final = 8 * 2**20


class HostConfig(Struct, frozen=True):
    """A host as the configuration gives it: the part that its backend understands."""

    id: HostId
    #: the host's own table ``[hosts.options]``; a backend refuses keys it does not know, by name
    options: Mapping[str, Any] = {}
    #: GPU ids (``host/gpu0``) that the configuration puts into nodes
    gpus: tuple[GpuId, ...] = ()
    gpu_mb: int = 0
    ram_mb: int = 0


class GpuInfo(Struct, frozen=True):
    """One GPU of an inventory."""

    gpu: GpuId
    type: str
    memory_mb: int
    #: what the GPU itself calls itself, wherever it is seen from; empty: it has no such name
    uuid: str = ""


class Inventory(Struct, frozen=True):
    """What a host has."""

    gpus: tuple[GpuInfo, ...]
    ram_mb: int


class Observation(Struct, frozen=True):
    """What a backend saw on a host at one moment: every GPU of the host that can be read, each exactly once."""

    gpus: tuple[GpuObservation, ...]
    #: another value than last time means that the machine was restarted in between
    boot_id: str
    #: of each GPU that has one: its own name (:attr:`GpuInfo.uuid`). The same one under two ids is refused
    uuids: Mapping[GpuId, str] = {}
    #: of GPUs that the configuration names and that cannot be read (lost, not there): why. Their nodes are lost, the
    #: others stay in use
    unread: Mapping[GpuId, str] = {}


class ProcessOrder(Struct, frozen=True):
    """A process that is to be started for a job."""

    #: the id of this start: told twice, it is started once
    launch: LaunchId
    job: JobId
    run: int
    owner: str
    user: str
    name: str
    argv: tuple[str, ...]
    cwd: str
    #: on top of what the backend gives every process: how it finds the daemon, and the key of its run
    env: Mapping[str, str]
    #: only grows: one that is older than another launch of the same job comes too late
    number: int = 0


class Process(Struct, frozen=True):
    """A process that a backend has started."""

    pid: int
    #: its start time, as its host's kernel gives it
    started: str


class Ran(Struct, frozen=True):
    """How a command came to its end."""

    #: of a command that a signal ended, minus the signal's number
    exit_code: int
    #: the first :data:`OUTPUT_KEPT` bytes
    stdout: bytes
    stderr: bytes

    def in_words(self) -> str:
        """For an error: the exit code, and the end of what it said on stderr, or of stdout."""
        text = " ".join((self.stderr or self.stdout).decode(errors="replace").split())[-600:]
        return f"exit code {self.exit_code}: {text or 'it said nothing'}"


@runtime_checkable
class Backend(Protocol):
    """Reaches hosts of one kind."""

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the backend for these hosts. Must not need any of them to be reachable.

        ``options`` is the table ``[backends.NAME]``. A class that has ``keeps_files = True`` finds ``state_dir`` in it
        as well. That is the path of an existing folder in the daemon's state directory, for what must outlive the
        daemon's process. Classes without it are not given the key.

        Raises:
            ValueError: an option that it does not know, or a value out of range; names host and key.
        """
        ...

    async def inventory(self, host: HostId) -> Inventory:
        """What the host has. Raises ContactLost when it cannot be reached."""
        ...

    async def observe(self, host: HostId) -> Observation:
        """What is on the host's GPUs *now*: never a cached answer.

        Raises:
            ContactLost: the host cannot be reached, or did not answer in a way that can be trusted. A GPU that
                cannot be read is in ``unread``, or an error of the whole call; never one with memory 0.
        """
        ...

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """End the process with this pid and start time, if it is the job's. Tells whether it was.

        Only the job's client has said which process it is, and it may be wrong: something else has to vouch for it. A
        process that the backend started is ended only for the job that it was started for. Of other processes, if it is
        configured to end such, only those of the user that stands for the job's owner. Must check the start time: the
        pid may be another process by now.
        """
        ...

    async def close(self) -> None:
        """Close connections. Processes on the hosts are left running. May be called twice."""
        ...


class Output(Struct, frozen=True):
    """A piece of what a launch has printed."""

    data: bytes
    #: where the next piece begins
    next: int


@runtime_checkable
class StartsProcesses(Backend, Protocol):
    """What a backend has besides, if it can start jobs' processes: only these jobs can be relaunched.

    What it starts outlives the daemon, as all jobs do; after a restart of the daemon it must know its own processes
    again. A launch stands for the process and all that this started in turn. Hosts that are configured not to run
    processes refuse by name and key.
    """

    def starts_on(self, host: HostId) -> bool:
        """Whether this host is configured to run jobs' processes."""
        ...

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        """Start a job's process, after ending what is left of the same job's other launches on this host.

        Told again with the same ``launch`` it starts nothing: it tells the process that there is.

        Raises:
            NotDone: it was not started for certain (no such program, not allowed here, a later launch of the job is
                there); says why.
            ContactLost: it is not known whether it was.
        """
        ...

    async def stop(self, host: HostId, launch: LaunchId) -> bool:
        """End all that is left of a launch, and return when nothing is. Tells whether there was anything.

        Raises ContactLost: it is not known whether all of it is gone.
        """
        ...

    async def alive(self, host: HostId, launch: LaunchId) -> bool:
        """Whether anything of a launch lives. Raises ContactLost where that is not known."""
        ...

    async def output(self, host: HostId, launch: LaunchId, after: int, limit: int) -> Output:
        """Up to ``limit`` bytes of a launch's output (both streams, as they came), from byte ``after`` on.

        Where ``after`` is negative, it counts from the end: -100 begins 100 bytes before it, or at the beginning.

        Nothing: there is nothing yet, or never was. Raises NotDone where nothing is kept (says so), ContactLost.
        """
        ...


@runtime_checkable
class RunsCommands(Backend, Protocol):
    """What a backend has besides, if it can run commands on its hosts for residency drivers.

    A driver has its order's backend (``order.backend``), and asks it by :func:`runs_commands`.
    """

    async def run(
        self,
        host: HostId,
        argv: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
        timeout_s: float = 60.0,
    ) -> Ran:
        """Run an argument vector (no shell reads it), and return when it has ended and closed its outputs.

        ``env`` is added to the environment of the backend's user there (on the daemon's own machine: to what
        :mod:`rollmuxd.spi.environment` lists). ``stdin`` is all that it can read. A command that takes longer than
        ``timeout_s`` (0.001 s or more), or whose call is cancelled, is ended with its process group.

        Raises:
            NotDone: it was not started, for certain (no such program, not allowed); says why.
            ContactLost: it may have run, to an end or in part: the line broke, or the time was over. Also where the
                host cannot be reached.
        """
        ...


@runtime_checkable
class ExchangesBytes(Backend, Protocol):
    """What a backend has besides, if it can talk to what listens on its hosts: engines on loopback.

    A driver has its order's backend (``order.backend``), and asks it by :func:`exchanges_bytes`;
    :func:`rollmuxd.spi.http.request` sends requests by it.
    """

    async def exchange(
        self, host: HostId, address: str, port: int, data: bytes, *, most: int, trust: str = ""
    ) -> bytes:
        """Send a request of HTTP/1.1 over a TCP connection of its own, and return what comes of its answer, as bytes.

        It asks the other side to close the connection. Whether an answer that the connection's end cut short is whole,
        is for the caller to see. The address is as the *host* understands it ("127.0.0.1" is the host itself). At most
        ``most`` bytes are taken in. Where ``trust`` has certificates (PEM), it is TLS, which trusts these besides the
        host's own. A call takes as long as the answer does; one that is cancelled closes the connection.

        Raises:
            NotDone: the host is there, and nothing listens at this address or it may not be reached; says why. Nothing
                was sent.
            ContactLost: the host cannot be reached, or does not answer; or what listens there is not trusted.
        """
        ...


class HostEnd(Struct, frozen=True):
    """When a host goes away, for certain, as things are."""

    #: seconds since 1970
    at: float
    #: nothing new begins on the host in so many seconds before
    drain_before_s: float
    #: what ends, as people know it: ``allocation 4711``
    what: str


@runtime_checkable
class EndsSometime(Backend, Protocol):
    """What a backend has besides, if its hosts are lent for a time."""

    async def ends_at(self, host: HostId) -> HostEnd | None:
        """When the host goes away; None: not at a known time. Asked once a minute, since an end may be put off.

        Raises ContactLost: it is not known now.
        """
        ...


class FoundHost(Struct, frozen=True):
    """A host that a backend has found by itself."""

    id: HostId
    #: of the host's own table ``[hosts.options]``
    options: dict[str, Any] = {}
    #: hosts of one kind have one number; those of the first kind are for rollouts, if there are several
    kind: int = 0


@runtime_checkable
class FindsHosts(Backend, Protocol):
    """What a backend has besides, if it can find hosts by itself: for ``rollmuxd init``."""

    @classmethod
    async def find(cls, where: str) -> tuple[FoundHost, ...]:
        """The hosts of one place (a Slurm allocation, for one); empty: of the place where this process is.

        Raises ValueError where no place is said, and ContactLost.
        """
        ...


class Finding(Struct, frozen=True):
    """What a look at one thing of a host came to."""

    #: what was looked at: "driver", "clock", "box1/gpu0"
    what: str
    level: Literal["good", "warning", "bad"]
    said: str
    #: what to do about it
    remedy: str = ""


@runtime_checkable
class ChecksHosts(Backend, Protocol):
    """What a backend has besides, if it can look at a host as an operator would: for ``rollmuxd doctor``."""

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """What is good and what is not, in the order in which one would look. A host that is away is a finding."""
        ...


def runs_commands(backend: Backend) -> RunsCommands:
    """The same backend, as one that runs commands. Raises NotDone, saying so, where it cannot."""
    if isinstance(backend, RunsCommands):
        return backend
    raise NotDone(f"{type(backend).__name__} runs no commands; this residency driver needs a backend that does")


def exchanges_bytes(backend: Backend) -> ExchangesBytes:
    """The same backend, as one that exchanges bytes. Raises NotDone, saying so, where it cannot."""
    if isinstance(backend, ExchangesBytes):
        return backend
    raise NotDone(f"{type(backend).__name__} exchanges no bytes; this residency driver needs a backend that does")
