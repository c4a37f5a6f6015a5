"""The connection to a cluster member: what becomes of calls when it is slow, silent, talks nonsense or is gone."""

import asyncio
import contextlib

import anyio
import pytest
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost
from rollmuxd_backend_local.agent import connection as agent_connection
from rollmuxd_backend_local.agent import frames
from rollmuxd_backend_local.agent.frames import Answer, Ask, Data, Exchange, Failed, Forget, Node
from rollmuxd_backend_ray import connection

BOX = Node("box")


class Served(connection.ClusterConnection):
    """The connection to a cluster member that is there."""

    def __init__(self, socket, **more):
        super().__init__("somewhere", 5.0, **more)
        self.socket = socket

    async def _start(self):
        return self.socket


WISH = Exchange("127.0.0.1", 1, b"", 1, "")
COMMAND = frames.Run(("true",), {}, b"", 5.0)


class Member:
    """Serves like one, as a test says it: what it was asked, and how often it was connected to."""

    def __init__(self, folder):
        self.socket = str(folder / "s")
        self.asked, self.forgotten, self.connections = [], [], 0
        self.answer = self.at_once

    async def at_once(self, ask, writer):
        frames.write(writer, Answer(ask.number, Data(b"yes")))

    async def never(self, ask, writer):
        pass

    async def nonsense(self, ask, writer):
        writer.write(b"\x00\x00\x00\x03abc")

    async def too_long(self, ask, writer):
        writer.write(b"\xff\xff\xff\xff")

    async def hang_up(self, ask, writer):
        writer.close()

    async def _connected(self, reader, writer):
        self.connections += 1
        with contextlib.suppress(EOFError, ConnectionError):
            while True:
                said = await frames.read(reader)
                if isinstance(said, Forget):
                    self.forgotten.append(said.number)
                    continue
                self.asked.append(said)
                await self.answer(said, writer)
        writer.close()

    @contextlib.asynccontextmanager
    async def serving(self):
        server = await asyncio.start_unix_server(self._connected, self.socket)
        to = Served(self.socket)
        yield to
        await to.close()
        server.close()


@pytest.fixture
def member(tmp_path, monkeypatch):
    monkeypatch.setattr(agent_connection, "_WAY_S", 0.02)
    return Member(tmp_path)


@pytest.mark.asyncio
async def test_many_calls_share_one_connection_and_each_gets_its_own_answer(member):
    held = []

    async def all_at_once_the_last_first(ask, writer):
        held.append(ask)
        if len(held) == 8:
            for one in reversed(held):
                frames.write(writer, Answer(one.number, Data(one.wish.data)))

    member.answer = all_at_once_the_last_first
    async with member.serving() as to:
        said = await asyncio.gather(
            *(to.ask(BOX, 1, Exchange("a", 1, b"%d" % number, 1, ""), 5) for number in range(8))
        )
    assert [one.data for one in said] == [str(number).encode() for number in range(8)]
    assert member.connections == 1


@pytest.mark.asyncio
async def test_cluster_member_that_misses_three_answers_in_a_row_is_given_up_and_one_that_does_not_is_kept(member):
    async with member.serving() as to:
        await to.ask(BOX, 1, COMMAND, 5)  # to connect takes its time, too

        async def unanswered():
            member.answer = member.never
            with pytest.raises(ContactLost, match=r"did not answer within 0\.02 s"):
                await to.ask(BOX, 1, COMMAND, 0.02)

        for _ in range(2):
            await unanswered()
        member.answer = member.at_once
        await to.ask(BOX, 1, COMMAND, 5)
        for _ in range(2):
            await unanswered()
        member.answer = member.at_once
        await to.ask(BOX, 1, WISH, 5)  # an exchange's answer says nothing of commands
        assert member.connections == 1
        await unanswered()
        member.answer = member.at_once
        assert await to.ask(BOX, 1, COMMAND, 5) == Data(b"yes")
        assert member.connections == 2


@pytest.mark.asyncio
async def test_an_exchange_that_is_slow_costs_no_connection(member):
    async with member.serving() as to:
        await to.ask(BOX, 1, WISH, 5)  # to connect takes its time, too
        member.answer = member.never
        for _ in range(5):
            with pytest.raises(ContactLost):
                await to.ask(BOX, 1, WISH, 0.02)
        member.answer = member.at_once
        assert await to.ask(BOX, 1, WISH, 5) == Data(b"yes")
    assert member.connections == 1


@pytest.mark.asyncio
async def test_a_nodes_missed_limit_is_an_answer_of_the_cluster_member_and_costs_no_other_node_its_calls(member):
    async def one_node_hangs(ask, writer):
        how = Failed("lost", "the node did not answer") if ask.node == BOX else Data(b"yes")
        frames.write(writer, Answer(ask.number, how))

    member.answer = one_node_hangs
    async with member.serving() as to:
        for _ in range(5):
            assert isinstance(await to.ask(BOX, 1, WISH, 5), Failed)
            assert await to.ask(Node("other"), 1, WISH, 5) == Data(b"yes")
    assert member.connections == 1


@pytest.mark.asyncio
async def test_a_call_that_is_given_up_is_forgotten_by_the_cluster_member_too_however_it_was(member):
    async with member.serving() as to:
        await to.ask(BOX, 1, WISH, 5)  # to connect takes its time, too
        member.asked.clear()
        member.answer = member.never
        with pytest.raises(ContactLost):
            await to.ask(BOX, 1, WISH, 0.02)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(to.ask, BOX, 1, WISH, None)
            with anyio.fail_after(PATIENCE_S):
                while len(member.asked) < 2:
                    await anyio.sleep(0.001)
            tasks.cancel_scope.cancel()
        with anyio.fail_after(PATIENCE_S):
            while len(member.forgotten) < 2:
                await anyio.sleep(0.001)
    assert member.forgotten == [ask.number for ask in member.asked]


@pytest.mark.parametrize("how", ["nonsense", "too_long", "hang_up"])
@pytest.mark.asyncio
async def test_nonsense_is_contact_lost_for_all_that_wait_and_the_next_call_finds_the_cluster_again(member, how):
    async with member.serving() as to:
        member.answer = member.never
        async with anyio.create_task_group() as tasks:

            async def waits():
                with pytest.raises(ContactLost):
                    await to.ask(BOX, 1, WISH, None)

            tasks.start_soon(waits)
            with anyio.fail_after(PATIENCE_S):
                while not member.asked:
                    await anyio.sleep(0.001)
                member.answer = getattr(member, how)
                with pytest.raises(ContactLost):
                    await to.ask(BOX, 1, WISH, 5)
        member.answer = member.at_once
        assert await to.ask(BOX, 1, WISH, 5) == Data(b"yes")


@pytest.mark.asyncio
async def test_tries_to_join_are_further_and_further_apart_and_calls_between_are_told_the_same(tmp_path):
    now = 100.0
    to = Served(str(tmp_path / "nobody"), now=lambda: now)
    for least in (0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 30.0):
        with pytest.raises(ContactLost, match="the Ray cluster at somewhere cannot be reached") as tried:
            await to.ask(BOX, 1, WISH, 5)
        assert least * 0.9 <= to._next_at - now <= least * 1.1
        if to._next_at - now > 2.5:
            with pytest.raises(ContactLost) as between:
                await to.ask(BOX, 1, WISH, 5)
            assert str(between.value) == str(tried.value)
        now = to._next_at
    await to.close()


@pytest.mark.asyncio
async def test_cluster_member_does_not_hear_what_the_daemon_has_for_itself(tmp_path, monkeypatch):
    for name in ("ROLLMUX_LOG", "RAY_ADDRESS", "NOTIFY_SOCKET", "WATCHDOG_USEC", "KEPT"):
        monkeypatch.setenv(name, name.lower())
    says = tmp_path / "says"
    says.write_text('#!/bin/sh\necho "[$ROLLMUX_LOG$RAY_ADDRESS$NOTIFY_SOCKET$WATCHDOG_USEC] $KEPT" >&2; exit 1\n')
    says.chmod(0o755)
    monkeypatch.setattr(connection.sys, "executable", str(says))
    to = connection.ClusterConnection("somewhere", 5.0)
    with pytest.raises(ContactLost, match=r"\[\] kept"):
        await to.ask(BOX, 5.0, WISH, 5.0)
    await to.close()


@pytest.mark.asyncio
async def test_what_is_longer_than_anybody_believes_is_not_sent():
    with pytest.raises(ValueError, match="are the most"):
        frames.write(None, Ask(1, BOX, 1, 1, Exchange("a", 1, bytes(frames.LONGEST), 1, "")))
