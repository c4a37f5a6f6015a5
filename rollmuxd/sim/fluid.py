"""Cost fidelity: only arrivals and departures are events; between them iterations take what the plan says.

The scheduler decides on every registration and end as it does live. No job requests a slot. A job's progress flows at
one iteration per pace, which its policy reads from the group's plan (for the schedule's order: the period).
"""

import hashlib
import time
from collections.abc import Callable, Mapping

from msgspec import Struct

from rollmuxd.core import facts as f
from rollmuxd.core.config import Config, DriverTraits, Moves
from rollmuxd.core.ids import GroupId, JobId, Millis, PoolName
from rollmuxd.core.inputs import EndJob, HostObserved, Input, RegisterJob, Tick
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.explain.explainer import Explainer
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.machines import Machines
from rollmuxd.sim.meter import Meter
from rollmuxd.sim.outcome import WORK, JobOutcome, Outcome, PoolOutcome
from rollmuxd.sim.policies import PolicyUnderTest
from rollmuxd.sim.workload import Impossible, SimJob, Workload, by_arrival

#: no job has a session here, and none is waited for
NEVER: Millis = 1 << 50
#: progress is counted at most so often
COUNTED_MS: Millis = 100


class Course(Struct):
    """One job under way."""

    job: SimJob
    outcome: JobOutcome
    #: what an iteration takes alone, and the node-time of each pool that it keeps busy
    solo_ms: Millis
    busy_node_ms: dict[PoolName, float]
    pace_ms: Millis = 0
    #: iterations and busy time are counted up to here
    since: Millis = 0
    #: it is moved: until then it does nothing
    resumes: Millis = 0
    #: grows with every change of pace; a planned end of an older one is void
    version: int = 0

    def flow(self, now: Millis, pools: Mapping[PoolName, PoolOutcome]) -> None:
        """Count what was done since the last change."""
        passed = now - self.since
        self.since = now
        if not self.pace_ms or not passed:
            return
        moving = max(0, min(passed, self.resumes - now + passed))
        share = (passed - moving) / self.pace_ms
        self.outcome.iterations += share
        self.outcome.elapsed_ms += passed
        self.outcome.solo_ms += share * self.solo_ms
        for pool, node_ms in self.busy_node_ms.items():
            pools[pool].busy_node_ms += share * node_ms


class Fluid:
    """One policy on one workload. ``hear`` gets every fact, ``progress`` how many jobs have ended."""

    def __init__(
        self,
        workload: Workload,
        under_test: PolicyUnderTest,
        seed: int,
        accounting: str,
        hear: Callable[[f.Fact], None] | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.began = time.perf_counter()
        workload.check()
        under_test = under_test.within(workload, "cost", accounting)
        self.jobs = by_arrival([under_test.adapt(job) for job in workload.jobs])
        self.policy_under_test, self.workload = under_test, workload
        self.by_work = accounting == WORK
        self.inventory = Inventory(workload, self.jobs)
        self.policy = under_test.policy(seed)
        config = Config(
            max_jobs=len(self.jobs) + 1,
            lease_ms=NEVER,
            drivers={kept.driver: DriverTraits(copies=True) for job in self.jobs for kept in job.spec.states},
            moves=Moves.ON,
            max_concurrent_moves=len(self.jobs),
            move_interval_ms=0,
            move_cost_ms=under_test.move_ms(),
        )
        self.core = Scheduler(config, self.policy)
        self.kernel = Kernel()
        self.meter = Meter(workload, self.inventory.pool_of)
        self.digest = hashlib.sha256()
        self.hear, self.progress = hear, progress
        self.courses: dict[JobId, Course] = {}
        self.group_of: dict[JobId, GroupId] = {}
        self.outcome = Outcome(under_test.name, workload.name, seed, "cost", accounting)
        #: what groups are fined an hour, and since when
        self.fines: dict[GroupId, tuple[float, Millis]] = {}
        self.ended = 0
        #: when progress was counted last
        self.counted_ms: Millis | None = None
        #: when the scheduler is to be called next
        self.ticks_at: Millis | None = None

    def run(self) -> Outcome:
        """To its end. Raises Impossible where a job waits though any number of nodes can be bought."""
        self.tell(self.inventory.start)
        machines = Machines(self.inventory)
        for host, gpus in machines.gpus_of.items():
            self.tell(HostObserved(host, machines.observe(gpus), machines.boot[host]))
        for job in self.jobs:
            self.kernel.at(job.arrives_ms, self.arrive, job)
        while self.kernel.next_at() is not None:
            self.kernel.step()
        first = self.jobs[0].arrives_ms if self.jobs else 0
        self.meter.until(self.kernel.now)
        outcome = self.outcome
        ends = [job.ended_ms for job in outcome.jobs if job.ended_ms is not None]
        outcome.span_ms = max(ends, default=first) - first
        outcome.pools = list(self.meter.pools.values())
        outcome.facts_digest = self.digest.hexdigest()
        outcome.wall_s = time.perf_counter() - self.began
        return outcome

    def arrive(self, job: SimJob) -> None:
        self.count_credit()
        began = time.perf_counter()
        name = self.tell(RegisterJob("team", "sim", job.spec), job)
        self.outcome.decision_us.append((time.perf_counter() - began) * 1e6)
        if self.workload.on_demand and self.core.state.jobs[name].group is None:
            why = Explainer(self.core.context).why_job_waits(name, self.kernel.now).text
            raise Impossible(f"job {job.name} ({job.kind}) waits: {why}, though any number of nodes can be bought")
        if not self.by_work:
            self.kernel.at(job.arrives_ms + job.lasts_ms, self.end, name)

    def end_of_work(self, name: JobId, version: int) -> None:
        course = self.courses.get(name)
        if course is not None and course.version == version:
            self.end(name)

    def end(self, name: JobId) -> None:
        self.tell(EndJob(name, by="sim"))
        self.courses[name].outcome.ended_ms = self.kernel.now
        del self.courses[name]
        self.ended += 1
        if self.progress is not None:
            self.progress(self.ended)

    def tick(self, at: Millis) -> None:
        """Let the scheduler continue its search for moves."""
        if at != self.ticks_at:
            return
        self.ticks_at = None
        self.count_credit()
        self.tell(Tick())

    def count_credit(self) -> None:
        """Jobs' progress, and so their credit, is what the scheduler would have counted from their slots.

        The ticks of one search follow each other by a millisecond: for these it is counted once.
        """
        if self.counted_ms is not None and self.kernel.now - self.counted_ms < COUNTED_MS:
            return
        self.counted_ms = self.kernel.now
        for name, course in self.courses.items():
            course.flow(self.kernel.now, self.meter.pools)
            progress = self.core.state.jobs[name].progress
            progress.finished = int(course.outcome.iterations)
            progress.solo_ms = int(course.outcome.solo_ms)
            progress.elapsed_ms = int(course.outcome.elapsed_ms) + max(0, course.resumes - self.kernel.now)

    def tell(self, given: Input, job: SimJob | None = None) -> JobId:
        """Have the scheduler decide; then everybody's pace is what the new plan says."""
        decision = self.core.handle(given, self.kernel.now)
        self.outcome.events += 1
        touched: dict[GroupId, None] = {}
        for fact in decision.facts:
            self.digest.update(f.encode(fact))
            self.outcome.facts += 1
            self.meter.hear(fact)
            if self.hear is not None:
                self.hear(fact)
            if isinstance(fact, f.JobRegistered) and job is not None:
                made = JobOutcome(job.name, job.spec.slo, job.arrives_ms)
                self.outcome.jobs.append(made)
                self.courses[fact.job] = Course(job, made, job.solo_ms, busy_node_ms(job), since=fact.at)
            elif isinstance(fact, f.JobPlaced):
                course = self.courses[fact.job]
                course.outcome.placed_ms, course.outcome.admission = fact.at, fact.admission
                self.group_of[fact.job] = fact.group
                touched[fact.group] = None
            elif isinstance(fact, f.PlacementEnded):
                course = self.courses[fact.job]
                course.flow(self.kernel.now, self.meter.pools)
                course.pace_ms = 0
                touched[self.group_of.pop(fact.job)] = None
            elif isinstance(fact, f.MovePlanned | f.GroupReplanned):
                touched[fact.group] = None
            elif isinstance(fact, f.MoveEnded):
                touched[self.group_of[fact.job]] = None
                self.moved(fact.job, self.courses[fact.job])
                touched[self.group_of[fact.job]] = None
        for group in touched:
            if group in self.core.state.groups:
                self.repace(group)
            else:
                self.fine(group, 0.0)
        due = self.core.deadline()
        if due is not None and due < NEVER and (self.ticks_at is None or due < self.ticks_at):
            self.ticks_at = max(due, self.kernel.now)
            self.kernel.at(self.ticks_at, self.tick, self.ticks_at)
        return decision.answer.job or ""

    def moved(self, name: JobId, course: Course) -> None:
        """The job sits elsewhere, and for a while it does nothing."""
        takes = self.policy_under_test.move_ms()
        course.flow(self.kernel.now, self.meter.pools)
        course.pace_ms, course.resumes = 0, max(self.kernel.now, course.resumes) + takes
        course.outcome.moves += 1
        self.counted_ms = None  # it is paid for before anything else is
        self.group_of[name] = self.core.state.jobs[name].group or ""
        self.meter.charge_move(course.job.footprint, takes)

    def repace(self, group: GroupId) -> None:
        state, worst = self.core.state, 1.0
        for name, pace in self.policy_under_test.paces(self.policy, state, group).items():
            course = self.courses[name]
            slow, slo = pace / course.solo_ms, course.job.spec.slo
            if slo is not None and slow > slo * (1 + 1e-6):
                worst = max(worst, slow)
            if course.pace_ms == pace:
                continue
            course.flow(self.kernel.now, self.meter.pools)
            course.pace_ms = pace
            course.version += 1
            if self.by_work:
                left = max(0.0, course.job.work - course.outcome.iterations)
                rest = max(0, course.resumes - self.kernel.now)
                self.kernel.after(rest - int(-left * pace // 1), self.end_of_work, name, course.version)

        nodes = [state.nodes[node] for node in state.groups[group].nodes]
        price = sum(node.price_per_gpu_hour * len(node.gpus) for node in nodes)
        self.fine(group, price * (worst - 1))

    def fine(self, group: GroupId, per_hour: float) -> None:
        """What the published simulator adds for broken promises: a group's price, times the slowdown of its worst job.

        (Less the price itself, and of the jobs beyond their SLO.) No bill shows it, but the paper's costs of *random*
        and *most-idle* have it in them.
        """
        until_now, since = self.fines.get(group, (0.0, self.kernel.now))
        self.outcome.fines += until_now * (self.kernel.now - since) / 3_600_000
        self.fines[group] = per_hour, self.kernel.now


def busy_node_ms(job: SimJob) -> dict[PoolName, float]:
    """Node-time of each pool that one iteration keeps busy."""
    wants = {want.pool: want.nodes for want in job.spec.wants}
    busy: dict[PoolName, float] = {}
    for phase, took in zip(job.spec.phases, job.planned, strict=True):
        for pool in phase.pools:
            busy[pool] = busy.get(pool, 0) + wants[pool] * took * job.busy_share.get(pool, 1)
    return busy
