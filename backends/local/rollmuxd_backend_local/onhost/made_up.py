"""GPUs that are made up in a file, with NVML's names and manners: for tests and for the demo, where there are none.

    {"driver": "580.65.06",
     "gpus": [{"uuid": "GPU-1", "name": "NVIDIA H20", "total_mb": 97871, "reserved_mb": 600,
               "processes": [{"pid": 4711, "mb": 5000}], "more_mb": 0,
               "mig": false, "errors": {"nvmlDeviceGetMemoryInfo": 15}}],
     "errors": {"nvmlInit": 9}}

``errors`` are NVML's numbers, by function. ``mb: null`` is memory that NVML does not tell; ``more_mb`` is used by
no process that is listed. A process with ``started`` (its start time, as the kernel gives it) counts while it lives.
The file is read again at each look. MB are 10^6 bytes.
"""

from __future__ import annotations

import json
from typing import Any

from .machine import read
from .nvml import NVMLError, Process, nvmlMemory_v2

_WORDS = {
    3: "Not Supported",
    4: "Insufficient Permissions",
    9: "Driver Not Loaded",
    12: "NVML Shared Library Not Found",
    13: "Function Not Found",
    15: "GPU is lost",
    16: "GPU requires reset",
    18: "Driver/library version mismatch",
    999: "Unknown Error",
}


def _lives(process: dict[str, Any]) -> bool:
    """Whether it counts: a process whose ``started`` is given has its memory for as long as it lives."""
    started = str(process.get("started", ""))
    if not process["pid"] or not started.isdecimal():
        return True
    fields = read(f"/proc/{process['pid']}/stat").rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == started


class MadeUpError(NVMLError):
    """An error of a made-up NVML."""

    def __str__(self) -> str:
        """In NVML's words."""
        return _WORDS.get(self.value, f"NVML error {self.value}")


class _Memory:
    def __init__(self, total: int, reserved: int, used: int) -> None:
        self.total = total
        self.reserved = reserved
        self.used = used
        self.free = max(total - reserved - used, 0)


class MadeUp:
    """Looks like the module ``pynvml``."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED = 3
    NVML_ERROR_FUNCTION_NOT_FOUND = 13
    nvmlMemory_v2 = nvmlMemory_v2

    def __init__(self, path: str) -> None:
        self._path = path
        self._box: dict[str, Any] = {}

    def nvmlInit(self) -> None:
        """Read the file."""
        self._read()
        self._meet(self._box, "nvmlInit")

    def nvmlSystemGetDriverVersion(self) -> str:
        return str(self._box.get("driver", "580.65.06"))

    def nvmlDeviceGetCount(self) -> int:
        self._read()
        self._meet(self._box, "nvmlDeviceGetCount")
        return len(self._box["gpus"])

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        gpu = self._box["gpus"][index]
        self._meet(gpu, "nvmlDeviceGetHandleByIndex")
        return gpu

    def nvmlDeviceGetUUID(self, handle: Any) -> str:
        self._meet(handle, "nvmlDeviceGetUUID")
        return str(handle["uuid"])

    def nvmlDeviceGetName(self, handle: Any) -> str:
        self._meet(handle, "nvmlDeviceGetName")
        return str(handle.get("name", "NVIDIA H20"))

    def nvmlDeviceGetMemoryInfo(self, handle: Any, version: int | None = None) -> Any:
        self._meet(handle, "nvmlDeviceGetMemoryInfo" if version is None else "nvmlDeviceGetMemoryInfo_v2")
        reserved = int(handle.get("reserved_mb", 600)) * 10**6
        used = int(handle.get("more_mb", 0)) * 10**6
        used += sum(int(one["mb"] or 0) for one in handle.get("processes", ())) * 10**6
        total = int(handle["total_mb"]) * 10**6
        if version is None:  # the first version counts what the driver keeps for itself as used
            return _Memory(total, 0, min(used + reserved, total))
        return _Memory(total, reserved, min(used, total - reserved))

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        self._meet(handle, "nvmlDeviceGetMigMode")
        return [int(bool(handle.get("mig"))), int(bool(handle.get("mig")))]

    def nvmlDeviceGetComputeRunningProcesses(self, handle: Any) -> list[Process]:
        self._meet(handle, "nvmlDeviceGetComputeRunningProcesses")
        return [
            Process(int(one["pid"]), None if one["mb"] is None else int(one["mb"]) * 10**6)
            for one in handle.get("processes", ())
        ]

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: Any) -> list[Process]:
        self._meet(handle, "nvmlDeviceGetGraphicsRunningProcesses")
        return []

    def _read(self) -> None:
        with open(self._path, encoding="utf-8") as file:
            self._box = json.load(file)
        for gpu in self._box["gpus"]:
            gpu["processes"] = [one for one in gpu.get("processes", ()) if _lives(one)]

    @staticmethod
    def _meet(about: dict[str, Any], function: str) -> None:
        if value := about.get("errors", {}).get(function):
            raise MadeUpError(int(value))
