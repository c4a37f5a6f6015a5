"""What the mock's witness defends.

- A second job's bytes on a GPU that is not clean are an error that nobody can miss.
- More parked bytes than the host has RAM are, too.
- It says who was on which GPU, and in which order.
- It never cries wolf: what was agreed is no violation.
"""

import json

import anyio
import pytest
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency
from faulty_mock import give_back

from rollmuxd.spi import HostConfig, NotDone, OrderKind, StateOrder, StateSpec
from rollmuxd_backend_mock import DoubleHold, RamOverfull

GPUS = ("h/gpu0", "h/gpu1")
LOAD, PARK, DISCARD = OrderKind.LOAD, OrderKind.PARK, OrderKind.DISCARD


@pytest.fixture(autouse=True)
def folder(tmp_path):
    World.record = tmp_path / "witness.jsonl"


class World:
    """One mock host, and orders told to it in short."""

    def __init__(self, backend):
        self.backend, self.driver, self.count = backend, MockResidency(), 0

    @classmethod
    async def open(cls, **options):
        said = {"record": str(cls.record), **options}
        return cls(await MockBackend.open([HostConfig(id="h", gpus=GPUS, options=said)], {}))

    @property
    def lines(self):
        """Written while it happens, not at the end: nothing was closed yet."""
        return [json.loads(line) for line in self.record.read_text().splitlines()]

    @property
    def violations(self):
        return [line for line in self.lines if line["event"] == "violation"]

    def order(self, kind, job, *, gpus=GPUS, gpu_mb=40_000, residual_mb=2_000, ram_mb=80_000, **more):
        self.count += 1
        state = StateSpec(pool=more.get("pool", "rollout"), gpu_mb=gpu_mb, residual_mb=residual_mb, ram_mb=ram_mb)
        fields = dict(
            order=f"o{self.count}", kind=kind, job=f"j-{job}", run=1, owner="team", name=job, pool="rollout",
            node="h/n", host="h", gpus=gpus, state=state, ranks=1, warm=False, pid=0, started="", backend=self.backend,
        )  # fmt: skip
        return StateOrder(**fields | more)

    async def load(self, job, **more):
        await self.driver.load(self.order(LOAD, job, **more))

    async def park(self, job, **more):
        await self.driver.park(self.order(PARK, job, **more))

    async def discard(self, job, **more):
        await self.driver.discard(self.order(DISCARD, job, **more))

    async def used(self):
        return tuple(gpu.used_mb for gpu in (await self.backend.observe("h")).gpus)

    def story(self, gpu="h/gpu0"):
        return [(line["event"], line.get("name", ""), line["mb"]) for line in self.lines if line["gpu"] == gpu]


@pytest.mark.asyncio
async def test_a_second_jobs_bytes_on_a_loaded_gpu_are_a_double_hold():
    world = await World.open(copy_gbps=1e6)
    await world.load("a")
    with pytest.raises(DoubleHold) as caught:
        await world.load("b", gpu_mb=1_000)  # it would fit: memory is not the point
    assert isinstance(caught.value, NotDone)
    assert str(caught.value).startswith("VIOLATION, THE SCHEDULER IS BROKEN: double hold of h/gpu0")
    assert len(world.violations) == 1
    assert await world.used() == (40_000, 40_000), "nothing of the second one was put there"


@pytest.mark.asyncio
async def test_the_left_overs_of_parked_states_are_no_double_hold():
    world = await World.open(copy_gbps=1e6)
    for job in ("a", "b", "c"):
        await world.load(job)
        await world.park(job)
    assert await world.used() == (6_000, 6_000)
    await world.load("a")
    assert await world.used() == (44_000, 44_000)
    assert world.violations == []


@pytest.mark.asyncio
async def test_what_is_agreed_for_parked_bytes_says_nothing_of_loaded_ones():
    world = await World.open(copy_gbps=1e6)
    await world.load("a", gpu_mb=1_000, residual_mb=2_000)
    with pytest.raises(DoubleHold):
        await world.load("b")


@pytest.mark.asyncio
async def test_more_left_over_than_was_agreed_is_a_double_hold():
    world = await World.open(copy_gbps=1e6, residual_gb=2.5)
    await world.load("a")
    await world.park("a")
    assert await world.used() == (2_500, 2_500)
    assert "clean" not in [event for event, _, _ in world.story()]
    with pytest.raises(DoubleHold, match="2000 MB were agreed"):
        await world.load("b")


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_bytes_are_on_the_gpu_from_the_beginning_of_a_load_to_the_end_of_a_park():
    world = await World.open(cold_s=30.0)
    with anyio.move_on_after(29):
        await world.load("a")
    with pytest.raises(DoubleHold):
        await world.load("b")
    await world.discard("a")
    world = await World.open(copy_gbps=1.0)
    await world.load("a")
    with anyio.move_on_after(70):  # of 76 s
        await world.park("a")
    with pytest.raises(DoubleHold):
        await world.load("b")


@pytest.mark.asyncio
async def test_a_driver_that_lies_is_found_out_by_the_next_job():
    world = await World.open(copy_gbps=1e6)
    await world.load("a")
    world.backend.faults.add("lie", "park", job="a", times=1)
    await world.park("a")
    assert await world.used() == (40_000, 40_000)
    with pytest.raises(DoubleHold):
        await world.load("b")


@pytest.mark.asyncio
async def test_two_states_of_one_job_may_meet_for_as_long_as_memory_lasts():
    world = await World.open(copy_gbps=1e6, gpu_gb=80)
    await world.load("a", pool="rollout")
    await world.load("a", pool="train")
    assert await world.used() == (80_000, 80_000)
    with pytest.raises(NotDone, match=r"out of memory on h/gpu0: 1 MB are needed, 0 of 80000 MB are free"):
        await world.load("a", pool="sync", gpu_mb=1)
    assert world.violations == []


@pytest.mark.asyncio
async def test_a_new_run_beside_the_bytes_of_the_old_one_is_a_double_hold():
    world = await World.open(copy_gbps=1e6)
    await world.load("a", run=1)
    with pytest.raises(DoubleHold):
        await world.load("a", run=2)


@pytest.mark.asyncio
async def test_a_stranger_in_the_way_is_out_of_memory_and_no_violation():
    world = await World.open(copy_gbps=1e6)
    world.backend.faults.occupy("h/gpu1", 50_000)
    assert await world.used() == (0, 50_000)
    with pytest.raises(NotDone, match="out of memory on h/gpu1"):
        await world.load("a")
    assert await world.used() == (0, 50_000), "a load that fails leaves nothing behind"
    world.backend.faults.vacate("h/gpu1")
    await world.load("a")
    assert world.violations == []


@pytest.mark.asyncio
async def test_more_parked_than_the_host_has_ram_is_a_violation():
    world = await World.open(copy_gbps=1e6, ram_gb=100)
    await world.load("a", gpus=GPUS[:1])
    await world.load("b", gpus=GPUS[1:])
    await world.park("a")
    with pytest.raises(RamOverfull, match="parks 80000 MB, and 80000 MB of 100000 MB are held"):
        await world.park("b")
    await world.discard("a")
    await world.park("b")
    assert len(world.violations) == 1


@pytest.mark.asyncio
async def test_ram_is_held_from_the_first_park_until_it_is_discarded():
    world = await World.open(copy_gbps=1e6, ram_gb=100)
    await world.load("a", gpus=GPUS[:1])
    await world.park("a")
    await world.load("a", gpus=GPUS[:1])
    await world.load("b", gpus=GPUS[1:])
    with pytest.raises(RamOverfull):
        await world.park("b")


@pytest.mark.asyncio
async def test_it_writes_down_who_was_where_and_in_which_order(tmp_path):
    World.record = tmp_path / "deep" / "witness.jsonl"
    world = await World.open(copy_gbps=1e6)
    await world.load("a", run=3)
    await world.park("a", run=3)
    await world.load("b")
    with pytest.raises(DoubleHold):
        await world.load("c")
    await world.discard("b")
    told = [
        ("load", "a", 40_000), ("loaded", "a", 40_000), ("park", "a", 2_000), ("clean", "", 2_000),
        ("load", "b", 40_000), ("loaded", "b", 40_000), ("violation", "c", 40_000), ("discard", "b", 0),
        ("clean", "", 2_000),
    ]  # fmt: skip
    assert world.story() == told
    lines = world.lines
    first = lines[0]
    assert {key: first[key] for key in ("host", "gpu", "job", "name", "run", "pool", "mb", "order")} == {
        "host": "h", "gpu": "h/gpu0", "job": "j-a", "name": "a", "run": 3, "pool": "rollout", "mb": 40_000,
        "order": "o1",
    }  # fmt: skip
    monos = [line["mono"] for line in lines]
    assert monos == sorted(monos)
    assert all(line["wall"] > 0 for line in lines)
    assert [line["kind"] for line in lines if line["event"] == "violation"] == ["DoubleHold"]


@pytest.mark.asyncio
async def test_a_second_daemon_appends_to_the_record(tmp_path):
    record = tmp_path / "witness.jsonl"
    for _ in range(2):
        world = await World.open(copy_gbps=1e6, record=str(record))
        await world.load("a")
        await world.backend.close()
    assert len(record.read_text().splitlines()) == 8
    await world.discard("a")
    assert len(record.read_text().splitlines()) == 12, "what happens after close is told all the same"
    await world.backend.close()


@pytest.mark.asyncio
async def test_a_shrunk_tails_bytes_go_gpu_by_gpu():
    world = await World.open(copy_gbps=1e6)
    await world.load("a")
    give_back(world.backend.host("h").machine, "a", "h/gpu1")
    assert await world.used() == (40_000, 0)
    assert [event for event, _, _ in world.story("h/gpu1")] == ["load", "loaded", "given_back", "clean"]
    await world.load("b", gpus=GPUS[1:], node="h/n1")
    assert world.violations == []


@pytest.mark.asyncio
async def test_a_gpu_of_another_host_is_refused():
    world = await World.open()
    with pytest.raises(NotDone, match="elsewhere/gpu0 is no GPU of h"):
        await world.load("a", gpus=("elsewhere/gpu0",))


@pytest.mark.asyncio
async def test_parking_what_is_not_there_is_not_done():
    world = await World.open()
    with pytest.raises(NotDone, match="nothing of it is on h/n; load it first"):
        await world.park("a")


@pytest.mark.asyncio
async def test_parking_what_is_parked_is_done():
    world = await World.open(copy_gbps=1e6)
    await world.load("a")
    await world.park("a")
    await world.park("a")
    assert await world.used() == (2_000, 2_000)


@pytest.mark.asyncio
async def test_a_host_of_another_backend_is_refused_with_the_remedy():
    world = await World.open()
    order = world.order(LOAD, "a", backend=object())
    with pytest.raises(NotDone, match="give the state of job 'a' another driver"):
        await world.driver.load(order)
