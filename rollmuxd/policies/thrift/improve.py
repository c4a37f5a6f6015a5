"""Which jobs would be better off elsewhere: pairs of groups, partitioned in the best way.

The jobs of two groups are partitioned into sets that can share (:mod:`~rollmuxd.policies.thrift.catalogue`), so that
what the nodes cost until one of the jobs probably ends, and what the moves cost, is least together. Parts are matched
to the groups that are there and nodes to those that jobs sit on, so that as many as possible stay. What is left are
moves, put into an order in which each is certified by itself, with the mover counted in both places, and takes no owner
beyond its nodes; where two jobs would have to change places, one goes by way of nodes of its own.

Everything comes in steps: whoever iterates a search does something else whenever it yields.
"""

from collections.abc import Container, Generator, Iterator, Mapping, Sequence
from itertools import combinations, permutations
from math import inf

from msgspec import Struct

from rollmuxd.core.ids import GroupId, JobId, NodeId, PoolName
from rollmuxd.core.model import Owner
from rollmuxd.core.shares import over_its_nodes
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.model import JobDemand, Pins, Plan, PoolCapacity, numbered

#: jobs of the groups that are partitioned together, at most
UNION_JOBS = 12
#: sets that are looked at, and partial partitions that are tried, for one union at most
SETS, PARTIALS = 1_500, 4_000
#: partitions begin with the parts of these; and stayers are chosen among so many at most
PARTS = 5
#: an improvement below this (dollars) is none
LEAST_GAIN = 1e-6


class GroupOption(Struct, frozen=True):
    """A group as it stands."""

    group: GroupId
    #: its jobs, and where each sits
    seats: Mapping[JobId, Pins]
    #: by the plan's measure (:class:`~rollmuxd.policies.thrift.model.Plan`)
    value: float
    #: changes when the group does
    version: int = 0

    @property
    def jobs(self) -> tuple[JobId, ...]:
        """Its jobs."""
        return tuple(self.seats)


class Step(Struct, frozen=True):
    """One job goes to other nodes. ``to``: a group that is there, or the name of one that a step before has opened."""

    job: JobId
    to: GroupId
    pins: Pins


class RegroupPlan(Struct, frozen=True):
    """A regrouping that pays: its moves in order, what it saves per hour, and what it costs."""

    steps: tuple[Step, ...]
    saves: float
    costs: float
    net: float


class Limits(Struct, frozen=True):
    """Owners who may hold only so many nodes."""

    #: whose a job is, of those who are limited
    owner: Mapping[JobId, str]
    most: Mapping[str, int]
    held: Mapping[str, Owner]

    def after(self, step: Step, old: Pins) -> "Limits | None":
        """What they hold when a job has gone from there; None: it may not, as it has the old nodes until then."""
        name = self.owner.get(step.job)
        if name is None:
            return self
        owner = self.held.get(name, Owner())
        if over_its_nodes(name, owner, step.pins, self.most[name]):
            return None
        nodes = dict(owner.nodes)
        for pins, more in ((step.pins, 1), (old, -1)):
            for node in (node for some in pins.values() for node in some):
                nodes[node] = nodes.get(node, 0) + more
        held = Owner({node: count for node, count in nodes.items() if count > 0})
        return Limits(self.owner, self.most, {**self.held, name: held})


class Search:
    """Looks for a regrouping of some groups.

    Args:
        planner: of sets of jobs.
        needs: the jobs of all groups.
        costs: of each job, what moving it costs, dollars; not there: it stays where it is.
        twice: jobs that can afford to be moved twice.
        rigid: jobs that cannot afford that anybody comes, who loads what he has where they are, nor to come to others.
        free: nodes that are in no group, the cheapest first, by pool.
        max_group: jobs in a group at most.
        limits: how many nodes owners may hold.
    """

    def __init__(
        self,
        planner: Planner,
        needs: Mapping[JobId, JobDemand],
        costs: Mapping[JobId, float],
        free: Mapping[PoolName, Sequence[NodeId]],
        *,
        twice: Container[JobId],
        rigid: Container[JobId] = (),
        max_group: int,
        limits: Limits,
    ) -> None:
        self.planner, self.needs, self.costs, self.free, self.max_group = planner, needs, costs, free, max_group
        self.twice, self.rigid, self.limits = twice, rigid, limits

    # ---- the best partition ------------------------------------------------------------------------------------------

    def regroup(self, crews: Sequence[GroupOption], hours: float) -> Generator[None, None, RegroupPlan | None]:
        """The best regrouping of these groups, if it pays within so many hours."""
        now = sum(crew.value for crew in crews)
        jobs = tuple(sorted(job for crew in crews for job in crew.seats))
        movers = [self.costs[job] for job in jobs if job in self.costs]
        if len(jobs) > UNION_JOBS or not movers:
            return None
        if (now - self.least(jobs)) * hours <= min(movers):
            return None
        if len(crews) == 1:  # the same jobs together, on other nodes
            return (yield from self._regroup_plan(crews, [jobs], hours, now))
        parts = yield from self.partition(crews, jobs, hours, now * hours)
        if parts is None or sorted(parts) == sorted(tuple(sorted(crew.jobs)) for crew in crews):
            return None
        return (yield from self._regroup_plan(crews, parts, hours, now))

    def partition(
        self, crews: Sequence[GroupOption], jobs: tuple[JobId, ...], hours: float, below: float
    ) -> Generator[None, None, list[tuple[JobId, ...]] | None]:
        """The parts of least value over the hours, moves included; None: nothing is below."""
        columns = yield from self._columns(crews, jobs, hours)
        place = {job: bit for bit, job in enumerate(jobs)}
        masks: list[list[tuple[float, float, int]]] = [[] for _ in jobs]
        for members, total in columns.items():
            mask = sum(1 << place[job] for job in members)
            least = self.least(members) * hours
            masks[place[members[0]]].append((total - least, total, mask))
        for each in masks:
            each.sort()
        rest: dict[int, float] = {0: 0.0}
        best, found, tried = below - LEAST_GAIN, None, 0
        stack: list[tuple[int, float, tuple[int, ...]]] = [((1 << len(jobs)) - 1, 0.0, ())]
        while stack:
            left, spent, chosen = stack.pop()
            tried += 1
            if tried > PARTIALS:
                break
            if tried % 400 == 0:
                yield
            if not left:
                if spent < best:
                    best, found = spent, chosen
                continue
            pushed = []
            for _, total, mask in masks[(left & -left).bit_length() - 1]:
                if mask & left != mask:
                    continue
                after = left ^ mask
                if after not in rest:
                    rest[after] = self.least([job for job in jobs if after >> place[job] & 1]) * hours
                if spent + total + rest[after] < best:
                    pushed.append((after, spent + total, (*chosen, mask)))
            stack.extend(reversed(pushed))
        if found is None:
            return None
        return [tuple(job for job in jobs if mask >> place[job] & 1) for mask in found]

    def _columns(
        self, crews: Sequence[GroupOption], jobs: tuple[JobId, ...], hours: float
    ) -> Generator[None, None, dict[tuple[JobId, ...], float]]:
        """Sets of these jobs that can share, and what each costs over the hours: moves at their least included."""
        home = {job: crew.group for crew in crews for job in crew.seats}
        found: dict[tuple[JobId, ...], float] = {}
        grow: list[tuple[JobId, ...]] = [(job,) for job in jobs]
        apart: set[tuple[JobId, ...]] = set()  # pairs that cannot share, nor can larger sets of which they are part
        while grow and len(found) < SETS:
            members = grow.pop()
            needs = [self.needs[job] for job in members]
            if len(needs) > 1:
                yield from self.planner.prepare(needs)
            plan = self.planner.plan(needs)
            if len(members) == 2 and plan is None:
                apart.add(members)
            if plan is None:
                continue
            moves = self._least_moves(members, home)
            if moves < inf:
                found[members] = plan.value * hours + moves
            if len(members) < self.max_group:
                near = [job for job in jobs if job > members[-1]]
                grow += [(*members, job) for job in near if not any((member, job) in apart for member in members)]
        return found

    def _least_moves(self, members: tuple[JobId, ...], home: Mapping[JobId, GroupId]) -> float:
        """What the moves cost at least that bring these together, in the group where most of them are."""
        homes = {home[job] for job in members}
        fixed = {home[job] for job in members if job not in self.costs}
        if len(fixed) > 1 or (len(homes) > 1 and any(job in self.rigid for job in members)):
            return inf
        away: dict[GroupId, float] = {}
        total = 0.0
        for job in members:
            cost = self.costs.get(job, 0.0)
            total += cost
            away[home[job]] = away.get(home[job], 0.0) + cost
        kept = max(away.values()) if not fixed else sum(away[group] for group in fixed)
        return total - kept

    # ---- who goes where ----------------------------------------------------------------------------------------------

    def _regroup_plan(
        self, crews: Sequence[GroupOption], parts: Sequence[tuple[JobId, ...]], hours: float, now: float
    ) -> Generator[None, None, RegroupPlan | None]:
        """Match the parts to the groups, and order the moves; None: it does not pay, or cannot be done."""
        best: tuple[float, list[tuple[GroupOption | None, Plan, dict[JobId, Pins]]]] | None = None
        seated: dict[tuple[tuple[JobId, ...], GroupId], tuple[float, Plan, dict[JobId, Pins]] | None] = {}
        for assigned in _matchings(crews, parts):
            total, chosen = 0.0, []
            for part, crew in zip(parts, assigned, strict=True):
                key = (part, "" if crew is None else crew.group)
                if key not in seated:
                    seated[key] = yield from self._seat(part, crew, hours)
                found = seated[key]
                if found is None:
                    break
                total += found[0]
                chosen.append((crew, found[1], found[2]))
            else:
                if best is None or total < best[0]:
                    best = (total, chosen)
        if best is None or best[0] >= now * hours - LEAST_GAIN:
            return None
        steps = yield from self._steps(crews, best[1])
        if not steps:  # there is no such order; or nobody has to move, and it is only the wheel that could be better
            return None
        costs = sum(self.costs[step.job] for step in steps)
        saves = now - sum(plan.value for _, plan, _ in best[1])
        net = saves * hours - costs
        return RegroupPlan(tuple(steps), saves, costs, net) if net > LEAST_GAIN else None

    def _seat(
        self, part: tuple[JobId, ...], crew: GroupOption | None, hours: float
    ) -> Generator[None, None, tuple[float, Plan, dict[JobId, Pins]] | None]:
        """The best way to run a part where a group is: value over the hours with moves, the plan, who stays where."""
        here = [] if crew is None else [job for job in part if job in crew.seats]
        fixed = [job for job in part if job not in self.costs]
        if any(job not in here for job in fixed):
            return None
        loose = [job for job in here if job in self.costs]
        best: tuple[float, Plan, dict[JobId, Pins]] | None = None
        least = self.least(part) * hours
        for count in range(len(loose), -1, -1):
            for staying in combinations(loose, count):
                stay = {*fixed, *staying}
                costs = sum(self.costs[job] for job in part if job not in stay)
                if best is not None and costs + least >= best[0]:
                    continue
                seats = {job: crew.seats[job] for job in part if job in stay} if crew is not None else {}
                plan = self._fit(part, seats)
                yield
                if plan is not None and (best is None or costs + plan.value * hours < best[0]):
                    best = (costs + plan.value * hours, plan, seats)
        return best

    def _fit(self, part: Sequence[JobId], seats: Mapping[JobId, Pins]) -> Plan | None:
        """A plan in which some sit where they sit, and the others on these nodes or on new ones."""
        needs = [self.needs[job] for job in part]
        if len(needs) == 1:
            return self.planner.alone(needs[0])
        rooms = {
            pool: PoolCapacity(room.price, room.worth, room.ram_mb, room.gpu_mb, len(self.free.get(pool, ())))
            for pool, room in self.planner.rooms.items()
        }
        seated = {part.index(job): mine for job, mine in numbered(seats)[1].items()}
        return self.planner.fit(needs, seated, rooms)

    def least(self, jobs: Sequence[JobId]) -> float:
        """No partition of these jobs has less value."""
        return self.planner.least(map(self.needs.__getitem__, jobs))

    # ---- in which order ----------------------------------------------------------------------------------------------

    def _steps(
        self, crews: Sequence[GroupOption], chosen: Sequence[tuple[GroupOption | None, Plan, dict[JobId, Pins]]]
    ) -> Generator[None, None, list[Step] | None]:
        """Moves, each certified with the mover in both places; None: there is no such order."""
        taken: dict[NodeId, None] = {}
        limits = self.limits
        sit: dict[GroupId, dict[JobId, Pins]] = {crew.group: dict(crew.seats) for crew in crews}
        wanted: list[Step] = []
        for number, (crew, plan, stay) in enumerate(chosen):
            group = f"new{number}" if crew is None else crew.group
            pins = self._pins(plan, stay, taken)
            if pins is None:
                return None
            wanted += [Step(job, group, mine) for job, mine in pins.items() if job not in stay]
        steps: list[Step] = []
        detours = 0
        while wanted:
            ready = None
            for step in wanted:
                yield
                if limits.after(step, {}) is not None and self._joins(sit, step):
                    ready = step
                    break
            if ready is None:
                ready = self._detour(wanted, taken, detours, limits)
                detours += 1
                if ready is None or detours > len(wanted):
                    return None
            else:
                wanted.remove(ready)
            for members in sit.values():
                if ready.job in members:
                    limits = limits.after(ready, members.pop(ready.job)) or limits
            sit.setdefault(ready.to, {})[ready.job] = ready.pins
            steps.append(ready)
        return steps

    def _pins(self, plan: Plan, stay: Mapping[JobId, Pins], taken: dict[NodeId, None]) -> dict[JobId, Pins] | None:
        """The plan's nodes by name: those that the stayers have, then free ones; None: there are not so many."""
        names = {pool: list(nodes) for pool, nodes in numbered(stay)[0].items()}
        for pool, count in plan.nodes.items():
            mine = names.setdefault(pool, [])
            for node in self.free.get(pool, ()):
                if len(mine) >= count:
                    break
                if node not in taken:
                    mine.append(node)
                    taken[node] = None
            if len(mine) < count:
                return None
        return {
            need.job: {pool: tuple(names[pool][node] for node in nodes) for pool, nodes in seats.items()}
            for need, seats in zip(plan.needs, plan.seats, strict=True)
        }

    def _joins(self, sit: Mapping[GroupId, dict[JobId, Pins]], step: Step) -> bool:
        """Whether the job may join the group as it is at that time."""
        there = {job: pins for job, pins in sit.get(step.to, {}).items() if job != step.job}
        if not there:
            return True
        if len(there) >= self.max_group:
            return False
        if step.job not in sit[step.to] and any(job in self.rigid for job in (step.job, *there)):
            return False  # one of them would wait for a first turn; who is here already has turns
        there[step.job] = step.pins
        return self.planner.fit_named([self.needs[job] for job in there], there) is not None

    def _detour(self, wanted: Sequence[Step], taken: dict[NodeId, None], number: int, limits: Limits) -> Step | None:
        """One of the jobs goes to nodes of its own first: the cheapest to move, where there are free nodes."""
        for step in sorted(wanted, key=lambda step: self.costs[step.job]):
            if step.job not in self.twice:
                continue
            pins: dict[PoolName, tuple[NodeId, ...]] = {}
            for pool, width in self.needs[step.job].profile.widths:
                free = [node for node in self.free.get(pool, ()) if node not in taken][:width]
                if len(free) == width:
                    pins[pool] = tuple(free)
            aside = Step(step.job, f"aside{number}", pins)
            if len(pins) == len(self.needs[step.job].profile.widths) and limits.after(aside, {}) is not None:
                taken.update(dict.fromkeys(node for nodes in pins.values() for node in nodes))
                return aside
        return None


def _matchings(
    crews: Sequence[GroupOption], parts: Sequence[tuple[JobId, ...]]
) -> Iterator[tuple[GroupOption | None, ...]]:
    """Ways to run each part where some group is, or anew: those in which most stay first, a few of them."""
    places: list[GroupOption | None] = [*crews, *[None] * max(0, len(parts) - len(crews))]
    found: dict[tuple[str, ...], tuple[int, tuple[GroupOption | None, ...]]] = {}
    for some in permutations(places, len(parts)):
        stay = sum(
            sum(job in crew.seats for job in part) for part, crew in zip(parts, some, strict=True) if crew is not None
        )
        cleared = tuple(
            crew if crew is not None and any(job in crew.seats for job in part) else None
            for part, crew in zip(parts, some, strict=True)
        )
        found.setdefault(tuple("" if crew is None else crew.group for crew in cleared), (stay, cleared))
    ordered = sorted(found.values(), key=lambda it: -it[0])
    for _, some in ordered[:PARTS]:
        yield some


def horizon_hours(ages: Sequence[float]) -> float:
    """How long jobs of these ages (hours) will probably stay as they are, until the first of them ends.

    Without knowing their lives: who has lived long will live long (Lindy), the newest half an hour.
    """
    return 1 / sum(1 / (age + 0.5) for age in ages)
