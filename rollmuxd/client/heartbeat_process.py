"""The heartbeat: a process of its own beside the training process, so that a held GIL, a long save or a debugger
there does not cost the job its slot.

It is run by path with ``-I -S`` (:mod:`rollmuxd.client.heartbeat`), so it uses the standard library only and sees no
site-packages: it starts in some 50 ms and stays below 20 MB (11 MB of its own), and there may be one per job
beside a host memory full of parked states.
With httpx it would be 30 MB and 0.3 s. ``http.client`` rather than HTTP by hand (9 MB less) for chunked answers and
TLS.

JSON lines come in on stdin: first where to beat, then whatever changes (``session``, ``slot``, ``done``, ``total``).
The API key comes this way too, as arguments and environments can be read by others. JSON lines go out on stdout:
``directives``, ``refused``, ``down``, ``up``. It ends when stdin does, or when its parent has ended. If its parent has
ended without stopping it, it sends a last beat: the job is then lost at once, and not one lease time later.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import select
import socket
import time
from typing import Any
from urllib.parse import quote, urlsplit

#: seconds between looks at who our parent is
LOOK_S = 1.0
#: seconds for one beat
BEAT_TIMEOUT_S = 10.0
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
    """Beats for one session. ``parent`` None: it runs as a thread, and ends with its pipe alone."""

    def __init__(self, read_fd: int, write_fd: int, parent: int | None) -> None:
        self._read_fd = read_fd
        self._write_fd = write_fd
        self._parent = parent
        #: when it was started: a later process may have its pid
        self._started = start_of(parent) if parent is not None and os.getppid() == parent else ""
        self._buffer = b""
        self._now: dict[str, Any] = {}
        #: a session that was refused: no more beats until we are told of a new one
        self._refused: str | None = None
        self._next = 0.0
        self._failures = 0
        self._failing_since = 0.0
        self._said: float | None = None
        self._last_directives: Any = []

    def run(self) -> None:
        """Beat until the parent is gone; then say so, unless it has stopped us before."""
        while self._parent is None or os.getppid() == self._parent:
            idle = max(0.0, min(LOOK_S, self._next - time.monotonic()))
            if select.select([self._read_fd], [], [], idle)[0] and not self._told():
                break
            if self._now.get("session") and self._refused != self._now["session"] and time.monotonic() >= self._next:
                self._beat()
            elif time.monotonic() >= self._next:
                self._next = time.monotonic() + LOOK_S
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
        while self._now.get("session") and self._now.get("last_beat") and time.monotonic() < until:
            try:
                status, _ = self._post(self._now["session"], {"pid": self._parent, "started": self._started})
            except Exception:  # no daemon; it may come back
                status = 0
            if status == 200 or status in {400, 401, 403, 404, 409, 410, 422}:
                return
            time.sleep(LAST_BEAT_EVERY_S)

    def _told(self) -> bool:
        """Take in what the parent says; False when it will say nothing more."""
        data = os.read(self._read_fd, 65536)
        *lines, self._buffer = (self._buffer + data).split(b"\n")
        for line in lines:
            told = json.loads(line)
            self._now.update(told)
            if "session" in told:
                self._refused = None
                self._next = 0.0
        return bool(data)

    def _beat(self) -> None:
        now = time.monotonic()
        every = float(self._now["heartbeat_s"])
        session = self._now["session"]
        try:
            status, answer = self._post(session)
        except Exception as error:  # whatever it is: a heartbeat goes on
            status, answer = 0, {"detail": f"{type(error).__name__}: {error}"}
        if status == 200:
            self._well(now, answer)
            self._next = now + every
            return
        detail = str(answer.get("detail") or answer.get("title") or "")
        if status in {404, 409, 410}:
            self._refused = session
            self._say(refused=status, session=session, detail=detail)
            return
        self._unwell(now, detail if status == 0 else f"{status} {detail}".strip())
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

    def _unwell(self, now: float, why: str) -> None:
        self._failures += 1
        if self._failures == 1:
            self._failing_since = now
        # The first failure is silent: a daemon that is restarted is back before the second.
        if self._failures >= 2 and (self._said is None or now - self._said >= SAY_EVERY_S):
            self._said = now
            self._say(down=why, seconds=now - self._failing_since)

    def _post(self, session: str, gone: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        body = {name: self._now.get(name) or 0 for name in ("done", "total")} | {"slot": self._now.get("slot")}
        if gone is not None:
            body["gone"] = gone
        headers = {"content-type": "application/json", "connection": "close"}
        if self._now.get("journal"):
            headers["rollmux-journal"] = self._now["journal"]
        if self._now.get("api_key"):
            headers["authorization"] = "Bearer " + self._now["api_key"]
        connection, base = self._connection()
        try:
            path = f"{base}/v1/sessions/{quote(session, safe='')}/heartbeat"
            connection.request("POST", path, json.dumps(body).encode(), headers)
            response = connection.getresponse()
            content = response.read()
        finally:
            connection.close()
        try:
            answer = json.loads(content)
        except ValueError:
            answer = {"detail": content[:200].decode(errors="replace")}
        return response.status, answer if isinstance(answer, dict) else {}

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


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("rollmuxd", timeout=BEAT_TIMEOUT_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


def start_of(pid: int | None, *, running: bool = False) -> str:
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
    """Run as a process: ``python -I -S heartbeat.py PARENT_PID``."""
    import sys

    Beater(0, 1, int(sys.argv[1])).run()


if __name__ == "__main__":
    main()
