"""Slots: asking for the turn, waiting for it, giving it back. The calls that every iteration of every job makes."""

import asyncio
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from typing import Final, Literal

import anyio
from msgspec import UNSET, UnsetType

from rollmuxd.core.errors import Conflict, Rejected
from rollmuxd.core.ids import GpuId, JobId, Millis, NodeId, SlotId
from rollmuxd.core.inputs import (
    DetachSlot,
    GpuObservation,
    GrowSlot,
    NextRequest,
    ReleaseSlot,
    RequestSlot,
    RevokeSlot,
    ShrinkSlot,
    WithdrawSlot,
)
from rollmuxd.core.model import Job, JobStatus, OrderKind, OrderStatus, Slot, SlotStatus, nodes_in
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.spec import Park
from rollmuxd.core.state import State
from rollmuxd.daemon.access.gate import find_job, find_slot
from rollmuxd.daemon.access.keys import Role
from rollmuxd.daemon.access.visibility import Visibility
from rollmuxd.daemon.http import problems, views
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.daemon.http.routing import Call, ClientGone, Id, PageQuery, Routes
from rollmuxd.daemon.writer import Unavailable, Waiter
from rollmuxd.wire.answers import Page, ReleaseView, SlotView
from rollmuxd.wire.requests import GrowBody, ReasonBody, ReleaseBody, ShrinkBody, SlotBody

routes = Routes("slots", charged=False)

#: a release that parks is answered when the order has ended, which the order's own limit bounds; this bounds a bug
PARK_BOUND_S: Final = 595.0
#: a last word to the core, when the client is gone already
LAST_WORD_S: Final = 5.0


@routes.post("/v1/jobs/{job}/slots", problems=(409, 429, 503))
async def request_slot(call: Call, job: str, body: SlotBody) -> SlotView:
    """Ask for a slot, and wait up to ``wait_s`` for it. The same ``request_id`` is the same slot.

    ``running``: it is yours. ``queued``, ``loading``: not yet; ask again with the same ``request_id`` before the
    re-attach time is over, and it keeps its place. 409 ``slot_ended``: it will never be, and ``data`` says why.
    """
    mine = await call.act_on(find_job, job)
    attended, key = call.shared.attended, (mine.id, body.request_id)
    slot: SlotId | None = None
    waits = True
    # Counted from before the request is submitted, so that a call that leaves does not detach what another, just
    # arrived, has attached.
    attended[key] += 1
    try:
        given = RequestSlot(job=mine.id, session=body.session, phase=body.phase, request_id=body.request_id)
        answer = await call.submit(given, mine.id, once=f"{mine.id} {body.request_id}", reason=f"phase {body.phase}")
        assert answer.slot is not None
        slot = answer.slot
        if answer.repeated:
            call.services.writer.attended(mine.id)
        view = await _granted(call, slot, body.wait_s)
        waits = SlotStatus(view.status) in views.COMING
        return view
    finally:
        attended[key] -= 1
        if not attended[key]:
            del attended[key]
            # A daemon that drains leaves its waiters attached: they come back to the one that follows it.
            if slot is not None and waits and not call.services.writer.draining.is_set():
                await detach(call, slot)


async def detach(call: Call, slot: SlotId) -> None:
    """No call attends this request any longer. Also said when the call itself is cancelled."""
    with anyio.move_on_after(LAST_WORD_S, shield=True), suppress(Rejected, Unavailable):
        await call.services.writer.submit(DetachSlot(slot=slot))


async def _while(call: Call, waiter: Waiter, holds: Callable[[Scheduler, Millis], bool]) -> None:
    """Wait while that holds and the daemon is not stopped. It is looked at with each news."""
    while not call.services.writer.draining.is_set() and await call.read(holds):
        await waiter.changed()


async def _granted(call: Call, slot: SlotId, wait_s: float) -> SlotView:
    """Wait until the slot runs, for at most so long."""
    writer = call.services.writer

    def waits(core: Scheduler, now: Millis) -> bool:
        # Only the status: why it waits takes some thought, and is worth it once, in the answer.
        return core.state.slot(slot).status in views.COMING

    with writer.subscribe(slot) as waiter:
        if await call.read(waits) and wait_s > 0:
            await call.park(partial(_while, call, waiter, waits), wait_s)
    view = await _show(call, slot)
    status = SlotStatus(view.status)
    if wait_s > 0 and status in views.COMING and writer.draining.is_set():
        raise Refusal(problems.DRAINING, "the daemon is being stopped or restarted; the request keeps its place")
    if status not in views.COMING and status not in views.ON:
        because = f": {view.reason}" if view.reason else ""
        raise Refusal(
            problems.SLOT_ENDED,
            f"slot {slot} is {view.status}{because}",
            data={
                "slot": slot,
                "status": view.status,
                "reason": view.reason,
                "ended": await call.read(lambda core, _: str(core.state.slot(slot).ended or SlotStatus.RELEASED)),
                "granted_at": view.granted_at,
            },
        )
    return view


@routes.post("/v1/slots/{slot}/release", problems=(409, 503))
async def release_slot(call: Call, slot: str, body: ReleaseBody) -> ReleaseView:
    """The phase is over. May carry the request for the next one, and says what became of that.

    Repeating it repeats the answer. Of a job with ``park=at_release`` it is answered when the state is parked.
    """
    mine, job = await call.act_on(find_slot, slot)
    fence = views.fence_of(body.fence)
    seen: tuple[GpuObservation, ...] = ()
    if mine.status in views.ON and mine.fence == fence:
        seen = await _observation(call, _unmoved(call.services.writer.scheduler.state, mine, job))
    following = None if body.next is None else NextRequest(phase=body.next.phase, request_id=body.next.request_id)
    writer = call.services.writer
    with writer.subscribe(slot) as waiter:
        given = ReleaseSlot(slot=slot, fence=fence, seen=seen, next=following, measured=body.measured)
        answer = await call.submit(given, slot)
        if job.spec.park is Park.AT_RELEASE:
            parks = partial(_while, call, waiter, lambda core, _: _parks(core.state, slot, job.id))
            try:
                await call.park(parks, PARK_BOUND_S)
            except ClientGone:
                await _leave(call, answer.next_slot)
                raise

    def look(core: Scheduler, now: Millis) -> ReleaseView:
        ended = core.state.slots.get(slot)
        coming = core.state.slots.get(answer.next_slot or "")
        visibility = call.visibility(core)
        return ReleaseView(
            slot=slot,
            status=str(SlotStatus.OVER if ended is None else ended.status),
            next=None if coming is None else views.slot_view(visibility, coming, job, now),
            next_refused=visibility.sentence(answer.next_refused) or None,
        )

    view = await call.read(look)
    await _leave(call, answer.next_slot)
    return view


async def _leave(call: Call, following: SlotId | None) -> None:
    """The request that a release has carried has its place; the call that waits for it may be still to come."""
    coming = call.services.writer.scheduler.state.slots.get(following or "")
    if coming is None or coming.status not in views.COMING:
        return
    if (coming.job, coming.request_id) not in call.shared.attended:
        await detach(call, coming.id)


def _unmoved(state: State, slot: Slot, job: Job) -> dict[str, list[GpuId]]:
    """By host, the slot's GPUs on nodes where no residency driver moves a state of the job.

    There nothing will be parked, so no other look would find whether the GPUs are clean.
    """
    moved = {state.states[key].node for key in job.states if key in state.states}
    return _by_host(state, job, slot.gpus, but_on=moved)


def _by_host(
    state: State, job: Job, wanted: Collection[GpuId], *, but_on: Collection[NodeId] = ()
) -> dict[str, list[GpuId]]:
    """By host, those of these GPUs that are on the job's nodes, in the order of these."""
    hosts: dict[str, list[GpuId]] = {}
    held = dict.fromkeys(wanted)
    for name in nodes_in(job.pins):
        if name not in but_on and (gpus := [gpu for gpu in state.nodes[name].gpus if gpu in held]):
            hosts.setdefault(state.nodes[name].host, []).extend(gpus)
    return hosts


async def _observation(call: Call, hosts: dict[str, list[GpuId]]) -> tuple[GpuObservation, ...]:
    """What the backends see on these GPUs now; nothing of a host that cannot say. Bounded by the actuator."""
    looks = [call.services.actuator.observe(host, gpus) for host, gpus in hosts.items()]
    if len(looks) == 1:  # a task for it would cost most hand-overs some turns of the loop
        return await looks[0]
    return tuple(gpu for seen in await asyncio.gather(*looks) for gpu in seen)


def _parks(state: State, slot: SlotId, job: JobId) -> bool:
    """Whether an order to park the job's state is under way."""
    ended = state.slots.get(slot)
    return (
        ended is not None
        and ended.status is SlotStatus.RELEASED
        and any(
            order.job == job and order.kind is OrderKind.PARK and order.status is OrderStatus.ISSUED
            for order in state.orders.values()
        )
    )


@routes.post("/v1/slots/{slot}/shrink", problems=(409,))
async def shrink_slot(call: Call, slot: str, body: ShrinkBody) -> SlotView:
    """The job gave GPUs of its running slot back, and keeps these."""
    mine, job = await call.act_on(find_slot, slot)
    fence = views.fence_of(body.fence)
    back: dict[str, list[GpuId]] = {}
    if mine.status in views.ON and mine.fence == fence:
        keep = dict.fromkeys(body.keep)
        given_back = [gpu for gpu in mine.gpus if gpu not in keep]
        back = _by_host(call.services.writer.scheduler.state, job, given_back)
    seen = await _observation(call, back)
    given = ShrinkSlot(slot=slot, fence=fence, keep=tuple(body.keep), seen=seen)
    await call.submit(given, slot)
    return await _show(call, slot)


@routes.post("/v1/slots/{slot}/grow", problems=(409, 503))
async def grow_slot(call: Call, slot: str, body: GrowBody) -> SlotView:
    """The job takes the GPUs that a heartbeat has offered. 409: another job has them, or the load onto them failed.

    It is answered when what the job has on its other GPUs is loaded onto these, too. Repeating it waits again.
    """
    _, job = await call.act_on(find_slot, slot)
    writer = call.services.writer

    def loads(core: Scheduler, now: Millis) -> bool:
        orders = [core.state.orders.get(core.state.states[key].order or "") for key in core.state.jobs[job.id].states]
        loading = (OrderKind.LOAD, OrderStatus.ISSUED)
        return any(it is not None and it.slot == slot and (it.kind, it.status) == loading for it in orders)

    with writer.subscribe(slot) as waiter:
        await call.submit(GrowSlot(slot=slot, fence=views.fence_of(body.fence)), slot)
        await call.park(partial(_while, call, waiter, loads), PARK_BOUND_S)
    if await call.read(loads):
        raise Refusal(problems.DRAINING, "the daemon is being stopped or restarted; the load continues: ask again")
    if job.status is JobStatus.QUARANTINED:
        raise Conflict(f"slot {slot} has not grown: it continues on the GPUs that it had before", job.reason)
    return await _show(call, slot)


@routes.delete("/v1/slots/{slot}", problems=(409,))
async def withdraw_slot(call: Call, slot: str) -> SlotView:
    """Take a queued request back."""
    await call.act_on(find_slot, slot)
    await call.submit(WithdrawSlot(slot=slot), slot)
    return await _show(call, slot)


@routes.post("/v1/slots/{slot}/revoke", needs=Role.ADMIN, problems=(409,))
async def revoke_slot(call: Call, slot: str, body: ReasonBody) -> SlotView:
    """End a slot now. Its GPUs are given on when they were verified clean."""
    await call.act_on(find_slot, slot)
    given = RevokeSlot(slot=slot, by=call.caller.name, reason=body.reason)
    await call.submit(given, slot, reason=body.reason, always=True)
    return await _show(call, slot)


_OVER: Final = (SlotStatus.OVER, SlotStatus.WITHDRAWN)
_LEFT_OUT: Final = {"all": (), "open": _OVER, "holding": (*_OVER, SlotStatus.QUEUED)}


class SlotsQuery(PageQuery, frozen=True):
    """Filters of the list of slots."""

    owner: Id | UnsetType = UNSET
    status: SlotStatus | UnsetType = UNSET
    pool: Id | UnsetType = UNSET
    job: Id | UnsetType = UNSET
    #: those that are not over, or those of them that are no longer queued
    which: Literal["all", "open", "holding"] = "all"
    #: say of those that are queued why, and for how long: which takes some thought
    why: bool = True


@routes.get("/v1/slots", problems=(404, 429))
async def list_slots(call: Call, query: SlotsQuery) -> Page[SlotView]:
    """Open slots, and each job's last few that ended.

    ``which=open``: without those; ``holding``: of these, those that hold GPUs. ``why=false``: of those that are queued
    neither position, expected wait nor reasons, which for a thousand would take long. A page ends after 2 MB. More than
    100 pages of one owner at a time are 429.
    """
    of = None if query.job is UNSET else find_job(call.services.writer.scheduler.state, call.caller, query.job).id

    def wanted(state: State, slot: Slot) -> bool:
        job = state.jobs[slot.job]
        return (
            call.caller.may_read(job)
            and (of is None or slot.job == of)
            and query.owner in (UNSET, job.owner)
            and query.status in (UNSET, slot.status)
            and slot.status not in _LEFT_OUT[query.which]
            and (query.pool is UNSET or query.pool in _pools(job, slot.phase))
        )

    def view(visibility: Visibility, slot: Slot, now: Millis) -> SlotView:
        job = visibility.core.state.jobs[slot.job]
        return views.slot_view(visibility, slot, job, now, why=query.why)

    return await call.page(query, lambda state: state.slots, view, wanted)


@routes.get("/v1/slots/{slot}")
async def get_slot(call: Call, slot: str) -> SlotView:
    """One slot."""
    return await _show(call, slot)


async def _show(call: Call, slot: SlotId) -> SlotView:
    def look(core: Scheduler, now: Millis) -> SlotView:
        found, job = find_slot(core.state, call.caller, slot)
        return views.slot_view(call.visibility(core), found, job, now)

    return await call.read(look)


def _pools(job: Job, phase: str) -> tuple[str, ...]:
    return next((spec.pools for spec in (*job.spec.phases, *job.spec.side) if spec.name == phase), ())
