"""Connections from a host, of backends that open them."""

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import anyio.abc
import pytest

from rollmuxd.spi.backend import Backend, OpensConnections, RunsCommands
from rollmuxd.spi.contract.given import GivenBackend
from rollmuxd.spi.contract.moments import sentence
from rollmuxd.spi.errors import NotDone

#: Sends back whatever each connection brings; its port is written into a file.
_ECHO = """
import os, socket, sys, threading
def serve(line):
    while data := line.recv(65536):
        line.sendall(data)
    line.close()
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1], "w") as mark:
    mark.write("%d\\n" % listener.getsockname()[1])
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Connections(GivenBackend):
    """What is promised by those that open connections."""

    @sentence
    async def test_what_is_sent_over_a_connection_comes_through_in_both_directions_to_its_end(
        self, backend: Backend
    ) -> None:
        opener, runner = self._opener(backend)
        data = os.urandom(300_000)
        async with self._echo(runner) as port:
            with anyio.fail_after(self.patience_s):
                stream = await opener.connect(self.host, "127.0.0.1", port)
                async with stream, anyio.create_task_group() as tasks:
                    tasks.start_soon(_send_all, stream, data)
                    back = b"".join([part async for part in stream])
        assert back == data

    @sentence
    async def test_connections_are_apart_from_each_other_and_many_may_be_open(self, backend: Backend) -> None:
        opener, runner = self._opener(backend)
        back: dict[int, bytes] = {}
        async with self._echo(runner) as port:

            async def talk(number: int) -> None:
                async with await opener.connect(self.host, "127.0.0.1", port) as stream:
                    await _send_all(stream, str(number).encode() * 1_000)
                    back[number] = b"".join([part async for part in stream])

            with anyio.fail_after(self.patience_s):
                async with anyio.create_task_group() as tasks:
                    for number in range(8):
                        tasks.start_soon(talk, number)
        assert back == {number: str(number).encode() * 1_000 for number in range(8)}

    @sentence
    async def test_a_connection_to_where_nobody_listens_is_not_done(self, backend: Backend) -> None:
        opener, runner = self._opener(backend)
        async with self._echo(runner) as port:
            pass  # the listener is gone
        with anyio.fail_after(self.patience_s), pytest.raises(NotDone, match=str(port)):
            await opener.connect(self.host, "127.0.0.1", port)

    def _opener(self, backend: Backend) -> tuple[OpensConnections, RunsCommands]:
        if not isinstance(backend, OpensConnections):
            pytest.skip("the backend opens no connections")
        if not isinstance(backend, RunsCommands):
            pytest.skip("the backend runs no commands: nothing can be started there to connect to")
        return backend, backend

    @contextlib.asynccontextmanager
    async def _echo(self, runner: RunsCommands) -> AsyncIterator[int]:
        """The port of something on the host that sends back what it gets."""
        mark = (await runner.run(self.host, ("mktemp",))).stdout.decode().strip()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: runner.run(self.host, ("python3", "-c", _ECHO, mark), timeout_s=600))
            listens = await self._until(lambda: runner.run(self.host, ("cat", mark)), lambda ran: ran.stdout)
            port = int(listens.stdout)
            yield port
            tasks.cancel_scope.cancel()
        dial = f"import socket; socket.create_connection(('127.0.0.1', {port}))"
        await self._until(lambda: runner.run(self.host, ("python3", "-c", dial)), lambda ran: ran.exit_code)


async def _send_all(stream: anyio.abc.ByteStream, data: bytes) -> None:
    await stream.send(data)
    await stream.send_eof()
