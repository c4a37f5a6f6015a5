"""Which request is next on a node, where a group has no fixed order but a line: by age, or by credit.

In a group that is dispatched as *ready* requests stand by when they came. By *credit* they stand by how much their jobs
are ahead of their bounds. A node's next is the first in the line that claims it, so the first of all is next on all its
nodes. By credit a request over several pools comes before all requests over one of them, while all its nodes are free.
It is short, and if it waited for one pool, the other would idle.
"""

from collections.abc import Sequence
from typing import Final

from rollmuxd.core.context import SERVED, Context
from rollmuxd.core.estimates import ahead_ms, credit_ms, solo_ms
from rollmuxd.core.ids import Millis, NodeId
from rollmuxd.core.model import Dispatch, Group, Job, JobStatus, Slot, SlotStatus, nodes_in
from rollmuxd.core.order import PROMISED_NOTHING
from rollmuxd.core.spec import PhaseSpec

#: a job that has waited for so many of its iterations goes first
PATIENCE: Final = 3
#: a job that has ended a phase asks for the next one within this time, where it has no time of its own in between
ASKS_WITHIN_MS = 250


def next_turn_on(c: Context, group: Group, node: NodeId, line: Sequence[Slot]) -> int | None:
    """The index of the turn that is next on a node, where ``line`` is the group's; None: there is none."""
    if group.dispatch is Dispatch.SCHEDULE:
        return c.rotation.head(c.state, group, node)
    for slot in line:
        if node in c.rotation.nodes_of(c.state, group, slot.job, slot.phase):
            return c.rotation.turn_of(c.state, group, slot.job, slot.phase)
    return None


def line_of(c: Context, group: Group) -> list[Slot]:
    """The requests of a group in the order in which they are served; none, where a schedule gives the order.

    Some come before no other, and are not in it. No call attends them, they yield, their job is paused, or a node that
    they need is not up.
    """
    if group.dispatch is Dispatch.SCHEDULE:
        return []
    waiting = []
    for job in c.state.members(group):
        slot = c.state.request_of(job)
        if slot is None or job.slot is not None or slot.id in c.timers.detached or job.status is JobStatus.PAUSED:
            continue
        if c.state.are_up(c.rotation.nodes_of(c.state, group, job.id, slot.phase)) and not yields_to(c, group, slot):
            waiting.append(slot)
    waiting.sort(key=lambda slot: (slot.queued_at, len(slot.id), slot.id))
    if group.dispatch is Dispatch.CREDIT and len(waiting) > 1:
        waiting.sort(key=lambda slot: _standing(c, group, slot))
    return waiting


def _standing(c: Context, group: Group, slot: Slot) -> tuple[bool, bool, bool, Millis]:
    """Where a request stands in a line by credit: first one that waited very long, then that of a guarded job.

    Two guarded jobs would starve a third otherwise. Then one that goes at once, then by credit. The iteration at hand
    counts, and before the first one the wait. So while two wait both lose alike, and their order stays.
    """
    job = c.state.jobs[slot.job]
    waits = not c.rotation.goes_at_once(c.state, group, slot.job, slot.phase)
    slo = job.spec.slo if job.spec.slo is not None and job.promised else PROMISED_NOTHING
    before = c.now - slot.queued_at if job.progress.iteration_from is None else 0
    return c.now < patient_until(job, slot), not job.guarded, waits, ahead_ms(job, slo, c.now) - before


def patient_until(job: Job, slot: Slot) -> Millis:
    """When a request has waited for so long that it goes before jobs with less credit."""
    return slot.queued_at + PATIENCE * (solo_ms(job) or 0)


def waits_for_another(c: Context, group: Group, slot: Slot, nodes: tuple[NodeId, ...]) -> bool:
    """Whether a request waits for a moment, as another job is about to ask for a phase that goes before it.

    Such a phase spans several pools, some of these nodes among them. It is only a call away: its job has just ended the
    phase before it.
    """
    if c.rotation.goes_at_once(c.state, group, slot.job, slot.phase):
        return False
    for name in group.jobs:
        job = c.state.jobs[name]
        ended = job.progress.idle_from
        if name == slot.job or job.slot is not None or job.queued is not None or job.status not in SERVED:
            continue
        if ended is None or c.now >= ended + ASKS_WITHIN_MS or not (phase := next_phase(c, job)) or phase.gap_ms:
            continue
        claims = c.rotation.nodes_of(c.state, group, name, phase.name)
        if not set(claims).isdisjoint(nodes) and c.rotation.goes_at_once(c.state, group, name, phase.name):
            c.timers.at(ended + ASKS_WITHIN_MS, "dispatch", group.id)
            return True
    return False


def yields_to(c: Context, group: Group, slot: Slot) -> tuple[Job, Millis] | None:
    """The job that a request for another iteration leaves the nodes to, and until when; None: it leaves them to none.

    By credit a job without a promise begins no iteration beside a promised one that has less credit than an iteration
    of either takes alone. It waits while the other is there, and for nine of its own iterations at most: so it is never
    starved. A promised job does so too, for as much as it has credit beyond an iteration of its own. That ends when it
    has waited for so long that it goes before jobs with less credit.
    """
    job = c.state.jobs[slot.job]
    if group.dispatch is not Dispatch.CREDIT or job.status is not JobStatus.ADMITTED:
        return None
    takes = solo_ms(job)
    if takes is None or slot.phase != job.spec.phases[0].name:
        return None
    until = slot.queued_at + round((PROMISED_NOTHING - 1) * takes)
    if job.promised:
        until = min(slot.queued_at + (credit_ms(job) or 0) - takes, patient_until(job, slot))
    for other in c.state.members(group):
        short = other.promised and (credit_ms(other) or 0) < max(takes, solo_ms(other) or 0)
        if not short or set(nodes_in(job.pins)).isdisjoint(nodes_in(other.pins)):
            continue
        there = min(until, there_until(c, other, until))
        if c.now < there:
            return other, there
    return None


def there_until(c: Context, job: Job, most: Millis) -> Millis:
    """Until when a job is there if nothing else happens: at most then, where it runs or its request is attended."""
    if job.status not in SERVED:
        return c.now
    if job.slot is not None or job.queued is not None:
        return most if job.queued not in c.timers.detached else c.now
    idle, phase = job.progress.idle_from, next_phase(c, job)
    return c.now if idle is None or phase is None else idle + phase.gap_ms + c.config.grace_ms


def next_phase(c: Context, job: Job) -> PhaseSpec | None:
    """The next phase of the job's cycle; None: it has not begun."""
    phases = job.spec.phases
    for name in reversed(c.state.slots_of[job.id]):
        slot = c.state.slots[name]
        if slot.run == job.run and slot.ended is SlotStatus.RELEASED and not slot.side:
            at = next((at for at, phase in enumerate(phases, 1) if phase.name == slot.phase), 0)
            return phases[at % len(phases)]
    return None
