"""``handle(input, now)``: what each input does. ``deadline()``: when time alone may change something.

The fence of a request is its segment number ``k``: what a replica still says of an earlier segment is dropped. So each
token position comes from one segment, and a request ends once.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Protocol, assert_never

from msgspec import Struct

from rollmuxd_gateway.core import effects as e
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core import placing, rollout, splice
from rollmuxd_gateway.core.lifecycle import advance
from rollmuxd_gateway.core.model import (
    Config,
    Replica,
    ReplicaStatus,
    Request,
    RequestStatus,
    Rollout,
    RolloutStatus,
    Segment,
    SegmentStatus,
)

#: milliseconds between two looks at stalls, waits and dead replicas
TICK_MS: Final = 1_000
#: milliseconds between two questions whether a replica is idle
PROBE_MS: Final = 20
#: milliseconds between two questions whether a dead replica is back
DEAD_MS: Final = 5_000
#: answers in a row that prove that a replica is idle, and that it is dead
PROOFS: Final = 2


class Balancer(Protocol):
    """What :mod:`rollmuxd_gateway.core.balancing` does; it needs numpy, and is imported only where it is asked for."""

    def ended(self, request: Request) -> None:
        """A response is over."""

    def moves(
        self, replicas: Iterable[Replica], requests: Mapping[str, Request], now_s: float
    ) -> tuple[tuple[str, ...], str]:
        """Which requests to move now, and where."""


class Rungs(Protocol):
    """What :mod:`rollmuxd_gateway.core.rungs` does; it needs numpy, too."""

    @property
    def planner(self) -> str:
        """What decides."""

    def ended(self, request: Request) -> None:
        """A response is over."""

    def choose(self, tp: int, replicas: Iterable[Replica], counted: int | None) -> int:
        """The degree of the next rollout."""

    def improve(
        self, tp: int, replicas: Sequence[Replica], live: Sequence[Request], since_s: float, changes: int, cost_s: float
    ) -> int:
        """The degree for the rest of this one."""


class Verdict(Struct, frozen=True):
    """What became of a request to shrink. ``keep``: the replicas; ``pinned``: requests that stay outside of them."""

    accepted: bool
    reason: str = ""
    keep: tuple[str, ...] = ()
    gpus: tuple[str, ...] = ()
    release: tuple[str, ...] = ()
    pinned: int = 0
    moves: int = 0


class Count(Struct):
    """What the metrics show, since the gateway began."""

    requests: dict[str, int]
    segments: dict[str, int]
    moves: dict[str, int]
    faults: dict[str, int]
    refused_shrinks: dict[str, int]
    tokens_in: int = 0
    tokens_out: int = 0
    recomputed: int = 0
    wasted_rewind: int = 0
    wasted_in_flight: int = 0


class Gateway:
    """The machine. It holds all state; nothing outside changes it."""

    def __init__(
        self, config: Config | None = None, balancer: Balancer | None = None, rungs: Rungs | None = None
    ) -> None:
        self.config = config or Config()
        #: chooses the degree of tensor parallelism, where a job has engines of several degrees on the same GPUs
        self.rungs = rungs
        #: the degree whose replicas are awake; 0: none has been registered
        self.rung = 0
        #: it is not known yet, since this gateway has woken nothing: engines of another one may be awake
        self._rung_is_open = True
        #: the framework writes weights through this gateway; and how it did it last, where that cannot be done again
        self._writes, self._once = False, ""
        #: GPUs of the slot; None: all
        self._held: frozenset[str] | None = None
        #: while the rung changes within a rollout: the one that it was, and the one that is to be woken next (0: it is)
        self._before = self._next = 0
        self._switch_began = 0
        #: what the last such change took; 0: there was none
        self.switch_ms = 0
        #: moves requests off slow replicas, where that is asked for
        self.balancer = balancer
        self.replicas: dict[str, Replica] = {}
        self.requests: dict[str, Request] = {}
        #: what has not begun, and what was cut, in order
        self.queue: dict[str, None] = {}
        self.again: dict[str, None] = {}
        self.rollout = Rollout()
        #: why nothing is begun; empty: it is
        self.stopped = ""
        #: rises with each change that a follower of the rollout may want to see
        self.seq = 0
        self.count = Count({}, {}, {}, {}, {})
        self.last_verdict: Verdict | None = None
        #: what draining and parking a replica took the last time; 0: not known
        self.shrink_ms = 0
        self.now = 0
        self._effects: list[e.Effect] = []
        #: of each replica, the requests that met a fault there which is not explained yet
        self._faulted: dict[str, dict[str, None]] = {}
        self._tick_at = 0
        #: of each group, how many of its requests are live on each replica
        self._spread: dict[str, dict[str, int]] = {}

    # ---- the two doors -----------------------------------------------------------------------------------------------

    def handle(self, it: i.Input, now: int) -> list[e.Effect]:
        """Take in one input at ``now`` (milliseconds, never falling); returns what to do, in order."""
        self.now = max(self.now, now)
        self._effects = []
        match it:
            case i.Tokens():
                if not self._tokens(it):
                    return self._effects
            case i.Arrive():
                self._arrive(it)
            case i.Fault():
                self._fault(it)
            case i.Refused():
                self._refused(it)
            case i.FalseStop():
                self._false_stop(it)
            case i.Gone():
                self._gone(it)
            case i.Cancel():
                self._cancel(it)
            case i.Probed():
                self._probed(it)
            case i.Parked():
                self._parked(it)
            case i.Woken():
                self._woken(it)
            case i.Register():
                self._register(it.replica)
            case i.Remove():
                self._remove(it.replica)
            case i.Weights():
                self._weights(it)
            case i.Paused():
                for name in it.replicas:
                    if name in self.replicas:
                        self._pause(self.replicas[name], paused=it.paused)
            case i.BeginRollout():
                self._begin(it)
            case i.CloseRollout():
                self._close()
            case i.Boundary():
                self._boundary(it)
            case i.Shrink():
                self.last_verdict = self._shrink(it)
            case i.Grow():
                self._grow(it.gpus)
            case i.Stop():
                self._stop(it.reason)
            case i.Move():
                self._move(it)
            case i.Tick():
                pass
            case _:
                assert_never(it)
        if self.rollout.status is RolloutStatus.SWITCHING:
            self._go_on_switching()
        self._look_at_the_clock()
        self._pump()
        self.seq += 1
        return self._effects

    def deadline(self) -> int | None:
        """When to send a Tick, if no other input comes before; None: never."""
        times = [replica.probe_at for replica in self.replicas.values() if replica.probe_at and not replica.asked]
        if self.queue or self.again or any(replica.live for replica in self.replicas.values()):
            times.append(self._tick_at or self.now + TICK_MS)
        return min(times, default=None)

    def progress(self) -> tuple[int, int]:
        """Responses done and expected; (0, 0) while the number is not known."""
        return rollout.progress(self.config, self.rollout)

    # ---- requests ----------------------------------------------------------------------------------------------------

    def _arrive(self, it: i.Arrive) -> None:
        for request in it.requests:
            request.arrived = request.queued_at = self.now
            self.requests[request.id] = request
            self.rollout.arrived += 1
            if self.stopped:
                self._fail(request, 503, f"the rollout was stopped: {self.stopped}")
            else:
                self.queue[request.id] = None

    def _pump(self) -> None:
        """Open what is queued, as far as there is room. Continuations are in front of what has not begun."""
        if not (self.queue or self.again) or self.stopped:
            return
        replicas = [replica for replica in self.replicas.values() if self._may_begin(replica)]
        for name in list(self.again):
            request = self.requests[name]
            if not request.blames:
                target = self._choose(request, replicas)
                if target is not None:
                    self._open(request, target)
        for name in list(self.queue):
            target = self._choose(self.requests[name], replicas)
            if target is None:
                return  # nor is there room for those behind it
            self._open(self.requests[name], target)

    def _choose(self, request: Request, replicas: list[Replica]) -> Replica | None:
        spread = self._spread.get(request.group, {})
        return placing.choose(request, replicas, self.requests, self.config, spread)

    def _open(self, request: Request, target: Replica) -> None:
        self._unqueue(request)
        advance(request, RequestStatus.RUNNING)
        request.k += 1
        request.replica = target.id
        request.target = ""
        generated = len(request.ids)
        request.segments.append(Segment(target.id, generated, request.why, weights=target.weights, began=self.now))
        request.texts = []
        _add(self.count.segments, request.why)
        if not generated:
            request.weights, request.engine = target.weights, target.engine
            request.logprobs_mode = target.logprobs_mode
        elif request.why != "first":
            self.count.recomputed += request.context
            self.rollout.recomputed += request.context
        if request.k:
            target.prefill_tokens += request.context
        target.live[request.id] = target.opening[request.id] = None
        spread = self._spread.setdefault(request.group, {})
        spread[target.id] = spread.get(target.id, 0) + 1
        request.last_token = self.now
        prompt = None if request.prompt is None else splice.joined(request.prompt, request.ids)
        params = splice.continued(request, target, generated)
        self._effects.append(e.Open(request.id, request.k, target.id, prompt, request.text, params))

    def _tokens(self, it: i.Tokens) -> bool:
        """Take in a chunk; returns whether anything but the request itself may have changed."""
        request = self.requests.get(it.request)
        if request is None or request.k != it.k or request.status is not RequestStatus.RUNNING:
            self.count.wasted_in_flight += len(it.ids)
            return False
        first = request.prefilling
        segment = request.segments[-1]
        replica = self.replicas[request.replica]
        if first:
            self._prefilled(request, replica)
            if it.prompt is not None and request.prompt is None:
                request.prompt = it.prompt
            request.counted = it.prompt_tokens
        elif it.ids:
            took = (self.now - request.last_token) / len(it.ids)
            replica.ms_per_token += (took - replica.ms_per_token) * (0.02 if replica.ms_per_token else 1.0)
        request.last_token = replica.last_token = self.now
        replica.stalls = 0
        request.ids.extend(it.ids)
        if request.deaths and len(request.ids) > request.fell_at + self.config.clear_tokens:
            request.deaths = 0  # it has survived the place where its engine died
        request.logprobs.extend(it.logprobs)
        if it.top:
            request.top.extend(it.top)
        if it.names:
            request.names.extend(it.names)
        if it.extra:
            request.extra.update(it.extra)
        if it.weights:
            replica.weights = segment.weights = it.weights
            if segment.start == 0:
                request.weights = it.weights
        if it.text:
            request.texts.append((len(request.ids), it.text))
        self.count.tokens_out += len(it.ids)
        self.rollout.tokens += len(it.ids)
        if it.finish:
            self._finished(request, it.finish, it.stop_reason)
            return True
        if request.streamed:
            self._deliver(request, len(request.ids) - splice.withheld(request))
        return first and bool(self.queue or self.again)

    def _deliver(self, request: Request, upto: int) -> None:
        if upto > request.delivered:
            self._effects.append(e.Deliver(request.id, request.delivered, upto))
            request.delivered = upto

    def _prefilled(self, request: Request, replica: Replica) -> None:
        advance(request.segments[-1], SegmentStatus.STREAMING)
        replica.opening.pop(request.id, None)
        if request.k:
            replica.prefill_tokens -= request.context

    def _finished(self, request: Request, finish: str, stop_reason: object = None) -> None:
        self._detach(request)
        request.finish, request.stop_reason = finish, stop_reason
        for planner in (self.balancer, self.rungs):
            if planner is not None:
                planner.ended(request)
        self._ends(request, finish)

    def _over(self, request: Request, status: RequestStatus) -> None:
        self._unqueue(request)
        advance(request, status)
        self.rollout.done += 1
        self.rollout.longest = max(self.rollout.longest, len(request.ids))
        if status is RequestStatus.FAILED:
            self.rollout.failed += 1
        self.count.tokens_in += request.prompt_tokens
        _add(self.count.requests, request.finish or "failed")
        self._effects.append(e.End(request.id))

    def _unqueue(self, request: Request) -> None:
        self.queue.pop(request.id, None)
        self.again.pop(request.id, None)

    def forget(self, name: str) -> None:
        """Drop a request that is over, once its answer was composed."""
        if self.requests[name].over:
            del self.requests[name]

    def _fail(self, request: Request, status: int, why: object) -> None:
        if request.status is RequestStatus.RUNNING:
            self._effects.append(e.Abort(request.id, request.k, request.replica))
            self._detach(request)
        request.error = (status, why)
        self._over(request, RequestStatus.FAILED)

    def _detach(self, request: Request) -> None:
        """End its segment, and take it off its replica."""
        segment = request.segments[-1]
        replica = self.replicas.get(segment.replica)
        if segment.status is SegmentStatus.OPENING and request.k and replica is not None:
            replica.prefill_tokens -= request.context
        advance(segment, SegmentStatus.ENDED)
        segment.end, segment.ended = len(request.ids), self.now
        spread = self._spread[request.group]
        spread[segment.replica] -= 1
        if not any(spread.values()):
            del self._spread[request.group]
        if replica is not None:
            replica.live.pop(request.id, None)
            replica.opening.pop(request.id, None)
            if replica.status is ReplicaStatus.DRAINING and not replica.live:
                replica.idle_probes, replica.probe_at = 0, self.now + 1

    def _cut(self, request: Request, why: str, *, target: str = "", avoid: str = "", abort: bool = True) -> None:
        """End the present segment here, and queue the next one."""
        if abort:
            self._effects.append(e.Abort(request.id, request.k, request.replica))
        self._detach(request)
        if splice.pin(request):
            request.keep(0)  # it begins again; nothing of it was handed out
            request.segments[-1].end = 0
        else:
            back = min(splice.rewind(request), len(request.ids) - request.segments[-1].start)
            if back:
                self.count.wasted_rewind += back
                request.keep(len(request.ids) - back)
                request.segments[-1].end = len(request.ids)
        request.why, request.target, request.avoid = why, target, avoid
        if request.max_tokens is not None and request.ids and len(request.ids) >= request.max_tokens:
            self._ends(request, "length")
            return
        advance(request, RequestStatus.QUEUED)
        request.queued_at = self.now
        self.again[request.id] = None

    def _refused(self, it: i.Refused) -> None:
        request = self._present(it.request, it.k)
        if request is not None:
            self._detach(request)
            request.error = (it.status, it.body)
            self._over(request, RequestStatus.FAILED)

    def _false_stop(self, it: i.FalseStop) -> None:
        """Cut it again, one token before its segment began: that is the end of a character after three such steps."""
        request = self._present(it.request, it.k)
        if request is None:
            return
        keep = request.segments[-1].start - 1
        if keep < request.delivered:  # more than a character's tokens end within one: the text is no UTF-8
            self._fail(request, 502, "its text is broken where it was cut, and its stop string is in its prompt")
            return
        for segment in request.segments:
            segment.start, segment.end = min(segment.start, keep), min(segment.end, keep)
        self.count.wasted_rewind += len(request.ids) - keep
        request.keep(keep)
        self._cut(request, "false_stop", abort=False)

    def _gone(self, it: i.Gone) -> None:
        for request in [request for request in self.requests.values() if request.call == it.call]:
            if not request.over:
                if request.status is RequestStatus.RUNNING:
                    self._effects.append(e.Abort(request.id, request.k, request.replica))
                    self._detach(request)
                request.finish, request.error = "abort", (499, "the client went away")
                self._over(request, RequestStatus.FAILED)

    def _cancel(self, it: i.Cancel) -> None:
        for name in it.requests:
            request = self.requests.get(name)
            if request is None or request.over:
                continue
            if request.opaque is not None:  # what it has so far is not known here
                self._fail(request, 499, "it was aborted by its id")
                continue
            if request.status is RequestStatus.RUNNING:
                self._effects.append(e.Abort(request.id, request.k, request.replica))
                self._detach(request)
            self._ends(request, "abort")

    def _ends(self, request: Request, finish: str) -> None:
        """It is over with what it has."""
        request.finish = finish
        if request.streamed:
            self._deliver(request, len(request.ids))
        self._over(request, RequestStatus.DONE)

    def _present(self, name: str, k: int) -> Request | None:
        request = self.requests.get(name)
        return request if request is not None and request.k == k and request.status is RequestStatus.RUNNING else None

    # ---- faults ------------------------------------------------------------------------------------------------------

    def _fault(self, it: i.Fault) -> None:
        request = self._present(it.request, it.k)
        if request is None:
            return
        _add(self.count.faults, it.kind)
        replica = self.replicas[request.replica]
        if it.kind != "connect":  # else the engine was dead before it got this request
            self._faulted.setdefault(replica.id, {})[request.id] = None
            request.blames = replica.id
        self._suspect(replica)
        self._again(request, it.kind, it.detail, abort=False)

    def _again(self, request: Request, kind: str, detail: str, *, abort: bool) -> None:
        request.attempts += 1
        request.fell_at = len(request.ids)
        pinned = splice.pin(request)
        if request.attempts >= self.config.attempts:
            self._fail(request, 502, f"{request.attempts} replicas in turn failed it, the last with {kind}: {detail}")
        elif pinned and request.delivered:
            self._fail(request, 502, f"its replica failed ({kind}), and it cannot be continued: {pinned}")
        else:
            why = "stall" if kind == "stall" else "fault"
            self._cut(request, why, avoid=request.replica, abort=abort)

    def _suspect(self, replica: Replica) -> None:
        if replica.status in (ReplicaStatus.SUSPECT, ReplicaStatus.DEAD):
            return
        advance(replica, ReplicaStatus.SUSPECT)
        replica.failed_probes, replica.probe_at = 0, self.now

    def _dead(self, replica: Replica) -> None:
        advance(replica, ReplicaStatus.DEAD)
        replica.probe_at, replica.asked = self.now + DEAD_MS, False
        self._effects.append(e.Died(replica.id))
        if self.rollout.status is RolloutStatus.SWITCHING and self.on_rung(replica):
            self._switch_failed(replica, "died")
        blamed = self._faulted.pop(replica.id, {})
        blamed.update(replica.live)
        allowed = self.config.poison_deaths
        if allowed > 2 and len(blamed) == 1:  # nothing else can have been the cause
            allowed -= 1
        for name in list(replica.live):
            self._again(self.requests[name], "death", "its replica died", abort=True)
        for name in blamed:
            culprit = self.requests.get(name)
            if culprit is None or culprit.over:
                continue
            culprit.blames = ""
            culprit.deaths += 1
            if culprit.deaths >= allowed:
                _add(self.count.faults, "poison")
                self._fail(culprit, 502, f"{culprit.deaths} engines died of this request; it is not tried on another")

    def _well(self, replica: Replica) -> None:
        """A replica that was suspected answers: what went wrong there was not its death."""
        self._explain(replica)
        leaves = self.rollout.status is RolloutStatus.TAIL and replica.id not in self.rollout.keep
        leaves = leaves or (self._next > 0 and self.on_rung(replica))
        advance(replica, ReplicaStatus.DRAINING if leaves else ReplicaStatus.OPEN)
        replica.probe_at = self.now + PROBE_MS if leaves else 0

    def _explain(self, replica: Replica) -> None:
        for name in self._faulted.pop(replica.id, {}):
            if name in self.requests:
                self.requests[name].blames = ""
                # An engine that the framework has paused refuses requests (vLLM 0.33: 503): no try of theirs.
                self.requests[name].attempts -= replica.paused

    def _probed(self, it: i.Probed) -> None:
        replica = self.replicas.get(it.replica)
        if replica is None:
            return
        replica.asked = False
        if not it.ok:
            replica.failed_probes += 1
            if replica.status in (ReplicaStatus.OPEN, ReplicaStatus.DRAINING, ReplicaStatus.IDLE):
                self._suspect(replica)
            if replica.status is ReplicaStatus.SUSPECT:
                if replica.failed_probes >= PROOFS:
                    self._dead(replica)
                else:
                    replica.probe_at = self.now + 5 * PROBE_MS
            elif replica.status is ReplicaStatus.DEAD:
                replica.probe_at = self.now + DEAD_MS
            return
        replica.failed_probes = 0
        if replica.status is ReplicaStatus.DEAD:
            replica.probe_at = self.now + DEAD_MS
            self._effects.append(e.Revive(replica.id))
            return
        if it.paused is not None:
            self._pause(replica, paused=it.paused)
        self._judge_stalls(replica, it)
        if replica.status is ReplicaStatus.SUSPECT:
            self._well(replica)
        elif replica.status is ReplicaStatus.DRAINING and not replica.live:
            replica.idle_probes = replica.idle_probes + 1 if it.running + it.waiting == 0 else 0
            if replica.idle_probes >= PROOFS:
                advance(replica, ReplicaStatus.IDLE)
                replica.probe_at = 0
                self.rollout.drains_ms.append(self.now - replica.drain_began)
                self._effects.append(e.Park(replica.id))
            else:
                replica.probe_at = self.now + PROBE_MS
        else:
            replica.probe_at = 0
        if replica.paused and it.paused and not replica.probe_at:
            replica.probe_at = self.now + TICK_MS  # paused behind our back: so it is resumed

    def _judge_stalls(self, replica: Replica, it: i.Probed) -> None:
        limit = self.now - self.config.stall_ms
        for name in list(replica.live):
            request = self.requests[name]
            if request.last_token > limit:
                continue
            if replica.paused or (request.prefilling and it.waiting and replica.last_token > limit):
                request.last_token = self.now
            else:
                _add(self.count.faults, "stall")
                replica.stalls += 1
                self._again(request, "stall", "no token came", abort=True)

    def _look_at_the_clock(self) -> None:
        for replica in self.replicas.values():
            if replica.probe_at and replica.probe_at <= self.now and not replica.asked:
                replica.asked, replica.probe_at = True, 0
                self._effects.append(e.Probe(replica.id))
        if self.now < self._tick_at:
            return
        self._tick_at = self.now + TICK_MS
        limit = self.now - self.config.stall_ms
        for replica in self.replicas.values():
            late = any(self.requests[name].last_token <= limit for name in replica.live)
            if late and not replica.asked and replica.status in (ReplicaStatus.OPEN, ReplicaStatus.DRAINING):
                replica.asked = True
                self._effects.append(e.Probe(replica.id))
        if self.in_step == "on" and self.rollout.status is RolloutStatus.OPEN:
            self._improve()
        if self.balancer is not None and self.rollout.status in (RolloutStatus.OPEN, RolloutStatus.CLOSED):
            may = filter(self._may_begin, self.replicas.values())
            names, target = self.balancer.moves(may, self.requests, self.now / 1000)
            for name in names:
                self._move(i.Move(name, target, "rebalance"))
        here = [one for one in self.replicas.values() if one.status is ReplicaStatus.OPEN and not one.stale]
        for name in [*self.again, *self.queue]:
            request = self.requests[name]
            if not all(self._refuses(request, replica) for replica in here):
                request.queued_at = self.now  # it waits for a seat, which is no fault
            elif self.now - request.queued_at >= self.config.no_replica_ms:
                self._fail(request, 503, f"no replica has been open to it for {self.config.no_replica_ms // 1000} s")

    def _pause(self, replica: Replica, *, paused: bool) -> None:
        if replica.paused != paused:
            replica.paused = paused
            for name in replica.live:
                self.requests[name].last_token = self.now

    # ---- replicas ----------------------------------------------------------------------------------------------------

    def _register(self, replica: Replica) -> None:
        known = self.replicas.get(replica.id)
        if known is not None:
            self._evacuate(known, "fault")
            self._faulted.pop(known.id, None)
            for request in self.requests.values():
                request.blames = "" if request.blames == known.id else request.blames
        self.replicas[replica.id] = replica
        self.rung = self.rung or replica.tp
        if self._rung_is_open and not any(
            one.status is ReplicaStatus.OPEN and one.tp == self.rung for one in self.replicas.values()
        ):
            self.rung = replica.tp if replica.status is ReplicaStatus.OPEN else self.rung
        if replica.status is ReplicaStatus.OPEN and not self.on_rung(replica):
            self._effects.append(e.Park(replica.id))  # its GPUs are those of another replica, which is used

    def _remove(self, name: str) -> None:
        known = self.replicas.get(name)
        if known is not None:
            self._evacuate(known, "fault")
            del self.replicas[name]
            for request in self.requests.values():
                request.blames = "" if request.blames == name else request.blames

    def _evacuate(self, replica: Replica, why: str) -> None:
        for name in list(replica.live):
            request = self.requests[name]
            pinned = splice.pin(request)
            if pinned and request.delivered:
                self._fail(request, 502, f"its replica left, and it cannot be continued: {pinned}")
            else:
                self._cut(request, why, avoid=replica.id)

    def _weights(self, it: i.Weights) -> None:
        self._writes, self._once = True, it.once
        for name in it.replicas:
            replica = self.replicas.get(name)
            if replica is not None:
                replica.weights, replica.stale = it.version, False
                if replica.status is ReplicaStatus.DEAD:  # it took weights, so it lives
                    advance(replica, ReplicaStatus.OPEN)
        for replica in self.replicas.values():
            if replica.status is ReplicaStatus.PARKED and not self.config.mix_versions:
                replica.stale = replica.weights != it.version

    # ---- rungs -------------------------------------------------------------------------------------------------------

    def on_rung(self, replica: Replica) -> bool:
        """Whether it is one of those that are used; the others sleep on the same GPUs."""
        return self.rungs is None or replica.tp == self.rung

    def _may_begin(self, replica: Replica) -> bool:
        """Whether it is used, and has been written to since it slept through a step; requests wait for that."""
        ready = self.rollout.status is not RolloutStatus.SWITCHING and not replica.stale and not replica.paused
        return ready and self.on_rung(replica)

    def _boundary(self, it: i.Boundary) -> None:
        if self.rungs is None or self.rollout.status is not RolloutStatus.CLOSED:
            return  # engines that are woken within a rollout are those of its rung
        self._rung_is_open = False
        held = None if it.gpus is None else set(it.gpus)
        within = [r for r in self.replicas.values() if held is None or held.issuperset(r.gpus)]
        self.rung = self.rungs.choose(self.rung, within, it.preemptions)

    # ---- rungs within a rollout --------------------------------------------------------------------------------------

    @property
    def in_step(self) -> str:
        """Whether the rung may change within this rollout: "on", "off", or why not."""
        if not self.config.in_step or self.rungs is None:
            return "off"
        if not self._writes:
            return "no weights have come through the gateway, so a rung that is woken cannot get them"
        if self._once:
            return f"the last weights came by {self._once}, which cannot be sent again"
        return self.rollout.gave_up or "on"

    def _within(self) -> list[Replica]:
        """Replicas on the slot's GPUs."""
        held = self._held
        return [one for one in self.replicas.values() if held is None or held.issuperset(one.gpus)]

    def _of_rung(self, tp: int) -> list[Replica]:
        return [replica for replica in self._within() if replica.tp == tp]

    def _improve(self) -> None:
        """Change the rung where the rest of the rollout ends sooner on another one."""
        mine = self._of_rung(self.rung)
        live = [self.requests[name] for replica in mine for name in replica.live]
        if self.rungs is None or self.queue or self.again or any(map(splice.pin, live)):
            return
        if not all(replica.status is ReplicaStatus.OPEN for replica in mine):
            return
        may = [one for one in self._within() if self.on_rung(one) or one.status is ReplicaStatus.PARKED]
        rollout = self.rollout
        since_s = (self.now - rollout.switched) / 1000 if rollout.switches else float("inf")
        cost_s = (self.switch_ms or self.config.switch_ms) / 1000
        to = self.rungs.improve(self.rung, may, live, since_s, rollout.switches, cost_s)
        if to != self.rung:
            advance(rollout, RolloutStatus.SWITCHING)
            self._before, self._switch_began = self.rung, self.now
            self._switch(to)

    def _switch(self, to: int) -> None:
        """Take all requests off the rung, and put it to sleep; that one after the other is as in a tail."""
        self._next = to
        for replica in self._of_rung(self.rung):
            for name in list(replica.live):
                self._cut(self.requests[name], "switch")
                _add(self.count.moves, "switch")
                self.rollout.moved += 1
            if replica.status is ReplicaStatus.OPEN:
                self._drain(replica)
            elif replica.status is ReplicaStatus.SUSPECT:
                self._effects.append(e.Park(replica.id))

    def _go_on_switching(self) -> None:
        """Wake the next rung, once no engine of this one is on its GPUs. Continue once that one has the weights."""
        alive = [one for one in self._of_rung(self.rung) if one.status is not ReplicaStatus.DEAD]
        if self._next:
            if all(replica.status is ReplicaStatus.PARKED for replica in alive):
                self.rung, self._next = self._next, 0
                for replica in self._of_rung(self.rung):
                    self._wake_within(replica)
        elif all(one.status is ReplicaStatus.OPEN and not one.stale for one in alive):
            advance(self.rollout, RolloutStatus.OPEN)
            if self.rung != self._before:
                self.rollout.switches, self.rollout.switched = self.rollout.switches + 1, self.now
                self.switch_ms = self.now - self._switch_began

    def _switch_failed(self, replica: Replica, why: str) -> None:
        """Go back to the rung before, and stay there."""
        self.rollout.gave_up = self.rollout.gave_up or f"replica {replica.id} {why} at the last change"
        if self.rung != self._before:
            self._switch(self._before)
            return
        self._next = 0
        advance(self.rollout, RolloutStatus.OPEN)
        for one in self._of_rung(self.rung):
            self._wake_within(one)

    # ---- the rollout -------------------------------------------------------------------------------------------------

    def _begin(self, it: i.BeginRollout) -> None:
        if self.rollout.status is not RolloutStatus.CLOSED:
            self._close()
        live = sum(not request.over for request in self.requests.values())
        self._rung_is_open = False
        self._held = None if it.gpus is None else frozenset(it.gpus)
        number, sizes = self.rollout.number + 1, self.rollout.sizes
        self.rollout = Rollout(number=number, total=it.total, began=self.now, sizes=sizes, arrived=live)
        advance(self.rollout, RolloutStatus.OPEN)
        self.stopped = ""
        if it.gpus is None:
            for replica in self.replicas.values():
                if self.on_rung(replica):
                    self._wake(replica)
            return
        held = set(it.gpus)
        for replica in self.replicas.values():
            if not self.on_rung(replica):
                continue
            if held.issuperset(replica.gpus):
                self._wake(replica)
            elif replica.status is ReplicaStatus.OPEN:
                self._evacuate(replica, "shrink")
                advance(replica, ReplicaStatus.PARKED)

    def _wake(self, replica: Replica) -> None:
        if replica.status in (ReplicaStatus.DRAINING, ReplicaStatus.IDLE):
            advance(replica, ReplicaStatus.OPEN)
            replica.probe_at = 0
        if replica.status in (ReplicaStatus.PARKED, ReplicaStatus.OPEN):
            self._effects.append(e.Wake(replica.id))

    def _wake_within(self, replica: Replica) -> None:
        """Wake it within a rollout. If it lacks the weights of the step, they are written again, where that can be."""
        slept = replica.status is ReplicaStatus.PARKED
        replica.stale = replica.stale or (slept and self._writes and not replica.keeps_weights)
        self._wake(replica)
        if slept and replica.stale and not self._once:
            self._effects.append(e.Write(replica.id))

    def _woken(self, it: i.Woken) -> None:
        replica = self.replicas.get(it.replica)
        if replica is None:
            return
        replica.half_awake = it.ok and not it.whole
        if replica.half_awake:
            return
        if it.ok and replica.status is ReplicaStatus.PARKED:
            advance(replica, ReplicaStatus.OPEN)
        elif not it.ok and replica.status in (ReplicaStatus.PARKED, ReplicaStatus.OPEN):
            self._suspect(replica)
        switching = self.rollout.status is RolloutStatus.SWITCHING and not self._next
        if switching and not it.ok and self.on_rung(replica):
            self._switch_failed(replica, f"was not woken ({it.why})")

    def _close(self) -> None:
        if self.rollout.status is RolloutStatus.CLOSED:
            return
        rollout.remember(self.rollout)
        advance(self.rollout, RolloutStatus.CLOSED)
        self._next = 0
        for replica in self.replicas.values():
            if replica.status in (ReplicaStatus.DRAINING, ReplicaStatus.IDLE):
                advance(replica, ReplicaStatus.OPEN)
                replica.probe_at = 0

    def plan_shrink(self, keep: tuple[str, ...]) -> Verdict:
        """Which replicas a tail would keep, and whether they can hold it. Changes nothing.

        ``keep`` has GPUs. It is rounded up to whole replicas. To move less, replicas with as many GPUs and more
        unfinished tokens, or with requests that cannot move, are kept instead of named ones.
        """
        here = [r for r in self.replicas.values() if r.status in (ReplicaStatus.OPEN, ReplicaStatus.DRAINING)]
        if self.config.tail != "release":
            return Verdict(False, "tail_is_kept")
        if self.rollout.status not in (RolloutStatus.OPEN, RolloutStatus.TAIL):
            return Verdict(False, "no_rollout")
        hosts = {gpu.rpartition("/")[0] for gpu in keep}
        named = [replica for replica in here if not set(keep).isdisjoint(replica.gpus)]
        need = len(keep)
        if not named:
            return Verdict(False, "no_replica_on_these_gpus")
        # What cannot move would hold its replica to its end.
        order = sorted(here, key=lambda r: (not self._has_pinned(r), -self._unfinished(r), r not in named))
        chosen: list[Replica] = []
        for replica in order:
            if any(gpu.rpartition("/")[0] not in hosts for gpu in replica.gpus):
                continue
            if sum(len(one.gpus) for one in chosen) < need:
                chosen.append(replica)
        if sum(len(one.gpus) for one in chosen) > max(need, sum(len(one.gpus) for one in named)):
            chosen = named
        rest = [replica for replica in here if replica not in chosen]
        if not rest:
            return Verdict(False, "nothing_to_release")
        kept = {replica.id for replica in chosen}
        tail = [request for request in self.requests.values() if not request.over]
        lacking = placing.lacks_room(tail, chosen, self.rollout)
        if lacking:
            return Verdict(False, "no_room")
        if self._rest_ms(tail) < self.shrink_ms:
            return Verdict(False, "not_worth_it")
        pinned = moves = 0
        for request in tail:
            if request.status is RequestStatus.RUNNING and request.replica not in kept:
                if self._stays(request, chosen):
                    pinned += 1
                else:
                    moves += 1
        stays = {r.replica for r in tail if r.status is RequestStatus.RUNNING and self._stays(r, chosen)}
        release = tuple(replica.id for replica in rest)
        if not set(release) - stays:
            return Verdict(False, "all_pinned", pinned=pinned)
        gpus = tuple(gpu for replica in here if replica.id in kept for gpu in replica.gpus)
        return Verdict(True, "", tuple(r.id for r in chosen), gpus, release, pinned, moves)

    def _rest_ms(self, tail: list[Request]) -> float:
        """How long these take at most to their ends, as far as can be seen; infinity where no speed is known."""
        speeds = [self.replicas[request.replica].ms_per_token for request in tail if request.replica in self.replicas]
        longest = max((placing.expected_tokens(request, self.rollout) for request in tail), default=0)
        return longest * max(speeds) if speeds and all(speeds) else float("inf")

    def _stays(self, request: Request, chosen: Iterable[Replica]) -> bool:
        """Whether a request outside of the replicas to keep ends where it runs."""
        return bool(splice.pin(request)) or all(self._refuses(request, to) for to in chosen)

    def _refuses(self, request: Request, to: Replica) -> bool:
        return bool(splice.refuses(request, to, mix_versions=self.config.mix_versions))

    def _has_pinned(self, replica: Replica) -> bool:
        return any(splice.pin(self.requests[name]) for name in replica.live)

    def _unfinished(self, replica: Replica) -> int:
        return sum(self.requests[name].context for name in replica.live)

    def _shrink(self, it: i.Shrink) -> Verdict:
        verdict = self.plan_shrink(it.keep)
        if not verdict.accepted:
            _add(self.count.refused_shrinks, verdict.reason)
            return verdict
        advance(self.rollout, RolloutStatus.TAIL)
        self.rollout.keep = verdict.keep
        self.rollout.tail_began = self.rollout.tail_began or self.now
        self.rollout.shrink_asked = self.now
        chosen = [self.replicas[name] for name in verdict.keep]
        moving: list[Request] = []
        for name in verdict.release:
            replica = self.replicas[name]
            self._drain(replica)
            moving += [self.requests[one] for one in replica.live if not self._stays(self.requests[one], chosen)]
        # Most generated first, samples of a prompt together: these share its prefix cache on the target.
        longest: dict[str, int] = {}
        for request in moving:
            longest[request.group] = max(longest.get(request.group, 0), len(request.ids))
        moving.sort(key=lambda request: (-longest[request.group], request.group, -len(request.ids)))
        for request in moving:
            self._cut(request, "shrink")
            self.rollout.moved += 1
            _add(self.count.moves, "shrink")
        return verdict

    def _drain(self, replica: Replica) -> None:
        advance(replica, ReplicaStatus.DRAINING)
        replica.drain_began = self.now
        replica.idle_probes, replica.probe_at = 0, 0 if replica.live else self.now

    def _parked(self, it: i.Parked) -> None:
        replica = self.replicas.get(it.replica)
        if replica is None or replica.status in (ReplicaStatus.DRAINING, ReplicaStatus.PARKED):
            return
        if not it.ok:
            self._suspect(replica)
            if self._next and self.rung == self._before:
                self._switch_failed(replica, f"was not put to sleep ({it.why})")
            return
        self._explain(replica)
        replica.half_awake = False
        if replica.live:  # the framework did it: what ran there continues elsewhere
            self._evacuate(replica, "fault")
        if replica.status is ReplicaStatus.IDLE:
            self.shrink_ms = self.now - replica.drain_began
            self.rollout.shrinks_ms.append(self.shrink_ms)
        advance(replica, ReplicaStatus.PARKED)
        replica.probe_at = 0
        outside = [r for r in self.replicas.values() if r.id not in self.rollout.keep]
        if self.rollout.status is RolloutStatus.TAIL and all(
            r.status in (ReplicaStatus.PARKED, ReplicaStatus.DEAD) for r in outside
        ):
            advance(self.rollout, RolloutStatus.DRAINED)

    def _grow(self, gpus: tuple[str, ...]) -> None:
        held = set(gpus)
        self._held = None if self._held is None else frozenset(gpus)
        if self.rollout.status in (RolloutStatus.TAIL, RolloutStatus.DRAINED):
            advance(self.rollout, RolloutStatus.OPEN)
            self.rollout.keep = ()
        if self._next:
            return  # the next rung is woken on all of them, once this one sleeps
        for replica in self.replicas.values():
            if held.issuperset(replica.gpus) and self.on_rung(replica) and replica.status is not ReplicaStatus.OPEN:
                self._wake_within(replica)

    def _stop(self, reason: str) -> None:
        self.stopped = reason or "stopped"
        for request in list(self.requests.values()):
            if not request.over:
                self._fail(request, 503, f"the rollout was stopped: {self.stopped}")

    def _move(self, it: i.Move) -> None:
        request = self.requests.get(it.request)
        if request is None or request.status is not RequestStatus.RUNNING or request.prefilling:
            return
        target = self.replicas.get(it.target)
        if splice.pin(request) or request.replica == it.target:
            return
        if target is not None and splice.refuses(request, target, mix_versions=self.config.mix_versions):
            return
        request.moves += 1
        self.rollout.moved += 1
        _add(self.count.moves, it.why)
        self._cut(request, it.why, target=it.target, avoid="" if it.target else request.replica)


def _add(counts: dict[str, int], name: str) -> None:
    counts[name] = counts.get(name, 0) + 1
