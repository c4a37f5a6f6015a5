"""Engines that go wrong under the daemon's own writer and actuator: what becomes of their job, of its node, and of the
job that waits behind it.

Each is a trouble that the peers have with vLLM and SGLang. The engines are fakes that keep these servers' answers and
oddities; sockets and time are real.
"""

import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from fake_engines import EngineHost
from fake_sglang import FakeSglang
from fake_vllm import FakeVllm
from memory_journal import MemoryJournal
from patience import PATIENCE_S
from simkit import invariants

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core import model as m
from rollmuxd.core.config import Config
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.hosts import actuator as acting
from rollmuxd.daemon.writer import Writer
from rollmuxd.explain.causes import sentence
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.spi import Ran
from rollmuxd_sglang import SglangResidency
from rollmuxd_vllm import VllmResidency

pytestmark = [pytest.mark.asyncio]

GPU, NODE = "box/gpu0", "box/gpu0"
LIMIT_S, ORDER_S = 8.0, 4.0


class Stage:
    """Two jobs, a and b, whose engines share one GPU: started by their job's first load, ended by a discard."""

    def __init__(self, engines: dict[str, Any], residency: Any) -> None:
        self.engines = engines
        self.host = EngineHost("box", {GPU: list(engines.values())}, gpu_mb=40_000)
        self.host.commands["engine"] = self._command
        self.stops = True
        self.asked = 0
        config = Config(
            drivers={"it": residency.traits}, observe_after_ms=50, observe_at_least_ms=200,
            clean_timeout_ms=round(LIMIT_S * 1000), residual_grace_ms=200,
        )  # fmt: skip
        self.journal, clock = MemoryJournal(), SystemClock()
        self.actuator = acting.Actuator(
            {"fake": self.host}, {"it": residency}, state=lambda: self.writer.scheduler.state,
            post=lambda given: self.writer.post(given), order_s=ORDER_S, now=clock.now,  # noqa: PLW0108  # made below
        )  # fmt: skip
        node = i.NodeSpec(NODE, "box", (GPU,), ("rollout",), "fake", 40_000, 1.0)
        start = i.Start((i.HostSpec("box", "fake", 100_000),), (node,))
        self.writer = Writer(
            lambda state: Scheduler(config, RollMux(), state), self.journal, clock, self.actuator.perform, start,
            prompt=(self.actuator.on_facts,),
        )  # fmt: skip

    async def _command(self, argv: Any) -> Ran:
        engine = self.engines[argv[1]]
        if argv[2] == "start":
            await engine.start()
        elif self.stops:
            await engine.stop()
        return Ran(0, b"", b"")

    @property
    def state(self) -> Any:
        return self.writer.scheduler.state

    def job(self, name: str) -> m.Job:
        return next(job for job in self.state.jobs.values() if job.spec.name == name)

    @property
    def node(self) -> m.Node:
        return self.state.nodes[NODE]

    async def join(self, name: str) -> None:
        options = (
            ("url", self.engines[name].url), ("start", ("engine", name, "start")), ("stop", ("engine", name, "stop")),
            ("end_wait_s", 0.3),
        )  # fmt: skip
        state = StateSpec("rollout", gpu_mb=17_500, residual_mb=1_500, ram_mb=1_000, driver="it", options=options)
        phases = (PhaseSpec("rollout", ("rollout",)),)
        spec = JobSpec(name, phases, (Want("rollout"),), states=(state,))
        job = (await self.writer.submit(i.RegisterJob("team", "ann", spec, name))).job
        await self.writer.submit(i.OpenSession(job, name, 0, "box", ""))

    async def ask(self, name: str) -> str:
        self.asked += 1
        job = self.job(name)
        request = i.RequestSlot(job.id, str(job.session), "rollout", f"{name}-{self.asked}")
        return (await self.writer.submit(request)).slot

    async def hold(self, name: str) -> str:
        slot = await self.ask(name)
        await self.until(lambda: self.slot(slot) == "running")
        return slot

    async def release(self, slot: str) -> None:
        await self.writer.submit(i.ReleaseSlot(slot, self.state.slots[slot].fence))

    def slot(self, slot: str) -> str:
        return self.state.slots[slot].status.value

    async def until(self, look: Callable[[], bool]) -> None:
        with anyio.move_on_after(PATIENCE_S):
            while not look():
                await anyio.sleep(0.02)
            return
        jobs = [f"{job.spec.name} {job.status} ({job.reason})" for job in self.state.jobs.values()]
        pytest.fail(f"still not: {jobs}; {self.node}; {self.state.states}; {self.state.orders}")

    async def facts(self, kind: type[f.Fact]) -> list[Any]:
        rows, _ = await self.writer.facts_after(0, 0, 100_000)
        return [fact for _, fact in rows if isinstance(fact, kind)]


@asynccontextmanager
async def stage(make: Callable[[], Any] = FakeVllm, residency: Any = None):
    engines = {"a": make(), "b": make()}
    for engine in engines.values():  # so that each has its port
        async with engine:
            pass
    it = Stage(engines, residency or VllmResidency())
    try:
        async with anyio.create_task_group() as tasks:
            await tasks.start(it.actuator.run)
            await tasks.start(it.writer.run)
            await it.until(lambda: it.node.status is m.NodeStatus.UP)
            for name in engines:
                await it.join(name)
            yield it
            invariants.check(it.state)
            tasks.cancel_scope.cancel()
    finally:
        for engine in engines.values():
            await engine.stop()


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    monkeypatch.setattr(acting, "RETRY_AFTER_S", (0.01, 0.02))


async def after_a_rollout_of_a(it: Stage, spoil: Callable[[Any], None]) -> str:
    """a rolls out, its engine is spoilt, it releases, and b asks: b's request."""
    held = await it.hold("a")
    spoil(it.engines["a"])
    await it.release(held)
    return await it.ask("b")


def always(call, fault):
    return lambda engine: engine.always.update({call: fault})


def lacks_sleep_mode(engine):
    """As started without --enable-sleep-mode, and it does not even say so: 200, and nothing is freed."""
    engine.sleep_mode = False
    engine.always["GET /server_info"] = "error"


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (always("POST /sleep", "error"), "could not park .* was answered 500"),
        (always("POST /sleep", "half"), "could not park .* was answered 500"),
        (always("POST /sleep", "missing"), "could not park .* VLLM_SERVER_DEV_MODE=1"),
        (always("POST /sleep", "lie"), "could not park .* and does not sleep"),
        (always("POST /sleep", "die"), "no word of the park .* broke off"),
        (always("POST /sleep", "drop"), "no word of the park .* broke off"),
        (always("POST /sleep", "drop_after"), "no word of the park .* broke off"),
        (always("POST /sleep", "hang"), "no word of the park .* no answer within 4 s"),
        (lacks_sleep_mode, r"left 17.5 GB on box/gpu0 when parked, 1.5 GB were agreed .* more than residual memory"),
    ],
)
async def test_an_engine_that_cannot_be_parked_costs_its_own_job_and_the_next_goes_on(spoil, reason):
    async with stage() as it:
        b = await after_a_rollout_of_a(it, spoil)
        await it.until(lambda: it.slot(b) == "running")
        assert it.job("a").status is m.JobStatus.QUARANTINED
        (told,) = await it.facts(f.JobQuarantined)
        assert re.search(reason, sentence(told.reason)), told.reason
        assert it.node.status is m.NodeStatus.UP
        assert not it.engines["a"].running, "it was ended"
        assert it.engines["b"].generate() == "file"


@pytest.mark.parametrize(
    ("make", "residency", "spoil"),
    [
        (FakeVllm, VllmResidency, always("GET /is_sleeping", "garbage")),
        (lambda: FakeSglang(cuda_graph_mb=0), SglangResidency, always("POST /pause_generation", "hang")),
        (lambda: FakeSglang(cuda_graph_mb=0), SglangResidency, always("POST /release_memory_occupation", "drop")),
    ],
)
async def test_an_engine_of_which_nothing_can_be_learnt_keeps_its_gpu_until_it_is_seen_to_be_gone(
    make, residency, spoil
):
    """It may yet do what it was told: unknown is never free."""
    async with stage(make, residency()) as it:
        b = await after_a_rollout_of_a(it, spoil)
        await it.until(lambda: it.node.status is m.NodeStatus.QUARANTINED)
        assert it.job("a").status is m.JobStatus.QUARANTINED
        assert it.slot(b) == "queued"
        await it.engines["a"].stop()
        await it.until(lambda: it.slot(b) == "running")


async def test_an_engine_that_cannot_be_ended_costs_its_node_too_until_somebody_ends_it():
    async with stage() as it:
        it.stops = False
        b = await after_a_rollout_of_a(it, lacks_sleep_mode)
        await it.until(lambda: it.node.status is m.NodeStatus.QUARANTINED)
        assert it.job("a").status is m.JobStatus.QUARANTINED
        assert it.slot(b) == "queued"
        assert "box/gpu0 has 17.5 GB, of which 1.8 GB would be clean" in sentence(it.node.reason)
        await it.engines["a"].stop()
        await it.until(lambda: it.slot(b) == "running")
        assert it.node.status is m.NodeStatus.UP


@pytest.mark.parametrize("fault", ["error", "half", "die", "lie", "hang"])
async def test_an_engine_that_cannot_be_woken_costs_its_own_job_and_the_other_goes_on(fault):
    async with stage() as it:
        b = await after_a_rollout_of_a(it, always("POST /wake_up", fault))
        await it.until(lambda: it.slot(b) == "running")
        a = await it.ask("a")
        await it.release(b)
        await it.until(lambda: it.job("a").status is m.JobStatus.QUARANTINED)
        again = await it.ask("b")
        await it.until(lambda: it.slot(again) == "running")
        assert a not in it.state.slots or it.slot(a) != "running"
        assert it.engines["b"].generate() == "file"


async def test_an_engine_that_dies_while_it_sleeps_is_found_out_at_its_next_load():
    async with stage() as it:
        b = await after_a_rollout_of_a(it, lambda engine: None)
        await it.until(lambda: it.slot(b) == "running")
        await it.engines["a"].stop()
        await it.ask("a")
        await it.release(b)
        await it.until(lambda: it.job("a").status is m.JobStatus.QUARANTINED)
        assert "it has died since: start the job again" in sentence(it.job("a").reason)


async def test_an_engine_whose_residual_memory_grows_goes_on_where_both_fit_and_people_are_told():
    async with stage() as it:

        def grows(engine):
            engine.context_mb = 3_500

        b = await after_a_rollout_of_a(it, grows)
        await it.until(lambda: it.slot(b) == "running")
        assert it.job("a").status is not m.JobStatus.QUARANTINED
        grown = [fact for fact in await it.facts(f.ResidualMemoryObserved) if fact.mb > fact.agreed_mb]
        assert [(fact.job, fact.mb, fact.agreed_mb) for fact in grown] == [(it.job("a").id, 3_500, 1_500)]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda engine: setattr(engine, "memory_saver", False), "without --enable-memory-saver"),
        (lambda engine: setattr(engine, "cpu_backup", False), "without --enable-weights-cpu-backup"),
        (always("POST /release_memory_occupation", "lie"), "left 17.5 GB on box/gpu0 when parked"),
        (always("POST /release_memory_occupation", "die"), "no word of the park"),
    ],
)
async def test_so_does_sglang(spoil, reason):
    async with stage(lambda: FakeSglang(cuda_graph_mb=0), SglangResidency()) as it:
        b = await after_a_rollout_of_a(it, spoil)
        await it.until(lambda: it.slot(b) == "running")
        (told,) = await it.facts(f.JobQuarantined)
        assert reason in sentence(told.reason)
        assert it.engines["b"].generate() == "file"


async def test_sglang_is_never_told_what_ends_it_however_often_it_is_moved():
    async with stage(lambda: FakeSglang(cuda_graph_mb=0), SglangResidency()) as it:
        held = await it.hold("a")
        it.engines["a"].train()
        for _ in range(3):
            other = await it.ask("b")
            await it.release(held)
            await it.until(lambda other=other: it.slot(other) == "running")
            again = await it.ask("a")
            await it.release(other)
            await it.until(lambda again=again: it.slot(again) == "running")
            held = again
        assert it.engines["a"].generate() == "trained"
        assert it.job("a").status is not m.JobStatus.QUARANTINED
