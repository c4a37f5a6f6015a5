"""What runs on a node, without Ray around it: commands that end before they begin, say too much, or do not listen."""

import asyncio
import base64
import os
import ssl
import sys
from pathlib import Path

import anyio
import certifi
import pytest
from patience import PATIENCE_S
from serving import serving

from rollmuxd_backend_local.agent import onnode
from rollmuxd_backend_local.agent.onnode import _KEPT, Failed, OnNode


async def run(node, *argv, call="c", stdin=b"", timeout_s=30.0):
    try:
        return "said", await node.run(call, list(argv), {}, stdin, timeout_s)
    except Failed as error:
        return error.how, str(error)


@pytest.mark.asyncio
async def test_a_program_without_a_name_is_the_python_that_runs_there(monkeypatch):
    monkeypatch.setenv("RAY_JOB_ID", "of the actor's own")
    how, (code, out, _) = await run(
        OnNode(not_theirs="RAY_"), "", "-c", "import os, sys; print(sys.executable, os.environ.get('RAY_JOB_ID'))"
    )
    assert (how, code, out.decode().split()) == ("said", 0, [sys.executable, "None"])


@pytest.mark.asyncio
async def test_an_end_that_comes_before_its_command_keeps_it_from_beginning(tmp_path):
    node = OnNode()
    await node.end("c")
    assert (await run(node, "touch", str(tmp_path / "there")))[0] == "lost"
    assert not (tmp_path / "there").exists()
    assert (await run(node, "true"))[0] == "said", "the next one of this name is another one"


@pytest.mark.asyncio
async def test_an_end_reaches_a_command_that_waits_for_others_to_end(monkeypatch):
    monkeypatch.setattr(onnode, "_COMMANDS", 1)
    node = OnNode()
    with anyio.fail_after(PATIENCE_S):
        calls = [asyncio.create_task(run(node, "sleep", "600", call=call, timeout_s=600.0)) for call in ("a", "b")]
        while len(node._ends) < 2:
            await anyio.sleep(0.01)
        await node.end("b")
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert [call.done() for call in calls] == [False, True]
        await node.end("a")
        assert await calls[0] == ("lost", "sleep was ended: no call waits for it")
    assert not node._ends


@pytest.mark.asyncio
async def test_an_end_reaches_a_command_that_has_closed_its_outputs_and_goes_on():
    node = OnNode()
    async with anyio.create_task_group() as tasks:
        said = []

        async def last():
            said.append(await run(node, "sh", "-c", "exec >&- 2>&-; sleep 600"))

        tasks.start_soon(last)
        with anyio.fail_after(PATIENCE_S):
            while "c" not in node._ends:
                await anyio.sleep(0)
            await anyio.sleep(0.3)  # by then it most likely has; ended sooner, it is the same
            await node.end("c")
    assert said[0][0] == "lost"
    assert not node._ends


@pytest.mark.asyncio
async def test_one_that_reads_nothing_of_much_and_says_too_much_comes_to_its_end():
    script = f"import os\nfor _ in range(3): os.write(1, bytes({_KEPT} // 2)); os.write(2, b'x')"
    how, (code, out, err) = await run(OnNode(), "", "-c", script, stdin=bytes(2_000_000))
    assert (how, code, len(out), err) == ("said", 0, _KEPT, b"xxx")


@pytest.mark.asyncio
async def test_nothing_is_left_open_after_a_command_however_it_ended():
    node = OnNode()
    await run(node, "true")
    before = len(os.listdir("/proc/self/fd"))
    for argv in (("true",), ("/no/such/program",), ("sleep", "600")):
        await run(node, *argv, timeout_s=0.1)
    assert len(os.listdir("/proc/self/fd")) == before


def exchange(port, data=b"x", most=2**20, trust=""):
    wish = {"address": "127.0.0.1", "port": port, "data": base64.b64encode(data).decode(), "most": most, "trust": trust}
    return {"do": "Exchange", **wish}


@pytest.mark.asyncio
async def test_an_exchange_that_is_ended_closes_its_connection_and_one_ended_before_is_not_begun():
    begun, gone = anyio.Event(), anyio.Event()

    async def until_gone(reader, writer):
        await reader.readexactly(1)
        begun.set()
        await reader.read()
        gone.set()

    node, said = OnNode(), []

    async def last():
        said.append(await node.do("s", exchange(port), 5.0))

    with anyio.fail_after(PATIENCE_S):
        async with serving(until_gone) as (_, port), anyio.create_task_group() as tasks:
            tasks.start_soon(last)
            await begun.wait()
            await node.end("s")
            await gone.wait()
        assert said == [{"type": "Failed", "how": "lost", "why": "it was ended: no call waits for it"}]
        assert not node._ends
        await node.end("s")
        assert (await node.do("s", exchange(1), 5.0))["why"] == "it was ended before it began"


ANSWERS = {
    "a length": b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
    "nothing": b"HTTP/1.1 200 OK\r\ncontent-length:0\r\nserver: x\r\n\r\n",
    "chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("kind", ANSWERS)
@pytest.mark.asyncio
async def test_an_answer_that_is_whole_is_there_though_its_server_keeps_the_connection(kind):
    """Not every server heeds that a request asks for the end of its connection."""

    async def keeps(reader, writer):
        for at in range(len(ANSWERS[kind])):
            writer.write(ANSWERS[kind][at : at + 1])
            await writer.drain()
        await reader.read()

    with anyio.fail_after(PATIENCE_S):
        async with serving(keeps) as (_, port):
            said = await OnNode().do("s", exchange(port, b""), PATIENCE_S)
    assert base64.b64decode(said["data"]) == ANSWERS[kind]


@pytest.mark.asyncio
async def test_what_came_before_a_connection_broke_is_there():

    async def break_off(reader, writer):
        writer.write(b"half")
        await writer.drain()
        writer.transport.abort()

    async with serving(break_off) as (_, port):
        said = await OnNode().do("s", exchange(port, bytes(3_000_000)), PATIENCE_S)
    assert said == {"type": "Data", "data": said["data"]}
    assert b"half".startswith(base64.b64decode(said["data"]))  # a reset may overtake it


@pytest.mark.asyncio
async def test_certificates_are_read_when_they_change_and_not_for_each_exchange(monkeypatch):
    """Fifty engines that are asked at once would hold the daemon up for seconds."""
    trust, made, make = Path(certifi.where()).read_text(), [], ssl.create_default_context
    monkeypatch.setattr(ssl, "create_default_context", lambda: made.append(make()) or made[-1])

    async def hang_up(reader, writer):
        writer.close()

    node = OnNode()
    async with serving(hang_up) as (_, port):
        for given in (trust, trust, f"{trust}\n", trust):
            assert (await node.do("s", exchange(port, trust=given), PATIENCE_S))["how"] == "lost"
    assert len(made) == 3
