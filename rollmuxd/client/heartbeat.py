"""The heartbeat as a job sees it: starts :mod:`rollmuxd.client.heartbeat_process`, and starts it again if it dies."""

import contextlib
import json
import os
import sys
import threading
import weakref
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import msgspec

from rollmuxd.client.discovery import Address
from rollmuxd.client.errors import RollmuxError
from rollmuxd.client.session import own_start
from rollmuxd.wire.answers import Directive, SessionView

if TYPE_CHECKING:
    from rollmuxd.client.runtime import HeartbeatListener

#: run as a script, not imported: it brings http.client along
_HEARTBEAT = Path(__file__).with_name("heartbeat_process.py")
#: seconds before a heartbeat process that died is started again, doubling from the first to the second
RESTART_S = (0.5, 30.0)
#: seconds that it gets to end by itself
STOP_S = 3.0


class HeartbeatProcess:
    """The real heartbeat."""

    def __init__(self, address: Address, listener: "HeartbeatListener", *, last_beat: bool = True) -> None:
        self._listener = listener
        #: all that a new process must be told
        self._now: dict[str, Any] = {
            "base_url": address.base_url,
            "socket": address.socket,
            "api_key": address.api_key,
            "ca_file": address.ca_file,
            # whether the end of this process is reported at once
            "last_beat": last_beat,
            "slot": None,
            "done": 0,
            "total": 0,
        }
        #: something could not be told
        self._behind = False
        # The loop and the watch both write. (Re-entrant: a signal handler may tell something.)
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._process: Any = None
        self._stdin: IO[bytes] | None = None
        self._stdout: IO[bytes] | None = None
        self._thread: threading.Thread | None = None
        _alive.add(self)

    @property
    def pid(self) -> int | None:
        """The heartbeat process, once it was started."""
        return self._process.pid if self._process is not None else None

    def session(self, view: SessionView) -> None:
        """Start the process, which beats for this session. Raises RollmuxError when it cannot be started."""
        self._set(session=view.session, heartbeat_s=view.heartbeat_s, journal=view.journal, tail_from=view.tail_from)
        try:
            self._start()
        except OSError as error:
            raise RollmuxError(
                f"the heartbeat process cannot be started ({error}), and without it the session would be lost; "
                f"sys.executable must name a Python, and is {sys.executable!r}"
            ) from error
        self._thread = threading.Thread(target=self._watch, name="rollmuxd-heartbeat", daemon=True)
        self._thread.start()

    def slot(self, slot: str | None) -> None:
        """Report for this slot from now on."""
        self._set(slot=slot, done=0, total=0)

    def progress(self, done: int, total: int) -> None:
        """Go out with the next beat; at once where it reaches the tail."""
        self._set(done=done, total=total)

    def stop(self) -> None:
        """End the process."""
        self._stopping.set()
        self._close_stdin()
        if self._process is not None:
            import subprocess

            # It may be in a beat that a daemon which hangs does not answer for seconds, and there is nothing to lose.
            self._process.terminate()
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(STOP_S)
        _alive.discard(self)

    def _set(self, **what: Any) -> None:
        with self._lock:
            changed = {name: value for name, value in what.items() if self._now.get(name) != value}
            self._now.update(changed)
            if changed:
                self._write(self._now if self._behind else changed)

    def _write(self, what: dict[str, Any]) -> None:
        """Tell the process; under the lock."""
        stdin = self._stdin
        if stdin is None:
            return
        # Short lines go into a pipe whole or not at all. It is full when the process hangs, or waits for a daemon that
        # hangs while a loop reports progress a thousand times a second. The loop must not wait for it. Then all is sent
        # with the next change; when the process has died, to the next one.
        with contextlib.suppress(OSError, ValueError):
            self._behind = stdin.write(json.dumps(what).encode() + b"\n") is None

    def _start(self) -> None:
        import subprocess

        # No LD_PRELOAD: memory hooks of the trainer's CUDA have no business in here. A session of its own: Ctrl-C in a
        # terminal goes to the whole process group, and the job may take its time to end. cwd: pin no file system.
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        command = [sys.executable, "-I", "-S", str(_HEARTBEAT), str(os.getpid()), own_start()]
        self._process = subprocess.Popen(
            command,
            bufsize=0,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            cwd="/",
            env=environ,
        )
        self._stdin, self._stdout = self._process.stdin, self._process.stdout
        with self._lock:
            if self._stdin is not None:  # stop() may have closed it by now
                os.set_blocking(self._stdin.fileno(), False)
                self._write(self._now)

    def _watch(self) -> None:
        pause = RESTART_S[0]
        while True:
            heard = False
            if self._stdout is not None:
                with os.fdopen(self._stdout.fileno(), "rb", closefd=False) as lines:
                    for line in lines:
                        heard = True
                        self._hear(line)
                self._stdout.close()
            code = self._process.wait()
            if self._stopping.is_set():
                return
            pause = RESTART_S[0] if heard else min(RESTART_S[1], pause * 2)
            self._listener.troubled(f"the heartbeat process ended ({code}); starting it again")
            if self._stopping.wait(pause):
                return
            self._close_stdin()
            try:
                self._start()
            except OSError as error:  # no process, or no memory for one, is left just now
                self._stdout = None
                self._listener.troubled(f"it cannot be started: {error}")
            if self._stopping.is_set():  # stop() may have missed the new one, which may be in a beat by now
                self._close_stdin()
                self._process.terminate()

    def _hear(self, line: bytes) -> None:
        try:
            heard = msgspec.json.decode(line)
            if "directives" in heard:
                self._listener.directed(msgspec.convert(heard["directives"], list[Directive]))
            elif "refused" in heard:
                self._listener.session_refused(heard["refused"], heard["detail"])
            elif "down" in heard:
                text = f"heartbeats get no answer: {heard['down']}; what is held stays held, trying again"
                self._listener.troubled(text)
            elif "up" in heard:
                self._listener.troubled(f"heartbeats are answered again, after {round(heard['up'])} s")
        except msgspec.MsgspecError:
            pass  # a newer daemon's directive: not for us

    def _close_stdin(self) -> None:
        with self._lock:
            stdin, self._stdin = self._stdin, None
            if stdin is not None:
                stdin.close()

    def forget(self) -> None:
        """In a forked child: close the pipes, or the heartbeat would outlive our parent."""
        # A thread that is not here may have held the locks.
        self._lock, self._stopping = threading.RLock(), threading.Event()
        self._stopping.set()
        for pipe in (self._stdin, self._stdout):
            if pipe is not None:
                pipe.close()
        self._stdin = None


_alive: "weakref.WeakSet[HeartbeatProcess]" = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for heartbeat in list(_alive):
        heartbeat.forget()
    _alive.clear()


# Data-loader workers are forks. (Programs that are *executed* from here do not inherit the pipes: Python's are
# close-on-exec.)
os.register_at_fork(after_in_child=_after_fork_in_child)
