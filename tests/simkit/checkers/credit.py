"""By how much each job is ahead of its bound, by the books of the checker, and whether the one with least goes first.

The books are kept from what was told of slots, placements and pauses: a phase's time from its grant to its release is
work, whether shared or not; of what lies between two iterations' beginnings, side phases, pauses, waiting for a place
and what of a job's own gaps goes beyond its plan are held against nobody (DESIGN section 6, *slowdown*).
"""

from typing import ClassVar, Final, TypeAlias

from msgspec import Struct, field

from rollmuxd.core import facts as f
from rollmuxd.core.config import Config
from rollmuxd.core.ids import JobId, Millis, SlotId
from rollmuxd.core.spec import JobSpec
from simkit.checkers.records import Asked, Heeded, Party, Records, Stay

#: who is promised nothing yields to others as if it were promised this (decision 0021)
PROMISED_NOTHING: Final = 10.0
#: who has waited for so many of its iterations goes before who has less credit, that nobody starves
PATIENCE: Final = 3
#: and for so many at most it leaves its nodes to a promised job that is short of credit, where it is promised nothing;
#: one that is promised something does so for what it is ahead beyond an iteration
YIELDS: Final = 9
#: a phase that nobody has stated is known after so many observations, of which the last so many count
ENOUGH, REMEMBERED = 3, 64

#: whom one goes before: a job that has waited for very long first, then guarded jobs, then a phase over several pools
#: that are free, then by credit, then the first comer
Rank: TypeAlias = tuple[bool, bool, bool, Millis, Millis, int, SlotId]


class Account(Struct):
    """What a run of a job has done, and how long it took."""

    promised: bool = False
    #: whether it was decided what it is promised
    judged: bool = False
    #: what it will be in the place to which it moves
    promised_there: bool = False
    guarded: bool = False
    #: over its finished iterations
    worked_ms: Millis = 0
    took_ms: Millis = 0
    #: of the iteration at hand: since when, what of it was work, what of it is held against nobody
    since: Millis | None = None
    work_ms: Millis = 0
    excused_ms: Millis = 0
    #: since when it has been doing something of its own; since when it is paused without a slot
    idle_from: Millis | None = None
    paused_from: Millis | None = None
    #: of each phase: what was observed, what was stated, and what plans reckon with instead
    seen: dict[str, list[Millis]] = field(default_factory=dict)
    stated: dict[str, Millis | None] = field(default_factory=dict)
    reckoned: dict[str, Millis] = field(default_factory=dict)

    def ahead_ms(self, slo: float, now: Millis | None = None, pace: Millis = 0) -> Millis:
        """By how much it is ahead of a bound in its finished iterations; with ``now``, in the one at hand, too.

        The rollouts of an asynchronous job have worked in that as well, for its ``pace`` at most.
        """
        worked, took = self.worked_ms, self.took_ms
        if now is not None and self.since is not None:
            worked += max(self.work_ms, min(pace, now - self.since))
            took += now - self.since - self.excused_ms
        return int(slo * worked) - took

    def iteration_ms(self, spec: JobSpec) -> Millis | None:
        """What an iteration takes alone, by the plan; None: nobody knows yet."""
        total = 0
        for phase in spec.phases:
            seen = self.seen.get(phase.name, ())
            took = self.reckoned.get(phase.name, phase.planned_ms)
            if took is None and len(seen) >= ENOUGH:
                took = max(1, sum(seen) // len(seen))
            if took is None:
                return None
            total += took + phase.gap_ms
        if spec.asynchronous is None:
            return total
        pace = self.pace_ms(spec)
        return max(total, pace) if pace else None

    def pace_ms(self, spec: JobSpec) -> Millis:
        """In what time an asynchronous job's rollouts make a batch, by the plan; 0: none is known."""
        stated = None if spec.asynchronous is None else spec.asynchronous.pace_ms
        return self.reckoned.get("pace", stated or 0)


class Credit(Records):
    """Promises of who goes first where durations are uncertain."""

    def __init__(self, config: Config, *, cap: int | None = None, excused_ms: Millis = 0) -> None:
        super().__init__(config, cap=cap, excused_ms=excused_ms)
        self.accounts: dict[JobId, Account] = {}
        #: of the daemon's last start
        self.incarnation = 0

    def who_is_least_ahead_goes_first(self, name: SlotId, asked: Asked, party: Party, stay: Stay) -> None:
        """In a line by credit nobody goes ahead who has more of it than another who waits for one of his nodes.

        But who has waited for very long, or is guarded, has less than nobody; and a phase over several pools goes first
        while all of them are free. The other is there, and could go. One
        whose state is loaded where the other's is not may be used meanwhile, as in every line.
        """
        mine = self._rank(name, asked)
        if mine is None:
            return
        short = self._yields_to(asked, party)
        if short is not None and self._account(asked.job).judged and self._is_there(short):
            self._broken("who_is_least_ahead_goes_first", f"slot {name} of {asked.job}, and {short} is short")
        for job in party.jobs:
            member = self.members[job]
            other = member.queued
            if other is None or other == name or member.holding is not None or member.status != "placed":
                continue
            waits = self.slots[other]
            claims = member.stays[waits.phase].nodes
            if other in self.detached or any(node in self.out for node in claims):
                continue
            contested = [node for node in stay.nodes if node in claims]
            at_home = [self.kept.get(key) == "loaded" for key, node in stay.keys if node in contested]
            if not contested or (at_home and all(at_home)):
                continue
            theirs = None if self._yields_to(waits, party) else self._rank(other, waits)
            if theirs is not None and theirs < mine:
                self._broken(
                    "who_is_least_ahead_goes_first",
                    f"slot {name} of {asked.job}, {mine[3]} ms ahead, goes before slot {other} of {job}, "
                    f"{theirs[3]} ms ahead ({mine} and {theirs})",
                )

    def a_guard_knows_what_a_job_has_earned(self, fact: f.GuardChanged) -> None:
        """On what a job is guarded, or is so no more, is what it has earned: its bound on its work, less the time."""
        member = self.members[fact.job]
        earned = self._account(fact.job).ahead_ms(member.spec.slo or 0.0)
        if member.spec.slo is None or earned != fact.credit_ms:
            self._broken(
                "a_guard_knows_what_a_job_has_earned", f"{f.name(fact)} with {fact.credit_ms} ms, and it has {earned}"
            )

    def _yields_to(self, asked: Asked, party: Party) -> JobId | None:
        """The job, short of credit, that a request leaves its nodes to, where it begins an iteration; None: none."""
        member, account = self.members[asked.job], self._account(asked.job)
        takes = account.iteration_ms(member.spec)
        if takes is None or asked.phase != member.spec.phases[0].name:
            return None
        longest = YIELDS * takes
        if account.promised:
            longest = min(account.ahead_ms(member.spec.slo or 0.0) - takes, PATIENCE * takes)
        if self.now - asked.queued_at >= longest:
            return None
        for job in party.jobs:
            other, known = self._account(job), self.members[job]
            slo, alone = known.spec.slo, other.iteration_ms(known.spec)
            if slo is None or not other.promised or set(known.nodes).isdisjoint(member.nodes):
                continue
            if other.ahead_ms(slo) < max(takes, alone or 0):
                return job
        return None

    def _is_there(self, job: JobId) -> bool:
        """Whether a job runs, or its request is attended."""
        member = self.members[job]
        waits = member.queued is not None and member.queued not in self.detached
        return member.status == "placed" and (waits or member.holding is not None)

    def _rank(self, name: SlotId, asked: Asked) -> Rank | None:
        """Where a request stands in its line; None: nobody can say for how many iterations it has waited."""
        spec, account = self.members[asked.job].spec, self._account(asked.job)
        takes = account.iteration_ms(spec)
        if takes is None:
            return None
        promised = spec.slo if spec.slo is not None and account.promised else PROMISED_NOTHING
        patient = self.now - asked.queued_at < PATIENCE * takes
        ahead = account.ahead_ms(promised, self.now, account.pace_ms(spec))
        if account.since is None:  # before the first iteration it is the wait that counts
            ahead -= self.now - asked.queued_at
        return patient, not account.guarded, not self._at_once(asked), ahead, asked.queued_at, len(name), name

    def _at_once(self, asked: Asked) -> bool:
        """Whether a request is for all nodes of a phase of its cycle and more, and no slot holds anything there."""
        member = self.members[asked.job]
        stay, cycle = member.stays[asked.phase], (member.stays[phase.name] for phase in member.spec.phases)
        if not any(set(less.nodes) < set(stay.nodes) for less in cycle):
            return False
        holders = (self.slots[self.held[gpu]] for gpu in stay.gpus if gpu in self.held)
        return all(holder.status == "released" for holder in holders)

    # ---- what facts tell ---------------------------------------------------------------------------------------------

    def _account(self, job: JobId) -> Account:
        return self.accounts.setdefault(job, Account())

    def _begins(self, fact: f.JobRegistered) -> None:
        """A run begins with nothing. What phases took in the runs before is known still, where it states the same."""
        before = self._account(fact.job)
        stated = {phase.name: phase.planned_ms for phase in fact.spec.phases}
        if fact.spec.asynchronous is not None:
            stated["pace"] = fact.spec.asynchronous.pace_ms
        reckoned = dict(before.reckoned)
        for name in [name for name, took in stated.items() if took != before.stated.get(name)]:
            reckoned.pop(name, None)
        self.accounts[fact.job] = Account(seen=before.seen, reckoned=reckoned, stated=stated)

    def _finds_a_place(self, fact: f.JobPlaced) -> None:
        account, queued = self._account(fact.job), self.members[fact.job].queued
        account.promised, account.judged = fact.promised, fact.status == "admitted"
        if queued is not None:
            account.excused_ms += fact.at - self.slots[queued].queued_at

    def _loses_its_place(self, fact: f.JobUnplaced) -> None:
        self._account(fact.job).promised = False

    def _is_judged(self, fact: f.JobPromised) -> None:
        account = self._account(fact.job)
        account.promised, account.judged = fact.promised, True

    def _is_to_move(self, fact: f.MovePlanned) -> None:
        self._account(fact.job).promised_there = fact.promised

    def _moved(self, fact: f.MoveEnded) -> None:
        account = self._account(fact.job)
        account.promised, account.judged = account.promised_there, True

    def _takes_another_time(self, fact: f.TimesDrifted) -> None:
        self._account(fact.job).reckoned.update(fact.times | fact.means)  # promises, and waits, are about the mean

    def _guard_changed(self, fact: f.GuardChanged) -> None:
        self.a_guard_knows_what_a_job_has_earned(fact)
        self._account(fact.job).guarded = fact.guarded

    def _stops(self, fact: f.JobPaused) -> None:
        if self.members[fact.job].holding is None:
            self._account(fact.job).paused_from = fact.at

    def _goes_on(self, fact: f.JobResumed) -> None:
        account = self._account(fact.job)
        if account.paused_from is not None:
            account.excused_ms += fact.at - account.paused_from
            if account.idle_from is not None:
                account.idle_from = fact.at
        account.paused_from = None

    def _asks_for(self, fact: f.SlotQueued) -> None:
        account = self._account(fact.job)
        if account.idle_from is not None and not fact.side and not fact.pace_ms:
            phases = self.members[fact.job].spec.phases
            gap, planned = fact.at - account.idle_from, sum(it.gap_ms for it in phases if it.name == fact.phase)
            account.work_ms += min(gap, planned)
            account.excused_ms += max(0, gap - planned)
        account.idle_from = None
        if not fact.iteration or (account.since is not None and not account.work_ms):
            return
        if account.since is not None:
            account.worked_ms += max(account.work_ms, fact.pace_ms)
            account.took_ms += fact.at - account.since - account.excused_ms
        account.since, account.work_ms, account.excused_ms = fact.at, 0, 0

    def _starts_again(self, fact: f.DaemonStarted) -> None:
        self.incarnation = fact.incarnation

    def _gives_back(self, fact: f.SlotReleased) -> None:
        asked = self.slots[fact.slot]
        account = self._account(asked.job)
        account.idle_from = fact.at
        if self.members[asked.job].status == "paused":
            account.paused_from = fact.at
        if asked.side:
            account.excused_ms += fact.at - asked.queued_at
            return
        seen = account.seen.setdefault(asked.phase, [])
        ran = fact.at - asked.granted_at
        if seen and asked.fence is not None and asked.fence.incarnation != self.incarnation:
            # The daemon was away in between, and the release may have waited for it: the usual time counts.
            usual = min(ran, sum(seen) // len(seen))
            account.work_ms += usual
            account.excused_ms += ran - usual
            return
        account.work_ms += ran
        seen.append(ran)
        del seen[:-REMEMBERED]

    def _is_deprived(self, fact: f.SlotTakenAway) -> None:
        self._account(self.slots[fact.slot].job).idle_from = fact.at

    # ---- what it listens for -----------------------------------------------------------------------------------------

    _facts: ClassVar[Heeded] = {
        f.GuardChanged: _guard_changed,
        f.JobPromised: _is_judged,
    }
    #: what is booked besides, once the rooms whose facts these are have written them down
    _booked: ClassVar[Heeded] = {
        f.DaemonStarted: _starts_again,
        f.JobRegistered: _begins,
        f.JobPlaced: _finds_a_place,
        f.JobUnplaced: _loses_its_place,
        f.MovePlanned: _is_to_move,
        f.MoveEnded: _moved,
        f.TimesDrifted: _takes_another_time,
        f.JobPaused: _stops,
        f.JobResumed: _goes_on,
        f.SlotQueued: _asks_for,
        f.SlotReleased: _gives_back,
        f.SlotTakenAway: _is_deprived,
    }
