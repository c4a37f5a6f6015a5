"""A scheduler and everybody it talks to, without any IO: jobs that go round their cycle, drivers that do what they are
told at once, and backends that see clean GPUs.

What the scheduler is given comes in batches, made before the clock runs: timed are its decisions and nothing else.
"""

from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Decision
from rollmuxd.core.effects import Observe, Perform
from rollmuxd.core.facts import Fact, SlotGranted
from rollmuxd.core.inputs import (
    GpuObservation,
    Heartbeat,
    HostObserved,
    HostSpec,
    Input,
    NodeSpec,
    OpenSession,
    OrderDone,
    RegisterJob,
    ReleaseSlot,
    RequestSlot,
    Start,
    Tick,
)
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies.rollmux import RollMux

GPUS: Final = 8
CONFIG: Final = Config(drivers={"mock": DriverTraits(idempotent=True, probes=True)})
PHASES: Final = ("rollout", "train")


def inventory(rollout: int, train: int) -> Start:
    """Hosts of one node each, named and made as a configuration would name and make them."""
    names = [(f"r{n}", "rollout", 1.85, 96_000) for n in range(rollout)]
    names += [(f"t{n}", "train", 5.28, 80_000) for n in range(train)]
    return Start(
        hosts=tuple(HostSpec(host, "mock", 2_000_000) for host, *_ in names),
        nodes=tuple(
            NodeSpec(
                id=f"{host}/gpu0-{GPUS - 1}",
                host=host,
                gpus=tuple(f"{host}/gpu{n}" for n in range(GPUS)),
                pools=(pool,),
                gpu_mb=gpu_mb,
                price_per_gpu_hour=price,
            )
            for host, pool, price, gpu_mb in names
        ),
    )


def job_spec(name: str, times: tuple[int, int], *, slo: float | None = None, width: int = 1) -> JobSpec:
    """A job that keeps some of each GPU that it uses, and so has to be loaded and parked."""
    return JobSpec(
        name=name,
        phases=tuple(PhaseSpec(phase, (phase,), planned_ms=took) for phase, took in zip(PHASES, times, strict=True)),
        wants=(Want("rollout", nodes=width), Want("train", nodes=width)),
        states=tuple(StateSpec(pool, gpu_mb=60_000, ram_mb=200_000, driver="mock") for pool in PHASES),
        slo=slo,
    )


class World:
    """One scheduler on ``start``'s nodes, all of them up. ``hear`` is told all facts."""

    def __init__(self, start: Start, hear: Callable[[Sequence[Fact]], None] | None = None) -> None:
        self.core = Scheduler(CONFIG, RollMux())
        self.now = 1_000_000_000_000
        self.observations = {node.host: tuple(GpuObservation(gpu, 0) for gpu in node.gpus) for node in start.nodes}
        #: inputs that are still to be handled
        self.inbox: deque[Input] = deque()
        self.sessions: dict[str, str] = {}
        #: what a job's heartbeat says of its slot, while it has one
        self._running: dict[str, str] = {}
        self._asked: dict[str, int] = {}
        self._beats: deque[str] = deque()
        self._hear = hear
        self.take(start, self.core.handle(start, self.now))
        self.run_out()

    def register(self, spec: JobSpec) -> str:
        """A job, and its process; which asks for nothing yet."""
        decision = self._tell(RegisterJob("team", "someone", spec))
        job = decision.answer.job
        assert job is not None
        opened = self._tell(OpenSession(job, pid=1, host="box", started=spec.name)).answer.session
        assert opened is not None
        self.sessions[job] = opened
        self._beats.append(job)
        return job

    def begin(self) -> None:
        """Let every job ask for its first phase."""
        for job in self.sessions:
            self._ask(job)

    def _tell(self, given: Input) -> Decision:
        decision = self.core.handle(given, self.now)
        self.take(given, decision)
        return decision

    def run_out(self) -> None:
        """Handle all that is there, and what comes of it."""
        while self.inbox:
            self._tell(self.inbox.popleft())

    # ---- one batch -------------------------------------------------------------------------------------------------

    def batch(self, turns: int, beats: int) -> list[Input]:
        """The next inputs: of slots and orders, and heartbeats in between."""
        slots: list[Input] = [self.inbox.popleft() for _ in range(min(turns, len(self.inbox)))]
        leaving = {given.slot for given in slots if isinstance(given, ReleaseSlot)}
        made: list[Input] = []
        for number, given in enumerate(slots):
            made.append(given)
            made += (
                self._beat(leaving) for _ in range(beats * (number + 1) // len(slots) - beats * number // len(slots))
            )
        return made

    def beat_all(self) -> None:
        """Let every process be heard of."""
        for session in self.sessions.values():
            self._tell(Heartbeat(session))

    def _beat(self, leaving: set[str]) -> Heartbeat:
        job = self._beats[0]
        self._beats.rotate(-1)
        slot = self._running.get(job)
        if slot is None or slot in leaving:
            return Heartbeat(self.sessions[job])
        return Heartbeat(self.sessions[job], slot, 10, 100)

    def take(self, given: Input, decision: Decision) -> None:
        """What a decision leads to."""
        if self._hear is not None and decision.facts:
            self._hear(decision.facts)
        for fact in decision.facts:
            if isinstance(fact, SlotGranted):
                self._running[self.core.state.slots[fact.slot].job] = fact.slot
                self.inbox.append(ReleaseSlot(fact.slot, fact.fence))
        for effect in decision.effects:
            if isinstance(effect, Perform):
                node = self.core.state.nodes[self.core.state.orders[effect.order].node]
                self.inbox.append(OrderDone(effect.order, self.observations[node.host]))
            elif isinstance(effect, Observe):
                self.inbox.append(HostObserved(effect.host, self.observations[effect.host], "boot"))
        if isinstance(given, ReleaseSlot):
            job = self.core.state.slots[given.slot].job
            self._running.pop(job, None)
            self._ask(job)

    def _ask(self, job: str) -> None:
        count = self._asked[job] = self._asked.get(job, 0) + 1
        self.inbox.append(RequestSlot(job, self.sessions[job], PHASES[(count - 1) % 2], f"{job}-{count}"))

    def tick(self, ms: int = 1) -> None:
        """Time passes."""
        self.now += ms
        due = self.core.deadline()
        if due is not None and due <= self.now:
            self._tell(Tick())
