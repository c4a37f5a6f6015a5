"""What a host offers of its weights, over plain HTTP. A trainer host and a rollout host serve in the same way.

    GET  /weights/current?after=ID&wait_ms=        the newest whole version, and which hosts pulled what
    GET  /weights/ID/manifest                      rollmuxd_weights.core.manifest
    GET  /weights/ID/have?after=N&wait_ms=         what this host fetched over its slow lines since entry N
    GET  /weights/ID/bytes, /weights/ID/delta      with Range: bytes=A-B; the kernel sends from the page cache
    POST /weights/ID/done                          a puller has it whole

An address has the whole identity of a version, so bytes of two versions cannot meet. 404 means: not here, no longer
here, or not yet. 409 means: this host serves another job's weights. The key of the run is asked for by ``Authorization:
Bearer``. A thread serves one connection. There are as many as there are hosts, and ``sendfile`` needs no Python.
"""

import bisect
import contextlib
import hmac
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, BinaryIO, Final
from urllib.parse import parse_qs

import msgspec

from rollmuxd_weights.core.fence import Identity, parse
from rollmuxd_weights.core.manifest import Rates
from rollmuxd_weights.hosts import Address
from rollmuxd_weights.store import Store, checked_name

#: connections at a time; a host needs a few to each other host
MOST_CONNECTIONS: Final = 2048
#: a connection without a word is closed after this long
IDLE_S: Final = 120.0
#: the header that names the job whose weights are asked for
JOB: Final = "Rollmux-Job"
MOST_WAIT_S: Final = 30.0
MOST_BODY: Final = 1 << 20
#: how often a waiting request looks for what another process has published
_LOOK_S: Final = 0.05
#: how much is sent before it is noted again that a host asks for a version
_PIECE: Final = 1 << 20
_RANGE: Final = re.compile(r"bytes=(\d{1,15})-(\d{1,15})")


class Done(msgspec.Struct):
    """What a puller says when it has a version: which host it is, and what its slow lines carried, bytes per second."""

    host: str
    rates: Rates = {}
    #: the trainer that a peer is asked to hand this on to; empty: it is for the process that reads it
    to: str = ""


class Feed:
    """A version on its way to this host: what it has fetched itself, in order, and what is under way to it.

    An entry of the log is ``chunk + 1`` for a chunk that is here, ``-(chunk + 1)`` for one that was asked for.
    ``files``: where ``bytes``, and ``delta`` if there are differences, are written, and where their chunks begin.
    """

    def __init__(self, files: Mapping[str, tuple[BinaryIO, Sequence[int]]]) -> None:
        self.log: list[int] = []
        self.files = files
        self.here: set[int] = set()

    def has(self, kind: str, begin: int, end: int) -> bool:
        """Whether all chunks of these bytes are here."""
        _, offsets = self.files[kind]
        first, last = (bisect.bisect_right(offsets, at) - 1 for at in (begin, end - 1))
        return all(chunk in self.here for chunk in range(first, last + 1))

    def close(self) -> None:
        """Close the files. What is being sent from them is sent to its end."""
        for file, _ in self.files.values():
            file.close()


class Server:
    """Serves one store at each of these addresses, from :meth:`start` to :meth:`close`.

    Without a key it serves this machine alone: it raises ValueError for another address.
    """

    def __init__(self, store: Store, at: Sequence[Address], key: str, job: str) -> None:
        for one in at:
            if not key and not one.is_loopback:
                raise ValueError(
                    f"{one} can be reached from other machines, and there is no key: set ROLLMUX_WEIGHTS_KEY to the "
                    "same random word on every host"
                )
        self.store = store
        self.key, self.job = key, job
        #: notified at every change of feeds or versions by this process
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.feeds: dict[Identity, Feed] = {}
        self.closing = False
        #: on a rollout host: hands what a peer says on to the trainer that it names. Raises OSError and ValueError
        self.hand_on: Callable[[Identity, Done], None] | None = None
        #: and why it has not the newest version
        self.failure: Callable[[], str] = str
        self._listeners: list[_Listener] = []
        try:
            for one in at:
                try:
                    self._listeners.append(_Listener(self, one))
                except OSError as error:
                    raise OSError(error.errno, f"nothing can listen at {one} here: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    @property
    def addresses(self) -> list[Address]:
        """Where it listens; ports that were 0 are known here."""
        return [Address(one.server_address[0], one.server_address[1]) for one in self._listeners]  # type: ignore[arg-type]

    def start(self) -> None:
        """Serve, in threads."""
        for one in self._listeners:
            threading.Thread(target=one.serve_forever, args=(0.1,), name=f"weights at {one}", daemon=True).start()
            one.serving = True

    def close(self) -> None:
        """Stop listening, and close every connection."""
        with self.changed:
            self.closing = True
            self.changed.notify_all()
        for one in self._listeners:
            if one.serving:
                one.shutdown()
            one.server_close()
            one.close_connections()
        with self.changed:
            for feed in self.feeds.values():
                feed.close()
            self.feeds.clear()

    def feed(self, identity: Identity, feed: Feed) -> None:
        """Offer a version on its way in place of the one before."""
        with self.changed:
            for old in self.feeds.values():
                old.close()
            self.feeds.clear()
            self.feeds[identity] = feed
            self.changed.notify_all()

    def note_pulled(self, identity: Identity, done: Done) -> None:
        """Remember that a host has a version."""
        with self.changed:
            found = self.store.pulled()
            known = found.get(done.host, {})
            before, first = known.get("rates", {}), known.get("first", str(identity))
            # A line that carried nothing is dead at once, and one that carries again is well at once.
            rates = {
                line: (rate + before[line]) / 2 if rate and before.get(line) else rate
                for line, rate in done.rates.items()
            }
            found[done.host] = {"id": str(identity), "first": first, "rates": {**before, **rates}}
            if len(found) <= 1 << 13:
                self.store.write(self.store.folder / "pulled.json", msgspec.json.encode(found))
            self.changed.notify_all()


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 256

    def __init__(self, owner: Server, at: Address) -> None:
        self.address_family = socket.AF_INET6 if ":" in at.host else socket.AF_INET
        self.owner = owner
        self.serving = False
        #: connections, and since when their next request is awaited; 0: it is being answered
        self.open: dict[socket.socket, float] = {}
        super().__init__((at.host, at.port), _Handler)

    def __str__(self) -> str:
        return str(self.server_address)

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self.open) >= MOST_CONNECTIONS or self.owner.closing:
            self.shutdown_request(request)
            return
        self.open[request] = time.monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections whose request does not come, even if they send a byte from time to time."""
        before = time.monotonic() - IDLE_S
        for one, since in list(self.open.items()):
            if 0 < since < before:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A connection that breaks concerns its other end."""

    def close_connections(self) -> None:
        for one in list(self.open):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)


class _Refused(Exception):
    def __init__(self, status: int, why: str) -> None:
        self.status, self.why = status, why


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "rollmuxd-weights"
    sys_version = ""
    timeout = IDLE_S
    disable_nagle_algorithm = True
    server: _Listener

    def handle_one_request(self) -> None:
        """Read one request, and answer it."""
        self._awaits(time.monotonic())
        super().handle_one_request()

    def _awaits(self, since: float) -> None:
        if self.connection in self.server.open:
            self.server.open[self.connection] = since

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing: chunks are many."""

    def do_GET(self) -> None:
        """Answer with a version's manifest, feed or bytes."""
        self._awaits(0.0)
        self._answer(self._get)

    def do_POST(self) -> None:
        """Note what a puller has."""
        self._answer(self._post)

    def _answer(self, how: Any) -> None:
        try:
            key = self.server.owner.key
            given = self.headers.get("Authorization", "").removeprefix("Bearer ")
            if key and not hmac.compare_digest(given.encode(), key.encode()):
                raise _Refused(401, "the key of this run is needed (ROLLMUX_WEIGHTS_KEY)")
            job = self.server.owner.job
            if (asked_for := self.headers.get(JOB, job)) != job:
                raise _Refused(
                    409,
                    f"this host serves the weights of job {job!r}, not of {asked_for[:100]!r}: mend the name, or "
                    "the address in the hosts file",
                )
            path, _, query = self.path.partition("?")
            parts = path.split("/")
            if parts[:2] != ["", "weights"] or len(parts) not in (3, 4):
                raise _Refused(404, "there is /weights/current and /weights/ID/manifest, have, bytes, delta and done")
            asked = {name: values[0] for name, values in parse_qs(query, max_num_fields=8).items()}
            how(parts[2:], asked)
        except _Refused as refused:
            # What the request carried may not have been read, so nothing can follow it.
            self.close_connection = self.close_connection or self.command == "POST"
            self._send(refused.status, {"error": refused.why})
        except ValueError as error:
            self.close_connection = True
            self._send(400, {"error": str(error)[:500]})

    def _send(self, status: int, body: Any) -> None:
        packed = body if isinstance(body, bytes) else msgspec.json.encode(body)
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(packed)))
        self.end_headers()
        self.wfile.write(packed)

    # ---- what is asked -----------------------------------------------------------------------------------------------

    def _get(self, parts: list[str], asked: dict[str, str]) -> None:
        owner = self.server.owner
        if parts == ["current"]:
            after, until = asked.get("after", ""), self._until(asked)
            while str(owner.store.current() or "") == after and self._wait(until):
                pass
            pulling = [str(one) for one in owner.feeds if one != owner.store.current()]
            pulled = {host: told["id"] for host, told in owner.store.pulled().items()}
            current = {"id": str(owner.store.current() or ""), "pulling": pulling, "pulled": pulled}
            self._send(200, {**current, "failure": owner.failure()[:500]})
            return
        if len(parts) != 2:
            raise _Refused(404, "a version has manifest, have, bytes and delta")
        identity, what = parse(parts[0]), parts[1]
        if what == "manifest":
            try:
                self._send(200, owner.store.path(identity, "json").read_bytes())
            except OSError:
                raise self._missing(identity) from None
        elif what == "have":
            self._have(identity, int(asked.get("after", "0")), self._until(asked))
        elif what in ("bytes", "delta"):
            self._bytes(identity, what)
        else:
            raise _Refused(404, "a version has manifest, have, bytes and delta")

    def _have(self, identity: Identity, after: int, until: float) -> None:
        owner = self.server.owner
        with owner.changed:
            while True:
                feed = owner.feeds.get(identity)
                log = feed.log[max(0, after) :] if feed is not None else []
                whole = feed is None and owner.store.path(identity).exists()
                left = until - time.monotonic()
                if log or whole or left <= 0 or owner.closing:
                    break
                owner.changed.wait(min(left, 1.0))
        if feed is None and not whole:
            raise self._missing(identity)
        differences = feed is not None and "delta" in feed.files
        self._send(200, {"log": log, "next": max(0, after) + len(log), "whole": whole, "delta": differences})

    def _bytes(self, identity: Identity, kind: str) -> None:
        found = _RANGE.fullmatch(self.headers.get("Range", ""))
        if found is None:
            raise _Refused(416, "ask for a range: Range: bytes=0-4194303")
        begin, end = int(found[1]), int(found[2]) + 1
        file = self._open(identity, kind, begin, end)
        try:
            size = os.fstat(file).st_size
            if not begin < end <= size:
                raise _Refused(416, f"bytes {begin} to {end - 1} are not within the file, which has {size}")
            self.send_response(206)
            self.send_header("Content-Length", str(end - begin))
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{size}")
            self.end_headers()
            self._sendfile(identity, file, begin, end)
        finally:
            os.close(file)

    def _open(self, identity: Identity, kind: str, begin: int, end: int) -> int:
        """A descriptor of our own: the file may be closed, or lose its name, while it is sent."""
        owner = self.server.owner
        with owner.changed:
            feed = owner.feeds.get(identity)
            if feed is not None and kind in feed.files:
                if end > begin and not feed.has(kind, begin, end):
                    raise self._missing(identity)
                return os.dup(feed.files[kind][0].fileno())
        try:
            return os.open(owner.store.path(identity, "safetensors" if kind == "bytes" else kind), os.O_RDONLY)
        except OSError:
            raise self._missing(identity) from None

    def _sendfile(self, identity: Identity, file: int, at: int, end: int) -> None:
        # A timeout of Python's would make the socket non-blocking; the kernel's own leaves the waiting to sendfile.
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(IDLE_S), 0))
        while at < end:
            self.server.owner.store.asked(identity)
            sent = os.sendfile(self.connection.fileno(), file, at, min(end - at, _PIECE))
            if not sent:
                raise ConnectionError("the file has become shorter")
            at += sent
        self.connection.settimeout(IDLE_S)

    def _post(self, parts: list[str], asked: dict[str, str]) -> None:
        length = int(self.headers.get("Content-Length") or "0")
        if len(parts) != 2 or parts[1] != "done" or not 0 < length <= MOST_BODY:
            raise _Refused(404, f"POST /weights/ID/done with up to {MOST_BODY} bytes")
        identity = parse(parts[0])
        try:
            done = msgspec.json.decode(self.rfile.read(length), type=Done)
            self._awaits(0.0)
        except msgspec.DecodeError as error:
            raise ValueError(f"this is not what a puller says: {error}") from error
        checked_name(done.host, "the host")
        if done.to:
            self._hand_on(identity, done)
        else:
            self.server.owner.note_pulled(identity, done)
        self._send(200, {})

    def _hand_on(self, identity: Identity, done: Done) -> None:
        if (hand_on := self.server.owner.hand_on) is None:
            raise _Refused(404, "this host hands nothing on")
        try:
            hand_on(identity, done)
        except OSError as error:
            raise _Refused(502, f"trainer {done.to} does not answer: {error}") from None

    # ---- waiting -----------------------------------------------------------------------------------------------------

    @staticmethod
    def _until(asked: dict[str, str]) -> float:
        return time.monotonic() + min(MOST_WAIT_S, max(0, int(asked.get("wait_ms", "0"))) / 1000)

    def _wait(self, until: float) -> bool:
        """Wait for a change; false once the time is over."""
        owner = self.server.owner
        left = until - time.monotonic()
        if left <= 0 or owner.closing:
            return False
        with owner.changed:
            owner.changed.wait(min(left, _LOOK_S))
        return True

    @staticmethod
    def _missing(identity: Identity) -> _Refused:
        return _Refused(404, f"version {identity} is not here, not any more, or not yet")
