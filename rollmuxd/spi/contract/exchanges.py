"""Exchanges with what listens on a host, of backends that have them."""

import contextlib
import os
from collections.abc import AsyncIterator

import anyio
import pytest

from rollmuxd.spi.backend import Backend, ExchangesBytes, RunsCommands
from rollmuxd.spi.contract.given import GivenBackend
from rollmuxd.spi.contract.moments import sentence
from rollmuxd.spi.errors import NotDone

#: Sends back as many bytes of each connection as its first eight say; of none, how many connections are open. Its port
#: is written into a file.
_ECHO = """
import socket, sys, threading
there = []
def serve(line):
    there.append(line)
    try:
        with line, line.makefile("rb") as sent:
            size = int(sent.read(8))
            line.sendall(sent.read(size) if size else b"%d" % len(there))
    finally:
        there.remove(line)
listener = socket.create_server(("127.0.0.1", 0))
with open(sys.argv[1], "w") as mark:
    mark.write("%d\\n" % listener.getsockname()[1])
while True:
    threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()
"""


class Exchanges(GivenBackend):
    """What is promised by those that exchange bytes."""

    @sentence
    async def test_what_is_sent_comes_through_in_both_directions_to_its_end_and_no_more_is_taken_in_than_is_wanted(
        self, backend: Backend
    ) -> None:
        exchanger, runner = self._exchanger(backend)
        data = os.urandom(300_000)
        async with self._echo(runner) as port:
            with anyio.fail_after(self.patience_s):
                back = await exchanger.exchange(self.host, "127.0.0.1", port, _sized(data), most=2**20)
                some = await exchanger.exchange(self.host, "127.0.0.1", port, _sized(data), most=70_000)
        assert (back, some) == (data, data[:70_000])

    @sentence
    async def test_exchanges_are_apart_from_each_other_and_many_may_be_under_way(self, backend: Backend) -> None:
        exchanger, runner = self._exchanger(backend)
        back: dict[int, bytes] = {}
        async with self._echo(runner) as port:

            async def talk(number: int) -> None:
                data = _sized(str(number).encode() * 1_000)
                back[number] = await exchanger.exchange(self.host, "127.0.0.1", port, data, most=2**20)

            with anyio.fail_after(self.patience_s):
                async with anyio.create_task_group() as tasks:
                    for number in range(8):
                        tasks.start_soon(talk, number)
        assert back == {number: str(number).encode() * 1_000 for number in range(8)}

    @sentence
    async def test_an_exchange_with_what_does_not_listen_is_not_done(self, backend: Backend) -> None:
        exchanger, runner = self._exchanger(backend)
        async with self._echo(runner) as port:
            pass  # the listener is gone
        with anyio.fail_after(self.patience_s), pytest.raises(NotDone, match=str(port)):
            await exchanger.exchange(self.host, "127.0.0.1", port, b"x", most=1)

    @sentence
    async def test_an_exchange_that_is_cancelled_closes_its_connection(self, backend: Backend) -> None:
        exchanger, runner = self._exchanger(backend)

        async def say(data: bytes) -> bytes:
            return await exchanger.exchange(self.host, "127.0.0.1", port, data, most=9)

        async with self._echo(runner) as port:
            with anyio.fail_after(self.patience_s):
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(say, b"%8d, and then too few" % 100)
                    await self._until(lambda: say(_sized(b"")), lambda said: said == b"2")
                    tasks.cancel_scope.cancel()
            await self._until(lambda: say(_sized(b"")), lambda said: said == b"1")

    def _exchanger(self, backend: Backend) -> tuple[ExchangesBytes, RunsCommands]:
        if not isinstance(backend, ExchangesBytes):
            pytest.skip("the backend exchanges no bytes")
        if not isinstance(backend, RunsCommands):
            pytest.skip("the backend runs no commands: nothing can be started there to talk to")
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


def _sized(data: bytes) -> bytes:
    return b"%8d" % len(data) + data
