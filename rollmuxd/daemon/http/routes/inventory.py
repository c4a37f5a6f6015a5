"""Nodes, hosts, pools and groups: what there is, and what operators do to it."""

from collections.abc import Callable

from msgspec import UNSET, UnsetType

from rollmuxd.core.errors import Rejected
from rollmuxd.core.ids import HostId, NodeId
from rollmuxd.core.inputs import DeclareClean, DrainNode, Input, UndrainNode
from rollmuxd.core.model import Group, Node, NodeStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.routing import Call, Id, PageQuery, Routes, find
from rollmuxd.wire.answers import GroupView, HostView, NodeView, Page, PoolView
from rollmuxd.wire.requests import DrainBody, ReasonBody

routes = Routes("inventory")


class NodesQuery(PageQuery, frozen=True):
    """Filters of the list of nodes."""

    pool: Id | UnsetType = UNSET
    status: NodeStatus | UnsetType = UNSET
    host: Id | UnsetType = UNSET


class GroupsQuery(PageQuery, frozen=True):
    """Filters of the list of groups."""

    pool: Id | UnsetType = UNSET
    owner: Id | UnsetType = UNSET


# ---- nodes -----------------------------------------------------------------------------------------------------------


@routes.get("/v1/nodes", problems=(429,))
async def list_nodes(call: Call, query: NodesQuery) -> Page[NodeView]:
    """All nodes."""

    def wanted(state: State, node: Node) -> bool:
        return (
            (query.pool is UNSET or query.pool in node.pools)
            and query.status in (UNSET, node.status)
            and query.host in (UNSET, node.host)
        )

    return await call.page(
        query, lambda state: state.nodes, lambda visibility, node, now: _view(call, visibility, node), wanted
    )


# A node's id has a slash in it, so these three come before the node itself, which would match them too.
@routes.post("/v1/nodes/{node:path}/drain", needs=Role.ADMIN, problems=(409,))
async def drain_node(call: Call, node: str, body: DrainBody) -> NodeView:
    """Nothing new on it; drained when its slots have ended and its GPUs are clean. ``evict``: end its jobs.

    Without, ``jobs`` in the answer has those that stay placed on it and wait.
    """
    return await _operate(call, node, DrainNode(node, call.caller.name, body.evict), body.reason)


@routes.post("/v1/nodes/{node:path}/undrain", needs=Role.ADMIN, problems=(409,))
async def undrain_node(call: Call, node: str) -> NodeView:
    """It may be used again."""
    return await _operate(call, node, UndrainNode(node, call.caller.name))


@routes.post("/v1/nodes/{node:path}/declare-clean", needs=Role.ADMIN, problems=(409,))
async def declare_node_clean(call: Call, node: str, body: ReasonBody) -> NodeView:
    """Declare that nothing of any job is left on its GPUs. Audited."""
    return await _operate(call, node, DeclareClean(node, call.caller.name, body.reason), body.reason)


@routes.get("/v1/nodes/{node:path}")
async def get_node(call: Call, node: str) -> NodeView:
    """One node: ``/v1/nodes/host1/gpu0-3``."""
    return await call.read(lambda core, now: _view(call, call.visibility(core), core.state.node(node)))


async def _operate(call: Call, node: NodeId, given: Input, reason: str = "") -> NodeView:
    await call.submit(given, node, reason=reason, always=True)
    return await get_node(call, node)


def _view(call: Call, visibility: Visibility, node: Node) -> NodeView:
    return views.node_view(visibility, node, call.services.actuator.seen)


# ---- hosts -----------------------------------------------------------------------------------------------------------


@routes.get("/v1/hosts", problems=(429,))
async def list_hosts(call: Call, query: PageQuery) -> Page[HostView]:
    """All hosts."""
    return await call.page(
        query, lambda state: state.hosts, lambda visibility, host, now: views.host_view(visibility, host)
    )


@routes.get("/v1/hosts/{host}")
async def get_host(call: Call, host: str) -> HostView:
    """One host."""
    return await call.read(lambda core, _: views.host_view(call.visibility(core), find("host", core.state.hosts, host)))


@routes.post("/v1/hosts/{host}/drain", needs=Role.ADMIN, problems=(409,))
async def drain_host(call: Call, host: str, body: DrainBody) -> HostView:
    """Drain all its nodes. Without ``evict``, ``jobs`` has those that stay placed there and wait."""
    return await _each_node(call, host, lambda node: DrainNode(node, call.caller.name, body.evict), body.reason)


@routes.post("/v1/hosts/{host}/undrain", needs=Role.ADMIN, problems=(409,))
async def undrain_host(call: Call, host: str) -> HostView:
    """Its nodes may be used again."""
    return await _each_node(call, host, lambda node: UndrainNode(node, call.caller.name))


@routes.post("/v1/hosts/{host}/declare-clean", needs=Role.ADMIN, problems=(409,))
async def declare_host_clean(call: Call, host: str, body: ReasonBody) -> HostView:
    """Declare that nothing of any job is left on its GPUs. Audited."""
    return await _each_node(call, host, lambda node: DeclareClean(node, call.caller.name, body.reason), body.reason)


async def _each_node(call: Call, host: HostId, given: Callable[[NodeId], Input], reason: str = "") -> HostView:
    """Tell it of each node. A refusal is answered only if every node refuses: else something was done."""
    view = await get_host(call, host)
    refusals: list[Rejected] = []
    for node in view.nodes:
        try:
            await _operate(call, node, given(node), reason)
        except Rejected as refused:
            refusals.append(refused)
    if refusals and len(refusals) == len(view.nodes):
        raise refusals[0]
    return await get_host(call, host)


# ---- pools and groups ------------------------------------------------------------------------------------------------


@routes.get("/v1/pools", problems=(429,))
async def list_pools(call: Call, query: PageQuery) -> Page[PoolView]:
    """All pools."""
    pools = views.pool_views(call.services.writer.scheduler.state)  # once: each is made of all nodes
    return await call.page(query, lambda state: pools, lambda visibility, pool, now: pool)


@routes.get("/v1/groups", problems=(429,))
async def list_groups(call: Call, query: GroupsQuery) -> Page[GroupView]:
    """All groups. Jobs of other owners appear by their ids."""

    def wanted(state: State, group: Group) -> bool:
        jobs = [state.jobs[job] for job in group.jobs]
        return (query.pool is UNSET or any(query.pool in state.nodes[node].pools for node in group.nodes)) and (
            query.owner is UNSET or any(job.owner == query.owner and call.caller.may_read(job) for job in jobs)
        )

    return await call.page(
        query, lambda state: state.groups, lambda visibility, group, now: views.group_view(visibility, group), wanted
    )


@routes.get("/v1/groups/{group}")
async def get_group(call: Call, group: str) -> GroupView:
    """One group."""
    return await call.read(
        lambda core, _: views.group_view(call.visibility(core), find("group", core.state.groups, group))
    )
