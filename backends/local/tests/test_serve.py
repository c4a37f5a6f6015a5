"""The process that is sent to a node serves over what it was given as its input and output."""

import asyncio
import socket
import subprocess
import sys

import anyio
import pytest
from patience import PATIENCE_S
from serving import serving

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
@pytest.mark.parametrize("silent", [False, True])
async def test_a_command_continues_when_the_daemon_is_gone_and_a_connection_does_not(tmp_path, silent):
    program = payload.agent("mark:", 1.0 if silent else 600.0)
    process = await asyncio.create_subprocess_exec(
        *(*ARGV, str(len(program))), stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    begun, closed = asyncio.Event(), asyncio.Event()

    async def until_gone(reader, writer):
        begun.set()
        await reader.read()
        closed.set()

    script = 'touch "$0/begun"; until [ -e "$0/go" ]; do sleep 0.02; done; echo said; touch "$0/done"'
    with anyio.fail_after(PATIENCE_S):
        async with serving(until_gone) as (host, port):
            process.stdin.write(program)
            await process.stdout.readline()
            wishes = (
                frames.Exchange(host, port, b"", 1, ""),
                frames.Run(("sh", "-c", script, str(tmp_path)), {}, b"", 600.0),
            )
            for number, wish in enumerate(wishes):
                frames.write(process.stdin, frames.Ask(number, frames.Node(), 600.0, 600.0, wish))
            await begun.wait()
            while not (tmp_path / "begun").exists():
                await anyio.sleep(0.01)
            if not silent:
                process.stdin.close()
            await closed.wait()
            (tmp_path / "go").touch()
            assert await process.wait() == 0
    assert (tmp_path / "done").exists()
    process.stdin.close()
