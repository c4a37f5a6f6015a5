"""What runs on a node, without Ray around it: commands that end before they begin, say too much, or do not listen."""

import os
import sys

import anyio
import pytest
from patience import PATIENCE_S
from serving import serving

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
async def test_an_end_reaches_a_command_that_has_closed_its_outputs_and_goes_on():
    node = OnNode()
    async with anyio.create_task_group() as tasks:
        said = []

        async def last():
            said.append(await run(node, "sh", "-c", "exec >&- 2>&-; sleep 600"))

        tasks.start_soon(last)
        with anyio.fail_after(PATIENCE_S):
            while "c" not in node._commands:
                await anyio.sleep(0)
            await anyio.sleep(0.3)  # by then it most likely has; ended sooner, it is the same
            await node.end("c")
    assert said[0][0] == "lost"
    assert not node._commands


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


@pytest.mark.asyncio
async def test_a_connection_that_is_closed_before_it_is_open_is_not_kept():

    async def until_gone(reader, writer):
        await reader.read()

    node = OnNode()
    with anyio.fail_after(PATIENCE_S):
        async with serving(until_gone) as (host, port):
            await node.close("s")
            with pytest.raises(Failed) as connected:
                await node.connect("s", host, port, 5.0)
            assert connected.value.how == "lost"
            assert not node._streams
    with pytest.raises(Failed) as received:
        await node.receive("s", 10)
    assert received.value.how == "broken"
