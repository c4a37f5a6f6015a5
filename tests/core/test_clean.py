"""The rule when a GPU is clean, row by row. The state is made by hand: a GPU of node ``n``, and a job ``a``."""

import pytest

from rollmuxd.core.clean import is_due
from rollmuxd.core.model import (
    Gpu,
    Job,
    JobState,
    Node,
    Order,
    OrderKind,
    OrderStatus,
    Session,
    SessionStatus,
    Slot,
    SlotStatus,
    StateStatus,
)
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec
from rollmuxd.core.state import State


def a_state(
    holder: SlotStatus | None,
    kept: StateStatus | None,
    *,
    dirty: bool = True,
    loading: bool = False,
    lives: bool = True,
    tail: str = "",
) -> tuple[State, Node, Gpu]:
    """``holder``: the status of its slot; ``kept``: of the job's state; ``loading``: its load has no result yet.

    ``tail``: the phase whose slot runs on as a tail.
    """
    phases = (PhaseSpec("rollout", ("rollout",)), PhaseSpec("train", ("train",)))
    job = Job("a", "team", "ann", JobSpec("a", phases, ()), 0, session="e1", slot="s2" if tail else None)
    gpu = Gpu(None if holder is None else "s1", "a" if dirty else None)
    node = Node("n", "h", {"h/gpu0": gpu}, ("train",), states=[] if kept is None else ["a|train|n"])
    state = State(jobs={"a": job}, nodes={"n": node})
    state.sessions["e1"] = Session("e1", "a", 1, 0, status=SessionStatus.ALIVE if lives else SessionStatus.LOST)
    state.slots["s1"] = Slot("s1", "a", 1, "e1", "train", "r1", 0, holder or SlotStatus.OVER)
    state.slots["s2"] = Slot("s2", "a", 1, "e1", tail, "r2", 0, SlotStatus.TAIL)
    if kept is not None:
        state.states["a|train|n"] = JobState("a", "train", "n", StateSpec("train"), status=kept)
    if loading:
        state.states["a|train|n"].order = "o1"
        state.orders["o1"] = Order(
            "o1", OrderKind.LOAD, "a", 1, "train", "n", "d", 0, "s1", status=OrderStatus.LOST_CONTACT
        )
    return state, node, gpu


ENDED = (None, SlotStatus.RELEASED, SlotStatus.FAULTED, SlotStatus.LOST, SlotStatus.REVOKED)
FILLS = (StateStatus.LOADED, StateStatus.LOADING, StateStatus.PARKING)
REST = (StateStatus.PARKED, StateStatus.DISCARDING, StateStatus.GONE, StateStatus.UNKNOWN)


@pytest.mark.parametrize("holder", [SlotStatus.LOADING, SlotStatus.RUNNING, SlotStatus.TAIL])
@pytest.mark.parametrize("kept", [None, *FILLS, *REST])
def test_what_a_slot_holds_by_right_is_in_use(holder: SlotStatus, kept: StateStatus | None) -> None:
    assert not is_due(*a_state(holder, kept))


@pytest.mark.parametrize("holder", ENDED)
@pytest.mark.parametrize("kept", [None, *FILLS, *REST])
def test_where_no_bytes_may_be_it_is_clean(holder: SlotStatus | None, kept: StateStatus | None) -> None:
    assert not is_due(*a_state(holder, kept, dirty=False))


@pytest.mark.parametrize("holder", ENDED)
@pytest.mark.parametrize("kept", FILLS)
def test_an_empty_gpu_proves_nothing_while_a_state_is_or_comes_there(
    holder: SlotStatus | None, kept: StateStatus
) -> None:
    assert not is_due(*a_state(holder, kept))


@pytest.mark.parametrize("holder", ENDED)
@pytest.mark.parametrize("kept", [None, *REST])
def test_what_is_left_is_due(holder: SlotStatus | None, kept: StateStatus | None) -> None:
    assert is_due(*a_state(holder, kept))


def test_a_load_without_a_word_may_still_be_done_while_its_process_lives() -> None:
    assert not is_due(*a_state(None, StateStatus.UNKNOWN, loading=True))
    assert is_due(*a_state(None, StateStatus.UNKNOWN, loading=True, lives=False))


@pytest.mark.parametrize("kept", FILLS)
def test_what_a_tail_gave_back_is_due_although_its_state_is_loaded(kept: StateStatus) -> None:
    assert is_due(*a_state(None, kept, tail="train"))


@pytest.mark.parametrize("kept", FILLS)
def test_a_state_for_another_pool_than_the_tails_stays_loaded(kept: StateStatus) -> None:
    assert not is_due(*a_state(None, kept, tail="rollout"))
