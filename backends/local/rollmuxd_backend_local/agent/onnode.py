"""What runs on a node, in a Ray actor or in a step of Slurm's: commands and connections.

Standard library only, and sent there with everything that it names: nothing but Python has to be there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: of each of a command's outputs, what is kept (``OUTPUT_KEPT`` of the SPI)
_KEPT = 8 * 2**20
_PIECE = 65_536
#: commands at a time on a node
_COMMANDS = 64
_ENDED_KEPT = 1_000


class Failed(Exception):
    """It was not done, or broke, or is not known: how it went, as frames have it, and why."""

    def __init__(self, how: str, why: str) -> None:
        super().__init__(why)
        self.how = how


class OnNode:
    """What is done there. All but ``do`` raises Failed.

    ``questions``: what questions are made of (``payload.questions``). Commands have no variables that begin with
    ``not_theirs``.
    """

    def __init__(self, questions: list[Any] | tuple[Any, ...] = (), not_theirs: str = "") -> None:
        self._questions, self._not_theirs = questions, not_theirs
        # Threads and not asyncio's processes: which loop an actor has, is for what else is installed there to say.
        self._threads = ThreadPoolExecutor(_COMMANDS, thread_name_prefix="rollmuxd")
        self._commands: dict[str, Command] = {}
        #: commands that were ended, and connections that were closed, before they were there
        self._ended: dict[str, None] = {}
        self._streams: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}

    async def hello(self) -> int:
        """That it is there: its process."""
        return os.getpid()

    async def do(self, call: str, wish: dict[str, Any], reach_s: float) -> dict[str, Any]:
        """What :mod:`rollmuxd_backend_local.agent.frames` calls a wish, and its answer, both as JSON has them."""
        try:
            return await self._do(call, wish, reach_s)
        except Failed as error:
            return {"type": "Failed", "how": error.how, "why": str(error)}

    async def _do(self, call: str, wish: dict[str, Any], reach_s: float) -> dict[str, Any]:
        do, data = wish["do"], b""
        if do in ("Run", "Question"):
            if do == "Run":
                argv, env, stdin = wish["argv"], wish["env"], base64.b64decode(wish["stdin"])
            else:
                argv, env, stdin = self._asking(wish)
            code, out, err = await self.run(call, argv, env, stdin, wish["timeout_s"])
            return {"type": "Ran", "exit_code": code, "stdout": _text(out), "stderr": _text(err)}
        if do == "Connect":
            await self.connect(wish["stream"], wish["address"], wish["port"], reach_s)
        elif do == "Receive":
            data = await self.receive(wish["stream"], wish["max_bytes"])
        elif do == "Send":
            await self.send(wish["stream"], base64.b64decode(wish["data"]))
        elif do == "Close":
            await self.close(wish["stream"])
        return {"type": "Data", "data": _text(data)}

    def _asking(self, wish: dict[str, Any]) -> tuple[list[str], dict[str, str], bytes]:
        """The command that answers a question, and its input."""
        opens, answers, name, sources = self._questions
        modules = [(short, sources[short]) for short in wish["modules"]]
        payload = json.dumps([answers, name, modules, wish["mark"], wish["question"]]).encode()
        # Without site-packages it starts in half of the time, and needs nothing of them.
        return [wish["python"], "-I", "-S", "-c", opens], {}, zlib.compress(payload, 1)

    async def run(
        self, call: str, argv: list[str], env: dict[str, str], stdin: bytes, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command to its end. A program without a name is the Python that runs here."""
        if self._is_over(call):
            raise Failed("lost", "it was ended before it began")
        command = self._commands[call] = Command()
        try:
            loop, own = asyncio.get_running_loop(), self._not_theirs
            env = {**{name: value for name, value in os.environ.items() if not own or not name.startswith(own)}, **env}
            return await loop.run_in_executor(self._threads, command.run, argv, env, stdin, timeout_s)
        finally:
            del self._commands[call]
            command.close()

    async def end(self, call: str) -> None:
        """End a command with what it has started; one that comes later than this is not begun."""
        if call in self._commands:
            self._commands[call].end()
        else:
            self._end_later(call)

    async def connect(self, stream: str, address: str, port: int, limit_s: float) -> None:
        """Open a connection from here."""
        try:
            opened = await asyncio.wait_for(asyncio.open_connection(address, port), limit_s)
        except asyncio.TimeoutError:  # noqa: UP041  # they are two in Python 3.10
            raise Failed("lost", f"no answer within {limit_s:g} s") from None
        except OSError as error:
            raise Failed("not_done", str(error)) from error
        if self._is_over(stream):
            opened[1].close()
            raise Failed("lost", "it was closed before it was open")
        self._streams[stream] = opened

    async def receive(self, stream: str, max_bytes: int) -> bytes:
        """The next bytes; none at the end."""
        try:
            return await self._stream(stream)[0].read(max_bytes)
        except OSError as error:
            raise Failed("broken", str(error)) from error

    async def send(self, stream: str, data: bytes) -> None:
        """Bytes on their way; without any, the end of them."""
        writer = self._stream(stream)[1]
        try:
            if data:
                writer.write(data)
                await writer.drain()
            else:
                writer.write_eof()
        except (OSError, RuntimeError) as error:
            raise Failed("broken", str(error)) from error

    def _stream(self, name: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if name not in self._streams:
            raise Failed("broken", "the connection was closed")
        return self._streams[name]

    async def close(self, stream: str) -> None:
        """Close it; one that is not open yet will not be."""
        if stream in self._streams:
            self._streams.pop(stream)[1].close()
        else:
            self._end_later(stream)

    def hang_up(self) -> None:
        """Close all connections."""
        while self._streams:
            self._streams.popitem()[1][1].close()

    def _end_later(self, name: str) -> None:
        self._ended[name] = None
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _is_over(self, name: str) -> bool:
        over = name in self._ended
        self._ended.pop(name, None)
        return over


class Command:
    """One command: run in a thread of its own, it may be ended from the loop's at any moment before ``close``."""

    def __init__(self) -> None:
        self._over = False
        self._woken, self._wake = os.pipe()

    def end(self) -> None:
        """End it, or let it not begin."""
        self._over = True
        os.write(self._wake, b".")

    def close(self) -> None:
        """It has been run."""
        os.close(self._wake)
        os.close(self._woken)

    def run(self, argv: list[str], env: dict[str, str], stdin: bytes, timeout_s: float) -> tuple[int, bytes, bytes]:
        """To its end, in this thread."""
        if self._over:
            raise Failed("lost", "it was ended before it began")
        try:
            process = subprocess.Popen(
                [argv[0] or sys.executable, *argv[1:]],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
                bufsize=0,
            )
        except (OSError, ValueError) as error:
            raise Failed("not_done", f"{argv[0]}: {error}") from error
        over = False
        try:
            out, err = self._talk(process, stdin, time.monotonic() + timeout_s)
            over = True
        except TimeoutError:
            raise Failed("lost", f"{argv[0]} took longer than {timeout_s:g} s, and was ended") from None
        except InterruptedError:
            raise Failed("lost", f"{argv[0]} was ended: no call waits for it") from None
        finally:
            if not over:  # its group may have outlived it
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()
            process.wait()
        return process.returncode, out, err

    def _talk(self, process: subprocess.Popen[bytes], stdin: bytes, until: float) -> tuple[bytes, bytes]:
        """Give it its input and take its outputs until it has closed them and ended.

        Raises TimeoutError, and InterruptedError where it was ended.
        """
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        kept = {process.stdout: bytearray(), process.stderr: bytearray()}
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._woken, selectors.EVENT_READ)
            for stream in kept:
                waiting.register(stream, selectors.EVENT_READ)
            rest = memoryview(stdin)
            os.set_blocking(process.stdin.fileno(), False)
            waiting.register(process.stdin, selectors.EVENT_WRITE)
            open_ones = len(kept)
            while open_ones:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                for key, _ in waiting.select(left_s):
                    if key.fileobj == self._woken:
                        raise InterruptedError
                    if key.fileobj is process.stdin:
                        rest = _give(process.stdin, rest)
                        if not rest:
                            waiting.unregister(process.stdin)
                            process.stdin.close()
                        continue
                    data = os.read(key.fd, _PIECE)
                    mine = kept[key.fileobj]  # type: ignore[index]  # only these two are left
                    mine += data[: _KEPT - len(mine)]
                    if not data:
                        waiting.unregister(key.fileobj)
                        open_ones -= 1
        self._until_ended(process, until)
        return bytes(kept[process.stdout]), bytes(kept[process.stderr])

    def _until_ended(self, process: subprocess.Popen[bytes], until: float) -> None:
        """It has closed its outputs, and may yet take its time."""
        pause_s = 0.0005
        while process.poll() is None:
            if self._over:
                raise InterruptedError
            if time.monotonic() > until:
                raise TimeoutError
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, 0.05)


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _give(stdin: Any, rest: memoryview) -> memoryview:
    """Write what can be written now; what is left. A command need not read what it is given."""
    try:
        return rest[os.write(stdin.fileno(), rest[:_PIECE]) :] if rest else rest
    except BlockingIOError:
        return rest
    except (BrokenPipeError, ConnectionResetError):
        return rest[:0]
