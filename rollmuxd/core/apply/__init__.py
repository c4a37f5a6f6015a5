"""The one place that writes the core's memory: ``apply``, fact by fact, in rooms by what the facts are about.

``apply`` holds no policy: every number that was decided is in the fact. It is the same code live, in replay and in
the simulator, so replaying a journal gives the very state that the live scheduler had.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core.apply import groups, hosts, jobs, moves, orders, pins, slots
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.state import State

Fold: TypeAlias = Callable[[State, Any], None]


def apply(state: State, fact: f.Fact) -> None:
    """Let one thing have happened.

    Raises:
        BrokenInvariant: the life-cycle tables do not know it; the state is then not to be used any more.
    """
    if fact.at < state.at:
        raise BrokenInvariant(f"time went back from {state.at} to {fact.at} ({f.name(fact)})")
    state.at = fact.at
    _FOLD[type(fact)](state, fact)


#: facts that have no function of their own
_SHARED: Final[Mapping[type[f.Fact], Fold]] = {
    # they are for people and other readers of the journal
    **dict.fromkeys((f.LoopStalled, f.Audited), lambda state, fact: None),
    **dict.fromkeys((f.NodeUp, f.NodeOccupied, f.NodeUnknown, f.NodeLost, f.NodeQuarantined), hosts.node_moved),
    **dict.fromkeys((f.NodeDraining, f.NodeDrained, f.NodeUndrained), hosts.node_moved),
    **dict.fromkeys((f.SessionLost, f.SessionClosed), jobs.session_over),
}


def _fold_of(kind: type[f.Fact]) -> Fold:
    """The function of these rooms that has the fact's name in the journal: ``slot_granted`` for SlotGranted."""
    name = str(kind.__struct_config__.tag)
    rooms = (groups, hosts, jobs, moves, orders, pins, slots)
    found: Fold = next(getattr(room, name) for room in rooms if hasattr(room, name))
    return found


_FOLD: Final = {kind: _SHARED.get(kind) or _fold_of(kind) for kind in f.KINDS}
