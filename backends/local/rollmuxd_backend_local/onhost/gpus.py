"""Looks at this machine's GPUs, through NVML."""

from __future__ import annotations

from typing import Any

from . import machine
from .made_up import MadeUp
from .nvml import GPU_IS_LOST, Nvml, NvmlError

_MB = 10**6
#: used memory that no process accounts for: contexts, and what drivers of different versions count differently
_UNEXPLAINED_MB = 300


def nvml(made_up: str = "") -> Nvml:
    """NVML, started; or what stands for it, made up in a file. Raises machine.Unknown."""
    try:
        return MadeUp(made_up) if made_up else Nvml()
    except NvmlError as error:
        raise machine.Unknown(why(error)) from error
    except OSError as error:  # a made-up file that is not there
        raise machine.Unknown(str(error)) from error


def look(nvml: Nvml) -> dict[str, Any]:
    """Every GPU, as it is now.

    Of each: ``index``, ``uuid``, ``type``, ``memory_mb``, ``used_mb``, ``mig`` (whether it is split into instances),
    ``processes`` (sentences), and ``trouble``: why it cannot be read, else empty. MB are 10^6 bytes.

    Raises:
        machine.Unknown: not even how many GPUs there are can be told.
    """
    try:
        count = nvml.count()
        driver = nvml.driver()
    except NvmlError as error:
        raise machine.Unknown(why(error)) from error
    return {"driver": driver, "gpus": [_gpu(nvml, index) for index in range(count)]}


_REMEDIES = {
    9: "the NVIDIA driver is not loaded; load it (modprobe nvidia), or see dmesg for why it is not",
    12: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found): install one; or start the container with "
    "--gpus all; or leave this host out",
    13: "the driver is too old: version 510 or newer is needed",
    15: "the GPU is lost (it has fallen off the bus); see dmesg for its Xid, and restart the machine",
    16: "the GPU must be reset (nvidia-smi --gpu-reset), or the machine restarted",
    18: "the driver was updated and the old one is still loaded; restart the machine, or reload the driver",
}


def why(error: NvmlError) -> str:
    """An error of NVML, with what to do about it."""
    return _REMEDIES.get(error.value, f"NVML says: {error}")


def _gpu(nvml: Nvml, index: int) -> dict[str, Any]:
    gpu: dict[str, Any] = {
        "index": index,
        "uuid": "",
        "type": "",
        "memory_mb": 0,
        "used_mb": 0,
        "mig": False,
        "processes": [],
        "trouble": "",
    }
    try:
        gpu["uuid"] = nvml.uuid(index)
        gpu["type"] = nvml.type(index)
        total, used = nvml.memory(index)
        gpu["memory_mb"] = total // _MB
        gpu["used_mb"] = min(-(-used // _MB), total // _MB)  # rounded up: unknown is never free
        gpu["mig"] = nvml.is_split(index)
        gpu["processes"] = _processes(nvml, index, gpu["used_mb"])
    except NvmlError as error:
        gpu["trouble"] = why(error)
    return gpu


def _processes(nvml: Nvml, index: int, used_mb: int) -> list[str]:
    """Processes on the GPU, for people: what counts is the memory. Those of other namespaces may be none of these."""
    found: dict[int, int | None] = {}
    told = True
    for kind in ("Compute", "Graphics"):
        try:
            for pid, used in nvml.processes(index, kind):
                found.setdefault(pid, None if used is None else -(-used // _MB))
        except NvmlError as error:
            if error.value == GPU_IS_LOST:
                raise
            told = False
    said = [_said(pid, mb) for pid, mb in sorted(found.items())]
    known_mb = sum(mb or 0 for mb in found.values())
    rest_mb = used_mb - known_mb
    # Of a process whose memory is not known, the rest is its; without one, a process is not visible from here.
    if rest_mb > _UNEXPLAINED_MB and None not in found.values():
        reason = "in another PID namespace" if machine.in_a_pid_namespace() else "not listed by the driver"
        said.append(f"{_gb(rest_mb)} of processes {reason if told else 'that may not be listed'}")
    return said


def _said(pid: int, mb: int | None) -> str:
    memory = "" if mb is None else f"{_gb(mb)}"
    if machine.in_a_pid_namespace():
        # NVML counts as the machine does. A process that has this number here may be another one.
        return f"pid {pid} as the machine counts, not this container{f' ({memory})' if memory else ''}"
    name, user = machine.process_name(pid), machine.process_user(pid)
    about = ", ".join(part for part in (user, memory) if part)
    return f"pid {pid}{f' {name}' if name else ''}{f' ({about})' if about else ''}"


def _gb(mb: int) -> str:
    return f"{mb / 1000:.1f} GB"
