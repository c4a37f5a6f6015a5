"""Optical switches: which circuits there are, and leaving a switch alone."""

from collections.abc import Iterable

from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.hosts.circuits import FabricStatus, Switch
from rollmuxd.daemon.http.routing import Call, PageQuery, Routes, find
from rollmuxd.spi import Circuit
from rollmuxd.wire.answers import CircuitView, FabricView, Page
from rollmuxd.wire.requests import ReasonBody

routes = Routes("fabric")


@routes.get("/v1/fabrics", problems=(429,))
async def list_fabrics(call: Call, query: PageQuery) -> Page[FabricView]:
    """All optical switches."""
    switches = call.services.switches
    return await call.page(query, lambda state: switches, lambda visibility, it, now: _view(it))


@routes.post("/v1/fabrics/{fabric}/degrade", needs=Role.ADMIN)
async def degrade_fabric(call: Call, fabric: str, body: ReasonBody) -> FabricView:
    """Leave a switch alone until it is restored: everything travels over the electrical network. Audited.

    A restart of the daemon does not restore it.
    """
    switch = find("fabric", call.services.switches, fabric)
    reason = body.reason or f"by {call.caller.name}"
    await call.services.journal.note_left_alone(fabric, reason)
    await call.note(fabric, "left_alone", reason=body.reason)
    switch.degrade(reason)
    return _view(switch)


@routes.post("/v1/fabrics/{fabric}/restore", needs=Role.ADMIN)
async def restore_fabric(call: Call, fabric: str) -> FabricView:
    """Set its circuits again. Audited."""
    switch = find("fabric", call.services.switches, fabric)
    await call.note(fabric, "restored")
    await call.services.journal.note_left_alone(fabric, "")
    switch.restore()
    return _view(switch)


def _view(switch: Switch) -> FabricView:
    nodes = {port: node for node, ports in switch.wired.items() for port in ports}

    def circuits(found: Iterable[Circuit]) -> list[CircuitView]:
        return [CircuitView(a, b, nodes.get(a, ""), nodes.get(b, "")) for a, b in sorted(found)]

    return FabricView(
        name=switch.name,
        driver=switch.driver,
        status=str(switch.status),
        degraded=switch.status is FabricStatus.DEGRADED,
        reason=switch.reason,
        circuits=None if switch.seen is None else circuits(switch.seen),
        wanted=circuits(switch.wanted()),
        stamp=switch.stamp,
    )
