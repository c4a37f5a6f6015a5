"""Why a filler has no node, or is not lent the one that it has."""

from rollmuxd.core.context import Context
from rollmuxd.core.decision import Reason
from rollmuxd.core.model import Job, NodeStatus, Slot, nodes_in
from rollmuxd.core.steps import lend
from rollmuxd.explain.causes import sentence


def why_no_home(c: Context, job: Job) -> list[Reason]:
    """Why a filler has no node."""
    want = job.spec.wants[0]
    nodes = [it for it in c.state.nodes.values() if want.pool in it.pools and (not want.named or it.id in want.named)]
    fit = [it for it in nodes if it.status is NodeStatus.UP]
    if not fit:
        return [Reason("no_node", f"no node of pool {want.pool} that it may have is up")]
    found = ((it.id, why) for it in fit if (why := lend.no_room(c, job, it)) is not None)
    return [Reason("no_room", sentence(why), {"node": node}) for node, why in found][:1]


def why_not_lent(c: Context, filler: Job) -> list[Reason]:
    """Why a filler that has a node, and asks for it, is not lent it now."""
    if not c.config.fillers:
        return [Reason("fillers_off", "no node is lent: fillers are switched off (filler.enabled)")]
    node = c.state.nodes[nodes_in(filler.pins)[0]]
    if node.status is not NodeStatus.UP:
        return [Reason("node", f"node {node.id} is {node.status}", {"node": node.id})]
    if node.holders:
        holder = node.holders[0]
        return [Reason("busy", f"slot {holder} holds node {node.id}", {"node": node.id, "slot": holder})]
    due, next_ = lend.next_due(c, node)
    back = lend.back_ms(c, node, filler, next_)
    if not lend.may_wait(c, c.state.group_of(node), back):
        share = f"{100 * c.config.fillers_max_share:g} %"
        text = f"a loan of {node.id} may hold its jobs up by {back / 1000:g} s, and by {share} of their time at most"
        return [Reason("share", text, {"node": node.id, "back_s": back / 1000})]
    if due is not None and next_ is not None and not lend.is_worth_it(c, node, filler, due, next_):
        text = f"another job is expected on {node.id} in {(due - c.now) / 1000:g} s, too soon for a loan"
        return [Reason("due", text, {"node": node.id, "due_s": (due - c.now) / 1000})]
    return [Reason("soon", f"node {node.id} is being made ready, or another filler has it first", {"node": node.id})]


def fillers_before(c: Context, filler: Job, slot: Slot) -> int:
    """How many fillers can be lent the same node before this one."""
    own = (filler.harvested_ms, slot.queued_at, filler.id)
    return sum(it < own for name in nodes_in(filler.pins) for it in lend.asking(c, c.state.nodes[name]))
