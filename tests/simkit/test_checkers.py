"""Each promise is broken once, in a forged history or by a sabotaged scheduler, and the checker names it.

A history is what a real run said and was told. Forged, one input or fact in it is another, or is missing, or comes
twice; everything before it is as it was. The last test is the other half: nothing that is true was ever called broken
(the runs of every other test of the simulator say so too).
"""

from collections.abc import Callable

import pytest
from msgspec.structs import replace

from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.causes import said
from rollmuxd.core.config import Config
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Fence
from rollmuxd.core.model import OrderKind
from rollmuxd.core.spec import JobSpec, Park, PhaseSpec, StateSpec, Want
from rollmuxd.core.steps import dispatch, lines
from rollmuxd.policies.rollmux import RollMux
from rollmuxd.sim.policies import moving, policy_under_test
from rollmuxd.sim.workload import Pool, SimJob, Workload
from rollmuxd.sim.world import LEASE_MS, Listener
from simkit import checked
from simkit.chaos_policy import UNPRUNED
from simkit.checkers import OF_NO_CONSEQUENCE, Asked, Checker
from simkit.checkers.records import Place

LEASE = LEASE_MS
#: an input, and what came of it
Heard = tuple[int, i.Input, Decision]


def job(name, *, at=0, park=Park.LAZY, tail=(), slo=None):
    phases = (
        PhaseSpec("rollout", ("rollout",), planned_ms=100_000, min_gpus=1 if tail else 0),
        PhaseSpec("train", ("train",), planned_ms=50_000),
    )
    states = tuple(StateSpec(p, ram_mb=600_000, load_ms=5_000, park_ms=3_000) for p in ("rollout", "train"))
    spec = JobSpec(name, phases, (Want("rollout"), Want("train")), states=states, park=park, slo=slo)
    return SimJob(
        name, "made", at, 500_000, spec, ((100_000, 50_000),), {"rollout": 1, "train": 1}, tail_from=tail, iterations=3
    )


BY_CREDIT = moving("by credit", "", lambda _: RollMux(promise="measured"))


def history(*jobs, policy=UNPRUNED, accounting="work") -> list[Heard]:
    class Recorder(Listener):
        def __init__(self) -> None:
            self.heard: list[Heard] = []

        def hear(self, now, given, decision, state) -> None:
            self.heard.append((now, given, decision))

    listener = Recorder()
    pools = (Pool("rollout", "H20", 1.85, nodes=1), Pool("train", "H800", 5.28, nodes=1))
    world = checked.make(checked.NONE, Workload("made", jobs, pools), policy, seed=0, accounting=accounting)
    world.listeners.append(listener)
    world.run()
    return listener.heard


@pytest.fixture(scope="module")
def pair() -> list[Heard]:
    """X and Y take turns, three iterations each."""
    return history(job("X"), job("Y"))


@pytest.fixture(scope="module")
def cut_short() -> list[Heard]:
    """They end when the trace says, in the midst of a phase."""
    return history(job("X"), job("Y", at=30_000), accounting="paper")


@pytest.fixture(scope="module")
def tails() -> list[Heard]:
    """They give GPUs back before they are done."""
    return history(job("X", tail=(0.6,)), job("Y", tail=(0.6,)))


def hear(heard: list[Heard], *, lease=LEASE, cap=5, ends=True) -> Checker:
    checker = Checker(Config(lease_ms=lease), cap=cap)
    for now, given, decision in heard:
        checker.hear(now, given, decision)
    if ends:
        checker.end(heard[-1][0])
    return checker


def caught(promise: str, heard: list[Heard], **how) -> None:
    with pytest.raises(BrokenInvariant) as broken:
        hear(heard, **how)
    assert str(broken.value).startswith(promise + ":"), str(broken.value)


# ---- forging ---------------------------------------------------------------------------------------------------------


def where(heard: list[Heard], kind: type, nth: int = 0, **like) -> tuple[int, int, f.Fact]:
    """The nth decision with such a fact, and where in it the fact is."""
    found = [
        (index, at, fact)
        for index, (_, _, decision) in enumerate(heard)
        for at, fact in enumerate(decision.facts)
        if isinstance(fact, kind) and all(getattr(fact, key) == value for key, value in like.items())
    ]
    return found[nth]


def but(heard: list[Heard], index: int, **changes) -> list[Heard]:
    """The same history with one decision, or its input, changed."""
    now, given, decision = heard[index]
    given = changes.pop("given", given)
    now = changes.pop("now", now)
    return [*heard[:index], (now, given, replace(decision, **changes)), *heard[index + 1 :]]


def facts_but(heard: list[Heard], index: int, at: int, *instead: f.Fact) -> list[Heard]:
    """With other facts, or none, in the place of one."""
    facts = heard[index][2].facts
    return but(heard, index, facts=(*facts[:at], *instead, *facts[at + 1 :]))


def changed(heard: list[Heard], kind: type, nth: int = 0, like=None, **changes) -> list[Heard]:
    index, at, fact = where(heard, kind, nth, **(like or {}))
    return facts_but(heard, index, at, replace(fact, **changes))


def before(heard: list[Heard], kind: type, make: Callable[[f.Fact], f.Fact], nth: int = 0, **like) -> list[Heard]:
    """With one more fact just before another."""
    index, at, fact = where(heard, kind, nth, **like)
    return facts_but(heard, index, at, make(fact), fact)


def after(heard: list[Heard], kind: type, make: Callable[[f.Fact], f.Fact], nth: int = 0, **like) -> list[Heard]:
    index, at, fact = where(heard, kind, nth, **like)
    return facts_but(heard, index, at, fact, make(fact))


def without(heard: list[Heard], kind: type, **like) -> list[Heard]:
    """As if such things had never been told of."""
    return [
        (now, given, replace(decision, facts=tuple(
            fact for fact in decision.facts
            if not (isinstance(fact, kind) and all(getattr(fact, key) == value for key, value in like.items()))
        )))
        for now, given, decision in heard
    ]  # fmt: skip


def said_first(heard: list[Heard], kind: type, given: i.Input, nth: int = 0, **like) -> list[Heard]:
    """Somebody says one more thing, of which nothing comes, before the decision with such a fact."""
    index, _, _ = where(heard, kind, nth, **like)
    return [*heard[:index], (heard[index][0], given, Decision((), (), Answer())), *heard[index:]]


def up_to(heard: list[Heard], kind: type, nth: int = 0, **like) -> list[Heard]:
    """Until such a fact, which is the last of all."""
    index, at, _ = where(heard, kind, nth, **like)
    now, given, decision = heard[index]
    facts = decision.facts[: at + 1]
    told = [fact.order for fact in facts if isinstance(fact, f.OrderIssued)]
    effects = tuple(it for it in decision.effects if isinstance(it, e.Perform) and it.order in told)
    return [*heard[:index], (now, given, replace(decision, facts=facts, effects=effects))]


def long_after(heard: list[Heard], kind: type, nth: int = 0, **like) -> Checker:
    """Days pass after such a fact, in which everybody beats, and nothing happens."""
    now = heard[where(heard, kind, nth, **like)[0]][0]
    checker = hear(up_to(heard, kind, nth, **like), ends=False)
    for session in list(checker.heard):
        checker.hear(now + 10 * 86_400_000, i.Heartbeat(session), Decision((), (), Answer()))
    return checker


def slot_of(heard: list[Heard], name: str, phase: str, nth: int = 0) -> str:
    number = {fact.spec.name: fact.job for _, _, d in heard for fact in d.facts if isinstance(fact, f.JobRegistered)}
    return where(heard, f.SlotQueued, nth, job=number[name], phase=phase)[2].slot


# ---- who may be granted ----------------------------------------------------------------------------------------------


def test_a_fact_of_another_time_is_caught(pair):
    caught("no_fact_goes_back_in_time", changed(pair, f.SlotReleased, 1, at=7))


def test_an_input_of_an_earlier_time_is_caught(pair):
    caught("no_fact_goes_back_in_time", [*pair, (pair[-1][0] - 1, i.Tick(), Decision((), (), Answer()))])


def test_a_claim_for_a_request_that_was_withdrawn_is_caught(pair):
    forged = before(pair, f.SlotClaimed, lambda claim: f.SlotWithdrawn(claim.at, claim.slot, said("asked to")), nth=3)
    caught("who_may_not_be_granted_is_not", forged)


def test_a_claim_for_a_session_that_has_ended_is_caught(pair):
    caught("who_may_not_be_granted_is_not", before(pair, f.SlotClaimed, lambda it: f.SessionClosed(it.at, "e1")))


def test_a_grant_of_a_slot_that_nobody_claimed_is_caught(pair):
    _, _, queued = where(pair, f.SlotQueued, 1)
    forged = before(pair, f.SlotGranted, lambda it: f.SlotGranted(it.at, queued.slot, Fence(1, 1)))
    caught("who_may_not_be_granted_is_not", forged)


def test_a_grant_to_a_process_that_was_silent_for_a_lease_is_caught(pair):
    caught("nobody_is_granted_who_is_not_there", pair, lease=99_000)


def test_a_claim_for_a_request_that_nobody_attends_is_caught(pair):
    slot = slot_of(pair, "Y", "rollout")
    caught(
        "a_request_that_nobody_attends_does_not_go_ahead",
        said_first(pair, f.SlotClaimed, i.DetachSlot(slot), slot=slot),
    )


def test_who_asks_again_attends_his_request(pair):
    slot = slot_of(pair, "Y", "rollout")
    index, _, _ = where(pair, f.SlotQueued, slot=slot)
    asks = pair[index][1]
    forged = said_first(pair, f.SlotClaimed, i.DetachSlot(slot), slot=slot)

    hear(said_first(forged, f.SlotClaimed, asks, slot=slot))


def test_a_claim_for_a_paused_job_is_caught(pair):
    caught("only_a_placed_job_goes_ahead", before(pair, f.SlotClaimed, lambda it: f.JobPaused(it.at, "j1", "ann")))


def test_a_second_request_at_a_time_is_caught(pair):
    forged = after(pair, f.SlotQueued, lambda it: replace(it, slot="s99", request_id="another"))
    caught("a_job_holds_one_slot_and_waits_with_one", forged)


def test_a_second_slot_at_a_time_is_caught(pair):
    slot = slot_of(pair, "X", "train")
    forged = without(without(pair, f.SlotReleased, slot=slot_of(pair, "X", "rollout")), f.SlotOver)
    caught("a_job_holds_one_slot_and_waits_with_one", before(forged, f.SlotClaimed, lambda it: it, slot=slot))


# ---- GPUs ------------------------------------------------------------------------------------------------------------


def test_a_gpu_that_two_slots_hold_is_caught(pair):
    caught("a_gpu_is_held_by_one_slot", without(pair, f.SlotOver))


def test_a_tail_that_keeps_what_it_never_had_is_caught(tails):
    caught(
        "a_gpu_is_held_by_one_slot",
        changed(tails, f.SlotResized, like={"tail": True}, gpus=("rollout1/gpu0", "train1/gpu0")),
    )


def test_a_tail_that_grows_to_what_its_slot_never_claimed_is_caught(tails):
    _, _, tail = where(tails, f.SlotResized)
    forged = after(tails, f.SlotResized, lambda it: f.SlotResized(it.at, tail.slot, it.gpus))
    caught("a_tail_takes_back_what_it_gave", forged)


def test_a_gpu_of_a_tail_that_another_claims_is_caught(tails):
    _, _, claim = where(tails, f.SlotClaimed, slot=slot_of(tails, "Y", "rollout"))
    forged = changed(tails, f.SlotClaimed, like={"slot": claim.slot}, gpus=("rollout1/gpu0", *claim.gpus))
    caught("a_gpu_is_held_by_one_slot", forged)


def test_a_gpu_given_on_before_it_was_verified_clean_is_caught(pair):
    caught("a_gpu_is_given_on_only_when_verified_clean", without(pair, f.GpusVerifiedClean))


def test_a_claim_of_a_part_by_a_phase_that_needs_all_is_caught(pair):
    caught("a_slot_holds_what_its_phase_claims", changed(pair, f.SlotClaimed, gpus=("rollout1/gpu0", "rollout1/gpu1")))


def test_a_claim_of_anothers_gpu_is_caught(tails):
    caught("a_slot_holds_what_its_phase_claims", changed(tails, f.SlotClaimed, gpus=("train1/gpu0",)))


def test_a_claim_on_a_node_out_of_service_is_caught(pair):
    node = "rollout1/gpu0-7"
    caught(
        "a_slot_holds_what_its_phase_claims",
        before(pair, f.SlotClaimed, lambda it: f.NodeLost(it.at, node, said("no route"))),
    )


def test_a_node_that_is_up_by_nobodys_sight_is_caught(pair):
    forged = before(pair, f.SlotQueued, lambda it: f.NodeUp(it.at, "rollout1/gpu0-7"))
    caught("a_slot_holds_what_its_phase_claims", forged)


def observation(mb: int) -> tuple[i.GpuObservation, ...]:
    return tuple(i.GpuObservation(f"rollout1/gpu{number}", mb) for number in range(8))


def test_gpus_called_clean_that_were_seen_used_are_caught(pair):
    index, _, _ = where(pair, f.GpusVerifiedClean, node="rollout1/gpu0-7")
    given = pair[index][1]
    caught("clean_is_what_was_verified", but(pair, index, given=replace(given, seen=observation(70_000))))


def test_gpus_called_clean_that_nobody_saw_are_caught(pair):
    index, _, _ = where(pair, f.GpusVerifiedClean, node="rollout1/gpu0-7")
    caught("clean_is_what_was_verified", but(pair, index, given=replace(pair[index][1], seen=())))


def test_gpus_declared_clean_by_nobody_are_caught(pair):
    caught("clean_is_what_was_verified", changed(pair, f.GpusVerifiedClean, by="ann"))


def test_gpus_called_clean_under_a_running_slot_are_caught(pair):
    index, at, grant = where(pair, f.SlotGranted)
    forged = facts_but(pair, index, at, grant, f.GpusVerifiedClean(grant.at, "rollout1/gpu0-7", ("rollout1/gpu0",)))
    caught("clean_is_what_was_verified", forged)


def test_gpus_called_clean_while_a_state_is_loaded_there_are_caught(pair):
    index, at, over = where(pair, f.SlotOver)  # what X has loaded stays there for now
    forged = facts_but(pair, index, at, over, f.GpusVerifiedClean(over.at, "rollout1/gpu0-7", ("rollout1/gpu0",)))
    caught("clean_is_what_was_verified", but(forged, index, given=replace(pair[index][1], seen=observation(0))))


def test_gpus_called_clean_by_a_look_that_began_before_they_were_touched_are_caught(pair):
    index, _, cleared = where(pair, f.GpusVerifiedClean, node="rollout1/gpu0-7")
    now = pair[index][0]
    look = i.HostObserved("rollout1", observation(0), "boot-1", since=now - 4_000)  # it was released 3 s ago
    forged = [*pair[: index + 1], (now, look, Decision((cleared,), (), Answer())), *pair[index + 1 :]]
    caught("clean_is_what_was_verified", forged)


def test_residual_memory_that_nobody_saw_or_of_a_state_that_is_not_parked_is_caught():
    checker = Checker(Config())
    checker.places["n"] = Place("box", ("g0",), ("rollout",))
    checker.given = i.HostObserved("box", (i.GpuObservation("g0", 900),), "boot")
    told = f.ResidualMemoryObserved(0, "j1", "rollout", "n", 900, 500)
    with pytest.raises(BrokenInvariant, match="its state is gone"):
        checker._facts[f.ResidualMemoryObserved](checker, told)
    checker.kept["j1|rollout|n"] = "parked"
    with pytest.raises(BrokenInvariant, match="where 900 MB were seen"):
        checker._facts[f.ResidualMemoryObserved](checker, replace(told, mb=901))

    checker.dirty_by["g0"] = "j2"  # the 900 MB may as well be another's
    with pytest.raises(BrokenInvariant, match="where 0 MB were seen"):
        checker._facts[f.ResidualMemoryObserved](checker, told)
    checker.dirty_by["g0"] = "j1"

    checker._facts[f.ResidualMemoryObserved](checker, told)
    assert checker.places["n"].left == {"j1|rollout|n": 900}


def test_what_was_taken_away_and_given_on_at_once_is_caught(cut_short):
    _, _, over = where(cut_short, f.SlotOver, slot=where(cut_short, f.SlotTakenAway)[2].slot)
    forged = without(cut_short, f.SlotOver, slot=over.slot)
    forged = after(forged, f.SlotTakenAway, lambda it: f.SlotOver(it.at, it.slot))
    caught("what_was_taken_away_is_held_until_verified_clean", forged)


def test_a_placement_that_ends_while_something_is_left_is_caught(cut_short):
    forged = after(cut_short, f.JobEnded, lambda it: f.PlacementEnded(it.at, it.job, said("")))
    caught("a_placement_ends_when_nothing_is_left", forged)


# ---- grants ----------------------------------------------------------------------------------------------------------


def test_a_grant_before_the_state_is_loaded_is_caught(pair):
    forged = after(pair, f.SlotClaimed, lambda it: f.SlotGranted(it.at, it.slot, Fence(1, 1)))
    caught("who_is_granted_finds_its_state_loaded", forged)


def test_a_grant_after_the_state_was_lost_sight_of_is_caught(pair):
    unknown = f.StateUnknown(0, "j1", "rollout", "rollout1/gpu0-7")
    forged = before(pair, f.SlotGranted, lambda it: replace(unknown, at=it.at))
    caught("who_is_granted_finds_its_state_loaded", forged)


def test_a_grant_of_all_gpus_when_a_part_was_loaded_is_caught(tails):
    """Y was loaded on seven; that it has eight now makes nothing of it be on the eighth."""
    slot = slot_of(tails, "Y", "rollout")
    index, _, _ = where(tails, f.SlotGranted, slot=slot)
    checker = hear(tails[:index], ends=False)
    checker.slots[slot].gpus = ("rollout1/gpu0", *checker.slots[slot].gpus)
    with pytest.raises(BrokenInvariant, match="who_is_granted_finds_its_state_loaded"):
        checker.hear(*tails[index])


def test_a_fence_that_does_not_grow_is_caught(pair):
    caught("fences_only_grow", changed(pair, f.SlotGranted, 3, fence=Fence(1, 3)))


def test_a_release_under_another_fence_is_caught(pair):
    index, _, _ = where(pair, f.SlotReleased)
    caught("only_its_holder_releases_a_slot", but(pair, index, given=replace(pair[index][1], fence=Fence(1, 9))))


def test_a_slot_that_is_over_while_it_runs_is_caught(pair):
    caught("only_its_holder_releases_a_slot", after(pair, f.SlotGranted, lambda it: f.SlotOver(it.at, it.slot)))


# ---- order -----------------------------------------------------------------------------------------------------------


def test_a_schedule_whose_order_nobody_keeps_is_caught(monkeypatch):
    monkeypatch.setattr(dispatch, "next_turn_on", lambda c, group, node, line: next(
        (index for index, turn in enumerate(group.schedule) if c.state.jobs[turn.job].queued is not None
         and c.state.slots[c.state.jobs[turn.job].queued].phase == turn.phase), None))  # fmt: skip
    with pytest.raises(BrokenInvariant, match="turns_come_in_the_order_of_the_schedule"):
        history(job("X"), job("Y"), job("Z"))


def test_a_line_in_which_the_last_is_first_is_caught(monkeypatch):
    kept = dispatch.line_of
    monkeypatch.setattr(dispatch, "line_of", lambda *args: kept(*args)[::-1])
    with pytest.raises(BrokenInvariant, match="first_come_first_served"):
        history(job("X"), job("Y"), job("Z"), policy=policy_under_test("rollmux-artifact"))


@pytest.fixture(scope="module")
def by_credit() -> list[Heard]:
    """X, Y and Z wait for each other in a line by credit."""
    return history(job("X", slo=5.0), job("Y", slo=5.0), job("Z", slo=5.0), policy=BY_CREDIT)


def test_a_line_in_which_who_has_most_credit_is_first_is_caught(monkeypatch):
    kept = lines._standing
    monkeypatch.setattr(lines, "_standing", lambda *args: (*kept(*args)[:3], -kept(*args)[3]))
    with pytest.raises(BrokenInvariant, match="who_is_least_ahead_goes_first"):
        history(job("X", slo=5.0), job("Y", slo=5.0), job("Z", slo=2.5), policy=BY_CREDIT)


def test_a_guarded_job_that_is_overtaken_is_caught(by_credit):
    """Z is said to be guarded, by when nobody has finished an iteration, and Y goes before it."""
    index, at, claim = where(by_credit, f.SlotClaimed, 2)
    asked = {it.slot: it for _, _, told in by_credit for it in told.facts if isinstance(it, f.SlotQueued)}
    first = [it.job for it in asked.values()][:3]
    assert asked[claim.slot].job == first[1]
    guarded = f.GuardChanged(claim.at, first[2], guarded=True, credit_ms=0)

    caught("who_is_least_ahead_goes_first", facts_but(by_credit, index, at, guarded, claim))


def test_a_guard_on_credit_that_was_not_earned_is_caught(by_credit):
    last = where(by_credit, f.SlotReleased, -1)[2]
    job = next(it.job for _, _, told in by_credit for it in told.facts if getattr(it, "slot", "") == last.slot)
    guarded = before(by_credit, f.SlotReleased, lambda it: f.GuardChanged(it.at, job, guarded=True, credit_ms=1), -1)

    caught("a_guard_knows_what_a_job_has_earned", guarded)


def test_a_turn_that_is_passed_while_it_is_asked_for_is_caught(monkeypatch):
    passed = []

    def once(c, group, index):
        job = c.state.jobs[group.schedule[index].job]
        if not passed and job.queued is not None and c.state.slots[job.queued].phase == group.schedule[index].phase:
            passed.append(job)
            return True
        return False

    monkeypatch.setattr(dispatch, "may_skip", once)
    with pytest.raises(BrokenInvariant, match="nobody_is_passed_over_who_could_go"):
        history(job("X"), job("Y"), job("Z"))


# ---- placements ------------------------------------------------------------------------------------------------------


def test_a_node_in_two_groups_is_caught(pair):
    caught("a_node_is_in_one_group", changed(pair, f.JobPlaced, 1, group="g9"))


def test_a_job_on_nodes_of_another_pool_is_caught(pair):
    _, _, placed = where(pair, f.JobPlaced, 0)
    pins = placed.pins
    swapped = dict(zip(pins, reversed(pins.values()), strict=True))

    caught("a_job_has_nodes_of_the_pools_that_it_wants", changed(pair, f.JobPlaced, pins=swapped))


def test_more_parked_states_than_a_host_has_room_for_are_caught(pair):
    tight = i.HostSpec("rollout1", "sim", 1_000_000)
    caught("parked_states_fit_their_hosts", changed(pair, f.HostAdded, host=tight))


def test_a_group_above_the_cap_is_caught(pair):
    caught("a_group_has_no_more_members_than_the_cap", pair, cap=1)


def test_a_request_of_a_lost_job_is_caught(pair):
    caught(
        "who_has_ended_gets_nothing_more", before(pair, f.SlotQueued, lambda it: f.JobLost(it.at, it.job, said("dead")))
    )


def test_a_job_that_ends_twice_is_caught(pair):
    caught("who_has_ended_gets_nothing_more", after(pair, f.JobEnded, lambda it: it))


# ---- orders ----------------------------------------------------------------------------------------------------------


def test_an_order_that_nobody_is_told_is_caught(pair):
    index, _, _ = where(pair, f.OrderIssued)
    caught("every_order_is_told_once", but(pair, index, effects=()))


def test_an_order_that_is_told_twice_is_caught(pair):
    index, _, _ = where(pair, f.OrderIssued)
    caught("every_order_is_told_once", but(pair, index, effects=pair[index][2].effects * 2))


def test_a_question_about_no_open_order_is_caught(pair):
    caught("every_order_is_told_once", but(pair, 5, effects=(e.Probe("o99"),)))


def test_a_process_that_is_ended_under_a_living_job_is_caught_unless_it_makes_way_for_another(pair):
    index, _, _ = where(pair, f.SlotGranted)
    kill = e.Kill("j1", 1, None, "l1", "rollout1")
    caught("every_order_is_told_once", but(pair, index, effects=(kill,)))
    now, given, decision = pair[index]
    over = (*decision.facts, f.ProcessOver(now, "j1", "l1", said("another is to be started")))
    hear([*pair[:index], (now, given, replace(decision, facts=over, effects=(kill,)))], ends=False)


def test_an_order_that_ends_twice_is_caught(pair):
    index, _, ended = where(pair, f.OrderEnded)
    again = (pair[index][0], pair[index][1], Decision((ended,), (), Answer()))
    caught("every_order_ends_once", [*pair[: index + 1], again, *pair[index + 1 :]])


def test_an_order_that_ends_by_nobodys_word_is_caught(pair):
    index, _, _ = where(pair, f.OrderEnded)
    caught("every_order_ends_once", but(pair, index, given=i.Tick()))


def test_a_report_that_is_not_heeded_is_caught(pair):
    index, _, _ = where(pair, f.OrderEnded)
    caught("every_order_ends_once", but(pair, index, facts=()))


def test_a_park_under_a_running_slot_is_caught(pair):
    park = f.OrderIssued(0, "o99", OrderKind.PARK, "j1", 1, "rollout", "rollout1/gpu0-7", "channel")
    forged = after(pair, f.SlotGranted, lambda it: replace(park, at=it.at))
    caught("nobody_moves_a_state_in_use", forged)


def test_a_load_for_nobodys_slot_is_caught(pair):
    load = f.OrderIssued(0, "o99", OrderKind.LOAD, "j2", 1, "train", "train1/gpu0-7", "channel", "s2")
    caught("nobody_moves_a_state_in_use", after(pair, f.SlotGranted, lambda it: replace(load, at=it.at)))


def test_two_orders_at_once_for_a_state_are_caught(pair):
    caught("nobody_moves_a_state_in_use", after(pair, f.OrderIssued, lambda it: replace(it, order="o99")))


# ---- in the end ------------------------------------------------------------------------------------------------------


def test_a_session_that_is_lost_too_soon_is_caught(pair):
    caught(
        "the_death_of_a_job_is_recorded_within_its_lease",
        before(pair, f.SlotReleased, lambda it: f.SessionLost(it.at, "e2")),
    )


def test_a_session_that_passes_for_living_though_it_is_silent_is_caught(pair):
    checker = hear(up_to(pair, f.SlotGranted), ends=False)
    checker.hear(LEASE + 1_000_000, i.Tick(), Decision((), (), Answer()))
    with pytest.raises(BrokenInvariant, match="the_death_of_a_job_is_recorded_within_its_lease"):
        checker.sweep()


def test_who_waits_for_ever_with_nothing_in_the_way_is_caught(pair):
    slot = slot_of(pair, "Y", "rollout", 1)
    checker = long_after(pair, f.SlotReleased, slot=slot_of(pair, "X", "rollout", 1))  # X has released; nobody goes on
    checker.slots[slot].since = 0
    with pytest.raises(BrokenInvariant, match="who_waits_has_his_turn"):
        checker.who_waits_has_his_turn(slot, checker.slots[slot])


def test_who_waits_while_a_holder_runs_on_and_on_is_no_breach(pair):
    """Its holder's time is in the bound: a phase may take as long as it takes."""
    slot = slot_of(pair, "Y", "rollout")
    checker = long_after(pair, f.SlotGranted)

    checker.who_waits_has_his_turn(slot, checker.slots[slot])


def test_gpus_that_never_come_back_are_caught(cut_short):
    checker = long_after(cut_short, f.SlotTakenAway)
    with pytest.raises(BrokenInvariant, match="what_is_given_back_becomes_clean"):
        checker.sweep()


def test_an_order_that_never_ends_is_caught(pair):
    checker = long_after(pair, f.OrderIssued)
    with pytest.raises(BrokenInvariant, match="every_order_comes_to_an_end"):
        checker.sweep()


@pytest.mark.parametrize(
    ("kind", "nth", "promise"),
    [
        (f.SlotGranted, 0, "every_job_ends"),
        (f.JobPlaced, 0, "every_job_ends"),
        (f.JobEnded, -1, "every_job_ends"),
    ],
)
def test_a_run_that_stops_in_the_midst_is_caught(pair, kind, nth, promise):
    caught(promise, up_to(pair, kind, nth))


def left(checker: Checker, promise: str) -> None:
    with pytest.raises(BrokenInvariant, match=promise):
        checker.end(checker.now)


def test_what_is_left_at_the_end_is_caught(pair):
    for field, left_over, promise in (
        ("slots", {"s1": Asked("j1", "e1", "rollout", "1", False, "running", 0, 0)}, "every_slot_ends"),
        ("held", {"rollout1/gpu0": "s1"}, "every_gpu_comes_back"),
        ("dirty_by", {"rollout1/gpu0": "j1"}, "every_gpu_comes_back"),
        ("ram", {"rollout1": [1, 2]}, "every_node_leaves_its_group"),
    ):
        checker = hear(pair)
        getattr(checker, field).update(left_over)
        left(checker, promise)
    checker = hear(pair)
    checker.places["rollout1/gpu0-7"].group = "g1"
    left(checker, "every_node_leaves_its_group")


# ---- and what is true is never called broken -------------------------------------------------------------------------


def test_a_history_as_it_was_passes(pair, cut_short, tails, by_credit):
    for heard in (pair, cut_short, tails, by_credit):
        checker = hear(heard)

        assert (checker.slots, checker.orders, checker.kept, checker.members) == ({}, {}, {}, {})


def test_the_checker_has_an_opinion_on_every_fact_there_is():
    """Who adds a fact says here whether a promise depends on it."""
    without_one = [kind.__name__ for kind in f.KINDS if kind not in Checker._facts]

    assert set(without_one) <= OF_NO_CONSEQUENCE


def test_every_promise_says_itself_in_a_sentence():
    promises = [
        name for name in dir(Checker) if not name.startswith("_") and name not in ("before", "hear", "sweep", "end")
    ]

    assert len(promises) >= 25
    for name in promises:
        assert getattr(Checker, name).__doc__, name
        assert name.count("_") >= 2, f"{name} is no sentence"
