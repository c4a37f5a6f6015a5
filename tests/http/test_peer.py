"""An answer leaves in one piece, whatever pieces the server writes it in."""

import asyncio

import pytest

from rollmuxd.daemon.http.peer import OneWrite

pytestmark = pytest.mark.asyncio


class Recorder:
    """A transport that remembers what was done with it."""

    def __init__(self) -> None:
        self.done: list[bytes | str] = []

    def write(self, data: bytes) -> None:
        self.done.append(data)

    def close(self) -> None:
        self.done.append("closed")

    def is_closing(self) -> bool:
        return "closed" in self.done


async def test_what_is_written_in_one_turn_is_sent_at_once():
    to = Recorder()
    transport = OneWrite(to)
    transport.write(b"head ")
    transport.write(b"body")
    assert to.done == []
    await asyncio.sleep(0)
    transport.write(b"next")
    await asyncio.sleep(0)

    assert to.done == [b"head body", b"next"]


async def test_a_complete_answer_waits_for_no_turn_and_is_sent_once():
    to = Recorder()
    transport = OneWrite(to)
    transport.write(b"head ")
    transport.write(b"body")
    transport.flush()
    assert to.done == [b"head body"]
    await asyncio.sleep(0)

    assert to.done == [b"head body"]


async def test_nothing_is_lost_when_it_closes():
    to = Recorder()
    transport = OneWrite(to)
    transport.write(b"goodbye")
    transport.close()
    await asyncio.sleep(0)

    assert to.done == [b"goodbye", "closed"]
    assert transport.is_closing()


async def test_a_connection_whose_handle_is_closed_ends_alone():
    class Closed(Recorder):
        def write(self, data: bytes) -> None:
            raise RuntimeError("unable to perform operation: the handler is closed")

        def abort(self) -> None:
            self.done.append("aborted")

    to = Closed()
    transport = OneWrite(to)
    transport.write(b"too late")
    transport.close()

    assert to.done[0] == "aborted"
