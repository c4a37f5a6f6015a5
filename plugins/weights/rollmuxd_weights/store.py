"""The weights of one job in a host's memory: a folder, by default in ``/dev/shm``. It outlives processes.

- ``ID.safetensors`` is a whole version, ``ID.json`` its manifest. Neither changes once it has that name.
- ``ID.part`` and ``ID.have`` are a version on its way, and a byte for each chunk that is there.
- ``ID.delta`` are differences to the version before (:mod:`rollmuxd_weights.core.delta`), half of its size at most.
- ``current`` leads to the newest whole version. It is switched at once, so a reader sees one version or another.

Two versions are here at most: whole ones, or the current one and the next on its way. A file that is opened stays
readable while it is open. The mtime of a version is set whenever a host asks for its bytes. So a publisher knows what
is being pulled, whichever process serves it.
"""

import contextlib
import fcntl
import mmap
import os
import re
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rollmuxd_weights.core import manifest as manifests
from rollmuxd_weights.core.fence import Identity, parse
from rollmuxd_weights.core.manifest import Manifest

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_SHOWN: Final = "rollmuxd-weights-"
#: a small file is written in less
_OLD_S: Final = 60.0


class Busy(Exception):
    """Another process writes this store."""


def checked_name(name: str, what: str) -> str:
    """Return a name that is safe as a part of a path. Raises ValueError for another."""
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} is {name[:120]!r}: letters, digits, '.', '_' and '-', 100 at most, not '.' at its start"
        )
    return name


def default_folder(job: str) -> Path:
    """Where the weights of a job are on this host if nothing else is said: memory, where the host shows it."""
    memory = Path("/dev/shm")  # noqa: S108 -- Store refuses a folder of another user's
    root = memory if memory.is_dir() else Path(tempfile.gettempdir())
    return root / f"rollmuxd-weights-{os.getuid()}" / checked_name(job, "the job's name")


class Store:
    """The versions in one folder, which is made if it is not there.

    Raises PermissionError if it is another user's, or lies in another user's folder in a place where all may write.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder = Path(os.path.abspath(folder))  # noqa: PTH100 -- a link is refused below, not followed
        for one in (folder.parent, folder):
            one.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = os.lstat(one)
            if one != folder and not one.parent.stat().st_mode & stat.S_IWOTH:
                continue
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
                raise PermissionError(f"{one} is not a folder of this user's: name another one with dir= (--dir)")

    # ---- reading -----------------------------------------------------------------------------------------------------

    def current(self) -> Identity | None:
        """The newest whole version."""
        try:
            return parse((self.folder / "current").readlink().name.removesuffix(".safetensors"))
        except (OSError, ValueError):
            return None

    def whole(self) -> list[Identity]:
        """Whole versions, oldest first."""
        found = []
        for path in self.folder.glob("*.safetensors"):
            with contextlib.suppress(ValueError):
                found.append(parse(path.name.removesuffix(".safetensors")))
        return sorted(found)

    def path(self, identity: Identity, kind: str = "safetensors") -> Path:
        """Of one file of a version."""
        return self.folder / f"{identity}.{kind}"

    def manifest(self, identity: Identity) -> Manifest | None:
        """Of a version that is whole or on its way; None where there is none that can be read."""
        try:
            return manifests.decode(self.path(identity, "json").read_bytes())
        except (OSError, ValueError):
            return None

    def pulled(self) -> dict[str, dict[str, Any]]:
        """Which rollout host has pulled which version, as it told the process that serves this store."""
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode((self.folder / "pulled.json").read_bytes(), type=dict[str, dict[str, Any]])
        return {}

    # ---- writing -----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Be the one process that writes here. Raises :class:`Busy` if there is one."""
        held = os.open(self.folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"another process writes {self.folder}, or a child process of one that was killed. A publisher and "
                    "a puller on one machine need a folder each: name one with dir= (--dir). Otherwise end the other "
                    f"process; `fuser {self.folder}/lock` names it"
                ) from None
            self._sweep()
            yield
        finally:
            os.close(held)

    @contextlib.contextmanager
    def shown(self) -> Iterator[Path]:
        """A folder beside the versions, for an engine. It is removed at the end, or by :meth:`alone` after a kill."""
        with tempfile.TemporaryDirectory(prefix=_SHOWN, dir=self.folder) as folder:
            held = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                yield Path(folder)
            finally:
                os.close(held)

    def _sweep(self) -> None:
        """Remove what processes that were killed have left."""
        for path in self.folder.glob(f"{_SHOWN}*"):
            held = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:  # an engine loads from it
                pass
            finally:
                os.close(held)
        for path in self.folder.glob(".*.tmp"):
            with contextlib.suppress(OSError):  # `rollmuxd weights serve` may write one just now
                if time.time() - path.lstat().st_mtime > _OLD_S:
                    path.unlink()

    def write(self, path: Path, body: bytes) -> None:
        """Put a small file there at once."""
        draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        draft.write_bytes(body)
        draft.rename(path)

    def show(self, identity: Identity, draft: Path) -> Path:
        """Give a whole file its name, and lead ``current`` to it."""
        path = self.path(identity)
        draft.rename(path)
        self._lead(path)
        return path

    def _lead(self, path: Path) -> None:
        link = self.folder / f".current.{os.getpid()}.tmp"
        link.unlink(missing_ok=True)
        link.symlink_to(path.name)
        link.rename(self.folder / "current")

    def asked(self, identity: Identity) -> None:
        """Note on the file itself that a host asks for a version: another process may publish here."""
        now = time.time_ns()
        with contextlib.suppress(OSError):  # it was dropped just now
            os.utime(self.path(identity), ns=(now, now))

    def asked_at(self, identity: Identity) -> float:
        """When a host last asked for a version, as ``time.time``; 0: none has."""
        try:
            at, shown = (self.path(identity, kind).stat().st_mtime for kind in ("safetensors", "json"))
        except OSError:
            return 0.0
        return at if shown < at else 0.0

    def make_room_for(self, identity: Identity, beside: Identity | None = None) -> None:
        """Remove every version but this one and another: the current one, or an older one, which is current then."""
        past = self.past(identity, beside)
        if beside is not None:
            self._lead(self.path(beside))
        for path in past:
            path.unlink(missing_ok=True)

    def past(self, identity: Identity, beside: Identity | None = None) -> list[Path]:
        """What :meth:`make_room_for` removes."""
        keep, found = {identity, beside or self.current()}, []
        for path in self.folder.iterdir():
            with contextlib.suppress(ValueError):  # another file, such as pulled.json
                if parse(path.stem) not in keep:
                    found.append(path)
        return found

    def free_bytes(self) -> int:
        """What the file system of the folder has left."""
        found = os.statvfs(self.folder)
        return found.f_bavail * found.f_frsize


def mapped(path: Path) -> memoryview:
    """The bytes of a file, without a copy. They stay valid for as long as the view lives."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
