"""Processes that begin without their imports: :class:`Popen` is ``subprocess.Popen`` for commands of this Python.

A live test starts a daemon, trainers and commands, and each of these would spend half a second or more on imports. So
each of pytest's workers has one process (this file, as a program) that has imported all that and does nothing; a copy
of it becomes what was asked for. That is a process like others: it has a pid of its own, it is a child of the test's
process, and it has the working directory, the environment, the arguments, the session and the three standard streams
that were asked for. What a copy cannot have is started as ever: options of the interpreter, and variables it reads.

Two things differ, so a test that is about them uses ``subprocess``: ``/proc/PID/cmdline`` and ``environ`` are those of
the process that was copied, and modules are imported already.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import importlib.util
import json
import os
import runpy
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
    *("rollmuxd_weights.publish", "rollmuxd_weights.pull"),
    *("rollmuxd_gateway.app", "rollmuxd_gateway.cli", "rollmuxd_gateway.fakes.server"),
    *("uvicorn.protocols.http.httptools_impl", "uvicorn.lifespan.on", "uvicorn.loops.auto"),
)
#: variables that this Python reads as it begins, and that a copy can do justice to
HEEDED: Final = ("PYTHONPATH", "PYTHONUNBUFFERED", "PYTHONDONTWRITEBYTECODE")
_SUBREAPER: Final = 36
_lock = threading.Lock()


class Popen(subprocess.Popen):
    """``subprocess.Popen``, which copies where it can.

    ``imported``: modules that it wants besides, which take long. They are imported into a process of their own, and the
    copies of that have them.
    """

    def __init__(self, *given: Any, imported: tuple[str, ...] = (), **more: Any) -> None:
        self._imported = imported
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


def _can_be_copied(words: list[str], env: dict[str, str]) -> bool:
    """Whether it is a script or module for this Python, and nothing tells that how to begin but what a copy heeds."""
    if len(words) < 2 or words[0] != sys.executable or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return False
    if any(name.startswith(("PYTHON", "LD_")) and name not in HEEDED for name in env):
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
    with its:
        words = [sys.executable, "-u", __file__, str(its.fileno()), *imported]
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


def _become(asked: dict[str, Any], path: list[str]) -> None:
    """Run what was asked for, as the interpreter would."""
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
    code = 0
    try:
        _become(_serve(socket.socket(fileno=int(sys.argv[1]))), path)
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
