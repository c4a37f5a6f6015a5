"""The core, sabotaged in one place at a time: random histories find it, and say by name which promise is broken.

A checker that finds nothing may be blind. Each sabotage here is what a plausible mistake would do. That a whole core
passes the same histories is ``test_swarm.py``; what each checker catches in forged facts is ``tests/simkit``.
"""

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from simkit import swarm
from simkit.checkers.rest import Rest
from simkit.faulty_world import DaemonDied, FaultyWorld

from rollmuxd.core import clean, marks, reconcile, scheduler  # fmt: skip
from rollmuxd.core import effects as e
from rollmuxd.core import facts as f
from rollmuxd.core import inputs as i
from rollmuxd.core.context import Context
from rollmuxd.core.errors import Rejected
from rollmuxd.core.handlers import hosts, jobs, orders, slots
from rollmuxd.core.ids import Fence
from rollmuxd.core.model import Group, Job, JobState, OrderKind, Slot, SlotStatus, StateStatus
from rollmuxd.core.policy import Move
from rollmuxd.core.spec import Movable
from rollmuxd.core.state import State
from rollmuxd.core.steps import dispatch, drain, lines, locality, observe, reclaim
from rollmuxd.core.steps import move as moving
from rollmuxd.core.timers import Timers
from rollmuxd.sim.world import Process, Then

FOUND = Path(__file__).parent / "found"
#: one of so many histories finds it
HISTORIES = 20


def everywhere(patch: pytest.MonkeyPatch, name: str, instead: Callable[..., Any]) -> None:
    """Replace a function of the core in every room that calls it."""
    rooms = [
        it for it in (clean, hosts, observe, reclaim, jobs, orders, slots, dispatch, reconcile) if hasattr(it, name)
    ]
    assert rooms, f"the core has no {name}"
    for room in rooms:
        patch.setattr(room, name, instead)


def forgets(patch: pytest.MonkeyPatch, *kinds: type[f.Fact]) -> None:
    """Nothing is looked at after these facts."""
    for kind in kinds:
        patch.setitem(marks.MARKS, kind, ())


def frees_gpus_that_were_not_verified_clean(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, "clean_limit_mb", lambda *_: 10**9)


def frees_gpus_onto_which_a_state_is_on_its_way(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, "may_still_fill", lambda *_: False)


def believes_a_look_that_is_older_than_the_grant(patch: pytest.MonkeyPatch) -> None:
    seen = hosts.host_observed
    patch.setitem(scheduler._HANDLERS, i.HostObserved, lambda c, told: seen(c, replace(told, since=None)))


def forgets_to_write_a_fact_down(patch: pytest.MonkeyPatch) -> None:
    happens = Context.fact

    def fact(c: Context, it: f.Fact) -> None:
        happens(c, it)
        if isinstance(it, f.GpusNotClean):
            c.facts.pop()

    patch.setattr(Context, "fact", fact)


def takes_a_release_under_any_fence(patch: pytest.MonkeyPatch) -> None:
    """Before each release, a process that was replaced gives the slot back under a fence that was not for it."""
    call = FaultyWorld.call

    def called(world: FaultyWorld, process: Process, given: i.Input, then: Then | None = None) -> None:
        if isinstance(given, i.ReleaseSlot) and world.up:
            stale = Fence(given.fence.incarnation, given.fence.number - 1)
            with suppress(Rejected, DaemonDied):
                world.tell(replace(given, fence=stale, next=None))
        call(world, process, given, then)

    patch.setattr(FaultyWorld, "call", called)
    everywhere(patch, "check_holder", lambda *_: None)


def mints_a_fence_twice(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, "Fence", lambda incarnation, number: Fence(incarnation, max(1, number - 1)))


def grants_before_the_state_is_loaded(patch: pytest.MonkeyPatch) -> None:
    def grant(c: Context, job: Job, slot: Slot) -> None:
        if slot.status is SlotStatus.LOADING and slot.id not in c.timers.detached:
            c.fact(f.SlotGranted(c.now, slot.id, Fence(c.state.incarnation, c.state.fence_number + 1)))

    everywhere(patch, "grant_if_loaded", grant)


def grants_to_who_does_not_attend(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Timers, "detach", lambda *_, **__: None)


def keeps_a_dead_process_as_living(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(jobs, "lose", lambda *_: None)


def passes_over_who_could_go(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "may_skip", lambda *_: True)


def serves_who_has_most_credit(patch: pytest.MonkeyPatch) -> None:
    standing = lines._standing

    def reversed_(c: Context, group: Group, slot: Slot) -> tuple[bool, bool, bool, int]:
        patient, guarded, waits, ahead = standing(c, group, slot)
        return patient, guarded, waits, -ahead

    patch.setattr(lines, "_standing", reversed_)


def lets_who_has_little_credit_starve_the_others(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lines, "PATIENCE", 10**6)


def ends_a_placement_while_something_is_there(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reclaim, "discard_from", lambda *_: True)


def parks_under_a_running_slot(patch: pytest.MonkeyPatch) -> None:
    def park(c: Context, kept: JobState) -> None:
        if kept.status is StateStatus.LOADED:
            dispatch.issue(c, OrderKind.PARK, kept, None)

    everywhere(patch, "park_if_unheld", park)


def looks_only_once(patch: pytest.MonkeyPatch) -> None:
    everywhere(patch, "observe_until_clean", lambda *_: None)


def forgets_what_waits_for_an_order(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.OrderEnded)


def issues_an_order_and_tells_nobody(patch: pytest.MonkeyPatch) -> None:
    def do(c: Context, effect: e.Effect) -> None:
        if not isinstance(effect, e.Perform) or c.state.orders[effect.order].kind is not OrderKind.PARK:
            c.effects.append(effect)

    patch.setattr(Context, "do", do)


def plans_moves_away_from_lost_nodes(patch: pytest.MonkeyPatch) -> None:
    refusing = moving.refused

    def refused(c: Context, move: Move, *, guarded: bool = False) -> str:
        with patch.context() as blind:
            blind.setattr(moving, "cannot_leave", lambda *_: None)
            return refusing(c, move, guarded=guarded)

    patch.setattr(moving, "refused", refused)


def starts_again_while_something_is_left(patch: pytest.MonkeyPatch) -> None:
    ready = moving.is_ready
    patch.setattr(moving, "is_ready", lambda c, job, move: job.spec.movable is Movable.RELAUNCH or ready(c, job, move))


def leaves_everybody_on_drained_nodes(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(drain, "to_leave", lambda _: [])


def loads_what_its_driver_cannot_fetch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(locality, "_too_far", lambda *_: "")


def takes_a_node_for_another_pool(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(moving, "locality_violation", locality._too_far)


def counts_the_nodes_off_that_it_loads_from(patch: pytest.MonkeyPatch) -> None:
    def source_of(self: State, kept: JobState) -> JobState | None:
        job = self.jobs[kept.job]
        pins = job.pins.get(kept.pool, ())
        there = [self.states[key] for key in job.states if self.states[key].node in job.left]
        parked = [it for it in there if (it.pool, it.status, it.run) == (kept.pool, StateStatus.PARKED, kept.run)]
        loads = kept.status is StateStatus.GONE and kept.run == job.run and kept.node in pins
        return parked[pins.index(kept.node) % len(parked)] if loads and parked else None

    patch.setattr(State, "source_of", source_of)


def gives_no_turns_after_a_request(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.SlotQueued)


def gives_no_turns_after_a_placement(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.JobPlaced)


def ends_nothing_after_a_slot_is_over(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.SlotOver)


def tries_no_waiting_job_after_a_departure(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.JobEnded, f.JobLost, f.JobQuarantined, f.PlacementEnded)


def plans_nothing_for_when_patience_ends(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dispatch, "patient_until", lambda *_: 0)


def clears_nothing_away_after_a_look(patch: pytest.MonkeyPatch) -> None:
    forgets(patch, f.GpusVerifiedClean)


#: found by a history that was kept
KEPT: dict[Callable[[pytest.MonkeyPatch], None], tuple[str, str]] = {
    plans_moves_away_from_lost_nodes: ("moved_away_from_a_lost_node", "a_move_that_is_planned_can_be_made"),
    starts_again_while_something_is_left: (
        "started_again_while_something_was_left", "nothing_is_in_use_where_a_job_moves_away",
    ),
    leaves_everybody_on_drained_nodes: ("left_on_a_node_that_is_retired", "every_job_ends"),
    lets_who_has_little_credit_starve_the_others: (
        "starved_by_who_had_little_credit", "who_is_least_ahead_goes_first",
    ),
    loads_what_its_driver_cannot_fetch: (
        "parked_on_a_host_that_its_driver_cannot_reach", "a_state_is_fetched_from_where_it_is_parked",
    ),
    takes_a_node_for_another_pool: ("moved_with_its_pools_swapped", "what_is_loaded_is_what_was_left"),
    counts_the_nodes_off_that_it_loads_from: (
        "moved_from_one_of_three_nodes_and_the_next", "what_is_loaded_is_what_was_left",
    ),
}  # fmt: skip

CAUGHT: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    frees_gpus_that_were_not_verified_clean: "clean_is_what_was_verified",
    frees_gpus_onto_which_a_state_is_on_its_way: "clean_is_what_was_verified",
    believes_a_look_that_is_older_than_the_grant: "clean_is_what_was_verified",
    forgets_to_write_a_fact_down: "replay_gives_the_very_state",
    takes_a_release_under_any_fence: "only_its_holder_releases_a_slot",
    mints_a_fence_twice: "fences_only_grow",
    grants_before_the_state_is_loaded: "who_is_granted_finds_its_state_loaded",
    grants_to_who_does_not_attend: "a_request_that_nobody_attends_does_not_go_ahead",
    keeps_a_dead_process_as_living: "the_death_of_a_job_is_recorded_within_its_lease",
    passes_over_who_could_go: "nobody_is_passed_over_who_could_go",
    serves_who_has_most_credit: "who_is_least_ahead_goes_first",
    ends_a_placement_while_something_is_there: "a_placement_ends_when_nothing_is_left",
    parks_under_a_running_slot: "nobody_moves_a_state_in_use",
    looks_only_once: "every_job_ends",
    forgets_what_waits_for_an_order: "who_waits_has_his_turn",
    issues_an_order_and_tells_nobody: "every_order_is_told_once",
}


#: a call that continues was forgotten; found before anything is late for it
FORGOTTEN: tuple[Callable[[pytest.MonkeyPatch], None], ...] = (
    gives_no_turns_after_a_request,
    gives_no_turns_after_a_placement,
    ends_nothing_after_a_slot_is_over,
    tries_no_waiting_job_after_a_departure,
    plans_nothing_for_when_patience_ends,
    clears_nothing_away_after_a_look,
)


#: the first seed to try, where those before find nothing and take seconds
BEGINS_AT: dict[Callable[[pytest.MonkeyPatch], None], int] = {
    looks_only_once: 8,
    ends_nothing_after_a_slot_is_over: 10,
    serves_who_has_most_credit: 19,
    plans_nothing_for_when_patience_ends: 22,
}


@pytest.mark.parametrize("sabotage", FORGOTTEN)
def test_a_call_that_was_forgotten_is_found_by_the_rest_check(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    first = BEGINS_AT.get(sabotage, 0)
    assert "the_state_is_at_rest" in map(swarm.broken, map(swarm.draw, range(first, first + 8 * HISTORIES)))


@pytest.mark.parametrize(("sabotage", "promise"), CAUGHT.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_a_core_that_breaks_it_is_found_by_name(
    sabotage: Callable[[pytest.MonkeyPatch], None], promise: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    monkeypatch.setattr(Rest, "before", lambda *_: None)  # it would be the first to find some of them
    first = BEGINS_AT.get(sabotage, 0)
    assert any(swarm.broken(swarm.draw(seed)) == promise for seed in range(first, first + HISTORIES))


@pytest.mark.parametrize(("sabotage", "kept"), KEPT.items(), ids=lambda it: getattr(it, "__name__", ""))
def test_a_core_that_breaks_what_it_broke_once_is_found_by_name(
    sabotage: Callable[[pytest.MonkeyPatch], None], kept: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    name, promise = kept
    assert swarm.broken(swarm.decode((FOUND / f"{name}.json").read_bytes())) == promise


def test_who_releases_under_a_stale_fence_harms_nobody_where_it_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    checked = slots.check_holder
    takes_a_release_under_any_fence(monkeypatch)
    everywhere(monkeypatch, "check_holder", checked)
    for seed in range(3):
        assert not swarm.broken(swarm.draw(seed))
