"""How fast the scheduler decides: nothing but ``Scheduler.handle`` and ``Policy.place``, on one core, without any IO.

The floor of a decision is the least that anything with this interface does: look up a handler by the input's type,
make one fact, write it down, wrap it up. The floor of a placement is one look at every group and at every node.
"""

import random
import time
from collections.abc import Callable, Sequence
from typing import Final

from figures import Json, Rounds, at_least, at_most, collector_of_a_daemon, median, quantile, say, short
from msgspec.structs import replace
from world import CONFIG, World, inventory, job_spec

from rollmuxd.core.context import NOTHING
from rollmuxd.core.decision import Decision
from rollmuxd.core.facts import SlotWithdrawn
from rollmuxd.core.ids import Millis
from rollmuxd.core.inputs import Input, RegisterJob
from rollmuxd.core.model import Job
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, Movable
from rollmuxd.core.state import State
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.thrift.policy import Thrift

GROUPS: Final = 20
JOBS_A_GROUP: Final = 5
#: inputs of a slot's cycle and heartbeats in one batch: 30 % and 70 %
TURNS, BEATS = 12, 28
#: jobs that are placed already, when one more comes
RESIDENTS: Final = (100, 500, 1_000, 2_000)
#: to see that it works
SMALL: Final = (20, 60)
#: steps of a search for moves that are timed, at most
REGROUP_STEPS: Final = 1_500
#: as many as 2,000 jobs need, and a few that stay free
ROLLOUT_NODES, TRAIN_NODES = 1_400, 850
#: production mix: seconds of rollout and train, nodes of each, and share of the jobs
MIX: Final = {
    "7B_8k": (133.8, 112.8, 1, 0.5),
    "8B_32k": (888.0, 559.5, 1, 0.165),
    "14B_8k": (238.6, 197.4, 1, 0.07),
    "7B_4k": (80.5, 77.0, 1, 0.07),
    "8B_8k": (310.1, 120.5, 1, 0.05),
    "32B_8k": (267.6, 361.8, 2, 0.05),
    "3B_8k": (128.3, 71.3, 1, 0.03),
    "4B_32k": (734.3, 464.7, 1, 0.02),
    "14B_4k": (145.0, 126.7, 1, 0.015),
    "8B_16k": (580.5, 241.0, 1, 0.01),
    "4B_8k": (262.5, 86.8, 1, 0.01),
    "8B_4k": (140.6, 70.9, 1, 0.005),
    "3B_4k": (79.3, 47.0, 1, 0.005),
}


def run(budget_s: float, *, small: bool = False) -> Json:
    """Throughput at 100 jobs, and the time of a placement at up to 2,000."""
    found = throughput(0.4 * budget_s, 30 if small else 400)
    found["placement"] = placement(0.25 * budget_s, SMALL if small else RESIDENTS)
    most = max(found["placement"], key=int)
    found[f"placement_ms_{most}"] = found["placement"][most]["p50_ms"]
    thrift = found["placement"][most]["thrift"]
    found[f"thrift_placement_p99_ms_{most}"] = thrift["p99_ms"]
    found[f"thrift_regroup_step_ms_{most}"] = thrift["regroup_step_max_ms"]
    found["targets"] = {
        "inputs_per_s": at_least(found["inputs_per_s"], 50_000),
        "slot_cycle_per_s": at_least(found["slot_cycle_per_s"], 15_000),
        f"placement_ms_{most}": at_most(found[f"placement_ms_{most}"], 10),
        f"thrift_placement_p99_ms_{most}": at_most(thrift["p99_ms"], 20),
        f"thrift_regroup_step_ms_{most}": at_most(thrift["regroup_step_max_ms"], 20),
    }
    return found


# ---- throughput ------------------------------------------------------------------------------------------------------


class Least:
    """What has the scheduler's interface, and does no more than it must."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Input, Millis], SlotWithdrawn]] = {}
        self._last: dict[str, SlotWithdrawn] = {}

    def handle(self, given: Input, now: Millis) -> Decision:
        fact = self._handlers.get(type(given), self._note)(given, now)
        return Decision((fact,), (), NOTHING)

    def _note(self, given: Input, now: Millis) -> SlotWithdrawn:
        fact = self._last["s1"] = SlotWithdrawn(now, "s1", "")
        return fact


def busy_world() -> World:
    """Groups of five, in which everybody's states come and go."""
    world = World(inventory(GROUPS, GROUPS))
    for number in range(GROUPS * JOBS_A_GROUP):
        world.register(job_spec(f"job{number}", (80_500, 77_000)))
    sizes = [len(group.jobs) for group in world.core.state.groups.values()]
    assert sizes == [JOBS_A_GROUP] * GROUPS, sizes
    world.begin()
    return world


class Watch:
    """Adds up what batches took: by this thread's processor time, and by the clock."""

    def __init__(self) -> None:
        self.count, self.processor_s, self.wall_s = 0, 0.0, 0.0

    def time(self, handle: Callable[[Input, Millis], Decision], given: Sequence[Input], now: Millis) -> list[Decision]:
        wall, processor = time.perf_counter(), time.thread_time()
        made = [handle(one, now) for one in given]
        self.processor_s += time.thread_time() - processor
        self.wall_s += time.perf_counter() - wall
        self.count += len(given)
        return made


def one_round(world: World, batches: int, beats: int) -> tuple[Watch, Watch]:
    """So many batches, to the scheduler and to the floor in turn."""
    ours, floor, least = Watch(), Watch(), Least()
    for number in range(batches):
        given = world.batch(TURNS, beats)
        decisions = ours.time(world.core.handle, given, world.now)
        floor.time(least.handle, given, world.now)
        for one, decision in zip(given, decisions, strict=True):
            world.take(one, decision)
        world.tick(10)
        if not beats and number % 100 == 0:
            world.beat_all()
    return ours, floor


def throughput(budget_s: float, batches: int) -> Json:
    """Inputs in a second of processor time: the mix, and the slot's cycle alone, so many batches a round."""
    world = busy_world()
    for _ in range(3):
        one_round(world, min(100, batches), BEATS)
    rates: dict[str, list[tuple[Watch, Watch]]] = {"inputs": [], "slot_cycle": []}
    for _ in Rounds(budget_s, least=3, most=15):
        rates["inputs"].append(one_round(world, batches, BEATS))
        rates["slot_cycle"].append(one_round(world, batches, 0))
        say(f"core: {_rate(rates['inputs'][-1][0]):,.0f} inputs/s, {_rate(rates['slot_cycle'][-1][0]):,.0f} of slots")
    iterations = [job.progress.finished for job in world.core.state.jobs.values()]
    assert min(iterations) > 0, iterations
    found: Json = {"jobs": len(iterations), "rounds": len(rates["inputs"])}
    for name, rounds in rates.items():
        found[f"{name}_per_s"] = short(median([_rate(ours) for ours, _ in rounds]))
        found[f"{name}_per_s_by_the_clock"] = short(median([ours.count / ours.wall_s for ours, _ in rounds]))
        found[f"{name}_floor_per_s"] = short(median([_rate(floor) for _, floor in rounds]))
        found[f"{name}_times_the_floor"] = short(median([_rate(floor) / _rate(ours) for ours, floor in rounds]))
    return found


def _rate(watch: Watch) -> float:
    return watch.count / watch.processor_s


# ---- placement -------------------------------------------------------------------------------------------------------


def arrivals(seed: int) -> Callable[[], JobSpec]:
    """Jobs of the production mix, with SLOs between 1 and 2, the same ones every time."""
    rng = random.Random(seed)
    kinds, shares = list(MIX), [share for *_, share in MIX.values()]
    count = 0

    def arrive() -> JobSpec:
        nonlocal count
        count += 1
        kind = rng.choices(kinds, shares)[0]
        rollout, train, width, _ = MIX[kind]
        times = round(rollout * 1000), round(train * 1000)
        return job_spec(f"{kind}-{count}", times, slo=round(rng.uniform(1, 2), 3), width=width)

    return arrive


def placement(budget_s: float, residents: Sequence[int]) -> Json:
    """How long it takes to place one more job, among so many."""
    most = max(500, residents[-1])  # fewer need more than their share
    world = World(inventory(ROLLOUT_NODES * most // 2_000, TRAIN_NODES * most // 2_000))
    core, policy, arrive, newcomers = world.core, RollMux(), arrivals(1), arrivals(2)
    found: Json = {}
    for number in residents:
        began = time.monotonic()
        while len(core.state.jobs) < number:
            core.handle(RegisterJob("team", "someone", arrive()), world.now)
        groups = len(core.state.groups)
        say(f"core: {number} jobs are placed, in {groups} groups ({time.monotonic() - began:.1f} s more)")
        assert not core.state.waiting, f"{len(core.state.waiting)} jobs found no place"
        found[str(number)] = _one_more(budget_s / len(residents), core, policy, newcomers)
    with collector_of_a_daemon():
        # jobs of its own: which of the others have come by then depends on how fast they were placed
        found[str(residents[-1])]["thrift"] = _woven(budget_s / len(residents), core.state, arrivals(3))
    return found


def _woven(budget_s: float, state: State, arrive: Callable[[], JobSpec]) -> Json:
    """The same groups, and thrift: one more job, and a whole search for moves, step by step."""
    policy = Thrift(steady=True, objective="cost")
    took: list[float] = []
    for number in Rounds(budget_s, least=100 if len(state.jobs) > SMALL[-1] else 10, most=200):
        job = Job("new", "team", "someone", arrive(), state.at)
        if number == 0:
            policy.place(state, job)
        began = time.thread_time()
        policy.place(state, job)
        took.append(time.thread_time() - began)
    for job in state.jobs.values():  # everybody may be moved, and can afford it
        job.spec = replace(job.spec, movable=Movable.WARM)
        job.progress.solo_ms, job.progress.elapsed_ms = 36_000_000, 0
    steps: list[float] = []
    search, over = policy.regroup(state, state.at + 36_000_000), object()
    while len(steps) < REGROUP_STEPS:
        began = time.thread_time()
        found = next(search, over)
        steps.append(time.thread_time() - began)
        if found is not None:  # a move; or the search is over
            break
    say(f"core: thrift places one in {1000 * sum(took) / len(took):.1f} ms, and looks for moves in {len(steps)} steps")
    return {
        "mean_ms": short(1000 * sum(took) / len(took)),
        "p99_ms": short(1000 * quantile(took, 0.99)),
        "samples": len(took),
        "regroup_steps": len(steps),
        "regroup_step_p50_ms": short(1000 * quantile(steps, 0.5)),
        "regroup_step_max_ms": short(1000 * max(steps)),
    }


def _one_more(budget_s: float, core: Scheduler, policy: RollMux, arrive: Callable[[], JobSpec]) -> Json:
    took: list[float] = []
    floors: list[float] = []
    placed: dict[str, int] = {}
    for number in Rounds(budget_s, least=30, most=400):
        job = Job("new", "team", "someone", arrive(), core.state.at)
        if number == 0:
            policy.place(core.state, job)  # what is derived of each group is kept: as it is in a daemon
        began = time.thread_time()
        answer = policy.place(core.state, job)
        middle = time.thread_time()
        look_once(core.state)
        floors.append(time.thread_time() - middle)
        took.append(middle - began)
        how = "waits" if answer is None else answer.admission
        placed[how] = placed.get(how, 0) + 1
    return {
        "p50_ms": short(1000 * quantile(took, 0.5)),
        "p99_ms": short(1000 * quantile(took, 0.99)),
        "times_the_floor": short(quantile(took, 0.5) / quantile(floors, 0.5)),
        "samples": len(took),
        "groups": len(core.state.groups),
        "nodes": len(core.state.nodes),
        "placed": placed,
    }


def look_once(state: State) -> tuple[int, int]:
    """The least that any search over all groups, and for a free node, has to look at."""
    members = sum(len(group.jobs) < CONFIG.max_jobs for group in state.groups.values())
    free = sum(node.group is None for node in state.nodes.values())
    return members, free
