"""Phase fidelity: every request, grant, load, park and release of every iteration, through the scheduler as live.

The world plays all that the daemon talks to. Jobs' processes ask, work, release, and ask again. Residency drivers take
the time that moving a state takes. Backends see what is on the GPUs. The world believes nothing that the scheduler says
about GPUs. It keeps a book of its own (:mod:`~rollmuxd.sim.machines`), and backends report from that. Every call is
answered, and every order is carried out; a subclass that overrides public methods of :class:`World` may change that.
"""

import hashlib
import time
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config, DriverTraits, Moves
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Effect, Observe, Perform
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Fence, GpuId, HostId, JobId, LaunchId, Millis, OrderId, PoolName, SessionId, SlotId
from rollmuxd.core.model import OrderKind, Slot, nodes_in
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import Movable, PhaseSpec, StateSpec
from rollmuxd.core.state import State, state_key
from rollmuxd.explain.causes import sentence
from rollmuxd.explain.explainer import Explainer
from rollmuxd.sim.execution import INIT, NEVER, Begun, Durations, Execution
from rollmuxd.sim.fillers import DRIVER as FILLER_DRIVER
from rollmuxd.sim.fillers import Fillers
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.machines import Machines, Move, key_of
from rollmuxd.sim.meter import Meter
from rollmuxd.sim.outcome import WORK, JobOutcome, Outcome
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Impossible, SimJob, Workload, by_arrival

#: sessions are renewed twice in this time
LEASE_MS = 3_600_000
#: a state that says nothing of its size on a GPU has this much there, so that it can be seen
UNSAID_MB = 40_000
#: how often a process whose tail no job could use says again how far it is
TAIL_ASKED_MS = 5_000
#: a side phase comes once in so many iterations where the job did not say how often
ASIDE_EVERY = 2
#: a job that every move starts again has to come to the end of an iteration between two
MOVE_RELAUNCHED_MS = 900_000
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
    #: the phase at hand; when its end and the beginning of its tail are planned
    execution: Execution | None = None
    ends_ms: Millis = 0
    tail_ms: Millis | None = None
    #: the iteration at hand: when it began (None: not yet), and what it would have taken alone
    began_ms: Millis | None = None
    solo_ms: Millis = 0
    #: its tail was consolidated
    shrunk: bool = False
    #: of an asynchronous job: batches that were begun and made, grants of its phase, whether it waits for a batch
    begun: int = 0
    made: int = 0
    granted: int = 0
    awaits: bool = False
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


class World:
    """One scheduler, its clients and its machines, in simulated time: one policy on one workload.

    ``hear`` gets every fact, ``progress`` how many jobs have ended. ``executions``: what a phase does.
    """

    def __init__(
        self,
        workload: Workload,
        under_test: PolicyUnderTest,
        seed: int,
        accounting: str,
        hear: Callable[[f.Fact], None] | None = None,
        progress: Callable[[int], None] | None = None,
        executions: Durations | None = None,
    ) -> None:
        self.began = time.perf_counter()
        workload.check()
        under_test = under_test.within(workload, "phase", accounting)
        self.workload, self.policy_under_test, self.seed = workload, under_test, seed
        self.by_work = accounting == WORK
        self.jobs = by_arrival([under_test.adapt(job) for job in workload.jobs])
        self.inventory = Inventory(workload, self.jobs)
        self.machines = Machines(self.inventory)
        self.kernel = Kernel()
        self.executions = executions or Durations()
        self.executions.attach(self.kernel, self.inventory, self.jobs)
        self.config = self.make_config()
        self.core = Scheduler(self.config, under_test.policy(seed))
        self.meter = Meter(workload, self.inventory.pool_of)
        self.listeners: list[Listener] = []
        self.hear, self.progress = hear, progress
        self.outcome = Outcome(under_test.name, workload.name, seed, "phase", accounting)
        self.digest = hashlib.sha256()
        self.processes: dict[JobId, Process] = {}
        #: loads for slots that grow: the job and the slot of each
        self.growing: dict[OrderId, tuple[JobId, SlotId]] = {}
        self.fillers = Fillers(self, workload.fillers)
        self.waiting_to_end = 0
        #: when every job must have ended (None: when nothing more is to happen), and how long all is then cleared away
        self.latest_ms: Millis | None = None
        self.settle_ms: Millis = SETTLE_MS
        #: the last facts, for the message about a broken promise
        self.last: deque[f.Fact] = deque(maxlen=20)

    def make_config(self) -> Config:
        """What the scheduler is configured with: drivers that do what they are asked, and leases that last."""
        names = {kept.driver: None for job in self.jobs for kept in job.spec.states}
        again = any(job.spec.movable is Movable.RELAUNCH for job in self.jobs)
        config = Config(
            max_jobs=len(self.jobs) + self.workload.fillers + 1,
            moves=Moves.ON,
            max_concurrent_moves=len(self.jobs) + 1,
            move_interval_ms=self.policy_under_test.move_interval_ms or (MOVE_RELAUNCHED_MS if again else 0),
            move_cost_ms=self.policy_under_test.move_ms(),
            plan=self.workload.plan,
        )
        config = replace(config, **self.policy_under_test.estimates)
        if self.workload.fillers:
            names[FILLER_DRIVER] = None
        drivers = dict.fromkeys(names, DriverTraits(idempotent=True, copies=True))
        return replace(config, lease_ms=LEASE_MS, drivers=drivers)

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Until every job has ended.

        Raises:
            BrokenInvariant: a promise was broken, or a job waits for ever; the message has the seed and the last facts.
            Impossible: a job is wider than any inventory, or its policy will not place it.
        """
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
        while self.waiting_to_end:
            if not self._step(self.latest_ms):
                self._stuck()
        self.outcome.span_ms = self.kernel.now - (self.jobs[0].arrives_ms if self.jobs else 0)
        self.fillers.end()
        until = self.kernel.now + self.settle_ms
        while self._step(until):
            pass
        self.meter.until(self.kernel.now)
        self.outcome.pools = list(self.meter.pools.values())
        self.outcome.harvest = self.fillers.harvest if self.workload.fillers else None
        self.outcome.facts_digest = self.digest.hexdigest()
        for listener in self.listeners:
            listener.end(self.kernel.now)
        self.outcome.wall_s = time.perf_counter() - self.began

    def begin(self) -> None:
        """The daemon starts; arrivals and heartbeats are planned."""
        self.tell(self.inventory.start)
        self.kernel.at(1, self.fillers.begin)  # every node was seen by then
        for job in self.jobs:
            self.kernel.at(job.arrives_ms, self.arrive, job)
        self.waiting_to_end = len(self.jobs)
        if self.jobs:
            first = self.jobs[0].arrives_ms
            self.kernel.at(min(1, first) if self.workload.fillers else first, self.beat_all)

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
            f"{job.id} is {job.status} ({sentence(job.reason)})" for job in self.core.state.jobs.values() if job.live
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
                self.fillers.placed()
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
        made = JobOutcome(job.name, job.spec.slo, job.arrives_ms)
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
        """Raise Impossible where a job has to wait though nodes can be bought: its policy will not have it."""
        if self.core.state.jobs[process.name].group is None:
            why = Explainer(self.core.context).why_job_waits(process.name, self.kernel.now).text
            raise Impossible(
                f"job {process.job.name} ({process.job.kind}) waits: {why}, though any number of nodes can be bought"
            )

    def register(self, process: Process) -> None:
        """A run begins, from the last finished iteration."""
        self.rewind(process)
        self.call(process, i.RegisterJob("team", "sim", process.job.spec), self.registered)

    def rewind(self, process: Process) -> None:
        """A process begins with its engines, and with the first phase of an iteration."""
        process.at, process.aside = -1 if _init_of(process.job) is not None else 0, []
        process.begun = process.made = process.granted = process.step
        process.awaits = False

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
        if self._has_to_wait_for_a_batch(process):
            process.began_ms, process.awaits = self.kernel.now, True
            self.roll_out(process)
        else:
            self.ask(process)

    # ---- rollouts of asynchronous jobs -------------------------------------------------------------------------------

    def _has_to_wait_for_a_batch(self, process: Process) -> bool:
        """Whether an asynchronous job's next step of training has no batch yet."""
        return bool(process.job.batches) and process.at == 0 and not process.aside and process.made <= process.step

    def roll_out(self, process: Process) -> None:
        """Begin the next batch, unless one is in the making or as many were begun as may be."""
        asynchronous = process.job.spec.asynchronous
        if asynchronous is None or process.begun > process.made or process.gone:
            return
        ahead = asynchronous.ahead
        if process.begun <= (process.step + ahead if ahead else process.granted):
            took = process.job.batches[process.begun % len(process.job.batches)]
            process.begun += 1
            self.later(process, took, self._batch_made)

    def _batch_made(self, process: Process) -> None:
        process.made += 1
        if process.awaits:
            process.awaits = False
            self.ask(process)
        self.roll_out(process)

    def _placed(self, fact: f.JobPlaced) -> None:
        self._fits(fact)
        process = self.processes.get(fact.job)
        if process is not None and process.outcome.placed_ms is None:
            self._first_placed(process)

    def _fits(self, fact: f.JobPlaced | f.MovePlanned) -> None:
        """A policy may be of the user's own, and forget what hosts have."""
        state = self.core.state
        for host in (state.hosts[state.nodes[name].host] for name in nodes_in(fact.pins)):
            if host.reserved_mb > host.ram_mb:
                raise BrokenInvariant(
                    f"policy {self.core.policy.name} has placed {fact.job} where host {host.id} has too little RAM: "
                    f"{host.reserved_mb} MB of {host.ram_mb} MB are reserved for parked states"
                )

    def _first_placed(self, process: Process) -> None:
        if process.outcome.placed_ms is None:
            process.outcome.placed_ms = self.kernel.now
            process.outcome.admission = self.core.state.jobs[process.name].admission
            if process.began_ms is not None:  # waiting for admission is no slowdown
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
        if process.at == 0 and process.request is None and not process.job.batches:
            process.began_ms, process.solo_ms = self.kernel.now, 0
        return i.NextRequest(process.job.spec.phases[process.at].name, str(process.requests))

    def _granted(self, fact: f.SlotGranted) -> None:
        slot = self.core.state.slots[fact.slot]
        self.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        if self.fillers.has(slot.job):
            self.fillers.granted(slot)
            return
        process = self.processes[slot.job]
        if self.hears(process, slot):
            self.begin_phase(process, slot)

    def hears(self, process: Process, slot: Slot) -> bool:
        """Whether the process hears of this grant."""
        return True

    def begin_phase(self, process: Process, slot: Slot) -> None:
        """The phase runs, for as long as it takes on the GPUs that it got."""
        assert slot.fence is not None
        now, life = self.kernel.now, process.life
        process.request, process.slot, process.fence, process.shrunk = None, slot.id, slot.fence, False
        process.running = (now, self._nodes_of(slot))

        def changed() -> None:
            if process.life == life and process.slot == slot.id:
                self._plan_phase(process)

        process.ends_ms, process.tail_ms = NEVER, None
        if process.job.batches and process.at == 0 and not process.aside:
            process.granted += 1
            self.roll_out(process)
        begun = self._begun(process, slot)
        process.execution = self.executions.begin(begun, changed)
        process.solo_ms += process.execution.solo_ms
        self._plan_phase(process)
        if 0 < len(slot.gpus) < begun.whole:
            self.kernel.after(TAIL_ASKED_MS, self.ask_for_the_rest, process, slot.id)

    def _begun(self, process: Process, slot: Slot) -> Begun:
        state, job = self.core.state, process.job
        of = state.jobs[slot.job]
        phase, at = of.spec.phase(slot.phase), -1 if process.aside else process.at
        whole = sum(len(state.nodes[node].gpus) for node in state.phase_nodes(of, slot.phase))
        nodes = len(of.pins.get(phase.pools[0], ()))
        return Begun(job, phase, at, process.step, slot.gpus, whole, nodes)

    def _plan_phase(self, process: Process) -> None:
        """Plan the end of the phase at hand and the beginning of its tail, where they are not planned yet.

        What was planned before is void: it comes too early, or to a slot that is over.
        """
        execution = self._of(process)
        if execution.ends_ms != process.ends_ms:
            process.ends_ms = execution.ends_ms
            if process.ends_ms < NEVER:
                self.kernel.at(process.ends_ms, self.phase_over, process, process.slot)
        if execution.tail_ms is not None and execution.tail_ms != process.tail_ms:
            process.tail_ms = execution.tail_ms
            self.kernel.at(execution.tail_ms, self.tail_begins, process, process.slot)

    @staticmethod
    def _of(process: Process) -> Execution:
        assert process.execution is not None
        return process.execution

    def ask_for_the_rest(self, process: Process, slot: SlotId) -> None:
        """A phase that began on a part of its GPUs takes the others when they are offered."""
        if process.slot == slot and not process.shrunk and self.kernel.now < (process.tail_ms or process.ends_ms):
            self.call(process, i.Heartbeat(process.session, slot, 1, 100), self._rest_offered)

    def _rest_offered(self, process: Process, answer: Answer) -> None:
        slot = process.slot
        if not slot or process.shrunk:
            return
        if any(it.kind == "grow" for it in answer.directives):
            self.call(process, i.GrowSlot(slot, process.fence), self._rest_taken)
        self.kernel.after(TAIL_ASKED_MS, self.ask_for_the_rest, process, slot)

    def _rest_taken(self, process: Process, answer: Answer) -> None:
        """What is loaded onto it is there by a fact; of a job without states nothing is."""
        if not process.job.spec.states:
            self._has_more(process, process.slot)

    def _holds_more(self, fact: f.SlotResized) -> None:
        slot = self.core.state.slots[fact.slot]
        process = None if fact.tail else self.processes.get(slot.job)
        if process is not None and process.slot == slot.id and process.running is not None and not process.shrunk:
            self.charge(process)
            process.running = (self.kernel.now, self._nodes_of(slot))

    def _loads_more(self, fact: f.OrderIssued) -> None:
        if fact.gpus and fact.slot is not None:
            self.growing[fact.order] = fact.job, fact.slot

    def _loaded(self, fact: f.OrderEnded) -> None:
        job, slot = self.growing.pop(fact.order, ("", ""))
        if job in self.processes and slot not in [slot for _, slot in self.growing.values()]:
            self._has_more(self.processes[job], slot)

    def _has_more(self, process: Process, name: SlotId) -> None:
        """The phase continues on all GPUs of its slot."""
        slot = self.core.state.slots.get(name)
        if slot is None or process.slot != name or process.running is None:
            return
        self.machines.nobody_else_is_on(slot.gpus, slot.job, slot.run)
        self._of(process).grow(slot.gpus, self.kernel.now)
        self._plan_phase(process)

    def tail_begins(self, process: Process, slot: SlotId) -> None:
        """The process says how far it is; asked to, it consolidates its tail and gives GPUs back."""
        if process.slot != slot or process.shrunk or self.kernel.now < (process.tail_ms or 0):
            return
        self.call(process, i.Heartbeat(process.session, slot, 80, 100), self._tail_told)

    def _tail_told(self, process: Process, answer: Answer) -> None:
        wish = next((it for it in answer.directives if it.kind == "shrink"), None)
        if not process.slot:
            return  # the answer was long in coming
        if wish is not None:
            process.shrunk = True
            moved = self._of(process).move_ms(wish.keep, self.kernel.now)
            self.kernel.after(moved, self.shrink, process, process.slot, wish.keep)
        elif self.kernel.now + TAIL_ASKED_MS < process.ends_ms:
            self.kernel.after(TAIL_ASKED_MS, self.tail_begins, process, process.slot)

    def shrink(self, process: Process, slot: SlotId, keep: tuple[GpuId, ...]) -> None:
        """GPUs that are given back are empty; those that are kept stay in use."""
        if process.slot != slot:
            return
        held = self.core.state.slots[slot].gpus
        freed = [gpu for gpu in held if gpu not in keep]
        residual_mb = {spec.pool: spec.residual_mb for spec in process.job.spec.states}
        self.machines.give_back(process.name, process.run, freed, residual_mb)
        assert process.running is not None
        _, nodes = process.running
        self.charge(process)
        process.running = (self.kernel.now, {pool: count * len(keep) / len(held) for pool, count in nodes.items()})
        self._of(process).shrink(keep, self.kernel.now)
        self._plan_phase(process)
        self.call(process, i.ShrinkSlot(slot, process.fence, keep, seen=self.machines.observe(freed)))

    def _nodes_of(self, slot: Slot) -> dict[PoolName, float]:
        """How many nodes of each pool the slot's GPUs make."""
        nodes: dict[PoolName, float] = {}
        for gpu in slot.gpus:
            pool, share = self.inventory.share_of[gpu]
            nodes[pool] = nodes.get(pool, 0.0) + share
        return nodes

    def phase_over(self, process: Process, slot: SlotId) -> None:
        """The process gives its slot back, and asks for the next at once if it has nothing to do in between."""
        if process.slot != slot or self.kernel.now < process.ends_ms:
            return
        self.charge(process)
        phases = process.job.spec.phases
        process.slot = ""
        if process.aside:
            process.aside = process.aside[1:]
        else:
            process.at += 1
        seen = () if process.job.spec.states else self.machines.observe(self.core.state.slots[slot].gpus)
        if process.at == len(phases):
            process.at = 0
            self._iteration_done(process)
            if self.by_work and process.step >= process.job.work:
                self.call(process, i.ReleaseSlot(slot, process.fence, seen), lambda process, _: self.end(process))
                return
            process.aside = _asides_due(process)
        gap = 0 if process.aside else phases[process.at].gap_ms
        if process.at > 0:
            process.solo_ms += gap
        if self._has_to_wait_for_a_batch(process):
            process.awaits = True
            self.call(process, i.ReleaseSlot(slot, process.fence, seen))
        elif gap:
            self.call(process, i.ReleaseSlot(slot, process.fence, seen), self._rests)
        else:
            process.request = self._next_request(process)
            self.call(process, i.ReleaseSlot(slot, process.fence, seen, next=process.request), self.released)

    def released(self, process: Process, answer: Answer) -> None:
        """The process waits for the slot that it has asked for with the release."""
        assert answer.next_slot is not None, answer.next_refused

    def _rests(self, process: Process, answer: Answer) -> None:
        self.later(process, process.job.spec.phases[process.at].gap_ms, self.ask)

    def _iteration_done(self, process: Process) -> None:
        assert process.began_ms is not None
        first_gap = process.job.spec.phases[0].gap_ms
        outcome = process.outcome
        outcome.iterations += 1
        outcome.elapsed_ms += self.kernel.now - process.began_ms + first_gap
        if process.job.batches:  # alone its first batch is made before it trains, the others while it does
            batch = process.job.batches[process.step % len(process.job.batches)]
            solo = process.solo_ms
            process.solo_ms = max(batch, solo) if outcome.iterations > 1 else batch + solo
        outcome.solo_ms += process.solo_ms + first_gap
        process.step += 1
        if process.job.batches:
            process.began_ms, process.solo_ms = self.kernel.now, 0
            self.roll_out(process)

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
        self.fillers.beat()
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
        if order.gpus:
            gpus = order.gpus
        elif order.kind is OrderKind.LOAD and slot is not None and slot.gpus != gpus:
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
            residual_mb=kept.spec.residual_mb if order.kind is OrderKind.PARK else 0,
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
        if warm or process is None:
            return spec.load_ms
        return 0 if _init_of(process.job) is not None else process.job.cold_ms.get(spec.pool, spec.load_ms)

    def performed(self, move: Move) -> None:
        """The driver has done it, and says so."""
        if move.kind is not OrderKind.LOAD:
            self.take(move)
        self.say_done(move)

    def take(self, move: Move) -> None:
        """What is parked or discarded leaves its GPUs."""
        self.machines.take(move, residual_mb=move.residual_mb)

    def say_done(self, move: Move) -> None:
        """The daemon hears of what was done, together with what the backend saw afterwards."""
        if move.order in self.core.state.orders:
            self.report(i.OrderDone(move.order, self.seen_after(move)))

    def seen_after(self, move: Move) -> tuple[i.GpuObservation, ...]:
        """What the backend sees on the GPUs that were cleared."""
        return () if move.kind is OrderKind.LOAD else self.machines.observe(move.gpus)

    def observe(self, host: HostId) -> None:
        """A backend is asked what is on a host."""
        self.kernel.after(0, self.observed, host)

    def observed(self, host: HostId) -> None:
        """A backend reports what is there."""
        self.report(i.HostObserved(host, self.machines.observe(self.inventory.gpus_of[host]), self.machines.boot[host]))

    # ---- what facts mean to others than the scheduler ----------------------------------------------------------------

    def _moved(self, fact: f.MoveEnded) -> None:
        process = self.processes.get(fact.job)
        if process is not None:
            process.outcome.moves += 1

    #: what follows from a fact, by its kind
    heeded: ClassVar[dict[type, Callable[[Any, Any], None]]] = {
        f.SlotGranted: _granted,
        f.SlotResized: _holds_more,
        f.OrderIssued: _loads_more,
        f.OrderEnded: _loaded,
        f.JobPlaced: _placed,
        f.MovePlanned: _fits,
        f.MoveEnded: _moved,
        f.YieldAsked: lambda world, fact: world.fillers.asked_back(fact),
        f.LoanEnded: lambda world, fact: world.fillers.loan_ended(fact),
        f.SlotClaimed: lambda world, fact: world.fillers.claimed(fact),
    }


def _init_of(job: SimJob) -> PhaseSpec | None:
    """The side phase in which the job builds its engines, if it has one."""
    return next((phase for phase in job.spec.side if phase.name == INIT), None)


def _asides_due(process: Process) -> list[PhaseSpec]:
    """The side phases that come between the iteration that has ended and the next."""
    others = [phase for phase in process.job.spec.side if phase.name != INIT]
    return [phase for phase in others if process.step % (phase.every or ASIDE_EVERY) == 0]
