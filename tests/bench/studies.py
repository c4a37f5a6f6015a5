"""Studies that decided what is not built: ``python tests/bench/studies.py joint`` (or ``halves``). One JSON object.

``joint``: two groups keep a training node each and share their rollout nodes under one schedule. Groups are those of
``default`` on the production trace, looked at every six hours. No job may become slower than it is then.

``halves``: a rollout node is cut into two nodes of four GPUs, and a job's rollout has one of them where its promise
allows that. On half of the GPUs a rollout takes ``2 ** e`` times as long.
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import ceil
from random import Random
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.apply import apply
from rollmuxd.core.ids import GroupId, Millis
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import rate_of
from rollmuxd.policies.schedule import is_feasible
from rollmuxd.policies.thrift.policy import Thrift
from rollmuxd.sim.fluid import Fluid
from rollmuxd.sim.policies import policy_under_test
from rollmuxd.sim.workload import Options, SimJob, Workload
from rollmuxd.sim.workloads import read

HOUR_MS: Final = 3_600_000
EVERY_MS: Final = 6 * HOUR_MS
DRAWS: Final = (0, 1)
#: dollars per hour of a node of each pool, as the artifact has them
ROLLOUT, TRAIN = 14.08, 42.24
#: jobs of two groups, iterations of one in a rotation, and orders that are tried
JOBS, RATE, ORDERS = 10, 6, 60


class Member(Struct, frozen=True):
    """A job of a group: rollout and train, how many rollout nodes, and the iteration that it has now."""

    rollout_ms: Millis
    train_ms: Millis
    width: int
    pace_ms: Millis
    #: which of the training nodes
    train: int = 0


class Joined(Struct, frozen=True):
    """A group as it stands."""

    members: tuple[Member, ...]
    rollouts: int
    trains: int


def snapshots(draw: int) -> Iterator[list[Joined]]:
    """The groups of ``default`` every so often."""
    drawn = read("weave-production", Options(slo=(1.0, 2.0))).draw(draw)
    state, policy = State(), Thrift(objective="cost")
    found: list[list[Joined]] = []

    def hear(fact: f.Fact) -> None:
        while len(found) * EVERY_MS + EVERY_MS <= fact.at:
            found.append([it for name in state.groups if (it := _joined(state, policy, name))])
        apply(state, fact)

    Fluid(drawn, policy_under_test("default"), seed=draw, accounting="paper", hear=hear).run()
    yield from found


def _joined(state: State, policy: Thrift, name: GroupId) -> Joined | None:
    group = state.groups[name]
    period = policy.period_ms(state, name)
    if not period or group.coming or any(state.jobs[it].move for it in group.jobs):
        return None
    members = []
    for job in map(state.jobs.__getitem__, group.jobs):
        took = [phase.planned_ms or 0 for phase in job.spec.phases]
        pace = sum(took) if len(group.jobs) == 1 else period // max(1, rate_of(group, job))
        members.append(Member(took[0], took[1], len(job.pins["rollout"]), pace))
    nodes = [len({it for job in group.jobs for it in state.jobs[job].pins[pool]}) for pool in ("rollout", "train")]
    return Joined(tuple(members), *nodes)


def packed(members: Sequence[Member], nodes: int) -> list[list[int]] | None:
    """Each member's rollout nodes, such that no node works for more than all of the time; None: first fit fails."""
    left = [1.0] * nodes
    seats: dict[int, list[int]] = {}
    for at in sorted(range(len(members)), key=lambda at: -members[at].rollout_ms / members[at].pace_ms):
        takes = members[at].rollout_ms / members[at].pace_ms
        fit = [node for node in sorted(range(nodes), key=left.__getitem__) if left[node] >= takes - 1e-9]
        if len(fit) < members[at].width:
            return None
        seats[at] = fit[: members[at].width]
        for node in seats[at]:
            left[node] -= takes
    return [seats[at] for at in range(len(members))]


def certified(members: Sequence[Member], nodes: int, chance: Random) -> bool:
    """Whether an order is found in which no member is slower than it is now."""
    seats, turn = packed(members, nodes), max(it.pace_ms for it in members)
    rates = [ceil(turn / it.pace_ms) for it in members]
    if seats is None or max(rates) > RATE:
        return False
    for _ in range(ORDERS):
        begins = [chance.random() for _ in members]
        order = sorted(
            ((number + begins[at]) / rates[at], at) for at in range(len(members)) for number in range(rates[at])
        )
        steps = []
        for _, at in order:
            it = members[at]
            rollouts = tuple(len(members) + node for node in seats[at])
            steps += [(at, rollouts, it.rollout_ms, 0), (at, (len(members) + nodes + it.train,), it.train_ms, 0)]
        if is_feasible(steps, len(members) + nodes + 2, turn):
            return True
    return False


def saved(groups: Sequence[Joined], *, prove: bool) -> int:
    """Rollout nodes that pairs of groups save together, the best pairs first; each group is in one pair."""
    chance, gains = Random(0), []
    for (a, one), (b, other) in combinations(enumerate(groups), 2):
        members = (*one.members, *(replace(it, train=1) for it in other.members))
        if len(members) > JOBS or one.trains + other.trains > 2:
            continue
        nodes = one.rollouts + other.rollouts
        least = max(it.width for it in members)
        fewer = next(
            (
                less
                for less in range(least, nodes)
                if (certified(members, less, chance) if prove else packed(members, less) is not None)
            ),
            nodes,
        )
        gains.append((nodes - fewer, a, b))
    taken: set[int] = set()
    total = 0
    for gain, a, b in sorted(gains, reverse=True):
        if gain and not {a, b} & taken:
            taken |= {a, b}
            total += gain
    return total


def joint() -> dict[str, Any]:
    """What joint groups save, of the bill."""
    bill = by_load = proven = count = 0.0
    for draw in DRAWS:
        for groups in snapshots(draw):
            bill += sum(ROLLOUT * it.rollouts + TRAIN * it.trains for it in groups)
            by_load += ROLLOUT * saved(groups, prove=False)
            proven += ROLLOUT * saved(groups, prove=True)
            count += 1
    return {
        "instants": int(count),
        "dollars_per_hour": round(bill / count, 1),
        "saved_if_load_were_all": round(by_load / bill, 4),
        "saved_with_a_certified_order": round(proven / bill, 4),
    }


def halved(drawn: Workload, longer: float) -> Workload:
    """The same with nodes of four GPUs for rollouts: a job has one where its promise allows that, else two."""
    pools = tuple(
        replace(it, gpus_per_node=4, ram_mb=it.ram_mb // 2) if it.name == "rollout" else it for it in drawn.pools
    )
    return replace(drawn, pools=pools, jobs=tuple(_on_halves(job, longer) for job in drawn.jobs))


def _on_halves(job: SimJob, longer: float) -> SimJob:
    rollout, train = job.planned
    slower = (round(rollout * longer), train)
    slo = (job.spec.slo or 1.0) * sum(job.planned) / sum(slower)
    half = slo >= 1.0
    per_node = 1 if half else 2
    times: Mapping[str, Millis] = {"rollout": slower[0] if half else rollout}
    spec = replace(
        job.spec,
        slo=slo if half else job.spec.slo,
        phases=tuple(replace(it, planned_ms=times.get(it.name, it.planned_ms)) for it in job.spec.phases),
        wants=tuple(replace(it, nodes=it.nodes * per_node) if it.pool == "rollout" else it for it in job.spec.wants),
        states=tuple(
            replace(it, ram_mb=it.ram_mb // per_node) if it.pool == "rollout" else it for it in job.spec.states
        ),
    )
    footprint = {**job.footprint, "rollout": job.footprint["rollout"] * per_node}
    return replace(job, spec=spec, series=(slower if half else job.planned,), footprint=footprint, iterations=job.work)


def halves() -> dict[str, Any]:
    """What ``default`` costs with nodes of four GPUs, relative to nodes of eight (draw 0, accounting *paper*)."""
    drawn = read("weave-production", Options(slo=(1.0, 2.0))).draw(DRAWS[0])
    whole = _bill(drawn)
    told: dict[str, Any] = {}
    for exponent in (0.7, 1.0, 0.5):
        made = halved(drawn, 2**exponent)
        on = sum(a.planned != b.planned for a, b in zip(made.jobs, drawn.jobs, strict=True))
        cost, kept = _bill(made)
        told[f"{exponent:g}"] = {"of_whole_nodes": round(cost / whole[0], 4), "kept": kept, "jobs_on_halves": on}
        print(f"studies: 2 ** {exponent:g}: {told[f'{exponent:g}']}", file=sys.stderr, flush=True)
    return told


def _bill(drawn: Workload) -> tuple[float, float | None]:
    outcome = Fluid(drawn, policy_under_test("default"), seed=DRAWS[0], accounting="paper").run()
    return outcome.cost, outcome.attainment


if __name__ == "__main__":
    print(json.dumps({"joint": joint, "halves": halves}[sys.argv[1]](), indent=1))
