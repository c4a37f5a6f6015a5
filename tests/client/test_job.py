"""What a training loop sees, against the fake daemon that users get."""

import asyncio
import contextlib
import math
import os
import re
import threading
import time
import traceback
from concurrent import futures
from datetime import UTC, datetime
from pathlib import Path

import pytest
from patience import PATIENCE_S

import rollmuxd
from rollmuxd import testing
from rollmuxd.client import fakes
from rollmuxd.client.errors import Unreachable
from rollmuxd.wire.answers import Directive


@pytest.fixture
def daemon():
    with testing.fake_daemon() as fake:
        yield fake


def test_the_loop_of_the_manual_runs(daemon):
    with rollmuxd.job("math-7b", rollout=dict(nodes=1), train=dict(nodes=1)) as job:
        with job.phase("init"):
            pass
        for _ in range(2):
            with job.phase("rollout") as slot:
                slot.progress(1, 2)
                assert slot.gpus == ("fake/gpu0", "fake/gpu1")
            with job.phase("train"):
                pass

    assert daemon.phases == ["init", "rollout", "train", "rollout", "train"]
    assert daemon.progress == [("rollout", 1, 2)] * 2
    assert daemon.ended == {"math-7b": "finished"}


def test_a_phase_is_a_decorator_too(daemon):
    job = rollmuxd.job("a")

    @job.phase("rollout")
    def rollout(prompts, *, k):
        """Generate."""
        return prompts, k, job.slot.gpus

    with job:
        assert rollout("p", k=8) == ("p", 8, ("fake/gpu0", "fake/gpu1"))
        assert rollout("q", k=1)[0] == "q"

    assert rollout.__doc__ == "Generate."
    assert daemon.phases == ["rollout", "rollout"]
    assert job.slot is None


@pytest.mark.asyncio
async def test_a_coroutine_function_of_a_plain_job_waits_without_blocking_its_loop(daemon):
    job = rollmuxd.job("a")
    daemon.wait("rollout", math.inf)

    @job.phase("rollout")
    async def rollout():
        return job.slot.id

    with job:
        waiting = asyncio.create_task(rollout())
        while not daemon.asked("POST", "/slots"):
            await asyncio.sleep(0)
        daemon.go("rollout")
        assert await waiting


@pytest.mark.asyncio
async def test_the_async_twin(daemon):
    async with rollmuxd.ajob("a", slo=2.0) as job:
        async with job.phase("rollout", then="train") as slot:
            slot.measure(tokens=5)
            await slot.shrink(slot.gpus[:1])
            assert slot.gpus == ("fake/gpu0",)

        @job.phase("train")
        async def train():
            return job.slot.phase

        assert await train() == "train"

    assert daemon.phases == ["rollout", "train"]
    assert daemon.measured == [("rollout", {"tokens": 5.0})]
    assert daemon.registered[0].slo == 2.0
    assert daemon.ended == {"a": "finished"}


def test_a_plain_function_is_no_phase_of_an_async_job(daemon):
    with pytest.raises(TypeError, match="is not async"):
        rollmuxd.ajob("a").phase("rollout")(lambda: None)


@pytest.mark.asyncio
async def test_a_cancelled_wait_takes_its_request_back(daemon):
    daemon.wait("rollout", math.inf)

    async with rollmuxd.ajob("a") as job:

        async def roll():
            async with job.phase("rollout"):
                pass

        task = asyncio.create_task(roll())
        while not daemon.asked("POST", "/slots"):
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with job.phase("train"):
            pass

    assert len(daemon.asked("POST", "/give-back")) == 1
    assert daemon.phases == ["train"]


def test_ctrl_c_in_the_middle_of_a_call_takes_the_request_back(daemon, monkeypatch):
    daemon.wait("rollout", math.inf)
    handle, interrupt = daemon.handle, [KeyboardInterrupt]

    def interrupted(method, path, params, content):
        answer = handle(method, path, params, content)
        if path.endswith("/slots") and interrupt:
            raise interrupt.pop()
        return answer

    monkeypatch.setattr(daemon, "handle", interrupted)
    with rollmuxd.job("a") as job:
        with pytest.raises(KeyboardInterrupt), job.phase("rollout"):
            pass
        with job.phase("train"):
            pass

    assert daemon.phases == ["train"]


@pytest.mark.parametrize("heard", [True, False])
def test_ctrl_c_in_the_middle_of_a_release_keeps_no_slot(daemon, monkeypatch, heard):
    handle, interrupt = daemon.handle, [KeyboardInterrupt]

    def interrupted(method, path, params, content):
        if not path.endswith("/release") or not interrupt:
            return handle(method, path, params, content)
        if heard:
            handle(method, path, params, content)
        raise interrupt.pop()

    monkeypatch.setattr(daemon, "handle", interrupted)
    with rollmuxd.job("a") as job:
        with pytest.raises(KeyboardInterrupt), job.phase("rollout", then="train"):
            pass
        assert [slot.status for slot in daemon._slots.values() if slot.status in {"running", "queued"}] == []
        with job.phase("train"):
            pass

    assert daemon.phases[0] == "rollout"
    assert daemon.phases[-1] == "train"


def test_ctrl_c_in_a_phase_gives_up_on_a_daemon_that_hangs_and_says_so_beside_it(daemon, monkeypatch):
    handle, now, hangs = daemon.handle, [1000.0], [True]

    def hanging(method, path, params, content):
        if path.endswith("/release") and hangs:
            now[0] += 5
            raise Unreachable("timed out")
        return handle(method, path, params, content)

    monkeypatch.setattr(daemon, "handle", hanging)
    job = rollmuxd.job("a")
    job.start()
    job._runtime._session._clock = lambda: now[0]
    with pytest.raises(KeyboardInterrupt) as raised, job.phase("rollout"):
        raise KeyboardInterrupt
    assert now[0] - 1000 < 15
    assert "got no answer in time" in raised.value.__notes__[0]

    hangs.clear()
    with job.phase("train"):
        assert len(daemon.asked("POST", "/give-back")) == 1
    job.end()


def test_a_second_ctrl_c_leaves_the_job_seconds_no_more(daemon, monkeypatch):
    handle, interrupt = daemon.handle, [KeyboardInterrupt]

    def interrupted(method, path, params, content):
        if path.endswith("/release") and interrupt:
            raise interrupt.pop()
        return handle(method, path, params, content)

    monkeypatch.setattr(daemon, "handle", interrupted)
    job = rollmuxd.job("a")
    job.start()
    session = job._runtime._session
    with pytest.raises(KeyboardInterrupt), job.phase("rollout"):
        raise KeyboardInterrupt
    assert not daemon.asked("POST", "/release")
    assert next(session.end("interrupted", keep=False)).timeout_s <= 1
    job.end()


def in_phase(job, how):
    """A coroutine that waits for ever in a phase."""

    async def waits():
        await asyncio.get_running_loop().create_future()

    async def with_phase():
        async with job.phase("rollout"):
            await waits()

    return job.phase("rollout")(waits)() if how == "decorator" else with_phase()


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["decorator", "async with"])
async def test_a_phase_that_is_dropped_with_its_coroutine_is_given_back_before_the_next_request(daemon, how):
    async with rollmuxd.ajob("a") as job:
        coroutine = in_phase(job, how)
        coroutine.send(None)
        assert job.slot.phase == "rollout"
        coroutine.close()  # raises if anything is awaited
        assert job.slot is None
        assert not daemon.asked("POST", "/release")
        async with job.phase("train"):
            assert len(daemon.asked("POST", "/give-back")) == 1

    assert daemon.phases == ["rollout", "train"]


@pytest.mark.asyncio
async def test_a_job_that_is_dropped_with_its_coroutine_ends_with_its_process(daemon):
    job = rollmuxd.ajob("a")

    async def runs():
        async with job:
            await in_phase(job, "async with")

    coroutine = runs()
    coroutine.send(None)
    coroutine.close()
    assert daemon.ended == {}

    job._runtime._at_exit()  # as the process does
    assert daemon.ended == {"a": "its process ended"}


@pytest.mark.asyncio
@pytest.mark.parametrize("failures", [0, 3])
async def test_a_phase_in_an_async_generator_is_released_when_its_loop_closes_that(daemon, failures):
    async with rollmuxd.ajob("a") as job:

        async def batches():
            async with job.phase("rollout"):
                yield 1

        made = batches()
        assert await anext(made) == 1
        daemon.trouble(0, times=failures)
        await made.aclose()
        assert len(daemon.asked("POST", "/release")) == 1 + failures
        assert daemon._running("rollout") is None


def test_a_job_whose_phase_was_dropped_with_its_loop_is_ended_on_another_one(daemon):
    job = rollmuxd.ajob("a")
    coroutine = in_phase(job, "async with")

    async def until_it_waits():
        coroutine.send(None)

    asyncio.run(until_it_waits())
    coroutine.close()
    assert daemon._running("rollout") is not None

    asyncio.run(job.end("enough"))
    assert daemon.ended == {"a": "enough"}
    assert daemon._running("rollout") is None


def test_a_phase_in_an_async_context_manager_that_is_dropped_with_its_loop_is_given_back_before_the_next(daemon):
    """That is an async generator, too, and no loop closes it any more."""
    job = rollmuxd.ajob("a")

    @contextlib.asynccontextmanager
    async def turn():
        async with job.phase("rollout"):
            yield

    async def work():
        async with turn():
            await asyncio.get_running_loop().create_future()

    async def until_it_waits():
        coroutine.send(None)

    async def goes_on():
        async with job.phase("train"):
            assert len(daemon.asked("POST", "/give-back")) == 1
        await job.end()

    coroutine = work()
    loop = asyncio.new_event_loop()
    loop.run_until_complete(until_it_waits())
    loop.close()
    coroutine.close()  # raises if anything is awaited
    assert job.slot is None

    asyncio.run(goes_on())
    assert daemon.phases == ["rollout", "train"]


def test_what_the_body_raises_gets_through_and_the_slot_is_released(daemon):
    with pytest.raises(ZeroDivisionError), rollmuxd.job("a") as job, job.phase("rollout"):
        1 / 0  # noqa: B018

    assert len(daemon.asked("POST", "/release")) == 1
    assert daemon.ended == {"a": "failed: ZeroDivisionError: division by zero"}


def test_ctrl_c_ends_the_job_as_interrupted(daemon):
    with pytest.raises(KeyboardInterrupt), rollmuxd.job("a"):
        raise KeyboardInterrupt

    assert daemon.ended == {"a": "interrupted"}


@pytest.mark.parametrize(
    ("error", "reason"),
    [(asyncio.CancelledError("x"), "interrupted"), (futures.CancelledError("x"), "failed: CancelledError: x")],
)
def test_a_future_that_somebody_cancelled_is_an_error_of_the_program_and_no_interruption(daemon, error, reason):
    with pytest.raises(type(error)), rollmuxd.job("a"):
        raise error

    assert daemon.ended == {"a": reason}


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("error", "reason"), [(OSError("no file \udcff"), "failed: OSError: no file \\udcff"), (Mute(), "failed: Mute")]
)
def test_a_job_is_ended_by_whatever_error_although_it_cannot_be_written_as_text(daemon, error, reason):
    with pytest.raises(type(error)), rollmuxd.job("a"):
        raise error

    assert daemon.ended == {"a": reason}


def test_a_lost_slot_raises_when_the_phase_is_left_and_not_before(daemon):
    done = []
    with rollmuxd.job("a") as job:
        with pytest.raises(rollmuxd.SlotLost, match="no heartbeat came"), job.phase("rollout"):
            daemon.lose("rollout")
            done.append("to the end")
        with job.phase("rollout"):
            pass

    assert done == ["to the end"]


def test_a_lost_slot_does_not_hide_what_the_body_raised(daemon):
    with rollmuxd.job("a") as job, pytest.raises(ZeroDivisionError) as raised, job.phase("rollout"):
        daemon.lose("rollout")
        1 / 0  # noqa: B018

    assert "lost" in raised.value.__notes__[0]


def test_a_tail_that_is_offered_its_gpus_takes_them_back(daemon):
    with rollmuxd.job("a", rollout={"min_gpus": 1}) as job, job.phase("rollout") as slot:
        everything = list(slot.gpus)
        slot.shrink(everything[:1])
        daemon.grow()
        assert (slot.directive.kind, slot.directive.gpus) == ("grow", everything)
        slot.grow()
        assert list(slot.gpus) == everything
        assert slot.directive is None


def test_directives_reach_the_slot_and_shrinking_answers_them(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout") as slot:
        assert slot.directive is None
        daemon.shrink(["fake/gpu1"])
        assert (slot.directive.kind, slot.directive.keep) == ("shrink", ["fake/gpu1"])
        slot.shrink(slot.directive.keep)
        assert slot.gpus == ("fake/gpu1",)
        assert slot.directive is None
        with pytest.raises(rollmuxd.Unprocessable):
            slot.shrink(["fake/gpu9"])


def test_a_revoked_slot_is_known_to_be_lost_and_raises_when_left(daemon):
    with rollmuxd.job("a") as job, pytest.raises(rollmuxd.SlotLost, match="by root"), job.phase("rollout") as slot:
        daemon.stop("revoked by root")
        assert slot.lost
        assert slot.directive.kind == "stop"


def test_a_directive_for_another_slot_is_not_for_this_one(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout") as slot:
        daemon.tell([Directive("stop", "another")])
        assert slot.directive is None
        daemon.tell([Directive("shrink", slot.id), Directive("stop", "another")])
        assert slot.directive.kind == "shrink"
        assert not slot.lost
        daemon.tell([])
        assert slot.directive is None


def test_a_promise_that_is_not_kept_is_said_once_on_stderr(daemon, capfd):
    with rollmuxd.job("a") as job, job.phase("rollout") as slot:
        for _ in range(2):
            daemon.tell([Directive("unpromised", reason="it asked for slo=1.5. What would help: slo=2")])
            daemon.tell([])
        assert slot.directive is None
        assert not slot.lost
    assert capfd.readouterr().err.count("rollmuxd: a: it asked for slo=1.5. What would help: slo=2\n") == 1


def test_a_job_whose_nodes_go_away_hears_when_and_is_asked_for_nothing(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout") as slot:
        assert job.ends_at is None
        assert not job.ends_soon(1e12)
        at = time.time() + 1_000
        daemon.tell([Directive("ends", ends_at=datetime.fromtimestamp(at, UTC).isoformat())])
        assert job.ends_at == pytest.approx(at, abs=0.001)
        assert job.ends_soon(1_001)
        assert not job.ends_soon(300)
        assert slot.directive is None
        daemon.tell([])
        assert job.ends_at is None, "the end was put off"


def test_a_daemon_that_goes_away_in_mid_phase_is_only_a_pause(daemon, capfd):
    with rollmuxd.job("a") as job:
        with job.phase("rollout"):
            daemon.trouble(0, times=5)
            daemon.trouble(503, times=5)
        with job.phase("train"):
            pass

    assert daemon.phases == ["rollout", "train"]
    assert "trying again" in capfd.readouterr().err


@pytest.fixture
def each_comes_late(daemon, monkeypatch):
    """Answers each call with 408 when it is first told; what was told so."""
    from rollmuxd.client.transport import Reply

    late, handle = [], daemon.handle

    def first(*call):
        assert len(late) < 20  # each time in other words would go on for ever
        if call in late:
            return handle(*call)
        late.append(call)
        return Reply(408, content=b'{"title": "too slow", "status": 408, "detail": "a call has to arrive within 30 s"}')

    monkeypatch.setattr(daemon, "handle", first)
    return late


def told(daemon):
    return [call.path.rpartition("/")[2] for call in daemon.calls if call.method == "POST"]


def test_a_call_that_came_too_late_is_told_again_in_the_same_words(daemon, each_comes_late):
    with rollmuxd.job("a") as job, job.phase("rollout"):
        pass

    assert told(daemon) == ["jobs", "sessions", "slots", "release"]
    assert len(each_comes_late) == len(daemon.calls)
    assert daemon.ended == {"a": "finished"}


@pytest.mark.asyncio
async def test_and_so_it_is_on_asyncio(daemon, each_comes_late):
    async with rollmuxd.ajob("a") as job, job.phase("rollout"):
        pass

    assert told(daemon) == ["jobs", "sessions", "slots", "release"]
    assert len(each_comes_late) == len(daemon.calls)
    assert daemon.ended == {"a": "finished"}


EXITS = [
    (SystemExit(), "finished"),
    (SystemExit(0), "finished"),
    (SystemExit(1), "failed: SystemExit: 1"),
    (SystemExit("no data"), "failed: SystemExit: no data"),
    (SystemExit(""), "failed: SystemExit: "),
]


@pytest.mark.parametrize(("leaves", "why"), EXITS, ids=repr)
def test_a_program_that_exits_inside_its_job_ends_it_as_its_exit_status_says(daemon, leaves, why):
    with pytest.raises(SystemExit), rollmuxd.job("a") as job, job.phase("rollout"):
        raise leaves

    assert daemon.ended == {"a": why}
    assert len(daemon.asked("POST", "/release")) == 1


@pytest.mark.asyncio
async def test_and_so_it_does_on_asyncio(daemon):
    with pytest.raises(SystemExit):
        async with rollmuxd.ajob("a"):
            raise SystemExit(0)

    assert daemon.ended == {"a": "finished"}


@pytest.mark.parametrize(("leaves", "why"), EXITS, ids=repr)
def test_a_process_that_the_daemon_has_started_leaves_its_job_to_it_only_if_it_fails(daemon, monkeypatch, leaves, why):
    monkeypatch.setenv("ROLLMUX_JOB", "a")
    monkeypatch.setenv("ROLLMUX_RUN_KEY", "of-the-daemon")

    with pytest.raises(SystemExit), rollmuxd.job("a"):
        raise leaves

    assert daemon.ended == ({"a": why} if why == "finished" else {})  # else it may start it again


def test_with_the_gpus_of_one_job_no_other_is_registered(daemon, monkeypatch):
    monkeypatch.setenv("ROLLMUX_JOB", "math-7b")
    monkeypatch.setenv("ROLLMUX_RUN_KEY", "of-the-run")

    with pytest.raises(ValueError, match="'math7b': this process was started with the GPUs of job 'math-7b'; give it"):
        rollmuxd.job("math7b")
    assert not daemon.registered


def test_a_phase_inside_itself_is_one_stay(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout") as outer:
        with job.phase("rollout") as inner:
            assert inner is outer
        assert not daemon.asked("POST", "/release")

    assert daemon.phases == ["rollout"]
    assert len(daemon.asked("POST", "/release")) == 1


def test_a_phase_inside_another_is_an_error_and_the_outer_one_goes_on(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout"):
        with pytest.raises(rollmuxd.RollmuxError, match=r"inside phase rollout: .*Leave the first"), job.phase("train"):
            pass
        assert job.slot.phase == "rollout"


def test_a_phase_that_the_job_has_not_is_named_with_those_that_it_has(daemon):
    with pytest.raises(ValueError, match=r"no phase 'trian'; it has rollout, train, init\. Did you mean train\?"):
        rollmuxd.job("a").phase("trian")


def test_a_phase_starts_the_job_if_nothing_has(daemon):
    job = rollmuxd.job("a")
    with job.phase("rollout"):
        pass
    job.end("enough")

    assert daemon.ended == {"a": "enough"}


def test_a_job_started_twice_by_one_process_is_two_runs(daemon):
    job = rollmuxd.job("a")
    for _ in range(2):
        with job, job.phase("train"):
            pass

    assert len(daemon.registered) == 2
    assert daemon.registered[0].idempotency_key != daemon.registered[1].idempotency_key


def test_a_job_that_is_alive_elsewhere_is_told_of_and_replaced_on_demand(daemon):
    with rollmuxd.job("a"):
        with pytest.raises(rollmuxd.JobAlive) as raised, rollmuxd.job("a"):
            pass
        with rollmuxd.job("a", replace=True):
            pass

    assert raised.value.data == {"pid": 1, "host": "fake"}


def test_a_process_may_leave_and_another_may_join_with_the_same_key(daemon):
    first = rollmuxd.job("a", idempotency_key="mine", keep=True)
    with first:
        pass
    with rollmuxd.job("a", idempotency_key="mine"):
        pass

    assert len(daemon.registered) == 1
    assert len(daemon.asked("POST", "/sessions")) == 2


def test_figures_that_are_no_numbers_are_left_out(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout") as slot:
        slot.measure(reward=math.nan, tokens=3)
        with pytest.raises(ValueError, match="letters"):
            slot.measure(**{"train/loss": 1.0})
        with pytest.raises(ValueError, match=r"measure\(tokens='a'\): a figure is a number"):
            slot.measure(tokens="a")

    assert daemon.measured == [("rollout", {"tokens": 3.0})]


def test_state_that_cannot_be_loaded_is_told_before_the_phase(daemon):
    daemon.fault("rollout", "no memory")

    with rollmuxd.job("a") as job:
        with pytest.raises(rollmuxd.SlotFaulted, match="no memory"), job.phase("rollout"):
            raise AssertionError("the body ran")
        with job.phase("train"):
            pass


def test_a_job_that_a_test_ends_before_its_loop_has_started_is_named(daemon):
    with pytest.raises(LookupError, match="job 'a' has not started; call this from its loop"):
        daemon.end_job("a")


def test_an_ended_job_gets_no_more_slots(daemon):
    with rollmuxd.job("a") as job:
        daemon.end_job("a", "by root")
        with pytest.raises(rollmuxd.JobEnded, match="by root"), job.phase("rollout"):
            pass


def over(daemon):
    with rollmuxd.job("a") as job:
        daemon.end_job("a", "by root")
        with job.phase("rollout"):
            pass


def interrupted(daemon):
    handle = daemon.handle

    def first(method, path, *rest):
        if path.endswith("/slots"):
            daemon.handle = handle
            raise KeyboardInterrupt
        return handle(method, path, *rest)

    daemon.handle = first
    with rollmuxd.job("a") as job, job.phase("rollout"):
        pass


def mistaken(_):
    rollmuxd.job("a", rollout=dict(seconds=-3))


def mistaken_on_asyncio(_):
    rollmuxd.ajob("a", rollout=dict(seconds=-3))


@pytest.mark.parametrize("loop", [over, interrupted, mistaken, mistaken_on_asyncio])
def test_what_ends_a_loop_shows_the_users_own_line_and_none_of_our_flows(daemon, loop):
    with pytest.raises((rollmuxd.JobEnded, KeyboardInterrupt, ValueError)) as raised:
        loop(daemon)

    shown = "".join(traceback.format_exception(raised.value)).partition("test_job.py")[2]
    assert loop.__name__ in shown
    assert {Path(file).name for file in re.findall(r'File "(.*?)"', shown)} <= {"test_job.py", "job.py", "runtime.py"}
    assert shown.count("File") <= 3


def test_a_start_that_is_interrupted_leaves_no_job_behind(daemon):
    daemon._open = lambda *_, **__: None
    daemon._routes = [route for route in daemon._routes if "sessions" not in route[1]]

    with pytest.raises(rollmuxd.NotFound), rollmuxd.job("a"):
        pass

    assert daemon.ended == {"a": "it could not start"}


def test_a_start_whose_clean_up_is_interrupted_too_keeps_nothing_alive(daemon, monkeypatch):
    """A heartbeat that went on would keep the place of a job that has not started."""
    handle, interrupts = daemon.handle, ["DELETE", "POST"]

    def interrupted(method, path, params, content):
        if interrupts and method == interrupts[-1] and path != "/v1/jobs":
            interrupts.pop()
            raise KeyboardInterrupt
        return handle(method, path, params, content)

    monkeypatch.setattr(daemon, "handle", interrupted)
    job = rollmuxd.job("a")
    with pytest.raises(KeyboardInterrupt):
        job.start()

    assert interrupts == []
    assert (job._runtime._heartbeat, job._runtime._session) == (None, None)


# ---- no daemon ----


def test_without_a_daemon_everything_is_a_no_op_that_says_so_once(capfd):
    for name in ("a", "b"):
        with rollmuxd.job(name) as job:
            assert job.alone
            with job.phase("rollout", then="train") as slot:
                slot.progress(1, 2)
                slot.measure(x=1)
                slot.shrink([])
                assert (slot.gpus, slot.fence, slot.lost, slot.directive) == ((), None, False, None)

    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert "no daemon" in said[0]
    assert "/run/rollmux/rollmux.sock" in said[0]


@pytest.mark.asyncio
async def test_and_so_is_the_async_twin():
    async with rollmuxd.ajob("a") as job, job.phase("rollout") as slot:
        await slot.shrink([])

    assert job.alone


def test_unless_one_is_required(monkeypatch):
    monkeypatch.setenv("ROLLMUX_REQUIRED", "1")

    with pytest.raises(rollmuxd.NoDaemon, match=r"/run/rollmux/rollmux.sock.*rollmuxd daemon start"), rollmuxd.job("a"):
        pass


def test_a_daemon_that_is_named_but_not_there_is_never_ignored(monkeypatch, tmp_path):
    monkeypatch.setenv("ROLLMUX_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("ROLLMUX_GIVE_UP_S", "0.3")

    with pytest.raises(rollmuxd.GaveUp, match=r"127\.0\.0\.1:9"), rollmuxd.job("a"):
        raise AssertionError("it ran alone")


# ---- forks ----


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_that_unwinds_ends_nothing(daemon):
    with rollmuxd.job("a") as job, job.phase("rollout"):
        before = len(daemon.calls)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                job._runtime.run(job._runtime.leaving(None, None))
                job.end()
                code = 0 if len(daemon.calls) == before else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert daemon.ended == {"a": "finished"}


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_job_cannot_be_started_in_a_forked_child(daemon):
    job = rollmuxd.job("a")
    child = os.fork()
    if child == 0:
        code = 1
        try:
            job.start()
        except rollmuxd.RollmuxError as error:
            code = 0 if "belongs to process" in str(error) else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("where", ["between phases", "in a phase", "alone"])
def test_a_forked_child_enters_no_phase_of_its_own(daemon, monkeypatch, where):
    """It would use its parent's session and connection; and what it held nobody would release."""
    with contextlib.ExitStack() as stack:
        if where == "alone":
            stack.enter_context(monkeypatch.context()).setattr(fakes, "current", None)
        job = stack.enter_context(rollmuxd.job("a"))
        if where == "in a phase":
            stack.enter_context(job.phase("rollout"))
        before = len(daemon.calls)
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with job.phase("rollout"):
                    code = {"between phases": 2, "in a phase": 0, "alone": 0}[where]
            except rollmuxd.RollmuxError as error:
                code = 0 if where == "between phases" and "belongs to process" in str(error) else 3
            finally:
                os._exit(code if len(daemon.calls) == before else 4)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("what", ["shrink", "grow"])
@pytest.mark.parametrize("make", [rollmuxd.job, rollmuxd.ajob])
def test_a_forked_child_neither_shrinks_nor_grows_the_slot_of_its_parent(daemon, make, what):
    """It would do so over the parent's connection, and give GPUs away on which the parent computes."""
    job = make("a")
    life = job._runtime
    slot = life.run(life.entering("rollout"))
    before = len(daemon.calls)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            asked = slot.shrink(["fake/gpu0"]) if what == "shrink" else slot.grow()
            if asked is not None:
                asyncio.run(asked)
            code = 2
        except rollmuxd.RollmuxError as error:
            code = 0 if "belongs to process" in str(error) and len(daemon.calls) == before else 3
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    life.run(life.leaving(None, None))
    life.run(life.ending("finished", keep=False))


# ---- the fake ----


def test_the_fake_is_gone_with_its_context():
    with testing.fake_daemon() as outer:
        with testing.fake_daemon(gpus=8) as inner, rollmuxd.job("a") as job, job.phase("rollout") as slot:
            assert len(slot.gpus) == 8
        with rollmuxd.job("b"):
            pass
    with rollmuxd.job("c") as job:
        assert job.alone

    assert list(inner.ended) == ["a"]
    assert list(outer.ended) == ["b"]


def test_a_loop_in_a_thread_waits_until_the_test_lets_it_go(daemon, until):
    daemon.wait("train", math.inf)
    order = []

    def loop():
        with rollmuxd.job("a") as job:
            with job.phase("rollout"):
                order.append("rollout")
            with job.phase("train"):
                order.append("train")

    thread = threading.Thread(target=loop)
    thread.start()
    until(lambda: len(daemon.asked("POST", "/slots")) > 3)
    assert order == ["rollout"]
    daemon.go("train")
    thread.join(PATIENCE_S)

    assert order == ["rollout", "train"]


def test_a_slot_can_be_lost_later_on(daemon):
    daemon.lose("rollout", after=1)
    lost = []
    with rollmuxd.job("a") as job:
        for step in range(3):
            try:
                with job.phase("rollout"):
                    pass
            except rollmuxd.SlotLost:
                lost.append(step)

    assert lost == [1]


def test_a_quarantined_job_waits_and_goes_on_in_the_same_run(daemon, capfd, monkeypatch):
    handle = daemon.handle

    def reinstate_once_seen(method, path, params, content):
        reply = handle(method, path, params, content)
        if method == "GET":
            daemon.reinstate("a")
        return reply

    monkeypatch.setattr(daemon, "handle", reinstate_once_seen)
    with rollmuxd.job("a") as job:
        with job.phase("rollout"):
            daemon.quarantine("a", "it will not sleep")
        with job.phase("train"):
            pass

    assert daemon.phases == ["rollout", "train"]
    assert len(daemon.asked("POST", "/sessions")) == 1
    assert "`rollmuxd job reinstate a` lets it continue" in capfd.readouterr().err


def test_a_misspelt_variable_is_told_of_once(daemon, capfd, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime._said_misspelt", False)
    monkeypatch.setenv("ROLLMUX_REQUIERD", "1")
    for _ in range(2):
        with rollmuxd.job("a"):
            pass

    assert capfd.readouterr().err.count("ROLLMUX_REQUIERD, which nothing reads; was ROLLMUX_REQUIRED meant") == 1


@pytest.mark.parametrize("limit", ["abc", "-1", "nan"])
def test_a_limit_that_is_none_is_an_error_with_and_without_a_daemon(monkeypatch, limit):
    monkeypatch.setenv("ROLLMUX_GIVE_UP_S", limit)
    monkeypatch.setenv("ROLLMUX_URL", "off")
    with pytest.raises(rollmuxd.RollmuxError, match="ROLLMUX_GIVE_UP_S"):
        rollmuxd.job("a").start()
    with testing.fake_daemon(), pytest.raises(rollmuxd.RollmuxError, match="ROLLMUX_GIVE_UP_S"):
        rollmuxd.job("a").start()


def test_a_filler_sees_that_it_is_to_give_way_and_until_when(daemon):
    with rollmuxd.job("f", filler=dict(yield_s=3), train=dict(driver="vllm")) as job, job.filler() as slot:
        assert not slot.should_yield
        assert slot.yield_in_s is None
        daemon.yield_(within_s=60)
        assert slot.should_yield
        assert 0 < slot.yield_in_s <= 60
    (body,) = daemon.registered
    assert (body.filler.yield_s, [phase.name for phase in body.phases], body.side) == (3, ["filler"], [])


def test_a_filler_has_one_pool_and_no_phases():
    with pytest.raises(ValueError, match="one pool"), rollmuxd.job("f", filler=True) as job:
        job.start()
