"""What each owner used recently.

An owner's **use** is the GPU time of the nodes on which it has placements, in GPU-milliseconds. Each node counts once,
also where others share it. Half of the use is forgotten in each half-life. It is counted up when a placement begins or
ends; in between it is what follows from the GPUs held. Where two waiting jobs are of equal priority, the one goes first
whose owner has the least use for its share.
"""

from collections.abc import Mapping
from typing import Final

from rollmuxd.core.ids import Millis, NodeId, PoolName
from rollmuxd.core.model import Owner, nodes_in

#: half of what an owner has used is forgotten in this time
HALF_LIFE_MS: Final = 24 * 3_600_000


def over_its_nodes(name: str, owner: Owner | None, pins: Mapping[PoolName, tuple[NodeId, ...]], most: int) -> str:
    """Why an owner may not have those nodes, where it may hold so many at most; empty: it may. 0: there is no limit."""
    held = owner.nodes if owner is not None else {}
    more = set(nodes_in(pins)) - held.keys()
    if not most or len(held) + len(more) <= most:
        return ""
    return f"owner {name} holds {len(held)} of its {most} nodes, and it would take {len(more)} more"


def use_of(owner: Owner | None, now: Millis) -> int:
    """An owner's use at a time, in GPU-milliseconds.

    The use of an owner that holds the same GPUs for ever approaches a limit: its GPUs x half-life / ln 2.
    """
    if owner is None:
        return 0
    limit = owner.gpus * HALF_LIFE_MS * 1_442_695 // 1_000_000
    missing = limit - owner.use
    left = int(abs(missing) * 0.5 ** ((now - owner.at) / HALF_LIFE_MS))
    return limit - left if missing > 0 else limit + left
