"""Phase fidelity: every request, grant, load, park and release of every iteration, through the scheduler as live.

The world plays all that the daemon talks to: the jobs' processes (which ask, work, release, and ask again), the
residency drivers (which take the time that moving a state takes) and the backends (which see what is on the GPUs).
It believes nothing that the scheduler says about GPUs: what is on them is its own book
(:mod:`~rollmuxd.sim.machines`), and backends report from that. Every call is answered, and every order is
carried out; a subclass that overrides public methods of :class:`World` may change that.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core import invariants
from rollmuxd.core.config import Config, DriverTraits, Moves
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Effect, Observe, Perform
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Fence, GpuId, HostId, JobId, LaunchId, Millis, PoolName, SessionId, SlotId
from rollmuxd.core.model import OrderKind, Slot, SlotStatus
from rollmuxd.core.order import find_phase
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import Movable, PhaseSpec, StateSpec
from rollmuxd.core.state import State, state_key
from rollmuxd.explain.explainer import Explainer
from rollmuxd.sim.fluid import WORK
from rollmuxd.sim.inventory import Inventory, Told, TooFewNodes, with_enough
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.machines import Machines, Move, key_of
from rollmuxd.sim.meter import Meter
from rollmuxd.sim.outcome import JobOutcome, Outcome
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Impossible, SimJob, Workload, by_arrival

#: sessions are renewed twice in this time
LEASE_MS = 3_600_000
#: a state that says nothing of its size on a GPU has this much there, so that it can be seen
UNSAID_MB = 40_000
#: how often a process whose tail nobody could use says again how far it is
TAIL_ASKED_MS = 5_000
#: moving the unfinished responses of a tail onto the GPUs that it keeps (research 2.5: at most 3 s)
TAIL_MOVED_MS = 3_000
#: the side phase that comes first, and once
INIT = "init"
#: another that nobody said the length of takes this
ASIDE_MS = 5_000
#: and comes once in so many iterations where nobody said how often
ASIDE_EVERY = 2
#: who is started again by every move has to come to the end of an iteration between two
MOVE_RELAUNCHED_MS = 900_000
#: inputs between two checks of every invariant over the whole state
CHECK_EVERY = 2_000
#: time after the last job's end in which everything is to be cleared away
SETTLE_MS = 3_600_000


#: the facts that the bill is made of
METERED = frozenset((f.JobPlaced, f.PlacementEnded, f.MovePlanned, f.MoveEnded, f.MoveAbandoned))


class Listener:
    """Hears of everything that the scheduler is given, and decides."""

    def before(self, core: Scheduler, now: Millis, given: i.Input) -> None:
        """The scheduler is about to be given this."""

    def hear(self, now: Millis, given: i.Input, decision: Decision, state: State) -> None:
        """One decision, in the order in which they were made."""

    def end(self, now: Millis) -> None:
        """Every job has ended, and what they left has had its time to go."""


class Process(Struct):
    """A job's process, as the world plays it: one run after the other."""

    job: SimJob
    outcome: JobOutcome
    name: JobId = ""
    #: grows with every end of a process: what was planned for an earlier one is void
    life: int = 0
    run: int = 0
    session: SessionId = ""
    #: index into ``job.series``: iterations finished in its life
    step: int = 0
    #: index into the cycle; -1: ``init``
    at: int = -1
    #: side phases that come before the next iteration, the first of them at hand
    aside: list[PhaseSpec] = []
    requests: int = 0
    #: what it waits for
    request: i.NextRequest | None = None
    #: the slot that it holds, and its fence
    slot: SlotId = ""
    fence: Fence = Fence(0, 0)
    #: since when its phase runs, and on how many nodes of each pool
    running: tuple[Millis, dict[PoolName, float]] | None = None
    #: when the phase at hand ends
    ends_ms: Millis = 0
    #: the iteration at hand: when it began (None: not yet), and what it would have taken alone
    began_ms: Millis | None = None
    solo_ms: Millis = 0
    #: its tail was consolidated
    shrunk: bool = False
    #: the job has ended
    gone: bool = False

    # ---- in a world whose processes end before their jobs do

    alive: bool = True
    #: which of its job's processes it is, where a backend starts them
    launch: LaunchId = ""
    #: it says nothing, and hears nothing
    silent: bool = False
    #: the phase at hand does not come to an end
    stuck: bool = False
    #: it has a call to repeat
    retrying: bool = False


#: what a process does with the answer to its call
Then: TypeAlias = Callable[[Process, Answer], None]


def run(
    workload: Workload,
    contender: PolicyUnderTest,
    *,
    seed: int,
    accounting: str,
    listeners: Sequence[Listener] = (),
    hear: Callable[[f.Fact], None] | None = None,
    progress: Callable[[int], None] | None = None,
    make: "Callable[..., World] | None" = None,
) -> Outcome:
    """One contender on one workload, to its end. ``make``: a world, from what :class:`World` takes.

    Raises:
        BrokenInvariant: a promise was broken, or a job waits for ever; the message has the seed and the last facts.
        Impossible: a job is wider than any inventory.
    """
    workload.check()

    def attempt(stretch: float, told: Told) -> Outcome:
        return (make or World)(workload, contender, seed, accounting, stretch, listeners, told, progress).run()

    return with_enough(workload, attempt, hear)


class World:
    """One scheduler, its clients and its machines, in simulated time."""

    def __init__(
        self,
        workload: Workload,
        contender: PolicyUnderTest,
        seed: int,
        accounting: str,
        stretch: float = 1.2,
        listeners: Sequence[Listener] = (),
        hear: Callable[[f.Fact], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        contender = contender.within(workload, "phase")
        self.workload, self.policy_under_test, self.seed = workload, contender, seed
        self.by_work = accounting == WORK
        self.jobs = by_arrival([contender.adapt(job) for job in workload.jobs])
        self.inventory = Inventory(workload, self.jobs, stretch=stretch)
        self.machines = Machines(self.inventory)
        self.kernel = Kernel()
        self.config = self.make_config()
        self.core = Scheduler(self.config, contender.policy(seed))
        self.meter = Meter(workload, self.inventory.pool_of)
        self.listeners, self.hear, self.progress = list(listeners), hear, progress
        self.outcome = Outcome(contender.name, workload.name, seed, "phase", accounting)
        self.digest = hashlib.sha256()
        self.processes: dict[JobId, Process] = {}
        self.waiting_to_end = 0
        #: the last facts, for the message about a broken promise
        self.last: deque[f.Fact] = deque(maxlen=20)

    def make_config(self) -> Config:
        """What the scheduler is configured with: drivers that do what they are asked, and leases that last."""
        names = {kept.driver: None for job in self.jobs for kept in job.spec.states}
        again = any(job.spec.movable is Movable.RELAUNCH for job in self.jobs)
        config = Config(
            max_jobs=len(self.jobs) + 1,
            moves=Moves.ON,
            moves_at_a_time=len(self.jobs) + 1,
            move_every_ms=self.policy_under_test.move_every_ms or (MOVE_RELAUNCHED_MS if again else 0),
            move_takes_ms=self.policy_under_test.move_ms(),
        )
        config = replace(config, **self.policy_under_test.estimates)
        drivers = dict.fromkeys(names, DriverTraits(idempotent=True, copies=True))
        return replace(config, lease_ms=LEASE_MS, drivers=drivers)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every job has ended."""
        try:
            self._run()
        except BrokenInvariant as broken:
            facts = "\n".join(f"  {f.encode(fact).decode()}" for fact in self.last)
            raise BrokenInvariant(
                f"{broken} (workload {self.workload.name}, policy {self.policy_under_test.name}, seed {self.seed}, "
                f"at {self.kernel.now} ms; the last facts:\n{facts})"
            ) from broken
        return self.outcome

    def _run(self) -> None:
        self.begin()
        latest = self.latest_end()
        while self.waiting_to_end:
            if not self._step(latest):
                self._stuck()
        self.outcome.span_ms = self.kernel.now - (self.jobs[0].arrives_ms if self.jobs else 0)
        until = self.kernel.now + self.settle_ms()
        while self._step(until):
            pass
        self.meter.until(self.kernel.now)
        self.outcome.pools, self.outcome.cost_curve = list(self.meter.pools.values()), self.meter.curve
        self.outcome.facts_digest = self.digest.hexdigest()
        invariants.check(self.core.state)
        for listener in self.listeners:
            listener.end(self.kernel.now)
        self.outcome.wall_s = time.perf_counter() - self.began

    def begin(self) -> None:
        """The daemon starts; arrivals and heartbeats are planned."""
        self.tell(self.inventory.start)
        for job in self.jobs:
            self.kernel.at(job.arrives_ms, self.arrive, job)
        self.waiting_to_end = len(self.jobs)
        if self.jobs:
            self.kernel.at(self.jobs[0].arrives_ms, self.beat_all)

    def latest_end(self) -> Millis | None:
        """When every job must have ended; None: when nothing more is to happen."""
        return None

    def settle_ms(self) -> Millis:
        """Time after the last job's end in which everything is to be cleared away."""
        return SETTLE_MS

    def deadline(self) -> Millis | None:
        """When the daemon's clock is to report next."""
        return self.core.deadline()

    def _step(self, until: Millis | None) -> bool:
        """Let the next thing happen; False where nothing is to happen by then."""
        when, due = self.kernel.next_at(), self.deadline()
        if due is not None and (when is None or due <= when):
            if until is not None and due > until:
                return False
            self.kernel.now = max(self.kernel.now, due)
            self.report(i.Tick())
            return True
        if when is None or (until is not None and when > until):
            return False
        self.kernel.step()
        return True

    def _stuck(self) -> None:
        names = [made.name for made in self.outcome.jobs if made.ended_ms is None]
        states = ", ".join(
            f"{job.id} is {job.status} ({job.reason})" for job in self.core.state.jobs.values() if job.live
        )
        raise BrokenInvariant(f"every_job_ends: {', '.join(names[:5])} never ended; {states}")

    # ---- talking to the daemon ---------------------------------------------------------------------------------------

    def tell(self, given: i.Input) -> Decision:
        """Hand one input to the scheduler, and let what it decides happen.

        Raises:
            Rejected: it is refused.
        """
        for listener in self.listeners:
            listener.before(self.core, self.kernel.now, given)
        decision = self.core.handle(given, self.kernel.now)
        self.keep(given, decision)
        heeded = self.heeded
        for fact in decision.facts:
            if type(fact) in heeded:
                heeded[type(fact)](self, fact)
        for effect in decision.effects:
            self.do(effect)
        return decision

    def keep(self, given: i.Input, decision: Decision) -> None:
        """The decision's facts become durable."""
        outcome = self.outcome
        outcome.events += 1
        if outcome.events % CHECK_EVERY == 0:
            invariants.check(self.core.state)
        now = self.kernel.now
        facts = decision.facts
        self.last.extend(facts)
        for listener in self.listeners:
            listener.hear(now, given, decision, self.core.state)
        if not facts:
            return
        outcome.facts += len(facts)
        self.write(list(map(f.encode, facts)))
        for fact in facts:
            if type(fact) in METERED:
                self.meter.hear(fact)
        if self.hear is not None:
            for fact in facts:
                self.hear(fact)

    def write(self, bodies: list[bytes]) -> None:
        """The journal: facts, as it keeps them."""
        self.digest.update(b"".join(bodies))

    def call(self, process: Process, given: i.Input, then: Then | None = None) -> None:
        """A process calls, and does what follows from the answer."""
        answer = self.tell(given).answer
        if then is not None:
            then(process, answer)

    def report(self, given: i.Input) -> None:
        """A backend, a driver or the clock reports."""
        self.tell(given)

    def later(self, process: Process, wait: Millis, what: Callable[[Process], None]) -> None:
        """Let the process do it after a while, if it is the same by then."""
        self.kernel.after(wait, self._if_same, process, process.life, what)

    def _if_same(self, process: Process, life: int, what: Callable[[Process], None]) -> None:
        if process.life == life:
            what(process)

    def do(self, effect: Effect) -> None:
        """What the scheduler wants of a driver or a backend."""
        if type(effect) is Perform:  # by far the most
            self.perform(effect)
        elif type(effect) is Observe:
            self.observe(effect.host)
        else:
            raise BrokenInvariant(f"{effect}, and nothing went wrong")

    # ---- jobs' processes ---------------------------------------------------------------------------------------------

    def arrive(self, job: SimJob) -> None:
        """A job registers, its process opens a session and asks for its first phase."""
        made = JobOutcome(job.name, job.kind, job.spec.slo, job.arrives_ms)
        self.outcome.jobs.append(made)
        process = Process(job, made)
        began = time.perf_counter()
        self.register(process)
        self.outcome.decision_us.append((time.perf_counter() - began) * 1e6)
        if self.workload.on_demand:
            self.check_placed(process)
        if not self.by_work:
            self.kernel.at(job.arrives_ms + job.lasts_ms, self.end, process)

    def check_placed(self, process: Process) -> None:
        """Raise TooFewNodes where a job that has come has to wait for nodes to be bought."""
        if self.core.state.jobs[process.name].group is None:
            why = Explainer(self.core.context).why_job_waits(process.name, self.kernel.now).text
            raise TooFewNodes(f"job {process.job.name} ({process.job.kind}) waits: {why}")

    def register(self, process: Process) -> None:
        """A run begins, from the last finished iteration."""
        self.rewind(process)
        key = self.idempotency_key(process)
        self.call(process, i.RegisterJob("team", "sim", process.job.spec, key), self.registered)

    def idempotency_key(self, process: Process) -> str:
        """The same for each try of one registration; "" where the first is answered."""
        return ""

    def rewind(self, process: Process) -> None:
        """A process begins with its engines, and with the first phase of an iteration."""
        process.at, process.aside = -1 if _init_of(process.job) is not None else 0, []

    def registered(self, process: Process, answer: Answer) -> None:
        """The job is known; its process opens a session, unless a backend is to start it."""
        assert answer.job is not None
        process.name = answer.job
        job = self.core.state.jobs[answer.job]
        process.run = job.run
        self.processes[answer.job] = process
        if job.group is not None:  # the fact came before the process was known
            self._first_placed(process)
        if job.spec.launch is None:
            self.open(process, job.idempotency_key)

    def open(self, process: Process, key: str) -> None:
        """The process says that it is there."""
        started = str(self.kernel.now)
        self.call(process, i.OpenSession(process.name, key, pid=1, host="sim", started=started), self.opened)

    def opened(self, process: Process, answer: Answer) -> None:
        """The process has its session, and asks for its first phase."""
        assert answer.session is not None
        process.session = answer.session
        self.ask(process)

    def _placed(self, fact: f.JobPlaced) -> None:
        process = self.processes.get(fact.job)
        if process is not None and process.outcome.placed_ms is None:
            self._first_placed(process)

    def _first_placed(self, process: Process) -> None:
        if process.outcome.placed_ms is None:
            process.outcome.placed_ms = self.kernel.now
            process.outcome.admission = self.core.state.jobs[process.name].admission
            if process.began_ms is not None:  # waiting for admission is nobody's slowdown
                process.began_ms = self.kernel.now

    def ask(self, process: Process) -> None:
        """The process asks for the phase that comes next."""
        process.request = self._next_request(process)
        self.ask_again(process)

    def ask_again(self, process: Process) -> None:
        """It asks for what it waits for, by the same name: the same slot."""
        if process.request is not None and not process.slot:
            request = process.request
            given = i.RequestSlot(process.name, process.session, request.phase, request.request_id)
            self.call(process, given, self.asked)

    def asked(self, process: Process, answer: Answer) -> None:
        """The request is known; that it is granted is a fact."""

    def _next_request(self, process: Process) -> i.NextRequest:
        process.requests += 1
        if process.at < 0:
            return i.NextRequest(INIT, f"{INIT}-{process.requests}")
        if process.aside:
            return i.NextRequest(process.aside[0].name, f"aside-{process.requests}")
        if process.at == 0 and process.request is None:
            process.began_ms, process.solo_ms = self.kernel.now, 0
        return i.NextRequest(process.job.spec.phases[process.at].name, str(process.requests))

    def _granted(self, fact: f.SlotGranted) -> None:
        slot = self.core.state.slots[fact.slot]
        self.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        process = self.processes[slot.job]
        if self.hears(process, slot):
            self.begin_phase(process, slot)

    def hears(self, process: Process, slot: Slot) -> bool:
        """Whether the process hears of this grant."""
        return True

    def begin_phase(self, process: Process, slot: Slot) -> None:
        """The phase runs, for as long as it takes on the GPUs that it got."""
        assert slot.fence is not None
        now = self.kernel.now
        process.request, process.slot, process.fence, process.shrunk = None, slot.id, slot.fence, False
        if process.at < 0:
            init = _init_of(process.job)
            took = 0 if init is None else init.planned_ms or 0
        elif process.aside:
            planned = process.aside[0].planned_ms
            took = ASIDE_MS if planned is None else planned
        else:
            took = process.job.series[process.step % len(process.job.series)][process.at]
            process.solo_ms += took
            took = self._spread(process, took)
        process.running = (now, self._nodes_of(slot))
        tail = None
        if process.at == 0 and process.job.tail_from and slot.gpus and not process.aside:
            took, tail = self._on_a_part(process, slot, took)
        process.ends_ms = now + took
        self.kernel.at(process.ends_ms, self.phase_over, process, slot.id)
        if tail is not None:
            self.kernel.at(now + tail, self.tail_begins, process, slot.id)

    def _spread(self, process: Process, took: Millis) -> Millis:
        """What the phase takes where its job sits on a wider pool than it wants: less by as much (data parallel)."""
        spec = process.job.spec
        pools = spec.phases[process.at].pools
        wanted = sum(want.nodes for want in spec.wants if want.pool in pools)
        has = len(self.core.state.jobs[process.name].pins[pools[0]])
        return took * wanted // has if len(pools) == 1 and has > wanted else took

    def _on_a_part(self, process: Process, slot: Slot, took: Millis) -> tuple[Millis, Millis | None]:
        """What the phase takes on its GPUs, and after what time its tail begins; None: nothing can be given back.

        Until 80 % of the responses are done the work is spread over the GPUs, so on fewer it takes longer by as much;
        the rest waits for the longest responses, whatever the GPUs.
        """
        state = self.core.state
        job, phase = state.jobs[slot.job], find_phase(state, slot.job, slot.phase)
        assert phase is not None
        whole = sum(len(state.nodes[node].gpus) for node in state.phase_nodes(job, phase))
        body = round(took * process.job.tail_from[process.step % len(process.job.tail_from)])
        slower = body * whole // len(slot.gpus)
        has_all = len(slot.gpus) == whole or process.job.grows  # what is scored begins its tails on all
        return slower + took - body, slower if has_all and 0 < phase.min_gpus < len(slot.gpus) else None

    def tail_begins(self, process: Process, slot: SlotId) -> None:
        """The process says how far it is; asked to, it consolidates its tail and gives GPUs back."""
        if process.slot != slot or process.shrunk:
            return
        self.call(process, i.Heartbeat(process.session, slot, 80, 100), self._tail_told)

    def _tail_told(self, process: Process, answer: Answer) -> None:
        wish = next((it for it in answer.directives if it.kind == "shrink"), None)
        if not process.slot:
            return  # the answer was long in coming
        if wish is not None:
            process.shrunk = True
            self.kernel.after(TAIL_MOVED_MS, self.shrink, process, process.slot, wish.keep)
            if process.job.grows:
                self.kernel.after(TAIL_MOVED_MS + TAIL_ASKED_MS, self.tail_goes_on, process, process.slot)
        elif self.kernel.now + TAIL_ASKED_MS < process.ends_ms:
            self.kernel.after(TAIL_ASKED_MS, self.tail_begins, process, process.slot)

    def shrink(self, process: Process, slot: SlotId, keep: tuple[GpuId, ...]) -> None:
        """GPUs that are given back are empty; those that are kept go on."""
        if process.slot != slot:
            return
        held = self.core.state.slots[slot].gpus
        freed = [gpu for gpu in held if gpu not in keep]
        left_mb = {spec.pool: spec.leftover_mb for spec in process.job.spec.states}
        self.machines.give_back(process.name, process.run, freed, left_mb)
        assert process.running is not None
        _, nodes = process.running
        self.charge(process)
        process.running = (self.kernel.now, {pool: count * len(keep) / len(held) for pool, count in nodes.items()})
        self.call(process, i.ShrinkSlot(slot, process.fence, keep, seen=self.machines.sights(freed)))

    def tail_goes_on(self, process: Process, slot: SlotId) -> None:
        """The process says how far its tail is; what it is offered back it takes."""
        if process.slot == slot and process.shrunk:
            self.call(process, i.Heartbeat(process.session, slot, 90, 100), self._offered)

    def _offered(self, process: Process, answer: Answer) -> None:
        slot = process.slot
        if slot and any(it.kind == "grow" for it in answer.directives):
            self.call(process, i.GrowSlot(slot, process.fence), self._grown)
        elif slot and self.kernel.now + TAIL_ASKED_MS < process.ends_ms:
            self.kernel.after(TAIL_ASKED_MS, self.tail_goes_on, process, slot)

    def _grown(self, process: Process, answer: Answer) -> None:
        """Its tail is spread over all GPUs of its nodes again, and may shrink again."""
        slot = self.core.state.slots.get(process.slot)
        if slot is None or slot.status is not SlotStatus.RUNNING or not process.shrunk:
            return
        self.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        phase = find_phase(self.core.state, slot.job, slot.phase)
        for kept in (self.core.state.states[key] for key in self.core.state.jobs[slot.job].states):
            here = [gpu for gpu in self.core.state.nodes[kept.node].gpus if gpu in slot.gpus]
            if phase is not None and kept.pool in phase.pools:
                key = key_of(slot.job, slot.run, kept.pool, kept.node)
                self.machines.take_back(key, here, kept.spec.gpu_mb or UNSAID_MB)
        self.charge(process)
        process.shrunk, process.running = False, (self.kernel.now, self._nodes_of(slot))
        self.kernel.after(TAIL_ASKED_MS, self.tail_begins, process, slot.id)

    def _nodes_of(self, slot: Slot) -> dict[PoolName, float]:
        """How many nodes of each pool the slot's GPUs make."""
        nodes: dict[PoolName, float] = {}
        for gpu in slot.gpus:
            pool, share = self.inventory.share_of[gpu]
            nodes[pool] = nodes.get(pool, 0.0) + share
        return nodes

    def phase_over(self, process: Process, slot: SlotId) -> None:
        """The process gives its slot back, and asks for the next at once if it has nothing to do in between."""
        if process.slot != slot:
            return
        self.charge(process)
        phases = process.job.spec.phases
        process.slot = ""
        if process.aside:
            process.aside = process.aside[1:]
        else:
            process.at += 1
        seen = () if process.job.spec.states else self.machines.sights(self.core.state.slots[slot].gpus)
        if process.at == len(phases):
            process.at = 0
            self._iteration_done(process)
            if self.by_work and process.step >= process.job.work:
                self.call(process, i.ReleaseSlot(slot, process.fence, seen), self._worked)
                return
            process.aside = _asides_due(process)
        gap = 0 if process.aside else phases[process.at].gap_ms
        if process.at > 0:
            process.solo_ms += gap
        if gap:
            self.call(process, i.ReleaseSlot(slot, process.fence, seen), self._rests)
        else:
            process.request = self._next_request(process)
            self.call(process, i.ReleaseSlot(slot, process.fence, seen, next=process.request), self.released)

    def released(self, process: Process, answer: Answer) -> None:
        """The process waits for the slot that it has asked for with the release."""
        assert answer.next_slot is not None, answer.next_refused

    def _rests(self, process: Process, answer: Answer) -> None:
        self.later(process, process.job.spec.phases[process.at].gap_ms, self.ask)

    def _worked(self, process: Process, answer: Answer) -> None:
        self.end(process)

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
        process.life += 1
        process.slot, process.request = "", None
        self.charge(process)
        if process.name:
            self.call(process, i.EndJob(process.name, by="sim"), self.ended)
        else:
            self.ended(process)

    def ended(self, process: Process, answer: Answer | None = None) -> None:
        """The daemon knows."""
        process.outcome.ended_ms = self.kernel.now
        job = self.core.state.jobs.get(process.name)
        if job is not None:
            process.outcome.warm, process.outcome.cold = job.progress.loads_warm, job.progress.loads_cold
            process.outcome.parks = job.progress.parks
        self.processes.pop(process.name, None)
        self.waiting_to_end -= 1
        if self.progress is not None:
            self.progress(len(self.jobs) - self.waiting_to_end)

    def beat_all(self) -> None:
        """Every process is heard of."""
        for process in list(self.processes.values()):
            if process.session:
                self.beat(process)
        if self.waiting_to_end:
            if len(self.outcome.jobs) == len(self.jobs):
                self.check_progress()
            self.kernel.after(self.config.lease_ms // 2, self.beat_all)

    def beat(self, process: Process) -> None:
        """The process renews its session."""
        self.call(process, i.Heartbeat(process.session))

    def check_progress(self) -> None:
        """Raise Impossible where all jobs that are left wait, and none is there to make room for them."""
        jobs = [self.core.state.jobs[name] for name in self.processes]
        if not any(job.group is not None for job in jobs):
            why = Explainer(self.core.context).why_job_waits(jobs[0].id, self.kernel.now).text
            raise Impossible(f"job {jobs[0].spec.name} can never be placed, though everybody else is gone: {why}")

    def charge(self, process: Process) -> None:
        """The phase at hand ran until now."""
        if process.running is not None:
            began, nodes = process.running
            process.running = None
            for pool, count in nodes.items():
                self.meter.pools[pool].busy_node_ms += count * (self.kernel.now - began)

    # ---- residency drivers and backends ------------------------------------------------------------------------------

    def perform(self, effect: Perform) -> None:
        """A driver gets an order: it takes its time."""
        state = self.core.state
        order = state.orders[effect.order]
        kept = state.states[state_key(order.job, order.pool, order.node)]
        host = state.nodes[order.node].host
        gpus = tuple(state.nodes[order.node].gpus)
        slot = state.slots.get(order.slot or "")
        if order.kind is OrderKind.LOAD and slot is not None and slot.gpus != gpus:
            gpus = tuple(gpu for gpu in gpus if gpu in slot.gpus)
        move = Move(
            order.id,
            order.kind,
            order.job,
            order.run,
            key_of(order.job, order.run, order.pool, order.node),
            host,
            gpus,
            gpu_mb=kept.spec.gpu_mb or UNSAID_MB,
            left_mb=kept.spec.leftover_mb if order.kind is OrderKind.PARK else 0,
        )
        if order.kind is OrderKind.LOAD:
            took = self._load_ms(order.job, kept.spec, warm=kept.warm or order.source is not None)
            if order.source is not None:
                took += self.policy_under_test.move_ms() // max(1, len(state.jobs[order.job].spec.states))
        else:
            took = kept.spec.park_ms if order.kind is OrderKind.PARK else 0
        self.begin_move(move, took)

    def begin_move(self, move: Move, took: Millis) -> None:
        """The driver begins: what is loaded is on its GPUs from now on."""
        if move.kind is OrderKind.LOAD:
            self.machines.nobody_else_is_on(move.gpus, move.job, move.run)
            self.machines.load(move)
        self.kernel.after(took, self.performed, move)

    def _load_ms(self, job: JobId, spec: StateSpec, *, warm: bool) -> Millis:
        """A warm start; or the first load: nothing if an ``init`` phase builds the engine, else a cold start."""
        process = self.processes.get(job)
        starts = process.job.starts.get(spec.pool) if process is not None else None
        if warm or process is None:
            return spec.load_ms
        if _init_of(process.job) is not None:
            return 0
        return starts.cold_ms if starts is not None and starts.cold_ms else spec.load_ms

    def performed(self, move: Move) -> None:
        """The driver has done it, and says so."""
        if move.kind is not OrderKind.LOAD:
            self.take(move)
        self.say_done(move)

    def take(self, move: Move) -> None:
        """What is parked or discarded leaves its GPUs."""
        self.machines.take(move, left_mb=move.left_mb)

    def say_done(self, move: Move) -> None:
        """The daemon hears of what was done, together with what the backend saw afterwards."""
        if move.order in self.core.state.orders:
            self.report(i.OrderDone(move.order, self.seen_after(move)))

    def seen_after(self, move: Move) -> tuple[i.GpuObservation, ...]:
        """What the backend sees on the GPUs that were cleared."""
        return () if move.kind is OrderKind.LOAD else self.machines.sights(move.gpus)

    def observe(self, host: HostId) -> None:
        """A backend is asked what is on a host."""
        self.kernel.after(0, self.observed, host)

    def observed(self, host: HostId) -> None:
        """A backend reports what is there."""
        self.report(i.HostObserved(host, self.machines.sights(self.inventory.gpus_of[host]), self.machines.boot[host]))

    # ---- what facts mean to others than the scheduler ----------------------------------------------------------------

    def _moved(self, fact: f.MoveEnded) -> None:
        process = self.processes.get(fact.job)
        if process is not None:
            process.outcome.moves += 1

    #: what follows from a fact, by its kind
    heeded: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        f.SlotGranted: _granted,
        f.JobPlaced: _placed,
        f.MoveEnded: _moved,
    }


def _init_of(job: SimJob) -> PhaseSpec | None:
    """The side phase in which the job builds its engines, if it has one."""
    return next((phase for phase in job.spec.side if phase.name == INIT), None)


def _asides_due(process: Process) -> list[PhaseSpec]:
    """The side phases that come between the iteration that has ended and the next."""
    others = [phase for phase in process.job.spec.side if phase.name != INIT]
    return [phase for phase in others if process.step % (phase.every or ASIDE_EVERY) == 0]
