"""Running commands over a connection: to their end, or ended with all that they started."""

import asyncio
import contextlib
import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

import anyio
import asyncssh
from asyncssh import SSHClientConnection, SSHClientProcess

from rollmuxd.spi import ContactLost, NotDone, Ran
from rollmuxd.spi.backend import OUTPUT_KEPT
from rollmuxd_backend_ssh import quoting

#: an end that is sent to the host may take so long to be confirmed
_END_S: Final = 3.0
#: what a login shell may say before the command begins
_NOISE: Final = 2**16
Opened = TypeVar("Opened")
_LOST = (asyncssh.Error, OSError)


async def run(
    connection: SSHClientConnection, argv: Sequence[str], env: Mapping[str, str], stdin: bytes, timeout_s: float
) -> Ran:
    """Run an argument vector. As :meth:`rollmuxd.spi.RunsCommands.run`, without the host's name in the errors."""
    mark = quoting.mark()
    try:
        line = quoting.command(argv, env, mark)
    except ValueError as error:
        raise NotDone(str(error)) from error
    running = _Running(mark)
    try:
        with anyio.fail_after(timeout_s):
            ran = await running.run(connection, line, stdin)
    except TimeoutError as error:
        raise ContactLost(f"{argv[0]} took longer than {timeout_s:g} s, and was ended") from error
    if running.pid is None:
        if running.absent:
            raise NotDone(f"there is no program {argv[0]}, or it may not be run")
        raise ContactLost(f"it ran no command, and said: {_last_line(ran) or f'exit code {ran.exit_code}'}")
    return ran


async def ask(connection: SSHClientConnection, argv: Sequence[str], stdin: bytes) -> Ran:
    """Run what every shell reads alike, and that says itself that it was started. Raises ContactLost."""
    return await _Running("").run(connection, quoting.plain(argv), stdin)


async def whole(opening: Awaitable[Opened], close: Callable[[Opened], Awaitable[None]]) -> Opened:
    """Open something on a connection. Where that is cancelled it is closed, once it is open.

    Cancelled in the middle, asyncssh would leave it open, until the server has no place for another.
    """
    task = asyncio.ensure_future(opening)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with anyio.move_on_after(_END_S, shield=True), contextlib.suppress(*_LOST):
            await close(await asyncio.shield(task))
        if not task.done():  # the line is dead, or as good as dead
            task.cancel()
        raise


class _Running:
    """One command, from its start to its end."""

    def __init__(self, mark: str) -> None:
        self._mark = mark.encode()
        #: its process on the host, once it has said so
        self.pid: int | None = None
        #: there is no such program
        self.absent = False
        self._out, self._err = bytearray(), bytearray()

    async def run(self, connection: SSHClientConnection, line: str, stdin: bytes) -> Ran:
        """To its end. Raises ContactLost where the line breaks first."""
        try:
            process: SSHClientProcess[bytes] = await whole(
                connection.create_process(line, encoding=None, request_pty=False),
                lambda late: self._end(connection, late),
            )
        except asyncssh.ChannelOpenError as error:
            if connection.is_closed():
                raise ContactLost(str(error)) from error
            raise NotDone(f"no further command can be started there ({error}); see MaxSessions of its sshd") from error
        except _LOST as error:
            raise ContactLost(str(error)) from error
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(_feed, process.stdin, stdin)
                tasks.start_soon(self._read, process.stdout)
                tasks.start_soon(_drain, process.stderr, self._err)
            await process.wait_closed()
        finally:
            await self._end(connection, process)
        code = _exit_code(process)
        if code is None:
            raise ContactLost("the connection broke before it had ended")
        return Ran(exit_code=code, stdout=bytes(self._out), stderr=bytes(self._err))

    async def _read(self, stream: Any) -> None:
        """Standard output; what comes before our own first line is the login shell's."""
        await self._begin(stream)
        await _drain(stream, self._out)

    async def _begin(self, stream: Any) -> None:
        """Read up to our own first line, which says which process it is. Called again, it continues."""
        while self._mark and self.pid is None and not self.absent:
            part = await _read(stream)
            self._out += part
            said, found, rest = bytes(self._out).partition(self._mark)[2].partition(b"\n")
            if found:
                self.absent = said.strip() == b"no"
                self.pid = None if self.absent else int(said)
                self._out[:] = rest
            elif not part:
                return
            else:
                del self._out[:-_NOISE]

    async def _end(self, connection: SSHClientConnection, process: SSHClientProcess[bytes]) -> None:
        """End it and its process group, if it has not ended. Never raises, and takes seconds at most.

        It is the leader of a group, being the first process of its session on the host.
        """
        ended = process.exit_status is not None or process.exit_signal is not None
        if not ended and not connection.is_closed():
            with anyio.move_on_after(_END_S, shield=True), contextlib.suppress(*_LOST):
                process.send_signal("KILL")
                # Servers need not carry out signals: OpenSSH's does not for root.
                await self._begin(process.stdout)
                if self.pid is not None:
                    await connection.run(quoting.plain(("sh", "-c", f"kill -KILL -{self.pid}")), check=False)
        process.close()


def _exit_code(process: SSHClientProcess[bytes]) -> int | None:
    if process.exit_signal is not None:
        name = f"SIG{process.exit_signal[0]}"
        return -int(signal.Signals[name]) if name in signal.Signals.__members__ else -1
    return process.exit_status


async def _feed(stream: Any, data: bytes) -> None:
    try:
        if data:
            stream.write(data)
            await stream.drain()
        stream.write_eof()
    except _LOST:
        pass  # a command need not read what it is given; and a line that broke is noticed by the reader


async def _drain(stream: Any, kept: bytearray) -> None:
    while part := await _read(stream):
        kept += part[: OUTPUT_KEPT - len(kept)]


async def _read(stream: Any) -> bytes:
    try:
        data: bytes = await stream.read(65_536)
    except _LOST:
        return b""  # without an exit status it is not taken for an end
    return data


def _last_line(ran: Ran) -> str:
    lines = (ran.stderr or ran.stdout).decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else ""
