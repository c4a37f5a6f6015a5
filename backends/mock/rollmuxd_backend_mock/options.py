"""The options of a mock host: ``[hosts.options]``, with ``[backends.mock]`` as defaults for all of them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct

from rollmuxd.spi import HostConfig
from rollmuxd_backend_local import HostOptions


class MockOptions(Struct, frozen=True, kw_only=True):
    """What can be said of a mock host. GB are 1000 MB."""

    #: GPUs of the host besides those that the configuration puts into nodes: gpu0 to gpu<n-1>
    gpus: Annotated[int, Meta(ge=0, le=1024)] = 0
    gpu_type: str = "mock"
    #: memory of each GPU; not given: what the configuration says, else 80
    gpu_gb: Annotated[float, Meta(gt=0)] | None = None
    #: host RAM; not given: the configured budget for parked states, else 512
    ram_gb: Annotated[float, Meta(ge=0)] | None = None
    #: between host and GPUs, for all GPUs of the host together; copies take their turns
    copy_gbps: Annotated[float, Meta(gt=0)] = 20.0
    #: seconds that a load takes when nothing of the state is parked on the host
    cold_s: Annotated[float, Meta(ge=0)] = 0.0
    #: what really stays on each GPU after parking; not given: what the job agreed to
    residual_gb: Annotated[float, Meta(ge=0)] | None = None
    #: file that GPUs and RAM are remembered in while no daemon runs; not given: ``memory.json`` in ``state_dir``.
    #: Empty: forgotten with the process, like a machine that restarts whenever the daemon does
    memory: str = ""
    #: file of the witness, one JSON object a line, appended
    record: str = ""
    #: a dead process's bytes are freed; turn off where pids are another machine's or container's
    watch_pids: bool = True
    #: ``kill`` really ends processes (SIGKILL)
    owns_sessions: bool = False
    #: jobs' processes may be started here, as this user: a user that may register such a job may run anything
    starts_processes: bool = False
    #: folder for what these write; not given: ``logs`` in ``state_dir``; empty: it is thrown away
    logs: str = ""

    def gpu_mb(self, host: HostConfig) -> int:
        """Memory of each GPU of this host, in MB."""
        return _mb(self.gpu_gb) if self.gpu_gb is not None else host.gpu_mb or 80_000

    def ram_mb(self, host: HostConfig) -> int:
        """RAM of this host, in MB."""
        return _mb(self.ram_gb) if self.ram_gb is not None else host.ram_mb or 512_000

    def stays_mb(self, agreed_mb: int) -> int:
        """What stays on each GPU after parking, in MB."""
        return _mb(self.residual_gb) if self.residual_gb is not None else agreed_mb

    def of_processes(self) -> HostOptions:
        """What there is to say of jobs' processes."""
        return HostOptions(owns_sessions=self.owns_sessions, starts_processes=self.starts_processes, logs=self.logs)


def with_memory(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The options for all hosts, where the daemon's ``state_dir`` has become the default of ``memory``."""
    given = dict(defaults)
    state_dir = given.pop("state_dir", None)
    if state_dir is None:
        return given
    return {"memory": str(Path(str(state_dir)) / "memory.json"), "logs": str(Path(str(state_dir)) / "logs")} | given


def _mb(gb: float) -> int:
    return round(gb * 1000)
