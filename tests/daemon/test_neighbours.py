"""A fault delays its neighbours by nothing of ours: in virtual time, where only what somebody waits for takes any.

Driver, actuator, observer and the mock hosts are the real ones. Four nodes, each a host of its own with jobs that take
turns; the one that goes wrong is the first. (What a busy processor adds is measured by ``make bench BENCH=soak``.)
"""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio
import pytest
from faulty_mock import Faults
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency
from memory_journal import MemoryJournal

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.errors import Rejected
from rollmuxd.core.ids import Fence
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.hosts.observer import watch
from rollmuxd.daemon.writer import Writer
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.spi import HostConfig, Observation

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

HOSTS = ("h0", "h1", "h2", "h3")
#: what an order may take, and what a phase does
LIMIT_S, PHASE_S = 20.0, 3.0
ROUNDS = 12


class Hosts(MockBackend):
    """Mock hosts; to look at one takes time, as it does: what a look says is of its beginning."""

    async def observe(self, host: str) -> Observation:
        await anyio.sleep(0.005)
        return await super().observe(host)


class Team:
    """Two jobs of one node that take turns; ``waits`` has how long each hand-over took."""

    def __init__(self, writer: Writer, host: str, granted: dict[str, asyncio.Future[Fence]]) -> None:
        self.writer, self.host, self.granted = writer, host, granted
        self.waits: list[float] = []

    async def join(self, name: str) -> tuple[str, str]:
        phases = (PhaseSpec("rollout", ("rollout",), round(PHASE_S * 1000)),)
        state = StateSpec("rollout", gpu_mb=20_000, ram_mb=20_000, driver="mock", load_ms=1000, park_ms=1000)
        spec = JobSpec(name, phases, (Want("rollout", named=(f"{self.host}/gpu0-0",)),), states=(state,))
        job = (await self.writer.submit(i.RegisterJob("team", "ann", spec))).job
        assert job is not None
        session = (await self.writer.submit(i.OpenSession(job, pid=1, host="box", started=name))).session
        assert session is not None
        return job, session

    async def take_turns(self, place: int, rounds: int) -> None:
        job, session = await self.join(f"{self.host}-{place}")
        loop = asyncio.get_running_loop()
        for number in range(rounds):
            began = loop.time()
            answer = await self.writer.submit(i.RequestSlot(job, session, "rollout", f"{number}"))
            assert answer.slot is not None
            fence = await self.granted.setdefault(answer.slot, loop.create_future())
            self.waits.append(loop.time() - began)
            await anyio.sleep(PHASE_S)
            await self.writer.submit(i.ReleaseSlot(answer.slot, fence))

    async def go_on_while_it_goes(self, place: int) -> None:
        """A job that may be quarantined, and is refused its next request then."""
        with suppress(Rejected):
            await self.take_turns(place, ROUNDS)


@asynccontextmanager
async def four_hosts() -> AsyncIterator[tuple[MockBackend, dict[str, Team]]]:
    loop = asyncio.get_running_loop()
    folder = TemporaryDirectory()
    record = Path(folder.name, "witness.jsonl")
    said = {"record": str(record)}
    backend = await Hosts.open([HostConfig(host, said, (f"{host}/gpu0",), 80_000, 500_000) for host in HOSTS], {})
    granted: dict[str, asyncio.Future[Fence]] = {}

    def hear(facts: list[Entry]) -> None:
        for _, fact, *_ in facts:
            if isinstance(fact, f.SlotGranted):
                granted.setdefault(fact.slot, loop.create_future()).set_result(fact.fence)

    nodes = tuple(i.NodeSpec(f"{h}/gpu0-0", h, (f"{h}/gpu0",), ("rollout",), gpu_mb=80_000) for h in HOSTS)
    start = i.Start(tuple(i.HostSpec(host, "mock", 500_000) for host in HOSTS), nodes)
    config = Config(lease_ms=10_000_000, drivers={"mock": MockResidency.traits})
    clock = SystemClock(monotonic=loop.time, wall=lambda: 1000.0)
    actuator = Actuator(
        {"mock": backend}, {"mock": MockResidency()}, state=lambda: writer.scheduler.state,
        post=lambda given: writer.post(given),  # noqa: PLW0108  # made below
        order_s=LIMIT_S, now=clock.now,
    )  # fmt: skip
    writer = Writer(
        lambda state: Scheduler(config, RollMux(), state), MemoryJournal(),
        clock, actuator.perform, start,
        prompt=(hear, actuator.on_facts), lease_ms=10_000_000,
    )  # fmt: skip
    random.seed(1)  # when hosts are looked at
    async with anyio.create_task_group() as tasks:
        await tasks.start(actuator.run)
        await tasks.start(writer.run)
        tasks.start_soon(watch, HOSTS, 5.0, actuator.perform)
        await anyio.sleep(1)
        yield backend, {host: Team(writer, host, granted) for host in HOSTS}
        tasks.cancel_scope.cancel()
    assert '"violation"' not in record.read_text()
    folder.cleanup()


async def waits_of_the_others(spoil: Callable[[Faults], object]) -> list[float]:
    """What the hand-overs on the other three nodes take while something is wrong with the first."""
    async with four_hosts() as (backend, teams):
        async with anyio.create_task_group() as first:
            for place in (0, 1):
                first.start_soon(teams["h0"].go_on_while_it_goes, place)
            await anyio.sleep(5)
            spoil(backend.faults)
            async with anyio.create_task_group() as others:
                for host in HOSTS[1:]:
                    for place in (0, 1):
                        others.start_soon(teams[host].take_turns, place, ROUNDS)
            first.cancel_scope.cancel()
        return [wait for host in HOSTS[1:] for wait in teams[host].waits]


SPOILT: dict[str, Callable[[Faults], object]] = {
    "a load that hangs": lambda faults: faults.add("hang", "load", host="h0"),
    "a park that hangs": lambda faults: faults.add("hang", "park", host="h0"),
    "a park that lies": lambda faults: faults.add("lie", "park", host="h0"),
    "loads that fail": lambda faults: faults.add("fail", "load", host="h0"),
    "orders that are slow": lambda faults: faults.add("delay", "load", host="h0", delay_s=15),
    "a stranger on the node": lambda faults: faults.occupy("h0/gpu0", 30_000),
    "a host that does not answer": lambda faults: faults.add("hang", "observe", host="h0"),
    "a host that is lost": lambda faults: faults.add("lose", host="h0"),
    "a driver that cannot be asked": lambda faults: (
        faults.add("lose", "load", host="h0"), faults.add("hang", "probe", host="h0")
    ),
}  # fmt: skip


#: what the hand-overs take while nothing is wrong: in virtual time always the same
CALM: list[float] = []


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT)
async def test_other_nodes_do_not_wait_a_millisecond_longer(spoil: Callable[[Faults], object]) -> None:
    calm = CALM or await waits_of_the_others(lambda _: None)
    CALM[:] = calm
    assert len(calm) == 3 * 2 * ROUNDS
    assert max(calm) > PHASE_S  # they do wait for each other
    assert await waits_of_the_others(spoil) == pytest.approx(calm, abs=0.001)


async def test_who_comes_next_on_the_node_waits_for_the_time_limit_of_the_order_and_no_longer() -> None:
    async with four_hosts() as (backend, teams):
        backend.faults.add("hang", "load", host="h0", job="h0-1")
        team = teams["h0"]
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(team.take_turns, 0, 4)
            await anyio.sleep(1)
            tasks.start_soon(team.take_turns, 1, 1)
            with anyio.fail_after(4 * (PHASE_S + 5) + LIMIT_S + 5):
                while len(team.waits) < 4:
                    await anyio.sleep(0.1)
            tasks.cancel_scope.cancel()
        assert max(team.waits) < LIMIT_S + PHASE_S + 5
