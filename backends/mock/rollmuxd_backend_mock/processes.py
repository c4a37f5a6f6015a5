"""Processes of this machine: whether one still lives, and ending it. All hosts of the mock are this machine.

A pid alone names nobody: it may be another process's by now. Where the kernel shows start times (Linux: field 22 of
``/proc/<pid>/stat``, in clock ticks since boot), pid and start time together are the process.
"""

import os
import signal
from pathlib import Path


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
