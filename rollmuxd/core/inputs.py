"""What comes in: what clients and operators ask, and what backends report.

An input is decided upon by :meth:`Scheduler.handle <rollmuxd.core.scheduler.Scheduler.handle>`, which answers with
facts and effects or raises a :class:`~rollmuxd.core.errors.Rejected`. Inputs are not journalled: with a new policy, a
replay of inputs could give GPUs to other jobs than before.
"""

from msgspec import Struct

from rollmuxd.core.causes import Cause
from rollmuxd.core.facts import Audited
from rollmuxd.core.ids import Fence, GpuId, HostId, JobId, LaunchId, Millis, NodeId, OrderId, SessionId, SlotId
from rollmuxd.core.model import HostSpec, NodeSpec
from rollmuxd.core.spec import JobSpec


class Input(Struct, frozen=True):
    """What comes in."""


# ---- what clients and operators ask ------------------------------------------------------------------------------


class RegisterJob(Input, frozen=True):
    """Register a job, or a new run of it. The same idempotency key is the same run and changes nothing."""

    owner: str
    user: str
    spec: JobSpec
    idempotency_key: str = ""
    #: end a run whose session is still alive
    replace: bool = False


class EndJob(Input, frozen=True):
    """End a job and free all it held. A process that ends its own says as which session, or could end its successor."""

    job: JobId
    by: str
    reason: str = ""
    session: SessionId | None = None
    #: it has come to its own end
    finished: bool = False


class PauseJob(Input, frozen=True):
    """Let the job's running slot end, then keep it waiting."""

    job: JobId
    by: str


class ResumeJob(Input, frozen=True):
    """Let a paused job resume; or take a quarantined one back into the queue of waiting jobs."""

    job: JobId
    by: str
    quarantined: bool = False


class OpenSession(Input, frozen=True):
    """A client process of a run says that it is there. It fences an older one of the same run."""

    job: JobId
    idempotency_key: str = ""
    pid: int = 0
    host: str = ""
    started: str = ""


class CloseSession(Input, frozen=True):
    """A client process leaves in good order, its job stays."""

    session: SessionId


class GiveBack(Input, frozen=True):
    """A client process was interrupted in a call. Whatever was heard of it, its session gives all back."""

    session: SessionId


class Heartbeat(Input, frozen=True):
    """A client process lives; it may say how far its slot's work is."""

    session: SessionId
    slot: SlotId | None = None
    done: int = 0
    total: int = 0


class ProcessGone(Input, frozen=True):
    """The last beat of a session: its process has ended, and did not close it."""

    session: SessionId
    pid: int
    started: str


class RequestSlot(Input, frozen=True):
    """A job asks for its turn. The same request id is the same slot: that attaches it again."""

    job: JobId
    session: SessionId
    phase: str
    request_id: str


class DetachSlot(Input, frozen=True):
    """No call of this request is open any more. It keeps its place for the re-attach time, and is not granted then."""

    slot: SlotId


class WithdrawSlot(Input, frozen=True):
    """The request is taken back."""

    slot: SlotId


class GpuObservation(Struct, frozen=True):
    """What a backend saw on one GPU."""

    gpu: GpuId
    used_mb: int
    #: processes on it, for people to read: "pid 4711 python"
    processes: tuple[str, ...] = ()


class NextRequest(Struct, frozen=True):
    """The request that a release carries along."""

    phase: str
    request_id: str


class ReleaseSlot(Input, frozen=True):
    """The phase is over. ``seen`` is what the backend saw on the slot's GPUs just before, where it was asked."""

    slot: SlotId
    fence: Fence
    seen: tuple[GpuObservation, ...] = ()
    next: NextRequest | None = None
    #: figures that the workload measured (tokens, reward, ...), kept with the fact
    measured: dict[str, float] = {}


class ShrinkSlot(Input, frozen=True):
    """The job gave GPUs of its running slot back and keeps these."""

    slot: SlotId
    fence: Fence
    keep: tuple[GpuId, ...]
    seen: tuple[GpuObservation, ...] = ()


class GrowSlot(Input, frozen=True):
    """The job takes the GPUs back that it gave back before, as it was offered."""

    slot: SlotId
    fence: Fence


class RevokeSlot(Input, frozen=True):
    """An operator ends a slot now; its GPUs are given on when they were verified clean."""

    slot: SlotId
    by: str
    reason: str = ""


class HostEnds(Input, frozen=True):
    """When a host goes away by itself; None: at no known time."""

    host: HostId
    ends_at: Millis | None


class DrainNode(Input, frozen=True):
    """Nothing new on this node; it is drained when its slots have ended and its GPUs are clean."""

    node: NodeId
    by: str
    #: end the jobs that are pinned to it
    evict: bool = False


class UndrainNode(Input, frozen=True):
    """The node may be used again."""

    node: NodeId
    by: str


class DeclareClean(Input, frozen=True):
    """An operator declares that nothing of any job is left on the node's GPUs. Audited."""

    node: NodeId
    by: str
    reason: str = ""


class Audit(Input, frozen=True):
    """What an operator did just now, to be written down beside it; or a login that failed. It gets the input's time."""

    fact: Audited


# ---- what backends report ----------------------------------------------------------------------------------------


class Start(Input, frozen=True):
    """The daemon starts: what it is configured to reach; the rest as in the fact ``DaemonStarted``."""

    hosts: tuple[HostSpec, ...]
    nodes: tuple[NodeSpec, ...]
    incarnation: int = 1
    crashed: bool = False
    lost: Cause | None = None
    away_ms: Millis = 0


class HostObserved(Input, frozen=True):
    """A backend looked at a host. What was to change on a GPU since the look began was not seen.

    Unknown is never free: what is held on a host that could not be reached stays held.
    """

    host: HostId
    gpus: tuple[GpuObservation, ...] = ()
    boot_id: str = ""
    #: when the look began, on the clock of ``now``; None: just now
    since: Millis | None = None
    #: GPUs that are not among them because they cannot be read, and why
    unread: dict[GpuId, str] = {}
    #: why the host could not be reached; None: it was
    unreachable: Cause | None = None


class OrderDone(Input, frozen=True):
    """The driver did it. ``seen`` is what the backend saw on the GPUs afterwards."""

    order: OrderId
    seen: tuple[GpuObservation, ...] = ()


class OrderFailed(Input, frozen=True):
    """The driver says that it did not do it."""

    order: OrderId
    error: Cause


class OrderNotBegun(Input, frozen=True):
    """A probe shows that the order was not begun, and that no earlier call will begin it."""

    order: OrderId


class OrderLostContact(Input, frozen=True):
    """It is unknown whether it was done: the time limit passed or the connection broke."""

    order: OrderId
    error: Cause


class Launched(Input, frozen=True):
    """A backend has started a job's process; or not, or that is unknown: what came of it is ended before the next."""

    launch: LaunchId
    pid: int = 0
    started: str = ""
    error: Cause | None = None


class Tick(Input, frozen=True):
    """Time has passed."""


class Stalled(Input, frozen=True):
    """The daemon's loop was late: clients could not renew their leases, so every lease is renewed in full."""

    late_ms: int
