"""Processes of this machine: whether one still lives, and ending it. All hosts of the mock are this machine.

A pid alone names nobody: it may be another process's by now. Where the kernel shows start times (Linux: field 22 of
``/proc/<pid>/stat``, in clock ticks since boot), pid and start time together are the process.
"""

import contextlib
import os
import pwd
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rollmuxd.spi.environment import inherited


def machine_boot_id() -> str:
    """This machine's own, another one after each restart; empty where the system does not tell."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""


def start_time(pid: int) -> str | None:
    """When the process was started, as the kernel writes it; None where that cannot be told, or it is gone."""
    fields = _stat(pid)
    return fields[19] if fields is not None else None


def alive(pid: int, started: str) -> bool:
    """Whether the process that had this pid and start time still lives. In doubt it does: unknown is never free.

    ``started`` is compared only where it looks like the kernel's own figure; a process that ended and was not yet
    waited for (a zombie) has no memory any more, and counts as dead.
    """
    if not _exists(pid):
        return False
    fields = _stat(pid)
    if fields is None:  # it has gone meanwhile, or this system does not show it
        return _exists(pid)
    if fields[0] in ("Z", "X"):
        return False
    return not started.isdecimal() or fields[19] == started


def end(pid: int, started: str) -> bool:
    """SIGKILL the process, if it is the one that was started then. Tells whether it was.

    Refused (False) without a start time to compare, for pid 1 and below (0 is one's own process group), and for
    oneself. The handle is opened before the comparison, so that the pid cannot change hands in between.
    """
    if pid <= 1 or pid == os.getpid() or not started or not hasattr(os, "pidfd_open"):
        return False
    try:
        handle = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if start_time(pid) != started or not alive(pid, started):
            return False
        signal.pidfd_send_signal(handle, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return False
    finally:
        os.close(handle)
    return True


def login_of(pid: int) -> str:
    """Whose process it is; empty where that cannot be told."""
    try:
        return pwd.getpwuid(Path(f"/proc/{pid}").stat().st_uid).pw_name
    except (OSError, KeyError):
        return ""


# ---- processes that were started here -------------------------------------------------------------------------------

#: the variable by which a started process, and all that it starts in turn, is known again: no file could get lost
MARK: Final = "ROLLMUX_LAUNCH"
#: how long those that are asked to end may take before they are made to
_LEAVES_S: Final = 2.0
_LOOK_S: Final = 0.02

#: our own children, which somebody has to wait for
_children: list[subprocess.Popen[bytes]] = []


def begin(mark: str, argv: Sequence[str], cwd: str, env: Mapping[str, str], log: Path | None) -> tuple[int, str]:
    """Start a process with a mark, in a session of its own; its pid and start time. Raises OSError."""
    with contextlib.ExitStack() as files:
        out: Any = subprocess.DEVNULL
        if log is not None:
            log.parent.mkdir(parents=True, exist_ok=True)
            out = files.enter_context(log.open("ab"))
        child = subprocess.Popen(
            list(argv),
            cwd=cwd or None,
            env={**inherited(os.environ), **env, MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    _children.append(child)
    started = start_time(child.pid) or ""
    # The kernel shows a program's environment a moment after it has begun, and until then nobody would find it.
    while child.poll() is None and not mark_of(child.pid):
        time.sleep(0.001)
    return child.pid, started


def marked(prefix: str) -> list[tuple[int, str]]:
    """Living processes whose mark begins so: pid and mark, the oldest first."""
    for child in list(_children):
        if child.poll() is not None:
            _children.remove(child)
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            pid = int(folder.name)
            mark = mark_of(pid)
            if mark.startswith(prefix) and mark and alive(pid, ""):
                found.append((pid, mark))
    return sorted(found, key=lambda one: (int(start_time(one[0]) or 0), one[0]))


def mark_of(pid: int) -> str:
    """The mark that a process carries; empty: none, or it is somebody else's process."""
    try:
        env = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return ""
    wanted = f"{MARK}=".encode()
    return next(
        (part[len(wanted) :].decode(errors="replace") for part in env.split(b"\0") if part.startswith(wanted)), ""
    )


def end_marked(prefix: str, *, keep: str = "") -> bool:
    """End all processes whose mark begins so (but for one mark), the stubborn ones too. Whether there were any.

    Returns when none is left.
    """
    began, any_there, empty = time.monotonic(), False, 0
    while empty < (2 if any_there else 1):  # twice: one that is just becoming another program cannot be found
        left = [(pid, mark) for pid, mark in marked(prefix) if mark != keep]
        empty = 0 if left else empty + 1
        any_there = any_there or bool(left)
        number = signal.SIGTERM if time.monotonic() - began < _LEAVES_S else signal.SIGKILL
        for pid, _ in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        if any_there:
            time.sleep(_LOOK_S)
    return any_there


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True


def _stat(pid: int) -> list[str] | None:
    """The fields of ``/proc/<pid>/stat`` from the third on. The second is the command's name, which may be anything."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields if len(fields) > 19 else None
