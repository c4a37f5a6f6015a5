"""Sessions: a client process says that it is there, and goes on saying so."""

from collections.abc import Callable

from rollmuxd.core.ids import JobId, SessionId
from rollmuxd.core.inputs import CloseSession, Heartbeat, OpenSession, ProcessGone
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import find_job, find_session
from rollmuxd.daemon.http import views
from rollmuxd.daemon.http.routes._query import BODY
from rollmuxd.daemon.http.routing import Call, Routes
from rollmuxd.wire.answers import Directive, HeartbeatView, SessionView
from rollmuxd.wire.requests import HeartbeatBody, SessionBody

routes = Routes("sessions")


@routes.post("/v1/sessions/{session}/heartbeat", problems=(*BODY, 404, 409))
async def heartbeat(call: Call, session: str, body: HeartbeatBody) -> HeartbeatView:
    """Renew the lease; may bring directives.

    With ``gone`` it is the last beat: the process of the session has ended, and its job is lost at once. 409 where the
    session is that of another process.
    """
    _, mine = await call.act_on(find_session, session)
    if body.gone is not None:
        gone = ProcessGone(session=session, pid=body.gone.pid, started=body.gone.started)
        await call.submit(gone, session, _status_of(session))
        return HeartbeatView(lease_s=0.0)
    given = Heartbeat(session=session, slot=body.slot, done=body.done, total=body.total)
    answer = await call.submit(given, session, once=session)
    told = call.told(call.services.driver.scheduler)
    directives = [views.directive(given, told) for given in answer.directives]
    if unmet := told.unmet(mine.id):
        directives.append(Directive("unpromised", reason=unmet))
    return HeartbeatView(lease_s=call.shared.lease_s, directives=directives)


@routes.post("/v1/jobs/{job}/sessions", status=201, also=(200,), problems=(*BODY, 404, 409))
async def open_session(call: Call, job: str, body: SessionBody) -> SessionView:
    """A client process of a run is there. It fences an older one of the same run."""
    mine = await call.act_on(find_job, job)
    given = OpenSession(
        job=mine.id, idempotency_key=body.idempotency_key, pid=body.pid, host=body.host, started=body.started
    )
    answer = await call.submit(given, mine.id, _session_of(mine.id))
    if answer.repeated:
        call.status = 200
    assert answer.session is not None
    return await _show(call, answer.session)


@routes.delete("/v1/sessions/{session}", problems=(404, 409))
async def close_session(call: Call, session: str) -> SessionView:
    """The process leaves in good order; its job stays."""
    found, _ = await call.act_on(find_session, session)
    view = SessionView(found.id, found.job, found.run, lease_s=0.0, heartbeat_s=call.shared.heartbeat_s)
    await call.submit(CloseSession(session=session), session, _status_of(session))
    return view


def _status_of(session: SessionId) -> Callable[[State], str]:
    def status(state: State) -> str:
        known = state.sessions.get(session)
        return "" if known is None else f"{session} {known.status}, of job {known.job}"

    return status


def _session_of(job: JobId) -> Callable[[State], str]:
    def status(state: State) -> str:
        known = state.jobs.get(job)
        return "" if known is None or known.session is None else _status_of(known.session)(state)

    return status


async def _show(call: Call, session: str) -> SessionView:
    found, _ = await call.read(lambda core, now: find_session(core.state, call.caller, session))
    return SessionView(
        found.id,
        found.job,
        found.run,
        lease_s=call.shared.lease_s,
        heartbeat_s=call.shared.heartbeat_s,
        journal=call.services.journal.id,
    )
