"""Looks at this machine's GPUs, through NVML or what looks like it."""

from __future__ import annotations

import os
from typing import Any

from . import machine

_MB = 10**6
#: used memory that no process accounts for: contexts, and what drivers of different versions count differently
_UNEXPLAINED_MB = 300


def binding(made_up: str = "") -> Any:
    """The module to look with: nvidia-ml-py where it is installed, else our own."""
    if made_up:
        from .made_up import MadeUp

        return MadeUp(made_up)
    try:
        import pynvml

        pynvml.nvmlMemory_v2  # noqa: B018  # a namesake, or one that is too old, has not got it
    except (ImportError, AttributeError):
        from . import nvml

        return nvml
    return pynvml


def look(nvml: Any) -> dict[str, Any]:
    """Every GPU, as it is now; NVML must have been started (:func:`start`).

    Of each: ``index``, ``uuid``, ``type``, ``memory_mb``, ``used_mb``, ``mig`` (whether it is split into instances),
    ``processes`` (sentences), and ``trouble``: why it cannot be read, else empty. MB are 10^6 bytes.

    Raises:
        machine.Unknown: not even how many GPUs there are can be told.
    """
    try:
        count = nvml.nvmlDeviceGetCount()
        driver = _text(nvml.nvmlSystemGetDriverVersion())
    except nvml.NVMLError as error:
        raise machine.Unknown(why(error)) from error
    return {"driver": driver, "gpus": [_gpu(nvml, index) for index in range(count)]}


def start(nvml: Any) -> None:
    """Start NVML. Raises machine.Unknown."""
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        raise machine.Unknown(why(error)) from error
    except OSError as error:  # a made-up file that is not there
        raise machine.Unknown(str(error)) from error


_REMEDIES = {
    9: "the NVIDIA driver is not loaded; load it (modprobe nvidia), or see dmesg for why it is not",
    12: "there is no NVIDIA driver here (libnvidia-ml.so.1 is not found): install one; or start the container with "
    "--gpus all; or leave this host out",
    15: "the GPU is lost (it has fallen off the bus); see dmesg for its Xid, and restart the machine",
    16: "the GPU must be reset (nvidia-smi --gpu-reset), or the machine restarted",
    18: "the driver was updated and the old one is still loaded; restart the machine, or reload the driver",
}


def why(error: Any) -> str:
    """An error of NVML, with what to do about it."""
    remedy = _REMEDIES.get(getattr(error, "value", 0))
    return remedy or f"NVML says: {error}"


def _gpu(nvml: Any, index: int) -> dict[str, Any]:
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
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
        gpu["uuid"] = _text(nvml.nvmlDeviceGetUUID(handle))
        gpu["type"] = _text(nvml.nvmlDeviceGetName(handle))
        total, used = _memory(nvml, handle)
        gpu["memory_mb"] = total // _MB
        gpu["used_mb"] = min(-(-used // _MB), total // _MB)  # rounded up: unknown is never free
        gpu["mig"] = _is_split(nvml, handle)
        gpu["processes"] = _processes(nvml, handle, gpu["used_mb"])
    except nvml.NVMLError as error:
        gpu["trouble"] = why(error)
    return gpu


def _memory(nvml: Any, handle: Any) -> tuple[int, int]:
    """Total and used bytes. What the driver keeps for itself on an idle GPU is not used, where it says how much."""
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_FUNCTION_NOT_FOUND, nvml.NVML_ERROR_NOT_SUPPORTED):
            raise
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    return int(memory.total), int(memory.used)


def _is_split(nvml: Any, handle: Any) -> bool:
    try:
        return bool(nvml.nvmlDeviceGetMigMode(handle)[0])
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            return False  # most GPUs cannot be split
        raise


def _processes(nvml: Any, handle: Any, used_mb: int) -> list[str]:
    """Processes on the GPU, for people: what counts is the memory. Those of other namespaces may be none of these."""
    found: dict[int, int | None] = {}
    told = True
    for listing in (nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetGraphicsRunningProcesses):
        try:
            for one in listing(handle):
                found.setdefault(one.pid, None if one.usedGpuMemory is None else -(-one.usedGpuMemory // _MB))
        except nvml.NVMLError as error:
            if error.value == getattr(nvml, "NVML_ERROR_GPU_IS_LOST", 15):
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


def _text(said: Any) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else str(said)


def environment() -> dict[str, str]:
    """Variables that change what CUDA programs see, where they are set."""
    return {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER") if name in os.environ}
