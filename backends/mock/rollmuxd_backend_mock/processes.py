"""Whether a process of this machine still lives. All hosts of the mock are this machine."""

import os

from rollmuxd_backend_local.onhost import processes


def alive(pid: int, started: str) -> bool:
    """Whether the process that had this pid and start time still lives. In doubt it does: unknown is never free.

    ``started`` is compared only where it looks like the kernel's own figure. A process that ended and was not yet
    waited for (a zombie) has no memory, and counts as dead.
    """
    fields = processes.stat_of(pid)
    if fields is None:  # it has gone, or this system does not show it
        return _exists(pid)
    return fields[0] not in ("Z", "X") and (not started.isdecimal() or fields[19] == started)


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        pass
    return True
