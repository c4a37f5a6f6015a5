"""Answers that say more than those of :mod:`rollmuxd.wire.answers`: what was seen on GPUs, why jobs stay on a node."""

from msgspec import field

from rollmuxd.wire import answers as wire


class GpuView(wire.GpuView, frozen=True):
    """One GPU: ``holder`` holds it, ``dirty_by`` is whose bytes may still be on it; and what was seen there last."""

    #: processes that have memory there, as the backend names them; none where jobs sit of which the caller may not know
    processes: list[str] = field(default_factory=list)
    #: when memory and processes were seen; null: not since the daemon was started
    observed_at: str | None = None


class PinnedJob(wire.Answer, frozen=True):
    """A job that is placed on a node; named to callers that may see it."""

    job: str
    name: str = ""


class NodeView(wire.NodeView, frozen=True, kw_only=True):
    """One node."""

    gpus: list[GpuView]  # type: ignore[assignment]  # narrower, and only ever read
    #: memory of each GPU; and what parked states, or states loaded beside others, may occupy of it
    gpu_gb: float = 0.0
    residual_gb: float = 0.0
    #: jobs that are placed on it; while it is drained they get no slot there until they are moved, or it is used again
    jobs: list[PinnedJob] = field(default_factory=list)


class NodePage(wire.Answer, frozen=True):
    """A page of nodes."""

    items: list[NodeView]
    next: str | None = None


class HostView(wire.HostView, frozen=True, kw_only=True):
    """One host, and what of its RAM is reserved for parked states."""

    #: jobs that are placed on its nodes
    jobs: list[PinnedJob] = field(default_factory=list)


class HostPage(wire.Answer, frozen=True):
    """A page of hosts."""

    items: list[HostView]
    next: str | None = None


class OverviewLists(wire.Answer, frozen=True):
    """The first page of each list; of slots, if they were asked for."""

    pools: wire.PoolPage
    nodes: NodePage
    hosts: HostPage
    groups: wire.GroupPage
    jobs: wire.JobPage
    slots: wire.SlotPage | None = None


class Overview(wire.Answer, frozen=True):
    """The caller, and the state of everything; ``lists`` null: unchanged since the caller got this ``tag``."""

    me: wire.MeView
    tag: str
    lists: OverviewLists | None = None
