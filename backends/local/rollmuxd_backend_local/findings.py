"""What ``rollmuxd doctor`` says of a host, from what the host says of itself."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from rollmuxd.spi import Finding, GpuId, HostId

#: pinned memory below this share of RAM is worth a word
_PINNED_SHARE: Final = 0.5
_CLOCK_S: Final = 2.0
#: data loaders and NCCL keep their buffers there
_SHM_MB: Final = 1_000

#: what to do about memory that cannot be pinned, processes that cannot be seen, and a clock that is wrong
_PIN: Final = (
    "CUDA's own pinned memory does not count; for what does (RDMA, io_uring): memlock unlimited in "
    "/etc/security/limits.conf, LimitMEMLOCK=infinity in a systemd unit, --ulimit memlock=-1 in a container"
)
_SEE: Final = (
    "GPUs are judged by their used memory; whose it is cannot be told. Start the container with --pid host to see"
)
_SET: Final = (
    "leases do not depend on it, but logs of both machines cannot be laid beside each other; run an NTP client there "
    "(chrony, systemd-timesyncd)"
)


def of(
    about: Mapping[str, Any], configured: Sequence[GpuId], host: HostId, between: tuple[float, float]
) -> tuple[Finding, ...]:
    """Findings about driver, GPUs, RAM, limits, clock and Python, in the order in which one would look.

    ``between``: when it was asked and had answered, by our own clock.
    """
    return (
        *_gpus(about, configured, host),
        *_machine(about["machine"]),
        _clock(about["machine"]["time"], between),
    )


def _gpus(about: Mapping[str, Any], configured: Sequence[GpuId], host: HostId) -> Iterator[Finding]:
    if "no_gpus" in about:
        yield Finding("driver", "bad", "the GPUs cannot be looked at", about["no_gpus"])
        return
    looked = about["gpus"]
    yield Finding("driver", "good", f"NVIDIA driver {looked['driver']}")
    there = {f"{host}/gpu{one['index']}": one for one in looked["gpus"]}
    for gpu in configured:
        if gpu not in there:
            said = f"it is in the configuration, and the host has {len(there)} GPUs"
            yield Finding(gpu, "bad", said, "take it out of [[hosts.nodes]], or see dmesg for why it is missing")
    for gpu, one in there.items():
        yield _gpu(gpu, one, used_here=gpu in configured or not configured)


def _gpu(gpu: GpuId, one: Mapping[str, Any], *, used_here: bool) -> Finding:
    level: Literal["bad", "warning"] = "bad" if used_here else "warning"
    if one["trouble"]:
        return Finding(gpu, level, "it cannot be read", one["trouble"])
    if one["mig"]:
        remedy = f"nvidia-smi -i {one['index']} -mig 0, or leave it out of the configuration"
        return Finding(gpu, level, "it is split into MIG instances, which are not shared", remedy)
    used = f"{one['type']}, {one['memory_mb'] / 1000:.1f} GB, {one['uuid']}; {one['used_mb'] / 1000:.1f} GB used"
    if one["processes"]:
        remedy = "if these are not jobs of rollmuxd, the node is occupied until they have ended"
        return Finding(gpu, "warning", f"{used} by {'; '.join(one['processes'])}", remedy)
    return Finding(gpu, "good", used)


def _machine(machine: Mapping[str, Any]) -> Iterator[Finding]:
    total_mb, available_mb = machine["ram"]["total_mb"], machine["ram"]["available_mb"]
    yield Finding("RAM", "good", f"{total_mb / 1000:.0f} GB, {available_mb / 1000:.0f} GB of it available")
    limit = machine["memlock_mb"]
    if 0 <= limit < total_mb * _PINNED_SHARE:
        said = f"processes of {machine['user']} may lock {limit} MB of RAM (ulimit -l)"
        yield Finding("pinned memory", "warning", said, _PIN)
    else:
        said = "no limit" if limit < 0 else f"up to {limit / 1000:.0f} GB"
        yield Finding("pinned memory", "good", f"{said} for processes of {machine['user']}")
    if 0 <= machine["shm_mb"] < _SHM_MB:
        remedy = "data loaders and NCCL need more; start the container with --shm-size 8g or --ipc host"
        yield Finding("shared memory", "warning", f"{machine['shm_mb']} MB in /dev/shm", remedy)
    yield Finding("python", "good", f"{machine['python']}, Linux {machine['kernel']}")
    if machine["pid_namespace"]:
        yield Finding("processes", "warning", "this is a container: its process numbers are not the machine's", _SEE)


def _clock(theirs: float, between: tuple[float, float]) -> Finding:
    asked, answered = between
    off_s = max(asked - theirs, theirs - answered, 0.0)
    if off_s < _CLOCK_S:
        return Finding("clock", "good", "as here")
    return Finding("clock", "warning", f"{off_s:.0f} s {'behind' if theirs < asked else 'ahead'}", _SET)
