"""How to move one job's state: the Residency protocol, as a contract in prose.

The daemon sends each order (load, park, discard of one job's state for one pool on one node) exactly once. There are
two exceptions: the driver's traits say that it is idempotent, or a probe after a restart says that it was not begun. It
never sends two orders for the same state at a time. A call that returns means *done*; it raises NotDone (for certain
not done) or ContactLost (not known). After a park or discard the daemon asks the host's backend what it sees, and
believes only that. So a driver that returns without having freed the GPUs is detected. Calls are cancelled at their
time limit, which counts as ContactLost.
"""

from collections.abc import Mapping
from typing import Any, Protocol, Self, runtime_checkable

from msgspec import Struct

from rollmuxd.core.config import DriverTraits
from rollmuxd.core.ids import Fence, GpuId, HostId, JobId, Millis, NodeId, OrderId, PoolName
from rollmuxd.core.model import OrderKind
from rollmuxd.core.spec import StateSpec
from rollmuxd.spi.backend import Backend


class StateOrder(Struct, frozen=True):
    """Everything a driver needs to know of an order."""

    order: OrderId
    kind: OrderKind
    job: JobId
    run: int
    owner: str
    name: str
    pool: PoolName
    node: NodeId
    host: HostId
    gpus: tuple[GpuId, ...]
    state: StateSpec
    #: processes of the workload that must all do it
    ranks: int
    #: this state has been on this node before
    warm: bool
    #: the job's session: its process, as far as it said
    pid: int
    started: str
    #: reaches the host
    backend: Backend
    #: of a load after a move: the node where the state is parked, and its host. On the same host it is in the very
    #: RAM; on another one a driver with ``traits.copies`` fetches it first
    source: NodeId | None = None
    source_host: HostId | None = None
    #: only grows: an order that is older than the last one about the same state reaches no driver
    stamp: Fence = Fence(0, 0)
    #: the phase in whose slot the state is used, or was used last; empty where that is not known (any more)
    phase: str = ""
    #: what the states of other jobs may leave on each of these GPUs, as was agreed or has been let since
    beside_mb: int = 0
    #: all GPUs of the node: ``gpus`` are fewer where a slot began, or grows, on a part of it
    node_gpus: tuple[GpuId, ...] = ()
    #: when it was issued, in milliseconds since 1970. It only grows too, also over a new journal, whose stamps begin
    #: again. It is for what remembers orders beyond the life of a journal (a host)
    issued_at: Millis = 0


class Probed(Struct, frozen=True):
    """What became of an order: done, certainly not done (``error``), or still not known."""

    known: bool
    done: bool = False
    error: str = ""
    #: False, of an order that is known not to be done: nothing of it was begun, and nothing that was sent before will
    #: begin it. After a restart of the daemon such an order is sent again, where any other has its job quarantined.
    begun: bool = True


class ChannelCommand(Struct, frozen=True):
    """What the ranks of a workload get."""

    order: OrderId
    kind: OrderKind
    pool: PoolName
    node: NodeId
    gpus: tuple[GpuId, ...]
    warm: bool
    #: of a load after a move: the node where the ranks had parked it
    source: NodeId = ""


class RankResult(Struct, frozen=True):
    """What one rank says that it did."""

    rank: int
    ok: bool
    error: str = ""
    seconds: float = 0.0


class Channel(Protocol):
    """The daemon's end of the line that every rank of a workload dials in to (``/v1/channel``)."""

    def ranks(self, job: JobId) -> tuple[int, ...]:
        """The ranks of the job's present session that have dialled in and were heard of lately."""
        ...

    async def tell(self, job: JobId, ranks: int, command: ChannelCommand) -> tuple[RankResult, ...]:
        """Tell all ranks, and wait until each has answered. Cancelling it takes the command back where it was not
        yet fetched. Told twice with one order id, each rank does it once and answers what it answered before.
        """
        ...

    def last(self, job: JobId, order: OrderId) -> tuple[RankResult, ...] | None:
        """What the ranks answered to an earlier order, if it is still known."""
        ...


@runtime_checkable
class TakesOptions(Protocol):
    """What a driver has besides, if jobs say in their states' ``options`` how they are to be moved.

    Jobs that give options to a driver without it are refused.
    """

    #: options that name something to be run on hosts. It runs as the user by which the backend reaches them, so only
    #: admins may give these
    admin_options: frozenset[str]

    def check(self, state: StateSpec) -> None:
        """Raise ValueError, naming option and remedy, for a state that this driver could not move.

        Called once when a job registers, of each state that names this driver, with and without options.
        """
        ...


@runtime_checkable
class Residency(Protocol):
    """Moves the state of jobs that name this driver."""

    traits: DriverTraits

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """Make the driver. Raises ValueError for an option it does not know."""
        ...

    async def load(self, order: StateOrder) -> None:
        """Bring the state onto the GPUs (the first time: make room for it to be built)."""
        ...

    async def park(self, order: StateOrder) -> None:
        """Bring the state to host RAM and free the GPUs, but for the agreed residual memory."""
        ...

    async def discard(self, order: StateOrder) -> None:
        """Drop the state from GPUs and host RAM. Of a state that is not there: done."""
        ...

    async def probe(self, order: StateOrder) -> Probed:
        """What became of an order that was sent before. Only called where ``traits.probes``."""
        ...

    async def close(self) -> None:
        """Close connections; states stay where they are. May be called twice."""
        ...
