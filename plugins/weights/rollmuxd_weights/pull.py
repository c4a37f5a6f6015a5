"""The rollout host's side: fetch shards of a version, exchange them, check every chunk, and show it when it is whole.

:mod:`rollmuxd_weights.core.pull` decides; here are the threads that ask. A thread reads one stream into a buffer of its
own. Only a chunk whose CRC is right is written to the version's file, so nothing unchecked is ever in it.
"""

import contextlib
import http.client
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Final, NamedTuple, Self

import msgspec

from rollmuxd_weights.ask import TIMEOUT_S, ask, headers
from rollmuxd_weights.core import manifest as manifests
from rollmuxd_weights.core.fence import Identity, parse
from rollmuxd_weights.core.fence import identity as identity_of
from rollmuxd_weights.core.manifest import Manifest
from rollmuxd_weights.core.pull import Line, Meter, Pull, cut, lines
from rollmuxd_weights.hosts import Address, Hosts
from rollmuxd_weights.publish import private, read_hosts, serve, the_key
from rollmuxd_weights.serve import Done, Feed
from rollmuxd_weights.store import Store, default_folder, mapped

#: a host that sends nothing for so long is asked again over a new connection
SLOW_TIMEOUT_S: Final = 10.0
PEER_TIMEOUT_S: Final = 5.0
#: a long poll
POLL_S: Final = 5.0
#: nothing came for so long, from anywhere: the pull is given up
GIVE_UP_S: Final = 60.0
#: and for so long while other hosts have something newer: that is begun instead
SUPERSEDED_S: Final = 2.0
_RETRY_S: Final = 0.2
#: how often a trainer is asked that has not published yet
_EARLY_S: Final = 0.1
#: and it is waited for so many times longer than for a silent host. If all lines ask the one trainer that has
#: published, they share its line. Then requests that are under way there are slow to end when others publish
_LATE_STALLS: Final = 5
#: a peer is left out after so many chunks that were wrong, or that it took longer for than ``PEER_TIMEOUT_S``
_BAD_CHUNKS: Final = 2
#: peers that are asked in turn to tell a trainer what it does not hear from us, and how long each may take for it
_MOST_RELAYS: Final = 3
_RELAY_S: Final = 2.0
#: how often a trainer that did not take it hears it again
_REPORT_S: Final = 2.0


class Stale(Exception):
    """The version that was asked for is not kept any more: a newer one is here."""


class Incomplete(Exception):
    """A version did not come. ``ranges``: the bytes of its file that are missing, where that is known."""

    def __init__(self, why: str, ranges: list[tuple[int, int]]) -> None:
        super().__init__(why)
        self.ranges = ranges


class Superseded(Exception):
    """The hosts that answer have not this version, or no longer, and one of them has a newer one."""


class Pulled(NamedTuple):
    """A version that is whole here, and how it came."""

    identity: Identity
    path: Path
    seconds: float
    #: of payload; what came twice counts twice
    slow_bytes: int
    fabric_bytes: int
    #: chunks of other hosts' shards that came over our slow lines
    taken_over: int
    #: chunks that were here when it began
    resumed: int
    #: chunks that were wrong, or that a peer was too slow with, by where they came from
    wrong: dict[str, int]
    #: bytes per second of each of our slow lines, while it was busy
    rates: dict[str, float]


class Came(NamedTuple):
    """A chunk that came: for pictures. ``over``: the slow line, or the peer; ``at_s``: by ``time.monotonic``."""

    at_s: float
    over: str
    slow: bool
    chunk: int
    bytes: int


class Puller:
    """Pulls versions of one job's weights to this rollout host. A context manager; or call :meth:`start`.

    ``hosts``: the hosts file, or a mapping like it. None: pull nothing, and look at what another process
    (``rollmuxd weights pull``) pulls. ``me``: which host of it this is. ``streams``: connections for each slow line;
    more fill a line of long delay. ``flat``: fetch everything over the own lines, and ask no peer. ``key``: default
    ``$ROLLMUX_WEIGHTS_KEY``.

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
        streams: int = 1,
        flat: bool = False,
        give_up_s: float = GIVE_UP_S,
        on_chunk: Callable[[Came], None] | None = None,
    ) -> None:
        if not 1 <= streams <= 64:
            raise ValueError(f"streams={streams}: from 1 to 64")
        self.store = Store(Path(dir) if dir is not None else default_folder(job))
        self.hosts = read_hosts(hosts) if hosts is not None else None
        self.me = me if me is not None else os.uname().nodename
        self.job, self.key = job, the_key(key)
        self.streams, self.flat, self.give_up_s, self.on_chunk = streams, flat, give_up_s, on_chunk
        self._stack = contextlib.ExitStack()
        self.closing = threading.Event()
        self._waiting: http.client.HTTPConnection | None = None
        self._reports: list[threading.Thread] = []
        #: notified when a version is whole here, and at the end; what our slow lines carried of which version
        self._news = threading.Condition()
        self._measured: tuple[Identity, dict[str, float]] | None = None
        #: trainers that do not know what is here
        self._untold: set[str] = set()
        #: why the last pull failed, or which trainer does not answer
        self.failure: Exception | None = None
        if self.hosts is None:
            return
        if self.me not in self.hosts.rollouts:
            known = ", ".join(self.hosts.rollouts)
            raise ValueError(f"host {self.me!r} is none of the rollout hosts {known}: say me= (--host)")
        try:
            self._stack.enter_context(self.store.alone())
            self.server = serve(job, self.store, self.hosts, self.me, self.key)
            self.server.hand_on = self._hand_on
            self.server.failure = lambda: str(self.failure or "")
            self._stack.callback(self.server.close)
        except BaseException:
            self._stack.close()
            raise
        if self.store.current() is not None:
            self._untold.update(self.hosts.trainers)
        self._reports = [
            threading.Thread(target=self._tell, args=(trainer, addresses[0]), name=f"weights: {trainer}", daemon=True)
            for trainer, addresses in self.hosts.trainers.items()
        ]
        for thread in self._reports:
            thread.start()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def start(self) -> None:
        """Pull each new version as soon as there is one, in a thread, until :meth:`close`."""
        if self.hosts is None:
            return
        follows = threading.Thread(target=self.follow, name="weights: follow", daemon=True)
        follows.start()
        self._stack.callback(follows.join)

    def close(self) -> None:
        """Stop; a version on its way is continued by the next one."""
        self.closing.set()
        with self._news:
            self._news.notify_all()
        if self._waiting is not None:
            _shut(self._waiting)
        self._stack.close()
        for thread in self._reports:
            thread.join()

    # ---- what a loop asks --------------------------------------------------------------------------------------------

    def ready(
        self, version: int | Identity, timeout_s: float = 600.0, *, fence: str | None = None, run: int | None = None
    ) -> Path:
        """Wait until a version is whole here, and return its file.

        ``version``: an identity (``published.identity``), or the step, with what it was published with: ``fence`` and
        ``run``. The step alone cannot tell a run that begins again from the one before.

        Raises :class:`Stale` if a newer one has taken its place, and :class:`Incomplete` after ``timeout_s``.
        """
        until = time.monotonic() + timeout_s
        step, exact = (version.version, version) if isinstance(version, Identity) else (version, None)
        if exact is None and (fence is not None or run is not None):
            exact = identity_of(step, fence=fence, run=run or 0)
        while True:
            whole = self.store.whole()
            for one in reversed(whole):
                if one == exact or (exact is None and one.version == step and one.run == whole[-1].run):
                    return self.store.path(one)
            if whole and (whole[-1] > exact if exact is not None else whole[-1].version > step):
                raise Stale(
                    f"version {exact or step} is not kept: {whole[-1]} is here, which is newer. Ask for that one; or, "
                    "if training began again from an older step, give the publishers a new run (run=)"
                )
            if time.monotonic() > until:
                raise self._incomplete(exact or step, timeout_s)
            time.sleep(0.02)

    def _incomplete(self, version: int | Identity, timeout_s: float) -> Incomplete:
        ranges: list[tuple[int, int]] = []
        for path in self.store.folder.glob("*.have"):
            manifest = self.store.manifest(parse(path.name.removesuffix(".have")))
            if manifest is not None and version in (manifest.identity, manifest.identity.version):
                ranges = _ranges(manifest, [at for at, here in enumerate(path.read_bytes()) if not here])
        folder = self.store.folder
        if self.hosts is None and not self.store.whole() and not any(folder.glob("*.have")):
            return Incomplete(
                f"version {version} is not whole after {timeout_s:g} s: nothing was ever pulled to {folder}: "
                f"start `rollmuxd weights pull {self.job}` on this host, as this user and with this folder",
                ranges,
            )
        why = f" ({self.failure})" if self.failure is not None else ""
        return Incomplete(
            f"version {version} is not whole after {timeout_s:g} s{why}; `rollmuxd weights status` shows where it is, "
            "and the weights before it are still there",
            ranges,
        )

    # ---- pulling -----------------------------------------------------------------------------------------------------

    def follow(self) -> None:
        """Pull each new version as soon as there is one, until :meth:`close`."""
        while not self.closing.is_set():
            try:
                if self.pull(wait_s=POLL_S) is not None:
                    self.failure = None
            except Superseded as error:
                self.failure = error
            except (Incomplete, OSError, ValueError) as error:
                self.failure = error
                self.closing.wait(1.0)

    def pull(self, wait_s: float = 0.0) -> Pulled | None:
        """Pull the newest version that the trainers have; None if there is none newer than what is here.

        Waits so long for one. Raises :class:`Incomplete` and :class:`Superseded`.
        """
        found = self._newest(wait_s)
        if found is None or self.closing.is_set():
            return None
        return Transfer(self, found).run()

    def _newest(self, wait_s: float) -> Manifest | None:
        """The manifest of what to pull, from the first trainer that has one. An older fence is refused here.

        Where a trainer does not answer, the slow line may be dead, so the peers are asked as well.
        """
        assert self.hosts is not None
        failure: Exception | None = None
        older: Identity | None = None
        for number, (trainer, addresses) in enumerate(self.hosts.trainers.items()):
            if self.closing.is_set():
                return None
            try:
                found = self._newer_at(addresses[0], wait_s if number == 0 else 0.0, trainer)
            except (OSError, ValueError) as error:
                failure = Incomplete(f"trainer {trainer} at {addresses[0]}: {error}", [])
                found = self._newer_at_peers()
            if isinstance(found, Manifest):
                return found
            older = max(filter(None, (older, found)), default=None)
        current = self.store.current()
        if failure is None and older is not None and current is not None and older < current:
            failure = Stale(
                f"the trainers have {older}, which is older than {current} here, so it is not pulled. If training "
                "began again, give its publishers a new run: run=1, or one more than before"
            )
        self.failure = failure
        if wait_s:
            self.closing.wait(_RETRY_S)
        return None

    def _newer_at_peers(self) -> Manifest | None:
        assert self.hosts is not None
        for peer, addresses in self.hosts.rollouts.items():
            if peer != self.me and not self.flat:
                with contextlib.suppress(OSError, ValueError):
                    if isinstance(found := self._newer_at(addresses[0], 0.0), Manifest):
                        return found
        return None

    def _newer_at(self, at: Address, wait_s: float, trainer: str = "") -> Manifest | Identity | None:
        """The manifest of what a host has, if it is newer than what is here, else what it has.

        A trainer that does not know what is here, such as one whose store was emptied, gets a report.
        Raises OSError and ValueError.
        """
        current = self.store.current()
        after = f"&after={current}" if current is not None else ""
        told = _current(self.ask(at, f"/weights/current?wait_ms={int(1000 * wait_s)}{after}", wait_s))
        if trainer and current is not None and told.pulled.get(self.me) != str(current):
            self._tell_again(trainer)
        identity = told.newest
        if identity is None or (current is not None and identity <= current):
            return identity
        manifest = manifests.decode(self.ask(at, f"/weights/{identity}/manifest"))
        return manifest if manifest.identity == identity else None

    def superseded(self, identity: Identity) -> bool:
        """Whether a host has something newer, or pulls it. Peers first: they answer where the slow line is dead."""
        assert self.hosts is not None
        peers = () if self.flat else (at for peer, at in self.hosts.rollouts.items() if peer != self.me)
        for addresses in (*peers, *self.hosts.trainers.values()):
            with contextlib.suppress(OSError, ValueError):
                newest = _current(self.ask(addresses[0], "/weights/current")).newest
                if newest is not None and newest > identity:
                    return True
        return False

    def show(self, identity: Identity, rates: dict[str, float]) -> Path:
        """Show a version that is whole, and let every trainer hear of it, aside."""
        self._measured = identity, rates
        path = self.store.show(identity, self.store.path(identity, "part"))
        assert self.hosts is not None
        self._tell_again(*self.hosts.trainers)
        return path

    def _tell_again(self, *trainers: str) -> None:
        with self._news:
            self._untold.update(trainers)
            self._news.notify_all()

    def _tell(self, trainer: str, at: Address) -> None:
        """Tell a trainer what is here whenever it does not know it, and again until it has taken it."""
        tried: Identity | None = None
        while True:
            with self._news:
                self._news.wait_for(lambda: self.closing.is_set() or trainer in self._untold)
                current = self.store.current()
                if trainer not in self._untold or (self.closing.is_set() and current == tried):
                    return
                self._untold.discard(trainer)
            if current is None:  # the folder was emptied under it
                continue
            tried = current
            if not self._report(current, trainer, at):
                with self._news:
                    self._untold.add(trainer)
                    self._news.wait_for(self._has_news_after(tried), _REPORT_S)

    def _has_news_after(self, tried: Identity) -> Callable[[], bool]:
        return lambda: self.closing.is_set() or self.store.current() != tried

    def _report(self, identity: Identity, trainer: str, at: Address) -> bool:
        """Tell a trainer once; a peer hands it on where our slow line is dead. Whether the trainer has taken it."""
        assert self.hosts is not None
        rates = self._measured[1] if self._measured is not None and self._measured[0] == identity else {}
        peers = [addresses[0] for peer, addresses in self.hosts.rollouts.items() if peer != self.me and not self.flat]
        done = Done(self.me, rates)
        for host in (at, *peers[:_MOST_RELAYS]):
            with contextlib.suppress(OSError, ValueError):
                ask(host, f"/weights/{identity}/done", self.key, self.job, body=done)
                return True
            done = Done(self.me, rates, to=trainer)
        return False

    def _hand_on(self, identity: Identity, done: Done) -> None:
        assert self.hosts is not None
        if done.to not in self.hosts.trainers:
            raise ValueError(f"{done.to[:100]!r} is no trainer of this job")
        at = self.hosts.trainers[done.to][0]
        told = Done(done.host, done.rates)
        ask(at, f"/weights/{identity}/done", self.key, self.job, body=told, timeout_s=_RELAY_S)

    def ask(self, at: Address, path: str, wait_s: float = 0.0) -> bytes:
        """One question on a connection of its own, which :meth:`close` ends. Raises OSError and ValueError."""
        return ask(at, path, self.key, self.job, timeout_s=TIMEOUT_S + wait_s, opened=self._opened)

    def _opened(self, connection: http.client.HTTPConnection) -> None:
        self._waiting = connection
        if self.closing.is_set():
            _shut(connection)


class Transfer:
    """One version on its way here."""

    def __init__(self, puller: Puller, manifest: Manifest) -> None:
        assert puller.hosts is not None
        self._puller, self._manifest = puller, manifest
        self._hosts: Hosts = puller.hosts
        self._store, self._me = puller.store, puller.me
        self._server = puller.server
        #: guards the plan, the feed and the counts. It is the server's, whose waiting requests hear of the feed.
        #: Streams wait for what concerns them only: a chunk comes often, and there are many streams
        self._changed = puller.server.changed
        self._ended = threading.Condition(puller.server.lock)
        self._heard = {peer: threading.Condition(puller.server.lock) for peer in puller.hosts.rollouts}
        self._over = False
        self._connections: set[http.client.HTTPConnection] = set()
        #: of each connection that a peer is to send a chunk over: until when, and which peer it is
        self._due: dict[http.client.HTTPConnection, tuple[float, str, Address]] = {}
        self._gone: set[str] = set()
        self._counts = {"slow": 0, "fabric": 0}
        self._meters: dict[str, Meter] = {}
        self._wrong: dict[str, int] = {}
        self._failure: BaseException | None = None

    def run(self) -> Pulled:
        """Pull it, and show it."""
        began = time.monotonic()
        identity, store = self._manifest.identity, self._store
        store.make_room_for(identity)
        needed = self._manifest.bytes + sum(self._manifest.delta)
        if needed > store.free_bytes() + sum(_size(store.path(identity, kind)) for kind in ("part", "delta")):
            raise Incomplete(
                f"version {identity} takes {needed} bytes, and {store.folder} has {store.free_bytes()} "
                "left: make that file system larger, or name another folder with dir= (--dir)",
                [(0, self._manifest.bytes)],
            )
        self._open(began)
        resumed = self._manifest.chunks - len(self._plan.missing)
        try:
            for stream in self._streams():
                threading.Thread(target=self._guarded, args=stream, daemon=True).start()
            self._wait()
        finally:
            self._stop()
        rates = self._rates()
        path = self._puller.show(identity, rates)
        store.path(identity, "have").unlink()
        seconds = time.monotonic() - began
        counts, taken_over = self._counts, self._plan.taken_over
        return Pulled(
            identity, path, seconds, counts["slow"], counts["fabric"], taken_over, resumed, self._wrong, rates
        )

    # ---- begin -------------------------------------------------------------------------------------------------------

    def _open(self, now: float) -> None:
        manifest, store, identity = self._manifest, self._store, self._manifest.identity
        store.write(store.path(identity, "json"), msgspec.json.encode(manifest))
        self._base = self._base_of(manifest)
        self._kind = "bytes" if self._base is None else "delta"
        self._offsets = manifest.offsets(delta=self._base is not None)
        self._file = _opened(store.path(identity, "part"), manifest.bytes)
        files: dict[str, tuple[BinaryIO, list[int]]] = {"bytes": (self._file, manifest.offsets(delta=False))}
        if self._base is not None:
            files["delta"] = (_opened(store.path(identity, "delta"), self._offsets[-1]), self._offsets)
        self._files = files
        self._have = _opened(store.path(identity, "have"), manifest.chunks)
        here = self._resume()
        cards = [{name: len(of) for name, of in side.items()} for side in self._hosts]
        self._lines = [line for line in lines(*cards) if not self._puller.flat or line.host == self._me]
        cuts = cut(self._offsets, self._lines, manifest.rates)
        self._plan = Pull(self._me, self._lines, cuts, chunks=manifest.chunks, have=here, now=now)
        self._feed = Feed(files)
        self._feed.here.update(here)
        # What is resumed was checked again; of differences it is not known which are here.
        self._feed.log.extend(chunk + 1 for chunk in here if self._base is None)
        self._server.feed(identity, self._feed)

    def _base_of(self, manifest: Manifest) -> memoryview | None:
        """The version that the manifest has differences to, if it is the one here."""
        current = self._store.current()
        if current is None or str(current) != manifest.base:
            return None
        found = mapped(self._store.path(current))
        return found if len(found) == manifest.bytes else None

    def _resume(self) -> list[int]:
        """Chunks that are here and right: of an earlier attempt, or unchanged since the base."""
        manifest, here = self._manifest, []
        marks = os.pread(self._have.fileno(), manifest.chunks, 0)
        buffer = bytearray(manifest.chunk)
        for chunk, mark in enumerate(marks):
            begin, end = manifest.span(chunk)
            found = memoryview(buffer)[: end - begin]
            if mark:
                os.preadv(self._file.fileno(), [found], begin)
            elif self._base is not None and not manifest.delta[chunk]:
                found[:] = self._base[begin:end]
            else:
                continue
            if zlib.crc32(found) == manifest.crc[chunk]:
                if not mark:
                    self._keep(chunk, found)
                here.append(chunk)
        return here

    def _streams(self) -> Iterator[tuple[Callable[..., None], *tuple[Any, ...]]]:
        for number, line in enumerate(self._lines):
            if line.host == self._me:
                for _ in range(self._puller.streams):
                    yield self._over_line, number, line
        if self._puller.flat:
            return
        for peer, addresses in self._hosts.rollouts.items():
            if peer != self._me:
                yield self._listen, peer, addresses[0]
                for address in addresses:
                    yield self._from_peer, peer, address

    # ---- the end -----------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        identity, plan = self._manifest.identity, self._plan
        looked = time.monotonic()
        while True:
            with self._changed:
                if plan.whole:
                    return
                self._ended.wait(0.25)
                quiet = time.monotonic() - plan.last_progress
            self._end_late()
            if self._failure is not None:
                raise self._failure
            if self._puller.closing.is_set():
                raise Incomplete(f"version {identity}: closed before it was whole", self._missing())
            if quiet > self._puller.give_up_s:
                wrong = f"; wrong or late chunks: {told_wrong(self._wrong)}" if self._wrong else ""
                raise Incomplete(
                    f"version {identity}: nothing came for {quiet:.0f} s, and no host is known to have bytes "
                    f"{', '.join(f'{a}-{b}' for a, b in self._missing()[:8])}{wrong}; the version before is still "
                    "there",
                    self._missing(),
                )
            if quiet > SUPERSEDED_S and self._gone and time.monotonic() - looked > SUPERSEDED_S:
                looked = time.monotonic()
                if self._puller.superseded(identity):
                    raise Superseded(
                        f"version {identity} was not whole here when the hosts that answer dropped it for a newer one, "
                        "which is pulled next. If you see this often, pulls take longer than two versions are apart: "
                        "publish less often, or with delta=True"
                    )

    def _end_late(self) -> None:
        """End what a peer takes too long for, even if it sends a byte from time to time, and count it."""
        for connection, (until, peer, address) in list(self._due.items()):
            if time.monotonic() > until and connection in self._due:
                self._due.pop(connection, None)
                self._bad(peer, address)
                _shut(connection)

    def _stop(self) -> None:
        """End the streams. One that waits for a dead line ends later, and changes nothing any more."""
        with self._changed:
            self._over = True
            if self._plan.whole:  # from here on everything can be had here
                told = {entry - 1 for entry in self._feed.log if entry > 0}
                self._feed.log.extend(chunk + 1 for chunk in self._feed.here - told)
            for waits in (self._changed, self._ended, *self._heard.values()):
                waits.notify_all()
            open_now = list(self._connections)
            self._have.close()
        for one in open_now:
            _shut(one)

    def _missing(self) -> list[tuple[int, int]]:
        return _ranges(self._manifest, self._plan.missing)

    # ---- streams -----------------------------------------------------------------------------------------------------

    def _guarded(self, stream: Callable[..., None], *args: Any) -> None:
        """Run a stream; a fault of ours ends the pull with its traceback, not in silence."""
        try:
            stream(*args)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._ended.notify_all()

    def _over_line(self, number: int, line: Line) -> None:
        """Fetch over one of our slow lines: the own shard, then what others are late with."""
        trainers = list(self._hosts.trainers)
        # Where the own trainer is wrong or silent, another is asked from then on. Where it has not published yet, it is
        # waited for: others have lines of their own to fill. If it is late, others are asked for one request at a time.
        at = own = trainers.index(line.trainer)
        late_from, claimed = 0.0, list[int]()
        buffer = bytearray(self._manifest.chunk)
        connection: http.client.HTTPConnection | None = None
        while not self._over:
            with self._changed:
                run = self._plan.over_line(number, time.monotonic())
                if not run:
                    self._ended.wait(0.1)
                    continue
                if run != claimed:
                    self._feed.log.extend(-(chunk + 1) for chunk in run)
                    self._changed.notify_all()
            trainer, claimed = trainers[at % len(trainers)], list(run)
            over = str(line._replace(trainer=trainer))
            addresses = self._hosts.trainers[trainer]
            address = addresses[line.trainer_rail % len(addresses)]
            try:
                with self._metered(over):
                    connection = connection or self._connect(address, SLOW_TIMEOUT_S)
                    came = self._fetch(connection, address, run, buffer, over, slow=True)
            except (OSError, http.client.HTTPException, ValueError) as error:
                came = False
                early = isinstance(error, _NotThere)
                self._failed(run, trainer if early else None)
                if early and at == own:
                    late_from = late_from or time.monotonic() + _LATE_STALLS * self._plan.stall_s
                if not early and at == own:
                    own = at = at + 1
                    self._pause()
                elif time.monotonic() < late_from:
                    self._pause(_EARLY_S)
                else:
                    at += 1
                    if at - own == len(trainers):
                        at = own
                        self._pause()
            else:
                late_from = 0.0 if at == own else late_from
                came, at = came and at == own, own
            if not came and connection is not None:
                self._drop(connection)
                connection = None
        if connection is not None:
            self._drop(connection)

    @contextlib.contextmanager
    def _metered(self, over: str) -> Iterator[None]:
        """Count for how long a slow line is asked, even if nothing comes, unless its trainer has nothing yet."""
        early = False
        with self._changed:
            meter = self._meters.setdefault(over, Meter())
            meter.ask(time.monotonic())
        try:
            yield
        except _NotThere:
            early = True
            raise
        finally:
            with self._changed:
                meter.end(time.monotonic(), in_vain=early)

    def _rates(self) -> dict[str, float]:
        now = time.monotonic()
        with self._changed:
            found = {over: meter.rate(now) for over, meter in self._meters.items()}
        return {over: rate for over, rate in found.items() if rate is not None}

    def _listen(self, peer: str, address: Address) -> None:
        """Hear what a peer has."""
        after = 0
        connection: http.client.HTTPConnection | None = None
        while not self._over and not self._left_out(peer):
            try:
                connection = connection or self._connect(address, PEER_TIMEOUT_S + POLL_S)
                path = f"/weights/{self._manifest.id}/have?after={after}&wait_ms={int(1000 * POLL_S)}"
                connection.request("GET", path, headers=headers(self._puller.key, self._puller.job))
                answer = connection.getresponse()
                told = msgspec.json.decode(answer.read(64 << 20))
                if answer.status != 200:
                    raise _NotThere(str(told)) if answer.status == 404 else ValueError(str(told))
                log = [int(entry) for entry in told["log"]]
                if told["whole"]:
                    log = list(range(1, self._manifest.chunks + 1))
                with self._changed:
                    # A peer without differences is of no use to a host that can apply them: they are far smaller.
                    if self._kind == "bytes" or told["delta"]:
                        self._plan.heard(peer, log, time.monotonic())
                    self._heard[peer].notify_all()
                after = int(told["next"])
                if told["whole"]:
                    self._pause(POLL_S)
            except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError) as error:
                after = 0
                if connection is not None:
                    self._drop(connection)
                    connection = None
                with self._changed:
                    self._plan.lost(peer)
                    if isinstance(error, _NotThere):
                        self._gone.add(peer)
                self._pause()
        if connection is not None:
            self._drop(connection)

    def _from_peer(self, peer: str, address: Address) -> None:
        """Fetch from a peer over one of its cards."""
        buffer = bytearray(self._manifest.chunk)
        connection: http.client.HTTPConnection | None = None
        while not self._over and not self._left_out(peer):
            with self._changed:
                run = self._plan.from_peer(peer)
                if not run:
                    self._heard[peer].wait(1.0)
                    continue
            try:
                connection = connection or self._connect(address, SLOW_TIMEOUT_S)
                came = self._fetch(connection, address, run, buffer, peer, slow=False)
            except (OSError, http.client.HTTPException, ValueError):
                came = False
                self._failed(run, None)
                self._pause()
            if connection is not None:
                self._due.pop(connection, None)
            if not came and connection is not None:
                self._drop(connection)
                connection = None
        if connection is not None:
            self._drop(connection)

    def _fetch(
        self,
        connection: http.client.HTTPConnection,
        address: Address,
        run: list[int],
        buffer: bytearray,
        over: str,
        *,
        slow: bool,
    ) -> bool:
        """Read the chunks of a run. False: the rest of it is not wanted, so the connection is of no further use."""
        offsets = self._offsets
        begin, end = offsets[run[0]], offsets[run[-1] + 1]
        asked = time.monotonic()
        if not slow:
            self._due[connection] = (asked + self._plan.too_slow_s(PEER_TIMEOUT_S), over, address)
        given = {**headers(self._puller.key, self._puller.job), "Range": f"bytes={begin}-{end - 1}"}
        connection.request("GET", f"/weights/{self._manifest.id}/{self._kind}", headers=given)
        answer = connection.getresponse()
        if answer.status != 206 or answer.length != end - begin:
            said = answer.read(1000).decode(errors="replace")
            raise _NotThere(f"{address} answers {answer.status}: {said}") if answer.status == 404 else ValueError(said)
        for place, chunk in enumerate(run):
            size = offsets[chunk + 1] - offsets[chunk]
            view = memoryview(buffer)[:size]
            if not self._read(answer, view, None if place == 0 else chunk):
                self._failed(run[place:], None)
                return False
            now = time.monotonic()
            right = self._came(chunk, view, over, now, now - asked if slow else 0.0)
            asked = now
            if not slow:
                self._due[connection] = (now + self._plan.too_slow_s(PEER_TIMEOUT_S), over, address)
            if not right:
                self._bad(over, address)
                raise ValueError(f"{over} at {address}: chunk {chunk} is wrong")
        return True

    def _bad(self, over: str, address: Address) -> None:
        """Count a chunk that was wrong or late, and leave out a peer that has too many."""
        source = f"{over} at {address}"
        with self._changed:
            self._wrong[source] = self._wrong.get(source, 0) + 1
            if self._left_out(over):
                self._plan.leave_out(over)
                self._heard[over].notify_all()

    def _left_out(self, peer: str) -> bool:
        """Whether a peer has sent too many chunks that were wrong or late."""
        if peer not in self._heard:  # (a slow line: its stream asks another trainer)
            return False
        return sum(self._wrong.get(f"{peer} at {at}", 0) for at in self._hosts.rollouts[peer]) >= _BAD_CHUNKS

    def _read(self, answer: http.client.HTTPResponse, view: memoryview, chunk: int | None) -> bool:
        """Fill the view; false if this chunk has come from elsewhere, and is not worth its way."""
        if chunk is not None and not self._plan.misses(chunk):
            return False
        at = 0
        while at < len(view):
            got = answer.readinto(view[at:])
            if not got:
                raise ConnectionError("the connection ended within a chunk")
            at += got
        return True

    def _came(self, chunk: int, wire: memoryview, over: str, now: float, took_s: float) -> bool:
        """Check a chunk, keep it, and tell of it; false if it is wrong."""
        manifest = self._manifest
        begin, end = manifest.span(chunk)
        full: Any = wire
        if self._base is not None and len(wire) < end - begin:
            from rollmuxd_weights.core import delta

            try:
                full = delta.decode(self._base[begin:end], wire)
            except ValueError:
                return False
        if zlib.crc32(full) != manifest.crc[chunk]:
            return False
        slow = bool(took_s)
        with self._changed:
            self._counts["slow" if slow else "fabric"] += len(wire)
            if self._over:
                return True
            if slow:
                self._meters[over].bytes += len(wire)
            if self._plan.misses(chunk):
                try:
                    self._keep(chunk, full, wire)
                except Incomplete as error:
                    self._failure = self._failure or error
                    self._ended.notify_all()
                    return True
                self._feed.here.add(chunk)
                if slow:
                    self._feed.log.append(chunk + 1)
            self._plan.got(chunk, now, took_s=took_s)
            if slow:
                self._changed.notify_all()
            if self._plan.whole:
                self._ended.notify_all()
        if self._puller.on_chunk is not None:
            self._puller.on_chunk(Came(now, over, slow, chunk, len(wire)))
        return True

    def _keep(self, chunk: int, full: Any, wire: memoryview | None = None) -> None:
        """Write a chunk that is right, and only then that it is here. Raises Incomplete where there is no room."""
        begin, end = self._manifest.span(chunk)
        try:
            if wire is not None and "delta" in self._files:
                _write_at(self._files["delta"][0], wire, self._offsets[chunk])
            _write_at(self._file, full, begin)
            os.pwrite(self._have.fileno(), b"\x01", chunk)
        except OSError as error:
            raise Incomplete(
                f"version {self._manifest.identity} cannot be written to {self._store.folder}: {error.strerror}. Make "
                "room there, or name another folder with dir= (--dir)",
                [(begin, end)],
            ) from error

    def _failed(self, run: list[int], gone: str | None) -> None:
        with self._changed:
            self._plan.failed(run)
            if gone is not None:
                self._gone.add(gone)

    def _pause(self, seconds: float = _RETRY_S) -> None:
        until = time.monotonic() + seconds
        with self._changed:
            while not self._over and (left := until - time.monotonic()) > 0:
                self._ended.wait(left)

    def _connect(self, at: Address, timeout_s: float) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection(at.host, at.port, timeout=PEER_TIMEOUT_S)
        connection.connect()
        assert connection.sock is not None
        connection.sock.settimeout(timeout_s)
        connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with self._changed:
            self._connections.add(connection)
            if self._over:
                _shut(connection)
        return connection

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._changed:
            self._connections.discard(connection)
        connection.close()


class _NotThere(ValueError):
    """A host has not this version, or not yet."""


class _Current(msgspec.Struct):
    id: str
    pulling: list[str] = []
    pulled: dict[str, str] = {}

    @property
    def newest(self) -> Identity | None:
        """The newest version that a host says it has, or pulls: a peer offers what it has of it."""
        return max((parse(one) for one in (self.id, *self.pulling) if one), default=None)


def _current(body: bytes) -> _Current:
    return msgspec.json.decode(body, type=_Current)


def _shut(connection: http.client.HTTPConnection) -> None:
    found = connection.sock  # another thread may close it just now
    if found is not None:
        with contextlib.suppress(OSError):
            found.shutdown(socket.SHUT_RDWR)


def told_wrong(wrong: Mapping[str, int]) -> str:
    """Where wrong chunks came from, for a person."""
    return ", ".join(f"{count} from {source}" for source, count in wrong.items())


def _ranges(manifest: Manifest, chunks: list[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in map(manifest.span, chunks):
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _opened(path: Path, size: int) -> BinaryIO:
    """A file of this size, with what it has."""
    file = os.fdopen(private(str(path), os.O_RDWR | os.O_CREAT), "r+b", buffering=0)
    os.truncate(file.fileno(), size)
    return file


def _size(path: Path) -> int:
    """What a file takes; one that is not written yet is long, and takes nothing."""
    return path.stat().st_blocks * 512 if path.exists() else 0


def _write_at(file: BinaryIO, data: Any, at: int) -> None:
    view = memoryview(data)
    while view:
        wrote = os.pwrite(file.fileno(), view, at)
        view, at = view[wrote:], at + wrote
