"""The options of a mock host: ``[hosts.options]``, with ``[backends.mock]`` as defaults for all of them."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from rollmuxd.spi import HostConfig


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
    leftover_gb: Annotated[float, Meta(ge=0)] | None = None
    #: another one than last time: the machine was restarted, and its GPUs and RAM are empty; not given: made up once,
    #: and anew when this machine has really been restarted
    boot_id: str = ""
    #: file that GPUs and RAM are remembered in while no daemon runs; not given: ``memory.json`` in ``state_dir``;
    #: empty: forgotten with the process, as by a machine that is restarted whenever the daemon is
    memory: str = ""
    #: file of the witness, one JSON object a line, appended
    record: str = ""
    #: a dead process's bytes are freed; turn off where pids are another machine's or container's
    watch_pids: bool = True
    #: ``kill`` really ends processes (SIGKILL)
    owns_sessions: bool = False
    #: jobs' processes may be started here, as this user: whoever may register such a job may run anything
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
        return _mb(self.leftover_gb) if self.leftover_gb is not None else agreed_mb


def with_memory(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options for all hosts, where the daemon's ``state_dir`` has become the default of ``memory``."""
    given = dict(options)
    state_dir = given.pop("state_dir", None)
    return (
        given
        if state_dir is None
        else {
            "memory": str(Path(str(state_dir)) / "memory.json"),
            "logs": str(Path(str(state_dir)) / "logs"),
            **given,
        }
    )


def read(where: str, given: Mapping[str, Any]) -> MockOptions:
    """The options of one host; ``where`` names it in errors.

    Raises:
        ValueError: an unknown key, a value of another type or out of range.
    """
    known = MockOptions.__struct_fields__
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"{where}: options.{key} is not an option of backend mock; {hint}")
    for key, value in given.items():
        try:
            msgspec.convert({key: value}, MockOptions)
        except msgspec.ValidationError as error:
            needed = str(error).split(" - at ")[0]
            raise ValueError(f"{where}: options.{key} is {value!r}: {needed[0].lower()}{needed[1:]}") from None
    return msgspec.convert(dict(given), MockOptions)


def _mb(gb: float) -> int:
    return round(gb * 1000)
