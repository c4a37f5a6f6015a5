"""Puts the HTTP interface together: the routes, and what their calls share."""

from functools import cache
from importlib.metadata import version
from typing import Final

from starlette.types import ASGIApp

from rollmuxd.daemon.access.gate import Gate
from rollmuxd.daemon.http import openapi, routing
from rollmuxd.daemon.http.limits import Account
from rollmuxd.daemon.http.origin_check import OriginCheck
from rollmuxd.daemon.http.routes import (
    channel,
    fabric,
    facts,
    health,
    inventory,
    jobs,
    keys,
    logs,
    overview,
    plan,
    report,
    sessions,
    slots,
    web,
)
from rollmuxd.daemon.http.routing import Endpoint, Shared
from rollmuxd.daemon.metrics import Metrics
from rollmuxd.daemon.services import Services

#: In the order in which a request is matched: the calls that every iteration of every job makes come first.
ENDPOINTS: Final[tuple[Endpoint, ...]] = tuple(
    endpoint
    for noun in (
        *(slots, sessions, channel, jobs, logs, health, facts),
        *(overview, inventory, fabric, report, plan, keys, web),
    )
    for endpoint in noun.routes.endpoints
)


def make_app(services: Services, metrics: Metrics) -> ASGIApp:
    """The HTTP interface of these services. ``metrics`` is to be one of the writer's sinks (``metrics.sink``)."""
    settings = services.settings
    limits = settings.limits
    per_s = limits.calls_per_s
    shared = Shared(
        services=services,
        gate=Gate(services.journal, services.clock.now, require_keys=settings.access.require_keys),
        metrics=metrics,
        body_limit=round(limits.max_body_mb * 1_000_000),
        lease_s=settings.lease.lease_s,
        heartbeat_s=settings.lease.heartbeat_s,
        openapi=_description,
        origin_check=OriginCheck(settings),
        rates=Account(1 / per_s, per_s * limits.calls_burst_s - 1) if per_s else None,
    )
    return routing.router(shared, list(ENDPOINTS))


@cache
def _description() -> bytes:
    return openapi.describe(ENDPOINTS, version("rollmuxd"))
