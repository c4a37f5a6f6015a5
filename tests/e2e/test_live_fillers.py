"""Fillers and the jobs that they give way to: real processes, the record of the mock as witness."""

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import forked
import pytest
from fake_vllm import FakeVllm
from patience import PATIENCE_S

EXAMPLE = Path(__file__).parents[2] / "examples" / "vllm_filler.py"
pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def filler(live, name="f", yield_s=60.0, **more):
    return live.holder(name, phase="filler", filler={"yield_s": yield_s}, train=None, **more)


def test_a_filler_that_gives_way_is_followed_by_the_job_and_works_again_when_that_has_ended(live):
    daemon = live.daemon()
    f = filler(live)

    a, asked = live.waiter("a")
    (yielded,) = live.until("the filler is asked to yield", lambda: daemon.facts("yield_asked"))
    assert yielded["reason"]["code"] == "wanted"
    f.do("leave")
    again = f.ask("enter", phase="filler")
    assert a.answer(asked)["gpus"] == ["mock/gpu0"]
    (ended,) = live.until("the loan has ended", lambda: daemon.facts("loan_ended"))
    assert (ended["gpus"], ended["how"]) == (1, "wanted")

    a.do("leave")
    a.do("end")
    assert f.answer(again)["gpus"] == ["mock/gpu0"]


def test_a_deaf_filler_loses_the_node_when_its_time_is_over_and_its_driver_parks_it(live):
    daemon = live.daemon()
    f = filler(live, yield_s=0.5)
    a = live.holder("a")  # is granted, though the filler does nothing
    (revoked,) = daemon.facts("slot_taken_away")
    assert revoked["by"] == "yield"
    assert daemon.job("f")["status"] == "admitted"
    assert f.fails("leave")["error"] == "SlotLost"
    f.stays = list  # it was deaf: by its own clock the node was its own until now
    a.do("leave")


def test_a_loan_and_the_time_that_it_has_to_give_way_outlive_the_daemon(live):
    daemon = live.daemon()
    f = filler(live, yield_s=1.0)
    _, asked = live.waiter("a")
    live.until("the filler is asked to yield", lambda: daemon.facts("yield_asked"))
    daemon.kill9()
    daemon.start()
    assert live.trainers[-1].answer(asked)["gpus"] == ["mock/gpu0"]
    assert daemon.facts("slot_taken_away")[-1]["by"] == "yield"
    assert f.fails("leave")["error"] == "SlotLost"
    f.stays = list  # as above


@contextlib.contextmanager
def vllm_server():
    """A fake vLLM, which listens in a thread of its own."""
    engine, runner, ready = FakeVllm(), asyncio.Runner(), threading.Event()
    loop, ended = runner.get_loop(), asyncio.Event()

    async def serve():
        async with engine:
            ready.set()
            await ended.wait()

    thread = threading.Thread(target=lambda: runner.run(serve()))
    thread.start()
    assert ready.wait(PATIENCE_S)
    yield engine
    loop.call_soon_threadsafe(ended.set)
    thread.join(PATIENCE_S)
    runner.close()  # and what is left of connections


def test_a_stock_vllm_server_answers_requests_between_jobs_and_gives_way_by_itself(live):
    daemon = live.daemon()
    requests, answers = live.folder / "requests.jsonl", live.folder / "answers.jsonl"
    lines = [{"custom_id": f"r{n}", "url": "/v1/completions", "body": {"prompt": "x"}} for n in range(5)]
    requests.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with vllm_server() as engine:
        engine.faults["POST /v1/completions"] = "hang"  # the first is a long one
        options = ["--url", engine.url, "--node", "mock/gpu0", "--gpu-gb", "2", "--ram-gb", "2", "--load-s", "1"]
        command = [sys.executable, str(EXAMPLE), str(requests), str(answers), *options]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
        env = {**kept, "HOME": str(live.folder), "ROLLMUX_URL": daemon.url, "ROLLMUX_REQUIRED": "1"}
        with forked.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
            try:
                live.until(
                    "all but one are answered", lambda: answers.exists() and answers.read_text().count("\n") == 4
                )
                a = live.holder("a")  # the long one is cut off, and the server sleeps
                asleep = list(engine.calls)
                a.do("leave")
                a.do("end")
                out, err = program.communicate(timeout=PATIENCE_S)
            finally:
                program.kill()
    assert program.returncode == 0, err
    assert "5 requests answered, 0 failed, 1 sent again" in out
    assert sorted(json.loads(line)["custom_id"] for line in answers.read_text().splitlines()) == [
        line["custom_id"] for line in lines
    ]
    assert "POST /sleep?level=1&mode=abort" in asleep
    assert "POST /wake_up?tags=weights" in engine.calls[len(asleep) :]
    assert not daemon.facts("slot_taken_away", "job_quarantined")
