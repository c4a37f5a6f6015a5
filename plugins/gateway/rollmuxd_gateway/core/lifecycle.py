"""The life cycles as tables: what may follow what. The core changes a status only through :func:`advance`."""

from enum import StrEnum
from typing import Any, Final

from rollmuxd_gateway.core.model import ReplicaStatus as R
from rollmuxd_gateway.core.model import RequestStatus as Q
from rollmuxd_gateway.core.model import RolloutStatus as O
from rollmuxd_gateway.core.model import SegmentStatus as S

#: a request is queued again whenever it is cut or meets a fault
REQUEST: Final[dict[Q, tuple[Q, ...]]] = {
    Q.QUEUED: (Q.RUNNING, Q.DONE, Q.FAILED),
    Q.RUNNING: (Q.QUEUED, Q.DONE, Q.FAILED),
    Q.DONE: (),
    Q.FAILED: (),
}
SEGMENT: Final[dict[S, tuple[S, ...]]] = {
    S.OPENING: (S.STREAMING, S.ENDED),
    S.STREAMING: (S.ENDED,),
    S.ENDED: (),
}
#: a dead replica comes back when it is registered again, by its owner or since it answers; or it is put to sleep
REPLICA: Final[dict[R, tuple[R, ...]]] = {
    R.OPEN: (R.DRAINING, R.SUSPECT, R.PARKED),
    R.DRAINING: (R.IDLE, R.SUSPECT, R.OPEN),
    R.IDLE: (R.PARKED, R.OPEN, R.SUSPECT),
    R.PARKED: (R.OPEN, R.SUSPECT),
    R.SUSPECT: (R.OPEN, R.DRAINING, R.PARKED, R.DEAD),
    R.DEAD: (R.OPEN, R.PARKED),
}
ROLLOUT: Final[dict[O, tuple[O, ...]]] = {
    O.CLOSED: (O.OPEN,),
    O.OPEN: (O.TAIL, O.SWITCHING, O.CLOSED),
    O.SWITCHING: (O.OPEN, O.CLOSED),
    O.TAIL: (O.DRAINED, O.OPEN, O.CLOSED),
    O.DRAINED: (O.OPEN, O.CLOSED),
}
TABLES: Final[dict[type[StrEnum], dict[Any, tuple[Any, ...]]]] = {Q: REQUEST, S: SEGMENT, R: REPLICA, O: ROLLOUT}


class BrokenInvariant(AssertionError):
    """A change that no life cycle has: a fault of this program."""


def advance(it: Any, to: StrEnum) -> None:
    """Set the status of a request, segment, replica or rollout. Raises BrokenInvariant where the table has no arrow."""
    before = it.status
    if to is before:
        return
    if to not in TABLES[type(to)][before]:
        raise BrokenInvariant(f"{type(it).__name__} {getattr(it, 'id', '')} cannot go from {before} to {to}")
    it.status = to
