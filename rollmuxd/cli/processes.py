"""Processes that live and die together: each in a group of its own, and all that they start in turn ended with them.

Linux only. What a process started is found by its line of parents, also where it left its group or lost its parent.
That line ends here (``PR_SET_CHILD_SUBREAPER``).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import IO, Final, Self

from rollmuxd.daemon.files import started, stat_of

#: signals that are passed on
FORWARDED: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
#: of these the third one no longer asks
_ASKS_TO_END: Final = (signal.SIGINT, signal.SIGTERM)
_LOOK_S: Final = 0.1
_SUBREAPER: Final = 36
#: asked to end when nothing else is left: the head of a Ray (2.60) that still has callers then never ends
_LAST: Final = "gcs_server"


class ProcessGroup:
    """Started together, ended together. Signals that come meanwhile are theirs; before the first one is started, they
    interrupt (KeyboardInterrupt).

    Args:
        grace_s: how long those that are asked to end may take before they are killed.
    """

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._members: dict[str, subprocess.Popen[bytes]] = {}
        self._asked = 0
        self._ending = False
        self._before: dict[int, object] = {}

    def __enter__(self) -> Self:
        adopt_orphans()
        for number in FORWARDED:
            self._before[number] = signal.signal(number, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        for number, before in self._before.items():
            signal.signal(number, before)  # type: ignore[arg-type]  # as it was given

    def start(self, name: str, argv: Sequence[str], *, env: Mapping[str, str], cwd: str, out: IO[bytes] | None) -> int:
        """Start one, in a session of its own; its pid. Raises OSError."""
        process = subprocess.Popen(
            list(argv),
            env=dict(env),
            cwd=cwd or None,
            stdin=subprocess.DEVNULL if out is not None else None,
            stdout=out,
            stderr=subprocess.STDOUT if out is not None else None,
            start_new_session=True,
        )
        self._members[name] = process
        return process.pid

    def ended(self) -> tuple[str, int] | None:
        """The first that has ended, and its exit status as a shell tells it (128 + signal); None: all run."""
        for name, process in self._members.items():
            status = process.poll()
            if status is not None:
                return name, status if status >= 0 else 128 - status
        return None

    def wait(self, seconds: float) -> tuple[str, int] | None:
        """The same, after waiting for it for so long at most."""
        until = time.monotonic() + seconds
        while (found := self.ended()) is None and time.monotonic() < until:
            time.sleep(_LOOK_S)
        return found

    def end(self) -> None:
        """End all that is left: asked first, and killed after the grace. Returns when nothing is left."""
        self._ending = True
        began = time.monotonic()
        told: set[int] = set()
        while left := descendants():
            late = time.monotonic() - began > self._grace_s or self._asked > 2
            others = [pid for pid in left if _name(pid) != _LAST]
            for pid in left if late else others or left:
                if late or pid not in told:
                    with suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                    told.add(pid)
            self._reap()
            time.sleep(_LOOK_S / 5)

    def _reap(self) -> None:
        for process in self._members.values():
            process.poll()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:  # orphans that came to us
                pass

    def _forward(self, number: int, _: FrameType | None) -> None:
        if not self._members and not self._ending:
            raise KeyboardInterrupt
        if number in _ASKS_TO_END:
            self._asked += 1
        for process in self._members.values():
            if process.poll() is None:
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL if self._asked > 2 else number)


def start_apart(words: Sequence[str], log: Path, env: Mapping[str, str]) -> int:
    """Start ``rollmuxd`` with these words in a session of its own, which nothing here waits for; its pid."""
    return os.posix_spawn(
        sys.executable,
        [sys.executable, "-m", "rollmuxd", *words],
        env,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )


def adopt_orphans() -> None:
    """Be the parent of whatever our processes leave behind. Raises OSError where the system cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "PR_SET_CHILD_SUBREAPER")


def descendants() -> list[int]:
    """Every living process that comes from this one."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found: list[int] = []
    line = [os.getpid()]
    while line:
        mine = children.get(line.pop(), [])
        found += mine
        line += mine
    return [pid for pid in found if started(pid) is not None]


def _name(pid: int) -> str:
    """What the kernel calls it; nothing: it has ended."""
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def _parents() -> list[tuple[int, int]]:
    return [
        (int(folder.name), int(fields[1]))
        for folder in Path("/proc").iterdir()
        if folder.name.isdecimal() and (fields := stat_of(folder.name))
    ]
