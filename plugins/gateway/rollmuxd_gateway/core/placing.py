"""Where a request goes: the replica that has room and is expected to be done first, samples of a prompt spread."""

from collections.abc import Iterable, Mapping

from rollmuxd_gateway.core import splice
from rollmuxd_gateway.core.model import Config, Replica, ReplicaStatus, Request, Rollout


def choose(
    request: Request,
    replicas: Iterable[Replica],
    requests: Mapping[str, Request],
    config: Config,
    siblings: Mapping[str, int],
) -> Replica | None:
    """The best open replica for a queued request; None: it has to wait.

    ``siblings``: of each replica, how many requests of the same group are live there.
    """
    held = held_apart(request, config)
    best: Replica | None = None
    best_key: tuple[bool, bool, int, float, int] | None = None
    for replica in replicas:
        if replica.status is not ReplicaStatus.OPEN or len(replica.live) >= replica.max_num_seqs:
            continue
        if request.ids and splice.refuses(request, replica, mix_versions=config.mix_versions):
            continue
        if request.k >= 0 and replica.live:
            waiting = replica.prefill_tokens
            if waiting and waiting + request.context > config.max_prefill_tokens:
                continue
        # One death may have any cause. What the last allowed death may be due to is kept apart, so that death names it.
        if replica.opening and (held or any(held_apart(requests[name], config) for name in replica.opening)):
            continue
        if held and any(held_apart(requests[name], config) for name in replica.live):
            continue
        speed = replica.ms_per_token or 1.0
        key = (
            replica.id == request.avoid or replica.stalls > 0,
            bool(request.target) and replica.id != request.target,
            siblings.get(replica.id, 0) if request.k < 0 else 0,
            len(replica.live) * speed,
            replica.prefill_tokens,
        )
        if best_key is None or key < best_key:
            best, best_key = replica, key
    return best


def held_apart(request: Request, config: Config) -> bool:
    """Whether one more death fails this request; no two such requests share a replica."""
    return bool(request.deaths) and request.deaths >= config.poison_deaths - 1


def expected_tokens(request: Request, rollout: Rollout) -> int:
    """Tokens that a live request may still generate: up to the longest that this rollout has seen, 64 at least."""
    more = max(64, rollout.longest - len(request.ids))
    if request.max_tokens is not None:
        more = min(more, request.max_tokens - len(request.ids))
    return max(0, more)


def lacks_room(tail: list[Request], keep: list[Replica], rollout: Rollout) -> str:
    """Why these replicas cannot hold the tail; empty: they can. A KV cache of unknown size is not counted."""
    seats = sum(replica.max_num_seqs for replica in keep)
    if len(tail) > seats:
        return f"{len(tail)} requests are live, and the replicas to keep run {seats} at a time"
    if all(replica.kv_tokens for replica in keep):
        need = sum(request.context + expected_tokens(request, rollout) for request in tail)
        have = sum(replica.kv_tokens for replica in keep)
        if need > have:
            return f"the tail needs {need} tokens of KV cache, and the replicas to keep hold {have}"
    return ""
