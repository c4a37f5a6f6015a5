"""What a schedule takes: its period, proven for any durations up to the planned ones.

A schedule is a cyclic sequence of turns. A turn begins when its job has ended its turn before (its own gap included),
and so has every node that it claims. That is a max-plus linear recurrence. Its growth per rotation is the **period**,
the paper's meta-iteration (RollMux section 4.2; ``T_meta = max(T_cycle, T_load)``).

Strict round robin is the schedule with one turn for each phase of each job. A job may also go round several times in a
rotation. Then its iteration takes the period divided by its **rate**. Its promise is kept where the period is at most
``rate x SLO x T_solo``. The proof is the same. Let z be the fixpoint that :func:`is_feasible` finds for a period P,
with A(z) <= z + P for the recurrence A. A is monotone and A(z + c) = A(z) + c, so the m-th rotation ends by z + m P, if
durations are within the plan. A job that leaves takes its turns along, which makes A smaller. Hence a mean iteration
over m rotations of at most P / rate + z / (m rate).

A schedule may take one job after the other, phase by phase (*job-major*), or be :func:`pipelined`.

Everything here is arithmetic on plain numbers; times are integer milliseconds.
"""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import pairwise
from math import inf
from operator import sub
from typing import Final, TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import JobId, Millis, NodeId

#: a leg in numbers: its job's place among the clocks, its nodes' places, how long it is busy, its gap before
Step: TypeAlias = tuple[int, tuple[int, ...], Millis, Millis]

#: rotations after which bounds of a period that have not met are taken as they are
ROTATIONS: Final = 6


class Leg(Struct, frozen=True):
    """One phase of a job, as the plan sees it: what it claims and for how long."""

    job: JobId
    nodes: tuple[NodeId, ...]
    #: in its slot, load and park times included
    busy_ms: Millis
    #: the job's own time before it
    gap_ms: Millis = 0
    #: its place in its job's cycle
    phase: int = 0


def spanning(claims: Sequence[Collection[str]]) -> tuple[bool, ...]:
    """Of a job's phases, by what each claims: which claim all that another claims, and more."""
    return tuple(any(set(other) < set(mine) for other in claims) for mine in claims)


def pipelined(order: Sequence[int], claims: Sequence[Sequence[Collection[str]]]) -> Iterator[list[tuple[int, int]]]:
    """The orders of phases in which jobs begin their iterations while the jobs before them are in later stages.

    A job-major schedule serves ``A.rollout A.train A.sync B.rollout ...``. A sync over both pools then keeps B from its
    rollout while A trains. Pipelined it is ``A.rollout B.train B.sync B.rollout A.train A.sync``. The same helps
    wherever a job comes back to nodes that it had in an earlier phase.

    A stage ends with a phase that is not :func:`spanning`. With a depth of one a job's first stage goes beside the rest
    of the job before it. Each further depth cuts off one more stage and overlaps one more job, as a reward pool needs.
    Where there are too few jobs for a depth, some places are idle.

    Args:
        order: iterations of a rotation, as numbers of jobs.
        claims: by job, what each of its phases claims.

    Returns:
        Turns as (job, phase), by depth. None where no job comes back to anything, or where a job would follow itself.
    """
    if not any(sum(map(len, mine)) > len(set().union(*mine)) for mine in claims):
        return
    ends = [[at + 1 for at, wide in enumerate(spanning(mine)) if not wide] for mine in claims]
    for depth in range(1, max(2, *map(len, ends))):
        cuts = [(0, *some[:depth], len(mine)) for some, mine in zip(ends, claims, strict=True)]
        stages = {job: [range(*both) for both in pairwise(some)] for job, some in enumerate(cuts)}
        places = [*order, *range(len(claims), len(claims) + depth + 1 - len(order))]
        turns: list[tuple[int, int]] = []
        for at in range(len(places)):
            beside = [places[at - back] for back in range(depth + 1)]
            if len({*beside}) <= depth:
                return
            for back, job in enumerate(beside):
                turns += [(job, phase) for some in stages.get(job, ())[back : back + 1] for phase in some]
        yield turns


def is_feasible(steps: Sequence[Step], clocks: int, period_ms: Millis) -> bool:
    """Whether a schedule's period is at most this: the fixpoint is found. Exact.

    The recurrence is max-plus linear: it stays within the period iff no cycle of its event graph has a greater mean.
    Then a fixpoint is met in as many rotations as there are clocks (one for each job and each node).
    """
    z = [0] * clocks
    for _ in range(clocks + 1):
        was = z.copy()
        _rotate(z, steps)
        z = [max(at - period_ms, before) for at, before in zip(z, was, strict=True)]
        if z == was:
            return True
    return False


def bounds_ms(steps: Sequence[Step], clocks: int, below: float = inf) -> tuple[Millis, Millis]:
    """The least and the most that a schedule's period can be: what every clock, and some clock, gains in a rotation.

    Wherever the clocks stand, ``A(z) <= z + P`` proves P, and ``A(z) >= z + P`` proves that no less will do. The two
    nearly always meet within three rotations. ``below``: a period from there on is of no use.
    """
    z: list[Millis] = [0] * clocks
    _rotate(z, steps)
    low, high = min(z), max(z)
    for _ in range(ROTATIONS - 1):
        if low >= high or low >= below:
            break
        was = z.copy()
        _rotate(z, steps)
        gains = [*map(sub, z, was)]
        low, high = max(low, min(gains)), min(high, max(gains))
    return low, high


def _rotate(z: list[Millis], steps: Sequence[Step]) -> None:
    """Let one rotation pass, moving the clocks on. The planner's innermost loop: max() would take as long again."""
    for job, nodes, busy, gap in steps:
        at = z[job] + gap
        for node in nodes:
            if z[node] > at:  # noqa: PLR1730
                at = z[node]
        at += busy
        z[job] = at
        for node in nodes:
            z[node] = at


def _turn(z: list[Millis], step: Step) -> Millis:
    """One turn, by itself: when it ends."""
    _rotate(z, (step,))
    return z[step[0]]


def steps_of(schedule: Sequence[Leg]) -> tuple[list[Step], int]:
    """The schedule in numbers, and how many clocks it has."""
    clocks: dict[tuple[str, str], int] = {}
    steps = []
    for leg in schedule:
        job = clocks.setdefault(("job", leg.job), len(clocks))
        nodes = tuple(clocks.setdefault(("node", node), len(clocks)) for node in leg.nodes)
        steps.append((job, nodes, leg.busy_ms, leg.gap_ms))
    return steps, len(clocks)


def period_ms(schedule: Sequence[Leg]) -> Millis:
    """The schedule's period, rounded up to a whole millisecond: the least one that is certified."""
    steps, clocks = steps_of(schedule)
    low, high = bounds_ms(steps, clocks) if steps else (0, 0)
    # high is certified
    return bisect_left(range(high), True, low, key=lambda period: is_feasible(steps, clocks, period))


class Bound(Struct, frozen=True):
    """What a job's iterations may take."""

    limit_ms: Millis
    #: by how much it is ahead of that
    credit_ms: Millis
    #: the first of its further iterations by which it is judged
    judged_at: int


#: rotations of a schedule until a newcomer comes, in the last but one of these; and rotations that are played after
#: that
TURNED, PLAYED = 3, 10


def first_turn_feasible(
    before: Sequence[Leg], after: Sequence[Leg], each: Mapping[JobId, int], bounds: Mapping[JobId, Bound]
) -> bool:
    """Whether every job keeps its bound in the first rotations of a schedule that a newcomer joined.

    A certificate speaks of a schedule that has been turning: it leaves out a job's wait before that, once. So the first
    rotations are played, with everything as long as planned, for each time at which it could come. Just after a turn
    has begun is the worst for the newcomer: it waits for all of that. Just before is the worst for a member: the
    newcomer's turns go first, and nothing of them is over yet.

    Args:
        before: the schedule as it is.
        after: the schedule with the newcomer. Turns of others keep their rotation, the newcomer's join the present
        rotation. each: by job, how many phases make an iteration. bounds: of the jobs that have a promise.
    """
    steps, clocks = steps_of((*before, *after))
    old, z = steps[: len(before)], [0] * clocks
    begun = []
    for step in old * TURNED:
        end = _turn(z, step)
        begun.append((end - step[2], end))
    some = begun[(TURNED - 2) * len(old) : (TURNED - 1) * len(old)]

    def is_borne(comes: Millis) -> bool:
        z, passed = [comes] * clocks, [0] * len(before)
        done, finished, since = dict.fromkeys(each, 0), dict.fromkeys(each, 0), dict.fromkeys(each, comes)
        for number, (begin, end) in enumerate(begun):
            at = number % len(before)
            if begin > comes:
                continue
            passed[at] += 1
            for clock in (steps[at][0], *steps[at][1]):
                z[clock] = max(z[clock], end)
            name = before[at].job
            done[name] += 1
            if done[name] % each[name] == 0:
                since[name] = end
        rotation = min(passed)
        known: dict[tuple[JobId, int], list[int]] = {}
        for leg, count in zip(before, passed, strict=True):
            known.setdefault((leg.job, leg.phase), []).append(count)
        turns = [
            (leg, step, known[leg.job, leg.phase].pop(0) if known.get((leg.job, leg.phase)) else rotation)
            for leg, step in zip(after, steps[len(before) :], strict=True)
        ]
        for now in range(rotation, rotation + PLAYED):
            for leg, step, first in turns:
                name = leg.job
                if now < first:
                    continue  # it has been passed in this rotation
                if done[name] % each[name] != leg.phase:  # its job passes it when it asks for a later one
                    for node in step[1]:
                        z[node] = max(z[node], z[step[0]])
                    continue
                end = _turn(z, step)
                done[name] += 1
                if done[name] % each[name] == 0 and name in bounds:
                    count, bound = finished[name] + 1, bounds[name]
                    if count >= bound.judged_at and end - since[name] > count * bound.limit_ms + bound.credit_ms:
                        return False
                    finished[name] = count
        return True

    return all(map(is_borne, dict.fromkeys(at for begin, _ in some for at in (begin - 1, begin))))
