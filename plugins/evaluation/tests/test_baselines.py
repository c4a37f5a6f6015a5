"""What RollMux is measured against does what it is said to do, no better and no worse.

Figures are worked out by hand from research 1.15, 1.18 and 6.12. The makespan has a witness of its own below.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from simkit.chaos_policy import UNPRUNED

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.model import Dispatch
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.policies.schedule import Leg, period_ms
from rollmuxd.sim.policies import PolicyUnderTest, policy_under_test
from rollmuxd.sim.workload import Alone, Impossible, SimJob
from rollmuxd_evaluation.baselines import makespan_ms, own_periods
from rollmuxd_evaluation.workloads.shapes import apart

NAMES = ("default", "rollmux", "rollmux-artifact", "solo", "colocated", "gavel", "random", "most-idle")
H20, H800 = 1.76, 5.28  # dollars per GPU-hour (research 1.3, as the artifact has them); a node is 8 GPUs


def job(
    name: str, rollout: int, train: int, slo: float | None = None, *,
    width: int = 1, train_width: int = 1, footprint: int = 0, ram_gb: int = 0,
    colocated: tuple[int, int] | None = None,
) -> SimJob:  # fmt: skip
    """A job of two phases, in milliseconds."""
    spec = JobSpec(
        name,
        phases=(PhaseSpec("rollout", ("rollout",), rollout), PhaseSpec("train", ("train",), train)),
        wants=(Want("rollout", width), Want("train", train_width)),
        states=tuple(StateSpec(pool, ram_mb=1000 * ram_gb) for pool in ("rollout", "train")),
        slo=slo,
    )
    return SimJob(
        name, "made", 0, 10_000_000, spec, ((rollout, train),),
        footprint={"rollout": width, "train": footprint or train_width},
        colocated=None if colocated is None else Alone("train", footprint or train_width, colocated),
    )  # fmt: skip


class Cluster:
    """One policy's scheduler over many nodes of 8 GPUs, each a host of its own."""

    def __init__(
        self, under_test: PolicyUnderTest, rollout: int = 40, train: int = 40, *, ram_gb: int = 2000, seed: int = 0
    ):
        self.policy_under_test, self.policy = under_test, under_test.policy(seed)
        self.core = Scheduler(Config(), self.policy)
        names = [(f"r{n}", "rollout", H20) for n in range(rollout)] + [(f"t{n}", "train", H800) for n in range(train)]
        hosts = tuple(i.HostSpec(host, "mock", 1000 * ram_gb) for host, *_ in names)
        nodes = tuple(
            i.NodeSpec(f"{host}/gpu0-7", host, tuple(f"{host}/gpu{n}" for n in range(8)), (pool,), "", 0, price)
            for host, pool, price in names
        )
        self.core.handle(i.Start(hosts, nodes), 0)
        for node in nodes:
            self.core.handle(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)), 0)

    def arrives(self, one: SimJob) -> f.JobPlaced | None:
        """The job comes, as the policy registers it; how it was placed, or None: it waits."""
        decision = self.core.handle(i.RegisterJob("team", "ann", self.policy_under_test.adapt(one).spec), 0)
        return next((fact for fact in decision.facts if isinstance(fact, f.JobPlaced)), None)

    def ends(self, name: str) -> None:
        self.core.handle(i.EndJob(self.core.state.names[f"team/{name}"], "ann"), 0)

    def paces(self, group: str) -> dict[str, int]:
        """By the jobs' names."""
        state = self.core.state
        paces = self.policy_under_test.paces(self.policy, state, group)
        return {state.jobs[name].spec.name: pace for name, pace in paces.items()}

    def cost(self) -> float:
        """Dollars per hour of all nodes in groups."""
        return sum(8 * node.price_per_gpu_hour for node in self.core.state.nodes.values() if node.group)


# ---- rollmux-artifact ----------------------------------------------------------------------------------------------


def makespan_again(tracks: tuple[tuple[tuple[int, int, int], ...], ...], rounds: int) -> int:
    """A second opinion: every event of every round, and the line served after each."""
    todo = [list(track) * rounds for track in tracks]  # the first is at hand
    under_way: dict[int, tuple[int, int, bool]] = {}  # until when, which came first, whether it holds its nodes
    line: list[int] = []
    now = count = 0

    def comes(one: int) -> None:
        if todo[one] and todo[one][0][2]:
            under_way[one] = (now + todo[one][0][2], count, False)
        elif todo[one]:
            line.append(one)

    def serve() -> None:
        nonlocal count
        for one in tuple(line):
            mask, took, _ = todo[one][0]
            if not any(holds and todo[other][0][0] & mask for other, (_, _, holds) in under_way.items()):
                line.remove(one)
                count += 1
                under_way[one] = (now + took, count, True)

    for one in range(len(tracks)):
        count += 1
        comes(one)
    serve()
    while under_way:
        one = min(under_way, key=lambda name: under_way[name])
        now, _, holds = under_way.pop(one)
        count += 1
        if holds:
            todo[one].pop(0)
            comes(one)
        else:
            line.append(one)
        serve()
    return now


@st.composite
def _groups(draw: st.DrawFn) -> tuple[tuple[tuple[int, int, int], ...], ...]:
    """Up to four jobs on up to three rollout nodes (bits 1 to 3) and one training pool (bit 0)."""
    tracks = []
    for _ in range(draw(st.integers(1, 4))):
        nodes = draw(st.integers(1, 7)) << 1
        gap = draw(st.sampled_from([0, 0, 7]))
        tracks.append(((nodes, draw(st.integers(1, 60)), gap), (1, draw(st.integers(1, 60)), 0)))
    return tuple(tracks)


@given(_groups(), st.integers(1, 100))
@settings(deadline=None, max_examples=150)
def test_the_makespan_is_that_of_every_event_of_every_round(
    tracks: tuple[tuple[tuple[int, int, int], ...], ...], rounds: int
) -> None:
    assert makespan_ms(tracks, rounds) == makespan_again(tracks, rounds)


def test_a_group_takes_a_hundredth_of_a_hundred_rounds() -> None:
    """Two equal jobs on one node and one pool: 200 phases back to back, and the last one's training after them."""
    both = ((2, 100, 0), (1, 100, 0))
    assert makespan_ms((both, both), 100) == 200 * 100 + 100


def test_the_artifact_turns_down_what_takes_as_much_as_the_bound_allows() -> None:
    """Two of 50/149 take 2 x 149 + 50 / 100 = 298.5 by its count: just 1.5 x 199, and the published code says >=."""
    for slo, admission in ((1.5, "isolated"), (1.501, "packing")):
        cluster = Cluster(policy_under_test("rollmux-artifact"))
        cluster.arrives(job("a", 50_000, 149_000, slo))
        assert cluster.arrives(job("b", 50_000, 149_000, slo)).admission == admission
    ours = Cluster(UNPRUNED)
    ours.arrives(job("a", 50_000, 149_000, 1.5))
    assert ours.arrives(job("b", 50_000, 149_000, 1.5)).admission == "packing"  # the schedule takes 298, which is less


def test_the_artifact_prunes_no_saturated_group() -> None:
    """After X and Y of research 6.13 a third fits beside them, on a rollout node of its own, if nobody is tight."""
    cluster = Cluster(policy_under_test("rollmux-artifact"))
    placed = [cluster.arrives(job(name, 133_800, 112_800, 1.45)) for name in "XYZ"]
    assert [one.admission for one in placed] == ["isolated", "packing", "scaling"]
    pruned = Cluster(policy_under_test("rollmux"))
    placed = [pruned.arrives(job(name, 133_800, 112_800, 1.45)) for name in "XYZ"]
    assert [one.admission for one in placed] == ["isolated", "packing", "isolated"]


def test_the_artifact_lets_whoever_asked_first_go_first() -> None:
    cluster = Cluster(policy_under_test("rollmux-artifact"))
    assert cluster.arrives(job("a", 100, 100, 1.5)).dispatch is Dispatch.READY


def test_a_short_job_beside_a_long_one_goes_at_its_own_pace_unless_the_schedule_holds_it() -> None:
    """Research 6.12 row 3: L 1000/500 and S 50/50 on rollout nodes of their own; the schedule holds S to L's 1500
    ms."""
    legs = [Leg("L", ("r0",), 1000), Leg("L", ("t",), 500), Leg("S", ("r1",), 50), Leg("S", ("t",), 50)]
    assert period_ms(legs) == 1500
    r0, r1, t = 1, 2, 4
    long, short = own_periods((((r0, 1000, 0), (t, 500, 0)), ((r1, 50, 0), (t, 50, 0))))
    assert long == pytest.approx(1500, rel=0.05)
    assert short == pytest.approx(150, rel=0.05)


def test_in_the_artifact_everybody_has_a_pace_of_his_own() -> None:
    cluster = Cluster(policy_under_test("rollmux-artifact"))
    alone = cluster.arrives(job("L", 1000, 500, 2.0))
    assert cluster.paces(alone.group) == {"L": 1500}
    beside = cluster.arrives(job("S", 700, 50, 2.9))  # both rollouts on one node would be 1700 ms, S's 750 x 2.9 = 2175
    assert (beside.group, beside.admission) == (alone.group, "packing")
    paces = cluster.paces(alone.group)
    assert set(paces) == {"L", "S"}
    assert 1500 <= paces["L"] <= 2175
    assert 750 <= paces["S"] <= 2175


# ---- everybody alone -----------------------------------------------------------------------------------------------


def test_solo_buys_each_job_all_that_it_has_when_it_is_alone() -> None:
    """The artifact counts a 32B job with one training node in a group and with two of its own (research 1.18)."""
    cluster = Cluster(policy_under_test("solo"))
    first = cluster.arrives(job("a", 100, 100, 2.0, width=2, footprint=2))
    second = cluster.arrives(job("b", 10, 10, 2.0))
    assert [len(first.pins[pool]) for pool in ("rollout", "train")] == [2, 2]
    assert (first.admission, second.admission) == ("isolated", "isolated")
    assert cluster.cost() == pytest.approx(3 * 8 * (H20 + H800))
    assert cluster.paces(second.group) == {"b": 20}


def test_a_job_without_an_slo_is_alone_too() -> None:
    cluster = Cluster(policy_under_test("solo"), rollout=1, train=1)
    assert cluster.arrives(job("a", 100, 100)).admission == "isolated"
    assert cluster.arrives(job("b", 100, 100)) is None  # it would rather wait than share


def test_a_colocated_job_has_both_phases_on_its_training_nodes() -> None:
    cluster = Cluster(policy_under_test("colocated"))
    placed = cluster.arrives(job("a", 80, 77, 1.2, footprint=2, ram_gb=300, colocated=(139, 65)))
    assert {pool: len(nodes) for pool, nodes in placed.pins.items()} == {"train": 2}
    assert cluster.cost() == pytest.approx(2 * 8 * H800)
    assert cluster.paces(placed.group) == {"a": 139 + 65}
    assert {host.reserved_mb for host in cluster.core.state.hosts.values()} == {0, 600_000}
    assert cluster.arrives(job("b", 80, 77, 2.0, colocated=(139, 65))).admission == "isolated"


def test_a_colocated_job_has_the_same_iterations_to_do_and_takes_its_own_times_for_them() -> None:
    one = replace(
        job("a", 1000, 500, 1.2, colocated=(1500, 400)),
        series=((1000, 500), (500, 1000)),
        cold_ms={"rollout": 25_000, "train": 40_000},
        tail_from=(0.8, 0.8),
    )
    there = policy_under_test("colocated").adapt(one)
    assert there.work == one.work == round(10_000_000 / 1500)
    assert (there.planned, there.solo_ms) == ((1500, 400), 1900)
    assert there.series == ((1500, 400), (750, 800))
    assert there.cold_ms == {"train": 65_000}
    assert there.tail_from == ()


def test_a_job_of_which_no_colocated_times_are_known_is_named() -> None:
    with pytest.raises(Impossible, match=r"job a \(made\) cannot run co-located: its times .* not known; leave out"):
        policy_under_test("colocated").adapt(job("a", 1, 1))
    with pytest.raises(Impossible, match="it is asynchronous, so its rollouts need GPUs of their own; leave out this"):
        policy_under_test("colocated").adapt(apart(job("a", 1, 1)))


# ---- gavel -----------------------------------------------------------------------------------------------------------


def test_gavel_jobs_take_turns_with_whole_iterations() -> None:
    """Two of 100 + 100 would share in 200 ms if phases were interleaved; taking turns they need 400, SLO 2 that is."""
    for slo, admission in ((1.99, "isolated"), (2.0, "packing")):
        cluster = Cluster(policy_under_test("gavel"))
        first = cluster.arrives(job("a", 100, 100, slo))
        second = cluster.arrives(job("b", 100, 100, slo))
        assert (first.admission, second.admission) == ("isolated", admission)
    assert cluster.paces(first.group) == {"a": 400, "b": 400}
    assert [leg.phase for leg in second.schedule] == ["iteration", "iteration"]


def test_a_gavel_job_takes_the_nodes_on_which_an_iteration_is_cheaper() -> None:
    """7B_8k of research 1.4: 246.6 s on a pair for 56.32 $/h, or 257.8 s on 42.24 $/h; 3B_4k: 126.3 s or 205 s."""
    gavel = policy_under_test("gavel")
    together = gavel.adapt(job("7B_8k", 133_800, 112_800, 1.5, colocated=(159_600, 98_200)))
    apart = gavel.adapt(job("3B_4k", 79_330, 47_000, 1.5, colocated=(157_000, 48_000)))
    assert [want.pool for want in together.spec.wants] == ["train"]
    assert [want.pool for want in apart.spec.wants] == ["rollout", "train"]
    assert (together.solo_ms, apart.solo_ms) == (257_800, 126_330)
    assert together.work == round(10_000_000 / 246_600)  # as many as it would have done on the pair


def test_of_a_gavel_iteration_each_pool_works_its_own_phase_only() -> None:
    one = replace(job("a", 300, 100, 1.5), series=((200, 100), (400, 100)))
    whole = policy_under_test("gavel").adapt(one)
    assert whole.busy_share == {"rollout": 0.75, "train": 0.25}
    assert whole.series == ((300,), (500,))
    together = policy_under_test("gavel").adapt(job("b", 300, 100, 1.5, colocated=(300, 100)))
    assert together.busy_share == {"train": 1.0}


def test_gaps_stay_where_they_were_in_a_gavel_iteration() -> None:
    """The gap before the first phase is the job's own; one between phases passes with the nodes in hand."""
    one = job("a", 300, 100, 1.5)
    phases = tuple(replace(phase, gap_ms=gap) for phase, gap in zip(one.spec.phases, (7, 20), strict=True))
    one = replace(one, spec=replace(one.spec, phases=phases))
    whole = policy_under_test("gavel").adapt(one)
    assert (whole.spec.phases[0].gap_ms, whole.planned, whole.series) == (7, (420,), ((420,),))
    assert whole.solo_ms == one.solo_ms == 427


# ---- random and most-idle --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["random", "most-idle"])
def test_who_does_not_look_at_slos_promises_none(name: str) -> None:
    cluster = Cluster(policy_under_test(name))
    placed = [cluster.arrives(job(f"j{n}", 100, 100, 1.0)) for n in range(20)]
    assert not any(one.promised for one in placed)
    assert any(one.period_ms > 200 for one in placed)
    assert max(len(group.jobs) for group in cluster.core.state.groups.values()) <= 5


@pytest.mark.parametrize("name", ["random", "most-idle"])
def test_asked_twice_a_drawn_policy_answers_the_same_and_other_seeds_answer_otherwise(name: str) -> None:
    def answers(seed: int) -> list[tuple[object, ...]]:
        cluster = Cluster(policy_under_test(name), seed=seed)
        placed = []
        for n in range(12):
            one = cluster.arrives(job(f"j{n}", 100 + 10 * n, 300 - 10 * n, 2.0))
            placed.append((one.group, one.pins, one.admission))
        state = cluster.core.state
        newcomer = replace(state.jobs[state.names["team/j3"]], id="j99", pins={}, group=None)
        assert cluster.policy.place(state, newcomer) == cluster.policy.place(state, newcomer)
        return placed

    assert answers(0) == answers(0)
    assert len({str(answers(seed)) for seed in range(5)}) > 1


@pytest.mark.parametrize("name", ["random", "most-idle"])
def test_nobody_is_drawn_to_a_host_without_the_ram(name: str) -> None:
    """Of two states of 600 GB only one lies on a host of 1 TB: every job needs nodes, or a group, of its own."""
    cluster = Cluster(policy_under_test(name), ram_gb=1000)
    for n in range(15):
        cluster.arrives(job(f"j{n}", 100, 100, 2.0, ram_gb=600))
    assert len(cluster.core.state.groups) == 15


@pytest.mark.parametrize("name", ["random", "most-idle"])
def test_where_nothing_can_be_bought_the_drawn_take_what_there_is(name: str) -> None:
    cluster = Cluster(policy_under_test(name), rollout=1, train=1)
    for n in range(5):
        assert cluster.arrives(job(f"j{n}", 100, 100, 2.0)) is not None
    assert cluster.arrives(job("one too many", 100, 100, 2.0)) is None


@pytest.mark.parametrize("name", ["random", "most-idle"])
def test_where_one_node_of_a_group_has_no_ram_left_another_is_drawn(name: str) -> None:
    """There is one training node only, and each rollout node has the RAM for one of the two."""
    states = (StateSpec("rollout", ram_mb=600_000),)
    for seed in range(5):
        cluster = Cluster(policy_under_test(name), rollout=2, train=1, ram_gb=1000, seed=seed)
        both = [replace(one, spec=replace(one.spec, states=states)) for one in (job("a", 10, 100), job("b", 10, 100))]
        assert [cluster.arrives(one).admission for one in both] == ["isolated", "scaling"]


def test_the_coin_is_one_in_as_many_as_there_are_groups_and_one() -> None:
    """After the first job: a new group for half of the seeds, and inside the group a new node for half of the rest."""
    admissions = []
    for seed in range(400):
        cluster = Cluster(policy_under_test("random"), rollout=3, train=3, seed=seed)
        cluster.arrives(job("a", 100, 100))
        admissions.append(cluster.arrives(job("b", 100, 100)).admission)
    counted = {name: admissions.count(name) for name in ("isolated", "packing", "scaling")}
    assert 160 <= counted["isolated"] <= 240
    assert 65 <= counted["packing"] <= 135
    assert 65 <= counted["scaling"] <= 135


def test_most_idle_takes_the_idlest_node_until_it_is_busy_four_fifths_of_the_time() -> None:
    """L 1000/200 keeps its rollout node busy 5/6 of its 1200 ms: a second job there gets a node of its own."""
    for rollout, train, admission in ((1000, 200, "scaling"), (900, 300, "packing")):  # 5/6 and 3/4 of the time
        seen = set()
        for seed in range(10):
            cluster = Cluster(policy_under_test("most-idle"), seed=seed)
            cluster.arrives(job("L", rollout, train))
            seen.add(cluster.arrives(job("S", 10, 10)).admission)
        assert seen == {"isolated", admission}


def test_most_idle_takes_the_group_that_works_least() -> None:
    """A lone job of 1000/1000 leaves each of its nodes idle half of the time; a pair of them leaves none idle."""
    groups = set()
    for seed in range(40):
        cluster = Cluster(policy_under_test("most-idle"), seed=seed)
        for name in "abc":
            cluster.arrives(job(name, 1000, 1000))
        state = cluster.core.state
        idle = {group.id: 3 - len(group.jobs) for group in state.groups.values()}
        newcomer = cluster.arrives(job("d", 10, 10))
        if newcomer.admission != "isolated" and len(set(idle.values())) > 1:
            groups.add(idle[newcomer.group])
    assert groups == {2}  # of a lone job and a pair always the lone one


# ---- all of them -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_every_contender_places_what_comes_and_gives_everybody_a_pace(name: str) -> None:
    under_test = policy_under_test(name)
    cluster = Cluster(under_test)
    for n in range(12):
        cluster.arrives(job(f"j{n}", 1000 + 130 * n, 900 - 40 * n, 1 + n / 10, width=1 + n % 2, colocated=(1500, 600)))
    for n in (3, 7):
        cluster.ends(f"j{n}")
    state = cluster.core.state
    paces = [pace for group in state.groups for pace in cluster.paces(group).items()]
    assert sorted(who for who, _ in paces) == sorted(f"j{n}" for n in range(12) if n not in (3, 7))
    assert all(type(pace) is int and pace > 0 for _, pace in paces)
    for group in state.groups.values():
        if name in ("rollmux", "solo", "colocated", "gavel"):
            for who, pace in under_test.paces(cluster.policy, state, group.id).items():
                spec = state.jobs[who].spec
                assert pace <= spec.slo * sum(phase.planned_ms for phase in spec.phases)
