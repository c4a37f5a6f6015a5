"""How to reach a host: the Backend protocol, as a contract in prose.

One backend object serves all hosts of its kind for the daemon's life. Every method may be called at any time after
``open``, concurrently, more than once, and for a host that is away; none may block the event loop. The daemon puts
a time limit on every call by cancelling it, so a method must be cancellable at each of its awaits and must leave no
half-open thing behind. What a backend cannot know it must say it does not know (raise
:class:`~rollmuxd.spi.errors.ContactLost`): *unknown is never free*.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, Self, runtime_checkable

from msgspec import Struct

from rollmuxd.core.inputs import GpuSight
from rollmuxd.core.model import GpuId, HostId, JobId, LaunchId


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


class Inventory(Struct, frozen=True):
    """What a host has."""

    gpus: tuple[GpuInfo, ...]
    ram_mb: int


class Sight(Struct, frozen=True):
    """What a backend saw on a host at one moment: every GPU of the host, each exactly once."""

    gpus: tuple[GpuSight, ...]
    #: another value than last time means that the machine was restarted in between
    boot_id: str


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


@runtime_checkable
class Backend(Protocol):
    """Reaches hosts of one kind."""

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the backend for these hosts. Must not need any of them to be reachable.

        ``options`` is the table ``[backends.NAME]``. A class that has ``keeps_files = True`` finds ``state_dir`` in it
        as well: the path of a folder of its own in the daemon's state directory, there already, for what must outlive
        the daemon's process. Classes without it are not given the key.

        Raises:
            ValueError: an option that it does not know, or a value out of range; names host and key.
        """
        ...

    async def inventory(self, host: HostId) -> Inventory:
        """What the host has. Raises ContactLost when it cannot be reached."""
        ...

    async def observe(self, host: HostId) -> Sight:
        """What is on the host's GPUs *now*: never a cached answer.

        Raises:
            ContactLost: the host cannot be reached, or did not answer in a way that can be trusted. A GPU that
                cannot be read is an error of the whole call, never a GPU left out or with memory 0.
        """
        ...

    async def kill(self, host: HostId, pid: int, started: str) -> bool:
        """End the process with this pid and start time, where the backend owns it. Tells whether it was its to end.

        Must check the start time: the pid may be another process by now.
        """
        ...

    async def close(self) -> None:
        """Let go of connections. Processes on the hosts are left running. May be called twice."""
        ...


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
            ContactLost: nobody knows whether it was.
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
