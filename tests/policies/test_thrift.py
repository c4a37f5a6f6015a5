"""Thrift in the core: who shares with whom, who moves, and that no promise breaks on the way.

What members' iterations take is found by playing each group's schedule, as the state has it, with everything as long as
planned; it shares no code with the planner.
"""

import random
from collections.abc import Iterator
from itertools import islice, permutations
from typing import Any

import pytest
from msgspec.structs import replace
from simkit import invariants

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config, DriverTraits, Moves, OwnerLimits
from rollmuxd.core.model import Job, ScheduledTurn
from rollmuxd.core.policy import Policy
from rollmuxd.core.reconcile import reconcile
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, Movable, PhaseSpec, StateSpec, Want
from rollmuxd.core.steps import guard
from rollmuxd.explain.explainer import Explainer
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.thrift import catalogue
from rollmuxd.policies.thrift.catalogue import Planner
from rollmuxd.policies.thrift.improve import Search
from rollmuxd.policies.thrift.model import JobDemand, PoolCapacity, Profile
from rollmuxd.policies.thrift.policy import Thrift

MINUTE_MS, HOUR_MS = 60_000, 3_600_000
TURNS = 30


class Cluster:
    """A scheduler over some nodes of 8 GPUs, each a host of its own. A train node costs three times a rollout node."""

    def __init__(self, rollout: int, train: int, policy: Policy, *, ram_gb: int = 2000, gpu_gb: int = 0,
                 max_nodes: int = 0, prices: tuple[float, float] = (1.0, 3.0),
                 pools: tuple[str, str] = ("rollout", "train")) -> None:  # fmt: skip
        config = Config(
            lease_ms=1 << 50, drivers={"channel": DriverTraits(copies=True)}, moves=Moves.ON, move_interval_ms=0,
            owners={"team": OwnerLimits(max_nodes=max_nodes)},
        )  # fmt: skip
        self.core, self.now = Scheduler(config, policy), 0
        hosts, nodes = [], []
        for pool, count, price in ((pools[0], rollout, prices[0]), (pools[1], train, prices[1])):
            for number in range(count):
                host = f"{pool[0]}{number}"
                hosts.append(i.HostSpec(host, "mock", ram_gb * 1000))
                gpus = tuple(f"{host}/gpu{gpu}" for gpu in range(8))
                nodes.append(i.NodeSpec(host, host, gpus, (pool,), gpu_mb=gpu_gb * 1000, price_per_gpu_hour=price))
        self.hand(i.Start(tuple(hosts), tuple(nodes)))
        for node in nodes:
            self.hand(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)))

    def hand(self, given: i.Input) -> list[f.Fact]:
        decision = self.core.handle(given, self.now)
        if decision.facts:  # without one nothing has changed
            invariants.check(self.core.state)
        return list(decision.facts)

    def arrives(self, spec: JobSpec, owner: str = "team") -> f.JobPlaced | None:
        name = spec.name
        facts = self.hand(i.RegisterJob(owner, "ann", spec))
        made = self.core.state.names[f"{owner}/{name}"]
        return next((fact for fact in facts if isinstance(fact, f.JobPlaced) and fact.job == made), None)

    def ends(self, name: str, owner: str = "team") -> None:
        self.hand(i.EndJob(self.core.state.names[f"{owner}/{name}"], "ann"))

    def looks_for_moves(self) -> list[f.MoveEnded]:
        """Until nothing is looked for for a while; every group is played after every step."""
        moved = []
        for _ in range(20_000):
            due = self.core.deadline()
            if due is None or due >= self.now + MINUTE_MS:
                return moved
            self.now = max(self.now, due)
            facts = self.hand(i.Tick())
            if any(isinstance(fact, f.MovePlanned | f.MoveEnded) for fact in facts):
                self.keeps_every_promise()
            moved += [fact for fact in facts if isinstance(fact, f.MoveEnded)]
        raise AssertionError("the search does not end")

    def has_earned(self, seconds: float) -> None:
        """Every job has run so long at its solo pace: it has credit."""
        for job in self.core.state.jobs.values():
            job.progress.solo_ms += round(seconds * 1000)
            job.progress.elapsed_ms += round(seconds * 1000)

    def has_run(self, name: str, iterations: int, *, solo_s: int, took_s: int) -> None:
        """One job has finished so many iterations."""
        progress = self.core.state.jobs[self.core.state.names[f"team/{name}"]].progress
        progress.finished += iterations
        progress.solo_ms += 1000 * iterations * solo_s
        progress.elapsed_ms += 1000 * iterations * took_s

    def keeps_every_promise(self) -> None:
        state = self.core.state
        for group in state.groups.values():
            for name, pace in paces(self.core, group.id).items():
                job = state.jobs[name]
                solo = sum(phase.planned_ms or 0 for phase in job.spec.phases)
                if job.promised and job.spec.slo is not None:
                    assert pace <= job.spec.slo * solo + 1, (group, job)

    def mates(self) -> list[set[str]]:
        """Who shares with whom."""
        state = self.core.state
        return [{state.jobs[name].spec.name for name in group.jobs} for group in state.groups.values()]


def paces(core: Scheduler, group_id: str) -> dict[str, float]:
    """Mean iteration of each member when the group's schedule is played, from its second turn on."""
    state = core.state
    group = state.groups[group_id]
    job_free: dict[str, int] = {}
    node_free: dict[str, int] = {}
    ends: dict[str, list[int]] = {}
    for _ in range(TURNS):
        for turn in group.schedule:
            job = state.jobs[turn.job]
            phase = next(phase for phase in job.spec.phases if phase.name == turn.phase)
            nodes = state.phase_nodes(job, phase.name, group_id)
            begin = max([job_free.get(turn.job, 0), *(node_free.get(node, 0) for node in nodes)])
            end = begin + (phase.planned_ms or 0)
            job_free[turn.job] = end
            node_free.update(dict.fromkeys(nodes, end))
        for name, at in job_free.items():
            ends.setdefault(name, []).append(at)
    rates = {
        name: sum(v.job == name and v.phase == state.jobs[name].spec.phases[0].name for v in group.schedule)
        for name in ends
    }
    return {name: (at[-1] - at[0]) / (rates[name] * (TURNS - 1)) for name, at in ends.items()}


def job(
    name: str, rollout_s: float, train_s: float, slo: float | None, *, nodes: tuple[int, int] = (1, 1),
    ram_gb: int = 0, gpu_gb: int = 0, residual_gb: int = 0, movable: Movable = Movable.WARM,
    pools: tuple[str, str] = ("rollout", "train"),
) -> JobSpec:  # fmt: skip
    return JobSpec(
        name,
        phases=(
            PhaseSpec("rollout", (pools[0],), round(rollout_s * 1000)),
            PhaseSpec("train", (pools[1],), round(train_s * 1000)),
        ),
        wants=(Want(pools[0], nodes[0]), Want(pools[1], nodes[1])),
        states=(StateSpec(pools[0], ram_mb=ram_gb * 1000, gpu_mb=gpu_gb * 1000, residual_mb=residual_gb * 1000),),
        slo=slo,
        movable=movable,
    )


LONG, SHORT = job("long", 900, 100, 1.3), job("short", 150, 150, 1.4)


def test_a_short_job_joins_a_long_one_and_goes_round_more_often() -> None:
    paper = Cluster(4, 4, RollMux())
    assert [placed and placed.admission for placed in map(paper.arrives, (LONG, SHORT))] == ["isolated", "isolated"]
    loom = Cluster(4, 4, Thrift(steady=True, objective="cost"))
    loom.arrives(LONG)
    placed = loom.arrives(SHORT)
    assert placed is not None
    assert placed.admission == "scaling"  # its rollouts are too long for the long one's node
    turns = [loom.core.state.jobs[turn.job].spec.name for turn in placed.schedule]
    assert turns.count("short") >= 3 * turns.count("long")
    assert placed.promised
    assert 0 < (placed.period_ms or 0) <= 1.4 * 300_000 * turns.count("short") / 2  # two turns an iteration
    loom.keeps_every_promise()


def test_a_newcomer_is_also_tried_with_a_lower_bound_by_which_he_goes_round_more_often() -> None:
    """By his own bound he would have two iterations to one of the long job's, and be worth less than with the other."""
    cluster = Cluster(4, 3, Thrift(steady=True, objective="cost"))
    for spec in (job("tight", 100, 20, 1.2), job("long", 600, 50, 1.2), job("third", 150, 100, 1.7)):
        cluster.arrives(spec)
    assert {"third"} not in cluster.mates()
    cluster.keeps_every_promise()


@pytest.mark.parametrize(
    ("slo", "shares"),
    [
        (1.05, False),  # as tight as the schedule: a wait for the first turn could not be made up
        (1.12, False),
        (1.13, True),  # nine turns of 200 s fit into eight iterations of 226
    ],
)
def test_who_joins_can_make_up_for_the_wait_for_his_first_turns_before_he_is_judged(
    slo: float, *, shares: bool
) -> None:
    cluster = Cluster(4, 4, Thrift(steady=True, objective="cost"))
    cluster.arrives(job("a", 100, 100, 1.05))
    cluster.arrives(job("b", 100, 100, slo))  # one rolls out while the other trains: 200 s, as alone
    assert cluster.mates() == ([{"a", "b"}] if shares else [{"a"}, {"b"}])


def test_who_joins_and_who_was_there_are_within_their_bounds_by_the_eighth_iteration_whenever_he_comes() -> None:
    """Drawn groups are played turn by turn; the last one comes just before or after any turn begins: the worst."""
    chance = random.Random(4)
    joined = late = 0
    for _ in range(150):
        cluster = Cluster(8, 8, Thrift(steady=True, objective="cost"))
        for number in range(chance.randint(1, 3)):
            rollout, train = (round(10 ** chance.uniform(1.5, 2.5)) for _ in range(2))
            cluster.arrives(job(f"j{number}", rollout, train, chance.uniform(1.3, 2.5)))
        before = {group.id: list(group.schedule) for group in cluster.core.state.groups.values()}
        rollout, train = (round(10 ** chance.uniform(1.5, 2.5)) for _ in range(2))
        slo = chance.uniform(1.02, 1.5)
        placed = cluster.arrives(job("last", rollout, train, slo))
        if placed is None or placed.group not in before:
            continue
        joined += 1
        for name, took in eight_iterations(cluster.core, before[placed.group], placed):
            spec = cluster.core.state.jobs[name].spec
            bound = 8 * (spec.slo or 0) * sum(phase.planned_ms or 0 for phase in spec.phases)
            assert took <= bound, (name, placed)
            late += took > 0.97 * bound
    assert joined > 40
    assert late > 20  # some could not have waited much longer


def eight_iterations(core: Scheduler, before: list[ScheduledTurn], placed: f.JobPlaced) -> Iterator[tuple[str, int]]:
    """What the next eight take each job, for each time at which the last could come, by the order of (rotation, index).

    Its own count from when it came, the others' from the end of the last one before that.
    """
    state, rotations = core.state, 6

    def lasts(job_name: str, phase_name: str) -> tuple[tuple[str, ...], int]:
        of = state.jobs[job_name]
        phase = next(phase for phase in of.spec.phases if phase.name == phase_name)
        return state.phase_nodes(of, phase.name, placed.group), phase.planned_ms or 0

    clocks: dict[str, int] = {}
    begun: list[tuple[int, int, str, str, int, int]] = []
    for rotation in range(rotations):
        for index, turn in enumerate(before):
            nodes, took = lasts(turn.job, turn.phase)
            begin = max(clocks.get(it, 0) for it in (turn.job, *nodes))
            clocks.update(dict.fromkeys((turn.job, *nodes), begin + took))
            begun.append((rotation, index, turn.job, turn.phase, begin, begin + took))
    middle = {at for rotation, _, _, _, begin, _ in begun if rotation in (2, 3) for at in (begin - 1, begin)}
    for comes in sorted(middle):
        there = [it for it in begun if it[4] <= comes]
        passed = [sum(index == at for _, at, *_ in there) for index in range(len(before))]
        now: dict[str, int] = {}
        since = {placed.job: comes}
        for _, _, name, phase, _, end in there:
            now.update(dict.fromkeys((name, *lasts(name, phase)[0]), end))
            if phase == "train":
                since[name] = end
        known: dict[tuple[str, str], list[int]] = {}
        for turn, rotation in zip(before, passed, strict=True):
            known.setdefault((turn.job, turn.phase), []).append(rotation)
        ahead = []
        for index, plan in enumerate(placed.schedule):
            had = known.get((plan.job, plan.phase))
            first = had.pop(0) if had else min(passed)
            ahead += [(rotation, index, plan) for rotation in range(first, min(passed) + 20)]
        ends: dict[str, list[int]] = {name: [] for name in since}
        for _, _, plan in sorted(ahead, key=lambda it: it[:2]):
            nodes, took = lasts(plan.job, plan.phase)
            end = max(comes, *(now.get(it, 0) for it in (plan.job, *nodes))) + took
            now.update(dict.fromkeys((plan.job, *nodes), end))
            if plan.phase == "train":
                ends[plan.job].append(end)
        for name, at in since.items():
            yield name, ends[name][7] - at


def test_jobs_of_different_train_widths_share() -> None:
    cluster = Cluster(6, 2, Thrift(steady=True, objective="cost"))
    wide = cluster.arrives(job("wide", 100, 100, 2.0, nodes=(2, 2)))
    narrow = cluster.arrives(job("narrow", 100, 100, 2.0))
    other = cluster.arrives(job("other", 100, 20, 2.0))
    assert wide is not None
    assert narrow is not None
    assert other is not None
    assert set(narrow.pins["train"]) < set(wide.pins["train"])
    assert narrow.cost_per_hour == 0
    assert cluster.mates() == [{"wide", "narrow", "other"}]
    cluster.keeps_every_promise()


@pytest.mark.parametrize("times", [True, False])
def test_jobs_that_have_both_pools_on_one_node_share_it_as_under_the_papers_rule(*, times: bool) -> None:
    """One box, one node in both pools: no plan can say it, and who came second would wait until the first has ended."""
    sat = []
    for policy in (RollMux(), Thrift(steady=True), Thrift(steady=True, objective="cost")):
        core = Scheduler(Config(lease_ms=1 << 50), policy)
        gpus = ("box/gpu0", "box/gpu1")
        node = i.NodeSpec("n", "box", gpus, ("rollout", "train"), price_per_gpu_hour=1.0)
        core.handle(i.Start((i.HostSpec("box", "mock", 0),), (node,)), 0)
        core.handle(i.HostObserved("box", tuple(i.GpuObservation(gpu, 0) for gpu in gpus)), 0)
        phases = tuple(PhaseSpec(pool, (pool,), 9_000 if times else None) for pool in ("rollout", "train"))
        for name in ("first", "second"):
            spec = JobSpec(name, phases=phases, wants=(Want("rollout", 1), Want("train", 1)), colocate=True)
            core.handle(i.RegisterJob("team", "ann", spec), 0)
        sat.append([(job.group, job.pins) for job in core.state.jobs.values()])
    assert sat[0] == [("g1", {"rollout": ("n",), "train": ("n",)})] * 2
    assert sat[1:] == [sat[0]] * 2


@pytest.mark.parametrize("wants", [{"nodes": 1}, {"gpus": 2}])
def test_a_job_with_both_pools_on_the_same_nodes_takes_as_few_of_the_groups_as_it_needs(wants: dict[str, int]) -> None:
    """The group's other nodes are of no use to it, however many ways there are to choose some of them."""
    core = Scheduler(Config(lease_ms=1 << 50), Thrift(steady=True))
    both, hosts = ("rollout", "train"), [f"h{at}" for at in range(28)]
    nodes = [
        i.NodeSpec(name, name, (f"{name}/gpu0", f"{name}/gpu1"), both if at < 3 else ("rollout",))
        for at, name in enumerate(hosts)
    ]
    core.handle(i.Start(tuple(i.HostSpec(name, "mock", 0) for name in hosts), tuple(nodes)), 0)
    for node in nodes:
        core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 0)
    phases = tuple(PhaseSpec(pool, (pool,)) for pool in both)
    for name, rollout, train in (
        ("wide", {"named": tuple(hosts[3:])}, {"named": ("h0", "h1")}),
        ("other", {"named": ("h2",)}, {"named": ("h2",)}),
        ("one", wants, wants),
        ("three", {"nodes": 3}, {"nodes": 3}),
    ):
        asks = Want("rollout", **rollout), Want("train", **train)
        spec = JobSpec(name, phases=phases, wants=asks, colocate=name != "wide")
        core.handle(i.RegisterJob("team", "ann", spec), 0)
    wide, _, one, three = core.state.jobs.values()
    assert one.group == wide.group
    assert one.pins == {"rollout": ("h0",), "train": ("h0",)}
    assert three.group is None


def test_a_wide_job_may_sit_on_old_and_new_nodes_at_once() -> None:
    cluster = Cluster(4, 2, Thrift(steady=True, objective="cost"))
    cluster.arrives(job("first", 100, 60, 2.0))
    placed = cluster.arrives(job("second", 100, 60, 2.0, nodes=(2, 1)))
    assert placed is not None
    assert len({"r0"} & set(placed.pins["rollout"])) == 1
    assert len(placed.pins["rollout"]) == 2
    assert placed.cost_per_hour == 8


def test_ram_and_residual_memory_are_counted_in_every_plan() -> None:
    cluster = Cluster(2, 2, Thrift(steady=True, objective="cost"), ram_gb=1000)
    cluster.arrives(job("a", 100, 60, 2.0, ram_gb=600))
    placed = cluster.arrives(job("b", 100, 60, 2.0, ram_gb=600))
    assert placed is not None
    assert placed.pins["rollout"] == ("r1",)  # on a's node it would save a node
    assert cluster.mates() == [{"a", "b"}]
    tight = Cluster(2, 2, Thrift(steady=True, objective="cost"), gpu_gb=80)
    tight.arrives(job("a", 100, 60, 2.0, gpu_gb=70, residual_gb=8))
    again = tight.arrives(job("b", 100, 60, 2.0, gpu_gb=75, residual_gb=4))
    assert again is not None
    assert again.pins["rollout"] == ("r1",)


@pytest.mark.parametrize(("slo", "unlimited"), [(1.9, "scaling"), (None, "isolated")])
def test_an_owners_limit_is_planned_around(slo: float | None, unlimited: str) -> None:
    """Who may have no more nodes shares those that he has, where he would else take free ones."""
    for most, expected in ((0, unlimited), (2, "packing")):
        cluster = Cluster(6, 6, Thrift(steady=True, objective="throughput"), max_nodes=most)
        placed = [cluster.arrives(job(name, 100, 60, slo)) for name in ("first", "second")]
        assert [it and it.admission for it in placed] == ["isolated", expected]
        cluster.keeps_every_promise()


def test_who_is_promised_nothing_takes_free_nodes_and_slows_nobody() -> None:
    cluster = Cluster(2, 2, Thrift(steady=True, objective="cost"))
    cluster.arrives(job("a", 100, 100, 1.5))
    free = cluster.arrives(job("easy", 50, 50, None))
    assert free is not None
    assert free.admission == "isolated"
    packed = cluster.arrives(job("easier", 20, 20, None))
    assert packed is not None
    cluster.keeps_every_promise()


def slowdowns(cluster: Cluster) -> list[float]:
    state = cluster.core.state
    solo = {job.id: sum(phase.planned_ms or 0 for phase in job.spec.phases) for job in state.jobs.values()}
    return [pace / solo[name] for group in state.groups for name, pace in paces(cluster.core, group).items()]


@pytest.mark.parametrize("prices", [(1.0, 3.0), (0.0, 0.0)], ids=["priced", "nobody has said what they cost"])
def test_nodes_that_one_owns_slow_nobody_while_some_are_idle(prices: tuple[float, float]) -> None:
    cluster = Cluster(12, 12, Thrift(steady=True), prices=prices)
    thrifty = Cluster(12, 12, Thrift(steady=True, objective="cost"), prices=prices)
    for number in range(9):
        for each in (cluster, thrifty):
            assert each.arrives(job(f"j{number}", 100, 70, 1.9)) is not None
    assert max(slowdowns(cluster)) == 1
    assert max(slowdowns(thrifty)) > 1.2
    assert len(cluster.mates()) > len(thrifty.mates())
    for number in range(9, 24):  # and are shared when they run short
        assert cluster.arrives(job(f"j{number}", 100, 70, 1.9)) is not None
    cluster.keeps_every_promise()


def unmeasured(name: str, slo: float | None) -> JobSpec:
    spec = job(name, 1, 1, slo, movable=Movable.NO)
    return replace(spec, phases=tuple(replace(phase, planned_ms=None) for phase in spec.phases))


@pytest.mark.parametrize("slo", [1.5, None])
def test_jobs_that_state_no_times_take_free_nodes_and_then_those_that_have_the_fewest_jobs(slo: float | None) -> None:
    cluster = Cluster(2, 2, Thrift(steady=True, promise="measured", rounds=1))
    placed = [cluster.arrives(unmeasured(f"j{number}", slo)) for number in range(5)]
    assert [one and one.admission for one in placed] == ["isolated"] * 2 + ["packing"] * 3
    assert [len(mates) for mates in cluster.mates()] == [3, 2]
    thrifty = Cluster(2, 2, Thrift(steady=True, objective="cost"))
    for number in range(5):
        thrifty.arrives(unmeasured(f"j{number}", 1.5))
    assert [len(mates) for mates in thrifty.mates()] == [5]  # as the paper has it


def test_a_job_that_states_no_times_takes_a_free_rollout_node_beside_a_train_node_that_is_not_free() -> None:
    cluster = Cluster(3, 1, Thrift(steady=True, promise="measured", rounds=1))
    placed = [cluster.arrives(unmeasured(f"j{number}", None)) for number in range(4)]
    assert [one and one.admission for one in placed] == ["isolated", "scaling", "scaling", "packing"]
    assert len({one.pins["rollout"] for one in placed[:3] if one is not None}) == 3
    assert len({one.pins["train"] for one in placed if one is not None}) == 1


@pytest.mark.parametrize("prices", [(1.0, 3.0), (2.0, 2.0), (0.0, 0.0)], ids=["train dearer", "all alike", "unsaid"])
@pytest.mark.parametrize("pools", [("rollout", "train"), ("write", "learn"), ("generate", "learn")])
def test_jobs_that_mostly_roll_out_share_a_train_node_and_have_rollout_nodes_of_their_own(
    prices: tuple[float, float], pools: tuple[str, str]
) -> None:
    cluster = Cluster(3, 1, Thrift(steady=True), prices=prices, pools=pools)
    for name in "abc":
        assert cluster.arrives(job(name, 100, 20, 1.3, pools=pools)) is not None
    assert cluster.mates() == [{"a", "b", "c"}]
    assert len({node for it in cluster.core.state.jobs.values() for node in it.pins[pools[0]]}) == 3
    cluster.keeps_every_promise()


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_whether_one_may_join_says_nothing_of_another_of_whom_other_things_are_asked(order: tuple[int, ...]) -> None:
    loom = Thrift(steady=True, objective="cost", promise="measured")
    cluster = Cluster(1, 1, loom)
    cluster.arrives(job("a", 10, 10, 40.0))
    cluster.has_run("a", 50, solo_s=20, took_s=20)
    some = [
        (job("fair", 10, 10, 4.0), True),
        (job("tight", 100, 100, 1.05), False),  # too little to share by credit
        (job("promised nothing", 10, 10, None), True),
        (replace(job("unsaid", 10, 10, None), side=(PhaseSpec("eval", ("rollout",)),)), False),
    ]
    for spec, joins in (some[place] for place in order):
        comes = Job("new", "team", "ann", spec, 0)
        comes.progress.solo_ms = comes.progress.elapsed_ms = (
            10 * HOUR_MS
        )  # he could pay for the wait for his first turn
        assert (loom.place(cluster.core.state, comes) is not None) == joins, spec.name


def test_a_group_that_lets_in_who_is_promised_nothing_may_still_let_in_no_promise() -> None:
    loom = Thrift(steady=True, objective="cost")
    cluster = Cluster(1, 1, loom)
    cluster.arrives(replace(job("a", 10, 10, None), side=(PhaseSpec("eval", ("rollout",)),)))
    for slo, joins in ((None, True), (4.0, False), (None, True)):
        found = loom.place(cluster.core.state, Job("new", "team", "ann", job("b", 10, 10, slo), 0))
        assert (found is not None) == joins


def test_pools_are_looked_at_anew_when_a_node_is_another_one_or_a_host_has_other_ram() -> None:
    policy = Thrift(objective="cost")
    state = Cluster(2, 1, policy).core.state
    known = policy._planner(state)
    state.nodes["r1"].group = "g1"
    assert policy._planner(state) is known  # whoever is there
    state.hosts["r0"].ram_mb += 1_000
    assert policy._planner(state).rooms["rollout"].ram_mb == 2_001_000
    state.nodes["r0"] = replace(state.nodes["r0"], price_per_gpu_hour=2.0)
    assert policy._planner(state).rooms["rollout"].worth == 12
    del state.nodes["r1"]
    assert policy._planner(state).rooms["rollout"].count == 1


def test_a_job_without_a_place_is_told_why() -> None:
    cluster = Cluster(1, 1, Thrift(steady=True, objective="cost"))
    cluster.arrives(job("a", 100, 100, 1.05))
    cluster.arrives(job("b", 100, 100, 1.05))  # one rolls out while the other trains
    assert cluster.arrives(job("c", 100, 100, 1.05)) is None
    waiting = cluster.core.state.names["team/c"]
    codes = [reason.code for reason in Explainer(cluster.core.context).why_job_waits(waiting, 0).reasons]
    assert "no_free_nodes" in codes
    assert any(code in codes for code in ("own_slo", "member_slo"))


def test_who_waits_for_a_members_credit_is_told_of_how_much() -> None:
    cluster = Cluster(2, 1, Thrift(steady=True, promise="measured", warm_move_s=30))
    assert cluster.arrives(job("a", 100, 20, 1.5)) is not None
    assert cluster.arrives(job("b", 100, 20, 1.5)) is None
    waiting = cluster.core.state.names["team/b"]
    (why,) = (
        reason
        for reason in Explainer(cluster.core.context).why_job_waits(waiting, 0).reasons
        if reason.code == "member_credit"
    )
    assert "when job a has 165 s of credit, and it has 0 s" in why.text  # 1.5 x 30 s to move away, and one iteration
    cluster.has_run("a", 8, solo_s=120, took_s=120)
    assert all(
        reason.code != "member_credit" for reason in Explainer(cluster.core.context).why_job_waits(waiting, 0).reasons
    )


def two_halves(policy: Policy, *, movable: Movable = Movable.WARM, others: int = 0) -> Cluster:
    """Two groups, of each of which half has left: what is there fits in one. ``others`` stay by themselves."""
    cluster = Cluster(6 + others, 4 + others, policy)
    for name in ("a", "b"):
        cluster.arrives(job(name, 100, 150, 1.5, movable=movable))
    for name in ("c", "d"):
        cluster.arrives(job(name, 101, 150, 1.5, movable=movable))
    for number in range(others):
        cluster.arrives(job(f"alone{number}", 100, 150, 1.01, movable=Movable.NO))
    assert [mates for mates in cluster.mates() if len(mates) > 1] == [{"a", "b"}, {"c", "d"}]
    cluster.now = 10 * HOUR_MS
    return cluster


def test_what_is_left_of_two_groups_moves_together() -> None:
    cluster = two_halves(Thrift(steady=True, objective="cost"))
    cluster.has_earned(10_000)
    cluster.ends("b")
    cluster.ends("d")
    moves = cluster.looks_for_moves()
    assert len(moves) == 1
    assert cluster.mates() == [{"a", "c"}]
    used = [node.id for node in cluster.core.state.nodes.values() if node.group is not None]
    assert len(used) == 2
    cluster.keeps_every_promise()


@pytest.mark.parametrize(("credit_s", "take_s"), [(5_000, (150, 150)), (0, (250, 125))])
def test_what_a_job_leaves_is_put_in_another_order_where_that_pays_and_each_member_can_pay_for_a_turns_wait(
    credit_s: float, take_s: tuple[float, float]
) -> None:
    """In what is left of the schedule one job goes round twice, and the other waits for it. No job is moved."""
    cluster = Cluster(4, 3, Thrift(steady=True, objective="work"))
    jobs = (job("a", 50, 100, 2.0), job("b", 50, 50, 1.5), job("c", 400, 150, 2.0))
    for spec in jobs:
        cluster.arrives(spec)
        solo_s = sum(phase.planned_ms or 0 for phase in spec.phases) / 1000
        cluster.has_run(spec.name, 100, solo_s=round(solo_s), took_s=round((spec.slo or 0) * solo_s - credit_s / 100))
    assert cluster.mates() == [{"a", "b", "c"}]
    cluster.now = 10 * HOUR_MS
    cluster.ends("c")
    assert cluster.looks_for_moves() == []
    (group,) = cluster.core.state.groups
    assert paces(cluster.core, group) == {"j1": 1000 * take_s[0], "j2": 1000 * take_s[1]}
    cluster.keeps_every_promise()


@pytest.mark.parametrize(("iterations", "moves"), [(2, 0), (3, 1)])
def test_nobody_moves_to_who_could_not_pay_for_his_loading_and_a_turns_wait(iterations: int, moves: int) -> None:
    """Whoever comes loads his states where others would be: 30 s, and a turn takes 301 s. An iteration earns 125."""
    cluster = two_halves(Thrift(steady=True, objective="cost"))
    cluster.has_run("a", 40, solo_s=250, took_s=250)
    cluster.has_run("c", 8, solo_s=250, took_s=375)
    cluster.has_run("c", iterations, solo_s=250, took_s=250)
    cluster.ends("b")
    cluster.ends("d")
    assert len(cluster.looks_for_moves()) == moves


@pytest.mark.parametrize(("finished", "moves"), [(0, 1), (8, 0)])
def test_a_job_that_is_not_judged_yet_may_be_joined_where_the_plan_makes_up_for_the_first_turn(
    finished: int, moves: int
) -> None:
    """The pair takes 301 s a turn, of 375 that are promised: seven iterations make up for a load and a turn."""
    cluster = two_halves(Thrift(steady=True, objective="cost"))
    cluster.has_run("a", 40, solo_s=250, took_s=250)
    cluster.has_run("c", finished, solo_s=250, took_s=375)
    cluster.ends("b")
    cluster.ends("d")
    assert len(cluster.looks_for_moves()) == moves


@pytest.mark.parametrize(("others", "looks"), [(0, 1), (45, 40)])
def test_who_could_not_pay_for_it_is_looked_at_again_when_it_has_earned_enough_though_nobody_came_or_went(
    others: int, looks: int
) -> None:
    """Of many groups a few are looked at each time, in turn."""
    cluster = two_halves(Thrift(steady=True, objective="cost"), others=others)
    cluster.has_run("a", 40, solo_s=250, took_s=250)
    cluster.has_run("c", 8, solo_s=250, took_s=375)
    cluster.has_run("c", 2, solo_s=250, took_s=250)
    cluster.ends("b")
    cluster.ends("d")
    assert cluster.looks_for_moves() == []
    cluster.has_run("c", 1, solo_s=250, took_s=250)
    moved = []
    for _ in range(looks):
        cluster.now += 2 * HOUR_MS
        moved += cluster.looks_for_moves()
    assert len(moved) == 1
    assert {"a", "c"} in cluster.mates()


@pytest.mark.parametrize(
    ("most", "together"),
    [
        (0, [{"a", "c"}, {"e", "g"}]),
        (5, [{"a", "c"}, {"e", "g"}]),
        (4, [{"a", "e"}, {"c", "g"}]),  # others' jobs come to theirs
    ],
)
def test_a_move_that_an_owners_limit_forbids_is_not_made_and_another_one_is_found(
    most: int, together: list[set[str]]
) -> None:
    """Who comes to share a training node rolls out on a new one, and has his old ones until he is there."""
    cluster = Cluster(12, 6, Thrift(steady=True, objective="cost"), max_nodes=most)
    for name, owner in (("a", "team"), ("c", "team"), ("e", "others"), ("g", "others"), ("last", "others")):
        cluster.arrives(job(name, 250, 200, 1.01), owner)
    assert len(cluster.mates()) == 5  # nobody could make up for the wait for his first turn
    cluster.now = 10 * HOUR_MS
    cluster.has_earned(1_000_000)
    cluster.ends("last", "others")
    cluster.looks_for_moves()
    assert cluster.mates() == together


@pytest.mark.parametrize(("iterations", "moves"), [(6, 0), (7, 1)])
def test_nobody_moves_who_could_not_make_up_for_the_wait_for_his_first_turn_there(iterations: int, moves: int) -> None:
    """A turn would be as long as his bound allows, 305 s, and loading takes 30 s. An iteration alone earns 55."""
    cluster = Cluster(6, 4, Thrift(steady=True, objective="cost"))
    for name in ("a", "c", "last"):
        cluster.arrives(job(name, 100, 150, 1.22))
    assert cluster.mates() == [{"a"}, {"c"}, {"last"}]
    cluster.now = 10 * HOUR_MS
    cluster.has_run("a", 400, solo_s=250, took_s=250)
    cluster.has_run("c", iterations, solo_s=250, took_s=250)
    cluster.ends("last")
    assert len(cluster.looks_for_moves()) == moves


def test_who_moves_within_his_group_waits_for_no_first_turn_and_pays_for_loading_only() -> None:
    """An iteration alone earns 90 s, and loading costs 48; with the wait for a turn, up to 240 s, it would be 270."""
    cluster = Cluster(6, 4, Thrift(steady=True, objective="cost"))
    for name in ("a", "b", "c", "last"):
        cluster.arrives(job(name, 100, 50, 1.01 if name == "last" else 1.6))
    state = cluster.core.state
    assert cluster.mates() == [{"a", "b", "c"}, {"last"}]
    assert len(state.groups["g1"].nodes) == 3
    cluster.now = 10 * HOUR_MS
    for name in ("a", "b", "c"):
        cluster.has_run(name, 1, solo_s=150, took_s=150)
    cluster.ends("a")
    assert len(cluster.looks_for_moves()) == 1
    assert cluster.mates() == [{"b", "c"}, {"last"}]
    assert len(state.groups["g1"].nodes) == 2
    cluster.keeps_every_promise()


@pytest.mark.parametrize("pays", [True, False])
def test_who_could_not_pay_for_the_wait_for_a_first_turn_comes_to_nobody_on_his_way_to_other_nodes(
    *, pays: bool
) -> None:
    """Neither to a group that another member has opened, nor back from nodes of its own; nor others to it."""
    planner = Planner({"rollout": PoolCapacity(1.0, 1.0), "train": PoolCapacity(3.0, 3.0)})
    profile = Profile(((("rollout",), 100, 0), (("train",), 50, 0)), (("rollout", 1), ("train", 1)), 150)
    needs = {name: JobDemand(name, profile, 150, 300) for name in ("a", "b")}
    among = needs if pays else {"a": needs["a"]}
    search = Search(planner, needs, {}, {}, {}, among, 5, {})
    mate, here = {"rollout": ("r0",), "train": ("t0",)}, {"rollout": ("r1",), "train": ("t0",)}
    there = {"rollout": ("r2",), "train": ("t0",)}
    assert search._joins({"a": mate}, "b", there) == pays
    assert search._joins({"b": here}, "a", mate) == pays  # nor does anybody come to it
    assert search._joins({"a": mate, "b": here}, "b", there)  # here he has turns
    assert search._joins({}, "b", there)  # where nobody is he waits for nobody


def test_who_was_promised_nothing_is_promised_nothing_by_moving() -> None:
    """It has an SLO that could not be certified, and goes on without: no move makes that a promise."""
    cluster = two_halves(Thrift(steady=True, objective="cost"))
    for job_ in cluster.core.state.jobs.values():
        job_.promised = False
    cluster.ends("b")
    cluster.ends("d")
    assert len(cluster.looks_for_moves()) == 1
    assert [job_.promised for job_ in cluster.core.state.jobs.values() if job_.live] == [False, False]


@pytest.mark.parametrize(
    ("policy", "movable", "earned_s"),
    [
        (Thrift(steady=True, objective="cost"), Movable.NO, 10_000),  # it may not be moved
        (Thrift(steady=True, objective="cost"), Movable.WARM, 10),  # it has not the credit that a move takes
        (Thrift(steady=True, objective="cost", warm_move_s=100 * 3600), Movable.WARM, 10**9),  # it would never pay
    ],
)
def test_who_may_not_cannot_afford_it_or_would_lose_by_it_stays(
    policy: Policy, movable: Movable, earned_s: float
) -> None:
    cluster = two_halves(policy, movable=movable)
    cluster.has_earned(earned_s)
    cluster.ends("b")
    cluster.ends("d")
    assert cluster.looks_for_moves() == []
    assert cluster.mates() == [{"a"}, {"c"}]


@pytest.mark.parametrize(
    ("placed_ago", "counted_ago", "moves"),
    [(2, 3, False), (2, 1, True), (0, None, False), (1, None, True)],
    ids=["before it, an iteration ended", "after it, an iteration ended", "in this millisecond", "before this search"],
)
def test_a_job_is_moved_again_only_when_its_credit_shows_what_the_last_move_took(
    placed_ago: int, counted_ago: int | None, *, moves: bool
) -> None:
    """Until then its credit is what it was before that move: one credit would pay for both."""
    policy = Thrift(steady=True, objective="cost")
    cluster = two_halves(policy)
    cluster.has_earned(10_000)
    cluster.ends("b")
    cluster.ends("d")
    for job_ in cluster.core.state.jobs.values():
        job_.placed_at = cluster.now - placed_ago
        job_.progress.iteration_from = None if counted_ago is None else cluster.now - counted_ago
    assert any(policy.regroup(cluster.core.state, cluster.now)) is moves


@pytest.mark.parametrize(
    ("iterations", "took_s", "shares"),
    [
        (7, 200, False),  # it is not judged yet, so that nobody would act if it fell behind
        (8, 200, True),
        (8, 300, False),  # it has no more than it would need to get away
    ],
)
def test_where_durations_are_uncertain_nobody_is_joined_or_moved_before_it_has_a_reserve(
    iterations: int, took_s: int, *, shares: bool
) -> None:
    cluster = Cluster(6, 4, Thrift(steady=True, objective="cost", promise="measured", warm_move_s=30))
    for name in ("a", "b", "c"):
        cluster.arrives(job(name, 100, 110, 1.6))
    assert cluster.mates() == [{"a"}, {"b"}, {"c"}]
    cluster.now = 10 * HOUR_MS
    for name in ("a", "b"):
        cluster.has_run(name, iterations, solo_s=210, took_s=took_s)
    cluster.ends("c")  # a search begins when something has changed
    cluster.looks_for_moves()
    assert cluster.mates() == ([{"a", "b"}] if shares else [{"a"}, {"b"}])


def counted_orders(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many orders are tried for a period, in the last place; the caller begins further places."""
    orders, bounds = [0], catalogue.bounds_ms

    def counted(*given: Any) -> tuple[int, int]:
        orders[-1] += 1
        return bounds(*given)

    monkeypatch.setattr(catalogue, "bounds_ms", counted)
    return orders


def test_few_orders_are_tried_for_a_newcomer_and_none_that_counts_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon hears no other input meanwhile: counted, not timed. No two jobs here have the same profile.

    So nothing was searched before. Asked again, when all has been, the policy finds no better place.
    """
    chance = random.Random(3)
    cluster = Cluster(120, 80, RollMux())
    for number in range(60):
        cluster.arrives(job(f"j{number}", chance.uniform(50, 900), chance.uniform(50, 500), chance.uniform(1.1, 2)))
    orders = counted_orders(monkeypatch)
    for number in range(20):
        spec = job("new", chance.uniform(50, 900), chance.uniform(50, 500), 1.9)
        orders.append(0)
        policy, newcomer = Thrift(objective="cost"), Job("new", "team", "ann", spec, number)
        found = policy.place(cluster.core.state, newcomer)
        orders.append(0)
        assert all(policy.place(cluster.core.state, newcomer) == found for _ in range(5))
    assert sum(orders) > 20
    assert max(orders[1::2]) < 50


def test_the_search_for_moves_does_little_between_two_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a daemon others are heard between them, so what matters is the longest: counted, not timed."""
    orders = counted_orders(monkeypatch)
    policy, chance = Thrift(objective="cost"), random.Random(3)
    cluster = Cluster(30, 30, policy)
    for number in range(16):
        cluster.arrives(job(f"j{number}", chance.uniform(50, 900), chance.uniform(50, 500), chance.uniform(1.1, 2.5)))
    cluster.has_earned(100_000)
    orders.clear()
    orders.append(0)
    for _ in islice(policy.regroup(cluster.core.state, 100 * HOUR_MS), 3_000):
        orders.append(0)
    assert sum(orders) > 1_000
    assert max(orders) < 150  # about five milliseconds


@pytest.mark.parametrize("seed", range(2))
def test_whatever_comes_and_goes_every_promise_holds(seed: int) -> None:
    """Arrivals, departures and the moves between them: each group is played after each of them."""
    chance = random.Random(seed)
    cluster = Cluster(8, 6, Thrift(steady=True, objective="cost", warm_move_s=30))
    there: list[str] = []
    moves = 0
    for number in range(24):
        cluster.now += round(chance.expovariate(1 / 2000) * 1000)
        cluster.has_earned(1000)
        if there and chance.random() < 0.45:
            cluster.ends(there.pop(chance.randrange(len(there))))
        else:
            rollout, train = (round(10 ** chance.uniform(1.5, 2.8)) for _ in range(2))
            wide = (chance.choice([1, 1, 1, 2]), chance.choice([1, 1, 1, 2]))
            placed = cluster.arrives(
                job(f"j{number}", rollout, train, round(chance.uniform(1, 2), 2), nodes=wide, ram_gb=300)
            )
            there.append(f"j{number}")
            assert placed is None or placed.promised
        cluster.keeps_every_promise()
        moves += len(cluster.looks_for_moves())
    assert moves > 1


# ---- credit that is spent --------------------------------------------------------------------------------------------


def slowed(cluster: Cluster) -> list[str]:
    """The jobs that run slower than they were promised."""
    state = cluster.core.state
    return [
        name
        for group in state.groups
        for name, pace in paces(cluster.core, group).items()
        if pace > (state.jobs[name].spec.slo or 0) * sum(it.planned_ms or 0 for it in state.jobs[name].spec.phases) + 1
    ]


def is_played(cluster: Cluster, until_ms: int) -> None:
    """The scheduler looks for moves whenever it wants to until then."""
    for _ in range(20_000):
        due = cluster.core.deadline()
        if due is None or due > until_ms:
            cluster.now = until_ms
            return
        cluster.now = max(cluster.now, due)
        cluster.hand(i.Tick())
    raise AssertionError("the search does not end")


def test_when_its_credit_is_down_to_the_reserve_a_job_is_back_at_its_promised_pace() -> None:
    """Jobs with credit are slowed beyond their promises; then all that they can spare is spent."""
    chance = random.Random(8)
    lent = moves = 0
    for _ in range(25):
        cluster = Cluster(12, 12, Thrift(objective="cost"))
        names = [f"j{number}" for number in range(chance.randint(2, 5))]
        for name in names:
            rollout, train = (round(10 ** chance.uniform(1.7, 2.7)) for _ in range(2))
            cluster.arrives(job(name, rollout, train, chance.uniform(1.05, 1.8)))
        cluster.arrives(job("last", 10, 10, 1.01))
        state = cluster.core.state
        cluster.now = 40 * HOUR_MS
        for known in state.jobs.values():
            known.progress.finished = 100
            known.progress.solo_ms = known.progress.elapsed_ms = round(chance.uniform(5, 40) * HOUR_MS)
        cluster.ends("last")
        is_played(cluster, cluster.now + MINUTE_MS)
        spent = slowed(cluster)
        lent += len(spent)
        for name in spent:
            known = state.jobs[name]
            limit = round((known.spec.slo or 0) * sum(it.planned_ms or 0 for it in known.spec.phases))
            reserve = round((known.spec.slo or 0) * 30_000) + limit - 100
            known.progress.elapsed_ms = round((known.spec.slo or 0) * known.progress.solo_ms) - reserve
        pins = {name: dict(known.pins) for name, known in state.jobs.items()}
        is_played(cluster, cluster.now + 3 * HOUR_MS)
        assert not set(spent) & set(slowed(cluster))
        moves += sum(known.pins != pins[name] for name, known in state.jobs.items() if known.live)
    assert lent > 30
    assert moves > 4


@pytest.mark.parametrize(
    ("policy", "movable", "lends"),
    [
        (Thrift(objective="cost"), Movable.WARM, True),
        (Thrift(objective="throughput"), Movable.WARM, False),  # no nodes can be bought to go back to
        (Thrift(objective="cost", steady=True), Movable.WARM, False),
        (Thrift(objective="cost"), Movable.NO, False),
    ],
)
def test_credit_is_lent_only_where_there_is_a_way_back_and_never_by_a_steady_policy(
    policy: Policy, movable: Movable, *, lends: bool
) -> None:
    cluster = Cluster(2, 1, policy)
    cluster.arrives(job("a", 100, 150, 1.3, movable=movable))
    cluster.now = 40 * HOUR_MS
    cluster.has_run("a", 400, solo_s=250, took_s=250)
    cluster.arrives(job("b", 100, 200, 1.3, movable=movable))
    assert cluster.mates() == ([{"a", "b"}] if lends else [{"a"}])
    assert len(slowed(cluster)) == lends


# ---- what is parked has to be had ------------------------------------------------------------------------------------

DRIVERS = {"channel": DriverTraits(), "near": DriverTraits(), "far": DriverTraits(copies=True)}


def by(driver: str, spec: JobSpec) -> JobSpec:
    return replace(spec, states=tuple(replace(kept, driver=driver) for kept in spec.states))


def two_hosts() -> Scheduler:
    """Two nodes of each pool on h1, and one of each on h2, which cost half of h1's second ones."""
    core = Scheduler(Config(lease_ms=1 << 50, move_interval_ms=0, moves=Moves.ON, drivers=DRIVERS), RollMux())
    nodes = [
        i.NodeSpec(name, host, (f"{host}/gpu{at}",), (pool,), price_per_gpu_hour=price)
        for name, host, at, pool, price in (
            ("r1", "h1", 0, "rollout", 0.1), ("t1", "h1", 1, "train", 0.1), ("r2", "h1", 2, "rollout", 1),
            ("t2", "h1", 3, "train", 1), ("r3", "h2", 0, "rollout", 0.5), ("t3", "h2", 1, "train", 0.5),
        )
    ]  # fmt: skip
    core.handle(i.Start(tuple(i.HostSpec(host, "mock", 10**6) for host in ("h1", "h2")), tuple(nodes)), 0)
    for host in ("h1", "h2"):
        core.handle(i.HostObserved(host, tuple(i.GpuObservation(it.gpus[0], 0) for it in nodes if it.host == host)), 0)
    return core


@pytest.mark.parametrize(("driver", "goes_to"), [("near", "r2"), ("far", "r3")])
def test_the_guard_has_a_job_moved_as_far_as_its_driver_can_fetch(driver: str, goes_to: str) -> None:
    core = two_hosts()
    for name in ("a", "b"):
        core.handle(i.RegisterJob("team", "ann", by(driver, job(name, 10, 10, 3))), 0)
    short = core.state.jobs["j1"]
    core.context.now = 1_000
    guard.exhausted(core.context, core.state.groups[short.group or ""], short, "it is short of credit")
    reconcile(core.context)
    assert short.pins["rollout"] == (goes_to,)


def test_a_move_that_is_refused_keeps_no_other_from_being_made() -> None:
    """Two wide jobs would save most together, and cannot be had on each other's hosts; two narrow ones can."""
    cluster = Cluster(6, 6, RollMux(max_group=1))
    cycle = cluster.core.context
    cycle.config, cycle._traits = replace(cycle.config, drivers=DRIVERS), DRIVERS
    for name, driver, width in (("a", "near", 2), ("b", "near", 2), ("c", "far", 1), ("d", "far", 1)):
        assert cluster.arrives(by(driver, job(name, 100, 100, 2.2, nodes=(width, width)))) is not None
    cluster.has_earned(20_000)
    cycle.policy = Thrift(steady=True, objective="cost")
    cluster.now += 10 * HOUR_MS
    cluster.arrives(job("z", 1, 1, None, movable=Movable.NO))
    cluster.ends("z")
    moved = {cluster.core.state.jobs[fact.job].spec.name for fact in cluster.looks_for_moves()}
    assert moved
    assert moved <= {"c", "d"}
