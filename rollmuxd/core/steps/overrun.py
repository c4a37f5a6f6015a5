"""Slots that run far longer than expected: a warning, and where it is configured, an end.

The bound is three times the p95 of the phase (its planned time while it was never seen to end), and never less than
``min_overrun_ms``. A long run is no proof of a fault, and on a box of your own you decide. So by default it is said
once, and nothing is done. With ``overrun_revoke`` the slot is ended after a grace, but only if another job waits for
its GPUs. A phase whose time was neither measured nor stated is left alone.
"""

from rollmuxd.core import facts as f
from rollmuxd.core.causes import Cause
from rollmuxd.core.context import Context
from rollmuxd.core.estimates import by_work_ms, quantile_ms
from rollmuxd.core.ids import JobId, Millis
from rollmuxd.core.model import Job, Slot, SlotStatus, nodes_in
from rollmuxd.core.steps.dispatch import is_waited_for
from rollmuxd.core.steps.reclaim import take_away

#: a slot has this many times the p95 of its phase
TIMES = 3
#: how often to check whether another job waits for the GPUs of a slot that is to be revoked
LOOK_MS = 30_000


def expected_ms(c: Context, job: Job, slot: Slot) -> Millis | None:
    """What the slot's phase takes at most, as far as is known: the p95 of what was seen, else what was planned.

    Or what it takes for the work that the job has reported before it, if that is more.
    """
    times = job.times.get(slot.phase)
    seen = None if times is None else quantile_ms(times.recent_ms, 0.95)
    phase = job.spec.phase(slot.phase)
    return max((it for it in (seen, by_work_ms(job, phase)) if it is not None), default=phase.planned_ms)


def due(c: Context, job: JobId) -> None:
    """The job's slot may have run too long: warn if it has, and act if that is configured.

    A deadline of the job and not of the slot, so that short slots that follow each other share one.
    """
    known = c.state.jobs.get(job)
    slot = None if known is None else c.state.slot_of(known)
    if known is None or slot is None or slot.status not in (SlotStatus.RUNNING, SlotStatus.TAIL):
        return
    when = warned(c, known, slot) if slot.overrun_at is None else slot.overrun_at
    if when is None or not c.config.overrun_revoke:
        return
    if not c.is_past(max(when, c.timers.renewed_at) + c.config.overrun_grace_ms, "overrun", job):
        return
    expected = expected_ms(c, known, slot)
    held = [name for name in nodes_in(known.pins) if slot.id in c.state.nodes[name].holders]
    if expected is None or not is_waited_for(c, known, held):
        c.timers.at(c.now + LOOK_MS, "overrun", job)
        return
    data = {"ran_s": (c.now - (slot.granted_at or 0)) // 1000, "phase": slot.phase, "expected_s": expected / 1000}
    take_away(c, slot, Cause("overrun", data), "overrun")


def warned(c: Context, job: Job, slot: Slot) -> Millis | None:
    """Say that the slot overran, and since when; None: it does not yet."""
    granted = slot.granted_at or 0
    bound = max(TIMES * (expected_ms(c, job, slot) or 0), c.config.min_overrun_ms)
    # While the daemon was away nothing could be released: a client that is back within a lease was not late.
    when = granted + bound
    if c.timers.renewed_at > granted:
        when = max(when, c.timers.renewed_at + c.config.lease_ms)
    if not c.is_past(when, "overrun", job.id):
        return None
    c.fact(f.SlotOverran(c.now, slot.id, c.now - granted, bound))
    return c.now
