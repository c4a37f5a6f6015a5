"""Keeps ``daemon.log`` from filling the disk that it shares with the journal: beyond a size it is begun anew.

``rollmuxd daemon start`` has the daemon write there. The file before is ``daemon.log.1``, in the place of the one
before that. A log that is somebody else's (a terminal, systemd's, another file, one behind a symbolic link) is left to
them.

Every line is in one of the two files, whole, and there is a ``daemon.log`` at every moment: where something fails, or
the daemon is killed in the midst of it, it goes on with the file that it has, and tries again later.
"""

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import anyio
import anyio.to_thread
import structlog

from rollmuxd.daemon.journal_file import belong

log = structlog.get_logger("rollmuxd.daemon")

#: bytes: 68,000 hand-overs of 0.94 kB (jobs of the soak, which park nothing), eleven minutes of a hundred a second
LIMIT: Final = 64_000_000
#: how often it is looked at; at a hundred a second 1 MB is written in that time
EVERY_S: Final = 10.0


async def watch(path: Path) -> None:
    """For ever. What fails is said once."""
    trouble = ""
    while True:
        try:
            # A disk may take its time with a file of this size, and the loop has none.
            await anyio.to_thread.run_sync(tend, path)
            trouble = ""
        except Exception as error:  # whatever it is: the daemon has more to do than its log
            if str(error) != trouble:
                trouble = str(error)
                log.warning("log_not_begun_anew", reason=trouble, remedy=f"look what keeps {path} from being renamed")
        await anyio.sleep(EVERY_S)


def tend(path: Path, limit: int = LIMIT) -> None:
    """Begin the log anew if it is this process's stderr, and beyond the limit (in bytes).

    Raises:
        OSError: it could not be; the log is as it was, and the file before it may be gone.
    """
    on_stderr = _open_at(2)
    if on_stderr is None or on_stderr.st_size <= limit or not _is(path, on_stderr):
        return
    on_stdout = _open_at(1)
    before, new = path.with_name(f"{path.name}.1"), path.with_name(f"{path.name}.new")
    sys.stderr.flush()  # a line that was begun, and that the disk had no room for, ends where it began
    new.unlink(missing_ok=True)  # of a daemon that was killed
    opened = os.open(new, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        belong(new)
        before.unlink(missing_ok=True)
        os.link(path, before)
        new.replace(path)
        os.dup2(opened, 2)
        if on_stdout is not None and os.path.samestat(on_stdout, on_stderr):
            os.dup2(opened, 1)
    except OSError:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    finally:
        os.close(opened)
    log.info("log_begun_anew", before=str(before))


def _open_at(number: int) -> os.stat_result | None:
    """What is open there, if something is. A terminal or a pipe has no size."""
    try:
        return os.fstat(number)
    except OSError:  # it was closed before this process began
        return None


def _is(path: Path, found: os.stat_result) -> bool:
    try:
        return os.path.samestat(path.lstat(), found)
    except FileNotFoundError:
        return False
