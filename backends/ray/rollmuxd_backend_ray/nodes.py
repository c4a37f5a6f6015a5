"""Which node of a cluster a host is."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollmuxd_backend_local.agent.frames import Node


class NotThere(Exception):
    """No node can be it, or several can, or it cannot be reached; says what there is, and what to do."""


def pick(wanted: Node, nodes: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The one living node that is meant, of what ``ray.nodes()`` says. Raises NotThere."""
    found = [node for node in nodes if _is(wanted, node)]
    alive = [node for node in found if node["Alive"]]
    if len(alive) == 1:
        return alive[0]
    if alive:
        which = ", ".join(_name(node) for node in alive)
        raise NotThere(
            f"{len(alive)} nodes of the cluster are {_said(wanted)} ({which}); tell them apart by options.node, "
            "options.labels or options.resources"
        )
    if found:
        raise NotThere(f"its node is dead ({found[-1].get('DeathReasonMessage') or 'the cluster does not say why'})")
    there = ", ".join(_name(node) for node in nodes if node["Alive"])
    raise NotThere(f"no node of the cluster is {_said(wanted)}; there are {there or 'none'}")


def _is(wanted: Node, node: Mapping[str, Any]) -> bool:
    names = (node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"], node["NodeID"])
    labels, resources = node.get("Labels") or {}, node.get("Resources") or {}
    return (
        (not wanted.name or wanted.name in names)
        and all(labels.get(key) == value for key, value in wanted.labels)
        # A dead node has no resources any more.
        and (not node["Alive"] or all(resources.get(key, 0) >= value for key, value in wanted.resources))
    )


def _said(wanted: Node) -> str:
    parts = [f"named {wanted.name}"] if wanted.name else []
    parts += [f"labelled {key}={value}" for key, value in wanted.labels]
    parts += [f"with {value:g} {key}" for key, value in wanted.resources]
    return " and ".join(parts) or "meant"


def _name(node: Mapping[str, Any]) -> str:
    name, address = node["NodeName"], node["NodeManagerAddress"]
    return str(address) if name == address else f"{name} ({address})"
