"""Sets optical switches beside the phases: circuits follow the slots that are held.

What may be relied on:

- Nothing waits for light. A grant, a release and the journal know nothing of circuits; what has none travels over the
  electrical network. So a switch that hangs or lies costs speed and nothing else.
- The switch is asked what there is, at the start, after each order and once a minute; nothing else is believed.
- One order at a time, with a stamp that only grows, also over restarts. Circuits of a slot stay until it has ended.
- A cable at a port that the switch lacks or that is protected is found before any order, and named by its key.
- After two failures within ten minutes the switch is left alone for an hour, or until an operator restores it. One that
  an operator leaves alone is left alone over restarts.
"""

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import anyio
import structlog

from rollmuxd.core import facts as f
from rollmuxd.core.model import SlotStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.hosts.plugin_calls import ask, checked, said
from rollmuxd.fabric.live import Change, Wired, Wish, change, wanted
from rollmuxd.spi import Circuit, ContactLost, FabricController, FabricOrder, NotDone, Ports
from rollmuxd.spi.fabric import after, unusable

log = structlog.get_logger("rollmuxd.fabric")

#: an answer of a switch takes so long at most; that about its ports, while the daemon starts
ANSWER_S: Final = 10.0
PORTS_S: Final = 2.0
#: between two orders
DWELL_S: Final = 1.0
#: after a failure, until it is tried again; and when nothing happens, until the switch is asked again
RETRY_S: Final = 5.0
LOOK_S: Final = 60.0
#: so many failures within so long, and the switch is left alone for so long
FAILURES: Final = 2
FAILURES_WITHIN_S: Final = 600.0
LEFT_ALONE_S: Final = 3600.0
#: of a stamp, bits for the orders of one start of the daemon (an incarnation is at most 32 bits: 52 are exact in JSON)
_ORDERS_BITS: Final = 20

_HELD: Final = (SlotStatus.LOADING, SlotStatus.RUNNING, SlotStatus.TAIL)


class FabricStatus(StrEnum):
    """IDLE -> SETTING -> ACTIVE; SETTING -> FAILED -> SETTING; two failures -> DEGRADED -> IDLE."""

    #: no slot wants a circuit
    IDLE = "idle"
    SETTING = "setting"
    #: all circuits that are wanted are there
    ACTIVE = "active"
    FAILED = "failed"
    #: left alone: everything travels over the electrical network
    DEGRADED = "degraded"


#: facts that may change what the held slots want
_CHANGES: Final = (f.SlotClaimed, f.SlotReleased, f.SlotTakenAway)


def wishes_of(state: State) -> tuple[Wish, ...]:
    """What the held slots want, in the order in which they were claimed."""
    names = dict.fromkeys(name for node in state.nodes.values() for name in node.holders)
    held = [slot for name in names if (slot := state.slots[name]).status in _HELD]
    wishes = []
    for slot in sorted(held, key=lambda slot: (slot.claimed_at or 0, slot.id)):
        job = state.jobs[slot.job]
        phase = job.spec.phase(slot.phase)
        if phase.traffic:
            wishes.append(Wish(slot.id, phase.traffic, tuple(job.pins.get(pool, ()) for pool in phase.pools)))
    return tuple(wishes)


class Misconfigured(Exception):
    """What the configuration wants of a switch cannot be; names the key. The switch has not failed."""


async def ports_of(key: str, controller: FabricController, wired: Wired, limit_s: float) -> Ports:
    """What a switch has; ``key`` is its table's, ``fabric[0]``.

    Raises:
        Misconfigured: a cable ends at a port that it lacks, or that is protected.
        Exception: the switch has not said it within ``limit_s`` seconds, or what its driver raises.
    """
    ports = checked(await ask(limit_s, controller.ports(), purpose=key), Ports, "what the driver says of ports")
    for node, cables in wired.items():
        for port in cables:
            if why := unusable(port, ports):
                raise Misconfigured(f"{key}.ports.{node}: {why}")
    return ports


class Switch:
    """One switch, and how it is."""

    def __init__(self, name: str, key: str, driver: str, controller: FabricController, wired: Wired) -> None:
        self.name, self.driver, self.wired = name, driver, wired
        self.status = FabricStatus.IDLE
        #: why, where it failed or was left alone
        self.reason = ""
        #: the circuits that there were when it was asked last; None: it has not answered yet
        self.seen: frozenset[Circuit] | None = None
        #: of the next order
        self.stamp = 0
        self._key = key
        self._controller = controller
        self._ports: Ports | None = None
        self._wishes: tuple[Wish, ...] = ()
        self._changed = anyio.Event()
        self._failures: deque[float] = deque()
        self._until = 0.0

    def begin(self, incarnation: int) -> None:
        """The writer begins a life: its stamps are above those of all lives before."""
        self.stamp = max(self.stamp, incarnation << _ORDERS_BITS)
        self._changed.set()

    def wish(self, wishes: tuple[Wish, ...]) -> None:
        """The held slots want this now."""
        if wishes != self._wishes:
            self._wishes = wishes
            self._changed.set()

    def wanted(self) -> frozenset[Circuit]:
        """The circuits of all held slots."""
        each = wanted(self._wishes, self.wired, self.seen or frozenset())
        return frozenset(circuit for circuits in each.values() for circuit in circuits)

    def degrade(self, reason: str) -> None:
        """Leave it alone until :meth:`restore`."""
        self._left_alone(math.inf, reason)

    def restore(self) -> None:
        """Set circuits again; another switch may be in its place."""
        self._failures.clear()
        self._ports = None
        self.status, self.reason, self._until = FabricStatus.IDLE, "", 0.0
        self._changed.set()

    async def run(self) -> None:
        """Set circuits, for ever."""
        while True:
            waits_s = await self._turn()
            with anyio.move_on_after(waits_s):
                await self._changed.wait()

    async def _turn(self) -> float:
        """Bring the switch to what is wanted; return after how long to look again where nothing happens."""
        self._changed = anyio.Event()
        if self.status is FabricStatus.DEGRADED:
            if (left := self._until - anyio.current_time()) > 0:
                return left
            self.restore()
        try:
            if self._ports is None:
                try:
                    self._ports = await ports_of(self._key, self._controller, self.wired, ANSWER_S)
                except Misconfigured as error:
                    self._left_alone(math.inf, str(error))
                    return 0.0
            self.seen = await ask(ANSWER_S, self._controller.seen(), purpose=f"fabric {self.name}")
            if self._is_left_alone():  # an operator has said so meanwhile
                return 0.0
            todo = change(self.seen, self.wanted())
            if todo:
                await self._set(todo, self._ports)
        except Misconfigured as error:
            self.status, self.reason = FabricStatus.FAILED, str(error)
            log.warning("circuits_impossible", fabric=self.name, reason=self.reason)
            return LOOK_S
        except Exception as error:
            self._failed(said(error))
            return RETRY_S
        if not self._is_left_alone():
            self.status, self.reason = (FabricStatus.ACTIVE if self._wishes else FabricStatus.IDLE), ""
        if todo:
            await anyio.sleep(DWELL_S)
        return LOOK_S

    def _is_left_alone(self) -> bool:
        return self.status is FabricStatus.DEGRADED

    async def _set(self, todo: Change, ports: Ports) -> None:
        order = FabricOrder(self.stamp + 1, todo.remove, todo.add)
        try:
            after(order, self.seen or (), ports)
        except NotDone as error:
            raise Misconfigured(f"{self._key}: {error}") from error
        self.status, self.stamp = FabricStatus.SETTING, order.stamp
        await ask(ANSWER_S, self._controller.set(order), purpose=f"fabric {self.name}")
        self.seen = await ask(ANSWER_S, self._controller.seen(), purpose=f"fabric {self.name}")
        if missing := sorted(set(todo.add) - self.seen):
            raise ContactLost(f"circuit {missing[0][0]} -> {missing[0][1]} is not there after the order")
        log.info("circuits_set", fabric=self.name, removed=len(todo.remove), added=len(todo.add), stamp=self.stamp)

    def _failed(self, why: str) -> None:
        if self.status is FabricStatus.DEGRADED:
            return
        now = anyio.current_time()
        self._failures.append(now)
        while self._failures[0] < now - FAILURES_WITHIN_S:
            self._failures.popleft()
        if len(self._failures) >= FAILURES:
            self._left_alone(now + LEFT_ALONE_S, why)
            return
        self.status, self.reason = FabricStatus.FAILED, why
        log.warning("circuits_failed", fabric=self.name, reason=why)

    def _left_alone(self, until: float, why: str) -> None:
        self.status, self.reason, self._until = FabricStatus.DEGRADED, why, until
        self._failures.clear()
        remedy = f"jobs continue over the electrical network; when it is mended: rollmuxd fabric restore {self.name}"
        log.warning("fabric_degraded", fabric=self.name, reason=why, remedy=remedy)
        self._changed.set()


class Circuits:
    """All switches of a daemon."""

    def __init__(
        self,
        controllers: Mapping[str, tuple[str, FabricController, Wired]],
        state: Callable[[], State],
        left_alone: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """``controllers``: in the order of the configuration. ``left_alone``: by an operator, and why."""
        self._state = state
        self.switches = {
            name: Switch(name, f"fabric[{number}]", driver, controller, wired)
            for number, (name, (driver, controller, wired)) in enumerate(controllers.items())
        }
        for name in self.switches.keys() & left_alone.keys():
            self.switches[name].degrade(left_alone[name])

    def begin(self, state: State) -> None:
        """The writer begins a life with this state."""
        for switch in self.switches.values():
            switch.begin(state.incarnation)
            switch.wish(wishes_of(state))

    def on_facts(self, facts: Sequence[Entry]) -> None:
        """A sink."""
        if self.switches and any(isinstance(entry.fact, _CHANGES) for entry in facts):
            wishes = wishes_of(self._state())
            for switch in self.switches.values():
                switch.wish(wishes)

    async def run(self) -> None:
        """Set the circuits of every switch, for ever; one that fails hinders no other."""
        async with anyio.create_task_group() as tasks:
            for switch in self.switches.values():
                tasks.start_soon(switch.run)
