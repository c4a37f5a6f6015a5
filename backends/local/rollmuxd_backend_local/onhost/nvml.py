"""As much of NVML as is needed, by ctypes, with the names of nvidia-ml-py (``pynvml``): for hosts that have not got it.

Layouts and numbers are those of NVIDIA's ``nvml.h``, which keeps them for ever.
"""

from __future__ import annotations

import ctypes
from typing import Any

NVML_ERROR_NOT_SUPPORTED = 3
NVML_ERROR_INSUFFICIENT_SIZE = 7
NVML_ERROR_LIBRARY_NOT_FOUND = 12
NVML_ERROR_FUNCTION_NOT_FOUND = 13

nvmlMemory_v2 = 0x02000028

_NOT_AVAILABLE = 2**64 - 1
_TEXT = 96


class NVMLError(Exception):
    """What NVML answered; ``value`` is its number."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.value = value

    def __str__(self) -> str:
        """NVML's own words."""
        if self.value == NVML_ERROR_LIBRARY_NOT_FOUND:
            return "NVML Shared Library Not Found"
        try:
            say = _function("nvmlErrorString")
        except NVMLError:
            return f"NVML error {self.value}"
        say.restype = ctypes.c_char_p
        said = say(self.value)
        return said.decode() if said else f"NVML error {self.value}"


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _MemoryV2(ctypes.Structure):
    _fields_ = [
        ("version", ctypes.c_uint),
        ("total", ctypes.c_ulonglong),
        ("reserved", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
    ]


class Process:
    """A process on a GPU; ``usedGpuMemory`` in bytes, None: not told."""

    def __init__(self, pid: int, used: int | None) -> None:
        self.pid = pid
        self.usedGpuMemory = used


_library: Any = None


def _function(name: str) -> Any:
    global _library  # noqa: PLW0603  # one library a process, as it is
    if _library is None:
        try:
            _library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise NVMLError(NVML_ERROR_LIBRARY_NOT_FOUND) from None
    try:
        return getattr(_library, name)
    except AttributeError:
        raise NVMLError(NVML_ERROR_FUNCTION_NOT_FOUND) from None


def _call(name: str, *arguments: Any) -> None:
    value = _function(name)(*arguments)
    if value:
        raise NVMLError(value)


def _text(name: str, *arguments: Any) -> str:
    buffer = ctypes.create_string_buffer(_TEXT)
    _call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
    return buffer.value.decode(errors="replace")


def nvmlInit() -> None:
    """Start using it."""
    _call("nvmlInit_v2")


def nvmlSystemGetDriverVersion() -> str:
    """As in ``580.65.06``."""
    return _text("nvmlSystemGetDriverVersion")


def nvmlDeviceGetCount() -> int:
    """How many GPUs there are."""
    count = ctypes.c_uint()
    _call("nvmlDeviceGetCount_v2", ctypes.byref(count))
    return count.value


def nvmlDeviceGetHandleByIndex(index: int) -> Any:
    """A GPU by its number."""
    handle = ctypes.c_void_p()
    _call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
    return handle


def nvmlDeviceGetUUID(handle: Any) -> str:
    """As in ``GPU-8f2c...``."""
    return _text("nvmlDeviceGetUUID", handle)


def nvmlDeviceGetName(handle: Any) -> str:
    """As in ``NVIDIA H200``."""
    return _text("nvmlDeviceGetName", handle)


def nvmlDeviceGetMemoryInfo(handle: Any, version: int | None = None) -> Any:
    """Bytes: total, free, used; and from version 2 on apart from the latter, reserved."""
    if version is None:
        memory: Any = _Memory()
        _call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
    else:
        memory = _MemoryV2(version=version)
        _call("nvmlDeviceGetMemoryInfo_v2", handle, ctypes.byref(memory))
    return memory


def nvmlDeviceGetMigMode(handle: Any) -> list[int]:
    """Whether the GPU is split into instances: now, and after its next reset."""
    now, pending = ctypes.c_uint(), ctypes.c_uint()
    _call("nvmlDeviceGetMigMode", handle, ctypes.byref(now), ctypes.byref(pending))
    return [now.value, pending.value]


def nvmlDeviceGetComputeRunningProcesses(handle: Any) -> list[Process]:
    """Processes with a CUDA context."""
    return _processes("nvmlDeviceGetComputeRunningProcesses", handle)


def nvmlDeviceGetGraphicsRunningProcesses(handle: Any) -> list[Process]:
    """Processes with a graphics context."""
    return _processes("nvmlDeviceGetGraphicsRunningProcesses", handle)


def _processes(name: str, handle: Any) -> list[Process]:
    # Of the second and the third version the layout is the same; drivers before 510 have the second only.
    try:
        listing = _function(f"{name}_v3")
    except NVMLError:
        listing = _function(f"{name}_v2")
    room = 0
    while True:
        count = ctypes.c_uint(room)
        found = (_Process * room)() if room else None
        value = listing(handle, ctypes.byref(count), found)
        if value == NVML_ERROR_INSUFFICIENT_SIZE:
            room = count.value * 2 + 5  # there may be more by the next call
            continue
        if value:
            raise NVMLError(value)
        return [
            Process(one.pid, None if one.usedGpuMemory == _NOT_AVAILABLE else one.usedGpuMemory)
            for one in (found[: count.value] if found is not None else ())
        ]
