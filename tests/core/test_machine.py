"""Whatever clients, operators and backends do, in whatever order, these sentences stay true (DESIGN section 12).

- A GPU is never held by two slots, a shrunk tail holds its own subset, and no GPU is given on before it was verified
clean:
  who is told "granted" finds no bytes of another job, or of an earlier run, on its GPUs.
- A request that was withdrawn, whose session is lost, or that stayed detached beyond the re-attach time, is never
  granted; nor are GPUs claimed for one, nor is one granted, while nobody attends it.
- A rejected input changes nothing.
- Replaying the facts gives the very state that the live scheduler has, and a scheduler that goes on from there
  (a restart) keeps every other sentence.
- After a backup is restored the same holds: what was done since is not in it, and is true all the same. No fence of
  before is good for anything.
- The death of a job is recorded within its lease.
- Once faults stop and every backend answers truthfully, every attended request of a live, unquarantined, placed job is
  granted in the end as holders release.

The machine keeps a world of its own: whose bytes are on which GPU, which processes live, what each driver has truly
done. The sentences are checked against that world and against what was *told*, not against the scheduler's state.

What the world may do: a driver acts late, reports late, twice, wrongly ("done" and it is not, "failed" and it is), or
never; a process hangs, and dies later; bytes linger after a park; a parked state leaves what was agreed. A backend
starts a job's process late, or says that it did not and did; its stop may come to nothing. What it may not: begin a
load after its session was lost (no scheduler could prevent that; ``on_loss = kill`` does).
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from simkit import invariants
from simkit.drawn import FLAG, Machine, one_of, rule, shuffled, some_of, within

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.errors import Rejected
from rollmuxd.core.ids import Fence, GroupId
from rollmuxd.core.model import Dispatch, Job, JobStatus, OrderKind, PlannedTurn
from rollmuxd.core.policy import Move, Placed, Replan
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, LaunchSpec, Movable, OnLoss, Park, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State, state_key
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.rollmux import RollMux

#: the same sequences each time, and steps in each: `make machine` looks for others
SEQUENCES, STEPS = 300, 60

LEASE, REATTACH = 60_000, 120_000
#: slots that run on are revoked soon, where somebody waits
CONFIG = {
    "clean_timeout_ms": 120_000,
    "min_overrun_ms": 40_000, "overrun_revoke": True, "overrun_grace_ms": 20_000,
    "min_samples": 2, "drift_window": 3, "replan_every_ms": 20_000,
    "move_interval_ms": 0, "move_start_timeout_ms": 300_000, "move_finish_timeout_ms": 60_000,
    "launch_hosts": ("h1", "h2"), "launch_ms": 100_000, "relaunch_after_ms": 20_000, "relaunch_limit": 3,
}  # fmt: skip
HOSTS = (i.HostSpec("h1", "mock", 100_000), i.HostSpec("h2", "mock", 100_000))
NODES = (
    i.NodeSpec("r1", "h1", ("h1/gpu0", "h1/gpu1"), ("rollout",)),
    i.NodeSpec("t1", "h2", ("h2/gpu0", "h2/gpu1"), ("train",)),
    i.NodeSpec("n1", "h2", ("h2/gpu2", "h2/gpu3"), ("rollout", "train")),
    i.NodeSpec("n2", "h1", ("h1/gpu2", "h1/gpu3"), ("rollout", "train")),
)
#: what a state that leaves something on its GPUs leaves on each when it is parked
LEFT = "left"
LEFT_MB = 500
GPUS = {node.id: node.gpus for node in NODES}
HOST_GPUS = {host.id: tuple(gpu for node in NODES if node.host == host.id for gpu in node.gpus) for host in HOSTS}
DRIVERS = {
    "asked": DriverTraits(probes=True, copies=True),
    "again": DriverTraits(idempotent=True, copies=True),
    "neither": DriverTraits(),
}


def reinstate(job: str, by: str) -> i.Input:
    return i.ResumeJob(job, by, quarantined=True)


class ChaosPolicy(RollMux):
    """The paper's policy; and whatever anybody proposes is worth doing."""

    def __init__(self) -> None:
        super().__init__()
        self.moves: list[Move] = []

    def regroup(self, state: State, now: int) -> Iterator[Move | None]:
        while self.moves:
            yield self.moves.pop(0)

    def replan(self, state: State, group: GroupId) -> Replan:
        """Another schedule each time: the members in the opposite order, and who is first goes round twice."""
        found, known = super().replan(state, group), state.groups[group]
        names = list(dict.fromkeys(turn.job for turn in known.schedule if not turn.once))
        if known.coming or len(names) < 2:
            return found
        order = [*reversed(names), names[-1]]
        schedule = (PlannedTurn(name, phase.name) for name in order for phase in state.jobs[name].spec.phases)
        return Replan(found.period_ms, found.at_risk, tuple(schedule))


def _spec(name: str, kind: str) -> JobSpec:
    rollout, train = PhaseSpec("rollout", ("rollout",), 10_000), PhaseSpec("train", ("train",), 10_000)
    wants = (Want("rollout"), Want("train"))
    driver = {"parks": "again", "known": "neither"}.get(kind, "asked")
    states = tuple(StateSpec(pool, 1000, 0, 1000, driver) for pool in ("rollout", "train"))
    base = JobSpec(
        name, (rollout, train), wants, states=states, on_loss=OnLoss.KILL if kind == "parks" else OnLoss.HOLD,
        movable=Movable.WARM,
    )  # fmt: skip
    change = msgspec.structs.replace
    match kind:
        case "parks":
            return change(base, park=Park.AT_RELEASE)
        case "shrinks":
            return change(base, phases=(change(rollout, min_gpus=1), train))
        case "stateless":
            return change(base, states=())
        case "leaves":
            return change(base, states=tuple(change(kept, residual_mb=LEFT_MB) for kept in states))
        case "launched":
            return change(base, launch=LaunchSpec(("train",)), on_loss=OnLoss.RELAUNCH, movable=Movable.NO)
        case "syncs":
            return change(base, phases=(rollout, PhaseSpec("sync", ("rollout", "train"), 1_000), train))
        case "promised":
            return change(base, slo=2.5)
        case "unknown":
            return change(base, phases=(change(rollout, planned_ms=None), train))
        case "colocated":
            return change(base, colocate=True)
        case "inits":
            return change(base, side=(PhaseSpec("init", ("rollout", "train"), 1_000),))
    return base


KINDS = [
    "known", "parks", "shrinks", "stateless", "syncs", "promised", "unknown", "colocated", "leaves", "launched",
    "inits",
]  # fmt: skip
NAMES = one_of("A", "B", "C", "D")
#: what an operator says of a job, the likeliest twice
SAID = {
    "pause": i.PauseJob, "resume": i.ResumeJob, "resume again": i.ResumeJob, "reinstate": reinstate, "end": i.EndJob,
}  # fmt: skip


@dataclass
class Process:
    """A run's process, as it truly is."""

    name: str
    job: str
    run: int
    key: str
    spec: JobSpec
    session: str = ""
    pid: int = 100
    #: when the daemon heard of it last (and could have)
    heard: int = 0
    alive: bool = True
    #: it says nothing any more
    silent: bool = False
    #: its session has ended, by its own word or another's
    over: bool = False
    asked: int = 0
    step: int = -1


@dataclass
class Started:
    """A process that a backend was told to start."""

    name: str
    job: str
    run: int
    key: str
    spec: JobSpec
    #: it was started, once
    pid: int = 0
    #: and is not to be any more
    stopped: bool = False


@dataclass
class Told:
    """An order, as its driver has it."""

    kind: OrderKind
    who: tuple[str, int]
    pool: str
    gpus: tuple[str, ...]
    #: what it parks leaves something there
    leaves: bool = False
    acted: bool = False
    #: it will never be acted upon any more
    dropped: bool = False


@dataclass
class Grant:
    """What a client was told: these GPUs are yours."""

    who: tuple[str, int]
    session: str
    fence: Fence
    gpus: tuple[str, ...]


@dataclass
class Request:
    """What a client asked for, and whether it may still be granted."""

    who: tuple[str, int]
    session: str
    name: str
    phase: str
    request_id: str
    attended: bool = True
    detached_at: int | None = None
    never: str = ""


@dataclass
class World:
    """What is true, whatever anybody was told."""

    bytes: dict[str, set[tuple[str, int, str]]] = field(
        default_factory=lambda: {g: set() for gs in GPUS.values() for g in gs}
    )
    processes: dict[str, Process] = field(default_factory=dict)
    graves: list[Process] = field(default_factory=list)
    orders: dict[str, Told] = field(default_factory=dict)
    launches: dict[str, Started] = field(default_factory=dict)
    probes: dict[str, None] = field(default_factory=dict)

    def process(self, who: tuple[str, int]) -> Process | None:
        return next((p for p in (*self.processes.values(), *self.graves) if (p.job, p.run) == who), None)

    def dies(self, process: Process) -> None:
        process.alive, process.silent = False, True
        for there in self.bytes.values():
            there -= {b for b in there if b[:2] == (process.job, process.run)}

    def may_act(self, told: Told) -> bool:
        process = self.process(told.who)
        if told.acted or told.dropped or process is None or not process.alive:
            return False
        return told.kind is not OrderKind.LOAD or not process.over

    def act(self, told: Told, lingering: str = "") -> None:
        told.acted = True
        for gpu in told.gpus:
            if told.kind is OrderKind.LOAD:
                self.bytes[gpu].add((*told.who, told.pool))
            else:
                had = (*told.who, told.pool) in self.bytes[gpu]
                self.bytes[gpu] -= {b for b in self.bytes[gpu] if b == (*told.who, told.pool)}
                if had and gpu == lingering:
                    self.bytes[gpu].add((*told.who, "lingering"))
                if told.kind is OrderKind.DISCARD:
                    self.bytes[gpu].discard((*told.who, LEFT))
                elif had and told.leaves:
                    self.bytes[gpu].add((*told.who, LEFT))

    def observe(self, gpus: tuple[str, ...]) -> tuple[i.GpuObservation, ...]:
        return tuple(i.GpuObservation(gpu, self.used_mb(gpu)) for gpu in gpus)

    def used_mb(self, gpu: str) -> int:
        there = self.bytes[gpu]
        return LEFT_MB * sum(b[2] == LEFT for b in there) + (20_000 if any(b[2] != LEFT for b in there) else 0)

    def others_on(self, gpu: str, who: tuple[str, int]) -> set[tuple[str, int, str]]:
        """Bytes of others, beyond what they have agreed to leave there."""
        return {b for b in self.bytes[gpu] if b[:2] != who and b[2] != LEFT}


class ClientsOperatorsAndBackends(Machine):
    """See the module's head for the sentences."""

    def __init__(self) -> None:
        self.config = Config(lease_ms=LEASE, reattach_ms=REATTACH, drivers=DRIVERS, **CONFIG)
        self.policy = ChaosPolicy()
        self.core = Scheduler(self.config, self.policy)
        #: the scheduler's state after its last input
        self.known = msgspec.json.encode(self.core.state)
        self.world, self.now, self.keys = World(), 1, 0
        self.replayed, self.backup, self.incarnation = State(), b"", 1
        self.newest = Fence(0, 0)
        self.granted: dict[str, Grant] = {}
        self.requests: dict[str, Request] = {}
        self.give(i.Start(HOSTS, NODES))
        for host in HOST_GPUS:
            self.see(host)

    # ---- handing an input over, and bearing witness --------------------------------------------------------------

    def give(self, given: i.Input) -> object:
        """Hand it over; None if it was refused. Everything that was told is checked against the world."""
        before = self.known
        try:
            decision = self.core.handle(given, self.now)
        except Rejected:
            assert msgspec.json.encode(self.core.state) == before, "a refusal changed something"
            return None
        self.known = msgspec.json.encode(self.core.state)
        if decision.facts:
            invariants.check(self.core.state)
        else:
            assert self.known == before, "something changed, and no fact tells of it"
        for fact in decision.facts:
            apply(self.replayed, f.decode(f.encode(fact)))
            self.witness(fact)
        for effect in decision.effects:
            self.obey(effect)
        return decision.answer

    def witness(self, fact: f.Fact) -> None:
        match fact:
            case f.SlotGranted():
                self.is_granted(fact)
            case f.SlotClaimed() if fact.slot in self.requests:  # else in the very answer to its request
                request = self.requests[fact.slot]
                assert request.attended, f"{fact.slot} goes ahead, and nobody attends it since {request.detached_at}"
                assert not request.never, f"{fact.slot} was {request.never}, and goes ahead"
            case f.SlotTakenAway() | f.SlotReleased():
                self.granted.pop(fact.slot, None)
            case f.SlotWithdrawn():
                self.requests[fact.slot].never = fact.reason
            case f.SessionLost() | f.SessionClosed():
                for process in (*self.world.processes.values(), *self.world.graves):
                    if process.session == fact.session:
                        process.over = True
            case f.OrderIssued():
                slot = self.core.state.slots.get(fact.slot or "")
                gpus = GPUS[fact.node]
                if fact.kind is OrderKind.LOAD:
                    gpus = tuple(gpu for gpu in slot.gpus if gpu in gpus)
                kept = self.core.state.states[state_key(fact.job, fact.pool, fact.node)]
                leaves = kept.spec.residual_mb > 0
                self.world.orders[fact.order] = Told(fact.kind, (fact.job, fact.run), fact.pool, gpus, leaves)

    def is_granted(self, fact: f.SlotGranted) -> None:
        slot = self.core.state.slots[fact.slot]
        who = (slot.job, slot.run)
        held = {gpu: name for name, grant in self.granted.items() for gpu in grant.gpus}
        for gpu in slot.gpus:
            assert gpu not in held, f"{gpu} is granted to {fact.slot}, and {held[gpu]} holds it"
            assert not self.world.others_on(gpu, who), f"{gpu}: {self.world.bytes[gpu]} at the grant of {who}"
        request, process = self.requests.get(fact.slot), self.world.process(who)
        if request is not None:  # else it is granted in the very answer to its request
            assert not request.never, f"{fact.slot} was {request.never}, and is granted"
            assert request.attended, f"{fact.slot} is granted, and nobody attends it since {request.detached_at}"
        assert process is not None
        assert not process.over, f"{fact.slot} is granted to a session that is over"
        assert self.now < process.heard + LEASE, f"{fact.slot} is granted to a process silent since {process.heard}"
        assert fact.fence > self.newest, "a fence went back"
        self.newest = fact.fence
        self.granted[fact.slot] = Grant(who, slot.session, fact.fence, slot.gpus)
        if not process.spec.states:
            for gpu in slot.gpus:
                self.world.bytes[gpu].add((*who, "work"))

    def obey(self, effect: e.Effect) -> None:
        match effect:
            case e.Perform():
                assert effect.order in self.world.orders
            case e.Probe():
                self.world.probes[effect.order] = None
            case e.Launch():
                job = self.core.state.jobs[effect.job]
                told = Started(job.spec.name, job.id, job.run, job.idempotency_key, job.spec)
                self.world.launches.setdefault(effect.launch, told)
            case e.Kill():
                process = self.world.process((effect.job, effect.run))
                if effect.launch in self.world.launches:
                    self.world.launches[effect.launch].stopped = True
                if process is not None:
                    self.world.dies(process)

    def see(self, host: str) -> None:
        self.give(i.HostObserved(host, self.world.observe(HOST_GPUS[host])))

    @rule(
        kinds=some_of(KINDS, 2, 4),
        dispatch=one_of(Dispatch.SCHEDULE, Dispatch.SCHEDULE, Dispatch.READY, Dispatch.CREDIT),
    )
    def begin(self, kinds: list[str], dispatch: Dispatch) -> None:
        self.policy.dispatch = dispatch
        for name, kind in zip("ABCD", kinds, strict=False):
            self.register(name, kind, replace=False)

    # ---- clients -------------------------------------------------------------------------------------------------

    @rule(name=NAMES, kind=one_of(*KINDS), replace=FLAG)
    def register(self, name: str, kind: str, replace: bool) -> None:
        """A new run; where one lives it is refused, or replaces it."""
        self.keys += 1
        key = f"k{self.keys}"
        answer = self.give(i.RegisterJob("team", "ann", _spec(name, kind), key, replace))
        if answer is None:
            return
        job = self.core.state.jobs[answer.job]
        # of a job whose process a backend starts, there is none yet
        self._begins(Process(name, job.id, job.run, key, job.spec, alive=job.spec.launch is None))
        self.open_session(name)

    def _begins(self, process: Process) -> None:
        old = self.world.processes.get(process.name)
        if old is not None:
            self.world.graves.append(old)
        self.world.processes[process.name] = process
        process.heard = self.now

    @rule(number=within(0, 3), report=one_of("done", "done", "done", "failed", "lost", "late"))
    def backend_starts(self, number: int, report: str) -> None:
        """A backend starts a process, or says that it does not; or says so, and does. Told twice it starts one."""
        told = list(self.world.launches)
        if told:
            self._start(told[-1 - number % len(told)], report)

    def _start(self, launch: str, report: str) -> None:
        told = self.world.launches[launch]
        if not told.pid and not told.stopped and report != "failed":
            self.keys += 1
            told.pid = 1_000 + self.keys
            if (told.job, told.run) == self._run_of(told.name):
                self._begins(Process(told.name, told.job, told.run, told.key, told.spec, pid=told.pid))
        if report in ("failed", "lost"):
            self.give(i.Launched(launch, error=said("no such program")))
        elif told.pid:
            self.give(i.Launched(launch, told.pid, "then"))
        if report == "done":
            self.open_session(told.name)

    def _run_of(self, name: str) -> tuple[str, int]:
        job = self.core.state.job_named("team", name)
        return ("", 0) if job is None else (job.id, job.run)

    @rule(name=NAMES)
    def open_session(self, name: str) -> None:
        """A process of the run begins, or begins again."""
        process = self.world.processes.get(name)
        if process is None or not process.alive or process.silent:
            return
        answer = self.give(i.OpenSession(process.job, process.key, process.pid, "box"))
        if answer is not None:
            process.session, process.heard, process.over = answer.session, self.now, False

    @rule(name=NAMES, at_once=FLAG)
    def process_restarts(self, name: str, at_once: bool) -> None:
        """A run's process dies, and another joins the run in its place; what was told to it may or may not be done."""
        process = self.world.processes.get(name)
        if process is None or self.core.state.jobs[process.job].run != process.run:
            return
        if process.spec.launch is not None:
            return  # who starts it again is the backend's affair
        if self.core.state.jobs[process.job].status in ("lost", "ended"):
            return
        self.world.dies(process)
        for told in self.world.orders.values():
            if told.who == (process.job, process.run) and (at_once or told.kind is OrderKind.LOAD):
                told.dropped = True
        process.alive, process.silent, process.pid = True, False, process.pid + 1
        self.open_session(name)

    @rule(name=NAMES, index=within(0, 3))
    def ask(self, name: str, index: int) -> None:
        process = self.world.processes.get(name)
        if process is None or process.silent:
            return
        phases = (*process.spec.side, *process.spec.phases)
        phase = phases[index % len(phases)].name
        process.asked += 1
        self._asks(process, phase, f"{process.key}-{process.asked}")

    def _asks(self, process: Process, phase: str, request_id: str) -> None:
        for request in self.requests.values():
            if request.request_id == request_id and process.session == request.session:
                request.attended, request.detached_at = True, None  # it may be granted in the very answer
        answer = self.give(i.RequestSlot(process.job, process.session, phase, request_id))
        if answer is not None:
            self._asked(process, answer.slot, phase, request_id)

    def _asked(self, process: Process, slot: str, phase: str, request_id: str) -> None:
        who = (process.job, process.run)
        request = self.requests.setdefault(slot, Request(who, process.session, process.name, phase, request_id))
        assert request.request_id == request_id, "two requests have one slot"
        request.attended, request.detached_at = True, None

    def _goes_on(self, name: str) -> None:
        """What a healthy loop does next: it releases and asks for the next phase in one, or asks."""
        process = self.world.processes.get(name)
        if process is None or process.silent:
            return
        process.step += 1
        if any(grant.who == (process.job, process.run) for grant in self.granted.values()):
            self.release(name, process.step % len(process.spec.phases), lingering=False, twice=False)
        else:
            self.ask(name, process.step % len(process.spec.phases) + len(process.spec.side))

    @rule(name=NAMES)
    def goes_on(self, name: str) -> None:
        self._goes_on(name)

    @rule(names=shuffled("ABCD"))
    def all_go_on(self, names: list[str]) -> None:
        for name in names:
            self._goes_on(name)

    @rule(count=within(1, 4), lingers=FLAG)
    def drivers_work(self, count: int, lingers: bool) -> None:
        """Some drivers do what they were told and say so; what they move may take its time to go."""
        for _ in range(count):
            if self._order(0) is not None:
                self.drive(0, "done", lingers)

    @rule(names=shuffled("ABCD"), rounds=within(1, 4), lingers=FLAG)
    def a_good_while(self, names: list[str], rounds: int, lingers: bool) -> None:
        """Nobody is at fault for some rounds; at most, memory becomes clean late."""
        for number in range(rounds):
            self.all_go_on(names)
            self.drivers_work(4, lingers and number == 1)
            self.time_passes(1)

    @rule(name=NAMES)
    def ask_again(self, name: str) -> None:
        """The same request again: the same slot; it attends it."""
        process = self.world.processes.get(name)
        mine = [r for r in self.requests.values() if process and r.who == (process.job, process.run)]
        if mine and process.alive and not process.silent:
            before = len(self.core.state.slots)
            self._asks(process, mine[-1].phase, mine[-1].request_id)
            assert len(self.core.state.slots) <= before, "asked again, it made another slot"

    @rule(name=NAMES)
    def detach(self, name: str) -> None:
        for slot, request in self.requests.items():
            if request.name == name and request.attended and not request.never and slot not in self.granted:
                self.give(i.DetachSlot(slot))
                request.attended, request.detached_at = False, self.now

    @rule(name=NAMES)
    def withdraw(self, name: str) -> None:
        slot = self._queued(name)
        if slot and self.give(i.WithdrawSlot(slot)) is not None:
            self.requests[slot].never = "withdrawn by the machine"

    def _queued(self, name: str) -> str:
        process = self.world.processes.get(name)
        return (self.core.state.jobs[process.job].queued or "") if process else ""

    @rule(name=NAMES, following=within(-1, 3), lingering=FLAG, twice=FLAG)
    def release(self, name: str, following: int, lingering: bool, twice: bool) -> None:
        """The holder gives its slot back, with what the backend truly saw; a repeat gets the same answer."""
        process = self.world.processes.get(name)
        for slot, grant in list(self.granted.items()):
            if process is None or process.silent or grant.who != (process.job, process.run):
                continue
            for gpu in grant.gpus:
                if (*grant.who, "work") in self.world.bytes[gpu]:
                    self.world.bytes[gpu].discard((*grant.who, "work"))
                    if lingering and gpu == grant.gpus[-1]:
                        self.world.bytes[gpu].add((*grant.who, "lingering"))
            phases = process.spec.phases
            process.asked += 1
            wish = i.NextRequest(phases[following % len(phases)].name, f"{process.key}-{process.asked}")
            give = i.ReleaseSlot(slot, grant.fence, self.world.observe(grant.gpus), wish if following >= 0 else None)
            answer = self.give(give)
            assert answer is not None, "a valid release was refused"
            if answer.next_slot:
                self._asked(process, answer.next_slot, wish.phase, wish.request_id)
            if twice:
                again = self.give(give)
                assert (again.next_slot, again.next_refused, again.repeated) == (
                    answer.next_slot,
                    answer.next_refused,
                    True,
                )

    @rule(slot=within(1, 12), number=within(0, 12))
    def release_wrongly(self, slot: int, number: int) -> None:
        """Under a fence that is not its own, or what is not held: refused, or a repeat."""
        name, fence = f"s{slot}", Fence(1, number)
        grant = self.granted.get(name)
        if grant is None or grant.fence != fence:
            answer = self.give(i.ReleaseSlot(name, fence))
            assert answer is None or answer.repeated

    @rule(name=NAMES, lingering=FLAG)
    def shrink(self, name: str, lingering: bool) -> None:
        """A holder keeps one GPU."""
        process = self.world.processes.get(name)
        for slot, grant in list(self.granted.items()):
            if process is None or process.silent or grant.who != (process.job, process.run) or len(grant.gpus) < 2:
                continue
            gone = grant.gpus[1:]
            for gpu in gone:
                self.world.bytes[gpu].clear()
                if lingering:
                    self.world.bytes[gpu].add((*grant.who, "lingering"))
            grant.gpus = grant.gpus[:1]  # before it says so: others may be granted in the very answer
            assert self.give(i.ShrinkSlot(slot, grant.fence, grant.gpus, self.world.observe(gone))) is not None

    @rule(name=NAMES)
    def grow(self, name: str) -> None:
        """A tail takes back what it gave, offered or not: where somebody may be on it, it is refused."""
        process = self.world.processes.get(name)
        for slot, grant in list(self.granted.items()):
            if process is None or process.silent or grant.who != (process.job, process.run):
                continue
            if self.give(i.GrowSlot(slot, grant.fence)) is not None:
                grant.gpus = self.core.state.slots[slot].gpus
                job, phase = self.core.state.jobs[process.job], self.core.state.slots[slot].phase
                pools = next(it.pools for it in (*job.spec.side, *job.spec.phases) if it.name == phase)
                for pool in pools:
                    for gpu in (gpu for node in job.pins[pool] for gpu in GPUS[node] if gpu in grant.gpus):
                        self.world.bytes[gpu].add((*grant.who, pool if process.spec.states else "work"))

    @rule(name=NAMES, done=within(0, 10))
    def heartbeat(self, name: str, done: int) -> None:
        process = self.world.processes.get(name)
        if process is not None and not process.silent:
            self._beat(process, done)

    def _beat(self, process: Process, done: int = 0) -> None:
        slot = next((slot for slot, grant in self.granted.items() if grant.who == (process.job, process.run)), None)
        if self.give(i.Heartbeat(process.session, slot, done, 10)) is not None:
            process.heard = self.now

    @rule(name=NAMES)
    def hang(self, name: str) -> None:
        """A crash is silence."""
        if name in self.world.processes:
            self.world.processes[name].silent = True

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        """Its bytes go with it, whenever that is."""
        for process in (*self.world.processes.values(), *self.world.graves):
            if process.name == name:
                self.world.dies(process)

    @rule(name=NAMES)
    def last_beat(self, name: str) -> None:
        """The heartbeat of a process that has died says so, also of one that was replaced meanwhile."""
        for process in (*self.world.processes.values(), *self.world.graves):
            session = self.core.state.sessions.get(process.session)
            if process.name == name and not process.alive and session is not None:
                self.give(i.ProcessGone(session.id, session.pid, session.started))

    @rule(name=NAMES)
    def give_back(self, name: str) -> None:
        """A process is interrupted in a call, and gives back what it may hold."""
        process = self.world.processes.get(name)
        if process is not None and not process.silent:
            self.give(i.GiveBack(process.session))

    @rule(name=NAMES)
    def close(self, name: str) -> None:
        process = self.world.processes.get(name)
        if process is None or process.silent:
            return
        self.give(i.CloseSession(process.session))

    # ---- operators -----------------------------------------------------------------------------------------------

    @rule(name=NAMES, what=one_of(*SAID))
    def operate(self, name: str, what: str) -> None:
        process = self.world.processes.get(name)
        if process is not None:
            self.give(SAID[what](process.job, "ops"))

    @rule(name=NAMES)
    def revoke(self, name: str) -> None:
        process = self.world.processes.get(name)
        slot = self.core.state.jobs[process.job].slot if process else None
        if slot:
            self.give(i.RevokeSlot(slot, "ops"))

    @rule(node=one_of(*sorted(GPUS)), evict=FLAG)
    def drain(self, node: str, evict: bool) -> None:
        self.give(i.DrainNode(node, "ops", evict))

    @rule(node=one_of(*sorted(GPUS)))
    def undrain(self, node: str) -> None:
        self.give(i.UndrainNode(node, "ops"))

    @rule(node=one_of(*sorted(GPUS)))
    def declare_clean(self, node: str) -> None:
        """An operator who has truly looked: nothing is there, and nothing is on its way there."""
        on_its_way = any(self.world.may_act(o) and set(o.gpus) & set(GPUS[node]) for o in self.world.orders.values())
        if not on_its_way and not any(self.world.bytes[gpu] for gpu in GPUS[node]):
            self.give(i.DeclareClean(node, "ops"))

    def _better_place(self, job: Job, which: int) -> Move | None:
        """One of the places where a job could go: nodes that are up, and nobody's or of one group."""
        state = self.core.state
        up = [node for node in state.nodes.values() if node.status == "up"]
        places = [
            (first, second)
            for first in up
            for second in up
            if "rollout" in first.pools and "train" in second.pools and first is not second
            and len({node.group for node in (first, second)} - {None}) <= 1
            and {"rollout": (first.id,), "train": (second.id,)} != job.pins
        ]  # fmt: skip
        if not places:
            return None
        first, second = places[which % len(places)]
        group = state.groups.get(first.group or second.group or "")
        turns = [PlannedTurn(v.job, v.phase, v.once) for v in group.schedule if v.job != job.id] if group else []
        turns += [PlannedTurn(job.id, phase.name) for phase in job.spec.phases]
        placed = Placed(
            None if group is None else group.id, {"rollout": (first.id,), "train": (second.id,)}, tuple(turns),
            "packing", JobStatus.ADMITTED, job.promised, None, 0.0, self.policy.dispatch,
        )  # fmt: skip
        return Move(job.id, placed, said("why not"))

    @rule(name=NAMES, which=within(0, 11))
    def is_better_placed(self, name: str, which: int) -> None:
        """The policy finds that a job should be on other nodes, with whoever is there."""
        process = self.world.processes.get(name)
        move = self._better_place(self.core.state.jobs[process.job], which) if process is not None else None
        if move is not None:
            self.policy.moves[:] = [move]
            self.core.context.timers.at(self.now, "regroup", "")
            self.give(i.Tick())

    @rule(names=shuffled("ABCD"), which=within(0, 11), rounds=within(1, 3))
    def moves_in_a_good_while(self, names: list[str], which: int, rounds: int) -> None:
        """Nobody is at fault while a job moves, up to some point."""
        self.a_good_while(names, 1, lingers=False)
        self.is_better_placed(names[0], which)
        self.a_good_while(names, rounds, lingers=False)

    # ---- backends ------------------------------------------------------------------------------------------------

    def _order(self, number: int) -> tuple[str, Told] | None:
        open_ = [(name, told) for name, told in self.world.orders.items() if name in self.core.state.orders]
        return open_[number % len(open_)] if open_ else None

    @rule(
        number=within(0, 5),
        report=one_of("done", "done", "done", "", "failed", "lost", "twice"),
        lingers=FLAG,
    )
    def drive(self, number: int, report: str, lingers: bool) -> None:
        """A driver does what it was told, and reports it: at once, twice, wrongly or not yet."""
        chosen = self._order(number)
        if chosen is None:
            return
        name, told = chosen
        if self.world.may_act(told):
            self.world.act(told, told.gpus[-1] if lingers and told.gpus else "")
        if told.acted:
            self._report(name, told, report or "nothing")

    @rule(number=within(0, 5), report=one_of("failed", "lost", "a lie"))
    def fail(self, number: int, report: str) -> None:
        """A driver does not do it, and says so; or says that it did."""
        chosen = self._order(number)
        if chosen is None:
            return
        name, told = chosen
        if report == "a lie" and told.kind is OrderKind.LOAD:
            return  # a load that was not done harms only its own job
        self._report(name, told, report)

    def _report(self, name: str, told: Told, report: str) -> None:
        if report in ("done", "twice", "a lie"):
            told.dropped = True
            if report == "a lie" and not told.acted:  # what it said is done is still there, and goes in its own time
                for gpu in told.gpus:
                    if (*told.who, told.pool) in self.world.bytes[gpu]:
                        self.world.bytes[gpu].discard((*told.who, told.pool))
                        self.world.bytes[gpu].add((*told.who, "lingering"))
            for _ in range(2 if report == "twice" else 1):
                self.give(i.OrderDone(name, self.world.observe(told.gpus)))
        elif report == "failed":
            told.dropped = True
            self.give(i.OrderFailed(name, said("no")))
        elif report == "lost":
            self.give(i.OrderLostContact(name, said("timed out")))

    @rule(number=within(0, 3), knows=FLAG)
    def answer_probe(self, number: int, knows: bool) -> None:
        asked = list(self.world.probes)
        if asked:
            self._answer_probe(asked[number % len(asked)], knows)

    def _answer_probe(self, name: str, knows: bool) -> None:
        del self.world.probes[name]
        told = self.world.orders[name]
        self._report(name, told, ("done" if told.acted else "failed") if knows else "lost")

    @rule(host=one_of(*sorted(HOST_GPUS)))
    def look(self, host: str) -> None:
        self.see(host)

    @rule(host=one_of(*sorted(HOST_GPUS)))
    def unreachable(self, host: str) -> None:
        self.give(i.HostObserved(host, unreachable=said("no route")))

    @rule()
    def lingering_bytes_go(self) -> None:
        """So does the work of who was told to stop."""
        at_work = {(*grant.who, "work") for grant in self.granted.values()}
        for there in self.world.bytes.values():
            there -= {b for b in there if b[2] == "lingering" or (b[2] == "work" and b not in at_work)}

    @rule(host=one_of(*sorted(HOST_GPUS)))
    def reboot(self, host: str) -> None:
        """Everything in its memories is gone, and so are orders on their way there."""
        self.keys += 1
        for gpu in HOST_GPUS[host]:
            self.world.bytes[gpu].clear()
        for told in self.world.orders.values():
            told.dropped = told.dropped or bool(set(told.gpus) & set(HOST_GPUS[host]))
        self.give(i.HostObserved(host, self.world.observe(HOST_GPUS[host]), f"boot-{self.keys}"))

    # ---- time ----------------------------------------------------------------------------------------------------

    @rule(seconds=one_of(1, 1, 5, 5, 20, 59, 61, 125))
    def time_passes(self, seconds: int) -> None:
        """Those who live and are not silent beat now and then; ticks come when they are due."""
        until = self.now + seconds * 1000
        while self.now < until:
            due = self.core.deadline()
            self.now = min(until, self.now + 15_000, max(self.now, due) if due is not None else until)
            for process in self.world.processes.values():
                if process.alive and not process.silent and not process.over and self.now - process.heard >= 10_000:
                    self._beat(process)
            for request in self.requests.values():
                if request.detached_at is not None and self.now >= request.detached_at + REATTACH:
                    request.never = request.never or "detached for too long"
            if due is not None and due <= self.now:
                self.give(i.Tick())

    @rule(crashed=FLAG, away_s=within(0, 60))
    def restart(self, crashed: bool, away_s: int = 0) -> None:
        """The daemon continues from the replayed journal; clients have to ask again."""
        self.known = msgspec.json.encode(self.replayed)
        self.core = Scheduler(self.config, self.policy, msgspec.json.decode(self.known, type=State))
        for process in (*self.world.processes.values(), *self.world.graves):
            process.heard = self.now  # its lease begins anew
        for slot, request in self.requests.items():
            if slot not in self.granted:
                request.attended, request.detached_at = False, self.now
        self.incarnation += 1
        self.give(i.Start(HOSTS, NODES, self.incarnation, crashed=crashed, away_ms=away_s * 1000))

    @rule()
    def back_up(self) -> None:
        self.backup = msgspec.json.encode(self.replayed)

    @rule(when=lambda self: bool(self.backup))
    def restore(self) -> None:
        """The journal is what it was; what was done since was done. Who goes on from before is never heard again."""
        self.replayed = msgspec.json.decode(self.backup, type=State)
        self.known = self.backup
        self.core = Scheduler(self.config, self.policy, msgspec.json.decode(self.known, type=State))
        self.incarnation += 1
        self.world.graves += self.world.processes.values()
        self.world.processes.clear()
        for process in self.world.graves:
            process.over = process.silent = True
        for launched in self.world.launches.values():
            launched.stopped = True
        for request in self.requests.values():
            request.attended, request.detached_at, request.name, request.who = False, self.now, "", ("", 0)
        self._tell_runs_apart()
        fences = {slot: grant.fence for slot, grant in self.granted.items()}
        self.granted.clear()
        self.give(i.Start(HOSTS, NODES, self.incarnation, lost=Cause("restored")))
        for slot, fence in fences.items():
            answer = self.give(i.ReleaseSlot(slot, fence))
            assert answer is None or answer.repeated, f"{slot} is released under a fence from before the restore"

    def _tell_runs_apart(self) -> None:
        """A run that began after the backup has a number that will be given again: what is its is not the next's."""
        jobs = self.core.state.jobs
        since = {
            (process.job, process.run)
            for process in self.world.graves
            if process.job not in jobs or process.run > jobs[process.job].run
        }
        before = f" before {self.incarnation}"
        for process in self.world.graves:
            if (process.job, process.run) in since:
                process.job += before
        for told in self.world.orders.values():
            if told.who in since:
                told.who = (told.who[0] + before, told.who[1])
        for there in self.world.bytes.values():
            theirs = {it for it in there if it[:2] in since}
            there -= theirs
            there |= {(job + before, run, what) for job, run, what in theirs}

    @rule()
    def stall(self) -> None:
        self.give(i.Stalled(20_000))
        for process in self.world.processes.values():
            process.heard = self.now

    # ---- what stays true -----------------------------------------------------------------------------------------

    def holds(self) -> None:
        self.replay_gives_the_very_state()
        self.who_was_told_granted_has_the_gpus_to_itself()
        self.a_silent_process_is_lost_within_its_lease()
        self.something_is_due_while_somebody_waits_for_time()

    def replay_gives_the_very_state(self) -> None:
        assert msgspec.json.encode(self.replayed) == self.known

    def who_was_told_granted_has_the_gpus_to_itself(self) -> None:
        held: dict[str, str] = {}
        for slot, grant in self.granted.items():
            for gpu in grant.gpus:
                assert gpu not in held, f"{gpu} is held by {held[gpu]} and {slot}"
                held[gpu] = slot
                assert not self.world.others_on(gpu, grant.who), f"{gpu} of {slot} has {self.world.bytes[gpu]}"

    def a_silent_process_is_lost_within_its_lease(self) -> None:
        for process in self.world.processes.values():
            session = self.core.state.sessions.get(process.session)
            if session is not None and session.status == "alive" and self.core.deadline() is not None:
                assert self.now <= process.heard + LEASE or self.core.deadline() <= self.now

    def something_is_due_while_somebody_waits_for_time(self) -> None:
        if self.core.context.timers.seen:
            assert self.core.deadline() is not None

    # ---- and in the end ------------------------------------------------------------------------------------------

    @rule()
    def faults_stop(self) -> None:
        """Every attended request of a live, unquarantined, placed job is granted in the end."""
        for process in (*self.world.processes.values(), *self.world.graves):
            if process.silent or process.over or self.world.processes.get(process.name) is not process:
                self.world.dies(process)
        for process in self.world.processes.values():
            if process.alive and not process.over:
                self._beat(process)
                self.give(i.ResumeJob(process.job, "ops"))
        waiting: dict[str, Request] = {}
        for name, process in self.world.processes.items():
            slot = self._comes(name)
            if slot and process.alive and not process.over and slot in self.requests:
                request = self.requests[slot]
                self._asks(process, request.phase, request.request_id)
                waiting[slot] = request
        for _ in range(60):
            self._everybody_is_truthful()
            state = self.core.state
            waiting = {
                slot: request for slot, request in waiting.items()
                if slot in state.slots and state.slots[slot].status in ("queued", "loading")
                and state.jobs[state.slots[slot].job].status in ("probing", "admitted", "moving")
            }  # fmt: skip
            if not waiting:
                return
        reasons = {slot: Explainer(self.core.context).why_slot_waits(slot, self.now) for slot in waiting}
        raise AssertionError(f"never granted: {reasons}")

    def _comes(self, name: str) -> str:
        """The slot that the job asked for and was not granted yet, whether or not it is being loaded."""
        process = self.world.processes.get(name)
        job = self.core.state.jobs[process.job] if process else None
        loading = job is not None and job.slot is not None and self.core.state.slots[job.slot].status == "loading"
        return (job.slot if loading else job.queued) or "" if job is not None else ""

    def _everybody_is_truthful(self) -> None:
        self.lingering_bytes_go()
        for launch, told in self.world.launches.items():
            job = self.core.state.jobs.get(told.job)
            if job is not None and job.launch is not None and job.launch.id == launch and not job.launch.over:
                self._start(launch, "done")
        for name in list(self.world.probes):
            self._answer_probe(name, knows=True)
        for name, told in list(self.world.orders.items()):
            if name in self.core.state.orders:
                if self.world.may_act(told):
                    self.world.act(told)
                self._report(name, told, "done" if told.acted else "failed")
        for name in GPUS:
            self.give(i.UndrainNode(name, "ops"))
        for host in HOST_GPUS:
            self.see(host)
        for name in self.world.processes:
            self.release(name, -1, lingering=False, twice=False)
        self.time_passes(20)

    def end(self) -> None:
        self.faults_stop()


@pytest.mark.slow
def test_whatever_anybody_does_the_sentences_stay_true() -> None:
    for number in range(SEQUENCES):
        ClientsOperatorsAndBackends.plays(Random(f"machine {number}"), STEPS)
