"""Two stages for the races of the peers, and no process: what is raced here is decisions, orders and sights.

``core()`` is a scheduler and what goes in: nothing answers unless the test says so. ``stage()`` puts the daemon's own
driver and actuator around it, with mock hosts (which are a witness) and whatever bad driver of ``bad_plugins``
the test wants; its time is virtual.
"""

import asyncio
from collections.abc import Sequence
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest
from bad_plugins import SlowBackend, WrappedResidency
from faulty_mock import FaultyMock as MockBackend
from faulty_mock import FaultyResidency as MockResidency
from memory_journal import MemoryJournal
from simkit import invariants

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core import model as m
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import said
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.effects import Observe, Perform, Probe
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.writer import Writer
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.spi import HostConfig

#: host, its GPUs, and their pool; one node each
SPLIT = (("r", 2, "rollout"), ("t", 2, "train"))
GPU_MB = 80_000
#: a look takes some time: where no time passes, nobody can say what came first
LOOK_S = 0.002


def start_of(nodes: Sequence[tuple[str, int, str]], incarnation: int = 1, ram_mb: int = 100_000) -> i.Start:
    return i.Start(
        hosts=tuple(i.HostSpec(host, "mock", ram_mb) for host, *_ in nodes),
        nodes=tuple(
            i.NodeSpec(f"{host}/gpus", host, tuple(f"{host}/gpu{n}" for n in range(gpus)), (pool,), gpu_mb=GPU_MB)
            for host, gpus, pool in nodes
        ),
        incarnation=incarnation,
    )


def spec_of(
    name: str,
    phases: Sequence[str] = ("rollout", "train"),
    *,
    nodes: int = 1,
    keeps: bool = True,
    ram_mb: int = 1_000,
    residual_mb: int = 0,
    **more: Any,
) -> JobSpec:
    """A job; a phase is named like its pool, and ``sync`` needs all pools at once."""
    pools = tuple(phase for phase in phases if phase != "sync")
    cycle = tuple(PhaseSpec(phase, pools if phase == "sync" else (phase,), planned_ms=10_000) for phase in phases)
    states = tuple(StateSpec(pool, 40_000, residual_mb, ram_mb, "mock") for pool in pools) if keeps else ()
    wants = tuple(Want(pool, nodes=nodes if pool == "rollout" else 1) for pool in pools)
    return JobSpec(name, cycle, wants, states=states, **more)


class Core:
    """A scheduler, and all that it has said. Times in seconds. What it wants done waits in ``told``."""

    def __init__(
        self,
        nodes: Sequence[tuple[str, int, str]] = SPLIT,
        *,
        driver: DriverTraits | None = None,
        ram_mb: int = 100_000,
        **config: Any,
    ) -> None:
        self.config = Config(drivers={"mock": driver or DriverTraits(idempotent=True, probes=True)}, **config)
        self.scheduler = Scheduler(self.config, RollMux())
        self.now = 1_000.0
        self.facts: list[f.Fact] = []
        self.told: list[str] = []
        self.probed: list[str] = []
        self.start = start_of(nodes, ram_mb=ram_mb)
        self.tell(self.start)
        self.look()

    @property
    def state(self) -> State:
        return self.scheduler.state

    def tell(self, given: i.Input) -> Any:
        """One input; its answer. What must hold of every state holds of this one."""
        decision = self.scheduler.handle(given, round(self.now * 1000))
        self.facts += decision.facts
        self.told += [effect.order for effect in decision.effects if isinstance(effect, Perform)]
        self.probed += [effect.order for effect in decision.effects if isinstance(effect, Probe)]
        invariants.check(self.state)
        return decision.answer

    def wait(self, seconds: float) -> None:
        """Time goes by, in which every session is heard of."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + 10.0)
            for session in self.state.sessions.values():
                if session.status is m.SessionStatus.ALIVE:
                    self.tell(i.Heartbeat(session.id))
            self.tell(i.Tick())

    def restart(self) -> None:
        """The daemon is killed, and begins anew with what its journal has."""
        state = State()
        for fact in self.facts:
            apply(state, fact)
        self.told, self.probed = [], []
        self.scheduler = Scheduler(self.config, RollMux(), state)
        self.tell(self.start)

    # ---- jobs ----

    def join(self, name: str, *phases: str, pid: int = 1, **more: Any) -> str:
        job = self.tell(i.RegisterJob("team", "ann", spec_of(name, phases or ("rollout", "train"), **more), name)).job
        self.open(name, pid)
        return str(job)

    def open(self, name: str, pid: int = 1) -> str:
        return str(self.tell(i.OpenSession(self.job(name).id, name, pid, "box", f"t{pid}")).session)

    def job(self, name: str) -> m.Job:
        return next(job for job in self.state.jobs.values() if job.spec.name == name)

    def ask(self, name: str, phase: str = "rollout") -> m.Slot:
        job = self.job(name)
        number = len(self.of(f.SlotQueued))
        answer = self.tell(i.RequestSlot(job.id, str(job.session), phase, f"{name}-{number}"))
        return self.state.slots[answer.slot]

    def release(self, slot: m.Slot, **more: Any) -> None:
        assert slot.fence is not None
        self.tell(i.ReleaseSlot(slot.id, slot.fence, **more))

    def silent(self, name: str) -> None:
        """Nothing is heard of its process for a lease, and of all others something is."""
        mute = self.job(name).session
        until = self.now + self.config.lease_ms / 1000 + 1
        while self.now < until:
            self.now += 10.0
            for session in self.state.sessions.values():
                if session.id != mute and session.status is m.SessionStatus.ALIVE:
                    self.tell(i.Heartbeat(session.id))
            self.tell(i.Tick())

    # ---- backends ----

    def look(self, **used_mb: int) -> None:
        """All hosts are seen, with so much on the GPUs of each."""
        for host in list(self.state.hosts):
            gpus = [gpu for node in self.state.hosts[host].nodes for gpu in self.state.nodes[node].gpus]
            self.tell(
                i.HostObserved(host, tuple(i.GpuObservation(gpu, used_mb.get(host, 0)) for gpu in gpus), f"boot-{host}")
            )

    def obey(self, *, seen_mb: int = 0) -> list[m.OrderKind]:
        """Do everything that was told, and what comes of it; of which kinds it was."""
        done = []
        while self.told:
            order = self.state.orders.get(self.told.pop(0))
            if order is not None:
                done.append(order.kind)
                gpus = self.state.nodes[order.node].gpus
                self.tell(i.OrderDone(order.id, tuple(i.GpuObservation(gpu, seen_mb) for gpu in gpus)))
        return done

    def of(self, *kinds: type[f.Fact]) -> list[Any]:
        return [fact for fact in self.facts if isinstance(fact, kinds)]

    def why(self, slot: m.Slot) -> str:
        return " ".join(
            reason.text for reason in Explainer(self.scheduler.context).why_slot_waits(slot.id, round(self.now * 1000))
        )


@pytest.fixture
def core():
    return Core


class Stage:
    """A daemon without its HTTP: its writer, its actuator, mock hosts, and a residency driver of the test's choice."""

    def __init__(self, writer: Writer, actuator: Actuator, backend: MockBackend, residency: Any) -> None:
        self.writer, self.actuator, self.backend, self.residency = writer, actuator, backend, residency
        self._asked = 0

    @property
    def state(self) -> State:
        return self.writer.scheduler.state

    async def join(self, name: str, *phases: str, **more: Any) -> None:
        spec = spec_of(name, phases or ("rollout", "train"), **more)
        job = (await self.writer.submit(i.RegisterJob("team", "ann", spec, name))).job
        assert job is not None
        # Without a pid the bytes stay until they are moved: these processes do not exist.
        await self.writer.submit(i.OpenSession(job, name, 0, "box", ""))

    def away(self, host: str) -> None:
        """The host is out of reach for a moment; then it is looked at, as the daemon's observer would."""
        self.writer.post(i.HostObserved(host, unreachable=said("no route to it")))
        self.actuator.perform([Observe(host)])

    def job(self, name: str) -> m.Job:
        return next(job for job in self.state.jobs.values() if job.spec.name == name)

    def node(self, host: str) -> m.Node:
        return self.state.nodes[f"{host}/gpus"]

    async def ask(self, name: str, phase: str = "rollout") -> str:
        self._asked += 1
        job = self.job(name)
        answer = await self.writer.submit(i.RequestSlot(job.id, str(job.session), phase, f"{name}-{self._asked}"))
        assert answer.slot is not None
        return answer.slot

    async def release(self, slot: str) -> None:
        fence = self.state.slots[slot].fence
        assert fence is not None
        await self.writer.submit(i.ReleaseSlot(slot, fence))

    async def hold(self, name: str, phase: str = "rollout") -> str:
        slot = await self.ask(name, phase)
        await self.until(slot, "running")
        return slot

    async def until(self, slot: str, *statuses: str, within: float = 300.0) -> float:
        """Wait for a slot; how long that took."""
        return await self.wait_for(lambda: self.state.slots[slot].status in statuses, within)

    async def wait_for(self, look: Any, within: float = 300.0) -> float:
        began = asyncio.get_running_loop().time()
        while not look():
            if asyncio.get_running_loop().time() - began > within:
                pytest.fail(f"after {within:g} s still not; {self.picture()}")
            await self.beat()
            await anyio.sleep(0.2)
        await self.writer.read(lambda core, now: None)  # and what was seen is durable
        return asyncio.get_running_loop().time() - began

    async def stays(self, look: Any, seconds: float) -> None:
        """For so long, this is true."""
        until = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < until:
            await self.beat()
            await anyio.sleep(0.5)
            assert look()

    def picture(self) -> str:
        jobs = [f"{job.spec.name} {job.status} ({job.reason}) slot {job.slot}" for job in self.state.jobs.values()]
        kept = [f"{key} {state.status} {state.order}" for key, state in self.state.states.items()]
        nodes = [f"{node.id} {node.status} ({node.reason}) {node.gpus}" for node in self.state.nodes.values()]
        return "; ".join([*jobs, *kept, *nodes])

    async def beat(self) -> None:
        for session in list(self.state.sessions.values()):
            if session.status is m.SessionStatus.ALIVE:
                await self.writer.submit(i.Heartbeat(session.id))


@pytest.fixture
def stage(tmp_path):
    record = tmp_path / "witness.jsonl"

    @asynccontextmanager
    async def run(
        residency: Any = None,
        nodes: Sequence[tuple[str, int, str]] = SPLIT,
        *,
        options: dict[str, Any] | None = None,
        backend_like: Any = lambda backend: SlowBackend(backend, LOOK_S),
        **config: Any,
    ):
        residency = residency if residency is not None else WrappedResidency(MockResidency())
        hosts = [
            HostConfig(
                id=host,
                gpus=tuple(f"{host}/gpu{n}" for n in range(gpus)),
                gpu_mb=GPU_MB,
                ram_mb=100_000,
                options={"copy_gbps": 1_000, "watch_pids": False, "record": str(record), **(options or {})},
            )
            for host, gpus, _ in nodes
        ]
        backend = await MockBackend.open(hosts, {})
        loop = asyncio.get_running_loop()
        clock = SystemClock(monotonic=loop.time, wall=lambda: 1_000_000.0)
        settings = Config(drivers={"mock": residency.traits}, **config)
        actuator = Actuator(
            {"mock": backend_like(backend)},
            {"mock": residency},
            state=lambda: writer.scheduler.state,
            post=lambda given: writer.post(given),  # noqa: PLW0108  # made below
            order_s=10,
            now=clock.now,
        )
        writer = Writer(
            lambda state: Scheduler(settings, RollMux(), state),
            MemoryJournal(),
            clock,
            actuator.perform,
            start_of(nodes),
            prompt=(actuator.on_facts,),
        )
        async with anyio.create_task_group() as tasks:
            await tasks.start(actuator.run)
            await tasks.start(writer.run)
            made = Stage(writer, actuator, backend, residency)
            await made.wait_for(lambda: all(node.status is m.NodeStatus.UP for node in made.state.nodes.values()))
            yield made
            assert made.writer.scheduler is not None
            invariants.check(made.state)
            tasks.cancel_scope.cancel()
        assert '"violation"' not in record.read_text(), "the witness of the hardware"

    return run
