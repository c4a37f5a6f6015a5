"""Orders to load and park: done once, answered until acknowledged, failures told as failures."""

import asyncio
import threading
import time

import msgspec
import pytest
from patience import PATIENCE_S

import rollmuxd
from rollmuxd import testing
from rollmuxd.client import channel, fakes
from rollmuxd.wire.answers import ChannelOrder


@pytest.fixture
def daemon():
    with testing.fake_daemon() as fake:
        yield fake


def test_a_hook_is_called_with_what_is_to_be_moved(daemon):
    job, seen = rollmuxd.job("a"), []

    @job.on_load
    def load(order):
        seen.append((order.kind, order.pool, order.gpus, order.warm, threading.current_thread().name))

    with job:
        result = daemon.result_of(daemon.order("load", "rollout", warm=True))

    assert seen == [("load", "rollout", ["fake/gpu0", "fake/gpu1"], True, "rollmuxd-channel")]
    assert (result.ok, result.rank, result.error) == (True, 0, "")


def test_hooks_are_for_their_kind_and_their_pool(daemon):
    job, seen = rollmuxd.job("a"), []
    job.on_load(lambda order: seen.append("load rollout"), pool="rollout")
    job.on_park(lambda order: seen.append("park all"))
    job.on_discard(lambda order: seen.append("discard train"), pool="train")

    with job:
        for kind, pool in [("load", "rollout"), ("load", "train"), ("park", "train"), ("discard", "rollout")]:
            assert daemon.result_of(daemon.order(kind, pool)).ok

    assert seen == ["load rollout", "park all"]


def test_what_was_loaded_first_is_parked_last(daemon):
    job, seen = rollmuxd.job("a"), []
    for name in ("model", "optimizer"):
        job.on_load(lambda order, name=name: seen.append(f"load {name}"))
        job.on_park(lambda order, name=name: seen.append(f"park {name}"))

    with job:
        daemon.result_of(daemon.order("load", "train"))
        daemon.result_of(daemon.order("park", "train"))

    assert seen == ["load model", "load optimizer", "park optimizer", "park model"]


def test_hooks_declare_a_state_for_their_pool_so_that_they_are_called_at_all(daemon):
    job = rollmuxd.job("a")
    job.on_park(lambda order: None, pool="train")

    with job:
        pass

    assert list(daemon.registered[0].states) == ["train"]


def test_a_hook_that_comes_too_late_to_be_declared_is_told_of(daemon, capfd):
    with rollmuxd.job("a") as job:
        job.on_load(lambda order: None)

    assert "it will not be called" in capfd.readouterr().err


def test_a_hook_that_raises_is_a_failed_order_with_its_text_and_the_thread_goes_on(daemon, capfd):
    job = rollmuxd.job("a")

    @job.on_load
    def load(order):
        if order.pool == "rollout":
            raise RuntimeError("CUDA out of memory")

    with job:
        failed = daemon.result_of(daemon.order("load", "rollout"))
        fine = daemon.result_of(daemon.order("load", "train"))

    assert (failed.ok, failed.error) == (False, "RuntimeError: CUDA out of memory")
    assert fine.ok
    assert "CUDA out of memory" in capfd.readouterr().err


class Mute(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (SystemExit(3), "SystemExit: 3"),
        (asyncio.CancelledError(), "CancelledError: "),
        (FileNotFoundError("no file \udcff"), "FileNotFoundError: no file \\udcff"),
        (Mute(), "Mute"),
    ],
)
def test_whatever_a_hook_raises_is_told_and_the_thread_goes_on(daemon, capfd, raised, told):
    job = rollmuxd.job("a")

    @job.on_load
    def load(order):
        if order.pool == "rollout":
            raise raised

    with job:
        failed = daemon.result_of(daemon.order("load", "rollout"))
        fine = daemon.result_of(daemon.order("load", "train"))

    assert (failed.ok, failed.error) == (False, told)
    assert fine.ok
    assert "Traceback" in capfd.readouterr().err


def moved(daemon, *orders):
    """What the hooks of a job are called for, of orders (kind, node, source)."""
    job, seen = rollmuxd.job("a"), []
    for kind in ("load", "park", "discard"):

        def hook(order, kind=kind):
            seen.append((kind, order.node))
            if order.node == "full":
                raise RuntimeError("out of memory")

        getattr(job, f"on_{kind}")(hook)
    with job:
        for kind, node, source in orders:
            daemon.result_of(daemon.order(kind, "train", node=node, source=source))
    return seen


def test_a_state_that_was_loaded_on_another_node_is_not_dropped_where_it_came_from(daemon):
    """It is one state of one process: the discard is about what is left there, and there is nothing."""
    seen = moved(daemon, ("load", "n1", ""), ("park", "n1", ""), ("load", "n2", "n1"), ("discard", "n1", ""))

    assert seen == [("load", "n1"), ("park", "n1"), ("load", "n2")]
    back = moved(daemon, ("load", "n2", "n1"), ("park", "n2", ""), ("load", "n1", "n2"), ("discard", "n1", ""))
    assert back[-1] == ("discard", "n1")


def test_what_could_not_be_loaded_after_a_move_goes_back_to_ram_and_not_away(daemon, capfd):
    seen = moved(daemon, ("park", "n1", ""), ("load", "full", "n1"), ("discard", "full", ""), ("load", "n1", ""))

    assert seen == [("park", "n1"), ("load", "full"), ("park", "full"), ("load", "n1")]
    assert "out of memory" in capfd.readouterr().err


def test_an_order_that_comes_again_is_answered_and_not_done_again(daemon, until):
    job, seen = rollmuxd.job("a"), []
    job.on_park(lambda order: seen.append(order.order))

    with job:
        daemon.result_of(daemon.order("park", "train", id="o7"))
        daemon.results.clear()  # the daemon has forgotten, so it tells the order again
        daemon.result_of("o7")

    assert seen == ["o7"]


def test_a_result_is_repeated_until_it_was_acknowledged(daemon, until):
    job, seen = rollmuxd.job("a"), []

    @job.on_park
    def park(order):
        seen.append(order.order)
        daemon.trouble(0, times=3)
        daemon.trouble(503, times=3)

    with job:
        assert daemon.result_of(daemon.order("park", "train")).ok

    assert len(seen) == 1


def test_a_state_with_sizes_and_no_hooks_dials_in_and_says_yes(daemon):
    with rollmuxd.job("a", train=dict(nodes=1, gpu_gb=40, ram_gb=80)):
        assert daemon.result_of(daemon.order("park", "train")).ok


def test_a_job_without_state_dials_no_channel(daemon):
    with rollmuxd.job("a") as job, job.phase("train"):
        assert job._runtime._channel is None

    assert daemon.dialled == {}


@pytest.mark.asyncio
async def test_hooks_of_an_async_job_may_be_coroutines_on_its_loop(daemon):
    seen = []

    job = rollmuxd.ajob("a")

    @job.on_load
    async def load(order):
        await asyncio.sleep(0)
        seen.append(asyncio.get_running_loop())

    async with job:
        result = await asyncio.to_thread(daemon.result_of, daemon.order("load", "rollout"))

    assert result.ok
    assert seen == [asyncio.get_running_loop()]


def test_a_hook_for_a_pool_that_the_job_has_not_is_an_error():
    with pytest.raises(ValueError, match="rollout, train"):
        rollmuxd.job("a").on_load(print, pool="trian")


def test_the_thread_ends_with_the_job(daemon, until):
    job = rollmuxd.job("a")
    job.on_load(lambda order: None)
    with job:
        thread = job._runtime._channel._thread
        until(lambda: daemon.dialled)

    until(lambda: not thread.is_alive())
    assert fakes.current is daemon


def with_discards_at_the_end(daemon):
    """Have the daemon tell a discard when the job is ended, as the real one does."""
    end = daemon._end

    def ends(job, body):
        view = end(job, body)
        daemon._jobs[job] = view = msgspec.structs.replace(view, pins={"rollout": ["fake/gpu0-1"]})
        daemon._orders.append((0, ChannelOrder("last", "discard", "rollout", "fake/gpu0-1", [], False)))
        return view

    daemon._routes = [(m, p, k, ends if r == end else r) for m, p, k, r in daemon._routes]


def test_a_job_that_ends_stays_on_the_line_until_its_state_is_discarded(daemon, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime.DISCARDS_S", PATIENCE_S)
    with_discards_at_the_end(daemon)
    job, seen = rollmuxd.job("a"), []
    job.on_load(lambda order: None, pool="rollout")
    job.on_discard(lambda order: seen.append(order.order), pool="rollout")
    with job:
        daemon.result_of(daemon.order("load", "rollout"))
        session = next(iter(daemon.sessions))
        began = time.monotonic()

    assert seen == ["last"]
    assert daemon.results[-1].session == session
    assert time.monotonic() - began < PATIENCE_S / 2
    assert [call.path for call in daemon.asked("DELETE", "/j1")] == ["/v1/jobs/j1"]


def test_a_job_that_ends_waits_for_seconds_only_and_not_at_all_where_nothing_was_loaded(daemon, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime.DISCARDS_S", PATIENCE_S)
    job = rollmuxd.job("a", rollout=dict(gpu_gb=2))
    with job:
        began = time.monotonic()
    assert time.monotonic() - began < PATIENCE_S / 2

    monkeypatch.setattr("rollmuxd.client.runtime.DISCARDS_S", 0.3)
    with_discards_at_the_end(daemon)
    over = threading.Event()

    def hangs(hooks, order):
        if order.kind == "discard":
            over.wait(PATIENCE_S)

    monkeypatch.setattr(channel.Hooks, "run", hangs)
    job = rollmuxd.job("b", rollout=dict(gpu_gb=2))
    with job:
        daemon.result_of(daemon.order("load", "rollout"))
        began = time.monotonic()
    assert 0.2 < time.monotonic() - began < PATIENCE_S / 2
    over.set()


def test_no_question_of_whether_it_was_discarded_outlives_the_seconds_that_an_end_waits_for_that(daemon):
    """The daemon may hang by then, and the user waits for the prompt."""

    class Loaded:
        keeps_state, journal = True, ""

    flow = rollmuxd.job("a")._runtime._discarding(Loaded, "j1", 1)
    while type(step := next(flow)).__name__ == "Pause":
        pass

    assert step.path == "/v1/jobs/j1"
    assert 0 < step.timeout_s <= 5


@pytest.mark.parametrize(
    ("hooks", "named"),
    [
        ([], "pools rollout, train"),
        ([("on_discard", None)], "pools rollout, train"),
        ([("on_load", "rollout")], "pool train"),
        ([("on_park", None)], None),
    ],
)
def test_a_state_that_nobody_moves_is_told_of_at_the_start(daemon, capfd, hooks, named):
    job = rollmuxd.job("a", rollout=dict(gpu_gb=2), train=dict(gpu_gb=2))
    for kind, pool in hooks:
        getattr(job, kind)(lambda order: None, pool=pool)
    with job:
        pass

    err = capfd.readouterr().err
    assert ("nothing moves its state" in err) == (named is not None)
    if named:
        assert f"nothing moves its state in {named}: " in err
        assert "on_load and on_park" in err
        assert "driver=" in err


def test_a_process_of_a_job_file_answers_for_a_state_that_the_file_alone_declares(daemon, monkeypatch, capfd):
    """Without an answer the slot would fail after two minutes, and not say why."""
    monkeypatch.setenv("ROLLMUX_JOB", "a")
    monkeypatch.setenv("ROLLMUX_RUN_KEY", "of-the-run")
    with rollmuxd.job("a"):
        for _ in range(2):
            assert daemon.result_of(daemon.order("load", "train")).ok

    assert capfd.readouterr().err.count("nothing moves its state in pool train: ") == 1


def test_a_state_of_another_driver_is_not_ours_to_move(daemon, capfd):
    with rollmuxd.job("a", rollout=dict(gpu_gb=2, driver="vllm"), train=dict(nodes=1)):
        pass

    assert "nothing moves" not in capfd.readouterr().err
