"""What the SGLang driver defends: what each known trouble of SGLang ends in, and that no engine is told what ends it.

The server is a fake that keeps SGLang 0.5.23's answers and oddities; sockets are real.
"""

import importlib.util
from pathlib import Path

import anyio
import pytest
import pytest_asyncio
from fake_engines import EngineHost
from fake_sglang import FakeSglang
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, NotDone, OrderKind, Probed, Ran, Residency, StateSpec
from rollmuxd.spi.contract import ResidencyContract, Rig
from rollmuxd.spi.fakes import FakeChannel
from rollmuxd_sglang import SglangResidency

LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD
GPU = "host1/gpu0"
LOADED, PARKED = 18_000, 1_500


class Bench:
    """One engine, its host, the driver, and orders about a job's state there."""

    def __init__(self, **engine):
        self.engine = FakeSglang(**engine)
        self.host = EngineHost("host1", {GPU: [self.engine]})
        self.host.commands["engine"] = self._command
        self.driver = SglangResidency()

    async def __aenter__(self):
        await self.engine.start()
        return self

    async def __aexit__(self, *args):
        await self.engine.stop()

    async def _command(self, argv):
        await (self.engine.start if argv[1] == "start" else self.engine.stop)()
        return Ran(0, b"", b"")

    def state(self, *, gpu_mb=LOADED, **options):
        given = {"url": self.engine.url, **options}
        return StateSpec(
            pool="rollout", gpu_mb=gpu_mb, residual_mb=PARKED, driver="sglang", options=tuple(given.items())
        )

    def order(self, kind, *, warm=True, **options):
        rig = Rig(self.driver, self.host, "host1", (GPU,), self.state(**options))
        return ResidencyContract().order(rig, kind, warm=warm)

    async def park(self, **options):
        await self.driver.park(self.order(PARK, **options))

    async def load(self, **options):
        await self.driver.load(self.order(LOAD, **options))

    def told(self):
        return [call for call in self.engine.calls if call.startswith("POST")]


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
            pass
        state = self.bench.state(start=("engine", "start"), stop=("engine", "stop"), end_wait_s=2.0)
        return Rig(self.bench.driver, self.bench.host, "host1", (GPU,), state)

    @pytest_asyncio.fixture(autouse=True)
    async def ended(self):
        yield
        if hasattr(self, "bench"):
            await self.bench.engine.stop()

    async def take_away(self, rig: Rig) -> None:
        self.bench.host.away = True

    async def open_with(self, options) -> Residency:
        return await SglangResidency.open(FakeChannel(), options)


# ---- which calls, in which order ------------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_it_is_paused_before_it_is_released_and_goes_on_after_all_is_back():
    async with Bench() as bench:
        bench.engine.train()
        bench.engine.running_requests = 3
        await bench.park()
        assert bench.told() == ["POST /pause_generation", "POST /release_memory_occupation"]
        assert bench.engine.used_mb() == PARKED
        bench.engine.calls.clear()
        await bench.load()
        assert bench.told() == [
            "POST /resume_memory_occupation", "POST /resume_memory_occupation", "POST /continue_generation"
        ]  # fmt: skip
        assert (bench.engine.used_mb(), bench.engine.generate()) == (LOADED, "trained")
        assert bench.engine.running_requests == 3, "retracted requests go on"


@pytest.mark.asyncio
async def test_weights_that_were_dropped_come_from_the_models_files_before_the_kv_cache():
    async with Bench(cpu_backup=False) as bench:
        await bench.park(weights="reload")
        bench.engine.calls.clear()
        await bench.load(weights="reload")
        assert bench.told() == [
            "POST /resume_memory_occupation",
            "POST /update_weights_from_disk",
            "POST /resume_memory_occupation",
            "POST /continue_generation",
        ]
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
async def test_weights_that_were_dropped_are_left_to_a_job_that_said_so():
    async with Bench(cpu_backup=False) as bench:
        await bench.park(weights="job")
        await bench.load(weights="job")
        bench.engine.train()
        assert bench.engine.generate() == "trained"


@pytest.mark.asyncio
async def test_only_some_tags_are_released_where_that_is_said():
    async with Bench() as bench:
        await bench.park(tags=["kv_cache"])
        assert bench.engine.used_mb() == LOADED - 10_000
        await bench.load(tags=["kv_cache"])
        assert bench.engine.generate() == "file"


# ---- what would end it, or do nothing -------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_an_engine_without_the_memory_saver_is_refused_before_it_answers_200_and_frees_nothing():
    async with Bench(memory_saver=False) as bench:
        await failing(bench.park(), NotDone, "was started without --enable-memory-saver")
        assert bench.told() == []


@pytest.mark.asyncio
async def test_an_engine_that_would_lose_weights_that_are_to_be_kept_is_refused():
    async with Bench(cpu_backup=False) as bench:
        await failing(bench.park(), NotDone, "without --enable-weights-cpu-backup: its weights would be lost")
        assert bench.told() == []


@pytest.mark.asyncio
async def test_a_second_park_and_a_second_load_tell_it_nothing_that_would_end_it():
    async with Bench() as bench:
        for _ in range(2):
            await bench.park()
        for _ in range(2):
            await bench.load()
        assert bench.engine.running
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
async def test_a_load_after_a_restart_of_the_daemon_resumes_what_the_daemon_knows_to_be_parked():
    async with Bench() as bench:
        await bench.park()
        bench.driver = SglangResidency()
        await bench.load(warm=True)
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
@pytest.mark.parametrize("parked", [False, True])
async def test_where_nobody_knows_whether_it_was_released_the_gpus_tell(parked):
    async with Bench() as bench:
        if parked:
            await bench.park()
        bench.driver = SglangResidency()
        await bench.load(warm=False)
        assert bench.engine.running
        assert bench.engine.generate() == "file"


@pytest.mark.asyncio
async def test_where_the_gpus_cannot_tell_either_it_is_left_alone():
    async with Bench() as bench:
        await failing(bench.load(warm=False, gpu_mb=0), NotDone, "is not known, and cannot be seen")
        assert bench.told() == []


@pytest.mark.asyncio
async def test_an_engine_that_was_started_anew_while_parked_has_lost_its_state():
    async with Bench() as bench:
        await bench.park()
        await bench.engine.stop()
        await bench.engine.start()
        await failing(bench.load(), NotDone, "was started again while it was parked")
        assert bench.engine.running
        assert bench.told() == ["POST /pause_generation", "POST /release_memory_occupation"]


# ---- what goes wrong ------------------------------------------------------------------------------------------------


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["POST /pause_generation", "POST /release_memory_occupation"])
@pytest.mark.parametrize("fault", ["error", "half", "missing"])
async def test_a_park_that_fails_is_not_done(call, fault):
    async with Bench() as bench:
        bench.engine.faults[call] = fault
        await failing(bench.park(), NotDone, f"{call} of .* was answered (500|404)")


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["error", "half"])
async def test_a_resume_that_fails_is_not_done_and_not_to_be_trusted(fault):
    async with Bench() as bench:
        await bench.park()
        bench.engine.faults["POST /resume_memory_occupation"] = fault
        await failing(bench.load(), NotDone, "is not known now: start this engine again")


@pytest.mark.asyncio
async def test_a_resume_without_room_ends_the_engine_and_is_contact_lost_then_known():
    async with Bench() as bench:
        await bench.park()
        bench.engine.faults["POST /resume_memory_occupation"] = "die"
        order = bench.order(LOAD)
        await failing(bench.driver.load(order), ContactLost, "broke off")
        probed = await bench.driver.probe(order)
        assert (probed.known, probed.done) == (True, False)
        assert "nothing listens" in probed.error


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["drop", "drop_after"])
async def test_a_park_whose_line_broke_is_probed_on_the_gpus(fault):
    async with Bench() as bench:
        order = bench.order(PARK)
        bench.engine.faults["POST /release_memory_occupation"] = fault
        await failing(bench.driver.park(order), ContactLost, "broke off")
        expected = Probed(known=True, done=True) if fault == "drop_after" else Probed(known=False)
        assert await bench.driver.probe(order) == expected


@pytest.mark.asyncio
@pytest.mark.parametrize("fault", ["hang", "hang_after"])
async def test_after_a_load_that_hung_and_was_cut_off_nothing_is_resumed_twice(fault):
    async with Bench() as bench:
        await bench.park()
        bench.engine.faults["POST /resume_memory_occupation"] = fault
        order = bench.order(LOAD)
        await cut_off(bench.engine, bench.driver.load, order)
        assert await bench.driver.probe(order) == Probed(known=False)
        await bench.driver.discard(bench.order(DISCARD, stop=["engine", "stop"]))


@pytest.mark.asyncio
async def test_nonsense_for_an_answer_is_contact_lost():
    async with Bench() as bench:
        bench.engine.faults["GET /server_info"] = "garbage"
        await failing(bench.park(), ContactLost, "which is not understood")


@pytest.mark.asyncio
async def test_a_discard_releases_all_and_tells_who_has_to_end_it():
    async with Bench() as bench:
        await failing(
            bench.driver.discard(bench.order(DISCARD, end_wait_s=0.1)), NotDone, "still runs .* end its process"
        )
        assert bench.engine.used_mb() == PARKED


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"weights": "backup"}, "one of 'keep', 'reload', 'job'"),
        ({"tags": ["weigths"]}, "tags of driver sglang has 'weigths'"),
        ({"tags": []}, "is empty"),
        ({"level": 2}, "level is not an option of driver sglang"),
    ],
)
def test_a_wrong_option_is_refused(options, said):
    with pytest.raises(ValueError, match=said):
        SglangResidency().check(StateSpec(pool="rollout", driver="sglang", options=tuple(options.items())))


# ---- against the real one --------------------------------------------------------------------------------------------


def test_an_installed_sglang_has_the_calls_that_are_made_and_the_oddities_that_are_minded():
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None:
        pytest.skip("sglang is not installed: what is asked of it was checked against the version in the how-to")
    server, told, updater, tags = (
        (Path(found.origin).parent / "srt" / file).read_text(encoding="utf-8")
        for file in ("entrypoints/http_server.py", "managers/io_struct.py",
                     "managers/scheduler_components/weight_updater.py", "constants.py")
    )  # fmt: skip
    for call in ("release_memory_occupation", "resume_memory_occupation", "pause_generation", "continue_generation",
                 "update_weights_from_disk", "server_info", "model_info"):  # fmt: skip
        said = f'"/{call}"'
        assert said in server, said
    for said in ('Literal["abort", "retract", "in_place"]', "keep_pause: bool", "tags: Optional[List[str]]"):
        assert said in told, said
    assert "self.offload_tags.remove(tag)" in updater, "to be resumed twice ends it"
    assert "should be called only when server is idle" in updater
    for tag in ("kv_cache", "weights", "cuda_graph"):
        assert f'"{tag}"' in tags


# ---- what doctor is told ---------------------------------------------------------------------------------------------
