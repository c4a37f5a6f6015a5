"""Where jobs are put, and why they are not: the worked example of research 6.13, and what users are told.

Figures are written out by hand from research 6.12 row 11, 6.13 and DESIGN section 6. The brute force below knows only
the paper's two constraints (SLO of every member, RAM of every host) and its list of placements.
"""

import itertools
import re

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from simkit import invariants

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.explain.explainer import Explainer
from rollmuxd.explain.forecast import position
from rollmuxd.policies.rollmux import RollMux

H20, H800 = 1.85, 5.28  # dollars per GPU-hour (RollMux, Table 1); a node is 8 GPUs


class Cluster:
    """A scheduler over some rollout and train nodes of 8 GPUs, each a host of its own with its own RAM."""

    def __init__(
        self, rollout: int, train: int, *, ram_gb: float = 1000, config: Config | None = None, **policy: int
    ) -> None:
        self.core = Scheduler(config or Config(), RollMux(**policy))
        self.now = 0
        self.nodes: list[i.NodeSpec] = []
        hosts = []
        for pool, count, price in (("rollout", rollout, H20), ("train", train, H800)):
            for number in range(count):
                host = f"{pool[0]}{number}"
                hosts.append(i.HostSpec(host, "mock", round(ram_gb * 1000)))
                gpus = tuple(f"{host}/gpu{gpu}" for gpu in range(8))
                self.nodes.append(i.NodeSpec(f"{host}/gpu0-7", host, gpus, (pool,), price_per_gpu_hour=price))
        self.hand(i.Start(tuple(hosts), tuple(self.nodes)))
        for host in hosts:
            self.sees(host.id)

    def hand(self, given_: i.Input) -> list[f.Fact]:
        decision = self.core.handle(given_, self.now)
        invariants.check(self.core.state)
        return list(decision.facts)

    def sees(self, host: str) -> None:
        gpus = [gpu for node in self.nodes if node.host == host for gpu in node.gpus]
        self.hand(i.HostObserved(host, tuple(i.GpuObservation(gpu, 0) for gpu in gpus)))

    def arrives(self, spec: JobSpec) -> f.JobPlaced | None:
        """The job comes; how it was placed, or None: it waits."""
        facts = self.hand(i.RegisterJob("team", "ann", spec))
        name = self.core.state.names[f"team/{spec.name}"]
        return next((fact for fact in facts if isinstance(fact, f.JobPlaced) and fact.job == name), None)

    def ends(self, name: str) -> list[str]:
        """The job ends; the names of those that are placed now."""
        facts = self.hand(i.EndJob(self.id(name), "ann"))
        return [self.core.state.jobs[fact.job].spec.name for fact in facts if isinstance(fact, f.JobPlaced)]

    def id(self, name: str) -> str:
        return self.core.state.names[f"team/{name}"]

    def period(self, name: str) -> int | None:
        return self.core.policy.period_ms(self.core.state, self.core.state.jobs[self.id(name)].group)

    def reasons(self, name: str) -> list[str]:
        return [reason.code for reason in Explainer(self.core.context).why_job_waits(self.id(name), self.now).reasons]


def job(
    name: str, rollout_s: float | None, train_s: float | None, slo: float | None = None, *,
    nodes: int = 1, train_nodes: int = 1,
    ram_gb: float = 0, train_ram_gb: float = 0, priority: int = 0, named: dict[str, tuple[str, ...]] | None = None,
) -> JobSpec:  # fmt: skip
    times = [None if s is None else round(s * 1000) for s in (rollout_s, train_s)]
    return JobSpec(
        name,
        phases=(PhaseSpec("rollout", ("rollout",), times[0]), PhaseSpec("train", ("train",), times[1])),
        wants=(
            Want("rollout", nodes, named=(named or {}).get("rollout", ())),
            Want("train", train_nodes, named=(named or {}).get("train", ())),
        ),
        states=(
            StateSpec("rollout", ram_mb=round(ram_gb * 1000)),
            StateSpec("train", ram_mb=round(train_ram_gb * 1000)),
        ),
        slo=slo,
        priority=priority,
    )


def of_7b_8k(name: str, slo: float) -> JobSpec:
    return job(name, 133.8, 112.8, slo)


# ---- research 6.13 -----------------------------------------------------------------------------------------------


def test_the_worked_example_packs_y_for_nothing() -> None:
    cluster = Cluster(3, 3)
    x = cluster.arrives(of_7b_8k("X", 1.5))
    assert (x.admission, x.period_ms, round(x.cost_per_hour, 2)) == ("isolated", 246_600, 57.04)
    y = cluster.arrives(of_7b_8k("Y", 1.2))
    assert (y.admission, y.group, y.cost_per_hour, y.promised) == ("packing", x.group, 0, True)
    assert y.period_ms == cluster.period("X") == 267_600


@pytest.mark.parametrize("prune", [True, False])
def test_the_worked_example_isolates_z_whether_pruned_or_not(prune: bool) -> None:
    cluster = Cluster(3, 3, prune=prune)
    for spec in (of_7b_8k("X", 1.5), of_7b_8k("Y", 1.2)):
        cluster.arrives(spec)
    z = cluster.arrives(of_7b_8k("Z", 2.0))
    assert (z.admission, round(z.cost_per_hour, 2), z.period_ms) == ("isolated", 57.04, 246_600)
    assert cluster.period("Y") == 267_600


def test_a_looser_promise_lets_z_scale_for_the_price_of_a_rollout_node() -> None:
    cluster = Cluster(3, 3)
    for spec in (of_7b_8k("X", 1.5), of_7b_8k("Y", 1.4)):
        cluster.arrives(spec)
    z = cluster.arrives(of_7b_8k("Z", 2.0))
    assert (z.admission, round(z.cost_per_hour, 2), z.period_ms) == ("scaling", 14.80, 338_400)


def test_pruning_forfeits_that_saving() -> None:
    cluster = Cluster(3, 3, prune=True)
    for spec in (of_7b_8k("X", 1.5), of_7b_8k("Y", 1.4)):
        cluster.arrives(spec)
    z = cluster.arrives(of_7b_8k("Z", 2.0))
    assert (z.admission, round(z.cost_per_hour, 2)) == ("isolated", 57.04)  # 42.24 dollars an hour dearer


def test_of_rollout_nodes_that_cost_nothing_the_least_busy_is_taken() -> None:
    """The paper's spatial case: a wide job, and two narrow ones that roll out beside each other."""
    cluster = Cluster(2, 1)
    cluster.arrives(job("wide", 200, 300, nodes=2))
    first, second = cluster.arrives(job("D1", 250, 50)), cluster.arrives(job("D2", 250, 50))
    assert [placed.admission for placed in (first, second)] == ["packing", "packing"]
    assert first.pins["rollout"] != second.pins["rollout"]
    assert second.period_ms == 500_000


def test_a_newcomer_is_not_slowed_by_a_node_that_is_none_of_its_own() -> None:
    """Everybody's turn is as long as the busiest rollout node's, also for who rolls out beside it."""
    cluster = Cluster(3, 3)
    cluster.arrives(job("A", 238.6, 197.4, 1.74))
    b = cluster.arrives(job("B", 262.5, 86.75, 1.97))
    assert (b.admission, b.period_ms) == ("packing", 501_100)
    c = cluster.arrives(job("C", 133.8, 112.8, 1.958))  # promised 482.8 s, however empty a third rollout node is
    assert (c.admission, c.period_ms) == ("isolated", 246_600)


def test_with_a_fixed_inventory_z_waits_until_somebody_leaves() -> None:
    cluster = Cluster(1, 1)
    for spec in (of_7b_8k("X", 1.5), of_7b_8k("Y", 1.2)):
        assert cluster.arrives(spec) is not None
    assert cluster.arrives(of_7b_8k("Z", 2.0)) is None
    assert "member_slo" in cluster.reasons("Z")
    assert cluster.ends("Y") == ["Z"]
    assert cluster.period("Z") == 267_600


def test_a_tie_keeps_the_group_that_is_there() -> None:
    cluster = Cluster(3, 3)
    for node in cluster.core.state.nodes.values():
        node.price_per_gpu_hour = 0
    x = cluster.arrives(of_7b_8k("X", 2))
    assert cluster.arrives(of_7b_8k("Y", 2)).group == x.group


# ---- what is counted ---------------------------------------------------------------------------------------------


def test_32b_and_14b_actors_fit_a_terabyte_and_a_third_7b_does_not() -> None:
    cluster = Cluster(1, 1, ram_gb=1000)
    assert cluster.arrives(job("32B", 10, 10, 9, ram_gb=490.3)) is not None
    assert cluster.arrives(job("14B", 10, 10, 9, ram_gb=445.4)) is not None
    assert cluster.core.state.hosts["r0"].reserved_mb == 935_700
    assert cluster.arrives(job("7B", 10, 10, 9, ram_gb=275.7)) is None
    assert "ram" in cluster.reasons("7B")
    assert cluster.ends("14B") == ["7B"]
    assert cluster.core.state.hosts["r0"].reserved_mb == 766_000


def test_ram_that_is_needed_to_the_last_megabyte_fits() -> None:
    """The paper rejects on >=; we reject on > (research 6.3, I-7)."""
    cluster = Cluster(1, 1, ram_gb=1000)
    assert cluster.arrives(job("A", 10, 10, 9, ram_gb=600)) is not None
    assert cluster.arrives(job("B", 10, 10, 9, ram_gb=400)) is not None


def test_ram_that_a_waiting_job_still_holds_is_not_counted_twice() -> None:
    """What a job has on its nodes is there already when it is asked for another place."""
    cluster = Cluster(1, 1, ram_gb=1000)
    placed = cluster.arrives(job("A", 10, 10, 9, ram_gb=600))
    state = cluster.core.state
    (waits,) = state.jobs.values()
    waits.pins, waits.group = {}, None
    state.groups.clear()
    for node in state.nodes.values():
        node.group, node.pinned = None, []
    assert state.hosts["r0"].reserved_mb == 600_000
    again = RollMux().place(state, waits)
    assert again is not None
    assert again.pins == placed.pins


def test_a_wide_job_takes_as_many_rollout_nodes_and_its_period_is_folded_over_the_schedule() -> None:
    cluster = Cluster(3, 1)
    for name, nodes in (("A", ("r0", "r1")), ("B", ("r1", "r2")), ("C", ("r0", "r2"))):
        named = {"rollout": tuple(f"{n}/gpu0-7" for n in nodes), "train": ("t0/gpu0-7",)}
        placed = cluster.arrives(job(name, 100, 1, 4, nodes=2, named=named))
        assert placed.pins["rollout"] == named["rollout"]
    assert cluster.period("A") == 300_000  # the closed form says 200 (research 1.9)


def test_overlapping_wide_jobs_are_refused_where_only_the_closed_form_would_admit_them() -> None:
    cluster = Cluster(3, 1)
    for name, nodes in (("A", ("r0", "r1")), ("B", ("r1", "r2"))):
        cluster.arrives(
            job(
                name,
                100,
                1,
                2.5,
                nodes=2,
                named={"rollout": tuple(f"{n}/gpu0-7" for n in nodes), "train": ("t0/gpu0-7",)},
            )
        )
    third = job("C", 100, 1, 2.5, nodes=2, named={"rollout": ("r0/gpu0-7", "r2/gpu0-7"), "train": ("t0/gpu0-7",)})
    assert cluster.arrives(third) is None


def test_a_job_on_a_train_pool_wider_than_it_asked_for_trains_faster_there() -> None:
    cluster = Cluster(2, 2)
    cluster.arrives(job("wide", 100, 100, 3, train_nodes=2))
    placed = cluster.arrives(job("narrow", 100, 100, 3))
    assert set(placed.pins["train"]) == {"t0/gpu0-7", "t1/gpu0-7"}
    assert placed.admission == "packing"
    assert placed.period_ms == 200_000  # train load: 100 + 100 * 1/2


def test_a_group_whose_train_pool_is_too_narrow_is_not_joined() -> None:
    cluster = Cluster(2, 3)
    first = cluster.arrives(job("narrow", 100, 100, 3))
    placed = cluster.arrives(job("wide", 100, 100, 3, train_nodes=2))
    assert placed.group != first.group


def test_best_effort_jobs_start_on_free_nodes_and_share_only_when_there_are_none() -> None:
    cluster = Cluster(2, 2)
    assert [cluster.arrives(job(name, 10, 10)).admission for name in "ABC"] == ["isolated", "isolated", "packing"]


def test_a_best_effort_job_never_breaks_a_promise() -> None:
    cluster = Cluster(1, 1)
    cluster.arrives(job("promised", 10, 10, 1.2))
    assert cluster.arrives(job("best-effort", 10, 40)) is None
    assert cluster.reasons("best-effort")[0] == "member_slo"


def test_a_job_of_unknown_times_joins_no_group_that_has_promised_anything() -> None:
    cluster = Cluster(1, 1)
    cluster.arrives(job("promised", 10, 10, 9))
    assert cluster.arrives(job("unknown", None, None)) is None
    assert "times_unknown" in cluster.reasons("unknown")


def test_named_nodes_are_taken_and_no_others() -> None:
    cluster = Cluster(3, 2)
    placed = cluster.arrives(job("A", 10, 10, 2, named={"rollout": ("r2/gpu0-7",), "train": ("t1/gpu0-7",)}))
    assert placed.pins == {"rollout": ("r2/gpu0-7",), "train": ("t1/gpu0-7",)}


def test_nodes_named_in_two_groups_are_not_torn_out_of_them() -> None:
    cluster = Cluster(2, 2)
    cluster.arrives(job("A", 10, 10, 1.1))
    cluster.arrives(job("B", 10, 10, 1.1, named={"rollout": ("r1/gpu0-7",), "train": ("t1/gpu0-7",)}))
    assert cluster.arrives(job("C", 10, 10, 9, named={"rollout": ("r0/gpu0-7",), "train": ("t1/gpu0-7",)})) is None


def test_a_job_comes_back_to_the_nodes_it_sat_on() -> None:
    cluster = Cluster(3, 3)
    for name in "ABC":
        cluster.arrives(job(name, 10, 10, 1))
    sat = dict(cluster.core.state.jobs[cluster.id("B")].pins)
    for name in "ABC":
        cluster.ends(name)
    assert cluster.arrives(job("B", 10, 10, 1)).pins == sat


def test_no_group_grows_beyond_its_cap() -> None:
    cluster = Cluster(1, 1, max_group=2)
    assert [cluster.arrives(job(name, 1, 1)) is None for name in "ABC"] == [False, False, True]
    assert "group_full" in cluster.reasons("C")


# ---- who waits ---------------------------------------------------------------------------------------------------


def test_priority_is_raised_with_age_so_that_nobody_waits_for_ever() -> None:
    cluster = Cluster(1, 1, max_group=1)
    cluster.arrives(job("there", 10, 10))
    cluster.arrives(job("old", 10, 10))
    for hour in range(1, 4):
        cluster.now = hour * 3_600_000
        cluster.arrives(job(f"new{hour}", 10, 10, priority=2))
    assert cluster.ends("there") == ["new1"]  # 2 + 2 hours against 0 + 3; of equals the elder
    cluster.now = 4 * 3_600_000
    assert cluster.ends("new1") == ["old"]  # 0 + 4; new2: 2 + 2, and younger; new3: 2 + 1
    assert position(cluster.core.context, cluster.id("new2"), cluster.now) == 1


def test_who_has_waited_too_long_is_not_overtaken_on_the_pools_it_wants() -> None:
    cluster = Cluster(2, 2, max_group=1)
    cluster.arrives(job("A", 10, 10))
    cluster.arrives(job("wide", 10, 10, nodes=2, train_nodes=2))
    assert cluster.arrives(job("B", 10, 10)) is not None, "a small job overtakes at first"
    cluster.now = 6 * 3_600_000
    assert cluster.ends("B") == []
    assert cluster.arrives(job("C", 10, 10)) is None
    assert cluster.ends("A") == ["wide"]


# ---- against brute force -----------------------------------------------------------------------------------------

JOBS = st.lists(
    st.tuples(
        st.sampled_from([5, 10, 20, 40]), st.sampled_from([5, 10, 20, 40]), st.sampled_from([1.0, 1.2, 1.5, 2.0, 3.0]),
        st.integers(1, 2), st.sampled_from([0, 300, 600]),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


def rr_period(members: list[tuple[int, int, tuple[str, ...]]]) -> float:
    """Strict round robin over rollout nodes and one train pool, in milliseconds (research 6.4)."""
    roll: dict[str, float] = {}
    own, train, marks = [0.0] * len(members), 0.0, []
    for _ in range(160):
        for number, (rollout, training, nodes) in enumerate(members):
            end = max(own[number], *(roll.get(node, 0) for node in nodes)) + rollout
            roll.update(dict.fromkeys(nodes, end))
            own[number] = train = max(end, train) + training
        marks.append(max(own))
    return (marks[159] - marks[99]) / 60


def fits_somewhere(cluster: Cluster, spec: JobSpec, width: int, ram: int) -> tuple[str, float] | None:
    """The least price of the paper's placements (direct packing, scaling, isolated), by trying them all."""
    state = cluster.core.state
    roll, train, solo = spec.phases[0].planned_ms, spec.phases[1].planned_ms, sum(p.planned_ms for p in spec.phases)
    free = {
        pool: [n for n in state.nodes.values() if pool in n.pools and n.group is None] for pool in ("rollout", "train")
    }
    room = {host.id: host.ram_mb - host.reserved_mb for host in state.hosts.values()}
    found: list[tuple[float, str]] = []
    fresh = [n.id for n in free["rollout"] if room[n.host] >= ram * 1000]
    for group in state.groups.values():
        members = [state.jobs[name] for name in group.jobs]
        used = sorted({n for m in members for n in m.pins["rollout"]})
        ways = [("packing", subset) for subset in itertools.combinations(used, width)]
        if len(fresh) >= width:
            ways.append(("scaling", tuple(fresh[:width])))
        for how, nodes in ways:
            if any(room[state.nodes[n].host] < ram * 1000 for n in nodes) or len(members) >= 5:
                continue
            schedule = [(m.spec.phases[0].planned_ms, m.spec.phases[1].planned_ms, m.pins["rollout"]) for m in members]
            period = rr_period([*schedule, (roll, train, nodes)])
            limits = [m.spec.slo * sum(p.planned_ms for p in m.spec.phases) for m in members] + [spec.slo * solo]
            if period <= min(limits) + 1:
                found.append((0.0 if how == "packing" else width * 8 * H20, how))
    if len(fresh) >= width and free["train"]:
        found.append((width * 8 * H20 + 8 * H800, "isolated"))
    return min(found)[::-1] if found else None


#: the fourth brings its group a rollout node, and so lets in the third, which waits; the fifth is like the third
GROWS = [(5, 5, 1.0, 1, 0), (5, 10, 3.0, 1, 600), (40, 5, 1.0, 2, 0), (5, 10, 3.0, 1, 600), (40, 5, 1.0, 2, 0)]


@given(JOBS, st.integers(1, 3), st.integers(1, 2))
@example(GROWS, 3, 2)
@settings(max_examples=150, deadline=None)
def test_what_is_placed_is_feasible_and_what_is_feasible_is_placed_at_the_least_price(
    jobs: list[tuple[int, int, float, int, int]], rollout: int, train: int
) -> None:
    cluster = Cluster(rollout, train)
    for number, (roll, training, slo, width, ram) in enumerate(jobs):
        if width > rollout:
            continue
        spec = job(f"j{number}", roll, training, slo, nodes=width, ram_gb=ram)
        best = fits_somewhere(cluster, spec, width, ram)
        placed = cluster.arrives(spec)
        if best is None or placed is None:
            assert (placed is None) == (best is None), (spec, best, placed)
        else:
            assert round(placed.cost_per_hour, 2) == round(best[1], 2), (best, placed)
        for known in cluster.core.state.jobs.values():  # every promise holds, whoever came
            if known.pins and known.promised:
                solo = sum(phase.planned_ms for phase in known.spec.phases)
                assert cluster.core.policy.period_ms(cluster.core.state, known.group) <= known.spec.slo * solo + 1


def wishes(
    jobs: list[tuple[int, int, float, int, int]], rollout: int, train: int
) -> list[tuple[Cluster, str, JobSpec]]:
    """Every suggestion that is made to a waiting job, with the scheduler as it was then."""
    cluster, found = Cluster(rollout, train), []
    for number, (roll, training, slo, width, ram) in enumerate(jobs):
        if width > rollout:
            continue
        spec = job(f"j{number}", roll, training, slo, nodes=width, ram_gb=ram)
        if cluster.arrives(spec) is not None:
            continue
        assert cluster.reasons(spec.name), "it waits, and no reason is given"
        found += [
            (_like(cluster), wish, spec)
            for wish in Explainer(cluster.core.context).why_job_waits(cluster.id(spec.name), 0).would_start_with
        ]
        cluster.ends(spec.name)
    return found


def test_no_slo_is_suggested_where_ram_is_short_as_well() -> None:
    cluster = Cluster(1, 1, ram_gb=1000)
    cluster.arrives(job("A", 10, 10, 9, ram_gb=600))
    assert cluster.arrives(job("B", 5, 5, 1, ram_gb=600)) is None
    assert not [
        wish
        for wish in Explainer(cluster.core.context).why_job_waits(cluster.id("B"), 0).would_start_with
        if "slo" in wish
    ]


@given(JOBS, st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_the_slo_that_would_let_a_job_in_does_let_it_in(
    jobs: list[tuple[int, int, float, int, int]], rollout: int, train: int
) -> None:
    for cluster, wish, spec in wishes(jobs, rollout, train):
        slo = re.search(r"slo=([\d.]+)", wish)
        if slo and "node" not in wish:
            better = msgspec.structs.replace(spec, name=f"{spec.name}-again", slo=float(slo[1]))
            assert cluster.arrives(better) is not None, f"{wish} does not let in {spec}"


@given(JOBS, st.integers(1, 2), st.integers(1, 2))
@settings(max_examples=200, deadline=None)
def test_the_nodes_that_would_let_a_job_in_do_let_it_in(
    jobs: list[tuple[int, int, float, int, int]], rollout: int, train: int
) -> None:
    for cluster, wish, spec in wishes(jobs, rollout, train):
        if "node" in wish:
            assert _with_more_nodes(cluster, wish, spec), f"{wish!r} does not let in {spec}"


def _like(cluster: Cluster) -> Cluster:
    """Another scheduler in the same state."""
    again = Cluster.__new__(Cluster)
    state = msgspec.json.decode(msgspec.json.encode(cluster.core.state), type=type(cluster.core.state))
    again.core, again.now, again.nodes = Scheduler(Config(), RollMux(), state), cluster.now, list(cluster.nodes)
    return again


def _with_more_nodes(cluster: Cluster, wish: str, spec: JobSpec) -> bool:
    """Whether the job starts once there are the nodes that the wish names (each ``N more free POOL node(s)`` in it)."""
    again = _like(cluster)
    for count, pool in re.findall(r"(\d+) more free (\w+) node", wish):
        for number in range(int(count)):
            host = f"{pool[0]}-more-{number}"
            gpus = tuple(f"{host}/gpu{gpu}" for gpu in range(8))
            again.nodes.append(i.NodeSpec(f"{host}/gpu0-7", host, gpus, (pool,), price_per_gpu_hour=1))
    hosts = {node.host: i.HostSpec(node.host, "mock", 1_000_000) for node in again.nodes}
    again.hand(i.Start(tuple(hosts.values()), tuple(again.nodes)))
    for host in hosts:
        again.sees(host)
    return bool(again.core.state.jobs[again.id(spec.name)].pins)
