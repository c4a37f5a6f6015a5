"""The optimum is what brute force finds, and nobody who keeps the same promises pays less.

The brute force below knows the paper's constraints only: everybody's iteration within everybody's SLO, RAM, the cap. It
tries every partition, every pinning and every order, and asks the recurrence for the period.
"""

import random
import statistics
from collections.abc import Iterator, Sequence
from itertools import combinations, permutations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.schedule import Leg, period_ms
from rollmuxd.sim.policies import MAX_GROUP
from rollmuxd.sim.workload import Impossible, Pool, SimJob, Workload
from rollmuxd_evaluation import optimal
from rollmuxd_evaluation.optimal import Optimal, Partition, Search

H20, H800 = 8 * 1.76, 8 * 5.28  # dollars per node-hour (research 1.3, as the artifact has them)
POOLS = (Pool("rollout", "H20", 1.76), Pool("train", "H800", 5.28))


def cheapest(jobs: Sequence[SimJob], pools: Sequence[Pool], max_group: int = MAX_GROUP) -> Partition:
    """The cheapest partition of jobs that are all there at once."""
    search = Search(jobs, pools, max_group)
    for number in range(len(jobs)):
        search.arrive(number)
    search.regroup()
    return search.partition()


def job(
    name: str, rollout: int, train: int, slo: float | None = None, *,
    width: int = 1, train_width: int = 1, ram_gb: int = 0, moves: int = 0, arrives: int = 0, lasts: int = 10_000,
) -> SimJob:  # fmt: skip
    """A job of two phases, in milliseconds; ``moves`` is what loading and parking take together, per phase."""
    spec = JobSpec(
        name,
        phases=(PhaseSpec("rollout", ("rollout",), rollout), PhaseSpec("train", ("train",), train)),
        wants=(Want("rollout", width), Want("train", train_width)),
        states=tuple(StateSpec(pool, ram_mb=1000 * ram_gb, load_ms=moves) for pool in ("rollout", "train")),
        slo=slo,
    )
    return SimJob(
        name, "made", arrives, lasts, spec, ((rollout, train),), footprint={"rollout": width, "train": train_width}
    )


@st.composite
def _jobs(
    draw: st.DrawFn, most: int, widths: tuple[int, ...] = (1,), train_widths: tuple[int, ...] = (1,)
) -> list[SimJob]:
    """Jobs of like sizes, so that many could share."""
    made = []
    moves = draw(st.sampled_from([0, 0, 20]))
    for n in range(draw(st.integers(1, most))):
        made.append(
            job(
                f"j{n}",
                draw(st.integers(100, 400)),
                draw(st.integers(100, 400)),
                draw(st.sampled_from([None, 1.0, 1.2, 1.5, 2.0, 3.0, 4.0])),
                width=draw(st.sampled_from(widths)),
                train_width=draw(st.sampled_from(train_widths)),
                ram_gb=draw(st.sampled_from([0, 500, 900])),
                moves=moves,
            )
        )
    return made


# ---- brute force -----------------------------------------------------------------------------------------------------


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for smaller in partitions(rest):
        yield [[first], *smaller]
        for n, group in enumerate(smaller):
            yield [*smaller[:n], [first, *group], *smaller[n + 1 :]]


def brute_group(jobs: list[SimJob], widest: int, known: dict[tuple[str, ...], float]) -> float:
    """Dollars per hour of the cheapest group of these jobs; infinite: there is none."""
    key = tuple(one.name for one in jobs)
    if key not in known:
        known[key] = min(_brute_costs(jobs, widest), default=float("inf"))
    return known[key]


def _brute_costs(jobs: list[SimJob], widest: int) -> Iterator[float]:
    wants = [{want.pool: want.nodes for want in one.spec.wants} for one in jobs]
    if len(jobs) == 1:
        yield wants[0]["rollout"] * H20 + wants[0]["train"] * H800
        return
    ram = [one.spec.states[0].ram_mb for one in jobs]
    limit = min((int(one.spec.slo * one.solo_ms) for one in jobs if one.spec.slo is not None), default=10**9)
    if len(jobs) > 5 or sum(ram) > 2_000_000:
        return
    for train in range(max(want["train"] for want in wants), widest + 1):
        for rollout in range(1, sum(want["rollout"] for want in wants) + 1):
            if _brute_fits(jobs, wants, ram, limit, rollout, train):
                yield rollout * H20 + train * H800
                break


def _brute_fits(
    jobs: list[SimJob], wants: list[dict[str, int]], ram: list[int], limit: int, rollout: int, train: int
) -> bool:
    took = []
    for one, want in zip(jobs, wants, strict=True):
        moves = one.spec.states[0].load_ms
        took.append((one.planned[0] + moves, one.planned[1] * want["train"] // train + moves))
    if sum(each[1] for each in took) > limit:
        return False

    def pinned(n: int, pins: list[tuple[int, ...]]) -> Iterator[list[tuple[int, ...]]]:
        if n == len(jobs):
            yield pins
            return
        for nodes in combinations(range(rollout), wants[n]["rollout"]):
            after = [*pins, nodes]
            here = {node: [k for k, each in enumerate(after) if node in each] for node in nodes}
            if all(sum(took[k][0] for k in on) <= limit for on in here.values()) and all(
                sum(ram[k] for k in on) <= 2_000_000 for on in here.values()
            ):
                yield from pinned(n + 1, after)

    for pins in pinned(0, []):
        for rest in permutations(range(1, len(jobs))):
            legs = []
            for n in (0, *rest):
                legs.append(Leg(str(n), tuple(f"r{node}" for node in pins[n]), took[n][0]))
                legs.append(Leg(str(n), tuple(f"t{node}" for node in range(train)), took[n][1]))
            if period_ms(legs) <= limit:
                return True
    return False


def brute(jobs: list[SimJob]) -> float:
    widest = max(want.nodes for one in jobs for want in one.spec.wants if want.pool == "train")
    known: dict[tuple[str, ...], float] = {}
    return min(
        sum(brute_group([jobs[n] for n in sorted(group)], widest, known) for group in groups)
        for groups in partitions(list(range(len(jobs))))
    )


@given(_jobs(6))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_finds_nothing_cheaper_for_jobs_one_node_wide(jobs: list[SimJob]) -> None:
    found = cheapest(jobs, POOLS)
    assert found.exact
    assert found.cost == pytest.approx(brute(jobs))


@given(_jobs(4, train_widths=(1, 2)))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_brute_force_finds_nothing_cheaper_for_wide_training_pools(jobs: list[SimJob]) -> None:
    found = cheapest(jobs, POOLS)
    assert found.exact
    assert found.cost == pytest.approx(brute(jobs))


@given(_jobs(4, widths=(1, 2), train_widths=(1, 2)))
@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])
def test_what_is_found_for_wide_rollouts_keeps_every_promise_and_is_not_called_optimal(jobs: list[SimJob]) -> None:
    found, alone = cheapest(jobs, POOLS), 0.0
    for one in jobs:
        alone += sum(want.nodes * price for want, price in zip(one.spec.wants, (H20, H800), strict=True))
    assert found.exact == all(one.spec.wants[0].nodes == 1 for one in jobs)
    assert brute(jobs) - 1e-6 <= found.cost <= alone + 1e-6


# ---- against the greedy ----------------------------------------------------------------------------------------------


class Greedy:
    """RollMux without pruning, through the scheduler, over as many nodes as it could want."""

    def __init__(self, nodes: int = 20) -> None:
        self.core = Scheduler(Config(), RollMux())
        names = [
            (f"{pool[0]}{n}", pool, price) for pool, price in (("rollout", 1.76), ("train", 5.28)) for n in range(nodes)
        ]
        made = tuple(
            i.NodeSpec(host, host, tuple(f"{host}/gpu{n}" for n in range(8)), (pool,), "", 0, price)
            for host, pool, price in names
        )
        self.core.handle(i.Start(tuple(i.HostSpec(node.host, "mock", 2_000_000) for node in made), made), 0)
        for node in made:
            self.core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 0)

    def arrives(self, one: SimJob) -> None:
        decision = self.core.handle(i.RegisterJob("team", "ann", one.spec), 0)
        assert any(isinstance(fact, f.JobPlaced) for fact in decision.facts)

    def ends(self, one: SimJob) -> None:
        self.core.handle(i.EndJob(self.core.state.names[f"team/{one.name}"], "ann"), 0)

    def cost(self) -> float:
        return sum(8 * node.price_per_gpu_hour for node in self.core.state.nodes.values() if node.group)


@given(_jobs(8, train_widths=(1, 1, 2)), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])
def test_rollmux_never_pays_less_for_the_same_jobs(jobs: list[SimJob], order: random.Random) -> None:
    """At every arrival and departure, whatever wide pools those that have left have left behind."""
    greedy, search = Greedy(), Search(jobs, POOLS)
    coming, present = list(range(len(jobs))), []
    while coming or present:
        if coming and (not present or order.random() < 0.6):
            one = coming.pop(0)
            present.append(one)
            greedy.arrives(jobs[one])
            search.arrive(one)
        else:
            one = present.pop(order.randrange(len(present)))
            greedy.ends(jobs[one])
            search.depart(one)
        search.regroup()
        found = search.partition()
        assert found.exact
        assert sorted(member for members, _ in found.groups for member in members) == sorted(present)
        assert found.cost <= greedy.cost() + 1e-6


CLASSES = {  # research 1.16b: rollout and training seconds, small, medium, large
    "BL": (((50, 100), (50, 100)), ((100, 200), (100, 200)), ((200, 300), (200, 300))),
    "RH": (((100, 200), (25, 50)), ((200, 400), (50, 100)), ((400, 600), (100, 200))),
    "TH": (((25, 50), (100, 200)), ((50, 100), (200, 400)), ((100, 200), (400, 600))),
}


def mixed(seed: int, count: int, **times: int) -> list[SimJob]:
    draw = random.Random(seed)
    made = []
    for n in range(count):
        rollout, train = draw.choice(CLASSES[draw.choice(["BL", "RH", "TH"])])
        took = (round(1000 * draw.uniform(*rollout)), round(1000 * draw.uniform(*train)))
        made.append(job(f"j{n}", *took, draw.uniform(1, 2), **times))
    return made


def test_rollmux_is_within_a_tenth_or_so_of_the_optimum_on_eight_mixed_jobs() -> None:
    """Research 6.12 row 10: 1.01 to 1.12 x on the mean of 20 instances."""
    ratios = []
    for seed in range(20):
        jobs, greedy = mixed(seed, 8), Greedy()
        for one in jobs:
            greedy.arrives(one)
        ratios.append(greedy.cost() / cheapest(jobs, POOLS).cost)
    assert min(ratios) >= 1
    assert 1.01 <= statistics.mean(ratios) <= 1.12


# ---- one group -------------------------------------------------------------------------------------------------------


def test_three_jobs_of_two_nodes_share_pairs_whole() -> None:
    """Loads of 200 ms on each of three nodes, by way of pairs {1,2}, {2,3}, {1,3}, still need 300 (research 1.9)."""
    jobs = [job(f"j{n}", 100, 10, slo, width=2) for n, slo in enumerate((2.0, 2.0, 2.0))]
    assert cheapest(jobs, POOLS).cost == pytest.approx(H800 + 4 * H20)  # two share a pair within 220, one has its own
    loose = [replace(one, spec=replace(one.spec, slo=3.0)) for one in jobs]
    assert cheapest(loose, POOLS).cost == pytest.approx(H800 + 2 * H20)


def test_a_wider_training_pool_is_bought_when_that_is_cheaper_than_two_groups() -> None:
    """Four of 10/100 within 220: 400 on one node, 200 on two. In pairs they need two as well, and more for rollouts."""
    jobs = [job(f"j{n}", 10, 100, 2.0) for n in range(4)]
    assert cheapest(jobs, POOLS).cost == pytest.approx(2 * (H800 + H20))
    wide = [*jobs, job("wide", 10, 200, 5.0, train_width=2)]  # nobody's pool is wider than the widest job's
    search = Search(wide, POOLS)
    for n in range(4):
        search.arrive(n)
    search.regroup()
    assert search.partition().cost == pytest.approx(2 * H800 + H20)


def test_states_that_do_not_fit_one_host_do_not_share_it() -> None:
    jobs = [job(f"j{n}", 10, 10, 9.0, ram_gb=900) for n in range(4)]
    assert cheapest(jobs, POOLS).cost == pytest.approx(2 * (H800 + H20))
    roomy = tuple(replace(pool, ram_mb=4_000_000) for pool in POOLS)
    assert cheapest(jobs, roomy).cost == pytest.approx(H800 + H20)


def test_a_gpu_has_room_for_the_largest_state_beside_what_the_others_leave() -> None:
    """Two engines of 60 GB that leave 5 GB each while parked need 65 GB."""
    states = tuple(StateSpec(pool, gpu_mb=60_000, residual_mb=5_000) for pool in ("rollout", "train"))
    jobs = [job(f"j{n}", 10, 10, 9.0) for n in range(2)]
    jobs = [replace(one, spec=replace(one.spec, states=states)) for one in jobs]
    for gpu_mb, groups in ((64_999, 2), (65_000, 1)):
        pools = tuple(replace(pool, gpu_mb=gpu_mb) for pool in POOLS)
        assert len(cheapest(jobs, pools).groups) == groups


def test_no_group_is_larger_than_the_cap() -> None:
    jobs = [job(f"j{n}", 1, 1, 100.0) for n in range(7)]
    assert sorted(len(group) for group, _ in cheapest(jobs, POOLS).groups) in ([2, 5], [3, 4])
    assert max(len(group) for group, _ in cheapest(jobs, POOLS, max_group=2).groups) == 2


def test_of_two_that_cost_the_same_the_one_that_slows_less_is_taken() -> None:
    """Any two of three share; the pair with the shortest period is a and b."""
    jobs = [job("a", 100, 100, 2.0), job("b", 100, 100, 2.0), job("c", 199, 100, 2.0)]
    jobs = [replace(one, spec=replace(one.spec, states=(StateSpec("train", ram_mb=900_000),))) for one in jobs]
    assert [group for group, _ in cheapest(jobs, POOLS).groups] == [(0, 1), (2,)]


# ---- above the exact -------------------------------------------------------------------------------------------------


def test_what_was_only_the_best_found_is_never_called_optimal() -> None:
    few, many = mixed(1, 12), mixed(1, 30)
    assert cheapest(few, POOLS).exact
    found = cheapest(many, POOLS)
    assert not found.exact
    assert found.cost < 30 * (H20 + H800)


def test_many_jobs_are_exact_where_few_of_them_could_share_with_each_other() -> None:
    """Ten pairs of a kind; the kinds differ so much in length that nobody joins another's."""
    jobs = [job(f"j{n}", 100 * 3 ** (n // 2), 100 * 3 ** (n // 2), 1.2) for n in range(20)]
    found = cheapest(jobs, POOLS)
    assert found.exact
    assert [group for group, _ in found.groups] == [(n, n + 1) for n in range(0, 20, 2)]


def test_the_best_found_is_near_the_optimum(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve jobs with and without dynamic programming over all of them (research/policy.md 6: 1.00 to 1.07)."""
    ratios = []
    for seed in range(8):
        jobs = mixed(seed, 12)
        exact = cheapest(jobs, POOLS).cost
        with monkeypatch.context() as patched:
            patched.setattr(optimal, "EXACT_JOBS", 8)
            patched.setattr(optimal, "UNION_JOBS", 8)
            found = Search(jobs, POOLS)
            for n in range(12):
                found.arrive(n)
                found.regroup()
            ratios.append(found.partition().cost / exact)
    assert min(ratios) >= 1 - 1e-9
    assert statistics.mean(ratios) <= 1.05


def test_a_partition_becomes_exact_again_when_enough_have_left() -> None:
    jobs = mixed(3, 20)
    search = Search(jobs, POOLS)
    for n in range(20):
        search.arrive(n)
        search.regroup()
    assert not search.partition().exact
    for n in range(10):
        search.depart(n)
        search.regroup()
    left = search.partition()
    assert left.exact
    assert left.cost == pytest.approx(cheapest(jobs[10:], POOLS).cost)


@given(st.integers(0, 10_000), st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_whenever_it_says_exact_it_is(seed: int, order: random.Random) -> None:
    """With dynamic programming for up to four jobs only, so that jobs come and go across what is exact."""
    jobs = mixed(seed, 9)
    search = Search(jobs, POOLS)
    coming, present, seen = list(range(9)), [], set()
    with pytest.MonkeyPatch.context() as patched:
        while coming or present:
            if coming and (not present or order.random() < 0.6):
                present.append(coming.pop(0))
                search.arrive(present[-1])
            else:
                search.depart(present.pop(order.randrange(len(present))))
            patched.setattr(optimal, "EXACT_JOBS", 4)
            search.regroup()
            found = search.partition()
            patched.setattr(optimal, "EXACT_JOBS", 12)
            best = cheapest([jobs[n] for n in present], POOLS).cost
            assert found.cost == pytest.approx(best) if found.exact else found.cost >= best - 1e-6
            seen.add(found.exact)
    assert True in seen


def test_pairs_of_groups_are_regrouped_where_there_are_too_many_for_triples(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = mixed(2, 70)
    paired = cheapest(jobs, POOLS)
    assert len(paired.groups) > optimal.TRIPLES_UP_TO
    monkeypatch.setattr(optimal, "STEPS", 0)
    assert paired.cost < cheapest(jobs, POOLS).cost


# ---- a run -----------------------------------------------------------------------------------------------------------


def two() -> Workload:
    """Two of 100/100 that can share in 200 ms, the second from 1000 on."""
    hour = 3_600_000
    first = job("a", 100, 100, 1.0, lasts=3 * hour)
    return Workload("two", (first, job("b", 100, 100, 1.0, arrives=hour, lasts=hour)), POOLS)


def test_a_run_pays_for_the_groups_of_each_moment() -> None:
    """One pair of nodes for three hours, since both fit it; the second of them busy twice as much."""
    outcome = Optimal().run(two(), seed=3, accounting="paper")
    assert (outcome.policy_under_test, outcome.fidelity, outcome.seed, outcome.exact) == ("optimal", "cost", 3, True)
    assert outcome.cost == pytest.approx(3 * (H20 + H800))
    assert outcome.cost_per_hour == pytest.approx(H20 + H800)
    assert {pool.name: pool.peak_gpus for pool in outcome.pools} == {"rollout": 8, "train": 8}
    assert [pool.utilisation for pool in outcome.pools] == [pytest.approx((0.5 + 1 + 0.5) / 3)] * 2
    a, b = outcome.jobs
    assert (a.placed_ms, a.ended_ms, a.iterations) == (0, 3 * 3_600_000, pytest.approx(54_000))
    assert (b.arrived_ms, b.slowdown, b.kept) == (3_600_000, pytest.approx(1.0), True)


def test_by_paper_a_slowed_job_ends_when_its_trace_says_and_by_work_when_it_is_through() -> None:
    """Within 400 ms two of 150/50 share both nodes at 300 ms an iteration instead of 200."""
    jobs = tuple(job(name, 150, 50, 2.0, lasts=200_000) for name in "ab")
    paper = Optimal().run(Workload("w", jobs, POOLS), seed=0, accounting="paper")
    work = Optimal().run(Workload("w", jobs, POOLS), seed=0, accounting="work")
    assert [one.ended_ms for one in paper.jobs] == [200_000, 200_000]
    assert [one.ended_ms for one in work.jobs] == [300_000, 300_000]
    assert [one.iterations for one in paper.jobs] == [pytest.approx(200_000 / 300)] * 2
    assert [one.iterations for one in work.jobs] == [pytest.approx(1000)] * 2
    assert [one.slowdown for one in (*paper.jobs, *work.jobs)] == [pytest.approx(1.5)] * 4
    assert work.cost == pytest.approx(1.5 * paper.cost)


def test_loading_and_parking_are_planned_and_no_work() -> None:
    jobs = tuple(job(name, 100, 100, 2.0, moves=50, lasts=300_000) for name in "ab")
    outcome = Optimal().run(Workload("w", jobs, POOLS), seed=0, accounting="paper")
    assert outcome.jobs[0].slowdown == pytest.approx(1.5)  # 300 ms: each phase and what moving its state takes
    assert outcome.pools[0].utilisation == pytest.approx(200 / 300)


def test_two_runs_are_alike() -> None:
    jobs = tuple(
        replace(one, arrives_ms=60_000 * n, lasts_ms=1_200_000 + 7_000 * n) for n, one in enumerate(mixed(5, 40))
    )

    def story() -> object:
        outcome = Optimal().run(Workload("w", jobs, POOLS), seed=0, accounting="work")
        return replace(outcome, wall_s=0.0, decision_us=[])

    assert story() == story()


def test_with_a_fixed_inventory_there_is_no_such_bound() -> None:
    fixed = tuple(replace(pool, nodes=4) for pool in POOLS)
    with pytest.raises(Impossible, match="optimal buys what it needs"):
        Optimal().run(Workload("w", (job("a", 1, 1),), fixed), seed=0, accounting="paper")


def test_jobs_that_it_cannot_group_are_named() -> None:
    one = job("a", 1, 1)
    parts = replace(one, spec=replace(one.spec, wants=(Want("rollout", gpus=4), Want("train"))))
    with pytest.raises(Impossible, match="job a"):
        cheapest([parts], POOLS)
    synced = replace(one.spec, phases=(*one.spec.phases, PhaseSpec("sync", ("rollout", "train"), 1)))
    with pytest.raises(Impossible, match="job a has the phases rollout, train, sync"):
        cheapest([replace(one, spec=synced)], POOLS)
