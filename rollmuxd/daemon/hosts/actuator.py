"""Does what the core orders: tells residency drivers, asks backends, and reports as inputs what came of it.

What may be relied on:

- Each order ends in exactly one report: done, failed, or lost contact; a probe's may be that it was not begun. *Lost
  contact* is whatever is not known for certain: a time limit, a broken line, an error that no contract allows.
- Whatever a plugin does (hang, raise, lie) stays with its order; every other is unaffected. See ``plugin_calls.py``.
- An order that is under way is not sent a second time, also when the writer restarts and orders it again.
- An order that has left the books is stopped: its GPUs may be another job's by now.
"""

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Final, assert_never

import anyio
import structlog
from anyio.abc import TaskGroup, TaskStatus
from msgspec import Struct

from rollmuxd.core import causes
from rollmuxd.core.causes import Cause
from rollmuxd.core.effects import Effect, Kill, Launch, Observe, Perform, Probe
from rollmuxd.core.facts import Audited, JobEnded, SlotGranted, StateObserved
from rollmuxd.core.ids import Fence, GpuId, HostId, JobId, LaunchId, Millis, NodeId, OrderId, PoolName
from rollmuxd.core.inputs import (
    Audit,
    GpuObservation,
    HostObserved,
    Input,
    Launched,
    OrderDone,
    OrderFailed,
    OrderLostContact,
    OrderNotBegun,
)
from rollmuxd.core.model import Job, Order, OrderKind, OrderStatus, Session, SessionStatus, nodes_in
from rollmuxd.core.spec import StateSpec
from rollmuxd.core.state import State, state_key
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.hosts.cuda_env import visible
from rollmuxd.daemon.hosts.gpu_identity import GpuIdentities
from rollmuxd.daemon.hosts.plugin_calls import STOPS_S, ask, checked, said, text
from rollmuxd.explain.causes import sentence
from rollmuxd.spi import (
    Backend,
    ContactLost,
    NotDone,
    Observation,
    Output,
    Probed,
    Process,
    ProcessOrder,
    Residency,
    StartsProcesses,
    StateOrder,
)

log = structlog.get_logger("rollmuxd.actuator")

#: when an order is sent again to an idempotent driver that said that it did not do it
RETRY_AFTER_S: Final = (1.0, 4.0)
#: states whose last order is remembered
STATES_KEPT: Final = 100_000
#: a look at a host takes no longer
LOOK_S: Final = 10.0
#: nor while a client waits for its release to be answered
OBSERVATION_S: Final = 5.0
#: nor a question to a driver
PROBE_S: Final = 30.0
#: nor the end of a process
KILL_S: Final = 30.0
#: nor its start
LAUNCH_S: Final = 30.0


class Seen(Struct, frozen=True):
    """What was on a GPU at the last look: for people. Decisions rest on what is posted, never on this."""

    used_mb: int
    processes: tuple[str, ...]
    at: Millis


def _quoted(error: BaseException) -> Cause:
    """What a plugin said of an error."""
    return causes.said(said(error))


def _its_words(found: Probed, otherwise: str) -> Cause:
    """What a driver said of an order; where it said nothing, a cause of ours."""
    return causes.said(text(found.error)) if found.error else Cause(otherwise)


def _cancel_once(order: asyncio.Task[None]) -> None:
    """A second cancellation would end its wait for the plugin's call to stop, for which it has a limit of its own."""
    if not order.cancelling():
        order.cancel()


class NoOlder:
    """Refuses orders that come late: by now another one about the same state was sent, and this one would undo it.

    What it knows ends with the daemon. So do the calls of drivers, and the next daemon sends only what its journal has
    as open. What continues without a daemon (a command on a host) has to be refused there.
    """

    def __init__(self) -> None:
        self._last: dict[tuple[JobId, PoolName, NodeId], tuple[Fence, OrderId]] = {}

    def check(self, order: StateOrder) -> None:
        """Raises NotDone for an order that is older than the last one about its state."""
        key = (order.job, order.pool, order.node)
        stamp, last = self._last.pop(key, (order.stamp, order.order))
        self._last[key] = max((stamp, last), (order.stamp, order.order), key=lambda one: one[0])
        while len(self._last) > STATES_KEPT:  # the one that is longest without an order
            del self._last[next(iter(self._last))]
        if order.stamp < stamp:
            raise NotDone(
                f"order {order.order} to {order.kind.value} the {order.pool} state of job {order.name!r} on "
                f"{order.node} comes late: {last} was sent after it"
            )


class Actuator:
    """Performs effects. ``state`` gives the core's state of this moment, ``post`` takes reports."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        drivers: Mapping[str, Residency],
        *,
        state: Callable[[], State],
        post: Callable[[Input], None],
        now: Callable[[], Millis],
        order_s: float = 120.0,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._backends = backends
        self._drivers = drivers
        self._state = state
        self._post = post
        self._order_s = order_s
        self._now = now
        #: how a process that is started here finds the daemon
        self._environment = dict(environment or {})
        #: the last observation of each GPU
        self.seen: dict[GpuId, Seen] = {}
        self._identities = GpuIdentities()
        self._no_older = NoOlder()
        self._tasks: TaskGroup | None = None
        self._under_way: dict[OrderId, asyncio.Task[None]] = {}
        #: what is to be performed once the call before has stopped. An order is stopped when it has left the books in
        #: memory. If that cannot be written down, it is in them again when the writer restarts
        self._again: dict[OrderId, Perform | Probe] = {}
        #: processes that are being started
        self._launching: dict[LaunchId, None] = {}
        #: hosts that are being looked at; true: they are to be looked at once more
        self._looking: dict[HostId, bool] = {}
        #: the phase in whose slot a job had a pool last: the state keeps a job's last four slots
        self._phases: dict[JobId, dict[PoolName, str]] = {}

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Own all that is under way. Cancelling it cancels that; the orders are probed or told again at a restart."""
        try:
            async with anyio.create_task_group() as self._tasks:
                task_status.started()
                await anyio.sleep_forever()
        finally:
            self._tasks = None
            under_way = list(self._under_way.values())
            for order in under_way:
                _cancel_once(order)
            if under_way:
                with anyio.CancelScope(shield=True):
                    await asyncio.wait(under_way, timeout=2 * STOPS_S)

    def perform(self, effects: Sequence[Effect]) -> None:
        """Begin with these effects, in order, and return at once. Where it does not run, nothing begins."""
        if self._tasks is None:
            return
        for effect in effects:
            match effect:
                case Perform() | Probe():
                    before = self._under_way.get(effect.order)
                    if before is not None and before.cancelling():
                        self._again[effect.order] = effect
                    elif before is None:
                        # A task of asyncio's, since each hand-over of a GPU waits for two of them to begin.
                        order = asyncio.get_running_loop().create_task(self._order(effect))
                        self._under_way[effect.order] = order
                        order.add_done_callback(partial(self._forget, effect.order))
                case Observe():
                    if effect.host in self._looking:
                        self._looking[effect.host] = True
                    else:
                        self._looking[effect.host] = False
                        self._tasks.start_soon(self._observe, effect.host)
                case Launch():
                    if effect.launch not in self._launching:
                        self._launching[effect.launch] = None
                        self._tasks.start_soon(self._launch, effect)
                case Kill():
                    self._tasks.start_soon(self._kill, effect)
                case _:
                    assert_never(effect)

    def begin(self, state: State) -> None:
        """A replay has given this state. Facts that no sink got may have taken orders from the books."""
        for order in [order for order in self._under_way if order not in state.orders]:
            _cancel_once(self._under_way[order])

    def _forget(self, id_: OrderId, order: asyncio.Task[None]) -> None:
        """It is not under way any more, also if it was cancelled before it had begun."""
        if self._under_way.get(id_) is order:
            del self._under_way[id_]
        if (again := self._again.pop(id_, None)) is not None:
            self.perform([again])

    # ---- orders ----------------------------------------------------------------------------------------------------

    async def _order(self, effect: Perform | Probe) -> None:
        """Tell or probe one order, and report once; nothing, if it has left the books meanwhile."""
        try:
            report = await self._report(effect)
        except Exception as error:
            # A bug, ours or a plugin's: what has become of the order is not known.
            log.exception("order_crashed", order=effect.order)
            report = OrderLostContact(effect.order, _quoted(error))
        finally:
            del self._under_way[effect.order]
        if report is not None:
            self._post(report)

    async def _report(self, effect: Perform | Probe) -> Input | None:
        order = self._state().orders.get(effect.order)
        if order is None:
            return None  # ended while the facts were being written
        driver = self._drivers.get(order.driver)
        told = self._told(order)
        if driver is None:
            return OrderFailed(order.id, Cause("no_driver", {"driver": order.driver}))
        if told is None:
            return OrderFailed(order.id, Cause("nothing_to_move", {"job": order.job, "node": order.node}))
        if order.status is OrderStatus.ISSUED and isinstance(effect, Perform):
            return await self._tell(driver, order, told)
        # It was to be sent again, and meanwhile its outcome became unknown: it may only be probed.
        return await self._probe(driver, told) if driver.traits.probes or isinstance(effect, Probe) else None

    def on_facts(self, facts: Sequence[Entry]) -> None:
        """Stop what is under way for orders that have left the books: their GPUs may be another job's by now."""
        if self._under_way and any(isinstance(fact, StateObserved) for _, fact, *_ in facts):
            self.begin(self._state())
        for _, fact, job, slot, _ in facts:
            if isinstance(fact, SlotGranted) and job is not None and slot is not None:
                pools = job.spec.phase(slot.phase).pools
                self._phases.setdefault(job.id, {}).update(dict.fromkeys(pools, slot.phase))
            elif isinstance(fact, JobEnded):
                self._phases.pop(fact.job, None)

    async def _tell(self, driver: Residency, order: Order, told: StateOrder) -> Input:
        verb = {OrderKind.LOAD: driver.load, OrderKind.PARK: driver.park, OrderKind.DISCARD: driver.discard}[told.kind]
        limit_s = self._limit_s(order)
        until = anyio.current_time() + limit_s
        retries = iter(RETRY_AFTER_S if driver.traits.idempotent else ())
        while True:
            try:
                self._no_older.check(told)
                await ask(until - anyio.current_time(), verb(told), of_s=limit_s)
            except NotDone as error:
                wait_s = next(retries, None)
                if wait_s is None or anyio.current_time() + wait_s >= until:
                    return OrderFailed(told.order, _quoted(error))
                log.info("order_again", order=told.order, job=told.job, reason=said(error), in_s=wait_s)
                await anyio.sleep(wait_s)
                if told.order not in self._state().orders:
                    return OrderFailed(told.order, _quoted(error))
            except ContactLost as error:
                return OrderLostContact(told.order, _quoted(error))
            except Exception as error:
                log.warning("driver_crashed", order=told.order, job=told.job, driver=order.driver, exc_info=True)
                return OrderLostContact(told.order, _quoted(error))
            else:
                return OrderDone(told.order, await self._after(told))

    def _limit_s(self, order: Order) -> float:
        """How long an order may take: ``order_s``, or three times what the last such one took there, up to that.

        What it took may have an outage of the daemon in it.
        """
        kept = self._state().states.get(state_key(order.job, order.pool, order.node))
        took = {} if kept is None else {OrderKind.LOAD: kept.load_ms, OrderKind.PARK: kept.park_ms}
        return max(self._order_s, 3 * min(self._order_s, (took.get(order.kind) or 0) / 1000))

    async def _probe(self, driver: Residency, told: StateOrder) -> Input:
        try:
            found = checked(
                await ask(PROBE_S, driver.probe(told), purpose=f"probe {told.order}"),
                Probed,
                "what the driver says of the order",
            )
        except Exception as error:
            return OrderLostContact(told.order, _quoted(error))
        if not found.known:
            return OrderLostContact(told.order, _its_words(found, "outcome_unknown"))
        if not found.done and not found.begun:
            return OrderNotBegun(told.order)
        if not found.done:
            return OrderFailed(told.order, _its_words(found, "not_done"))
        return OrderDone(told.order, await self._after(told))

    def _told(self, order: Order) -> StateOrder | None:
        """Everything that a driver needs to know of an order, from the state of this moment."""
        state = self._state()
        job, node = state.jobs.get(order.job), state.nodes.get(order.node)
        if job is None or node is None:
            return None
        host = state.hosts[node.host]
        slot = state.slots.get(order.slot or "")
        sessions = (state.sessions.get(id_ or "") for id_ in (job.session, slot.session if slot is not None else None))
        session = next((found for found in sessions if found is not None and found.run == order.run), None)
        kept = state.states.get(state_key(order.job, order.pool, order.node))
        return StateOrder(
            order=order.id,
            kind=order.kind,
            job=job.id,
            run=order.run,
            owner=job.owner,
            name=job.spec.name,
            pool=order.pool,
            node=node.id,
            host=host.id,
            # A slot that starts on a part of its node loads onto that part: the rest is another job's tail.
            gpus=order.gpus
            or tuple(g for g in node.gpus if slot is None or order.kind is not OrderKind.LOAD or g in slot.gpus),
            node_gpus=tuple(node.gpus),
            state=kept.spec if kept is not None else StateSpec(pool=order.pool),
            ranks=job.spec.ranks,
            warm=(kept is not None and kept.warm) or order.source is not None,
            source=order.source,
            source_host=state.nodes[order.source].host if order.source in state.nodes else None,
            pid=0 if session is None else session.pid,
            started="" if session is None else session.started,
            backend=self._backends[host.backend],
            stamp=order.stamp,
            issued_at=order.issued_at,
            beside_mb=state.residual_mb_on(node, but_of=job.id),
            phase=slot.phase if slot is not None else self._last_phase(state, job, order.pool),
        )

    def _last_phase(self, state: State, job: Job, pool: PoolName) -> str:
        """The phase in whose slot a job had a pool last; empty, where that was before a restart, and four slots ago."""
        slots = (state.slots[name] for name in reversed(state.slots_of.get(job.id, ())))
        granted = (slot.phase for slot in slots if slot.granted_at is not None)
        known = self._phases.get(job.id, {}).get(pool, "")
        return next((phase for phase in granted if pool in job.spec.phase(phase).pools), known)

    def _backend_of(self, host: HostId) -> Backend | None:
        known = self._state().hosts.get(host)
        return None if known is None else self._backends.get(known.backend)

    # ---- looking ---------------------------------------------------------------------------------------------------

    async def observe(
        self, host: HostId, gpus: Collection[GpuId], limit_s: float = OBSERVATION_S
    ) -> tuple[GpuObservation, ...]:
        """What the backend sees on these GPUs now; nothing unless it is known of all of them. Unknown is never free."""
        backend = self._backend_of(host)
        if backend is None:
            return ()
        try:
            observation = await self._observation_of(backend, host, limit_s)
        except Exception as error:
            log.info("not_seen", host=host, reason=said(error))
            return ()
        seen = tuple(gpu for gpu in observation.gpus if gpu.gpu in gpus)
        return seen if len(seen) == len(gpus) else ()

    async def _observe(self, host: HostId) -> None:
        """Look at a host and report; once more if that was asked meanwhile, since what was seen may be older."""
        try:
            while True:
                self._looking[host] = False
                self._post(await self._seen(host))
                if not self._looking[host]:
                    return
        finally:
            del self._looking[host]

    async def _after(self, told: StateOrder) -> tuple[GpuObservation, ...]:
        """What is on the GPUs after an order. A load frees none, and its slot waits for its word."""
        return () if told.kind is OrderKind.LOAD else await self.observe(told.host, told.gpus, LOOK_S)

    async def _seen(self, host: HostId) -> HostObserved:
        backend = self._backend_of(host)
        if backend is None:
            return HostObserved(host, unreachable=Cause("no_backend"))
        since = self._now()
        try:
            observation = await self._observation_of(backend, host, LOOK_S)
        except Exception as error:
            if not isinstance(error, ContactLost | TimeoutError):
                log.warning("backend_crashed", host=host, exc_info=True)
            return HostObserved(host, unreachable=_quoted(error))
        return HostObserved(host, observation.gpus, observation.boot_id, since, dict(observation.unread))

    async def _observation_of(self, backend: Backend, host: HostId, limit_s: float) -> Observation:
        """What the backend sees, if that is possible and no other host has its GPUs as well. Raises ContactLost."""
        observation = checked(
            await ask(limit_s, backend.observe(host), purpose=f"observe {host}"),
            Observation,
            "what the backend has seen",
        )
        seen = [gpu.gpu for gpu in observation.gpus]
        if len(seen) > len(set(seen)) or any(gpu.used_mb < 0 for gpu in observation.gpus):
            raise ContactLost("what the backend has seen cannot be used: a GPU twice, or less than nothing on one")
        if observation.uuids:
            nodes = self._state().nodes.values()
            self._identities.check(host, observation, {gpu for node in nodes if node.host == host for gpu in node.gpus})
        at = self._now()
        for gpu in observation.gpus:
            self.seen[gpu.gpu] = Seen(gpu.used_mb, gpu.processes, at)
        return observation

    # ---- processes of jobs -----------------------------------------------------------------------------------------

    async def _launch(self, effect: Launch) -> None:
        """Start a job's process, and report once: also when it is not known, for then it is ended before the next."""
        try:
            report: Launched | None = await self._started(effect)
        except Exception as error:
            if not isinstance(error, NotDone | ContactLost | TimeoutError):
                log.warning("backend_crashed", job=effect.job, exc_info=True)
            report = Launched(effect.launch, error=_quoted(error))
        finally:
            del self._launching[effect.launch]
        if report is not None:
            self._post(report)

    async def _started(self, effect: Launch) -> Launched | None:
        state = self._state()
        job = state.jobs.get(effect.job)
        launch = None if job is None else job.launch
        if job is None or launch is None or job.spec.launch is None or launch.id != effect.launch or launch.over:
            return None  # it is not wanted any more
        backend = self._backend_of(launch.host)
        if not isinstance(backend, StartsProcesses):
            return Launched(effect.launch, error=Cause("no_launcher", {"host": launch.host}))
        nodes = [state.nodes[name] for name in nodes_in(job.pins)]
        ours = {
            "ROLLMUX_JOB": job.spec.name,
            "ROLLMUX_RUN_KEY": job.idempotency_key,
            **visible([gpu for node in nodes if node.host == launch.host for gpu in node.gpus]),
        }
        order = ProcessOrder(
            launch=launch.id,
            number=int(launch.id[1:]),
            job=job.id,
            run=job.run,
            owner=job.owner,
            user=job.user,
            name=job.spec.name,
            argv=job.spec.launch.argv,
            cwd=job.spec.launch.cwd,
            env={**self._environment, **job.spec.launch.env, **ours},
        )
        answer = await ask(LAUNCH_S, backend.start(launch.host, order))
        process = checked(answer, Process, "what the backend says of the process")
        return Launched(effect.launch, process.pid, process.started)

    async def output(self, job: JobId, after: int, limit: int) -> Output:
        """A piece of what the job's process has printed. Raises NotDone and ContactLost."""
        known = self._state().jobs[job].launch
        backend = None if known is None else self._backend_of(known.host)
        if known is None or not isinstance(backend, StartsProcesses):
            raise NotDone("the daemon keeps no output of this job: look where the job was started")
        return await ask(LOOK_S, backend.output(known.host, known.id, after, limit), purpose=f"output {job}")

    async def _stop(self, effect: Kill) -> None:
        """End what was started for a job, then look."""
        backend = self._backend_of(effect.host)
        try:
            if not isinstance(backend, StartsProcesses):
                raise ContactLost(f"no backend that starts processes reaches {effect.host}")
            ended = await ask(KILL_S, backend.stop(effect.host, effect.launch))
        except Exception as error:
            log.warning("stop_failed", job=effect.job, host=effect.host, launch=effect.launch, reason=said(error))
        else:
            log.info("stopped" if ended else "had_ended", job=effect.job, host=effect.host, launch=effect.launch)
        self.perform([Observe(name) for name in dict.fromkeys((*self._hosts_of(effect.job), effect.host))])

    # ---- killing ---------------------------------------------------------------------------------------------------

    async def _kill(self, effect: Kill) -> None:
        """End a lost job's process, then look: its GPUs are free when they are verified clean, as ever.

        Only the job's client has said which process that is. So it is looked for on the job's own hosts only. It must
        not be another job's, and the backend has to know that it is the owner's.
        """
        if effect.launch:
            await self._stop(effect)
            return
        state = self._state()
        job, session = state.jobs.get(effect.job), state.sessions.get(effect.session or "")
        hosts = self._hosts_of(effect.job)
        named = session.host if session is not None and session.host in state.hosts else ""
        if job is None or session is None or not session.pid:
            log.info("nothing_to_kill", job=effect.job, reason="its session named no process")
        elif not (there := [host for host in hosts if named in ("", host)]):
            reason = f"the job has no node on {named or 'any host'}"
            log.warning("not_ours_to_kill", job=job.id, pid=session.pid, reason=reason)
        elif (other := self._also_of(session)) is not None:
            reason = f"job {other} lives in the same process"
            log.warning("not_ours_to_kill", job=job.id, pid=session.pid, reason=reason)
        else:
            for host in there:
                await self._end(host, job, session)
        self.perform([Observe(host) for host in hosts])

    async def _end(self, host: HostId, job: Job, session: Session) -> None:
        backend = self._backend_of(host)
        if backend is None:
            return
        told = {"job": job.id, "host": host, "pid": session.pid}
        try:
            ended = await ask(KILL_S, backend.kill(host, session.pid, session.started, job.id, job.owner))
        except Exception as error:
            log.warning("kill_failed", **told, reason=said(error))
            return
        if not ended:
            reason = f"it is gone, or nothing says that it is {job.owner}'s (see owns_sessions, users of {host})"
            log.info("not_ours_to_kill", **told, reason=reason)
            return
        log.info("killed", **told)
        before = f"pid {session.pid} on {host} ({session.id})"
        why = sentence(job.reason)
        fact = Audited(0, "kill_process", "rollmuxd", about=job.id, before=before, after="killed", reason=why)
        self._post(Audit(fact))

    def _also_of(self, session: Session) -> JobId | None:
        """Another job that lives in the process which a session has named."""
        process = session.pid, session.started
        for other in self._state().sessions.values():
            if other.job != session.job and other.status is SessionStatus.ALIVE:
                if (other.pid, other.started) == process:
                    return other.job
        return None

    def _hosts_of(self, job_id: JobId) -> tuple[HostId, ...]:
        """Where a job has nodes, or had the last time that it had any."""
        state = self._state()
        job = state.jobs.get(job_id)
        pins = (*job.pins.values(), *job.last_pins.values()) if job is not None else ()
        nodes = [node for pinned in pins for node in pinned]
        nodes += [kept.node for kept in state.states.values() if kept.job == job_id]
        return tuple(dict.fromkeys(state.nodes[node].host for node in nodes if node in state.nodes))
