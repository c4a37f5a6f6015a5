"""What runs on a node, in a Ray actor or in a step of Slurm's: commands, and exchanges with what listens there.

Standard library only, and sent there with everything that it names: nothing but Python has to be there.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import re
import selectors
import signal
import ssl
import subprocess
import sys
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

#: of each of a command's outputs, what is kept (``OUTPUT_KEPT`` of the SPI)
_KEPT = 8 * 2**20
_PIECE = 65_536
#: commands at a time on a node
_COMMANDS = 64
_ENDED_KEPT = 1_000


class Failed(Exception):
    """It was not done, or is not known: how it went, as frames have it, and why."""

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
        #: how each call that is under way is ended
        self._ends: dict[str, Callable[[], object]] = {}
        #: calls that were ended before they had begun
        self._ended: dict[str, None] = {}
        #: by the certificates that it trusts, the one that was used last
        self._tls: dict[str, ssl.SSLContext] = {}

    async def hello(self) -> int:
        """That it is there: its process."""
        return os.getpid()

    async def do(self, call: str, wish: dict[str, Any], reach_s: float) -> dict[str, Any]:
        """What :mod:`rollmuxd_backend_local.agent.frames` calls a wish, and its answer, both as JSON has them."""
        try:
            if wish["do"] == "Exchange":
                return {"type": "Data", "data": _text(await self.exchange(call, wish, reach_s))}
            if wish["do"] == "Run":
                argv, env, stdin = wish["argv"], wish["env"], base64.b64decode(wish["stdin"])
            else:
                argv, env, stdin = self._asking(wish)
            code, out, err = await self.run(call, argv, env, stdin, wish["timeout_s"])
            return {"type": "Ran", "exit_code": code, "stdout": _text(out), "stderr": _text(err)}
        except Failed as error:
            return {"type": "Failed", "how": error.how, "why": str(error)}

    def _asking(self, wish: dict[str, Any]) -> tuple[list[str], dict[str, str], bytes]:
        """The command that answers a question, and its input."""
        opens, answers, name, sources = self._questions
        modules = [(short, sources[short]) for short in wish["modules"]]
        payload = json.dumps([answers, name, modules, wish["mark"], wish["question"]]).encode()
        # Without site-packages it starts in half of the time, and needs nothing of them.
        return [wish["python"], "-I", "-S", "-c", opens], {}, zlib.compress(payload, 1)

    def environment(self) -> dict[str, str]:
        """What a command has of the variables here."""
        own = self._not_theirs
        return {name: value for name, value in os.environ.items() if not own or not name.startswith(own)}

    async def run(
        self, call: str, argv: list[str], env: dict[str, str], stdin: bytes, timeout_s: float
    ) -> tuple[int, bytes, bytes]:
        """Run a command to its end. A program without a name is the Python that runs here."""
        self._begin(call)
        command, env = Command(), {**self.environment(), **env}
        doing = self._threads.submit(command.run, argv, env, stdin, timeout_s)

        def end() -> None:
            if not doing.cancel():  # it is one that waits for a thread
                command.end()

        self._ends[call] = end
        try:
            return await asyncio.wrap_future(doing)
        finally:
            del self._ends[call]
            command.close()

    async def exchange(self, call: str, wish: dict[str, Any], reach_s: float) -> bytes:
        """Send a request over a connection that is opened from here; what comes until that is whole, or broken off."""
        self._begin(call)
        doing = asyncio.ensure_future(_exchange(wish, reach_s, self._trusting(wish["trust"])))
        self._ends[call] = doing.cancel
        try:
            await asyncio.wait([doing])
        finally:
            del self._ends[call]
            doing.cancel()
        if doing.cancelled():
            raise Failed("lost", "it was ended: no call waits for it")
        return doing.result()

    def _trusting(self, trust: str) -> ssl.SSLContext | None:
        """Made once: to read some hundred certificates takes 0.1 s, in which nothing else is done here."""
        if trust and trust not in self._tls:
            tls = ssl.create_default_context()
            tls.load_verify_locations(cadata=trust)
            self._tls = {trust: tls}
        return self._tls.get(trust)

    async def end(self, call: str) -> None:
        """End a command with what it has started, or an exchange; one that comes later than this is not begun."""
        if call in self._ends:
            self._ends[call]()
            return
        self._ended[call] = None
        while len(self._ended) > _ENDED_KEPT:
            del self._ended[next(iter(self._ended))]

    def _begin(self, call: str) -> None:
        if call in self._ended:
            del self._ended[call]
            raise Failed("lost", "it was ended before it began")


async def _exchange(wish: dict[str, Any], reach_s: float, tls: ssl.SSLContext | None) -> bytes:
    try:
        opening = asyncio.open_connection(wish["address"], wish["port"], ssl=tls)
        reader, writer = await asyncio.wait_for(opening, reach_s)
    except asyncio.TimeoutError:  # noqa: UP041  # they are two in Python 3.10
        raise Failed("lost", f"no answer within {reach_s:g} s") from None
    except OSError as error:
        broke = isinstance(error, ConnectionError) and not isinstance(error, ConnectionRefusedError)
        # What breaks off TLS listens there.
        listens = tls is not None and (broke or isinstance(error, ssl.SSLError))
        raise Failed("lost" if listens else "not_done", str(error)) from error
    came = bytearray()
    try:
        with contextlib.suppress(OSError):  # whether what came is whole, it says itself
            writer.write(base64.b64decode(wish["data"]))
            await writer.drain()
            while len(came) < wish["most"] and not _is_whole(came):
                part = await reader.read(min(_PIECE, wish["most"] - len(came)))
                if not part:
                    break
                came += part
    finally:
        writer.transport.abort()
    return bytes(came)


def _is_whole(came: bytearray) -> bool:
    """Whether it is an answer of HTTP to its end: a server may keep the connection, whatever it was asked."""
    end = came.find(b"\r\n\r\n", 0, _PIECE)
    head = bytes(came[: max(0, end + 4)]).lower()
    length = re.search(rb"\r\ncontent-length: *([0-9]{1,9}) *\r", head)
    if length is not None:
        return len(came) >= len(head) + int(length[1])
    return b"chunked" in head and came.endswith(b"\r\n0\r\n\r\n")


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
