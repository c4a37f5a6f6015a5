"""Running commands and opening connections on this machine, for backends whose hosts are this machine.

Keeps what :class:`~rollmuxd.spi.RunsCommands` and :class:`~rollmuxd.spi.OpensConnections` promise. Needs anyio; not
imported by :mod:`rollmuxd.spi`, which stays free of it.
"""

import contextlib
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from subprocess import PIPE

import anyio
import anyio.abc

from rollmuxd.spi.backend import OUTPUT_KEPT, Ran
from rollmuxd.spi.environment import inherited, with_score_reset
from rollmuxd.spi.errors import ContactLost, NotDone


async def run(
    argv: Sequence[str], *, env: Mapping[str, str] | None = None, stdin: bytes = b"", timeout_s: float = 60.0
) -> Ran:
    """Run a command here, in a session of its own. As :meth:`rollmuxd.spi.RunsCommands.run`.

    Of this process's environment it has what :mod:`rollmuxd.spi.environment` lists, and ``env`` on top of that.
    """
    if not argv:
        raise NotDone("a command needs at least the name of its program")
    given = {**inherited(os.environ), **(env or {})}
    if shutil.which(argv[0], path=given.get("PATH")) is None:
        raise NotDone(f"{argv[0]}: there is no such program, or it may not be run")
    try:
        # Cut short in its start it would leave behind what it has started in turn: its group is not known yet.
        with anyio.CancelScope(shield=True):
            process = await anyio.open_process(
                list(with_score_reset(argv)),
                stdin=PIPE,
                stdout=PIPE,
                stderr=PIPE,
                env=given,
                start_new_session=True,
            )
    except (OSError, ValueError) as error:
        raise NotDone(f"{argv[0]}: {error}") from error
    over = False
    try:
        with anyio.fail_after(timeout_s):
            ran = await _ended(process, stdin)
        over = True
    except TimeoutError as error:
        raise ContactLost(f"{argv[0]} took longer than {timeout_s:g} s, and was ended") from error
    else:
        return ran
    finally:
        if not over:  # its group may have outlived it: it still writes to the outputs
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        with anyio.CancelScope(shield=True):
            await process.aclose()


async def connect(address: str, port: int) -> anyio.abc.ByteStream:
    """Open a TCP connection from here. As :meth:`rollmuxd.spi.OpensConnections.connect`."""
    try:
        return await anyio.connect_tcp(address, port)
    except OSError as error:
        raise NotDone(f"nothing can be reached at {address} port {port}: {error}") from error


async def _ended(process: anyio.abc.Process, stdin: bytes) -> Ran:
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    out, err = bytearray(), bytearray()
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_feed, process.stdin, stdin)
        tasks.start_soon(_drain, process.stdout, out)
        tasks.start_soon(_drain, process.stderr, err)
    return Ran(exit_code=await process.wait(), stdout=bytes(out), stderr=bytes(err))


async def _feed(stream: anyio.abc.ByteSendStream, data: bytes) -> None:
    # A command need not read what it is given.
    with contextlib.suppress(anyio.BrokenResourceError, BrokenPipeError, ConnectionResetError):
        if data:
            await stream.send(data)
        await stream.aclose()


async def _drain(stream: anyio.abc.ByteReceiveStream, kept: bytearray) -> None:
    async for chunk in stream:
        kept += chunk[: OUTPUT_KEPT - len(kept)]
