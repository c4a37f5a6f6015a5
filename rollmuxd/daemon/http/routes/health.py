"""Probes, figures, and the description of all this."""

from importlib.metadata import version
from typing import Any

from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.glue import Call, Plain, Routes
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.wire.answers import Health

routes = Routes("daemon")


@routes.get("/healthz", needs=None)
async def healthz(call: Call) -> Health:
    """The process lives and its loop turns."""
    return Health(status="ok", version=version("rollmuxd"))


@routes.get("/readyz", needs=None, problems=(503,))
async def readyz(call: Call) -> Health:
    """The journal is open and replayed, and the daemon is not being stopped."""
    if call.services.driver.draining.is_set():
        raise Refusal(problems.DRAINING, "the daemon is being stopped")
    await call.read(lambda core, now: None)
    return Health(status="ready", version=version("rollmuxd"))


@routes.get("/metrics", produces=("text/plain",))
async def metrics(call: Call) -> Plain:
    """Figures for Prometheus. Series of single jobs are those that the caller may see."""
    accept = call.header(b"accept") or ""
    call.shared.services.driver.tell_sinks()
    caller, path = call.caller, getattr(call.services.journal, "path", None)
    body, media_type = await call.read(
        lambda core, now: call.shared.metrics.expose(
            core.state, accept, now=now, may_read=caller.may_read, journal=path
        )
    )
    return Plain(body, media_type)


@routes.get("/v1/openapi.json", needs=None)
async def openapi(call: Call) -> dict[str, Any]:
    """This interface, described in OpenAPI 3.1."""
    return Plain(call.shared.openapi, "application/json")  # type: ignore[return-value]  # encoded once, at the start
