"""The processes that the demo starts, and ends whatever happens."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Self


class Children:
    """Every process that was started within the block; leaving it ends those that are left, with all that they started.

    Each leads a session of its own: a Ctrl-C reaches this process only, which then ends the others in good order. A
    SIGTERM is taken like a Ctrl-C, and the exit status says what it was.
    """

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[str]] = []

    def __enter__(self) -> Self:
        def stop(number: int, frame: FrameType | None) -> None:
            sys.exit(128 + number)

        self._before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.end(self._started)
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def start(
        self,
        command: Sequence[str | Path],
        *,
        env: Mapping[str, str],
        stdout: int | IO[str],
        stderr: int | IO[str],
    ) -> subprocess.Popen[str]:
        """Start one."""
        child = subprocess.Popen(
            [str(word) for word in command],
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            env=dict(env),
            text=True,
            start_new_session=True,
        )
        self._started.append(child)
        return child

    @staticmethod
    def end(children: Sequence[subprocess.Popen[str]], patience_s: float = 5.0) -> None:
        """Ask to end, wait a little, then end."""
        alive = [child for child in children if child.poll() is None]
        for child in alive:
            child.terminate()
        give_up = time.monotonic() + patience_s
        for child in alive:
            try:
                child.wait(max(0.05, give_up - time.monotonic()))
            except subprocess.TimeoutExpired:
                _kill_group(child)
                child.wait()
        # What it started itself (a heartbeat) watches its parent and goes too; this makes sure of it.
        for child in alive:
            _kill_group(child)


def _kill_group(child: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(child.pid, signal.SIGKILL)


def environment(**more: str) -> dict[str, str]:
    """The environment of all children: one numeric thread, and nothing of rollmuxd's that the user has set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("ROLLMUX_")}
    for library in ("OMP", "OPENBLAS", "MKL", "NUMEXPR", "VECLIB_MAXIMUM"):
        env[f"{library}_NUM_THREADS"] = "1"
    return {**env, "PYTHONUNBUFFERED": "1", **more}


def tail(path: Path, lines: int = 12) -> str:
    """The end of a log, for people to read."""
    try:
        return "\n".join(path.read_text(errors="replace").splitlines()[-lines:])
    except OSError:
        return ""
