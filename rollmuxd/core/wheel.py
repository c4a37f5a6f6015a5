"""What a wheel takes: the period of strict round robin, by closed form where that is exact, else by the recurrence.

A wheel is a cyclic sequence of visits. A visit begins when its job has ended its visit before (and its own gap has
passed) and when every node it claims has ended the visit before on it: a max-plus linear recurrence. Its growth per
turn is the **period**, the paper's meta-iteration (RollMux section 4.2; ``T_meta = max(T_cycle, T_load)``).

Everything here is arithmetic on plain numbers; times are integer milliseconds.
"""

from collections.abc import Mapping, Sequence

from msgspec import Struct

from rollmuxd.core.model import JobId, Millis, NodeId


class Leg(Struct, frozen=True):
    """One phase of a job, as the plan sees it: what it claims and for how long."""

    job: JobId
    nodes: tuple[NodeId, ...]
    #: in its slot, load and park times included
    busy_ms: Millis
    #: the job's own time before it
    gap_ms: Millis = 0


def turn(wheel: Sequence[Leg], jobs: dict[JobId, Millis], nodes: dict[NodeId, Millis]) -> None:
    """Let the wheel turn once, moving ``jobs`` and ``nodes`` (when each is free again) on in place."""
    for leg in wheel:
        start = jobs.get(leg.job, 0) + leg.gap_ms
        for node in leg.nodes:
            free = nodes.get(node, 0)
            start = max(start, free)
        end = start + leg.busy_ms
        jobs[leg.job] = end
        for node in leg.nodes:
            nodes[node] = end


def certified(wheel: Sequence[Leg], period_ms: Millis) -> bool:
    """Whether the wheel's period is at most this, for any durations up to the planned ones. Exact.

    The recurrence is max-plus linear: it stays within the period iff no cycle of its event graph has a greater mean,
    and then a fixpoint is met in as many turns as there are jobs and nodes (research/policy.md section 5).
    """
    jobs: dict[JobId, Millis] = {leg.job: 0 for leg in wheel}
    nodes: dict[NodeId, Millis] = {node: 0 for leg in wheel for node in leg.nodes}
    for _ in range(len(jobs) + len(nodes) + 1):
        was_jobs, was_nodes = dict(jobs), dict(nodes)
        turn(wheel, jobs, nodes)
        grew = _hold_back(jobs, was_jobs, period_ms)
        if not _hold_back(nodes, was_nodes, period_ms) and not grew:
            return True
    return False


def _hold_back(now: dict[str, Millis], was: Mapping[str, Millis], period_ms: Millis) -> bool:
    """Replace each time by max(was, now - period); tell whether any is later than it was."""
    grew = False
    for key, before in was.items():
        ahead = now[key] - period_ms
        if ahead > before:
            now[key] = ahead
            grew = True
        else:
            now[key] = before
    return grew


def period_ms(wheel: Sequence[Leg]) -> Millis:
    """The wheel's period, rounded up to a whole millisecond: the least one that is certified."""
    if not wheel:
        return 0
    low = lower_bound_ms(wheel)
    if certified(wheel, low):
        return low
    high = sum(leg.busy_ms + leg.gap_ms for leg in wheel)
    while low + 1 < high:  # low is not certified, high (everything one after the other) is
        middle = (low + high) // 2
        if certified(wheel, middle):
            high = middle
        else:
            low = middle
    return high


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
