"""Which jobs would be better off elsewhere: the jobs of one or two groups, partitioned in the best way.

They are partitioned into sets that can share (:mod:`~rollmuxd.policies.thrift.catalogue`). The sum of two costs is made
least: of the nodes until one of the jobs probably ends, and of the moves. A part stays where most of its jobs are. What
is left are moves, in an order in which each is certified by itself, with the mover counted in both places.

Everything comes in steps: the caller of a search does other work whenever it yields.
"""

from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from math import inf

from msgspec import Struct

from rollmuxd.core.ids import GroupId, JobId, NodeId, PoolName
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import GroupSnapshot, JobDemand, Pins, Plan

#: jobs that are partitioned together, at most
UNION_JOBS = 12
#: an improvement below this (dollars) is none
LEAST_GAIN = 1e-6
#: how long what is won lasts, in times until the first job ends
BEYOND = 2.0
#: sets of jobs whose best partition is found between two yields
PARTITIONS_A_STEP = 32


class RegroupPlan(Struct, frozen=True):
    """A regrouping that pays: its moves in order, what it saves per hour, and what it costs."""

    moves: dict[JobId, Pins]
    saves: float
    costs: float
    net: float


class Search(Struct):
    """Looks for a regrouping of some groups."""

    planner: Planner
    #: the jobs of all groups
    needs: dict[JobId, JobDemand]
    #: of the groups as they stand, by the plan's measure (:class:`~rollmuxd.policies.thrift.model.Plan`)
    values: dict[GroupId, float]
    #: of each job, what moving it costs, dollars; not there: it stays where it is
    costs: dict[JobId, float]
    #: nodes that are in no group, the cheapest first, by pool
    free: Mapping[PoolName, Sequence[NodeId]]
    #: by which bound a job may be where newcomers come, or come itself; not there: it cannot pay for that
    among: dict[JobId, JobDemand]
    #: jobs in a group at most
    max_group: int
    #: of the jobs, hours
    ages: dict[JobId, float]

    def hours(self, jobs: Iterable[JobId]) -> float:
        """How long a better partition of these jobs is worth something, beyond the first end of one.

        Without knowing their lives: a job that has lived long will live long (Lindy), the newest half an hour. Of what
        was won some is left after that: :data:`BEYOND` times as long was cheapest on the production trace.
        """
        return BEYOND / sum(1 / (self.ages[job] + 0.5) for job in jobs)

    def regroup(self, options: Sequence[GroupSnapshot]) -> Generator[None, None, RegroupPlan | None]:
        """The best regrouping of these groups, if it pays while it lasts."""
        now = sum(self.values[option.group] for option in options)
        jobs = [job for option in options for job in option.seats]
        hours = self.hours(jobs)
        if len(jobs) > UNION_JOBS or not any(job in self.costs for job in jobs):
            return None
        # one group: the same jobs together, on other nodes
        at = {job: option.group for option in options for job in option.seats}
        parts = [jobs] if len(options) == 1 else (yield from self._partition(at, hours, now * hours))
        wanted: dict[JobId, tuple[GroupId, Pins]] = {}
        taken: set[NodeId] = set()
        saves = now
        for part, option in self._homes(options, parts):
            needs = self._demands(part, at)
            seated = None if needs is None else (yield from self._seat(part, needs, option, hours))
            pins = None if seated is None else seated[0].by_name(self.free, taken)
            if seated is None or pins is None:
                return None
            to = f"new {part[0]}" if option is None else option.group
            wanted |= {job: (to, mine) for job, mine in pins.items() if job not in seated[1]}
            saves -= seated[0].value
        moves = yield from self._in_order(options, wanted)
        costs = sum(self.costs[job] for job in moves)
        net = saves * hours - costs
        return RegroupPlan(moves, saves, costs, net) if moves and net > LEAST_GAIN else None

    # ---- the best partition ------------------------------------------------------------------------------------------

    def _partition(
        self, at: Mapping[JobId, GroupId], hours: float, below: float
    ) -> Generator[None, None, list[list[JobId]]]:
        """The parts of least value over the hours, moves included; none: nothing is below, or no job would move."""
        jobs = list(at)
        here = [sum(1 << place for place, other in enumerate(jobs) if at[other] == at[job]) for job in jobs]  # as bits
        alone, mixed = ([known.get(job) for job in jobs] for known in (self.needs, self.among))
        values: dict[int, float] = {}  # by set of jobs that can share, as bits
        grow: list[tuple[int, ...]] = [(place,) for place in range(len(jobs))]
        apart = [0] * len(jobs)  # with which later ones a job cannot share, as bits: nor can any larger set with both
        while grow:
            members = grow.pop()
            bits = barred = 0
            for place in members:
                bits |= 1 << place
                barred |= apart[place]
            of = mixed if bits & ~here[members[0]] else alone
            needs = [need for place in members if (need := of[place]) is not None]
            value = None if len(needs) < len(members) else (yield from self.planner.value(needs))
            if value is None:
                if len(members) == 2:
                    apart[members[0]] |= 1 << members[1]
                continue
            moves = self._least_moves([jobs[place] for place in members], at) if of is mixed else 0.0
            values[bits] = value * hours + moves
            if len(members) < self.max_group:
                further = range(members[-1] + 1, len(jobs))
                grow += [(*members, place) for place in further if not barred >> place & 1]
        best, begins = [0.0], [0]  # by set of jobs: the least value, and the part in which its first job is
        worth: list[list[tuple[int, float]]] = [[] for _ in jobs]  # by first job: parts below any partition of theirs
        for left in range(1, 1 << len(jobs)):
            if left % PARTITIONS_A_STEP == 0:
                yield
            of_first = worth[(left & -left).bit_length() - 1]
            least, begin = inf, 0
            for part, value in of_first:
                if part & left == part and (total := value + best[left ^ part]) < least:
                    least, begin = total, part
            if (whole := values.get(left, inf)) < least:
                least, begin = whole, left
                of_first.append((left, whole))
            best.append(least)
            begins.append(begin)
        if best[-1] >= below - LEAST_GAIN:
            return []
        parts, left = [], len(best) - 1
        while left:
            part = begins[left]
            parts.append([job for place, job in enumerate(jobs) if part >> place & 1])
            left ^= part
        same = len(parts) == len({*at.values()}) and all(len({at[job] for job in part}) == 1 for part in parts)
        return [] if same else parts

    def _demands(self, members: Sequence[JobId], at: Mapping[JobId, GroupId]) -> list[JobDemand] | None:
        """What these jobs ask for together; None: they come from several groups, and one cannot pay for that."""
        known = self.needs if len({at[job] for job in members}) == 1 else self.among
        found = [known[job] for job in members if job in known]
        return found if len(found) == len(members) else None

    def _least_moves(self, members: Sequence[JobId], at: Mapping[JobId, GroupId]) -> float:
        """What the moves cost at least that bring these together, in the group where most of them are."""
        costs: dict[GroupId, float] = {}
        for job in members:
            costs[at[job]] = costs.get(at[job], 0.0) + self.costs.get(job, inf)
        return sum(sorted(costs.values())[:-1])

    # ---- new groups --------------------------------------------------------------------------------------------------

    def _homes(
        self, options: Sequence[GroupSnapshot], parts: Sequence[Sequence[JobId]]
    ) -> Iterator[tuple[Sequence[JobId], GroupSnapshot | None]]:
        """Each part, and the group where it is to be: that of most of its jobs, unless a part before has it."""

        def staying(part: Sequence[JobId], option: GroupSnapshot) -> int:
            return sum(1 if job in self.costs else UNION_JOBS for job in part if job in option.seats)

        left = list(options)
        for part in sorted(parts, key=lambda part: -max(staying(part, option) for option in options)):
            option = max(left, key=lambda option: staying(part, option), default=None)
            home = option if option is not None and staying(part, option) else None
            left = [it for it in left if it is not home]
            yield part, home

    def _seat(
        self, part: Sequence[JobId], needs: Sequence[JobDemand], option: GroupSnapshot | None, hours: float
    ) -> Generator[None, None, tuple[Plan, dict[JobId, Pins]] | None]:
        """The best way to run a part where a group is, over the hours with moves: the plan, and which jobs stay."""
        here = {} if option is None else {job: option.seats[job] for job in part if job in option.seats}
        fixed = [job for job in part if job not in self.costs]
        loose = [job for job in here if job in self.costs]
        least = yield from self.planner.value(needs)
        if least is None or any(job not in here for job in fixed):
            return None
        spare = {pool: len(nodes) for pool, nodes in self.free.items()}
        best: tuple[float, Plan, dict[JobId, Pins]] | None = None
        for count in range(len(loose), -1, -1):
            for staying in combinations(loose, count):
                stay = {job: here[job] for job in part if job in fixed or job in staying}
                costs = sum(self.costs[job] for job in part if job not in stay)
                if best is not None and costs + least * hours >= best[0]:
                    continue
                below = inf if best is None else (best[0] - costs) / hours
                plan = self.planner.fit(needs, stay, spare, below)
                yield
                if plan is not None:
                    best = (costs + plan.value * hours, plan, stay)
        return best and best[1:]

    # ---- in which order ----------------------------------------------------------------------------------------------

    def _in_order(
        self, options: Sequence[GroupSnapshot], wanted: dict[JobId, tuple[GroupId, Pins]]
    ) -> Generator[None, None, dict[JobId, Pins]]:
        """Moves, each certified with the mover in both places; none: there is no such order."""
        sit = {option.group: dict(option.seats) for option in options}
        moves: dict[JobId, Pins] = {}
        while wanted:
            yield
            ready = (job for job, (to, pins) in wanted.items() if self._joins(sit.get(to, {}), job, pins))
            if (job := next(ready, None)) is None:
                return {}
            to, moves[job] = wanted.pop(job)
            for members in sit.values():
                members.pop(job, None)
            sit.setdefault(to, {})[job] = moves[job]
        return moves

    def _joins(self, there: Mapping[JobId, Pins], job: JobId, pins: Pins) -> bool:
        """Whether the job may join, or sit elsewhere among, the jobs that are there by then."""
        seats = {name: mine for name, mine in there.items() if name != job} | {job: pins}
        known = self.needs if job in there else self.among  # a job that is here has turns already
        needs = [known[name] for name in seats if name in known]
        if len(seats) == 1:
            return True
        whole = len(needs) == len(seats) <= self.max_group
        return whole and self.planner.fit(needs, seats, {}) is not None
