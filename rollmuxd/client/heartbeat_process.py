"""The heartbeat: a process beside the training process. So a held GIL, a long save or a debugger there does not cost
the job its slot.

It is run by path with ``-I -S`` (:mod:`rollmuxd.client.heartbeat`), so it uses the standard library only and sees no
site-packages. It starts in some 50 ms and stays below 20 MB (11 MB of its own). There may be one per job, in a host
memory full of parked states. With httpx it would be 30 MB and 0.3 s. ``http.client`` rather than HTTP by hand (9 MB
less) for chunked answers and TLS.

While a slot is held a heartbeat is a long poll: the daemon holds its answer back until it has another directive. One
thread waits for that answer, the other for the parent. Progress that reaches the tail goes out at once, with a new poll
in place of the open one.

JSON lines come in on stdin: first where to beat, then whatever changes (``session``, ``slot``, ``done``, ``total``).
The API key comes this way too, because other users can read arguments and environments. JSON lines go out on stdout:
``directives``, ``refused``, ``down``, ``up``. It ends when stdin does, or when its parent has ended. If its parent has
ended without stopping it, it sends a last beat. Then the job is lost at once, not one lease time later.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import threading
import time
from typing import Any
from urllib.parse import quote, urlsplit

#: seconds between looks at our parent's pid
LOOK_S = 1.0
#: seconds for one beat
BEAT_TIMEOUT_S = 10.0
#: a slot that is held for so long gets its first poll; a shorter phase costs no call of its own
POLL_AFTER_S = 1.0
#: a poll waits for so long at most: below the usual idle limits (60 s) of whatever is in between
POLL_S = 25.0
#: bytes of an answer that are taken in
ANSWER = 1_000_000
#: a daemon that is away is looked for again after this, doubling up to the heartbeat
FIRST_PAUSE_S = 0.5
#: seconds between two lines about the same trouble
SAY_EVERY_S = 60.0
#: a parent that has closed the pipe has so many seconds to end: it may have to free GPU memory first
ENDS_S = 20.0
#: seconds between looks whether it has ended
ENDED_S = 0.05
#: for so many seconds the last beat is sent again where no daemon answers, and so often
LAST_BEAT_S = 60.0
LAST_BEAT_EVERY_S = 1.0


class Beater:
    """Beats for one session, for as long as the process ``parent`` lives.

    One thread listens to the parent, another beats; ``_changed`` guards what both use.
    """

    def __init__(self, read_fd: int, write_fd: int, parent: int, started: str = "") -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._parent = parent
        #: when it was started: a later process may have its pid. It says so itself: it may have ended before we begin
        self._started = started
        self._buffer = b""
        self._changed = threading.Condition()
        self._over = False
        self._now: dict[str, Any] = {}
        self._next = 0.0
        #: the beat that waits for its answer
        self._open: _Beat | None = None
        #: names the directives that we were told last
        self._tag = ""
        #: the daemon knows that the tail has begun
        self._in_tail = False
        self._failures = 0
        self._failing_since = 0.0
        self._said: float | None = None
        self._last_directives: Any = []

    def run(self) -> None:
        """Beat until the parent is gone; then say so, unless it has stopped us before."""
        threading.Thread(target=self._beats, daemon=True).start()
        while os.getppid() == self._parent:
            if select.select([self._read_fd], [], [], LOOK_S)[0] and not self._told():
                break
            beat = self._open
            if beat is not None and time.monotonic() > beat.until:  # each piece of an answer has its own time limit
                beat.cut()
        with self._changed:
            self._over = True
            self._drop()
            self._changed.notify()
        if self._has_ended():
            while select.select([self._read_fd], [], [], 0)[0] and self._told():
                pass
            self._beat_last()

    def _has_ended(self) -> bool:
        """Wait until the parent has ended, for as long as that may take; whether it has."""
        until = time.monotonic() + ENDS_S
        while self._started and time.monotonic() < until:
            if os.getppid() != self._parent and start_of(self._parent, running=True) != self._started:
                return True
            time.sleep(ENDED_S)
        return False

    def _beat_last(self) -> None:
        """Say that the parent is gone, until a daemon has heard it."""
        # Our stderr is the parent's, and what reads that waits for its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        until = time.monotonic() + LAST_BEAT_S
        gone = {"pid": self._parent, "started": self._started}
        while self._now.get("session") and self._now.get("last_beat") and time.monotonic() < until:
            try:
                status = self._post(self._now["session"], gone=gone)
            except Exception:  # no daemon; it may come back
                status = 0
            if status == 200 or status in {400, 401, 403, 404, 409, 410, 422}:
                return
            time.sleep(LAST_BEAT_EVERY_S)

    def _told(self) -> bool:
        """Take in what the parent says; False when it will say nothing more."""
        data = os.read(self._read_fd, 65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        with self._changed:
            for line in lines:
                told = json.loads(line)
                self._now.update(told)
                if "session" in told:
                    self._beat_now()
                if "slot" in told:
                    self._tag, self._in_tail = "", False
                    self._drop()
                    if told["slot"] is not None:
                        self._next = min(self._next, time.monotonic() + POLL_AFTER_S)
            if self._reaches_tail() and not self._in_tail:
                self._beat_now()
            self._changed.notify()
        return bool(data)

    def _reaches_tail(self) -> bool:
        done, total = self._now.get("done") or 0, self._now.get("total") or 0
        return bool(self._now.get("slot") and total and done >= float(self._now.get("tail_from") or 1.0) * total)

    def _beat_now(self) -> None:
        self._drop()
        # Where none is answered there is a pause between two of them all the same.
        if not self._failures:
            self._next = 0.0

    def _drop(self) -> None:
        """Stop waiting for the answer of the open beat; the next one is due when it was."""
        if self._open is not None:
            self._open.cut()
            self._next = self._open.began + float(self._now["heartbeat_s"])
            self._open = None

    def _beats(self) -> None:
        """Beat whenever it is time, until it is over."""
        while True:
            with self._changed:
                while not self._over and (left_s := self._left_s()) > 0:
                    self._changed.wait(left_s)
                if self._over:
                    return
                self._beat()
                beat = self._open
            if beat is not None:
                self._take(beat)

    def _left_s(self) -> float:
        """Seconds until the next beat."""
        return self._next - time.monotonic() if self._now.get("session") else LOOK_S

    def _beat(self) -> None:
        now = time.monotonic()
        body = self._body()
        if self._now.get("slot") is not None:
            body |= {"wait_s": min(POLL_S, float(self._now["heartbeat_s"])), "tag": self._tag}
        self._in_tail = self._reaches_tail()
        try:
            self._open = self._send(self._now["session"], body)
        except Exception as error:  # whatever it is: heartbeats continue
            self._failed(now, f"{type(error).__name__}: {error}")

    def _take(self, beat: _Beat) -> None:
        """Wait for the answer, and heed it, unless the beat was dropped meanwhile."""
        failed, answer = "", None
        try:
            answer = beat.answer()
        except Exception as error:
            failed = f"{type(error).__name__}: {error}"
        with self._changed:
            if self._open is beat:
                self._open = None
                if answer is None:
                    self._failed(beat.began, failed)
                else:
                    self._answered(beat, *answer)

    def _answered(self, beat: _Beat, status: int, answer: dict[str, Any]) -> None:
        if status == 200:
            changed = self._tag != (answer.get("tag") or "")
            self._tag = answer.get("tag") or ""
            self._well(beat.began, answer)
            # An answer that was held back until now is followed at once; an early one without news waits for its time.
            self._next = (
                0.0 if changed and beat.wait_s else beat.began + (beat.wait_s or float(self._now["heartbeat_s"]))
            )
            return
        detail = str(answer.get("detail") or answer.get("title") or "")
        if status in {404, 409, 410}:
            # Not for us to judge, and it may be of a proxy: beat again.
            self._say(refused=status, detail=detail)
            self._next = beat.began + float(self._now["heartbeat_s"])
            return
        self._failed(beat.began, f"{status} {detail}".strip())

    def _failed(self, now: float, why: str) -> None:
        self._failures += 1
        if self._failures == 1:
            self._failing_since = now
        # The first failure is silent: a daemon that is restarted is back before the second.
        if self._failures >= 2 and (self._said is None or now - self._said >= SAY_EVERY_S):
            self._said = now
            self._say(down=why, seconds=now - self._failing_since)
        every = float(self._now["heartbeat_s"])
        pause = min(every, FIRST_PAUSE_S * 2.0 ** min(self._failures - 1, 16))
        # Clients of one daemon must not come back in step; `random` would cost a megabyte for this.
        jitter = 0.7 + time.monotonic_ns() // 1000 % 600 / 1000
        self._next = time.monotonic() + pause * jitter

    def _well(self, now: float, answer: dict[str, Any]) -> None:
        if self._said is not None:
            self._say(up=now - self._failing_since)
        self._failures, self._said = 0, None
        directives = answer.get("directives") or []
        if directives != self._last_directives:
            self._last_directives = directives
            self._say(directives=directives)

    def _body(self) -> dict[str, Any]:
        return {name: self._now.get(name) or 0 for name in ("done", "total")} | {"slot": self._now.get("slot")}

    def _post(self, session: str, **more: Any) -> int:
        """Send a beat, and wait for its answer."""
        return self._send(session, self._body() | more).answer()[0]

    def _send(self, session: str, body: dict[str, Any]) -> _Beat:
        headers = {"content-type": "application/json", "connection": "close"}
        if self._now.get("journal"):
            headers["rollmux-journal"] = self._now["journal"]
        if self._now.get("api_key"):
            headers["authorization"] = "Bearer " + self._now["api_key"]
        connection, base = self._connection()
        try:
            path = f"{base}/v1/sessions/{quote(session, safe='')}/heartbeat"
            connection.request("POST", path, json.dumps(body).encode(), headers)
            return _Beat(connection, body.get("wait_s", 0.0))
        except BaseException:
            connection.close()
            raise

    def _connection(self) -> tuple[http.client.HTTPConnection, str]:
        # A new one per beat: servers close idle connections sooner than the next one is due.
        if self._now.get("socket"):
            return _UnixConnection(self._now["socket"]), ""
        url = urlsplit(self._now["base_url"])
        if url.scheme == "https":
            import ssl

            trust = ssl.create_default_context(cafile=self._now.get("ca_file"))
            secure = http.client.HTTPSConnection(url.hostname or "", url.port, timeout=BEAT_TIMEOUT_S, context=trust)
            return secure, url.path
        return http.client.HTTPConnection(url.hostname or "", url.port, timeout=BEAT_TIMEOUT_S), url.path

    def _say(self, **what: Any) -> None:
        # A parent that has gone meanwhile is noticed by the loop.
        with contextlib.suppress(OSError):
            os.write(self._write_fd, json.dumps(what).encode() + b"\n")


class _Beat:
    """A beat that was sent."""

    def __init__(self, connection: http.client.HTTPConnection, wait_s: float) -> None:
        self.began = time.monotonic()
        #: of a long poll; else 0
        self.wait_s = wait_s
        self.until = self.began + wait_s + BEAT_TIMEOUT_S
        self._connection, self._socket = connection, connection.sock
        self._socket.settimeout(wait_s + BEAT_TIMEOUT_S)

    def answer(self) -> tuple[int, dict[str, Any]]:
        """Wait for the answer. Raises OSError or HTTPException when none will come."""
        with contextlib.closing(self._connection):
            response = self._connection.getresponse()
            content = response.read(ANSWER)
        try:
            answer = json.loads(content)
        except ValueError:
            if response.status == 200:
                raise ConnectionError("the answer was cut short, or is not the daemon's") from None
            answer = {"detail": content[:200].decode(errors="replace")}
        return response.status, answer if isinstance(answer, dict) else {}

    def cut(self) -> None:
        """Have its answer fail now, for what waits for it."""
        with contextlib.suppress(OSError):
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # also of TLS: its own way is for one thread


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("rollmuxd", timeout=BEAT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def start_of(pid: int, *, running: bool = False) -> str:
    """When a process was started, in the system's words; empty: there is none, or (``running``) it has ended."""
    try:
        stat = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
        try:
            # The name (field 2) is in brackets and may hold anything; field 22 is the 20th after it.
            fields = os.read(stat, 4096).decode(errors="replace").rpartition(")")[2].split()
        finally:
            os.close(stat)
    except OSError:
        return ""
    return "" if running and fields[0] in {"Z", "X"} else fields[19]


def main() -> None:
    """Run as a process: ``python -I -S heartbeat_process.py PARENT_PID WHEN_IT_WAS_STARTED``."""
    import sys

    Beater(0, 1, int(sys.argv[1]), sys.argv[2]).run()


if __name__ == "__main__":
    main()
