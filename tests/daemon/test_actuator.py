"""Each order ends in exactly one report, whatever a driver or a backend does; and what is not known is never done.

In virtual time.
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from rollmuxd.core import facts as f
from rollmuxd.core import model as m
from rollmuxd.core.effects import Kill, Observe, Perform, Probe
from rollmuxd.core.inputs import (
    GpuSight,
    HostSeen,
    HostUnreachable,
    OrderDone,
    OrderFailed,
    OrderLostContact,
    OrderNotBegun,
)
from rollmuxd.core.state import State
from rollmuxd.daemon.actuator import Actuator
from rollmuxd.spi import ContactLost, DriverTraits, NotDone, Probed, Sight

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

CLEAR = (GpuSight("box/gpu0", 0), GpuSight("box/gpu1", 0))


async def nothing(*_: object) -> None:
    pass


class ScriptedBackend:
    """Sees what ``sees`` answers; counts."""

    def __init__(self) -> None:
        self.sees: Callable[[], Awaitable[Sight]] = self._clear
        self.looks: list[float] = []
        self.killed: list[tuple[str, int, str]] = []

    async def _clear(self) -> Sight:
        return Sight((*CLEAR, GpuSight("box/gpu2", 999)), "boot1")

    async def observe(self, host: str) -> Sight:
        self.looks.append(asyncio.get_running_loop().time())
        return await self.sees()

    async def kill(self, host: str, pid: int, started: str) -> bool:
        self.killed.append((host, pid, started))
        return True


class ScriptedDriver:
    """Does what ``script`` says: an error to raise, or seconds to take; then nothing any more."""

    def __init__(self, *script: Exception | float, idempotent: bool = False, probed: Probed | None = None) -> None:
        self.traits = DriverTraits(idempotent=idempotent, probes=probed is not None)
        self.script = list(script)
        self.told: list[tuple[str, object]] = []
        self.probed = probed

    async def load(self, order):
        await self._do("load", order)

    async def park(self, order):
        await self._do("park", order)

    async def discard(self, order):
        await self._do("discard", order)

    async def probe(self, order):
        self.told.append(("probe", order))
        return self.probed

    async def _do(self, verb, order):
        self.told.append((verb, order))
        step = self.script.pop(0) if self.script else 0.0
        if isinstance(step, Exception):
            raise step
        if step:
            await anyio.sleep(step)


def world(*orders: m.Order) -> State:
    state = State()
    state.hosts["box"] = m.Host("box", "fake", 1000)
    gpus = {f"box/gpu{number}": m.Gpu() for number in (0, 1)}
    state.nodes["box/gpu0-1"] = m.Node("box/gpu0-1", "box", gpus, ("rollout",))
    spec = m.JobSpec("math", (), (), states=(m.StateSpec("rollout", gpu_mb=7),), ranks=2)
    job = m.Job("j1", "team", "ann", spec, 0, session="n1", pins={"rollout": ("box/gpu0-1",)})
    state.jobs["j1"] = job
    state.sessions["n1"] = m.Session("n1", "j1", 1, 0, pid=4711, host="elsewhere", started="t0")
    for order in orders:
        state.orders[order.id] = order
        kept = m.JobState("j1", "rollout", order.node, spec.states[0], order=order.id)
        state.states[f"j1|rollout|{order.node}"] = kept
    return state


def order(kind: m.OrderKind = m.OrderKind.PARK, id: str = "o1", **changes) -> m.Order:
    return m.Order(id, kind, "j1", 1, "rollout", "box/gpu0-1", "driver", 0, **changes)


@asynccontextmanager
async def acting(state: State, driver: object = None, backend: ScriptedBackend | None = None):
    posted: list[object] = []
    backend = backend or ScriptedBackend()
    drivers = {} if driver is None else {"driver": driver}
    actuator = Actuator({"fake": backend}, drivers, state=lambda: state, post=posted.append)
    async with anyio.create_task_group() as tasks:
        await tasks.start(actuator.run)
        yield actuator, posted, backend
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("kind", "seen"), [(m.OrderKind.PARK, CLEAR), (m.OrderKind.DISCARD, CLEAR), (m.OrderKind.LOAD, ())]
)
async def test_an_order_that_lets_go_of_gpus_is_reported_with_what_is_seen_there_and_a_load_at_once(kind, seen):
    driver = ScriptedDriver()
    async with acting(world(order(kind)), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(0.01)

        assert posted == [OrderDone("o1", seen)]
        ((verb, told),) = driver.told
        assert verb == kind
        assert (told.job, told.owner, told.name, told.ranks, told.pid, told.started) == (
            "j1", "team", "math", 2, 4711, "t0",
        )  # fmt: skip
        assert (told.node, told.host, told.gpus, told.state.gpu_mb) == (
            "box/gpu0-1", "box", ("box/gpu0", "box/gpu1"), 7,
        )  # fmt: skip


@pytest.mark.parametrize(
    ("step", "report"),
    [
        (NotDone("engine says no"), OrderFailed("o1", "engine says no")),
        (ContactLost("line is dead"), OrderLostContact("o1", "line is dead")),
        (ConnectionResetError("bye"), OrderLostContact("o1", "ConnectionResetError: bye")),
        (KeyError("a bug"), OrderLostContact("o1", "KeyError: 'a bug'")),
        (1e6, OrderLostContact("o1", "no answer within 120 s")),
    ],
)
async def test_whatever_a_driver_does_is_reported_once_as_what_it_is(step, report):
    async with acting(world(order()), ScriptedDriver(step)) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1000)

        assert posted == [report]


async def test_a_driver_that_is_idempotent_is_told_again_twice():
    driver = ScriptedDriver(NotDone("no"), NotDone("no"), idempotent=True)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(60)

        assert [verb for verb, _ in driver.told] == ["park"] * 3
        assert posted == [OrderDone("o1", CLEAR)]
    driver = ScriptedDriver(*[NotDone("no")] * 3, idempotent=True)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(60)

        assert len(driver.told) == 3
        assert posted == [OrderFailed("o1", "no")]


async def test_lost_contact_is_never_told_again():
    driver = ScriptedDriver(ContactLost("dead"), idempotent=True)
    async with acting(world(order()), driver) as (actuator, _, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(60)

        assert len(driver.told) == 1


async def test_the_time_limit_grows_with_what_it_took_and_is_never_shorter_than_configured():
    state = world(order(), order(id="o2"))
    async with acting(state, ScriptedDriver(100.0, 299.0)) as (actuator, posted, _):
        assert actuator.limit_s(order()) == 120
        actuator.perform([Perform("o1")])
        await anyio.sleep(101)
        assert actuator.limit_s(order()) == pytest.approx(300)
        assert actuator.limit_s(order(m.OrderKind.LOAD)) == 120
        actuator.perform([Perform("o2")])
        await anyio.sleep(300)

        assert [type(report) for report in posted] == [OrderDone, OrderDone]


async def test_a_park_that_nobody_could_look_at_is_done_but_seen_by_nobody():
    backend = ScriptedBackend()

    async def away():
        raise ContactLost("host is away")

    backend.sees = away
    async with acting(world(order()), ScriptedDriver(), backend) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)

        assert posted == [OrderDone("o1", ())]


async def test_a_backend_that_leaves_a_gpu_out_has_seen_none():
    backend = ScriptedBackend()

    async def half():
        return Sight(CLEAR[:1], "boot1")

    backend.sees = half
    async with acting(world(order()), ScriptedDriver(), backend) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)

        assert posted == [OrderDone("o1", ())]
        assert await actuator.sight("box", ("box/gpu0", "box/gpu1")) == ()


async def test_an_order_that_is_under_way_is_not_told_again():
    driver = ScriptedDriver(10.0)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        actuator.perform([Perform("o1", again=True), Probe("o1")])
        await anyio.sleep(20)

        assert len(driver.told) == 1
        assert len(posted) == 1


async def test_an_order_that_ended_meanwhile_is_not_told():
    driver = ScriptedDriver()
    async with acting(world(), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)

        assert (driver.told, posted) == ([], [])


async def test_an_order_for_a_driver_that_is_not_there_has_certainly_failed():
    async with acting(world(order())) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)

        assert posted == [OrderFailed("o1", 'residency driver "driver" is not there')]


@pytest.mark.parametrize(
    ("probed", "report"),
    [
        (Probed(known=True, done=True), OrderDone("o1", CLEAR)),
        (Probed(known=True, done=False, error="oom"), OrderFailed("o1", "oom")),
        (Probed(known=True, done=False, begun=False), OrderNotBegun("o1")),
        (Probed(known=False), OrderLostContact("o1", "the driver does not know what became of it")),
        (Probed(known=False, begun=False), OrderLostContact("o1", "the driver does not know what became of it")),
    ],
)
async def test_a_probe_ends_like_the_order_itself(probed, report):
    driver = ScriptedDriver(probed=probed)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Probe("o1")])
        await anyio.sleep(1)

        assert [verb for verb, _ in driver.told] == ["probe"]
        assert posted == [report]


async def test_one_order_that_hangs_stops_no_other():
    driver = ScriptedDriver(1e6)
    async with acting(world(order(), order(id="o2")), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1"), Perform("o2")])
        await anyio.sleep(1)

        assert posted == [OrderDone("o2", CLEAR)]


# ---- looking -------------------------------------------------------------------------------------------------------


async def test_a_look_is_reported_with_all_gpus_of_the_host():
    async with acting(world()) as (actuator, posted, _):
        actuator.perform([Observe("box")])
        await anyio.sleep(1)

        (seen,) = posted
        assert seen == HostSeen("box", (*CLEAR, GpuSight("box/gpu2", 999)), "boot1", seen.since)
        assert seen.since is not None


async def test_an_order_that_has_left_the_books_is_stopped_and_reports_nothing():
    """Its GPUs may be somebody else's by now: a late load would put two jobs on one GPU."""
    driver = ScriptedDriver(60.0)
    state = world(order(m.OrderKind.LOAD))
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(0.01)
        assert driver.told

        del state.orders["o1"]
        actuator.on_facts([(7, f.StateSeen(7, "j1", "rollout", "box/gpu0-1", m.StateStatus.GONE))])
        await anyio.sleep(0.01)

        assert posted == []
        assert not actuator._under_way


async def test_what_was_seen_last_is_remembered_for_people():
    backend = ScriptedBackend()

    async def busy() -> Sight:
        return Sight((GpuSight("box/gpu0", 70_000, ("pid 7 left-over",)),), "boot1")

    backend.sees = busy
    async with acting(world(), backend=backend) as (actuator, _, _):
        assert actuator.seen == {}
        actuator.perform([Observe("box")])
        await anyio.sleep(0.1)
        seen = actuator.seen["box/gpu0"]
        assert (seen.used_mb, seen.processes) == (70_000, ("pid 7 left-over",))
        assert seen.at > 1_700_000_000_000


async def test_looks_asked_for_during_a_look_are_one_more_look():
    backend = ScriptedBackend()

    async def slow():
        await anyio.sleep(1)
        return Sight(CLEAR, "boot1")

    backend.sees = slow
    async with acting(world(), backend=backend) as (actuator, posted, _):
        actuator.perform([Observe("box")])
        await anyio.sleep(0.5)
        actuator.perform([Observe("box")] * 5)
        await anyio.sleep(5)

        assert len(backend.looks) == 2
        assert len(posted) == 2
        actuator.perform([Observe("box")])
        await anyio.sleep(5)
        assert len(backend.looks) == 3


async def test_a_host_that_does_not_answer_is_unreachable():
    backend = ScriptedBackend()
    backend.sees = anyio.sleep_forever
    async with acting(world(), backend=backend) as (actuator, posted, _):
        actuator.perform([Observe("box"), Observe("nowhere")])
        await anyio.sleep(11)

        assert posted == [
            HostUnreachable("nowhere", "no backend that is configured reaches it"),
            HostUnreachable("box", "no answer within 10 s"),
        ]


async def test_a_sight_for_a_release_is_bounded_and_says_nothing_where_it_cannot_know():
    backend = ScriptedBackend()
    async with acting(world(), backend=backend) as (actuator, _, _):
        assert await actuator.sight("box", ("box/gpu1",)) == CLEAR[1:]
        backend.sees = anyio.sleep_forever
        began = asyncio.get_running_loop().time()
        assert await actuator.sight("box", ("box/gpu1",)) == ()
        assert asyncio.get_running_loop().time() - began == pytest.approx(5)
        assert await actuator.sight("nowhere", ("x",)) == ()


async def test_a_kill_goes_where_the_job_is_with_pid_and_start_time_and_is_looked_after():
    async with acting(world()) as (actuator, posted, backend):
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)

        assert backend.killed == [("box", 4711, "t0")]
        assert [type(report) for report in posted] == [HostSeen]


async def test_effects_that_come_before_it_runs_are_performed_when_it_does():
    posted: list[object] = []
    state = world(order())
    actuator = Actuator(
        {"fake": ScriptedBackend()}, {"driver": ScriptedDriver()}, state=lambda: state, post=posted.append
    )
    actuator.perform([Perform("o1")])
    async with anyio.create_task_group() as tasks:
        await tasks.start(actuator.run)
        await anyio.sleep(0.1)
        tasks.cancel_scope.cancel()

    assert posted == [OrderDone("o1", CLEAR)]


async def test_a_driver_is_told_in_which_phase_the_state_was_used_last():
    """Engines may sleep in one way after one phase, and in another after another."""
    state, driver = world(order()), ScriptedDriver()
    phases = (m.PhaseSpec("rollout", ("rollout",)), m.PhaseSpec("eval", ("rollout",)), m.PhaseSpec("train", ("train",)))
    state.jobs["j1"].spec = m.JobSpec("math", phases, (), states=(m.StateSpec("rollout"),))
    async with acting(state, driver) as (actuator, _, _):
        for number, phase in enumerate(("", "eval", "train", "rollout")):
            if phase:
                state.slots["s1"] = m.Slot("s1", "j1", 1, "n1", phase, "r1", 0)
                actuator.on_facts([(number, f.SlotGranted(0, "s1", m.Fence(1, number)))])
                del state.slots["s1"]
            actuator.perform([Perform("o1")])
            await anyio.sleep(0.01)
    assert [told.phase for _, told in driver.told] == ["", "eval", "eval", "rollout"]
