"""Moves between replicas of different speed: the rule of :mod:`rollmuxd.rollout.rebalance`, on what is live here.

An engine model of the configured GPU and model says how a step grows with its batch. How much slower each replica is
than that is measured. Lengths are forecast from those of the responses that have ended.
"""

import math
from collections.abc import Iterable, Mapping

import numpy as np
from msgspec import Struct

from rollmuxd.rollout import lengths, rebalance
from rollmuxd.rollout.engine import Engine
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd_gateway.core import splice
from rollmuxd_gateway.core.model import Replica, ReplicaStatus, Request

#: share of the responses that end within a forecast
QUANTILE = 0.6
#: responses that must have ended before lengths are forecast
ENOUGH = 16
#: tokens that a length is forecast to at most, where a request says nothing
LONGEST = 131_072


class Rules(Struct, frozen=True):
    """When requests are moved between replicas: what the engines are, and how often."""

    gpu: str = "h100"
    model: str = "qwen2.5-7b"
    per_s: float = 2.0
    burst: float = 4.0
    min_gain_s: float = 1.0


def slower_of(replica: Replica, engine: Engine, live: Iterable[Request]) -> float:
    """A replica's measured time of a token over the engine model's, with what is live there; 0: not measured yet."""
    mine = [request.context for request in live if request.replica == replica.id]
    return replica.ms_per_token / 1000 / float(engine.step_s(max(1, len(mine)), sum(mine)))


class Balancer:
    """Remembers how many moves there may be, and the lengths of what has ended."""

    def __init__(self, rules: Rules) -> None:
        """Raises ValueError for a GPU or a model that has no figures."""
        self._limits = rebalance.Limits(per_s=rules.per_s, burst=rules.burst, least_s=rules.min_gain_s)
        self._bucket = rebalance.Bucket(self._limits)
        self._gpu, self._model = gpu(rules.gpu), model(rules.model)
        self._ended: list[int] = []
        self._prior: lengths.Prior | None = None

    def ended(self, request: Request) -> None:
        """A response is over."""
        if request.ids and request.finish in ("stop", "length"):
            self._ended = [*self._ended[-2_000:], len(request.ids)]
            self._prior = None

    def moves(
        self, replicas: Iterable[Replica], requests: Mapping[str, Request], now_s: float
    ) -> tuple[tuple[str, ...], str]:
        """Which requests to move now, and to which replica; none: nothing is worth it."""
        most = self._bucket.held(now_s)
        opened = [replica for replica in replicas if replica.status is ReplicaStatus.OPEN and replica.ms_per_token]
        if most < 1 or len(opened) < 2 or len(self._ended) < ENOUGH:
            return (), ""
        left = self._left([requests[name] for replica in opened for name in replica.live])
        loads = [self._load(replica, requests, left) for replica in opened]
        move = rebalance.pick(loads, self._limits, most)
        if move is None:
            return (), ""
        self._bucket.take(len(move.requests))
        return tuple(str(name) for name in move.requests), opened[move.target].id

    def _load(self, replica: Replica, requests: Mapping[str, Request], left: Mapping[str, float]) -> rebalance.Load:
        live = [requests[name] for name in replica.live]
        engine = Engine(
            self._gpu, self._model, replica.tp, max_seqs=replica.max_num_seqs, kv_tokens=replica.kv_tokens or 10**9
        )
        slower = slower_of(replica, engine, live)
        open_ = [
            rebalance.Open(
                request.id,
                request.context,
                left[request.id],
                request.moves,
                pinned=request.prefilling or bool(splice.pin(request)),
            )
            for request in live
        ]
        return rebalance.Load(engine, open_, slower, takes=len(live) < replica.max_num_seqs)

    def _left(self, live: list[Request]) -> dict[str, float]:
        """Tokens that each is forecast to have still to come; for all of them at once, since that takes as long."""
        if self._prior is None:
            self._prior = lengths.fit([[length] for length in self._ended], LONGEST)
        if self._prior is None or not live:
            return {request.id: math.inf for request in live}
        made = np.array([len(request.ids) for request in live], dtype=np.int64)
        seen = lengths.Progress(np.arange(len(live)), made, np.zeros(len(live), dtype=np.bool_))
        totals = lengths.quantile(self._prior, seen, QUANTILE)
        caps = np.array([request.max_tokens or LONGEST for request in live], dtype=np.float64)
        left = np.maximum(1.0, np.minimum(totals, caps) - made).tolist()
        return {request.id: tokens for request, tokens in zip(live, left, strict=True)}
