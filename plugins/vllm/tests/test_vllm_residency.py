"""What the vLLM driver defends: what each of vLLM's known troubles ends in, and that no engine computes with garbage.

The server is a fake that keeps vLLM 0.33.0's answers and oddities; sockets are real.
"""

import importlib.util
import time
from pathlib import Path

import anyio
import pytest
import pytest_asyncio
from fake_engines import EngineHost
from fake_vllm import FakeVllm
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, NotDone, OrderKind, Probed, Ran, Residency, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_vllm import VllmResidency
from rollmuxd_vllm.residency import _states_in

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD
GPU = "host1/gpu0"


class Bench:
    """One engine, its host, the driver, and orders about a job's state there."""

    def __init__(self, **engine):
        self.engine = FakeVllm(**engine)
        self.host = EngineHost("host1", {GPU: [self.engine]})
        self.host.commands["engine"] = self._command
        self.driver = VllmResidency()

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *args):
        await self.engine.stop()

    async def _command(self, argv):
        await (self.engine.start if argv[1] == "start" else self.engine.stop)()
        return Ran(0, b"", b"")

    def order(self, kind, *, warm=True, phase="rollout", **options):
        given = {"url": self.engine.url, **options}
        state = StateSpec(pool="rollout", gpu_mb=17_500, residual_mb=1_500, driver="vllm", options=tuple(given.items()))
        rig = Rig(self.driver, self.host, "host1", (GPU,), state)
        made = ResidencyContract().order(rig, kind, warm=warm)
        return type(made)(**{name: getattr(made, name) for name in made.__struct_fields__} | {"phase": phase})

    async def park(self, **options):
        await self.driver.park(self.order(PARK, **options))

    async def load(self, **options):
        await self.driver.load(self.order(LOAD, **options))


async def failing(call, error, match):
    with anyio.fail_after(PATIENCE_S), pytest.raises(error, match=match) as raised:
        await call
    return raised.value


async def cut_off(engine, call, *given):
    """Give a call up once it hangs in the engine, and not before."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(call, *given)
        with anyio.fail_after(PATIENCE_S):
            while engine.faults:
                await anyio.sleep(0.005)
        tasks.cancel_scope.cancel()


# ---- the contract ---------------------------------------------------------------------------------------------------


class TestContract(ResidencyContract):
    tolerance_mb = 0

    async def make(self) -> Rig:
        self.bench = Bench()
        async with self.bench:
            url = self.bench.engine.url
        options = {"url": url, "start": ("engine", "start"), "stop": ("engine", "stop"), "end_wait_s": 2.0}
        state = StateSpec(
            pool="rollout", gpu_mb=17_500, residual_mb=1_500, driver="vllm", options=tuple(options.items())
        )
        return Rig(self.bench.driver, self.bench.host, "host1", (GPU,), state)

    @pytest_asyncio.fixture(autouse=True)
    async def ended(self):
        yield
        if hasattr(self, "bench"):
            await self.bench.engine.stop()

    async def take_away(self, rig: Rig) -> None:
        self.bench.host.away = True

    async def open_with(self, options) -> Residency:
        return await VllmResidency.open(FakeChannel(), options)


# ---- which calls, in which order ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_level_1_sleeps_and_wakes_weights_before_the_kv_cache():
    async with Bench() as bench:
        await bench.park()
        assert bench.engine.used_mb() == 1_500
        assert "POST /sleep?level=1&mode=abort" in bench.engine.calls
        bench.engine.calls.clear()
        await bench.load()
        told = [call for call in bench.engine.calls if call.startswith("POST")]
        assert told == ["POST /wake_up?tags=weights", "POST /wake_up?tags=kv_cache"]
        assert (bench.engine.used_mb(), bench.engine.generate()) == (17_500, "file")


@pytest.mark.asyncio
async def test_level_1_keeps_weights_that_were_trained():
    async with Bench() as bench:
        bench.engine.train()
        await bench.park()
        await bench.load(weights="reload")
        assert bench.engine.generate() == "trained"


@pytest.mark.asyncio
async def test_level_2_reloads_weights_between_the_tags_where_that_is_their_source():
    async with Bench() as bench:
        await bench.park(level=2, weights="reload")
        assert bench.engine.weights == "garbage"
        bench.engine.calls.clear()
        await bench.load(level=2, weights="reload")
        told = [call for call in bench.engine.calls if call.startswith("POST")]
        assert told == ["POST /wake_up?tags=weights", "POST /collective_rpc", "POST /wake_up?tags=kv_cache"]
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
async def test_level_2_leaves_the_weights_to_a_job_that_said_so():
    async with Bench() as bench:
        await bench.park(level=2, weights="job")
        await bench.load(level=2, weights="job")
        assert "POST /collective_rpc" not in bench.engine.calls
        bench.engine.train()
        assert bench.engine.generate() == "trained"


def test_level_2_without_a_source_of_weights_is_refused_before_the_job_is_registered():
    for options in ((("level", 2),), (("level.eval", 2),)):
        with pytest.raises(ValueError, match="level 2 of driver vllm drops the weights, and nothing is said"):
            VllmResidency().check(StateSpec(pool="rollout", driver="vllm", options=options))
    VllmResidency().check(StateSpec(pool="rollout", driver="vllm", options=(("level", 2), ("weights", "job"))))


@pytest.mark.asyncio
async def test_each_phase_boundary_may_have_a_level_of_its_own():
    levels = {"level": 2, "level.init": 1, "weights": "job"}
    async with Bench() as bench:
        for phase, kept in (("init", "weights_offloaded"), ("rollout", "discard_all"), ("", "weights_offloaded")):
            await bench.park(phase=phase, **levels)
            assert bench.engine.gauge == kept, f"after phase {phase!r}"
            await bench.load(phase="rollout", **levels)


@pytest.mark.asyncio
@pytest.mark.parametrize("level", [1, 2])
async def test_how_it_is_woken_follows_the_level_at_which_it_slept_though_the_daemon_was_restarted(level):
    async with Bench() as bench:
        bench.engine.train()
        await bench.park(level=level, weights="reload")
        bench.driver = VllmResidency()
        await bench.load(level=3 - level, weights="reload")
        assert bench.engine.generate() == {1: "trained", 2: "file"}[level]


@pytest.mark.asyncio
async def test_an_engine_of_which_it_is_not_known_whether_it_has_weights_is_not_woken():
    levels = {"level": 2, "level.init": 1, "weights": "reload"}
    async with Bench(stats=False) as bench:
        await bench.park(**levels)
        await failing(bench.load(**levels), NotDone, "does not tell at which level")
        assert "weights" in bench.engine.sleeping


@pytest.mark.asyncio
async def test_an_engine_that_was_dropped_is_not_woken_for_a_job_without_a_source_of_weights():
    async with Bench() as bench:
        await bench.park(level=2, weights="job")
        await failing(bench.load(level=1), NotDone, "sleeps at level 2, and the job names no source of weights")
        assert bench.engine.used_mb() == 1_500


@pytest.mark.asyncio
async def test_told_another_level_in_its_sleep_it_is_woken_by_the_one_that_it_fell_asleep_at():
    async with Bench() as bench:
        bench.engine.train()
        await bench.park(level=1)
        await bench.park(level=2, weights="reload")
        await bench.load(level=2, weights="reload")
        assert bench.engine.generate() == "trained"


@pytest.mark.asyncio
async def test_the_mode_goes_along():
    async with Bench() as bench:
        await bench.park(mode="wait")
        assert "POST /sleep?level=1&mode=wait" in bench.engine.calls


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_without_dev_mode_is_named_with_what_it_lacks():
    async with Bench(dev_mode=False) as bench:
        await failing(bench.park(), NotDone, "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1")
        await failing(bench.load(), NotDone, "--enable-sleep-mode and VLLM_SERVER_DEV_MODE=1")


@pytest.mark.asyncio
async def test_an_engine_without_sleep_mode_is_refused_before_it_answers_200_and_frees_nothing():
    async with Bench(sleep_mode=False) as bench:
        await failing(bench.park(), NotDone, "was started without --enable-sleep-mode")
        assert not any(call.startswith("POST") for call in bench.engine.calls)


@pytest.mark.asyncio
async def test_an_engine_that_answers_200_and_does_not_sleep_is_not_done():
    async with Bench() as bench:
        bench.engine.faults["POST /sleep"] = "lie"
        await failing(bench.park(), NotDone, "answered /sleep, and does not sleep")


@pytest.mark.asyncio
async def test_an_engine_that_answers_200_and_frees_nothing_is_found_out_by_looking_at_the_gpu():
    async with Bench() as bench:
        bench.engine.faults["GET /server_info"] = "error"
        bench.engine.sleep_mode = False
        await bench.park()  # it says that it sleeps: nobody can know better from what it says
        assert (await bench.host.observe("host1")).gpus[0].used_mb == 17_500


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["error", "half"])
async def test_a_sleep_that_fails_is_not_done_and_may_be_told_again(fault):
    async with Bench() as bench:
        bench.engine.faults["POST /sleep"] = fault
        await failing(bench.park(), NotDone, "POST /sleep of .* was answered 500")
        await bench.park()
        assert bench.engine.used_mb() == 1_500


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["POST /wake_up", "POST /collective_rpc"])
@pytest.mark.parametrize("fault", ["error", "half"])
async def test_a_wake_up_that_fails_is_not_done_and_says_that_it_is_not_to_be_trusted(call, fault):
    async with Bench() as bench:
        await bench.park(level=2, weights="reload")
        bench.engine.faults[call] = fault
        error = await failing(bench.load(level=2, weights="reload"), NotDone, f"{call} of .* was answered 500")
        assert call != "POST /wake_up" or "start this engine again" in str(error)
        with pytest.raises(RuntimeError):
            bench.engine.generate()


@pytest.mark.asyncio
async def test_a_wake_up_told_again_goes_on_where_it_was_and_never_leaves_garbage():
    async with Bench() as bench:
        await bench.park(level=2, weights="reload")
        bench.engine.faults["POST /collective_rpc"] = "drop"
        await failing(bench.load(level=2, weights="reload"), ContactLost, "broke off")
        await bench.load(level=2, weights="reload")
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
async def test_a_wake_up_that_is_answered_and_not_done_is_not_done():
    async with Bench() as bench:
        await bench.park()
        bench.engine.always["POST /wake_up"] = "lie"
        await failing(bench.load(), NotDone, "still sleeps")


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["drop", "drop_after", "die"])
async def test_a_line_that_breaks_is_contact_lost_and_the_probe_tells_what_is_certain(fault):
    async with Bench() as bench:
        order = bench.order(PARK)
        bench.engine.faults["POST /sleep"] = fault
        await failing(bench.driver.park(order), ContactLost, "POST /sleep of .* broke off")
        probed = await bench.driver.probe(order)
        expected = {"drop": (True, False), "drop_after": (True, True), "die": (True, False)}[fault]
        assert (probed.known, probed.done) == expected
        if fault == "die":
            assert "nothing listens" in probed.error
            assert not bench.engine.running


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["hang", "hang_after"])
async def test_an_engine_that_hangs_is_cut_off_and_the_order_can_be_told_again(fault):
    async with Bench() as bench:
        order = bench.order(PARK)
        bench.engine.faults["POST /sleep"] = fault
        await cut_off(bench.engine, bench.driver.park, order)
        await bench.driver.park(order)
        assert bench.engine.used_mb() == 1_500
        assert await bench.driver.probe(order) == Probed(known=True, done=True)


@pytest.mark.asyncio
async def test_a_pause_that_is_all_that_came_of_a_sleep_is_not_probed_as_done():
    async with Bench() as bench:
        order = bench.order(PARK)
        bench.engine.faults["POST /sleep"] = "drop"
        await failing(bench.driver.park(order), ContactLost, "broke off")
        bench.engine.paused = True  # is_sleeping says true of it
        assert await bench.driver.probe(order) == Probed(known=False)


@pytest.mark.asyncio
async def test_nonsense_for_an_answer_is_contact_lost():
    async with Bench() as bench:
        bench.engine.faults["GET /is_sleeping"] = "garbage"
        await failing(bench.park(), ContactLost, "which is not understood")


# ---- engines that are not there -------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_that_the_job_will_start_is_no_error_of_its_first_load():
    bench = Bench()
    async with bench:
        pass
    await bench.load(warm=False)
    await failing(bench.park(), NotDone, "nothing listens at")


@pytest.mark.asyncio
async def test_an_engine_that_died_while_it_was_parked_is_not_loaded():
    async with Bench() as bench:
        await bench.park()
        await bench.engine.stop()
        await failing(
            bench.load(warm=True, start=["engine", "start"]), NotDone, "it has died since: start the job again"
        )
        assert not bench.engine.running


@pytest.mark.asyncio
async def test_a_discard_frees_all_but_what_stays_and_tells_who_has_to_end_it():
    async with Bench() as bench:
        order = bench.order(DISCARD, end_wait_s=0.1)
        await failing(bench.driver.discard(order), NotDone, "still runs .* end its process")
        assert bench.engine.used_mb() == 1_500
        probed = await bench.driver.probe(order)
        assert (probed.known, probed.done) == (True, False)
        await bench.engine.stop()
        assert (await bench.driver.probe(order)).done
        await bench.driver.discard(bench.order(DISCARD))


@pytest.mark.asyncio
async def test_a_discard_waits_for_an_engine_that_is_ending():
    async with Bench() as bench, anyio.create_task_group() as group:
        group.start_soon(bench.driver.discard, bench.order(DISCARD, end_wait_s=50))
        await anyio.sleep(0.1)
        await bench.engine.stop()


@pytest.mark.asyncio
async def test_a_stop_that_fails_is_told_with_what_it_said():
    async with Bench() as bench:

        async def refuse(argv):
            return Ran(3, b"", b"no such unit\n")

        bench.host.commands["engine"] = refuse
        order = bench.order(DISCARD, stop=["engine", "stop"])
        await failing(bench.driver.discard(order), NotDone, "engine on host1 ended with exit code 3: no such unit")


@pytest.mark.asyncio
async def test_a_host_that_is_away_is_contact_lost():
    async with Bench() as bench:
        bench.host.away = True
        await failing(bench.park(), ContactLost, "host1 is away")
        await failing(bench.driver.discard(bench.order(DISCARD)), ContactLost, "host1 is away")


# ---- several engines ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_all_engines_of_a_job_act_together_and_one_that_fails_is_the_verdict():
    async with Bench() as bench, FakeVllm() as other:
        bench.host.engines["host1/gpu1"] = [other]
        both = {"url": (bench.engine.url, other.url)}
        await bench.park(**both)
        assert bench.engine.used_mb() == other.used_mb() == 1_500
        await bench.load(**both)
        other.faults["POST /sleep"] = "error"
        bench.engine.faults["POST /sleep"] = "drop"
        await failing(bench.park(**both), NotDone, "2 of 2 engines: POST /sleep of .* was answered 500")
        bench.engine.faults["POST /sleep"] = "drop"
        order = bench.order(PARK, **both)
        await failing(bench.driver.park(order), ContactLost, "1 of 2 engines")
        assert other.used_mb() == 1_500, "the other one came to its end"


# ---- options --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"level": 3}, "level of driver vllm is 3; it must be one of 1, 2"),
        ({"level": True}, "one of 1, 2"),
        ({"levle": 1}, "did you mean level?"),
        ({"weights": "disk"}, "one of"),
        ({"mode": "kill"}, "one of 'abort', 'wait', 'keep'"),
        ({"url": "http://10.0.0.1:8000"}, "loopback only"),
        ({"url": "http://127.0.0.1.evil.org:8000"}, "loopback only"),
        ({"url": "file:///etc/passwd"}, "it must be like http://127.0.0.1:8000"),
        ({"url": ()}, "is empty"),
        ({"url": "http://127.0.0.1:{port}"}, "is none of job, name"),
        ({"stop": "kill -9 1"}, "no shell reads it"),
    ],
)
def test_a_wrong_option_is_refused(options, said):
    with pytest.raises(ValueError, match=said.replace("?", r"\?")):
        VllmResidency().check(StateSpec(pool="rollout", driver="vllm", options=tuple(options.items())))


def test_urls_of_the_loopback_are_taken_and_others_where_the_operator_says_so():
    for url in ("http://localhost:8000", "http://[::1]:80", "http://127.0.0.1:80{gpu}", "http://127.8.0.1:1"):
        VllmResidency().check(StateSpec(pool="rollout", driver="vllm", options=(("url", url),)))
    VllmResidency(urls=["http://10.0.0.1:8000"]).check(
        StateSpec(pool="rollout", driver="vllm", options=(("url", "http://10.0.0.1:8000"),))
    )


def test_only_admins_may_say_what_is_run():
    assert VllmResidency.admin_options == {"start", "stop"}


# ---- against the real one --------------------------------------------------------------------------------------------


def sources_of(package, *files):
    """The text of files of an installed package, which is not imported: that would take a GPU and half a minute."""
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        pytest.skip(f"{package} is not installed: what is asked of it was checked against the version in the how-to")
    return [(Path(found.origin).parent / file).read_text(encoding="utf-8") for file in files]


def test_an_installed_vllm_has_the_calls_that_are_made_and_the_words_that_are_read():
    sleep, rpc, loggers, core = sources_of(
        "vllm", "entrypoints/serve/dev/sleep/api_router.py", "entrypoints/serve/dev/rpc/api_router.py",
        "v1/metrics/loggers.py", "v1/engine/core.py",
    )  # fmt: skip
    for said in ('post("/sleep")', 'post("/wake_up")', 'get("/is_sleeping")', "Query(ge=0, le=2)", "mode: Annotated",
                 'getlist("tags")', '"is_sleeping": is_sleeping'):  # fmt: skip
        assert said in sleep, said
    assert 'post("/collective_rpc")' in rpc
    assert 'body.get("method")' in rpc
    for said in ('"vllm:engine_sleep_state"', '["awake", "weights_offloaded", "discard_all"]'):
        assert said in loggers, said
    assert "is_scheduler_paused() or self.model_executor.is_sleeping" in core, "a pause counts as sleeping, too"


# ---- what listens at a job's URL says what it likes ------------------------------------------------------------------

#: what once took time that grew with the cube of its length: a gauge that is begun again and again, and never closed
UNCLOSED = 'vllm:engine_sleep_state{sleep_state="a"'


@pytest.mark.asyncio
async def test_metrics_whose_braces_never_close_keep_an_engine_from_nothing():
    async with Bench() as bench:
        await bench.park()
        bench.engine._metrics = lambda: ((UNCLOSED + "\n") * 4_000)[:128_000]
        await bench.load()
        assert bench.engine.generate() == "file"


@pytest.mark.parametrize("unit", [UNCLOSED, UNCLOSED + "\n", 'vllm:engine_sleep_state{sleep_state="', "}", "\n", " "])
def test_the_time_that_metrics_take_grows_with_their_length(unit):
    """From 4 kB to 1 MB, twice as long each time: three times the time is allowed, and a twentieth of a second."""
    head = UNCLOSED if unit.isspace() or unit == "}" else ""
    took_before_s = None
    for size in (2**power for power in range(12, 20)):
        text = (head + unit * (size // len(unit) + 1))[:size].encode()
        began_s = time.process_time()
        assert _states_in(text) == frozenset()
        took_s = time.process_time() - began_s
        assert took_before_s is None or took_s < 3 * took_before_s + 0.05
        took_before_s = took_s
