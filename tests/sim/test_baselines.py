"""What RollMux is measured against does what it is said to do, no better and no worse.

Figures are worked out by hand from research 1.15, 1.18 and 6.12. The makespan has a witness of its own below, which
goes through every event and leaps over none.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.model import Dispatch, JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.wheel import Leg, period_ms, work_conserving_ms
from rollmuxd.sim.baselines import CONTENDERS, makespan_ms
from rollmuxd.sim.contender import Contender
from rollmuxd.sim.workload import Alone, Impossible, SimJob, Starts

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
    """One contender's scheduler over many nodes of 8 GPUs, each a host of its own."""

    def __init__(self, contender: Contender, rollout: int = 40, train: int = 40, *, ram_gb: int = 2000, seed: int = 0):
        self.contender, self.policy = contender, contender.policy(seed)
        self.core = Scheduler(Config(), self.policy)
        names = [(f"r{n}", "rollout", H20) for n in range(rollout)] + [(f"t{n}", "train", H800) for n in range(train)]
        hosts = tuple(i.HostSpec(host, "mock", 1000 * ram_gb) for host, *_ in names)
        nodes = tuple(
            i.NodeSpec(f"{host}/gpu0-7", host, tuple(f"{host}/gpu{n}" for n in range(8)), (pool,), "", 0, price)
            for host, pool, price in names
        )
        self.core.handle(i.Start(hosts, nodes), 0)
        for node in nodes:
            self.core.handle(i.HostSeen(node.host, tuple(i.GpuSight(gpu, 0) for gpu in node.gpus)), 0)

    def arrives(self, one: SimJob) -> f.JobPlaced | None:
        """The job comes, as the contender registers it; how it was placed, or None: it waits."""
        decision = self.core.handle(i.RegisterJob("team", "ann", self.contender.adapt(one).spec), 0)
        return next((fact for fact in decision.facts if isinstance(fact, f.JobPlaced)), None)

    def ends(self, name: str) -> None:
        self.core.handle(i.EndJob(self.core.state.names[f"team/{name}"], "ann"), 0)

    def paces(self, group: str) -> dict[str, int]:
        """By the jobs' names."""
        state = self.core.state
        paces = self.contender.paces(self.policy, state, group)
        return {state.jobs[name].spec.name: pace for name, pace in paces.items()}

    def cost(self) -> float:
        """Dollars per hour of all nodes in groups."""
        return sum(8 * node.price_per_gpu_hour for node in self.core.state.nodes.values() if node.group)


# ---- rollmux-artifact ----------------------------------------------------------------------------------------------


def makespan_without_leaps(tracks: tuple[tuple[tuple[int, int, int], ...], ...], rounds: int) -> int:
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
def test_leaping_over_what_repeats_changes_no_makespan(
    tracks: tuple[tuple[tuple[int, int, int], ...], ...], rounds: int
) -> None:
    assert makespan_ms(tracks, rounds) == makespan_without_leaps(tracks, rounds)


def test_a_group_takes_a_hundredth_of_a_hundred_rounds() -> None:
    """Two equal jobs on one node and one pool: 200 phases back to back, and the last one's training after them."""
    both = ((2, 100, 0), (1, 100, 0))
    assert makespan_ms((both, both), 100) == 200 * 100 + 100


def test_the_artifact_turns_down_what_takes_as_much_as_the_bound_allows() -> None:
    """Two of 50/149 take 2 x 149 + 50 / 100 = 298.5 by its count: just 1.5 x 199, and the published code says >=."""
    for slo, admission in ((1.5, "isolated"), (1.501, "packing")):
        cluster = Cluster(CONTENDERS["rollmux-artifact"])
        cluster.arrives(job("a", 50_000, 149_000, slo))
        assert cluster.arrives(job("b", 50_000, 149_000, slo)).admission == admission
    ours = Cluster(CONTENDERS["rollmux-unpruned"])
    ours.arrives(job("a", 50_000, 149_000, 1.5))
    assert ours.arrives(job("b", 50_000, 149_000, 1.5)).admission == "packing"  # the wheel takes 298, which is less


def test_the_artifact_prunes_no_saturated_group() -> None:
    """After X and Y of research 6.13 a third fits beside them, on a rollout node of its own, if nobody is tight."""
    cluster = Cluster(CONTENDERS["rollmux-artifact"])
    placed = [cluster.arrives(job(name, 133_800, 112_800, 1.45)) for name in "XYZ"]
    assert [one.admission for one in placed] == ["isolated", "packing", "scaling"]
    pruned = Cluster(CONTENDERS["rollmux"])
    placed = [pruned.arrives(job(name, 133_800, 112_800, 1.45)) for name in "XYZ"]
    assert [one.admission for one in placed] == ["isolated", "packing", "isolated"]


def test_the_artifact_lets_whoever_asked_first_go_first() -> None:
    cluster = Cluster(CONTENDERS["rollmux-artifact"])
    assert cluster.arrives(job("a", 100, 100, 1.5)).dispatch is Dispatch.READY


def test_a_short_job_beside_a_long_one_goes_at_its_own_pace_unless_the_wheel_holds_it() -> None:
    """Research 6.12 row 3: L 1000/500 and S 50/50 on rollout nodes of their own; the wheel holds S to L's 1500 ms."""
    legs = [Leg("L", ("r0",), 1000), Leg("L", ("t",), 500), Leg("S", ("r1",), 50), Leg("S", ("t",), 50)]
    assert period_ms(legs) == 1500
    paces = work_conserving_ms(legs)
    assert paces["L"] == pytest.approx(1500, rel=0.05)
    assert paces["S"] == pytest.approx(150, rel=0.05)


def test_in_the_artifact_everybody_has_a_pace_of_his_own() -> None:
    cluster = Cluster(CONTENDERS["rollmux-artifact"])
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
    cluster = Cluster(CONTENDERS["solo"])
    first = cluster.arrives(job("a", 100, 100, 2.0, width=2, footprint=2))
    second = cluster.arrives(job("b", 10, 10, 2.0))
    assert [len(first.pins[pool]) for pool in ("rollout", "train")] == [2, 2]
    assert (first.admission, second.admission) == ("isolated", "isolated")
    assert cluster.cost() == pytest.approx(3 * 8 * (H20 + H800))
    assert cluster.paces(second.group) == {"b": 20}


def test_a_job_without_an_slo_is_alone_too() -> None:
    cluster = Cluster(CONTENDERS["solo"], rollout=1, train=1)
    assert cluster.arrives(job("a", 100, 100)).admission == "isolated"
    assert cluster.arrives(job("b", 100, 100)) is None  # it would rather wait than share


def test_a_colocated_job_has_both_phases_on_its_training_nodes() -> None:
    cluster = Cluster(CONTENDERS["colocated"])
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
        starts={"rollout": Starts(25_000, 800), "train": Starts(40_000, 1900)},
        tail_from=(0.8, 0.8),
    )
    there = CONTENDERS["colocated"].adapt(one)
    assert there.work == one.work == round(10_000_000 / 1500)
    assert (there.planned, there.solo_ms) == ((1500, 400), 1900)
    assert there.series == ((1500, 400), (750, 800))
    assert there.starts == {"train": Starts(65_000, 2700)}
    assert there.tail_from == ()


def test_a_job_of_which_no_colocated_times_are_known_is_named() -> None:
    with pytest.raises(Impossible, match=r"job a \(made\) cannot run co-located"):
        CONTENDERS["colocated"].adapt(job("a", 1, 1))
