"""The trainer's side: a version goes from the model into host memory, and is served from there."""

import contextlib
import errno
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import msgspec

from rollmuxd_weights import hosts as hosts_file
from rollmuxd_weights import safetensors
from rollmuxd_weights.core import fence as fences
from rollmuxd_weights.core.fence import Identity
from rollmuxd_weights.core.manifest import Manifest
from rollmuxd_weights.hosts import Hosts
from rollmuxd_weights.serve import Server
from rollmuxd_weights.store import Store, checked_name, default_folder, mapped

KEY: Final = "ROLLMUX_WEIGHTS_KEY"
CHUNK: Final = 4 << 20
_GB: Final = 1_000_000_000
#: how often is looked for what pullers have told
_LOOK_S: Final = 0.2
#: a version that no host has asked for in so long is not being pulled: longer than one asks for a chunk in vain
_PULLED_S: Final = 15.0


class Older(ValueError):
    """What was to be published is no newer than what is there: its slot, run or step was superseded."""


class NoRoom(MemoryError):
    """Two versions do not fit. Nothing of the new one is left, and the version before is still there."""


class Copied(NamedTuple):
    """A version in host memory that is not shown yet: for :meth:`Publisher.offer`."""

    identity: Identity
    bytes: int
    seconds: float


class Published(NamedTuple):
    """A version in host memory: pullers fetch it from now on."""

    identity: Identity
    path: Path
    bytes: int
    #: bytes of its differences to the version before; None: there are none
    delta_bytes: int | None
    #: what :meth:`Publisher.copy` and :meth:`Publisher.offer` took
    seconds: float
    #: of that the copy, which a slot is needed for
    copy_s: float


class Publisher:
    """Publishes versions of one job's weights from one trainer host (its rank 0). A context manager.

    ``hosts``: the hosts file, a mapping like it, or None: then nothing is served here, and ``rollmuxd weights serve``
    serves what is published. ``me``: which host of it this is. ``ram_gb``: what two versions may take, as the job
    declares it. ``delta``: differences to the version before are made as well, if they take less than half of its size
    and half of the room left. With them two versions take as much as three. ``run``: higher is newer; raise it where
    training begins again from an older step. ``key``: default ``$ROLLMUX_WEIGHTS_KEY``.

    Raises ValueError for settings that cannot be, and :class:`~rollmuxd_weights.store.Busy`.
    """

    def __init__(
        self,
        job: str,
        hosts: str | os.PathLike[str] | Mapping[str, Any] | None = None,
        *,
        me: str | None = None,
        dir: str | os.PathLike[str] | None = None,
        key: str | None = None,
        ram_gb: float | None = None,
        chunk: int = CHUNK,
        delta: bool = False,
        run: int = 0,
    ) -> None:
        if not 1 << 10 <= chunk <= 64 << 20 or chunk % 2:
            raise ValueError(f"chunk={chunk}: an even number of bytes, from 1024 to {64 << 20}")
        if ram_gb is not None and (isinstance(ram_gb, bool | str) or not 0 < ram_gb < math.inf):
            raise ValueError(f"ram_gb={ram_gb!r}: gigabytes, above 0: what two versions may take")
        self.store = Store(Path(dir) if dir is not None else default_folder(job))
        self._ram = None if ram_gb is None else int(ram_gb * _GB)
        self._chunk, self._delta, self.run = chunk, delta, run
        self._stack = contextlib.ExitStack()
        self._stack.enter_context(self.store.alone())
        self.server: Server | None = None
        try:
            if current := self.store.current():
                self.store.make_room_for(current)
            if hosts is not None:
                self.server = serve(job, self.store, read_hosts(hosts), me, key)
                self._stack.callback(self.server.close)
        except BaseException:
            self._stack.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop serving. What was published stays in memory, for the next publisher or ``rollmuxd weights serve``."""
        self._stack.close()

    def publish(self, tensors: Mapping[str, Any], version: int, *, fence: str | None = None) -> Published:
        """Write torch tensors or numpy arrays to host memory as a version, and offer it.

        This is :meth:`copy`, and then :meth:`offer`. Raises what they raise.
        """
        return self.offer(self.copy(tensors, version, fence=fence))

    def copy(self, tensors: Mapping[str, Any], version: int, *, fence: str | None = None) -> Copied:
        """Write torch tensors or numpy arrays to host memory, and do not show them yet.

        Sharded tensors (``DTensor``, which FSDP2 has) are gathered one by one: meanwhile every other rank that has
        shards calls :func:`take_part`, or publishes as well.
        ``version``: the optimizer's step. ``fence``: the slot's (``slot.fence``). Nothing refers to the tensors
        afterwards, so the slot may be released. A copy that is not offered is removed by the next one.

        Raises :class:`Older`, :class:`NoRoom`, and ValueError for what has no tensors by name. Then nothing of it is
        left, the version before is still there, and the other ranks are not left waiting.
        """
        began = time.monotonic()
        if not hasattr(tensors, "items") or not tensors:
            raise ValueError(
                f"there are no weights to publish in {type(tensors).__name__} {str(tensors)[:40]}: give tensors by "
                "name, such as model.state_dict()"
            )
        whole = _gathered(tensors)
        try:
            identity = fences.identity(version, fence=fence, run=self.run)
            size = self._copy(identity, tensors, whole)
        except Exception:
            for _ in whole:  # other ranks wait until every shard is gathered
                pass
            raise
        return Copied(identity, size, time.monotonic() - began)

    def _copy(self, identity: Identity, tensors: Mapping[str, Any], whole: Iterator[tuple[str, Any]]) -> int:
        current = self.store.current()
        if current is not None and identity <= current:
            raise Older(
                f"version {identity} is not newer than {current}, which is published already. Give a new run (run=) if "
                "training begins again from an older step"
            )
        head, spans = safetensors.header({name: _laid_out(name, tensor) for name, tensor in tensors.items()})
        size = max([len(head), *(span.stop for span in spans.values())])
        beside = self._beside(current)
        self._check_room(identity, size, beside)
        self.store.make_room_for(identity, beside)
        draft = self.store.path(identity, "draft")
        with self._whole_or_nothing(identity, size), open(draft, "w+b", opener=private) as file:
            os.truncate(file.fileno(), size)
            _write(file.fileno(), head, 0)
            for name, tensor in whole:
                _write(file.fileno(), _bytes(tensor), spans[name].start)
        return size

    def _beside(self, current: Identity | None) -> Identity | None:
        """The version to keep beside the next one: an older one than the newest if hosts pull that, and none has it.

        Otherwise no pull would ever end that takes longer than two versions are apart. Once one host has a version,
        its peers get it from there. That it has it may be told late: it may have asked for the newest already.
        """
        if current is None:
            return None
        since = max(self.store.asked_at(current), time.time() - _PULLED_S)
        for one in self.store.whole():
            if one < current and self.store.asked_at(one) > since and not self.pulled_by(one):
                return one
        return current

    def offer(self, copied: Copied) -> Published:
        """Sum the chunks of a copy, write their differences to the version before, and show it. No GPU is needed.

        Raises :class:`NoRoom`; then nothing of it is left. Raises :class:`Older` for a copy that was offered before, or
        that another one has followed; that changes nothing.
        """
        began = time.monotonic()
        identity, size = copied.identity, copied.bytes
        draft = self.store.path(identity, "draft")
        try:
            new = mapped(draft)
        except FileNotFoundError:
            raise Older(
                f"the copy of version {identity} was offered before, or another copy has followed it: copy the weights "
                "again, and offer each copy once"
            ) from None
        with self._whole_or_nothing(identity, size):
            manifest = self._manifest(identity, self.store.current(), new)
            self.store.write(self.store.path(identity, "json"), msgspec.json.encode(manifest))
            path = self.store.show(identity, draft)
        if self.server is not None:
            with self.server.changed:
                self.server.changed.notify_all()
        delta_bytes = sum(manifest.delta) if manifest.base else None
        return Published(identity, path, size, delta_bytes, copied.seconds + time.monotonic() - began, copied.seconds)

    @contextlib.contextmanager
    def _whole_or_nothing(self, identity: Identity, size: int) -> Iterator[None]:
        """Leave nothing of a version that could not be written. Raises :class:`NoRoom`."""
        try:
            yield
        except BaseException as error:
            for kind in ("draft", "delta", "json"):
                self.store.path(identity, kind).unlink(missing_ok=True)
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise NoRoom(
                    f"{self.store.folder} became full while {size / _GB:.1f} GB were written: enlarge that file "
                    "system, or name another folder with dir=. Nothing of it is left"
                ) from error
            raise

    def pulled_by(self, identity: Identity) -> list[str]:
        """Which hosts have said that they have this version, or a newer one."""
        pulled = self.store.pulled().items()
        return sorted(host for host, told in pulled if fences.parse(told["id"]) >= identity)

    def wait_pulled(self, identity: Identity, *, hosts: int, timeout_s: float = 600.0) -> None:
        """Return once so many hosts have this version.

        A host that has gone to a newer one counts. Raises TimeoutError with those that have it, and :class:`Older`
        where a host only has versions that are newer than what is here.
        """
        until = time.monotonic() + timeout_s
        while True:
            self._check_newest()
            if len(found := self.pulled_by(identity)) >= hosts:
                return
            if (left := until - time.monotonic()) <= 0:
                raise TimeoutError(
                    f"after {timeout_s:g} s version {identity} is on {len(found)} of {hosts} hosts "
                    f"({', '.join(found) or 'none'}); `rollmuxd weights status` shows the others"
                )
            if self.server is None:  # `rollmuxd weights serve` writes down what it hears
                time.sleep(min(left, _LOOK_S))
                continue
            with self.server.changed:
                self.server.changed.wait(min(left, _LOOK_S))

    def _check_newest(self) -> None:
        current = self.store.current()
        for host, told in self.store.pulled().items():
            if current is not None and fences.parse(told["first"]) > current:
                raise Older(
                    f"host {host} has version {told['id']}, and the newest one here is {current}, so it pulls nothing. "
                    "If training began again, give the publishers a new run: run=1, or one more than before"
                )

    def _check_room(self, identity: Identity, size: int, beside: Identity | None) -> None:
        copies, what = (3, "two versions and their differences take up to") if self._delta else (2, "two versions take")
        if self._ram is not None and copies * size > self._ram:
            raise NoRoom(
                f"{what} {copies * size / _GB:.1f} GB, and ram_gb is {self._ram / _GB:g}: raise it, and the "
                "job's ram_gb with it. Nothing was written"
            )
        past = sum(path.stat().st_blocks * 512 for path in self.store.past(identity, beside))
        free = self.store.free_bytes() + past
        if size > free:
            raise NoRoom(
                f"the version takes {size / _GB:.1f} GB, and {self.store.folder} has {free / _GB:.1f} GB left beside "
                "the version before: enlarge that file system, or name another folder with dir=. Nothing was written"
            )

    def _manifest(self, identity: Identity, base: Identity | None, new: memoryview) -> Manifest:
        """Sum the chunks, and write their differences to the version before where that is asked for."""
        size = len(new)
        spans = [(at, min(at + self._chunk, size)) for at in range(0, size, self._chunk)]
        rates: dict[str, float] = {}
        for told in self.store.pulled().values():
            rates.update(told.get("rates", {}))
        with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
            crcs = list(pool.map(lambda span: zlib.crc32(new[slice(*span)]), spans))
            found = Manifest(str(identity), size, self._chunk, crcs, rates=rates)
            if not self._delta or (from_base := self._base(base, size)) is None:
                return found
            sizes = self._differences(self.store.path(identity, "delta"), from_base, new, spans, pool)
        return found if sizes is None else msgspec.structs.replace(found, base=str(base), delta=sizes)

    def _differences(
        self, path: Path, base: memoryview, new: memoryview, spans: list[tuple[int, int]], pool: ThreadPoolExecutor
    ) -> list[int] | None:
        """Write the differences of chunks. Returns the size of each; None: together they take too much room."""
        from rollmuxd_weights.core import delta

        def one(span: tuple[int, int]) -> bytes | memoryview:
            chunk = new[slice(*span)]
            packed = delta.encode(base[slice(*span)], chunk)
            return chunk if packed is None else packed

        sizes, left = [], min(len(new), self.store.free_bytes()) // 2
        with open(path, "wb", opener=private) as file:
            for packed in pool.map(one, spans):
                sizes.append(len(packed))
                left -= len(packed)
                if left < 0:
                    path.unlink()
                    return None
                file.write(packed)
        return sizes

    def _base(self, base: Identity | None, size: int) -> memoryview | None:
        found = self.store.manifest(base) if base is not None else None
        if base is None or found is None or (found.bytes, found.chunk) != (size, self._chunk):
            return None
        return mapped(self.store.path(base))


def read_hosts(given: str | os.PathLike[str] | Mapping[str, Any]) -> Hosts:
    """From a hosts file, or from a mapping like it."""
    return hosts_file.hosts(given) if isinstance(given, Mapping) else hosts_file.read(Path(given))


def the_key(given: str | None) -> str:
    """The key of the run: as given, else from the environment; spaces and line ends around it are not part of it.

    Raises ValueError for one that a header cannot have. The message does not show it.
    """
    key = (given if given is not None else os.environ.get(KEY, "")).strip()
    if not (key.isascii() and (key.isprintable() or not key)):
        raise ValueError(
            f"the key of the run ({KEY}, key=) has a character within it that is not printable ASCII, such as a line "
            "end: give one word of letters and digits, such as that of `openssl rand -hex 16`"
        )
    return key


def serve(job: str, store: Store, hosts: Hosts, me: str | None, key: str | None) -> Server:
    """Serve a job's store at this host's addresses."""
    at = hosts.of(me if me is not None else os.uname().nodename)
    server = Server(store, at, the_key(key), checked_name(job, "the job's name"))
    server.start()
    return server


def private(path: str, flags: int) -> int:
    """Open a file for this user alone."""
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def _write(file: int, data: Any, at: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        wrote = os.pwrite(file, view, at)
        view, at = view[wrote:], at + wrote


_TYPES: Final = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
}  # fmt: skip


def _laid_out(name: str, tensor: Any) -> tuple[str, tuple[int, ...]]:
    """Type and shape of a tensor or an array."""
    if not hasattr(tensor, "dtype"):
        raise ValueError(f"tensor {name} is a {type(tensor).__name__}: give torch tensors or numpy arrays")
    word = str(tensor.dtype).removeprefix("torch.")
    if word not in _TYPES:
        raise ValueError(f"tensor {name} is of type {tensor.dtype}; what can be published is {', '.join(_TYPES)}")
    return _TYPES[word], tuple(int(side) for side in tensor.shape)


def _bytes(tensor: Any) -> Any:
    """The bytes of a whole tensor or of an array, in this host's memory."""
    if not hasattr(tensor, "detach"):  # numpy
        import numpy as np

        return np.ascontiguousarray(tensor).reshape(-1).view("u1")
    import torch

    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def _gathered(tensors: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, tensor in tensors.items():
        yield name, tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def take_part(tensors: Mapping[str, Any]) -> None:
    """Gather sharded tensors with the ranks that :meth:`Publisher.copy` them, on a rank that does not.

    All give the same names in the same order. One tensor at a time is whole; here it is dropped.
    """
    for _ in _gathered(tensors):
        pass
