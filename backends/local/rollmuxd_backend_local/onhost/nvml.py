"""As much of NVML as is needed, by ctypes: a host has the driver's library and Python, and nothing else.

Layouts and numbers are those of NVIDIA's ``nvml.h``, which keeps them for ever. Drivers from 510 on have all of it.
"""

from __future__ import annotations

import ctypes
from typing import Any

NOT_SUPPORTED = 3
LIBRARY_NOT_FOUND = 12
FUNCTION_NOT_FOUND = 13
GPU_IS_LOST = 15
_INSUFFICIENT_SIZE = 7
_MEMORY_V2 = 0x02000028
_NOT_AVAILABLE = 2**64 - 1
_TEXT = 96


class NvmlError(Exception):
    """What NVML answered; ``value`` is its number."""

    def __init__(self, value: int, said: str = "") -> None:
        super().__init__(said or f"NVML error {value}")
        self.value = value


class _Memory(ctypes.Structure):
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
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The library, started. A GPU is named by its index. Everything raises NvmlError."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            raise NvmlError(LIBRARY_NOT_FOUND) from None
        self._call("nvmlInit_v2")

    def driver(self) -> str:
        """As in ``580.65.06``."""
        return self._text("nvmlSystemGetDriverVersion")

    def count(self) -> int:
        """How many GPUs there are."""
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        return count.value

    def uuid(self, gpu: int) -> str:
        """As in ``GPU-8f2c...``."""
        return self._text("nvmlDeviceGetUUID", self._handle(gpu))

    def type(self, gpu: int) -> str:
        """As in ``NVIDIA H200``."""
        return self._text("nvmlDeviceGetName", self._handle(gpu))

    def memory(self, gpu: int) -> tuple[int, int]:
        """Total and used bytes. What the driver keeps for itself on an idle GPU is not used."""
        memory = _Memory(version=_MEMORY_V2)
        self._call("nvmlDeviceGetMemoryInfo_v2", self._handle(gpu), ctypes.byref(memory))
        return int(memory.total), int(memory.used)

    def is_split(self, gpu: int) -> bool:
        """Whether it is split into MIG instances."""
        now, pending = ctypes.c_uint(), ctypes.c_uint()
        try:
            self._call("nvmlDeviceGetMigMode", self._handle(gpu), ctypes.byref(now), ctypes.byref(pending))
        except NvmlError as error:
            if error.value == NOT_SUPPORTED:
                return False  # most GPUs cannot be split
            raise
        return bool(now.value)

    def processes(self, gpu: int, kind: str) -> list[tuple[int, int | None]]:
        """Pid and bytes (None: not told) of those with a context of a kind, ``Compute`` or ``Graphics``."""
        handle, room = self._handle(gpu), 0
        while True:
            count, found = ctypes.c_uint(room), (_Process * room)()
            try:
                self._call(f"nvmlDeviceGet{kind}RunningProcesses_v3", handle, ctypes.byref(count), found)
            except NvmlError as error:
                if error.value != _INSUFFICIENT_SIZE:
                    raise
                room = count.value * 2 + 5  # there may be more by the next call
            else:
                return [(one.pid, None if one.used == _NOT_AVAILABLE else one.used) for one in found[: count.value]]

    def _handle(self, gpu: int) -> Any:
        handle = ctypes.c_void_p()
        self._call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu), ctypes.byref(handle))
        return handle

    def _text(self, name: str, *arguments: Any) -> str:
        buffer = ctypes.create_string_buffer(_TEXT)
        self._call(name, *arguments, buffer, ctypes.c_uint(_TEXT))
        return buffer.value.decode(errors="replace")

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            value = getattr(self._library, name)(*arguments)
        except AttributeError:
            raise NvmlError(FUNCTION_NOT_FOUND) from None
        if value:
            say = self._library.nvmlErrorString
            say.restype = ctypes.c_char_p
            raise NvmlError(value, (say(value) or b"").decode())
