"""Whether a job fits on nodes, by what the nodes have: GPU memory."""

from collections.abc import Mapping, Sequence

from rollmuxd.core.decision import Reason
from rollmuxd.core.ids import NodeId, PoolName
from rollmuxd.core.model import Job, Node
from rollmuxd.core.state import State, allowed_residual_mb


def short_of_memory(state: State, job: Job, pins: Mapping[PoolName, Sequence[NodeId]]) -> Reason | None:
    """Which GPU has too little memory for the job on further nodes: its largest state beside what is left by others."""
    for pool, nodes in pins.items():
        mine = [spec for spec in job.spec.states if spec.pool == pool]
        for name in nodes:
            node = state.nodes[name]
            if not node.gpu_mb or not mine:
                continue
            there = [(spec.gpu_mb, spec.leftover_mb) for spec in mine] + _states_on(state, node)
            left = sum(leaves for _, leaves in there)
            need = left + max(max(0, loaded - leaves) for loaded, leaves in there)
            if need > node.gpu_mb:
                text = f"a GPU of {name} has {_gb(node.gpu_mb)} GB, and {_gb(need)} GB would be needed there"
                return Reason("gpu_memory", text, {"node": name, "need_gb": need / 1000})
    return None


def _states_on(state: State, node: Node) -> list[tuple[int, int]]:
    """What jobs keep on each GPU of a node, loaded and parked: those placed there, those to move there, and those that
    have not left it altogether.
    """
    there = [state.states[key] for key in node.states]
    return [(kept.spec.gpu_mb, allowed_residual_mb(kept)) for kept in there]


def _gb(mb: int) -> str:
    return f"{mb / 1000:.1f}"
