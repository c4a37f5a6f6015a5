"""A process on a node that does what comes in by its standard input, until that ends or stays silent.

Commands that run then come to their end, or to that of their time.

Standard library only, Python 3.8 or newer: it is sent to the node with ``onnode``, and nothing is installed there. Each
message is its length (4 bytes) and JSON, which may be compressed, as in :mod:`rollmuxd_backend_local.agent.frames`.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import stat
import sys
import zlib
from typing import Any

from .onnode import OnNode

_SIZE = 4
#: as in frames
_SHORT, _COMPRESSED = 500, 2**16
#: what is a command there
_COMMANDS = ("Run", "Question")
#: commands that are over their time may take so long to be gone
_END_S = 5.0


def main(mark: str, silent_s: float, questions: list[Any]) -> None:
    """Say that it is there, in a line that begins with ``mark``, and serve. ``questions``: as for :class:`OnNode`."""
    # Slurm can send one some time before the end (--signal=USR1@600), which says nothing here.
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)
    facts = {name: value for name, value in os.environ.items() if name.startswith("SLURM_")}
    if "SLURM_STEP_ID" in facts:
        # Slurm's own hides GPUs from commands that look at all of them. Which ones a job uses is the daemon's to say.
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    with open("/proc/self/cgroup", errors="replace") as file:  # noqa: PTH123 - pathlib takes its time to import
        said = {"environment": facts, "cgroups": file.read()}
    sys.stdout.write(mark + json.dumps(said) + "\n")
    sys.stdout.flush()
    asyncio.run(_serve(silent_s, OnNode(questions)))
    os._exit(0)  # threads with commands that cannot be ended would keep it


async def _serve(silent_s: float, node: OnNode) -> None:
    loop = asyncio.get_running_loop()
    if stat.S_ISSOCK(os.fstat(0).st_mode):  # some SSH servers give a command one socket for both directions
        both = await asyncio.open_connection(sock=socket.socket(fileno=os.dup(0)))
        await Service(node, *both).serve(silent_s)
        return
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    protocol = asyncio.StreamReaderProtocol(asyncio.StreamReader())
    transport, _ = await loop.connect_write_pipe(lambda: protocol, sys.stdout)
    await Service(node, reader, asyncio.StreamWriter(transport, protocol, None, loop)).serve(silent_s)


class Service:
    """What one daemon asks for."""

    def __init__(self, node: OnNode, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._node, self._reader, self._writer = node, reader, writer
        #: what is under way: the wish, and the task that does it
        self._asked: dict[int, tuple[dict[str, Any], asyncio.Task[None]]] = {}

    async def serve(self, silent_s: float) -> None:
        """Until the daemon is gone, or has not been heard of for so long; then until commands have ended."""
        try:
            while True:
                said = await asyncio.wait_for(self._read(), silent_s)
                if said["type"] == "Ask":
                    task = asyncio.ensure_future(self._answer(said["number"], said["wish"], said["reach_s"]))
                    self._asked[said["number"]] = (said["wish"], task)
                elif said["type"] == "Forget":
                    await self._forget(said["number"])
        except (asyncio.TimeoutError, asyncio.IncompleteReadError, OSError):  # noqa: UP041  # they are two in 3.10
            pass
        self._writer.transport.abort()  # or an answer could wait for ever for one that reads it
        # Half of a move may be worse than none or all of it.
        left: dict[asyncio.Task[None], float] = {}
        for wish, task in self._asked.values():
            if wish["do"] in _COMMANDS:
                left[task] = wish["timeout_s"]
            else:
                task.cancel()
        if left:
            await asyncio.wait(left, timeout=max(left.values()) + _END_S)

    async def _read(self) -> dict[str, Any]:
        size = int.from_bytes(await self._reader.readexactly(_SIZE), "big")
        body = await self._reader.readexactly(size)
        said: dict[str, Any] = json.loads(body if body.startswith(b"{") else zlib.decompress(body))
        return said

    async def _forget(self, number: int) -> None:
        """The daemon wants no answer any more: end a command with what it has started, or an exchange."""
        if number in self._asked:
            await self._node.end(str(number))

    async def _answer(self, number: int, wish: dict[str, Any], reach_s: float) -> None:
        try:
            said = await self._node.do(str(number), wish, reach_s)
        except Exception as error:
            said = {"type": "Failed", "how": "lost", "why": f"{type(error).__name__}: {error}"}
        finally:
            del self._asked[number]
        body = json.dumps({"type": "Answer", "number": number, "said": said}).encode()
        if _SHORT < len(body) <= _COMPRESSED:
            body = zlib.compress(body, 1)
        try:
            self._writer.write(len(body).to_bytes(_SIZE, "big") + body)
            await self._writer.drain()
        except OSError:
            pass  # the daemon is gone, which the other direction says as well
