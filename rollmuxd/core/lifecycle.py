"""The life cycles, as tables: what is not in them cannot happen. The diagrams in the docs are drawn from here.

Each table maps a status and the fact that is met in it to the statuses it may lead to. Most facts leave no choice;
where one does, it says which (``JobPlaced.status``). For a state, the kind of its order stands beside the fact.
"""

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

from rollmuxd.core import facts as f
from rollmuxd.core import model as m
from rollmuxd.core.errors import BrokenInvariant

StateEvent: TypeAlias = type[f.Fact] | tuple[type[f.Fact], m.OrderKind]

_J = m.JobStatus
_PLACED: Final = (_J.PROBING, _J.ADMITTED)
_ANY_LIVE: Final[dict[type[f.Fact], tuple[m.JobStatus, ...]]] = {
    f.JobQuarantined: (_J.QUARANTINED,),
    f.JobLost: (_J.LOST,),
    f.JobEnded: (_J.ENDED,),
}
_PAUSABLE: Final[dict[type[f.Fact], tuple[m.JobStatus, ...]]] = {**_ANY_LIVE, f.JobPaused: (_J.PAUSED,)}

JOB: Final[Mapping[m.JobStatus, Mapping[type[f.Fact], tuple[m.JobStatus, ...]]]] = {
    _J.WAITING: {**_PAUSABLE, f.JobPlaced: _PLACED, f.FillerPlaced: (_J.ADMITTED,)},
    _J.PROBING: {**_PAUSABLE, f.JobPromised: (_J.ADMITTED,), f.JobUnplaced: (_J.WAITING,)},
    _J.ADMITTED: {
        **_PAUSABLE,
        f.JobUnplaced: (_J.WAITING,),
        f.MovePlanned: (_J.ADMITTED,),
        f.MoveBegan: (_J.MOVING,),
        f.MoveAbandoned: (_J.ADMITTED,),
    },
    # whatever else befalls the job, its move is abandoned first
    _J.MOVING: {f.MoveEnded: (_J.ADMITTED,), f.MoveAbandoned: (_J.ADMITTED,)},
    _J.PAUSED: {**_ANY_LIVE, f.JobResumed: (_J.WAITING, *_PLACED)},
    _J.QUARANTINED: {**_ANY_LIVE, f.JobResumed: (_J.WAITING,)},
    # a new registration is a new run of the same job
    _J.LOST: {f.JobEnded: (_J.ENDED,), f.JobRegistered: (_J.WAITING,)},
    _J.ENDED: {f.JobRegistered: (_J.WAITING,)},
}

_S = m.SlotStatus
SLOT: Final[Mapping[m.SlotStatus, Mapping[type[f.Fact], tuple[m.SlotStatus, ...]]]] = {
    _S.QUEUED: {
        f.SlotClaimed: (_S.LOADING,),
        f.SlotWithdrawn: (_S.WITHDRAWN,),
    },
    _S.LOADING: {
        f.SlotGranted: (_S.RUNNING,),
        f.SlotTakenAway: (_S.FAULTED, _S.LOST, _S.REVOKED),
    },
    _S.RUNNING: {
        f.SlotTakenAway: (_S.LOST, _S.REVOKED),
        f.SlotResized: (_S.TAIL, _S.RUNNING),
        f.SlotReleased: (_S.RELEASED,),
        f.SlotOverran: (_S.RUNNING,),
        f.YieldAsked: (_S.RUNNING,),
    },
    _S.TAIL: {
        f.SlotTakenAway: (_S.LOST, _S.REVOKED),
        f.SlotResized: (_S.TAIL, _S.RUNNING),
        f.SlotReleased: (_S.RELEASED,),
        f.SlotOverran: (_S.TAIL,),
    },
    **{ended: {f.SlotOver: (_S.OVER,)} for ended in (_S.FAULTED, _S.LOST, _S.REVOKED, _S.RELEASED)},
    _S.WITHDRAWN: {},
    _S.OVER: {},
}

_T = m.StateStatus
_TO_UNKNOWN: Final[dict[StateEvent, tuple[m.StateStatus, ...]]] = {
    f.OrderFaulted: (_T.UNKNOWN,),
    f.OrderContactLost: (_T.UNKNOWN,),
    f.StateUnknown: (_T.UNKNOWN,),
}

STATE: Final[Mapping[m.StateStatus, Mapping[StateEvent, tuple[m.StateStatus, ...]]]] = {
    _T.GONE: {**_TO_UNKNOWN, (f.OrderIssued, m.OrderKind.LOAD): (_T.LOADING,)},
    _T.LOADING: {**_TO_UNKNOWN, (f.OrderEnded, m.OrderKind.LOAD): (_T.LOADED,)},
    _T.LOADED: {
        **_TO_UNKNOWN,
        (f.OrderIssued, m.OrderKind.LOAD): (_T.LOADING,),  # onto more GPUs, where its slot grows
        (f.OrderIssued, m.OrderKind.PARK): (_T.PARKING,),
        (f.OrderIssued, m.OrderKind.DISCARD): (_T.DISCARDING,),
    },
    _T.PARKING: {**_TO_UNKNOWN, (f.OrderEnded, m.OrderKind.PARK): (_T.PARKED,)},
    _T.PARKED: {
        **_TO_UNKNOWN,
        (f.OrderIssued, m.OrderKind.LOAD): (_T.LOADING,),
        (f.OrderIssued, m.OrderKind.DISCARD): (_T.DISCARDING,),
    },
    _T.DISCARDING: {**_TO_UNKNOWN, (f.OrderEnded, m.OrderKind.DISCARD): (_T.GONE,)},
    _T.UNKNOWN: {**_TO_UNKNOWN, f.StateObserved: (_T.LOADED, _T.PARKED, _T.GONE)},
}

_N = m.NodeStatus
_FROM_ANY: Final[dict[type[f.Fact], tuple[m.NodeStatus, ...]]] = {
    f.NodeQuarantined: (_N.QUARANTINED,),
    f.NodeLost: (_N.LOST,),
    f.NodeUnknown: (_N.UNKNOWN,),
}
_IN_QUESTION: Final[dict[type[f.Fact], tuple[m.NodeStatus, ...]]] = {
    f.NodeUnknown: (_N.UNKNOWN,),
    f.NodeUndrained: (_N.UNKNOWN,),
}
_DRAINABLE: Final[dict[type[f.Fact], tuple[m.NodeStatus, ...]]] = {**_FROM_ANY, f.NodeDraining: (_N.DRAINING,)}

NODE: Final[Mapping[m.NodeStatus, Mapping[type[f.Fact], tuple[m.NodeStatus, ...]]]] = {
    _N.UNKNOWN: {**_DRAINABLE, **_IN_QUESTION, f.NodeUp: (_N.UP,), f.NodeOccupied: (_N.OCCUPIED,)},
    _N.UP: {**_DRAINABLE, f.NodeOccupied: (_N.OCCUPIED,)},
    _N.OCCUPIED: {**_DRAINABLE, **_IN_QUESTION, f.NodeUp: (_N.UP,)},
    _N.DRAINING: {**_FROM_ANY, **_IN_QUESTION, f.NodeDrained: (_N.DRAINED,)},
    _N.DRAINED: {**_FROM_ANY, **_IN_QUESTION},
    _N.QUARANTINED: {**_IN_QUESTION, f.NodeLost: (_N.LOST,)},
    _N.LOST: {**_IN_QUESTION, f.NodeLost: (_N.LOST,)},  # for another reason
}

_O = m.OrderStatus
ORDER: Final[Mapping[m.OrderStatus, Mapping[type[f.Fact], tuple[m.OrderStatus, ...]]]] = {
    _O.ISSUED: {
        f.OrderEnded: (_O.DONE,),
        f.OrderFaulted: (_O.FAILED,),
        f.OrderContactLost: (_O.LOST_CONTACT,),
    },
    _O.LOST_CONTACT: {f.OrderEnded: (_O.DONE,), f.OrderFaulted: (_O.FAILED,)},
    _O.DONE: {},
    _O.FAILED: {},
}


_TABLES: Final[dict[type, Any]] = {m.Job: JOB, m.Slot: SLOT, m.JobState: STATE, m.Node: NODE, m.Order: ORDER}


def meet(
    thing: m.Job | m.Slot | m.JobState | m.Node | m.Order, fact: f.Fact, to: str | None = None, *, by: Any = None
) -> None:
    """Bring a thing to the status that the fact leads to, or raise BrokenInvariant.

    ``to`` chooses where the table leaves a choice; ``by`` is the kind of the order that moves a state.
    """
    choices = _TABLES[type(thing)][thing.status].get(type(fact) if by is None else (type(fact), by), ())
    status: Any = choices[0] if to is None and len(choices) == 1 else to
    if status not in choices:
        what = f"{type(thing).__name__} {getattr(thing, 'id', thing)} is {thing.status}"
        raise BrokenInvariant(f"{what}, and {f.name(fact)} cannot happen to it, or lead to {to}")
    thing.status = status
