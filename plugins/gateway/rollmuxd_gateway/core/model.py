"""What the gateway remembers: requests, their segments, replicas, and the rollout that is under way."""

from enum import StrEnum
from typing import Any

from msgspec import Struct, field

from rollmuxd_gateway.core.arrays import Floats, Ids, no_floats, no_ids


class Config(Struct, frozen=True, kw_only=True):
    """The rules of one gateway, as far as they decide something."""

    #: tries of one request before it fails
    attempts: int = 5
    #: milliseconds without a token after which a request is continued elsewhere
    stall_ms: int = 60_000
    #: deaths of engines that one request may be blamed for before it fails; one fewer, but two, if it was alone there
    poison_deaths: int = 3
    #: tokens after the place of a death with which a request is cleared of it; more than an engine sends at once
    clear_tokens: int = 32
    #: milliseconds that a request waits for a replica
    no_replica_ms: int = 600_000
    #: tokens of moved requests that one target may prefill at the same time
    max_prefill_tokens: int = 16_384
    #: whether a response may have tokens of several weight versions (asynchronous training)
    mix_versions: bool = False
    #: "release": give replicas back in the tail; "keep": keep them to the end
    tail: str = "release"
    #: responses of one rollout; 0: learned from the rollouts before
    total: int = 0
    #: whether the rung may change within a rollout, and milliseconds of a change before one has been measured
    in_step: bool = False
    switch_ms: int = 4_520


class RequestStatus(StrEnum):
    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class SegmentStatus(StrEnum):
    OPENING = "opening"
    STREAMING = "streaming"
    ENDED = "ended"


class ReplicaStatus(StrEnum):
    OPEN = "open"
    DRAINING = "draining"
    IDLE = "idle"
    PARKED = "parked"
    SUSPECT = "suspect"
    DEAD = "dead"


class RolloutStatus(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    #: its requests have left one rung, and the next one is not awake yet
    SWITCHING = "switching"
    TAIL = "tail"
    DRAINED = "drained"


class Segment(Struct):
    """A stretch of one response that one replica generated: tokens ``start`` to ``end``."""

    replica: str
    start: int
    #: why it began: "first", "shrink", "switch", "rebalance", "fault", "stall", "moved"
    why: str
    status: SegmentStatus = SegmentStatus.OPENING
    end: int = 0
    #: version of the weights that generated it
    weights: str = ""
    #: when it was opened and when it ended
    began: int = 0
    ended: int = 0


class Request(Struct):
    """One response: a prompt, how to sample, and what was generated so far."""

    id: str
    #: the HTTP call that waits for it, and its place there
    call: str
    index: int
    #: samples of one prompt share a group
    group: str
    #: ids of the prompt; None: only its text is known
    prompt: Ids | None
    text: str | None
    #: sampling parameters under vLLM's names, without ``n``, ``stream`` and ``model``
    params: dict[str, Any]
    model: str = ""
    #: tokens at most; None: as many as the engine allows
    max_tokens: int | None = None
    #: by which names its client knows it, and may abort it
    client_ids: tuple[str, ...] = ()
    #: the body of a call that is passed on as it is (chat, images): never continued, only begun again
    opaque: dict[str, Any] | None = None
    path: str = ""
    #: whether the client gets tokens as they come
    streamed: bool = False
    want_text: bool = False
    arrived: int = 0

    status: RequestStatus = RequestStatus.QUEUED
    #: number of the present segment, and its fence
    k: int = -1
    replica: str = ""
    segments: list[Segment] = field(default_factory=list)
    ids: Ids = field(default_factory=no_ids)
    logprobs: Floats = field(default_factory=no_floats)
    #: of each token the alternatives, where they were asked for: ``token_id:N``, or its text, to log-probability
    top: list[dict[str, float] | None] = field(default_factory=list)
    #: of each token its text, where that was asked for and the engine says it
    names: list[str] = field(default_factory=list)
    #: (tokens up to here, text) of each chunk of the present segment
    texts: list[tuple[int, str]] = field(default_factory=list)
    #: what else the engine said once, in the first segment or the last
    extra: dict[str, Any] = field(default_factory=dict)
    #: tokens that were handed to the client
    delivered: int = 0
    finish: str = ""
    stop_reason: Any = None
    #: tokens of the prompt, as an engine counts them that does not say which
    counted: int | None = None
    #: HTTP status and body of a failure
    error: tuple[int, Any] | None = None
    #: what its tokens came from: version of the weights, kind of engine, kind of log-probabilities
    weights: str = ""
    engine: str = ""
    logprobs_mode: str = ""
    attempts: int = 0
    moves: int = 0
    #: engines that died while it was live there, at about the same place
    deaths: int = 0
    #: tokens that it had at its last fault
    fell_at: int = 0
    #: the replica on which it met a fault that is not explained yet
    blames: str = ""
    avoid: str = ""
    target: str = ""
    last_token: int = 0
    queued_at: int = 0
    why: str = "first"

    @property
    def over(self) -> bool:
        """Whether it has ended."""
        return self.status is RequestStatus.DONE or self.status is RequestStatus.FAILED

    @property
    def prompt_tokens(self) -> int:
        """Length of the prompt; a guess where only its text is known, and no engine has said it."""
        if self.prompt is not None:
            return len(self.prompt)
        return len(self.text or "") // 3 if self.counted is None else self.counted

    @property
    def context(self) -> int:
        """Tokens that it has in a KV cache."""
        return self.prompt_tokens + len(self.ids)

    def keep(self, count: int) -> None:
        """Forget what was generated after so many tokens."""
        del self.ids[count:], self.logprobs[count:], self.top[count:], self.names[count:]

    @property
    def prefilling(self) -> bool:
        """Whether its segment has brought nothing yet."""
        return bool(self.segments) and self.segments[-1].status is SegmentStatus.OPENING


class Replica(Struct):
    """One engine, and what is live there."""

    id: str
    url: str
    #: "vllm" or "sglang"
    engine: str = "vllm"
    gpus: tuple[str, ...] = ()
    #: its degree of tensor parallelism
    tp: int = 1
    status: ReplicaStatus = ReplicaStatus.OPEN
    #: version of its weights, as far as this gateway knows
    weights: str = "0"
    #: the framework has paused it: it gets no request, and its silence is no stall
    paused: bool = False
    #: it does not have the weights of the present step: it slept when they came, or lost them in its sleep
    stale: bool = False
    #: it still has its weights after a sleep
    keeps_weights: bool = True
    #: asleep, but for room for weights
    half_awake: bool = False
    #: whether a seed is a hash of the position, so that a move keeps it (vLLM's V2 runner, deterministic SGLang)
    positional_seed: bool = False
    logprobs_mode: str = ""
    max_num_seqs: int = 256
    #: tokens that its KV cache holds; 0: not known
    kv_tokens: int = 0
    #: LoRA adapters that it has, by name
    adapters: tuple[str, ...] = ()
    #: sleep level it is parked with; 0: it is stopped and started by others, and is merely left alone
    park_level: int = 1
    #: requests whose present segment is here
    live: dict[str, None] = field(default_factory=dict)
    #: of these, the ones that have brought no token yet
    opening: dict[str, None] = field(default_factory=dict)
    #: tokens of moved requests that it has not prefilled yet
    prefill_tokens: int = 0
    #: answers "idle" in a row, and when it is asked next
    idle_probes: int = 0
    probe_at: int = 0
    failed_probes: int = 0
    #: it was asked, and has not answered yet
    asked: bool = False
    drain_began: int = 0
    #: requests that it let stall since it last generated anything: it looks idle, and is not to be chosen for that
    stalls: int = 0
    #: when it last generated anything
    last_token: int = 0
    #: milliseconds per token of one request, smoothed
    ms_per_token: float = 0.0


class Rollout(Struct):
    """The phase in which responses are generated, and how far it is."""

    status: RolloutStatus = RolloutStatus.CLOSED
    number: int = 0
    #: responses expected; 0: not known
    total: int = 0
    arrived: int = 0
    done: int = 0
    tokens: int = 0
    moved: int = 0
    recomputed: int = 0
    failed: int = 0
    #: replicas that the tail keeps
    keep: tuple[str, ...] = ()
    began: int = 0
    tail_began: int = 0
    shrink_asked: int = 0
    #: of each drained replica the milliseconds from the request to the proof
    drains_ms: list[int] = field(default_factory=list)
    #: and to its being parked, when its GPUs can be given back
    shrinks_ms: list[int] = field(default_factory=list)
    #: sizes of the last rollouts, the newest last
    sizes: list[int] = field(default_factory=list)
    longest: int = 0
    #: changes of the rung within it, when the last one was over, and why there are no further ones
    switches: int = 0
    switched: int = 0
    gave_up: str = ""
