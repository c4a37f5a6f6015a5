"""What a wheel takes: its period, proven for any durations up to the planned ones, and what it hangs on.

A wheel is a cyclic sequence of visits. A visit begins when its job has ended its visit before (and its own gap has
passed) and when every node it claims has ended the visit before on it: a max-plus linear recurrence. Its growth per
turn is the **period**, the paper's meta-iteration (RollMux section 4.2; ``T_meta = max(T_cycle, T_load)``).

Strict round robin is the wheel with one visit for each phase of each job. A job may also go round several times in a
turn: then its iteration takes the period by its **rate**, and its promise is kept where the period is at most ``rate x
SLO x T_solo``. The proof is the same (research/policy.md section 5): let z be the fixpoint that :func:`is_feasible`
finds for a period P, with A(z) <= z + P for the recurrence A. A is monotone and A(z + c) = A(z) + c, so the m-th turn
ends by z + m P, whatever the durations are within what was planned; a job that leaves takes its visits along, which
makes A smaller. Hence a mean iteration over m turns of at most P / rate + z / (m rate).

A wheel may take one job after the other, phase by phase (*job-major*), or be :func:`pipelined`.

Everything here is arithmetic on plain numbers; times are integer milliseconds.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import JobId, Millis, NodeId
from rollmuxd.core.policy import Binding, Leg, Link

#: a leg in numbers: its job's place among the clocks, its nodes' places, how long it is busy, its gap before
Step: TypeAlias = tuple[int, tuple[int, ...], Millis, Millis]


def spanning(claims: Sequence[Collection[str]]) -> tuple[bool, ...]:
    """Of a job's phases, by what each claims: which claim all that another claims, and more."""
    return tuple(any(set(other) < set(mine) for other in claims) for mine in claims)


def pipelined(order: Sequence[int], spans: Sequence[Sequence[bool]]) -> list[tuple[int, int]]:
    """The order of phases in which one job begins its iteration while the job before it ends its own.

    A job-major wheel serves ``A.rollout A.train A.sync B.rollout ...``. A sync over both pools then keeps B from its
    rollout while A trains. This order is ``A.rollout B.train B.sync B.rollout A.train A.sync``.

    Args:
        order: iterations of a turn, as numbers of jobs.
        spans: by job, which of its phases are :func:`spanning`.

    Returns:
        Visits as (job, phase). None at all where no phase spans, or where a job would follow itself.
    """
    follows = list(zip((order[-1], *order), order, strict=False))
    if not any(map(any, spans)) or any(before == job for before, job in follows):
        return []
    begins = [flags.index(False) + 1 for flags in spans]  # the least claim of a job spans no other
    visits = []
    for before, job in follows:
        visits += [(job, phase) for phase in range(begins[job])]
        visits += [(before, phase) for phase in range(begins[before], len(spans[before]))]
    return visits


def is_feasible(steps: Sequence[Step], clocks: int, period_ms: Millis, turns: int | None = None) -> bool:
    """Whether a wheel's period is at most this: the fixpoint is found. Exact.

    The recurrence is max-plus linear: it stays within the period iff no cycle of its event graph has a greater mean,
    and then a fixpoint is met in as many turns as there are clocks (one for each job and each node). A planner need
    not wait so long: after fewer ``turns`` True is still a proof, and False means that none was found yet.
    """
    z = [0] * clocks
    for _ in range(clocks + 1 if turns is None else turns):
        was = z.copy()
        _turn(z, steps)
        z = [at - period_ms for at in z]
        z = [at if at > before else before for at, before in zip(z, was, strict=True)]  # noqa: FURB136 - see _turn
        if z == was:
            return True
    return False


def is_feasible_narrow(
    steps: Sequence[tuple[int, int, Millis, Millis]], clocks: int, period_ms: Millis, turns: int
) -> bool:
    """:func:`is_feasible` where every leg has one node, which is most of what a planner asks."""
    z = [0] * clocks
    for _ in range(turns):
        was = z.copy()
        for job, node, busy, gap in steps:
            at, free = z[job] + gap, z[node]
            z[job] = z[node] = (at if at > free else free) + busy  # noqa: FURB136 - see _turn
        z = [at - period_ms for at in z]
        z = [at if at > before else before for at, before in zip(z, was, strict=True)]  # noqa: FURB136 - see _turn
        if z == was:
            return True
    return False


def _turn(z: list[Millis], steps: Sequence[Step]) -> None:
    """Let the wheel turn once, moving the clocks on. The planner's innermost loop: max() would take as long again."""
    for job, nodes, busy, gap in steps:
        at = z[job] + gap
        for node in nodes:
            if z[node] > at:  # noqa: PLR1730
                at = z[node]
        at += busy
        z[job] = at
        for node in nodes:
            z[node] = at


def _visit(z: list[Millis], step: Step) -> Millis:
    """One visit, by itself: when it ends."""
    job, nodes, busy, gap = step
    end = z[job] + gap
    for node in nodes:
        if z[node] > end:  # noqa: PLR1730 - see _turn
            end = z[node]
    end += busy
    z[job] = end
    for node in nodes:
        z[node] = end
    return end


def steps_of(wheel: Sequence[Leg]) -> tuple[list[Step], int]:
    """The wheel in numbers, and how many clocks it has."""
    clocks: dict[tuple[str, str], int] = {}
    steps = []
    for leg in wheel:
        job = clocks.setdefault(("job", leg.job), len(clocks))
        nodes = tuple(clocks.setdefault(("node", node), len(clocks)) for node in leg.nodes)
        steps.append((job, nodes, leg.busy_ms, leg.gap_ms))
    return steps, len(clocks)


def certified(wheel: Sequence[Leg], period_ms: Millis) -> bool:
    """Whether the wheel's period is at most this, for any durations up to the planned ones. Exact."""
    return is_feasible(*steps_of(wheel), period_ms)


def period_ms(wheel: Sequence[Leg]) -> Millis:
    """The wheel's period, rounded up to a whole millisecond: the least one that is certified."""
    if not wheel:
        return 0
    low = lower_bound_ms(wheel)
    steps, clocks = steps_of(wheel)
    if is_feasible(steps, clocks, low):
        return low
    high = sum(leg.busy_ms + leg.gap_ms for leg in wheel)
    while low + 1 < high:  # low is not certified, high (everything one after the other) is
        middle = (low + high) // 2
        if is_feasible(steps, clocks, middle):
            high = middle
        else:
            low = middle
    return high


class Bound(Struct, frozen=True):
    """What a job's iterations may take."""

    limit_ms: Millis
    #: by how much it is ahead of that
    credit_ms: Millis
    #: the first of its further iterations by which it is judged
    judged_at: int


#: turns of a wheel before somebody comes, in the last but one of which he does; and turns that are played after that
TURNED, PLAYED = 3, 10


def first_turn_feasible(
    before: Sequence[Leg], after: Sequence[Leg], each: Mapping[JobId, int], bounds: Mapping[JobId, Bound]
) -> bool:
    """Whether everybody keeps his bound in the first turns of a wheel in which somebody has joined.

    A certificate speaks of a wheel that has been turning: it leaves out what one waits before that, once. So the first
    turns are played, with everything as long as planned, for each time at which he could come. Just after a visit has
    begun is the worst: earlier he would find it ahead of him no less, and wait for less of it afterwards.

    Args:
        before: the wheel as it turns.
        after: the wheel with him; its visits keep the turn that they have, his join the turn at hand.
        each: by job, how many phases make an iteration.
        bounds: of those to whom something is promised.
    """
    steps, clocks = steps_of((*before, *after))
    old, z = steps[: len(before)], [0] * clocks
    begun = []
    for step in old * TURNED:
        end = _visit(z, step)
        begun.append((end - step[2], end))
    comes = dict.fromkeys(begin for begin, _ in begun[(TURNED - 2) * len(old) : (TURNED - 1) * len(old)])
    return all(_first_turn_feasible(before, after, steps, begun, at, [at] * clocks, each, bounds) for at in comes)


def _first_turn_feasible(
    before: Sequence[Leg],
    after: Sequence[Leg],
    steps: Sequence[Step],
    begun: Sequence[tuple[Millis, Millis]],
    comes: Millis,
    z: list[Millis],
    each: Mapping[JobId, int],
    bounds: Mapping[JobId, Bound],
) -> bool:
    """The same, for who comes at that time."""
    done = dict.fromkeys(each, 0)
    since = dict.fromkeys(each, comes)
    passed = [0] * len(before)
    for number, (begin, end) in enumerate(begun):
        index = number % len(before)
        if begin > comes:
            continue
        passed[index] += 1
        job, nodes, _, _ = steps[index]
        for clock in (job, *nodes):
            z[clock] = max(z[clock], end)
        name = before[index].job
        done[name] += 1
        if done[name] % each[name] == 0:
            since[name] = end
    turn = min(passed)
    known: dict[tuple[JobId, int], list[int]] = {}
    for leg, count in zip(before, passed, strict=True):
        known.setdefault((leg.job, leg.phase), []).append(count)
    visits = [
        (leg, step, known[leg.job, leg.phase].pop(0) if known.get((leg.job, leg.phase)) else turn)
        for leg, step in zip(after, steps[len(before) :], strict=True)
    ]
    finished = dict.fromkeys(each, 0)
    for now in range(turn, turn + PLAYED):
        for leg, step, first in visits:
            name = leg.job
            if now < first:
                continue  # it has been passed in this turn
            if done[name] % each[name] != leg.phase:  # its job passes it when it asks for a later one
                for node in step[1]:
                    z[node] = max(z[node], z[step[0]])
                continue
            end = _visit(z, step)
            done[name] += 1
            if done[name] % each[name]:
                continue
            count = finished[name] = finished[name] + 1
            bound = bounds.get(name)
            if bound is None or count < bound.judged_at:
                continue
            if end - since[name] > count * bound.limit_ms + bound.credit_ms:
                return False
    return True


def binding(wheel: Sequence[Leg]) -> Binding | None:
    """The cycle of the event graph whose mean is the wheel's period; None: a wheel that takes no time."""
    period = period_ms(wheel)
    if not period:
        return None
    waits = _waits(wheel)
    late, by = [0] * len(wheel), [-1] * len(wheel)
    last = -1
    for _ in range(len(wheel) + 1):  # Bellman and Ford: with one millisecond less than the period, some cycle grows
        last = -1
        for number, (before, leg, turns, took, _) in enumerate(waits):
            at = late[before] + took - turns * (period - 1)
            if at > late[leg]:
                late[leg], by[leg], last = at, number, leg
    at = last
    for _ in wheel:  # back into the cycle, and once round it
        at = waits[by[at]][0]
    round_, end = [by[at]], at
    while waits[round_[-1]][0] != end:
        round_.append(by[waits[round_[-1]][0]])
    found = [waits[number] for number in reversed(round_)]
    return Binding(
        links=tuple(Link(wheel[leg], node) for _, leg, _, _, node in found),
        turns=sum(turns for _, _, turns, _, _ in found),
        took_ms=sum(took for _, _, _, took, _ in found),
    )


def _waits(wheel: Sequence[Leg]) -> list[tuple[int, int, int, Millis, NodeId | None]]:
    """What waits for what: (leg before, leg, 1 if that was in the turn before, from end to end, the node or None)."""
    last_of: dict[JobId, int] = {}
    last_on: dict[NodeId, int] = {}
    for index, leg in enumerate(wheel):
        last_of[leg.job] = index
        last_on.update(dict.fromkeys(leg.nodes, index))
    waits: list[tuple[int, int, int, Millis, NodeId | None]] = []
    for index, leg in enumerate(wheel):
        before = last_of[leg.job]
        waits.append((before, index, int(before >= index), leg.gap_ms + leg.busy_ms, None))
        last_of[leg.job] = index
        for node in leg.nodes:
            before = last_on[node]
            waits.append((before, index, int(before >= index), leg.busy_ms, node))
            last_on[node] = index
    return waits


def lower_bound_ms(wheel: Sequence[Leg]) -> Millis:
    """``max(T_cycle, T_load)``: the longest job alone, and the load of the busiest node. Never above the period."""
    own: dict[JobId, Millis] = {}
    load: dict[NodeId, Millis] = {}
    for leg in wheel:
        own[leg.job] = own.get(leg.job, 0) + leg.busy_ms + leg.gap_ms
        for node in leg.nodes:
            load[node] = load.get(node, 0) + leg.busy_ms
    return max([0, *own.values(), *load.values()])


def closed_form_is_exact(wheel: Sequence[Leg]) -> bool:
    """Whether the lower bound *is* the period: every job has two legs, the first on one node, the second on one set.

    This is the paper's case with rollouts of width 1 (checked against the recurrence in the tests); with wider
    rollouts whose node sets overlap the true period can be longer.
    """
    legs: dict[JobId, list[Leg]] = {}
    for leg in wheel:
        legs.setdefault(leg.job, []).append(leg)
    second: tuple[NodeId, ...] | None = None
    for mine in legs.values():
        if len(mine) != 2 or len(mine[0].nodes) != 1:
            return False
        if second is None:
            second = mine[1].nodes
        if mine[1].nodes != second or mine[0].nodes[0] in second:
            return False
    return True


def work_conserving_ms(wheel: Sequence[Leg], horizon_turns: int = 24) -> dict[JobId, Millis]:
    """Mean own period per job when a free node takes the first *ready* visit instead of the next in order.

    An event simulation over about ``horizon_turns`` of the longest job, measured over its last 80 % (research
    6.4, mode ASYNC). It is an evaluation, not a certificate: nothing bounds a job's wait in the worst case.
    """
    legs: dict[JobId, list[Leg]] = {}
    for leg in wheel:
        legs.setdefault(leg.job, []).append(leg)
    horizon = horizon_turns * max(sum(leg.busy_ms + leg.gap_ms for leg in mine) for mine in legs.values())
    ready = {job: (mine[0].gap_ms, index) for index, (job, mine) in enumerate(legs.items())}
    at_leg = dict.fromkeys(legs, 0)
    node_free: dict[NodeId, Millis] = {}
    ends: dict[JobId, list[Millis]] = {job: [] for job in legs}
    now = 0
    while now < horizon:
        start, job = min(
            (max([ready[job][0], *(node_free.get(node, 0) for node in legs[job][at_leg[job]].nodes)]), ready[job], job)
            for job in legs
        )[::2]
        leg = legs[job][at_leg[job]]
        now = start
        end = start + leg.busy_ms
        for node in leg.nodes:
            node_free[node] = end
        at_leg[job] = (at_leg[job] + 1) % len(legs[job])
        if at_leg[job] == 0:
            ends[job].append(end)
        ready[job] = (end + legs[job][at_leg[job]].gap_ms, ready[job][1])
    periods = {}
    for job, done in ends.items():
        late = [end for end in done if end >= horizon // 5]
        periods[job] = (late[-1] - late[0]) // (len(late) - 1) if len(late) > 1 else horizon
    return periods
