"""What the checker writes down: its own books, and the few entries that several of its modules make."""

from collections.abc import Callable
from typing import Any, ClassVar, Final, NoReturn, TypeAlias

from msgspec import Struct, field

from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Fence, GpuId, GroupId, HostId, JobId, Millis, NodeId, OrderId, PoolName, SessionId, SlotId
from rollmuxd.core.model import Dispatch, OrderKind, PlannedTurn
from rollmuxd.core.spec import JobSpec

#: what is done on an input or a fact, by its kind
Heeded: TypeAlias = dict[type, Callable[[Any, Any], None]]
#: inputs between two looks at who waits for too long
SWEEP_EVERY: Final = 1_000


class Turn(Struct, gc=False):
    """A place in a schedule, as the checker counts it."""

    job: JobId
    phase: str
    #: how often it was passed
    rotation: int
    once: bool = False


class Party(Struct):
    """A group."""

    jobs: list[JobId] = field(default_factory=list)
    #: who is to move here
    coming: dict[JobId, None] = field(default_factory=dict)
    nodes: dict[NodeId, int] = field(default_factory=dict)
    schedule: list[Turn] = field(default_factory=list)
    dispatch: Dispatch = Dispatch.SCHEDULE
    #: per node, the schedule indices of the turns that claim it; None: to be derived anew
    on: dict[NodeId, list[int]] | None = None
    #: when its members, or what is known of its nodes, changed last: waits are counted from here
    disturbed_at: Millis = 0


class Stay(Struct):
    """What one phase of a placed job claims."""

    nodes: tuple[NodeId, ...]
    gpus: tuple[GpuId, ...]
    #: of its states: the key, and the node
    keys: tuple[tuple[str, NodeId], ...]
    pools: tuple[PoolName, ...]
    min_gpus: int
    #: the longest that it is planned to run, or ran
    longest_ms: Millis


class Going(Struct):
    """Where a job is to go."""

    group: GroupId
    nodes: tuple[NodeId, ...]
    stays: dict[str, Stay]
    planned_at: Millis
    #: the input upon which it was planned
    upon: i.Input
    #: of its own group, once it has moved; None: its turns are in the other group's schedule already
    schedule: tuple[PlannedTurn, ...] | None = None
    #: given up, it counts as a move; not one off a drained node that has not begun
    counts: bool = True


class Kept(Struct):
    """RAM, and left-overs on GPUs, that are a job's: by the keys of its states."""

    ram: dict[str, tuple[HostId, int]] = field(default_factory=dict)
    #: nodes that it moved away from
    left: dict[NodeId, None] = field(default_factory=dict)
    going: Going | None = None
    moved_at: Millis | None = None
    #: when plans began to reckon with other times of its phases
    drifted_at: Millis | None = None
    #: pools whose loads and parks are in plans as they were seen
    moves_seen: set[PoolName] = field(default_factory=set)
    #: moves that were abandoned in the decision that planned them, one after the other
    void: int = 0
    #: of each state that was loaded: where it was loaded first, before moves, and when a slot left it as it is
    seat: dict[str, str] = field(default_factory=dict)
    used: dict[str, Millis] = field(default_factory=dict)
    #: and those that were loaded elsewhere since
    gone_on: dict[str, None] = field(default_factory=dict)


class Member(Struct):
    """A run of a job."""

    spec: JobSpec
    run: int
    #: waiting, placed, moving, paused, quarantined, lost, ended
    status: str = "waiting"
    #: where a pause returns to
    resume_to: str = "waiting"
    session: SessionId | None = None
    group: GroupId | None = None
    nodes: tuple[NodeId, ...] = ()
    kept: Kept = field(default_factory=Kept)
    stays: dict[str, Stay] = field(default_factory=dict)
    queued: SlotId | None = None
    holding: SlotId | None = None
    #: the longest that one of its orders took
    order_ms: Millis = 0
    status_since: Millis = 0


class Asked(Struct):
    """A slot, from the request to its end."""

    job: JobId
    session: SessionId
    phase: str
    request_id: str
    side: bool
    #: queued, loading, running, tail, released, taken
    status: str
    #: since when it waits without anything to excuse it
    since: Millis
    queued_at: Millis
    gpus: tuple[GpuId, ...] = ()
    claimed: tuple[GpuId, ...] = ()
    fence: Fence | None = None
    granted_at: Millis = 0
    #: of a filler's: when it has to have given way
    yield_by: Millis | None = None


class Place(Struct):
    """A node."""

    host: HostId
    gpus: tuple[GpuId, ...]
    pools: tuple[PoolName, ...]
    group: GroupId | None = None
    #: jobs that are placed on it
    users: int = 0
    #: MB that each parked state of it may leave on each GPU, by the state's key
    left: dict[str, int] = field(default_factory=dict)
    #: when what is on it was last to change
    touched_at: Millis = -1
    #: GPUs of it are known not to be clean
    not_clean: bool = False


class Told(Struct, gc=False):
    """An order without a final result."""

    kind: OrderKind
    key: str
    job: JobId
    run: int
    node: NodeId
    issued_at: Millis
    slot: SlotId | None
    lost: bool = False


class Records:
    """What was said and told so far. Every module of the checker reads it, and writes in it."""

    #: what is done on each kind of input and fact; a room names its own, and has those of the rooms below it, too
    _inputs: ClassVar[Heeded] = {}
    _facts: ClassVar[Heeded] = {}

    def __init_subclass__(cls) -> None:
        for name in ("_inputs", "_facts"):
            rooms = [vars(room).get(name, {}) for room in reversed(cls.__mro__)]
            setattr(cls, name, {kind: heed for room in rooms for kind, heed in room.items()})

    def __init__(self, config: Config, *, cap: int | None = None, excused_ms: Millis = 0) -> None:
        self.config, self.cap, self.excused_ms = config, cap, excused_ms
        self.now: Millis = 0
        self.given: i.Input = i.Tick()
        self.members: dict[JobId, Member] = {}
        self.runs: dict[JobId, int] = {}
        self.groups: dict[GroupId, Party] = {}
        self.places: dict[NodeId, Place] = {}
        self.host_nodes: dict[HostId, list[NodeId]] = {}
        self.ram: dict[HostId, list[int]] = {}  # reserved, budget
        self.slots: dict[SlotId, Asked] = {}
        self.never: dict[SlotId, str] = {}
        self.detached: dict[SlotId, Millis] = {}
        #: living sessions, and when each was heard of
        self.heard: dict[SessionId, Millis] = {}
        #: who holds each GPU, and whose bytes may be on it
        self.held: dict[GpuId, SlotId] = {}
        self.dirty_by: dict[GpuId, JobId] = {}
        #: nodes on which nothing may be started
        self.out: dict[NodeId, str] = {}
        self.boots: dict[HostId, str] = {}
        #: nodes of which the present look began before they were last touched
        self.stale: tuple[NodeId, ...] = ()
        self.orders: dict[OrderId, Told] = {}
        #: issued in this decision; closed in it by what was seen
        self.untold: dict[OrderId, None] = {}
        self.closed: dict[OrderId, None] = {}
        #: where each state is, and for what is loaded on which GPUs
        self.kept: dict[str, str] = {}
        self.loaded_on: dict[str, tuple[GpuId, ...]] = {}
        self.order_of: dict[str, OrderId] = {}
        #: loads that fetch a state from elsewhere
        self.fetched: dict[OrderId, str] = {}
        self.fence = Fence(0, 0)
        #: when each host was last out of reach, or seen with bytes that should be gone
        self.trouble_at: dict[HostId, Millis] = {}
        self.started_at: Millis = 0
        self._until_sweep = SWEEP_EVERY

    def _broken(self, promise: str, what: str) -> NoReturn:
        """A promise is broken, and by what."""
        raise BrokenInvariant(f"{promise}: {what}")

    def _disturbed(self, node: NodeId) -> None:
        party = self.groups.get(self.places[node].group or "")
        if party is not None:
            party.disturbed_at = self.now

    def _touch(self, stay: Stay | None, gpus: tuple[GpuId, ...]) -> None:
        """What is on these GPUs is to change."""
        if stay is not None:
            whole = gpus == stay.gpus
            for node in stay.nodes:
                place = self.places[node]
                if whole or any(gpu in gpus for gpu in place.gpus):
                    place.touched_at = self.now
