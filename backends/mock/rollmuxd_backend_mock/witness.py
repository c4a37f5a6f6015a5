"""What really happened on the GPUs, one JSON object a line, written while it happens.

Each line has ``wall`` and ``mono`` in seconds, ``event`` and ``host``. ``mono`` is the machine's monotonic clock, which
orders lines of several processes. Lines about bytes also have ``gpu``, ``job``, ``run``, ``pool``, ``mb`` (on that GPU
from now on) and ``order``:

    load       the bytes are on the GPU from here on       loaded     the load is done
    park       but for ``mb`` they have left it            discard    all of them have
    dead       their process has died, the driver freed them
    clean      nothing is on the GPU but agreed residual memory
    violation  what must never happen, with ``why``
"""

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class Witness:
    """Writes events to a file, if there is one."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._file: int | None = None
        if path is not None:
            self._file = _open(path)

    def write(self, event: str, host: str, **fields: Any) -> None:
        """One line. Unbuffered and in one call: what was written survives a kill, and lines never mix."""
        self._keep({"wall": time.time(), "mono": time.monotonic(), "event": event, "host": host, **fields})

    def write_each(self, event: str, host: str, gpus: Mapping[str, int], **fields: Any) -> None:
        """A line for each of these GPUs, with the MB on it from now on: it happened on all of them at once."""
        at = {"wall": time.time(), "mono": time.monotonic(), "event": event, "host": host}
        for gpu, mb in gpus.items() if self.path is not None else ():
            self._keep({**at, "gpu": gpu, "mb": mb, **fields})

    def _keep(self, line: dict[str, Any]) -> None:
        if self.path is not None:
            if self._file is None:  # something happened after close, and is still to be told
                self._file = _open(self.path)
            os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """May be called twice."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open(path: Path) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
