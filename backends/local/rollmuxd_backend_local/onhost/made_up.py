"""GPUs that are made up in a file: for tests and for the demo, where there are none.

    {"gpus": [{"uuid": "GPU-1", "name": "NVIDIA H20", "total_mb": 97871, "more_mb": 0, "mig": false,
               "processes": [{"pid": 4711, "mb": 5000}], "errors": {"memory": 15}}],
     "errors": {"start": 9}}

``errors`` are NVML's numbers, by what is asked. ``mb: null`` is memory that NVML does not tell; ``more_mb`` is used by
no process that is listed. A process with ``started`` (its start time, as the kernel gives it) counts while it lives.
The file is read again at each look. MB are 10^6 bytes.
"""

from __future__ import annotations

import json
from typing import Any

from .machine import read
from .nvml import Nvml, NvmlError


class MadeUp(Nvml):
    """Answers as the library does."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._read("start")

    def driver(self) -> str:
        return "made up"

    def count(self) -> int:
        self._read("count")
        return len(self._box["gpus"])

    def uuid(self, gpu: int) -> str:
        return str(self._of(gpu, "uuid")["uuid"])

    def type(self, gpu: int) -> str:
        return str(self._of(gpu, "type").get("name", "NVIDIA H20"))

    def memory(self, gpu: int) -> tuple[int, int]:
        its = self._of(gpu, "memory")
        used = int(its.get("more_mb", 0)) + sum(int(one["mb"] or 0) for one in its.get("processes", ()))
        return int(its["total_mb"]) * 10**6, used * 10**6

    def is_split(self, gpu: int) -> bool:
        return bool(self._of(gpu, "mig").get("mig"))

    def processes(self, gpu: int, kind: str) -> list[tuple[int, int | None]]:
        its = self._of(gpu, "processes").get("processes", ()) if kind == "Compute" else ()
        return [(int(one["pid"]), None if one["mb"] is None else int(one["mb"]) * 10**6) for one in its]

    def _read(self, what: str) -> None:
        with open(self._path, encoding="utf-8") as file:
            self._box: dict[str, Any] = json.load(file)
        for gpu in self._box["gpus"]:
            gpu["processes"] = [one for one in gpu.get("processes", ()) if _lives(one)]
        _meet(self._box, what)

    def _of(self, gpu: int, what: str) -> dict[str, Any]:
        _meet(self._box["gpus"][gpu], what)
        return dict(self._box["gpus"][gpu])


def _meet(about: dict[str, Any], what: str) -> None:
    if value := about.get("errors", {}).get(what):
        raise NvmlError(int(value))


def _lives(process: dict[str, Any]) -> bool:
    """Whether it counts: a process whose ``started`` is given has its memory for as long as it lives."""
    started = str(process.get("started", ""))
    if not process["pid"] or not started.isdecimal():
        return True
    fields = read(f"/proc/{process['pid']}/stat").rpartition(")")[2].split()
    return len(fields) > 19 and fields[0] not in "ZX" and fields[19] == started
