"""The process that is sent to a node serves over what it was given as its input and output."""

import asyncio
import socket
import subprocess
import sys

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd_backend_local import payload
from rollmuxd_backend_local.agent import frames

ARGV = (sys.executable, "-I", "-S", "-c", payload.OPEN)


@pytest.mark.asyncio
@pytest.mark.parametrize("one_socket", [False, True])
async def test_commands_are_run_until_the_daemon_is_gone(one_socket):
    """Servers of SSH give a command pipes, or one socket for both directions."""
    program, mine, theirs = payload.agent("mark:", 600.0), *socket.socketpair()
    pipe = subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *(*ARGV, str(len(program))), stdin=theirs if one_socket else pipe, stdout=theirs if one_socket else pipe
    )
    theirs.close()
    reader, writer = process.stdout, process.stdin
    if one_socket:
        reader, writer = await asyncio.open_connection(sock=mine)
    else:
        mine.close()
    with anyio.fail_after(PATIENCE_S):
        writer.write(program)
        assert (await reader.readline()).startswith(b"mark:")
        for number in range(3):
            wish = frames.Run(("sh", "-c", "cat; exit 3"), {}, b"x" * 400_000, 600.0)
            frames.write(writer, frames.Ask(number, frames.Node(), 1.0, 600.0, wish))
            await writer.drain()
            assert await frames.read(reader) == frames.Answer(number, frames.Ran(3, b"x" * 400_000, b""))
        writer.close()
        assert await process.wait() == 0


@pytest.mark.asyncio
async def test_it_ends_with_its_commands_when_the_daemon_is_not_heard_of(tmp_path):
    program = payload.agent("mark:", 0.5)
    process = await asyncio.create_subprocess_exec(
        *(*ARGV, str(len(program))), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with anyio.fail_after(PATIENCE_S):
        process.stdin.write(program)
        await process.stdout.readline()
        wish = frames.Run(("sh", "-c", f"echo $$ >{tmp_path}/pid; exec sleep 600"), {}, b"", 600.0)
        frames.write(process.stdin, frames.Ask(1, frames.Node(), 1.0, 600.0, wish))
        assert await process.wait() == 0
    process.stdin.close()
