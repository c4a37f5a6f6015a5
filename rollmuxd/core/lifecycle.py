"""The life cycles, as tables: what is not in them cannot happen. The diagrams in the docs are drawn from here.

Each table maps a status and the fact that is met in it to the statuses it may lead to. Most facts leave no choice;
where one does, it says which (``JobPlaced.status``). A state's table has the kind of its order beside the fact.
"""

from collections.abc import Mapping
from typing import Final, TypeAlias, TypeVar

from rollmuxd.core import facts as f
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.model import JobStatus, NodeStatus, OrderKind, OrderStatus, SlotStatus, StateStatus

S = TypeVar("S", JobStatus, SlotStatus, StateStatus, NodeStatus, OrderStatus)
StateEvent: TypeAlias = tuple[type[f.Fact], OrderKind | None]

_J = JobStatus
_PLACED: Final = (_J.PROBING, _J.ADMITTED)
_ANY_LIVE: Final[dict[type[f.Fact], tuple[JobStatus, ...]]] = {
    f.JobQuarantined: (_J.QUARANTINED,),
    f.JobLost: (_J.LOST,),
    f.JobEnded: (_J.ENDED,),
}
_PAUSABLE: Final[dict[type[f.Fact], tuple[JobStatus, ...]]] = {**_ANY_LIVE, f.JobPaused: (_J.PAUSED,)}

JOB: Final[Mapping[JobStatus, Mapping[type[f.Fact], tuple[JobStatus, ...]]]] = {
    _J.WAITING: {**_PAUSABLE, f.JobPlaced: _PLACED, f.FillerPlaced: (_J.ADMITTED,)},
    _J.PROBING: {**_PAUSABLE, f.JobPromised: (_J.ADMITTED,), f.JobUnplaced: (_J.WAITING,)},
    _J.ADMITTED: {
        **_PAUSABLE,
        f.JobUnplaced: (_J.WAITING,),
        f.MovePlanned: (_J.ADMITTED,),
        f.MoveBegan: (_J.MOVING,),
        f.MoveAbandoned: (_J.ADMITTED,),
    },
    _J.MOVING: {
        **_PAUSABLE,
        f.JobUnplaced: (_J.WAITING,),
        f.MoveEnded: (_J.ADMITTED,),
        f.MoveAbandoned: (_J.ADMITTED,),
    },
    _J.PAUSED: {**_ANY_LIVE, f.JobResumed: (_J.WAITING, *_PLACED, _J.MOVING), f.JobUnplaced: (_J.PAUSED,)},
    _J.QUARANTINED: {**_ANY_LIVE, f.JobReinstated: (_J.WAITING,)},
    # a new registration is a new run of the same job
    _J.LOST: {f.JobEnded: (_J.ENDED,), f.JobRegistered: (_J.WAITING,)},
    _J.ENDED: {f.JobRegistered: (_J.WAITING,)},
}

_S = SlotStatus
_TAKEN_AWAY: Final[dict[type[f.Fact], tuple[SlotStatus, ...]]] = {
    f.SlotLost: (_S.LOST,),
    f.SlotRevoked: (_S.REVOKED,),
}
_ENDED: Final[dict[type[f.Fact], tuple[SlotStatus, ...]]] = {f.SlotOver: (_S.OVER,)}

SLOT: Final[Mapping[SlotStatus, Mapping[type[f.Fact], tuple[SlotStatus, ...]]]] = {
    _S.QUEUED: {
        f.SlotClaimed: (_S.LOADING,),
        f.NodeLent: (_S.LOADING,),
        f.SlotWithdrawn: (_S.WITHDRAWN,),
    },
    _S.LOADING: {
        **_TAKEN_AWAY,
        f.SlotGranted: (_S.RUNNING,),
        f.SlotFaulted: (_S.FAULTED,),
    },
    _S.RUNNING: {
        **_TAKEN_AWAY,
        f.SlotShrunk: (_S.TAIL,),
        f.SlotGrown: (_S.RUNNING,),
        f.SlotReleased: (_S.RELEASED,),
        f.SlotOverran: (_S.RUNNING,),
        f.YieldAsked: (_S.RUNNING,),
    },
    _S.TAIL: {
        **_TAKEN_AWAY,
        f.SlotShrunk: (_S.TAIL,),
        f.SlotGrown: (_S.RUNNING,),
        f.SlotReleased: (_S.RELEASED,),
        f.SlotOverran: (_S.TAIL,),
    },
    **dict.fromkeys((_S.FAULTED, _S.LOST, _S.REVOKED, _S.RELEASED), _ENDED),
    _S.WITHDRAWN: {},
    _S.OVER: {},
}

_T = StateStatus
_TO_UNKNOWN: Final[dict[StateEvent, tuple[StateStatus, ...]]] = {
    (f.OrderFaulted, None): (_T.UNKNOWN,),
    (f.OrderContactLost, None): (_T.UNKNOWN,),
    (f.StateUnknown, None): (_T.UNKNOWN,),
}

STATE: Final[Mapping[StateStatus, Mapping[StateEvent, tuple[StateStatus, ...]]]] = {
    _T.GONE: {**_TO_UNKNOWN, (f.OrderIssued, OrderKind.LOAD): (_T.LOADING,)},
    _T.LOADING: {**_TO_UNKNOWN, (f.OrderEnded, OrderKind.LOAD): (_T.LOADED,)},
    _T.LOADED: {
        **_TO_UNKNOWN,
        (f.OrderIssued, OrderKind.LOAD): (_T.LOADING,),  # onto more GPUs, where its slot grows
        (f.OrderIssued, OrderKind.PARK): (_T.PARKING,),
        (f.OrderIssued, OrderKind.DISCARD): (_T.DISCARDING,),
    },
    _T.PARKING: {**_TO_UNKNOWN, (f.OrderEnded, OrderKind.PARK): (_T.PARKED,)},
    _T.PARKED: {
        **_TO_UNKNOWN,
        (f.OrderIssued, OrderKind.LOAD): (_T.LOADING,),
        (f.OrderIssued, OrderKind.DISCARD): (_T.DISCARDING,),
    },
    _T.DISCARDING: {**_TO_UNKNOWN, (f.OrderEnded, OrderKind.DISCARD): (_T.GONE,)},
    _T.UNKNOWN: {**_TO_UNKNOWN, (f.StateObserved, None): (_T.LOADED, _T.PARKED, _T.GONE)},
}

_N = NodeStatus
_FROM_ANY: Final[dict[type[f.Fact], tuple[NodeStatus, ...]]] = {
    f.NodeQuarantined: (_N.QUARANTINED,),
    f.NodeLost: (_N.LOST,),
    f.NodeUnknown: (_N.UNKNOWN,),
}
_IN_QUESTION: Final[dict[type[f.Fact], tuple[NodeStatus, ...]]] = {
    f.NodeUnknown: (_N.UNKNOWN,),
    f.NodeUndrained: (_N.UNKNOWN,),
}
_DRAINABLE: Final[dict[type[f.Fact], tuple[NodeStatus, ...]]] = {**_FROM_ANY, f.NodeDraining: (_N.DRAINING,)}

NODE: Final[Mapping[NodeStatus, Mapping[type[f.Fact], tuple[NodeStatus, ...]]]] = {
    _N.UNKNOWN: {**_DRAINABLE, **_IN_QUESTION, f.NodeUp: (_N.UP,), f.NodeOccupied: (_N.OCCUPIED,)},
    _N.UP: {**_DRAINABLE, f.NodeOccupied: (_N.OCCUPIED,)},
    _N.OCCUPIED: {**_DRAINABLE, f.NodeUp: (_N.UP,)},
    _N.DRAINING: {**_FROM_ANY, **_IN_QUESTION, f.NodeDrained: (_N.DRAINED,)},
    _N.DRAINED: {**_FROM_ANY, **_IN_QUESTION},
    _N.QUARANTINED: {**_IN_QUESTION, f.NodeLost: (_N.LOST,)},
    _N.LOST: _IN_QUESTION,
}

_O = OrderStatus
ORDER: Final[Mapping[OrderStatus, Mapping[type[f.Fact], tuple[OrderStatus, ...]]]] = {
    _O.ISSUED: {
        f.OrderEnded: (_O.DONE,),
        f.OrderFaulted: (_O.FAILED,),
        f.OrderContactLost: (_O.LOST_CONTACT,),
    },
    _O.LOST_CONTACT: {f.OrderEnded: (_O.DONE,), f.OrderFaulted: (_O.FAILED,)},
    _O.DONE: {},
    _O.FAILED: {},
}


def next_status(
    table: Mapping[S, Mapping[type[f.Fact], tuple[S, ...]]], now: S, fact: f.Fact, thing: str, to: S | None = None
) -> S:
    """Where the fact leads, or BrokenInvariant. ``to`` chooses where the table leaves a choice."""
    choices = table[now].get(type(fact))
    if choices is None:
        raise BrokenInvariant(f"{thing} is {now}, and {f.name(fact)} cannot happen to it")
    if to is None and len(choices) == 1:
        return choices[0]
    if to in choices:
        return to
    raise BrokenInvariant(f"{thing} is {now}, and {f.name(fact)} cannot lead to {to}")


def next_state_status(
    now: StateStatus, fact: f.Fact, kind: OrderKind | None, thing: str, to: StateStatus | None = None
) -> StateStatus:
    """The same for a state on a node, whose table has the order's kind beside the fact."""
    choices = STATE[now].get((type(fact), kind))
    if choices is None or (to is not None and to not in choices):
        raise BrokenInvariant(f"{thing} is {now}, and {f.name(fact)}{f' ({kind})' if kind else ''} cannot happen to it")
    return to if to is not None else choices[0]
