"""Files of the state directory: whole or not there, for the daemon's user alone, and on the disk; whose they are."""

import os
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec import Struct


class Ready(Struct, frozen=True, omit_defaults=True):
    """Where a daemon is to be found: the content of ``daemon.json``."""

    pid: int
    #: when this process was started, by the kernel's clock: a later process with this pid has another start time
    started: str
    #: None: it listens on no TCP port
    url: str | None
    #: needs no key
    socket: str
    #: the file of the certificate; None: the port is without TLS
    certificate: str | None = None


def find(state_dir: Path) -> Ready | None:
    """The daemon that runs on this state directory, if one does.

    A pid that is left over in the file may be another process by now: that one started at another time.
    """
    try:
        said = msgspec.json.decode((state_dir / "daemon.json").read_bytes(), type=Ready)
    except (OSError, msgspec.MsgspecError):
        return None
    return said if started(said.pid) == said.started else None


def started(pid: int) -> str | None:
    """When the process with this pid was started, by the kernel's clock; None: it has ended.

    A pid names another process later. Its pid and its start time together name one process.
    """
    fields = stat_of(str(pid))
    return None if not fields or fields[0] in ("Z", "X") else fields[19]


def stat_of(pid: str) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` from the third on: status, parent, ...; none: it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def write(path: Path, content: bytes) -> None:
    """Write a file: whatever ends the process or the machine, it has the old content or this one. Raises OSError."""
    new = path.with_name(f"{path.name}.new")
    try:
        with os.fdopen(os.open(new, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        belong(new)
        new.replace(path)
    except BaseException:
        with suppress(OSError):
            new.unlink(missing_ok=True)
        raise
    sync(path.parent)


def sync(path: Path) -> None:
    """Return once a file, or a folder's list of files, is on the disk."""
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def belong(path: Path) -> None:
    """Give what root has made to the owner of its folder: the daemon runs as that user, and has to open it."""
    if os.geteuid() == 0:
        folder = path.parent.stat()
        os.chown(path, folder.st_uid, folder.st_gid, follow_symlinks=False)
