"""Phase fidelity: every request, grant, load, park and release of every iteration, through the scheduler as live.

The world plays whoever the daemon talks to: the jobs' processes (which ask, work, release, and ask again), the
residency drivers (which take the time that moving a state takes) and the backends (which see what is on the GPUs).
It believes nothing that the scheduler says about GPUs: what is on them is its own book, and backends report from that.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct, field

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core import invariants
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.decision import Decision
from rollmuxd.core.effects import Effect, Kill, Observe, Perform, Probe
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import (
    Fence,
    GpuId,
    HostId,
    JobId,
    Millis,
    OrderId,
    OrderKind,
    PoolName,
    SessionId,
    SlotId,
    StateSpec,
)
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State, state_key
from rollmuxd.sim.checkers import Witness
from rollmuxd.sim.contender import Contender
from rollmuxd.sim.fluid import WORK
from rollmuxd.sim.inventory import BOOT, Inventory, Told, TooFewNodes, with_enough
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.meter import Meter
from rollmuxd.sim.outcome import JobOutcome, Outcome
from rollmuxd.sim.workload import SimJob, Workload, by_arrival

#: sessions are renewed twice in this time; a simulated process does not forget to
LEASE_MS = 3_600_000
#: a state that says nothing of its size on a GPU has this much there, so that it can be seen
UNSAID_MB = 40_000
#: how often a process whose tail nobody could use says again how far it is
TAIL_ASKED_MS = 5_000
#: moving the unfinished responses of a tail onto the GPUs that it keeps (research 2.5: at most 3 s)
TAIL_MOVED_MS = 3_000
#: facts that the world heeds
_HEEDED = frozenset({f.SlotGranted, f.SlotReleased, f.SlotRevoked, f.SlotLost, f.JobPlaced, f.PlacementEnded})
#: inputs between two checks of every invariant over the whole state; the witness checks at each
CHECK_EVERY = 2_000


class Listener(Protocol):
    """Hears of everything that the scheduler decides."""

    def hear(self, now: Millis, given: i.Input, decision: Decision, state: State) -> None:
        """One decision, in the order in which they were made."""
        ...


class Process(Struct):
    """A job's process, as the world plays it."""

    job: SimJob
    outcome: JobOutcome
    name: JobId = ""
    session: SessionId = ""
    #: index into ``job.series``: iterations begun in its life
    step: int = 0
    #: index into the cycle; -1: ``init``
    at: int = -1
    requests: int = 0
    #: the slot that it holds, and its fence
    slot: SlotId = ""
    fence: Fence = Fence(0, 0)
    granted_ms: Millis = 0
    #: when the phase at hand ends
    ends_ms: Millis = 0
    #: the iteration at hand: when it began (None: not yet), and what it would have taken alone
    began_ms: Millis | None = None
    solo_ms: Millis = 0
    #: its tail was consolidated
    shrunk: bool = False
    gone: bool = False


class Books(Struct):
    """What is really there, whatever anybody believes."""

    #: MB of each state on each GPU, by the state's key
    on_gpu: dict[GpuId, dict[str, int]]
    #: by slot: since when its phase runs, and on how many nodes of each pool
    running: dict[SlotId, tuple[Millis, dict[PoolName, float]]] = field(default_factory=dict)


def run(
    workload: Workload,
    contender: Contender,
    *,
    seed: int,
    accounting: str,
    listeners: Sequence[Listener] = (),
    hear: Callable[[f.Fact], None] | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """One contender on one workload, to its end.

    Raises:
        BrokenInvariant: a promise was broken, or somebody waits for ever; the message has the seed and the last facts.
        Impossible: a job is wider than any inventory.
    """
    workload.check()

    def attempt(stretch: float, told: Told) -> Outcome:
        return World(workload, contender, seed, accounting, stretch, listeners, told, progress).run()

    return with_enough(len(workload.jobs), attempt, hear)


class World:
    """One scheduler, its clients and its machines, in simulated time."""

    def __init__(
        self,
        workload: Workload,
        contender: Contender,
        seed: int,
        accounting: str,
        stretch: float = 1.2,
        listeners: Sequence[Listener] = (),
        hear: Callable[[f.Fact], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        self.workload, self.contender, self.seed = workload, contender, seed
        self.by_work = accounting == WORK
        self.jobs = by_arrival([contender.adapt(job) for job in workload.jobs])
        self.inventory = Inventory(workload, self.jobs, stretch=stretch)
        drivers = {kept.driver: DriverTraits(idempotent=True) for job in self.jobs for kept in job.spec.states}
        self.config = Config(max_jobs=len(self.jobs) + 1, lease_ms=LEASE_MS, drivers=drivers)
        policy = contender.policy(seed)
        self.core = Scheduler(self.config, policy)
        self.witness = Witness(self.config, cap=getattr(policy, "max_group", None))
        self.kernel = Kernel()
        self.meter = Meter(workload, self.inventory.pool_of)
        self.books = Books({gpu: {} for gpus in self.inventory.gpus_of.values() for gpu in gpus})
        self.listeners, self.hear, self.progress = list(listeners), hear, progress
        self.outcome = Outcome(contender.name, workload.name, seed, "phase", accounting)
        self.digest = hashlib.sha256()
        self.processes: dict[JobId, Process] = {}
        self.waiting_to_end = 0
        #: the last facts, for whoever has to find out what went wrong
        self.last: deque[f.Fact] = deque(maxlen=20)
        self._host_of = {gpu: host for host, gpus in self.inventory.gpus_of.items() for gpu in gpus}

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every job has ended."""
        try:
            self._run()
        except BrokenInvariant as broken:
            facts = "\n".join(f"  {f.encode(fact).decode()}" for fact in self.last)
            raise BrokenInvariant(
                f"{broken} (workload {self.workload.name}, policy {self.contender.name}, seed {self.seed}, "
                f"at {self.kernel.now} ms; the last facts:\n{facts})"
            ) from broken
        return self._finish()

    def _run(self) -> None:
        self.tell(self.inventory.start)
        for job in self.jobs:
            self.kernel.at(job.arrives_ms, self.arrive, job)
        self.waiting_to_end = len(self.jobs)
        if self.jobs:
            self.kernel.at(self.jobs[0].arrives_ms, self.beat_all)
        while self.waiting_to_end:
            when, due = self.kernel.next_at(), self.core.deadline()
            if due is not None and (when is None or due <= when):
                self.kernel.now = max(self.kernel.now, due)
                self.tell(i.Tick())
                continue
            if when is None:
                self._stuck()
            self.kernel.step()
        invariants.check(self.core.state)

    def _stuck(self) -> None:
        names = [process.job.name for process in self.processes.values() if not process.gone]
        raise BrokenInvariant(f"nothing is left to happen, and {', '.join(names[:5])} never ended")

    def _finish(self) -> Outcome:
        outcome, now = self.outcome, self.kernel.now
        self.meter.until(now)
        outcome.span_ms = now - (self.jobs[0].arrives_ms if self.jobs else 0)
        outcome.pools = list(self.meter.pools.values())
        outcome.cost_curve = self.meter.curve
        outcome.facts_digest = self.digest.hexdigest()
        outcome.wall_s = time.perf_counter() - self.began
        return outcome

    def tell(self, given: i.Input) -> Decision:
        """Hand one input to the scheduler, and let what it decides happen."""
        now = self.kernel.now
        decision = self.core.handle(given, now)
        outcome = self.outcome
        outcome.events += 1
        if outcome.events % CHECK_EVERY == 0:
            invariants.check(self.core.state)
        self.witness.hear(now, given, decision)
        for listener in self.listeners:
            listener.hear(now, given, decision, self.core.state)
        if decision.facts:
            outcome.facts += len(decision.facts)
            self.last.extend(decision.facts)
            for fact in decision.facts:
                self.digest.update(f.encode(fact))
                if self.hear is not None:
                    self.hear(fact)
                if type(fact) in _HEEDED:
                    self._heed(fact)
        for effect in decision.effects:
            self._do(effect)
        return decision

    def _heed(self, fact: f.Fact) -> None:
        """What a fact means to whoever is not the scheduler."""
        match fact:
            case f.SlotGranted():
                self.granted(fact)
            case f.SlotReleased() | f.SlotRevoked() | f.SlotLost():
                self._charge(fact.slot)
            case f.JobPlaced():
                self.meter.hear(fact)
                self.placed(fact.job)
            case f.PlacementEnded():
                self.meter.hear(fact)
            case _:
                raise AssertionError(f"{f.name(fact)} is listed as heeded, and is not")

    def _do(self, effect: Effect) -> None:
        match effect:
            case Perform():
                self.perform(effect)
            case Observe():
                self.kernel.after(0, self.observed, effect.host)
            case Probe():
                pass  # the order is being carried out, and will be reported
            case Kill():
                raise BrokenInvariant(f"job {effect.job} is to be killed, and it was never lost")

    # ---- jobs' processes ---------------------------------------------------------------------------------------------

    def arrive(self, job: SimJob) -> None:
        """A job registers, its process opens a session and asks for its first phase."""
        made = JobOutcome(job.name, job.kind, job.spec.slo, job.arrives_ms)
        self.outcome.jobs.append(made)
        process = Process(job, made, at=-1 if job.spec.side else 0)
        began = time.perf_counter()
        name = self._register(process)
        self.outcome.decision_us.append((time.perf_counter() - began) * 1e6)
        if self.workload.on_demand and self.core.state.jobs[name].group is None:
            raise TooFewNodes
        if not self.by_work:
            self.kernel.at(job.arrives_ms + job.lasts_ms, self.end, process)
        self.ask(process)

    def _register(self, process: Process) -> JobId:
        spec = process.job.spec
        name = self.tell(i.RegisterJob("team", "sim", spec)).answer.job
        assert name is not None
        process.name = name
        self.processes[name] = process
        if self.core.state.jobs[name].group is not None:  # the fact came before the process was known
            self.placed(name)
        session = self.tell(i.OpenSession(name, pid=1, host="sim", started=str(self.kernel.now))).answer.session
        assert session is not None
        process.session = session
        return name

    def placed(self, name: JobId) -> None:
        process = self.processes.get(name)
        if process is not None and process.outcome.placed_ms is None:
            process.outcome.placed_ms = self.kernel.now
            process.outcome.admission = self.core.state.jobs[name].admission
            if process.began_ms is not None:  # waiting for admission is nobody's slowdown
                process.began_ms = self.kernel.now

    def ask(self, process: Process) -> None:
        """The process asks for the phase that comes next."""
        if not process.gone:
            request = self._next_request(process)
            self.tell(i.RequestSlot(process.name, process.session, request.phase, request.request_id))

    def _next_request(self, process: Process) -> i.NextRequest:
        process.requests += 1
        if process.at < 0:
            return i.NextRequest(process.job.spec.side[0].name, f"init-{process.requests}")
        if process.at == 0:
            process.began_ms, process.solo_ms = self.kernel.now, 0
        return i.NextRequest(process.job.spec.phases[process.at].name, str(process.requests))

    def granted(self, fact: f.SlotGranted) -> None:
        """The phase runs, for as long as it takes on the GPUs that it got."""
        slot = self.core.state.slots[fact.slot]
        process = self.processes[slot.job]
        process.slot, process.fence, process.granted_ms, process.shrunk = slot.id, fact.fence, fact.at, False
        if process.at < 0:
            took = process.job.spec.side[0].planned_ms or 0
        else:
            took = process.job.series[process.step % len(process.job.series)][process.at]
            process.solo_ms += took
        nodes: dict[PoolName, float] = {}
        for gpu in slot.gpus:
            pool, share = self.inventory.share_of[gpu]
            nodes[pool] = nodes.get(pool, 0.0) + share
        self.books.running[slot.id] = (fact.at, nodes)
        took, tail = self._on_a_part(process, slot.gpus, took)
        process.ends_ms = fact.at + took
        self.kernel.at(process.ends_ms, self.phase_over, process, slot.id)
        if tail is not None:
            self.kernel.at(fact.at + tail, self.tail_begins, process, slot.id)

    def _on_a_part(self, process: Process, gpus: tuple[GpuId, ...], took: Millis) -> tuple[Millis, Millis | None]:
        """What the phase takes on these GPUs, and after what time its tail begins.

        Until 80 % of the responses are done the work is spread over the GPUs, so on fewer it takes longer by as much;
        the rest waits for the longest responses, whatever the GPUs.
        """
        job = process.job
        if process.at != 0 or not job.tail_from:
            return took, None
        body = round(took * job.tail_from[process.step % len(job.tail_from)])
        whole = sum(len(self.inventory.gpus_of[host]) for host in dict.fromkeys(self._host_of[gpu] for gpu in gpus))
        slower = body * whole // len(gpus)
        return slower + took - body, slower if len(gpus) == whole else None

    def tail_begins(self, process: Process, slot: SlotId) -> None:
        """The process says how far it is; asked to, it consolidates its tail and gives GPUs back."""
        if process.gone or process.slot != slot or process.shrunk:
            return
        answer = self.tell(i.Heartbeat(process.session, slot, 80, 100)).answer
        wish = next((it for it in answer.directives if it.kind == "shrink"), None)
        if wish is not None:
            process.shrunk = True
            self.kernel.after(TAIL_MOVED_MS, self.shrink, process, slot, wish.keep)
        elif self.kernel.now + TAIL_ASKED_MS < process.ends_ms:
            self.kernel.after(TAIL_ASKED_MS, self.tail_begins, process, slot)

    def shrink(self, process: Process, slot: SlotId, keep: tuple[GpuId, ...]) -> None:
        """GPUs that are given back are empty; those that are kept go on."""
        if process.gone or process.slot != slot:
            return
        freed = [gpu for gpu in self.core.state.slots[slot].gpus if gpu not in keep]
        for gpu in freed:
            there = self.books.on_gpu[gpu]
            for key in [key for key in there if key.startswith(f"{process.name}|")]:
                del there[key]
        self._charge(slot)
        _, nodes = self.books.running.get(slot, (0, {}))
        share = len(keep) / (len(keep) + len(freed))
        self.books.running[slot] = (self.kernel.now, {pool: count * share for pool, count in nodes.items()})
        self.tell(i.ShrinkSlot(slot, process.fence, keep, seen=self.sights(freed)))

    def phase_over(self, process: Process, slot: SlotId) -> None:
        """The process gives its slot back, and asks for the next at once if it has nothing to do in between."""
        if process.gone or process.slot != slot:
            return
        phases = process.job.spec.phases
        process.slot = ""
        process.at += 1
        if process.at == len(phases):
            process.at = 0
            self._iteration_done(process)
            if self.by_work and process.step == process.job.work:
                self.tell(i.ReleaseSlot(slot, process.fence))
                self.end(process)
                return
        gap = phases[process.at].gap_ms if process.at >= 0 else 0
        if process.at > 0:
            process.solo_ms += gap
        if gap:
            self.tell(i.ReleaseSlot(slot, process.fence))
            self.kernel.after(gap, self.ask, process)
        else:
            request = self._next_request(process)
            self.tell(i.ReleaseSlot(slot, process.fence, next=request))

    def _iteration_done(self, process: Process) -> None:
        assert process.began_ms is not None
        first_gap = process.job.spec.phases[0].gap_ms
        outcome = process.outcome
        outcome.iterations += 1
        outcome.elapsed_ms += self.kernel.now - process.began_ms + first_gap
        outcome.solo_ms += process.solo_ms + first_gap
        process.step += 1

    def end(self, process: Process) -> None:
        """The job ends, whatever it is at."""
        if process.gone:
            return
        process.gone = True
        if process.slot:
            self._charge(process.slot)
        self.tell(i.EndJob(process.name, by="sim"))
        process.outcome.ended_ms = self.kernel.now
        progress = self.core.state.jobs[process.name].progress
        process.outcome.warm, process.outcome.cold = progress.loads_warm, progress.loads_cold
        process.outcome.parks = progress.parks
        del self.processes[process.name]
        self.waiting_to_end -= 1
        if self.progress is not None:
            self.progress(len(self.jobs) - self.waiting_to_end)

    def beat_all(self) -> None:
        """Every process is heard of."""
        for process in list(self.processes.values()):
            if process.session:
                self.tell(i.Heartbeat(process.session))
        self.kernel.after(LEASE_MS // 2, self.beat_all)

    def _charge(self, slot: SlotId) -> None:
        """The slot's phase ran until now."""
        began, nodes = self.books.running.pop(slot, (0, {}))
        for pool, count in nodes.items():
            self.meter.pools[pool].busy_node_ms += count * (self.kernel.now - began)

    # ---- residency drivers and backends ------------------------------------------------------------------------------

    def perform(self, effect: Perform) -> None:
        """A driver is told an order: it takes its time."""
        order = self.core.state.orders[effect.order]
        key = state_key(order.job, order.pool, order.node)
        kept = self.core.state.states[key]
        took = 0
        if order.kind is OrderKind.LOAD:
            took = self._load_ms(order.job, kept.spec, warm=kept.warm)
            slot = self.core.state.slots.get(order.slot or "")
            host = self.core.state.nodes[order.node].host
            for gpu in self.inventory.gpus_of[host]:
                if slot is None or gpu in slot.gpus:
                    self.books.on_gpu[gpu][key] = kept.spec.gpu_mb or UNSAID_MB
        elif order.kind is OrderKind.PARK:
            took = kept.spec.park_ms
        self.kernel.after(took, self.performed, effect.order)

    def _load_ms(self, job: JobId, spec: StateSpec, *, warm: bool) -> Millis:
        """A warm start; or the first load: nothing if an ``init`` phase builds the engine, else a cold start."""
        process = self.processes.get(job)
        starts = process.job.starts.get(spec.pool) if process is not None else None
        if warm or process is None:
            return spec.load_ms
        if process.job.spec.side:
            return 0
        return starts.cold_ms if starts is not None and starts.cold_ms else spec.load_ms

    def performed(self, name: OrderId) -> None:
        """The driver has done it, and the backend looked."""
        order = self.core.state.orders.get(name)
        if order is None:
            return
        seen: tuple[i.GpuSight, ...] = ()
        if order.kind is not OrderKind.LOAD:
            host = self.core.state.nodes[order.node].host
            key = state_key(order.job, order.pool, order.node)
            kept = self.core.state.states.get(key)
            left = 0 if kept is None or order.kind is OrderKind.DISCARD else kept.spec.leftover_mb
            for gpu in self.inventory.gpus_of[host]:
                self.books.on_gpu[gpu].pop(key, None)
                if left:
                    self.books.on_gpu[gpu][key] = left
            seen = self.sights(self.inventory.gpus_of[host])
        self.tell(i.OrderDone(name, seen))

    def observed(self, host: HostId) -> None:
        """It reports what is there."""
        self.tell(i.HostSeen(host, self.sights(self.inventory.gpus_of[host]), BOOT))

    def sights(self, gpus: Sequence[GpuId]) -> tuple[i.GpuSight, ...]:
        """What a backend sees on GPUs."""
        return tuple(i.GpuSight(gpu, sum(self.books.on_gpu[gpu].values())) for gpu in gpus)
