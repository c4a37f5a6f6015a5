"""Processes that begin without their imports: :class:`Popen` is ``subprocess.Popen`` for commands of this Python.

A live test starts a daemon, trainers and commands, and each of these would spend half a second or more on imports. So
each of pytest's workers has one process (this file, as a program) that has imported all that and does nothing; a copy
of it becomes what was asked for. That is a process like others: it has a pid of its own, it is a child of the test's
process, and it has the working directory, the environment, the arguments, the session and the three standard streams
that were asked for. What a copy cannot have is started as ever: options of the interpreter, and variables it reads.

Two things differ, so a test that is about them uses ``subprocess``: ``/proc/PID/cmdline`` and ``environ`` are those of
the process that was copied, and modules are imported already.

What a copy starts in turn may be copied, too (``stand_in``): Ray starts ten processes of Python for each job.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any, Final

#: what daemons, trainers, commands, gateways and engines import. What is not installed is left out
IMPORTED: Final = (
    *("rollmuxd.daemon.app", "rollmuxd.daemon.init_config", "rollmuxd.cli.main", "rollmuxd.cli.daemon"),
    *("rollmuxd.cli.job", "rollmuxd.cli.journal", "rollmuxd.cli.report", "rollmuxd.cli.run.command"),
    *("rollmuxd.client.job", "rollmuxd.client.sync", "rollmuxd.client.transport"),
    *("rollmuxd_backend_mock", "rollmuxd_backend_local", "rollmuxd_channel", "rollmuxd_command", "rollmuxd_hooks"),
    *("rollmuxd_weights.publish", "rollmuxd_weights.pull", "numpy.random"),
    *("rollmuxd_gateway.app", "rollmuxd_gateway.cli", "rollmuxd_gateway.fakes.server"),
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.lifespan.on", "uvicorn.loops.auto"),
)
#: variables that this Python reads as it begins, and that a copy can do justice to
HEEDED: Final = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE", "PYTHONBREAKPOINT")
_DIES_WITH_PARENT, _SUBREAPER, _NETWORK = 1, 36, 0x40000000
_lock = threading.RLock()

#: what is at a ``stand_in``: it has a copy made, passes signals on to it, and ends as it ends
#: (by the base Python, whose path is short: a folder's name may have spaces, and the first line of a program may not)
_STAND_IN: Final = """#!{base} -IS
import _signal, _socket, marshal, os, sys
words = [{python!r}, *sys.argv[1:]]
line = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
here = os.getcwd()
try:
    os.chdir({folder!r})  # of the 107 bytes that a socket's path may have, a test's folder has most
    line.connect({name!r})
    fds = b"".join(fd.to_bytes(4, sys.byteorder) for fd in range(3))
    asked = marshal.dumps((words, here, dict(os.environ)))
    line.sendmsg([asked], [(_socket.SOL_SOCKET, _socket.SCM_RIGHTS, fds)])
    for number in {signals!r}:  # before the copy can say that it is there
        _signal.signal(number, lambda number, frame: line.send(b"%d" % number))
    copied = line.recv(64)
except OSError:
    copied = b""
os.chdir(here)
if not copied:
    os.execv(words[0], words)
with open("/proc/self/comm", "wb") as name:
    name.write(copied)
os.closerange(0, 3)
status = int(line.recv(64) or -9)
if status < 0:
    _signal.signal(-status, _signal.SIG_DFL) if status != -9 else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""
_PASSED_ON: Final = tuple(
    map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2))
)


class Popen(subprocess.Popen):
    """``subprocess.Popen``, which copies where it can.

    ``imported``: modules that it wants besides, which take long. They are imported into a process of their own, and the
    copies of that have them.

    ``stand_in``: where to put a program that is Python for what is started in turn. It has a copy made of this copy, as
    it began, and stands in for that: it passes signals on, and where one of both ends, so does the other. The parent of
    these copies is a child of this one.
    """

    def __init__(self, *given: Any, imported: tuple[str, ...] = (), stand_in: Path | None = None, **more: Any) -> None:
        self._imported, self._stand_in = imported, stand_in
        super().__init__(*given, **more)

    def _execute_child(
        self,
        args: Any,
        executable: Any,
        preexec_fn: Any,
        close_fds: Any,
        pass_fds: Any,
        cwd: Any,
        env: Any,
        startupinfo: Any,
        creationflags: Any,
        shell: Any,
        *rest: Any,
    ) -> None:
        streams, how = rest[:6], rest[6:]  # three pairs: ours and its own end of each
        new_session = how[-2]
        env = dict(os.environ if env is None else env)
        words = [] if isinstance(args, str) else [os.fsdecode(word) for word in args]
        odd = executable or preexec_fn or pass_fds or shell or not sys.platform.startswith("linux")
        if odd or not _can_be_copied(words, env):
            given = (args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags, shell)
            super()._execute_child(*given, *rest)
            return
        asked = {
            "argv": words[1:],
            "cwd": os.fsdecode(os.getcwd() if cwd is None else cwd),
            "env": {os.fsdecode(name): os.fsdecode(value) for name, value in env.items()},
            "session": new_session,
            "stand_in": None if self._stand_in is None else str(self._stand_in),
        }
        own = (streams[0], streams[3], streams[5])
        self.pid = _copy(self._imported, asked, [number if fd == -1 else fd for number, fd in enumerate(own)])
        self._child_created = True
        self._close_pipe_fds(*streams)


def run(command: Any, *, input: Any = None, timeout: float | None = None, check: bool = False, **more: Any) -> Any:
    """``subprocess.run`` with it."""
    if more.pop("capture_output", False):
        more |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        more["stdin"] = subprocess.PIPE
    with Popen(command, **more) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    ran = subprocess.CompletedProcess(process.args, process.returncode, out, err)
    if check:
        ran.check_returncode()
    return ran


def copy_of(stand_in: int) -> int | None:
    """The pid of what it stands in for; None: it is something else. (It has this for a name.)"""
    try:
        name = Path(f"/proc/{stand_in}/comm").read_text(errors="replace")
    except OSError:
        return None
    return int(name[1:]) if name.startswith("=") else None


def _can_be_copied(words: list[str], env: dict[str, str]) -> bool:
    """Whether it is a script or module for this Python, and nothing tells that how to begin but what a copy heeds."""
    if words[1:2] == ["-u"]:  # as copies are
        del words[1]
    if len(words) < 2 or words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return False
    if any(env[name] and name.startswith(("PYTHON", "LD_")) and name not in HEEDED for name in env):
        return False
    beside = filter(None, env.get("PYTHONPATH", "").split(os.pathsep))
    return not any(Path(folder, "sitecustomize.py").exists() for folder in beside)


def _copy(imported: tuple[str, ...], asked: dict[str, Any], streams: list[int]) -> int:
    """The pid of a new child of ours, which is a copy.

    The process that is copied forks twice, and the one in between ends. Orphans go to the nearest ancestor that takes
    them: for this moment, to us.
    """
    with _lock:
        line = _to_be_copied(imported)
        prctl = ctypes.CDLL(None).prctl
        prctl(_SUBREAPER, 1, 0, 0, 0)
        try:
            socket.send_fds(line, [json.dumps(asked).encode()], streams)
            pid, gone = line.recv(64), line.recv(64)
        finally:
            prctl(_SUBREAPER, 0, 0, 0, 0)
        if not gone:
            raise RuntimeError("the process that is copied has ended: its last words are in this output")
    return int(pid)


@functools.cache
def _to_be_copied(imported: tuple[str, ...]) -> socket.socket:
    """A line to the process that is copied, which lives as long as we do."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    atexit.register(ours.close)
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    # what is copied has no threads; a copy has its own environment
    env |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    with its:
        if imported:  # itself a copy of the one that has imported the rest
            asked = {"argv": [__file__, "0", *imported], "cwd": os.getcwd(), "env": env, "session": False}
            _copy((), {**asked, "stand_in": None}, [its.fileno(), 1, 2])
        else:
            words = [sys.executable, "-u", __file__, str(its.fileno())]
            subprocess.Popen(words, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL, env=env).returncode = 0
    return ours


def _serve(line: socket.socket) -> dict[str, Any]:
    """Wait to be copied. Returns in each copy, with what it is to become."""
    ours = os.getppid()
    while True:
        message, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if not message:
            os._exit(0)
        if (between := os.fork()) == 0:
            if (pid := os.fork()) == 0:
                for number, fd in enumerate(streams):
                    os.dup2(fd, number)
                    os.close(fd)
                line.close()
                while os.getppid() != ours:  # the one in between has not ended yet
                    time.sleep(0.0005)
                asked: dict[str, Any] = json.loads(message)
                return asked
            line.send(b"%d" % pid)
            os._exit(0)
        os.waitpid(between, 0)
        line.send(b"gone")
        for fd in streams:
            os.close(fd)


def _stand_in(path: str) -> dict[str, Any] | None:
    """Put a program there that has copies made, by a process that begins here. None: this is still the one that asked.

    In each copy it returns what that is to become. The process ends when it was asked to, and has no copies any more.
    """
    folder, name = os.path.split(f"{path}.socket")
    os.chdir(folder)
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listening.bind(name)
    listening.listen(64)
    told = {
        "python": sys.executable,
        "base": os.path.realpath(sys.executable),
        "folder": folder,
        "name": name,
        "signals": _PASSED_ON,
    }
    Path(path).write_text(_STAND_IN.format(**told))
    Path(path).chmod(0o700)
    if _fork():
        listening.close()
        return None
    over: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: over.append(number))
    nothing = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        os.dup2(nothing, fd)
    os.close(nothing)
    lines: dict[int, tuple[socket.socket, int]] = {}
    ends: dict[int, tuple[socket.socket, int]] = {}
    while ends or not over:
        for fd in select.select([*lines, *ends, listening], (), (), 0.2)[0]:
            if fd in ends:
                line, pid = ends.pop(fd)
                os.close(fd)
                lines.pop(line.fileno(), None)
                with line, contextlib.suppress(OSError):
                    line.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
            elif fd in lines:
                line, pid = lines[fd]
                os.kill(pid, number := _passed_on(line))
                if number == signal.SIGKILL:
                    del lines[fd]
                    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # what begins next may want the lock that it had
            elif fd is listening:
                line, streams, asked = _asked(listening)
                if asked is None:
                    line.close()
                elif (pid := _fork()) == 0:
                    signal.signal(signal.SIGTERM, signal.SIG_DFL)
                    _join_network(line)
                    for number, one in enumerate(streams):
                        os.dup2(one, number)
                    for held in (line, listening, *(line for line, _ in ends.values())):
                        held.close()
                    for one in (*streams, *ends):
                        os.close(one)
                    sys.executable = path
                    return asked
                else:
                    with contextlib.suppress(OSError):
                        line.send(b"=%d" % pid)
                    lines[line.fileno()] = ends[os.pidfd_open(pid)] = (line, pid)
                for one in streams:
                    os.close(one)
    os._exit(0)


def _asked(listening: socket.socket) -> tuple[socket.socket, list[int], dict[str, Any] | None]:
    """What a stand-in asks for, with its streams; None: that cannot be a copy, or it has ended."""
    line, _ = listening.accept()
    with contextlib.suppress(OSError):
        message, streams, _, _ = socket.recv_fds(line, 1 << 20, 3)
        if message:
            words, cwd, env = marshal.loads(message)
            if _can_be_copied(words, env):
                return line, streams, {"argv": words[1:], "cwd": cwd, "env": env, "session": True, "stand_in": None}
        return line, streams, None
    return line, [], None


def _join_network(line: socket.socket) -> None:
    """Be in the network of a stand-in: a test's host may have one of its own."""
    pid = int.from_bytes(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 4), sys.byteorder)
    ours, its = (f"/proc/{one}/ns/net" for one in ("self", pid))
    if os.readlink(ours) != os.readlink(its):
        with open(its, "rb") as network:
            if ctypes.CDLL(None).setns(network.fileno(), _NETWORK):
                raise OSError(f"process {pid} is in a network that another cannot join")


def _passed_on(line: socket.socket) -> int:
    """The signal that a stand-in got; that which kills: it has ended."""
    with contextlib.suppress(OSError):
        return int(line.recv(64) or signal.SIGKILL)
    return signal.SIGKILL


def _fork() -> int:
    """Fork a process that dies with this one; its pid, and 0 in it."""
    ours = os.getpid()
    if (pid := os.fork()) == 0:
        ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != ours:
            os._exit(0)
    return pid


def _become(asked: dict[str, Any], path: list[str]) -> None:
    """Run what was asked for, as the interpreter would."""
    if asked["stand_in"]:
        asked = _stand_in(asked["stand_in"]) or asked
    if asked["session"]:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(asked["cwd"])
    os.environ.clear()
    os.environ.update(asked["env"])
    first, *arguments = asked["argv"]
    given = os.environ.get("PYTHONPATH", "")
    sys.path[:] = [*given.split(os.pathsep), *path] if given else path
    importlib.invalidate_caches()
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if first == "-m":
        sys.argv = arguments
        sys.path.insert(0, os.getcwd())
        runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    elif first == "-c":
        sys.argv = ["-c", *arguments[1:]]
        sys.path.insert(0, "")
        exec(compile(arguments[0], "<string>", "exec"), vars(main))
    else:
        sys.argv = [first, *arguments]
        sys.path.insert(0, str(Path(first).resolve().parent))
        main.__file__ = os.path.abspath(first)
        exec(compile(Path(first).read_bytes(), first, "exec"), vars(main))


def _main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which ends us by closing the socket
    path = sys.path[1:]
    line = socket.socket(fileno=int(sys.argv[1]))
    if line.fileno() == 0:  # which is for the input of a copy
        line, given = line.dup(), line
        given.close()
        os.open(os.devnull, os.O_RDONLY)
    gc.disable()  # it would look through all that was imported a hundred times: a quarter of what torch and TRL take
    for name in (*IMPORTED, *sys.argv[2:]):
        with contextlib.suppress(ModuleNotFoundError):
            importlib.import_module(name)
    # What answers a question gives way to all else, and where all processors are busy it would take longer than it may.
    if question := sys.modules.get("rollmuxd.daemon.question"):
        question.NICE = 0
    # httpx looks for this with each request (conftest.py says more).
    if importlib.util.find_spec("sniffio") is None:
        sys.modules["sniffio"] = None
    if not sys.argv[2:]:  # (torch has a thread that it does without in a copy)
        assert len(os.listdir("/proc/self/task")) == 1, "a copy would lack the threads of what was imported"
    gc.collect()
    gc.freeze()
    gc.enable()
    code = 0
    try:
        _become(_serve(line), path)
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    # It ends as a process does, but for this: to take all modules apart would cost ten times what the copy did.
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    _main()
