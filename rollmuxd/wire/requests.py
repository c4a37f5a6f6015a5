"""Bodies that clients send. An unknown field is refused by name."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

# ``(?!\n)``: in Python's regular expressions ``$`` also matches before a line feed at the end.
Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$(?!\n)", description="letters, digits, . _ -")]
#: ``incarnation.number``
FenceText = Annotated[str, Meta(pattern=r"^[0-9]{1,18}\.[0-9]{1,18}$(?!\n)", description="incarnation.number")]
Key = Annotated[str, Meta(max_length=200)]
#: what a process can be given: no byte of value 0
Argument = Annotated[str, Meta(max_length=4096, pattern="^[^\\x00]*$")]
Variable = Annotated[str, Meta(max_length=256, pattern="^[^=\\x00]+$")]
#: within what JSON readers that use doubles hold exactly; every integer of a body has bounds
Integer = Annotated[int, Meta(ge=-(2**53), le=2**53)]
Seconds = Annotated[float, Meta(ge=0, le=10_000_000)]
Gigabytes = Annotated[float, Meta(ge=0, le=1_000_000)]


class Request(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of all bodies that clients send."""


class PhaseBody(Request, frozen=True):
    """A phase of the cycle, or a side phase."""

    name: Name
    #: pools whose pinned GPUs it needs, all at once
    pools: Annotated[list[Name], Meta(min_length=1, max_length=8)]
    #: planned time in its slot; leave out to have it measured
    seconds: Seconds | None = None
    #: the job's own time before it asks for this phase
    gap_s: Seconds = 0
    #: fewest GPUs it can start, or end its tail, on; 0: one engine (``engine_gpus`` of its pool's state), or all
    min_gpus: Annotated[int, Meta(ge=0, le=100_000)] = 0
    #: of a side phase such as eval or save: it comes once in so many iterations at most; ``seconds`` is at worst then
    every: Annotated[int, Meta(ge=0, le=1_000_000)] = 0
    #: how its nodes talk, for circuits of an optical switch. ``mesh`` is each to each, ``pairs`` nodes of its first
    #: pool with those of its second; left out: no circuits
    traffic: Literal["ring", "mesh", "pairs"] | None = None


class WantBody(Request, frozen=True):
    """How much of a pool: whole nodes, at least so many GPUs, or nodes by name."""

    nodes: Annotated[int, Meta(ge=1, le=10_000)] = 1
    gpus: Annotated[int, Meta(ge=0, le=100_000)] = 0
    named: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(max_length=10_000)] = []


class StateBody(Request, frozen=True):
    """What the job keeps on GPUs of a pool."""

    #: on each GPU while loaded, and while parked (left out: as the daemon is configured)
    gpu_gb: Gigabytes = 0
    residual_gb: Gigabytes | None = None
    #: of the host of each node
    ram_gb: Gigabytes = 0
    driver: Name = "channel"
    load_s: Seconds = 0
    park_s: Seconds = 0
    #: it is several engines (replicas), each on so many GPUs of a node, in their order; 0: one thing on all of them
    engine_gpus: Annotated[int, Meta(ge=0, le=100_000)] = 0
    #: what the driver has to know besides: see its own documentation. Kept in the journal: no secrets here
    options: Annotated[
        dict[Name, Argument | bool | Integer | float | Annotated[list[Argument], Meta(max_length=256)]],
        Meta(max_length=32),
    ] = {}


class LaunchBody(Request, frozen=True):
    """The process that the daemon starts for the job, once it has its place. Kept in the journal: no secrets here."""

    argv: Annotated[list[Argument], Meta(min_length=1, max_length=256)]
    cwd: Argument = ""
    env: Annotated[dict[Variable, Argument], Meta(max_length=256)] = {}


class AsynchronousBody(Request, frozen=True):
    """The job's rollouts run on GPUs of its own, also while it waits."""

    #: in what time they make one batch when nothing holds them up; none: it is measured
    pace_s: Annotated[float, Meta(ge=0.001, le=10_000_000)] | None = None
    #: batches that may be begun beyond the one that is trained; 0: the next is begun when the slot is granted
    ahead: Annotated[int, Meta(ge=0, le=1_000)] = 1


class FillerBody(Request, frozen=True):
    """The job works on one node while no other job is due there, and gives way when it is asked to."""

    #: from that moment until it has given its slot back; parking what it has loaded comes after that
    yield_s: Annotated[float, Meta(ge=0.1, le=3600)] = 2.0
    #: a loan that would give it less than this is not begun
    min_run_s: Annotated[float, Meta(ge=0.1, le=86_400)] = 10.0


class RegisterBody(Request, frozen=True):
    """``POST /v1/jobs``."""

    name: Name
    #: the cycle, in order
    phases: Annotated[list[PhaseBody], Meta(min_length=1, max_length=16)]
    #: by pool
    wants: Annotated[dict[Name, WantBody], Meta(min_length=1, max_length=8)]
    #: by pool
    states: Annotated[dict[Name, StateBody], Meta(max_length=8)] = {}
    side: Annotated[list[PhaseBody], Meta(max_length=8)] = []
    #: default: as the daemon is configured
    slo: Annotated[float, Meta(ge=1.0, le=1000.0)] | None = None
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0
    #: default: as the daemon is configured
    on_loss: Literal["kill", "hold", "relaunch"] | None = None
    movable: Literal["no", "warm", "relaunch"] = "no"
    #: default: lazy for one rank, at_release for several
    park: Literal["lazy", "at_release"] | None = None
    if_unmet: Literal["best_effort", "wait", "end"] = "best_effort"
    colocate: bool = False
    ranks: Annotated[int, Meta(ge=1, le=10_000)] = 1
    idempotency_key: Key = ""
    replace: bool = False
    #: admins only, and only on hosts that are configured to run processes
    launch: LaunchBody | None = None
    #: its one phase is training; none: its phases follow each other
    asynchronous: AsynchronousBody | None = None
    #: it works in the idle time of others, in one phase named ``filler``; none: it is no filler
    filler: FillerBody | None = None


class SessionBody(Request, frozen=True):
    """``POST /v1/jobs/{job}/sessions``."""

    idempotency_key: Key = ""
    pid: Annotated[int, Meta(ge=0, le=2_147_483_647)] = 0
    host: Annotated[str, Meta(max_length=255)] = ""
    #: start time of the process, as its host's kernel gives it
    started: Annotated[str, Meta(max_length=100)] = ""


class GoneBody(Request, frozen=True):
    """The process of a session, which has ended. As it said itself when the session was opened."""

    pid: Annotated[int, Meta(ge=0, le=2**31)]
    started: Annotated[str, Meta(min_length=1, max_length=100)]


class HeartbeatBody(Request, frozen=True):
    """``POST /v1/sessions/{session}/heartbeat``."""

    slot: Annotated[str, Meta(max_length=100)] | None = None
    done: Annotated[int, Meta(ge=0, le=2**53)] = 0
    total: Annotated[int, Meta(ge=0, le=2**53)] = 0
    #: hold the answer back for up to this long, until the directives of ``slot`` are others than the ones of ``tag``
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 0
    tag: Annotated[str, Meta(max_length=100)] = ""
    #: the last beat: the process has ended without closing its session
    gone: GoneBody | None = None


class SlotBody(Request, frozen=True):
    """``POST /v1/jobs/{job}/slots``."""

    phase: Name
    request_id: Annotated[str, Meta(min_length=1, max_length=200)]
    session: Annotated[str, Meta(min_length=1, max_length=100)]
    #: block for up to this long
    wait_s: Annotated[float, Meta(ge=0, le=300)] = 0


class NextBody(Request, frozen=True):
    """The request that a release carries along."""

    phase: Name
    request_id: Annotated[str, Meta(min_length=1, max_length=200)]


class ReleaseBody(Request, frozen=True):
    """``POST /v1/slots/{slot}/release``."""

    fence: FenceText
    next: NextBody | None = None
    measured: Annotated[dict[Name, float], Meta(max_length=32)] = {}


class ShrinkBody(Request, frozen=True):
    """``POST /v1/slots/{slot}/shrink``: the GPUs that the slot keeps."""

    fence: FenceText
    keep: Annotated[list[Annotated[str, Meta(max_length=200)]], Meta(min_length=1, max_length=100_000)]


class GrowBody(Request, frozen=True):
    """``POST /v1/slots/{slot}/grow``: the offer is taken."""

    fence: FenceText


class ReasonBody(Request, frozen=True):
    """Operator calls that may carry a reason (revoke, end, declare-clean)."""

    reason: Annotated[str, Meta(max_length=1000)] = ""


class EndBody(Request, frozen=True):
    """``DELETE /v1/jobs/{job}``."""

    reason: Annotated[str, Meta(max_length=1000)] = ""
    #: of the process that ends its own job: 409 if another has taken its place
    session: Annotated[str, Meta(min_length=1, max_length=100)] | None = None
    #: the run that is to end: 409 if another has taken its place
    run: Annotated[int, Meta(ge=1, le=2**53)] | None = None
    #: it has come to its own end: it was neither interrupted nor has it failed
    finished: bool = False


class DrainBody(Request, frozen=True):
    """``POST /v1/nodes|hosts/{id}/drain``."""

    evict: bool = False
    reason: Annotated[str, Meta(max_length=1000)] = ""


class KeyBody(Request, frozen=True):
    """``POST /v1/keys``."""

    owner: Name
    user: Name
    role: Literal["admin", "lead", "user", "viewer"] = "user"
    #: seconds after which it expires; left out: it does not
    expires_s: Annotated[float, Meta(gt=0, le=315_360_000)] | None = None


class ResultBody(Request, frozen=True):
    """``POST /v1/channel/{job}/results``: what a rank did. Repeated until it was acknowledged."""

    session: Annotated[str, Meta(min_length=1, max_length=100)]
    rank: Annotated[int, Meta(ge=0, lt=10_000)]
    order: Annotated[str, Meta(max_length=100)]
    ok: bool
    error: Annotated[str, Meta(max_length=10_000)] = ""
    seconds: Seconds = 0
