"""Sessions: a client process says that it is there, and keeps saying so."""

from collections.abc import Iterable
from zlib import crc32

import msgspec

from rollmuxd.core import decision as core
from rollmuxd.core.ids import JobId, Millis, SessionId, SlotId
from rollmuxd.core.inputs import CloseSession, GiveBack, Heartbeat, OpenSession, ProcessGone
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon.access.gate import find_job, find_session
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.routing import Call, Routes
from rollmuxd.wire.answers import Directive, HeartbeatView, SessionView
from rollmuxd.wire.requests import HeartbeatBody, SessionBody

routes = Routes("sessions", charged=False)


@routes.post("/v1/sessions/{session}/heartbeat", problems=(409,))
async def heartbeat(call: Call, session: str, body: HeartbeatBody) -> HeartbeatView:
    """Renew the lease; may bring directives.

    With ``wait_s`` it is a long poll. It is answered when the directives of ``slot`` differ from those that ``tag``
    names, or after ``wait_s`` or half a lease. It is answered at once if half of the owner's
    ``limits.max_facts_waiting`` calls wait already. It renews the lease when it comes, and not again while it waits.

    With ``gone`` it is the last beat: the process of the session has ended, and its job is lost at once. 409 where the
    session is that of another process.
    """
    _, mine = await call.act_on(find_session, session)
    if body.gone is not None:
        gone = ProcessGone(session=session, pid=body.gone.pid, started=body.gone.started)
        await call.submit(gone, session)
        return HeartbeatView(lease_s=0.0)
    given = Heartbeat(session=session, slot=body.slot, done=body.done, total=body.total)
    answer = await call.submit(given, session, once=session)
    visibility = call.visibility(call.services.writer.scheduler)
    view = _heard(call, visibility, mine.id, answer.directives)
    # The owner's dashboards and feeds have half of the places for themselves.
    most, waiting = call.services.settings.limits.max_facts_waiting, call.shared.facts_waiting[call.caller.owner]
    if body.slot is None or view.tag != body.tag or not body.wait_s or 2 * waiting >= most:
        return view
    return await _until_others(call, mine.id, session, body.slot, view, min(body.wait_s, call.shared.lease_s / 2))


def _heard(call: Call, visibility: Visibility, job: JobId, found: Iterable[core.Directive]) -> HeartbeatView:
    """The answer to a heartbeat."""
    directives = [views.directive(given, visibility) for given in found]
    named = msgspec.json.encode([(it.kind, it.slot, it.keep, it.gpus) for it in directives])
    tag = f"{crc32(named):08x}" if directives else ""
    if unmet := visibility.figures.unmet(job):  # its figures change all the time, and are worth no answer of their own
        directives.append(Directive("unpromised", reason=unmet))
    if (at := views.ends_at(visibility.core.state, job)) is not None:
        directives.append(Directive("ends", ends_at=at))
    return HeartbeatView(lease_s=call.shared.lease_s, directives=directives, tag=tag)


async def _until_others(
    call: Call, job: JobId, session: SessionId, slot: SlotId, view: HeartbeatView, wait_s: float
) -> HeartbeatView:
    """Wait until the directives change, for at most so long."""
    writer = call.services.writer

    def look(scheduler: Scheduler, now: Millis) -> HeartbeatView:
        return _heard(call, call.visibility(scheduler), job, scheduler.directives(session, slot, now))

    async def until_others() -> HeartbeatView:
        while (found := await call.read(look)).tag == view.tag and not writer.draining.is_set():
            await waiter.changed()
        return found

    with writer.subscribe_group(job) as waiter, call.waiting():
        if (others := await call.park(until_others, wait_s)) is not None:
            return others
        return await call.read(look)


@routes.post("/v1/jobs/{job}/sessions", status=201, also=(200,), problems=(409,))
async def open_session(call: Call, job: str, body: SessionBody) -> SessionView:
    """A client process of a run is there. It fences an older one of the same run."""
    mine = await call.act_on(find_job, job)
    given = OpenSession(
        job=mine.id, idempotency_key=body.idempotency_key, pid=body.pid, host=body.host, started=body.started
    )
    answer = await call.submit(given, mine.id)
    if answer.repeated:
        call.status = 200
    assert answer.session is not None
    return await _show(call, answer.session)


@routes.delete("/v1/sessions/{session}", problems=(409,))
async def close_session(call: Call, session: str) -> SessionView:
    """The process leaves in good order; its job stays."""
    found, _ = await call.act_on(find_session, session)
    view = SessionView(found.id, found.job, found.run, lease_s=0.0, heartbeat_s=call.shared.heartbeat_s)
    await call.submit(CloseSession(session=session), session)
    return view


@routes.post("/v1/sessions/{session}/give-back", problems=(409,))
async def give_back(call: Call, session: str) -> SessionView:
    """Release the slot that the session holds, and withdraw its request.

    For a process that was interrupted in a call, and does not know whether that was heard. Repeating it is harmless.
    """
    await call.act_on(find_session, session)
    await call.submit(GiveBack(session=session), session)
    return await _show(call, session)


async def _show(call: Call, session: str) -> SessionView:
    found, _ = await call.read(lambda core, now: find_session(core.state, call.caller, session))
    return SessionView(
        found.id,
        found.job,
        found.run,
        lease_s=call.shared.lease_s,
        heartbeat_s=call.shared.heartbeat_s,
        journal=call.services.journal.id,
        tail_from=call.services.writer.scheduler.config.tail_from,
    )
