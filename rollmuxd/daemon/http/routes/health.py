"""Probes, figures, and the description of all this."""

from collections.abc import Container
from importlib.metadata import version
from typing import Any, Final

from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import Caller
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, Plain, Routes
from rollmuxd.daemon.journal.store import DISK_FULL
from rollmuxd.daemon.metrics import gauges
from rollmuxd.wire.answers import Health

routes = Routes("daemon", charged=False)

#: read once: probes come every second
VERSION: Final = version("rollmuxd")

#: just that, since any caller may ask
RETENTION_FAILED = "it could not be looked after: see `rollmuxd journal check`, and journal_retention_failed in the log"


@routes.get("/healthz", needs=None)
async def healthz(call: Call) -> Health:
    """The process lives and its loop turns."""
    return Health(status="ok", version=VERSION)


@routes.get("/readyz", needs=None, problems=(503,))
async def readyz(call: Call) -> Health:
    """The journal is open and replayed, and the daemon is not being stopped.

    ``reason`` is what there is to be said of the journal all the same.
    """
    if call.services.writer.draining.is_set():
        raise Refusal(problems.DRAINING, "the daemon is being stopped")
    await call.read(lambda core, now: None)
    reasons = (
        DISK_FULL if call.services.journal.tight else "",
        RETENTION_FAILED if call.services.today.trouble else "",
    )
    return Health(status="ready", version=VERSION, reason="; ".join(filter(None, reasons)))


@routes.get("/metrics", produces=("text/plain",))
async def metrics(call: Call) -> Plain:
    """Figures for Prometheus. Series of single jobs, and of owners, are those that the caller may see.

    A viewer's key is a monitor's if its owner has no jobs and is not among the configured ``owners``. It sees the
    series of every owner, and of no single job.
    """
    accept = call.header(b"accept") or ""
    configured = call.services.settings.owners
    call.shared.services.writer.tell_sinks()
    caller, path = call.caller, getattr(call.services.journal, "path", None)
    failed = bool(call.services.today.trouble)
    body, media_type = await call.read(
        lambda core, now: call.shared.metrics.expose(
            gauges(core.state, now, caller.may_read, path, retention_failed=failed),
            accept,
            None if _sees_all_owners(core.state, caller, configured) else caller.owner,
        )
    )
    return Plain(body, media_type)


def _sees_all_owners(state: State, caller: Caller, configured: Container[str]) -> bool:
    """Whether the caller is an operator or a monitor. A monitor may only look, for an owner without jobs here."""
    if caller.admin or caller.role is not Role.VIEWER:
        return caller.admin
    return caller.owner not in configured and all(job.owner != caller.owner for job in state.jobs.values())


@routes.get("/v1/openapi.json", needs=None)
async def openapi(call: Call) -> dict[str, Any]:
    """This interface, described in OpenAPI 3.1."""
    return Plain(call.shared.openapi(), "application/json")  # type: ignore[return-value]  # encoded once
