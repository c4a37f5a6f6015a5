"""Fillers: where they have their state, and the nodes that are lent to them."""

from msgspec.structs import replace

from rollmuxd.core import facts as f
from rollmuxd.core.apply.slots import step
from rollmuxd.core.lifecycle import meet
from rollmuxd.core.model import Job, JobState, nodes_in
from rollmuxd.core.state import State, state_key


def filler_placed(state: State, fact: f.FillerPlaced) -> None:
    """It has no group, and no node is pinned to it: jobs are placed as if it were not there."""
    job, node = state.jobs[fact.job], state.nodes[fact.node]
    meet(job, fact)
    job.reason, job.placed_at = None, fact.at
    job.pins = {fact.pool: (node.id,)}
    job.newest = dict(job.pins)
    node.fillers.append(job.id)
    for spec in job.spec.states:
        key = state_key(job.id, spec.pool, node.id)
        # no RAM is reserved for it: it goes where a placement needs the RAM
        state.states[key] = JobState(job.id, spec.pool, node.id, replace(spec, ram_mb=0), job.run)
        node.states.append(key)
        job.states.append(key)


def leave_node(state: State, job: Job) -> None:
    """Nothing of the filler is left on its node."""
    for key in job.states:
        state.nodes[state.states.pop(key).node].states.remove(key)
    for name in nodes_in(job.pins):
        state.nodes[name].fillers.remove(job.id)
    job.last_pins, job.pins, job.states, job.placed_at = job.pins, {}, [], None


def yield_asked(state: State, fact: f.YieldAsked) -> None:
    slot = step(state, fact)
    slot.yield_by, slot.reason = fact.due, fact.reason


def loan_ended(state: State, fact: f.LoanEnded) -> None:
    node = state.nodes[fact.node]
    node.loan, node.loan_ended_at = None, fact.at
    state.jobs[fact.job].harvested_ms += fact.used_ms
