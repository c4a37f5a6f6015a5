"""Times that drift: who is planned anew, how often at most, and what becomes of the promises beside him.

Jobs go round by themselves in a cluster whose drivers take no time; what their phases take is said from outside. What
a plan gives is found by playing each group's schedule with the times that plans reckon with, and shares no code with
the planner.
"""

import random
from collections.abc import Iterator, Sequence
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simkit import invariants

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.apply import apply
from rollmuxd.core.config import Config, DriverTraits, Moves, PlanWith
from rollmuxd.core.estimates import by_work_ms, has_left, phase_ms, solo_ms
from rollmuxd.core.model import Dispatch, OrderKind
from rollmuxd.core.policy import Move, Policy
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import IfUnmet, JobSpec, Movable, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State
from rollmuxd.explain.explainer import Explainer
from rollmuxd.explain.forecast import likely_ms
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.policies.thrift.policy import Thrift

TURNS = 30
MINUTE = 60_000


class Staying(Thrift):
    """No job is moved because that would be cheaper."""

    def regroup(self, state: State, now: int) -> Iterator[Move | None]:
        """Nothing is found."""
        return iter(())


class Cluster:
    """Rollout and train nodes of one GPU each, and jobs on them whose processes do as they are told."""

    def __init__(self, policy: Policy, nodes: tuple[int, int] = (2, 2), **config: object) -> None:
        settings = {"min_samples": 3, "drift_window": 6, "replan_every_ms": MINUTE, "grace_ms": 1_000, **config}
        self.core = Scheduler(Config(lease_ms=1 << 50, moves=Moves.ON, move_interval_ms=0, **settings), policy)
        self.now, self.asked = 0, 0
        self.facts: list[f.Fact] = []
        self.replayed = State()
        hosts, made = [], []
        for pool, count, price in (("rollout", nodes[0], 1.0), ("train", nodes[1], 3.0)):
            for number in range(count):
                name = f"{pool[0]}{number}"
                hosts.append(i.HostSpec(name, "mock", 1_000_000))
                made.append(i.NodeSpec(name, name, (f"{name}/gpu0",), (pool,), price_per_gpu_hour=price))
        self.hand(i.Start(tuple(hosts), tuple(made)))
        for node in made:
            self.hand(i.HostObserved(node.host, tuple(i.GpuObservation(gpu, 0) for gpu in node.gpus)))

    def hand(self, given: i.Input) -> object:
        """Hand it over, and have every order done at once."""
        decision = self.core.handle(given, self.now)
        for fact in decision.facts:
            self.facts.append(fact)
            apply(self.replayed, f.decode(f.encode(fact)))
        invariants.check(self.core.state)
        for effect in decision.effects:
            if isinstance(effect, e.Perform) and effect.order in self.core.state.orders:
                order = self.core.state.orders[effect.order]
                clean = tuple(i.GpuObservation(gpu, 0) for gpu in self.core.state.nodes[order.node].gpus)
                self.hand(i.OrderDone(effect.order, () if order.kind is OrderKind.LOAD else clean))
        return decision.answer

    def comes(self, spec: JobSpec) -> str:
        name = self.hand(i.RegisterJob("team", "ann", spec)).job
        self.hand(i.OpenSession(name, pid=1, host="box"))
        return name

    def passes(self, ms: int) -> None:
        """Time; what is due meanwhile is done when it is due."""
        until = self.now + ms
        while (due := self.core.deadline()) is not None and due <= until:
            self.now = max(self.now, due)
            self.hand(i.Tick())
        self.now = until

    def goes_round(self, name: str, *took_ms: int, work: float = 0.0) -> None:
        """One iteration: each phase as soon as it is granted. Others are asked nothing meanwhile, and passed over."""
        job = self.core.state.jobs[name]
        for phase, took in zip(job.spec.phases, took_ms, strict=True):
            self.asked += 1
            slot = self.hand(i.RequestSlot(name, job.session, phase.name, str(self.asked))).slot
            for _ in range(100):
                if self.core.state.slots[slot].fence is not None:
                    break
                self.passes(1_000)
            self.passes(took)
            measured = {"work": work} if work and phase is job.spec.phases[0] else {}
            self.hand(i.ReleaseSlot(slot, self.core.state.slots[slot].fence, measured=measured))

    def told(self, kind: type[f.Fact]) -> list[f.Fact]:
        return [fact for fact in self.facts if isinstance(fact, kind)]

    def reckoned(self, name: str) -> tuple[int | None, ...]:
        job = self.core.state.jobs[name]
        return tuple(phase_ms(job, phase) for phase in job.spec.phases)

    def paces(self, group: str) -> Iterator[tuple[str, float, float]]:
        """Each member's mean iteration when the schedule is played on, and what it may take."""
        state = self.core.state
        free: dict[str, int] = {}
        ends: dict[str, list[int]] = {}
        schedule = state.groups[group].schedule
        for _ in range(TURNS):
            for turn in schedule:
                job = state.jobs[turn.job]
                phase = next(phase for phase in job.spec.phases if phase.name == turn.phase)
                claims = (turn.job, *state.phase_nodes(job, phase.name, group))
                end = max(free.get(claim, 0) for claim in claims) + (phase_ms(job, phase) or 0)
                free.update(dict.fromkeys(claims, end))
            for name in dict.fromkeys(turn.job for turn in schedule):
                ends.setdefault(name, []).append(free[name])
        for name, at in ends.items():
            job = state.jobs[name]
            rounds = sum(turn.job == name and turn.phase == job.spec.phases[0].name for turn in schedule)
            solo = sum(phase_ms(job, phase) or 0 for phase in job.spec.phases)
            yield name, (at[-1] - at[0]) / (rounds * (TURNS - 1)), (job.spec.slo or 1e9) * solo


def spec(
    name: str, rollout_s: float | None, train_s: float | None, slo: float | None, movable: Movable = Movable.NO
) -> JobSpec:
    return JobSpec(
        name,
        phases=(
            PhaseSpec("rollout", ("rollout",), None if rollout_s is None else round(rollout_s * 1000)),
            PhaseSpec("train", ("train",), None if train_s is None else round(train_s * 1000)),
        ),
        wants=(Want("rollout"), Want("train")),
        states=(StateSpec("rollout"), StateSpec("train")),
        slo=slo,
        movable=movable,
        if_unmet=IfUnmet.BEST_EFFORT,
    )


# ---- when a mean has left what was planned ---------------------------------------------------------------------------


def test_a_mean_that_is_off_by_less_than_the_share_has_not_left() -> None:
    assert not has_left([1_090] * 20, 1_000, 0.1)
    assert has_left([1_110] * 20, 1_000, 0.1)
    assert has_left([890] * 20, 1_000, 0.1)


def test_one_stall_among_twenty_steps_is_no_drift() -> None:
    assert not has_left([*[1_000] * 19, 14_500], 1_000, 0.1)


def test_noise_of_a_third_is_hardly_ever_taken_for_drift_and_growth_by_half_always_is() -> None:
    draw = random.Random("drift")

    def steps(mean: float) -> list[int]:
        return [max(1, round(draw.gauss(mean, 0.34 * mean))) for _ in range(20)]

    assert sum(has_left(steps(1_000), 1_000, 0.1) for _ in range(1_000)) < 80
    assert sum(has_left(steps(1_500), 1_000, 0.1) for _ in range(1_000)) > 900


# ---- who is planned anew ---------------------------------------------------------------------------------------------


def test_who_takes_as_long_as_planned_is_never_planned_anew() -> None:
    cluster = Cluster(RollMux())
    name = cluster.comes(spec("a", 10, 5, 2.0))
    for _ in range(12):
        cluster.goes_round(name, 10_400, 4_800)
    assert not cluster.told(f.TimesDrifted)
    assert cluster.reckoned(name) == (10_000, 5_000)


def test_growth_by_half_is_reckoned_with_after_a_few_iterations_and_the_mean_is_of_those_since() -> None:
    cluster = Cluster(RollMux())
    name = cluster.comes(spec("a", 10, 5, 2.0))
    for _ in range(6):
        cluster.goes_round(name, 10_000, 5_000)
    for _ in range(8):
        cluster.goes_round(name, 15_000, 7_500)
    cluster.goes_round(name, 15_000, 7_500)
    assert cluster.reckoned(name) == (15_000, 7_500)
    first, *_, last = cluster.told(f.TimesDrifted)
    assert first.was == {"rollout": 10_000, "train": 5_000}
    assert last.samples["rollout"] >= 3


def test_plans_are_not_made_anew_at_each_step_of_a_growth_but_of_what_was_seen_since() -> None:
    cluster = Cluster(RollMux(), replan_every_ms=0)
    name = cluster.comes(spec("a", 10, 5, 2.0))
    when = []
    for iteration in range(18):
        cluster.goes_round(name, round(10_000 * 1.2**iteration), 5_000)
        when += [iteration] * (len(cluster.told(f.TimesDrifted)) - len(when))
    assert len(when) >= 4
    assert min(after - before for before, after in pairwise(when)) >= 3


def test_phases_that_take_no_time_at_all_are_planned_with_a_millisecond_once_and_for_all() -> None:
    cluster = Cluster(Staying(steady=True, objective="cost"), replan_every_ms=0)
    name, other = cluster.comes(spec("a", 10, 5, 2.0)), cluster.comes(spec("b", None, None, 2.0))
    for _ in range(10):
        cluster.goes_round(name, 0, 0)
        cluster.goes_round(other, 0, 0)
    assert cluster.reckoned(name) == (1, 1)
    assert cluster.reckoned(other) == (1, 1)
    assert [fact.job for fact in cluster.told(f.TimesDrifted)] == [name, other]
    cluster.comes(spec("c", 10, 5, 2.0))


def test_drift_of_nothing_is_not_looked_for_where_it_is_turned_off() -> None:
    cluster = Cluster(RollMux(), drift=0.0)
    name = cluster.comes(spec("a", 10, 5, 2.0))
    for _ in range(10):
        cluster.goes_round(name, 30_000, 5_000)
    assert not cluster.told(f.TimesDrifted)


def test_of_phases_that_nobody_stated_plans_reckon_with_the_first_few_until_those_are_left() -> None:
    cluster = Cluster(RollMux())
    name = cluster.comes(spec("a", None, None, 2.0))
    for _ in range(4):
        cluster.goes_round(name, 10_000, 5_000)
    first = cluster.told(f.TimesDrifted)[0]
    assert (first.times, first.was) == ({"rollout": 10_000, "train": 5_000}, {})
    assert cluster.told(f.JobPromised)
    cluster.goes_round(name, 10_500, 5_000)
    cluster.goes_round(name, 10_500, 5_000)
    assert cluster.reckoned(name) == (10_000, 5_000)  # what plans were made with is what they are asked about
    for _ in range(6):
        cluster.goes_round(name, 20_000, 5_000)
    assert cluster.reckoned(name)[0] > 14_000


def test_by_a_quantile_plans_reckon_with_long_times_and_promises_with_the_mean() -> None:
    """Of twenty rollouts two take 14 s and one 20 s, as was stated: the mean is 10.9 s."""
    found = {}
    for plan in PlanWith:
        cluster = Cluster(RollMux(), plan=plan, min_samples=20, drift_window=20)
        name = cluster.comes(spec("a", 20, 5, 2.0))
        for number in range(21):
            cluster.goes_round(name, {4: 14_000, 9: 20_000, 14: 14_000}.get(number, 10_000), 5_000)
        found[plan] = cluster.reckoned(name)[0], solo_ms(cluster.core.state.jobs[name])
    assert found == {"mean": (10_900, 15_900), "p90": (14_000, 15_900), "worst": (20_000, 15_900)}


def test_of_phases_that_nobody_stated_plans_reckon_with_the_worst_of_the_first_few_before_it_is_promised() -> None:
    cluster = Cluster(RollMux(), plan=PlanWith.WORST)
    name = cluster.comes(spec("a", None, None, 2.0))
    for rollout in (10_000, 16_000, 10_000, 10_000):
        cluster.goes_round(name, rollout, 5_000)
    assert cluster.reckoned(name) == (16_000, 5_000)
    assert solo_ms(cluster.core.state.jobs[name]) == 17_000
    assert [type(fact) for fact in cluster.facts if isinstance(fact, f.TimesDrifted | f.JobPromised)] == [
        f.TimesDrifted,
        f.JobPromised,
    ]


def test_a_new_run_keeps_what_was_measured_unless_it_states_another_time() -> None:
    cluster = Cluster(RollMux())
    name = cluster.comes(spec("a", 10, 5, 2.0))
    for _ in range(5):
        cluster.goes_round(name, 20_000, 10_000)
    cluster.hand(i.EndJob(name, "ann"))
    assert cluster.comes(spec("a", 10, 8, 2.0)) == name
    assert cluster.reckoned(name) == (20_000, 8_000)


@settings(max_examples=60, deadline=None)
@given(
    series=st.lists(st.tuples(st.integers(1_000, 90_000), st.integers(1_000, 90_000)), min_size=4, max_size=40),
    every_ms=st.sampled_from([0, MINUTE, 10 * MINUTE]),
    dispatch=st.sampled_from([Dispatch.SCHEDULE, Dispatch.CREDIT]),
)
def test_whatever_phases_take_plans_change_for_a_reason_and_only_so_often(
    series: Sequence[tuple[int, int]], every_ms: int, dispatch: Dispatch
) -> None:
    policy = RollMux(promise="measured" if dispatch is Dispatch.CREDIT else "certified")
    cluster = Cluster(policy, replan_every_ms=every_ms)
    name, other = cluster.comes(spec("a", 10, 5, 4.0)), cluster.comes(spec("b", 10, 5, 2.0))
    for took in series:
        cluster.goes_round(name, *took)
    drifted = cluster.told(f.TimesDrifted)
    assert all(fact.job == name for fact in drifted)
    for before, after in pairwise(drifted):
        assert after.at - before.at >= every_ms
        assert after.was == before.times
    for fact in drifted:
        assert any(abs(took - fact.was[phase]) > 0.1 * fact.was[phase] for phase, took in fact.times.items())
        assert min(fact.samples.values()) >= 3
    assert len(drifted) <= len(series) // 3
    state = cluster.core.state
    assert msgspec.json.encode(cluster.replayed) == msgspec.json.encode(state)
    # who shares with whom is at risk iff the schedule, played with what is known now, has no room for its promise
    for group in state.groups.values():
        if len(group.jobs) > 1:
            for job, pace, limit in cluster.paces(group.id):
                assert (job in state.at_risk) == (state.jobs[job].promised and pace > limit + 1)
    assert name not in state.at_risk or other in state.jobs


# ---- by the work that a job reports ----------------------------------------------------------------------------------


def asks_for_train(cluster: Cluster, name: str, work: float) -> PhaseSpec:
    """Its rollout has reported so much; now it asks for its training."""
    job = cluster.core.state.jobs[name]
    for number, phase in enumerate(job.spec.phases):
        slot = cluster.hand(i.RequestSlot(name, job.session, phase.name, f"last {number}")).slot
        if number == 0:
            fence = cluster.core.state.slots[slot].fence
            cluster.hand(i.ReleaseSlot(slot, fence, measured={"work": work}))
    return job.spec.phases[1]


def test_training_is_foreseen_by_the_tokens_that_the_rollout_has_reported() -> None:
    cluster = Cluster(RollMux(), drift=0.0)
    name = cluster.comes(spec("a", 10, 5, None))
    for tokens in (1_000, 4_000, 2_000, 3_000, 1_500, 6_000, 2_500, 5_000, 3_500):
        cluster.goes_round(name, 10_000, 3 * tokens + tokens % 7, work=tokens)
    train = asks_for_train(cluster, name, 20_000)
    assert by_work_ms(cluster.core.state.jobs[name], train) == pytest.approx(60_000, rel=0.01)
    assert likely_ms(cluster.core.state.jobs[name], train) == pytest.approx(60_000, rel=0.01)
    assert "For the work that it has reported, 20000" in " ".join(
        Explainer(cluster.core.context).explain(name, cluster.now).sentences
    )
    assert msgspec.json.encode(cluster.replayed) == msgspec.json.encode(cluster.core.state)


def test_work_that_says_nothing_about_the_time_is_left_alone() -> None:
    cluster = Cluster(RollMux(), drift=0.0)
    name = cluster.comes(spec("a", 10, 5, None))
    draw = random.Random("work")
    for _ in range(12):
        cluster.goes_round(name, 10_000, draw.randint(4_000, 9_000), work=draw.randint(1_000, 9_000))
    train = asks_for_train(cluster, name, 20_000)
    assert by_work_ms(cluster.core.state.jobs[name], train) is None
    assert 4_000 <= likely_ms(cluster.core.state.jobs[name], train) <= 9_000


@pytest.mark.parametrize("work", [0.0, -5.0])
def test_nonsense_that_is_reported_as_work_is_none(work: float) -> None:
    cluster = Cluster(RollMux())
    name = cluster.comes(spec("a", 10, 5, None))
    asks_for_train(cluster, name, work)
    assert cluster.core.state.jobs[name].work == 0.0


# ---- another schedule
# ---------------------------------------------------------------------------------------------------


def test_where_the_schedule_has_no_room_any_more_another_one_serves_the_same_members_on_the_same_nodes() -> None:
    cluster = Cluster(Staying(steady=True, objective="cost"))
    long, short = cluster.comes(spec("long", 90, 10, 1.3)), cluster.comes(spec("short", 20, 25, 2.0))
    group = cluster.core.state.jobs[long].group
    assert group == cluster.core.state.jobs[short].group
    before = [(turn.job, turn.phase) for turn in cluster.core.state.groups[group].schedule]
    pins = {name: job.pins for name, job in cluster.core.state.jobs.items()}
    for _ in range(4):
        cluster.goes_round(short, 8_000, 10_000)
    replanned = cluster.told(f.GroupReplanned)[-1]
    assert replanned.schedule
    after = [(turn.job, turn.phase) for turn in cluster.core.state.groups[group].schedule]
    assert after != before
    assert set(after) == set(before)
    assert {name: job.pins for name, job in cluster.core.state.jobs.items()} == pins
    assert not cluster.core.state.at_risk
    assert all(pace <= limit + 1 for _, pace, limit in cluster.paces(group))
    cluster.goes_round(long, 90_000, 10_000)
    cluster.goes_round(short, 8_000, 10_000)


def test_the_schedule_stays_where_it_has_room_for_the_new_times_though_one_goes_round_it_often() -> None:
    cluster = Cluster(Staying(steady=True, objective="cost"))
    long, short = cluster.comes(spec("long", 90, 10, 1.3)), cluster.comes(spec("short", 20, 25, 2.0))
    schedule = [(turn.job, turn.phase) for turn in cluster.core.state.groups["g1"].schedule]
    assert schedule.count((short, "rollout")) > schedule.count((long, "rollout"))
    for _ in range(4):
        cluster.goes_round(short, 20_000, 29_000)
    assert [fact.schedule for fact in cluster.told(f.GroupReplanned)] == [()]
    assert [(turn.job, turn.phase) for turn in cluster.core.state.groups["g1"].schedule] == schedule


@pytest.mark.parametrize("seed", range(25))
def test_whatever_drifts_in_its_groups_a_promise_is_kept_by_the_plan_or_said_to_be_at_risk(seed: int) -> None:
    draw = random.Random(f"drift {seed}")
    cluster = Cluster(Staying(steady=True, objective="cost"), (4, 2))
    jobs = [
        cluster.comes(
            spec(
                f"j{number}",
                draw.uniform(2, 60),
                draw.uniform(2, 30),
                draw.uniform(1.2, 4),
                draw.choice((Movable.NO, Movable.WARM)),
            )
        )
        for number in range(draw.randint(2, 5))
    ]
    for _ in range(6):
        name = draw.choice(jobs)
        if not cluster.core.state.jobs[name].pins:
            continue
        slower = draw.choice((0.5, 1.5, 2.0))
        times = [max(1, round((took or 1_000) * slower)) for took in cluster.reckoned(name)]
        for _ in range(4):
            cluster.goes_round(name, *times)
    state = cluster.core.state
    assert cluster.told(f.TimesDrifted)
    for group in state.groups.values():
        if len(group.jobs) > 1 and not group.coming:
            for name, pace, limit in cluster.paces(group.id):
                assert (name in state.at_risk) == (pace > limit + 1)
    assert msgspec.json.encode(cluster.replayed) == msgspec.json.encode(state)


# ---- jobs that were placed before their times were known ---------------------------------------------------------


@pytest.mark.parametrize(("movable", "moves"), [(Movable.WARM, 1), (Movable.NO, 0)])
def test_a_measured_job_moves_to_where_the_promise_that_it_asked_for_holds(movable: Movable, moves: int) -> None:
    """Two that roll out share a pair of nodes, and one that trains has the other: each pair has one of both then."""
    drivers = {"channel": DriverTraits(copies=True)}
    cluster = Cluster(
        Thrift(promise="measured", rounds=1, warm_move_s=1), min_samples=8, move_cost_ms=1_000, drivers=drivers
    )
    made = [cluster.comes(spec(name, None, None, slo, movable)) for name, slo in (("a", 1.5), ("b", None), ("c", 1.5))]
    jobs = [cluster.core.state.jobs[name] for name in made]
    assert jobs[0].pins == jobs[2].pins
    for _ in range(6):
        for name, took in zip(made, ((10_000, 1_000), (1_000, 5_000), (10_000, 1_000)), strict=True):
            cluster.goes_round(name, *took)
        cluster.passes(1_000)
    assert len(cluster.told(f.MoveEnded)) == moves
    assert (jobs[0].pins == jobs[1].pins, jobs[0].promised) == (bool(moves), bool(moves))
    assert jobs[2].promised  # the other yields to it in any case
    assert bool(Explainer(cluster.core.context).unmet(made[0])) is not bool(moves)
