"""A world of two jobs, second by second: every time here was worked out by hand."""

from itertools import pairwise

import pytest
from simkit import checked
from simkit.chaos_policy import UNPRUNED

from rollmuxd.core import facts as f
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.spec import JobSpec, Park, PhaseSpec, StateSpec, Want
from rollmuxd.sim.fluid import Fluid
from rollmuxd.sim.workload import Impossible, Pool, SimJob, Workload
from rollmuxd.sim.world import World

HOUR = 3_600_000
POOLS = (Pool("rollout", "H20", 1.85), Pool("train", "H800", 5.28))


def job(
    name, rollout=100, train=50, *, slo=None, at=0, lasts=1000, iterations=0, load=0, park=0, cold=0, init=0, tail=(),
    gap=0, series=None, width=1, when=Park.LAZY,
):  # fmt: skip
    """Times in seconds. ``series``: what the iterations really take; ``init``: engines are built in a phase of it."""
    ms = [round(part * 1000) for part in (rollout, train, gap)]
    phases = (
        PhaseSpec("rollout", ("rollout",), planned_ms=ms[0], min_gpus=1 if tail else 0),
        PhaseSpec("train", ("train",), planned_ms=ms[1], gap_ms=ms[2]),
    )
    pools = ("rollout", "train")
    states = tuple(StateSpec(p, ram_mb=100_000, driver="sim", load_ms=load * 1000, park_ms=park * 1000) for p in pools)
    spec = JobSpec(
        name, phases, (Want("rollout", nodes=width), Want("train")), states=states, slo=slo, park=when,
        side=(PhaseSpec("init", pools, planned_ms=init * 1000),) if init else (),
    )  # fmt: skip
    took = tuple((round(r * 1000), round(t * 1000)) for r, t in series or ((rollout, train),))
    return SimJob(
        name, "made", at * 1000, lasts * 1000, spec, took, {"rollout": width, "train": 1}, tail_from=tail,
        cold_ms=dict.fromkeys(pools, cold * 1000) if cold else {}, iterations=iterations,
    )  # fmt: skip


class Watched:
    """A run, and when each phase of each job began and ended, in seconds."""

    def __init__(self, *jobs, nodes=None, accounting="work", rollouts=None):
        pools = (
            Pool("rollout", "H20", 1.85, nodes=rollouts or nodes),
            Pool("train", "H800", 5.28, nodes=nodes),
        )
        self.facts = []
        self.outcome = checked.run(
            Workload("made", jobs, pools),
            UNPRUNED,
            seed=0,
            accounting=accounting,
            hear=self.facts.append,
        )
        self.jobs = {made.name: made for made in self.outcome.jobs}
        self.pools = {pool.name: pool for pool in self.outcome.pools}
        names = {fact.job: fact.spec.name for fact in self.facts if isinstance(fact, f.JobRegistered)}
        self.asked = {q.slot: (names[q.job], q.phase) for q in self.facts if isinstance(q, f.SlotQueued)}

    def _when(self, kind, name, phase):
        found = [fact for fact in self.facts if isinstance(fact, kind)]
        return [fact.at / 1000 for fact in found if self.asked[fact.slot] == (name, phase)]

    def begins(self, name, phase):
        return self._when(f.SlotGranted, name, phase)

    def ends(self, name, phase):
        return self._when(f.SlotReleased, name, phase)


def held(watched, name):
    """The GPUs that each of the job's slots held, as it came by them and as it gave some back."""
    kinds = (f.SlotClaimed, f.SlotResized)
    found = [
        fact for fact in watched.facts if isinstance(fact, kinds) and watched.asked[fact.slot] == (name, "rollout")
    ]
    return [len(fact.gpus) for fact in found]


# ---- the schedule
# -------------------------------------------------------------------------------------------------------


def test_the_papers_pair_has_the_papers_period():
    """Research 6.13: X and Y, both 7B_8k; the rollout node is never idle, so an iteration takes two rollouts."""
    pair = Watched(job("X", 133.8, 112.8, slo=1.5, iterations=5), job("Y", 133.8, 112.8, slo=1.2, iterations=5))

    assert pair.begins("X", "rollout")[:3] == [0, 267.6, 535.2]
    assert pair.begins("Y", "rollout")[:3] == [133.8, 401.4, 669.0]
    assert pair.ends("X", "train")[:3] == [246.6, 514.2, 781.8]
    assert pair.ends("Y", "train")[:3] == [380.4, 648.0, 915.6]
    assert {round(after - before, 3) for before, after in pairwise(pair.ends("Y", "train"))} == {267.6}


def test_what_was_planned_is_what_is_measured_after_the_first_turn():
    pair = Watched(job("X", 133.8, 112.8, slo=1.5, iterations=30), job("Y", 133.8, 112.8, slo=1.2, iterations=30))
    placed = [fact.period_ms for fact in pair.facts if isinstance(fact, f.JobPlaced)]

    assert placed == [246_600, 267_600]
    first, solo = 133.8, 246.6  # what the first iteration of Y waits beyond its turn, and an iteration alone
    assert pair.jobs["Y"].elapsed_ms / 1000 == pytest.approx(first + solo + 29 * 267.6)
    assert pair.jobs["Y"].solo_ms / 1000 == pytest.approx(30 * solo)


def test_who_shares_comes_to_the_price_of_one_and_a_third_job_does_not_fit():
    """Research 6.13: Z would take everybody's iteration to 338.4 s at least, and Y was promised 295.92 s."""
    three = Watched(job("X", 133.8, 112.8, slo=1.5), job("Y", 133.8, 112.8, slo=1.2), job("Z", 133.8, 112.8, slo=2.0))

    assert [three.jobs[name].admission for name in "XYZ"] == ["isolated", "packing", "isolated"]
    assert three.pools["rollout"].peak_gpus == three.pools["train"].peak_gpus == 16


def test_shorter_phases_than_planned_let_the_others_go_sooner():
    pair = Watched(job("X", 100, 50, slo=2.0, iterations=2, series=((60, 30), (100, 50))), job("Y", 100, 50, slo=2.0))

    assert pair.begins("X", "rollout") == [0, 160]
    assert pair.begins("Y", "rollout")[:2] == [60, 260]


def test_a_jobs_own_time_between_its_phases_is_left_to_it():
    alone = Watched(job("X", 100, 50, gap=7, iterations=2))

    assert alone.begins("X", "train") == [107, 264]
    assert alone.jobs["X"].slowdown == 1


# ---- what a switch costs ---------------------------------------------------------------------------------------------


def test_every_hand_over_takes_a_park_and_a_load():
    pair = Watched(job("X", load=5, park=3, slo=3.0, iterations=2), job("Y", load=5, park=3, slo=3.0, iterations=2))

    assert pair.begins("X", "rollout") == [5, 221]
    assert pair.begins("Y", "rollout") == [113, 329]
    assert pair.begins("X", "train") == [110, 329]
    assert pair.begins("Y", "train") == [221, 434]


def test_who_comes_next_himself_moves_nothing():
    alone = Watched(job("X", load=5, park=3, iterations=3))

    assert alone.begins("X", "rollout") == [5, 160, 310]
    assert (alone.jobs["X"].cold, alone.jobs["X"].warm, alone.jobs["X"].parks) == (2, 0, 0)


def test_the_first_load_is_cold_and_the_others_are_warm():
    pair = Watched(job("X", load=5, cold=40, slo=3.0, iterations=2), job("Y", load=5, slo=3.0, iterations=1))

    assert pair.begins("X", "rollout") == [40, 250]  # at 140 Y loads, until 245 it runs; X is back in 5 s, not in 40
    assert pair.begins("X", "train") == [180, 355]
    assert (pair.jobs["X"].cold, pair.jobs["X"].warm) == (2, 2)


def test_parking_at_release_frees_the_gpus_that_much_later():
    pair = Watched(job("X", park=10, when=Park.AT_RELEASE, iterations=1), job("Y", iterations=1), nodes=1)

    assert pair.begins("Y", "rollout") == [110]


def test_an_engine_is_built_once_in_a_phase_of_its_own_on_all_its_nodes():
    pair = Watched(job("X", init=60, load=5, iterations=1, slo=3.0), job("Y", init=60, load=5, iterations=1, slo=3.0))

    assert pair.begins("X", "init") == [0]
    assert pair.begins("X", "rollout") == [60]  # what init has built is loaded
    assert pair.begins("Y", "init") == [210]  # it needs both nodes, and has them when X's iteration is over
    assert pair.jobs["X"].solo_ms == 150_000


# ---- the tail --------------------------------------------------------------------------------------------------------


def test_the_next_job_starts_on_seven_gpus_and_has_the_eighth_when_the_tail_is_over():
    """80 % of the responses are done after 60 of 100 s; 3 s later their tail is on one GPU, until 100 s."""
    pair = Watched(job("X", iterations=1, tail=(0.6,)), job("Y", iterations=1, tail=(0.6,)), nodes=1)

    assert held(pair, "X") == [8, 1]
    assert held(pair, "Y") == [7, 8]
    assert pair.begins("Y", "rollout") == [63]
    assert pair.ends("X", "rollout") == [100]
    # 60 s of work for eight GPUs: 40 s of it by seven, and from 103 s on, when it is offered the rest, by eight
    assert pair.ends("Y", "rollout") == [pytest.approx(103 + (60 - 40 * 7 / 8) + 40, abs=0.01)]


def test_only_the_tails_own_gpu_counts_as_used():
    pair = Watched(job("X", iterations=1, tail=(0.6,)), job("Y", iterations=1, tail=(0.6,)), nodes=1)
    used = 63 + 37 / 8 + 40 * 7 / 8 + 65

    assert pair.pools["rollout"].busy_node_ms == pytest.approx(used * 1000, rel=1e-4)


def test_a_tail_that_nobody_could_use_keeps_its_gpus():
    alone = Watched(job("X", iterations=2, tail=(0.6,)))

    assert held(alone, "X") == [8, 8]
    assert alone.ends("X", "rollout") == [100, 250]


def test_who_asks_while_the_tail_runs_is_let_in_when_it_says_again_how_far_it_is():
    pair = Watched(job("X", iterations=1, tail=(0.6,)), job("Y", iterations=1, tail=(0.6,), at=72), nodes=1)

    assert pair.begins("Y", "rollout") == [78]  # asked again at 75 s, moved by 78 s


# ---- what is counted -------------------------------------------------------------------------------------------------


def test_by_the_trace_a_job_ends_when_the_trace_says():
    alone = Watched(job("X", lasts=1000), accounting="paper")

    assert alone.jobs["X"].ended_ms == 1_000_000
    assert alone.jobs["X"].iterations == 6


def test_by_its_work_a_job_ends_when_it_is_done():
    alone = Watched(job("X", lasts=1000))

    assert alone.jobs["X"].ended_ms == 7 * 150_000
    assert alone.jobs["X"].iterations == 7


def test_use_is_what_was_bought_and_ran():
    alone = Watched(job("X", iterations=4))

    assert alone.pools["rollout"].utilisation == pytest.approx(2 / 3)
    assert alone.pools["train"].utilisation == pytest.approx(1 / 3)
    assert alone.outcome.cost == pytest.approx((8 * 1.85 + 8 * 5.28) * 600 / 3600)
    assert alone.outcome.span_ms == 600_000


def test_loading_is_no_use_of_a_node_and_is_paid_for():
    alone = Watched(job("X", load=50, iterations=1))

    assert alone.pools["rollout"].busy_node_ms == 100_000
    assert alone.pools["rollout"].bought_node_ms == 250_000


def test_a_wide_rollout_uses_all_its_nodes():
    alone = Watched(job("X", width=3, iterations=2))

    assert alone.pools["rollout"].busy_node_ms == 600_000
    assert alone.pools["rollout"].peak_gpus == 24


# ---- a fixed inventory -----------------------------------------------------------------------------------------------


def test_who_does_not_fit_waits_until_somebody_leaves():
    pair = Watched(job("X", slo=1.0, iterations=3), job("Y", slo=1.0, iterations=1, at=30), nodes=1)

    assert pair.jobs["Y"].placed_ms == 450_000
    assert pair.begins("Y", "rollout") == [450]
    assert pair.jobs["Y"].slowdown == 1, "waiting for a place is nobody's slowdown"
    assert pair.outcome.mean_wait_s == 210


def test_a_job_wider_than_the_inventory_is_refused_before_the_run():
    with pytest.raises(Impossible, match="wants 2 rollout nodes at once"):
        Watched(job("X", width=2), nodes=1)


def test_a_job_that_can_never_be_placed_ends_the_run_with_the_reason():
    hopeless = job("X", rollout=10, train=10, load=20, park=20, when=Park.AT_RELEASE, slo=1.5)
    with pytest.raises(Impossible, match="even alone its iteration would take"):
        Watched(hopeless, nodes=1)


def test_a_job_that_its_policy_never_places_though_nodes_can_be_bought_is_named():
    """Promised a bound that moving its states breaks: no number of nodes helps, at either fidelity."""
    hopeless = job("X", rollout=10, train=10, load=20, park=20, when=Park.AT_RELEASE, slo=1.5)
    for how in (World, Fluid):
        with pytest.raises(Impossible, match=r"job X .made. waits: .*even alone its iteration would take"):
            how(Workload("made", (hopeless,), POOLS), UNPRUNED, 0, "work").run()


def whatever_nobody_holds(cycle, job, slot, nodes):
    """A scheduler that does not wait until GPUs were verified clean."""
    gpus = {gpu: it for node in nodes for gpu, it in cycle.state.nodes[node].gpus.items()}
    return None if any(it.holder for it in gpus.values()) else tuple(gpus)


def test_a_broken_promise_says_where_and_when(monkeypatch):
    monkeypatch.setattr("rollmuxd.core.steps.dispatch.make_room", lambda *_: True)
    monkeypatch.setattr("rollmuxd.core.steps.dispatch.claimable", whatever_nobody_holds)
    with pytest.raises(BrokenInvariant) as broken:
        Watched(job("X", iterations=2), job("Y", iterations=2), nodes=1)

    said = str(broken.value)
    assert said.startswith("a_gpu_is_given_on_only_when_verified_clean")
    assert "workload made, policy rollmux, seed 0, at 100000 ms" in said
    assert '"fact":"slot_released"' in said
