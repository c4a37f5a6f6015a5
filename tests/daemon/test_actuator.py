"""Each order ends in exactly one report, whatever a driver or a backend does; and what is not known is never done.

In virtual time.
"""

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager

import anyio
import pytest

from rollmuxd.core import facts as f
from rollmuxd.core import model as m
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.effects import Kill, Observe, Perform, Probe
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import (
    Audit,
    GpuObservation,
    HostObserved,
    OrderDone,
    OrderFailed,
    OrderLostContact,
    OrderNotBegun,
)
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import Entry, entries
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.hosts.plugin_calls import STOPS_S, STUCK_AT_MOST, NoAnswer, ask
from rollmuxd.explain.causes import sentence
from rollmuxd.spi import ContactLost, DriverTraits, NotDone, Observation, Probed

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

CLEAN = (GpuObservation("box/gpu0", 0), GpuObservation("box/gpu1", 0))


async def nothing(*_: object) -> None:
    pass


class ScriptedBackend:
    """Sees what ``sees`` answers; counts."""

    def __init__(self) -> None:
        self.sees: Callable[[], Awaitable[Observation]] = self._clean
        self.looks: list[float] = []
        self.killed: list[tuple[str, int, str, str, str]] = []
        self.ends = True

    async def _clean(self) -> Observation:
        return Observation((*CLEAN, GpuObservation("box/gpu2", 999)), "boot1")

    async def observe(self, host: str) -> Observation:
        self.looks.append(asyncio.get_running_loop().time())
        return await self.sees()

    async def kill(self, host: str, pid: int, started: str, job: str, owner: str) -> bool:
        self.killed.append((host, pid, started, job, owner))
        return self.ends


class ScriptedDriver:
    """Does what ``script`` says: an error to raise, or seconds to take; then nothing any more."""

    def __init__(self, *script: BaseException | float, idempotent: bool = False, probed: Probed | None = None) -> None:
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
        if isinstance(step, BaseException):
            raise step
        if step:
            await anyio.sleep(step)


def world(*orders: m.Order) -> State:
    state = State()
    state.hosts["box"] = m.Host("box", "fake", 1000)
    gpus = {f"box/gpu{number}": m.Gpu() for number in (0, 1)}
    state.nodes["box/gpu0-1"] = m.Node("box/gpu0-1", "box", gpus, ("rollout",))
    spec = JobSpec("math", (), (), states=(StateSpec("rollout", gpu_mb=7),), ranks=2)
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
    actuator = Actuator({"fake": backend}, drivers, state=lambda: state, post=posted.append, now=lambda: 0)
    async with anyio.create_task_group() as tasks:
        await tasks.start(actuator.run)
        yield actuator, posted, backend
        tasks.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("kind", "seen"), [(m.OrderKind.PARK, CLEAN), (m.OrderKind.DISCARD, CLEAN), (m.OrderKind.LOAD, ())]
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
        (NotDone("engine says no"), OrderFailed("o1", said("engine says no"))),
        (ContactLost("line is dead"), OrderLostContact("o1", said("line is dead"))),
        (ConnectionResetError("bye"), OrderLostContact("o1", said("ConnectionResetError: bye"))),
        (KeyError("a bug"), OrderLostContact("o1", said("KeyError: 'a bug'"))),
        (1e6, OrderLostContact("o1", said("no answer within 120 s"))),
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
        assert posted == [OrderDone("o1", CLEAN)]
    driver = ScriptedDriver(*[NotDone("no")] * 3, idempotent=True)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(60)

        assert len(driver.told) == 3
        assert posted == [OrderFailed("o1", said("no"))]


async def test_lost_contact_is_never_told_again():
    driver = ScriptedDriver(ContactLost("dead"), idempotent=True)
    async with acting(world(order()), driver) as (actuator, _, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(60)

        assert len(driver.told) == 1


@pytest.mark.parametrize(("took_ms", "limit_s"), [(None, 120), (10_000, 120), (100_000, 300), (36_000_000, 360)])
async def test_an_order_may_take_three_times_as_long_as_the_last_one_of_its_kind(took_ms, limit_s):
    """A stuck engine is noticed, and a slow one is not punished. An outage of hours may be in what it took."""
    state = world(order(), order(id="o2"))
    for kept in state.states.values():
        kept.load_ms, kept.park_ms = 50_000, took_ms
    async with acting(state, ScriptedDriver(limit_s - 1, 1e6)) as (actuator, posted, _):
        for name in ("o1", "o2"):
            actuator.perform([Perform(name)])
            await anyio.sleep(2 * limit_s)

        assert [type(report) for report in posted] == [OrderDone, OrderLostContact]
        assert posted[1] == OrderLostContact("o2", said(f"no answer within {limit_s} s"))


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
        return Observation(CLEAN[:1], "boot1")

    backend.sees = half
    async with acting(world(order()), ScriptedDriver(), backend) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)

        assert posted == [OrderDone("o1", ())]
        assert await actuator.observe("box", ("box/gpu0", "box/gpu1")) == ()


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

        assert posted == [OrderFailed("o1", Cause("no_driver", {"driver": "driver"}))]


@pytest.mark.parametrize(
    ("probed", "report"),
    [
        (Probed(known=True, done=True), OrderDone("o1", CLEAN)),
        (Probed(known=True, done=False, error="oom"), OrderFailed("o1", said("oom"))),
        (Probed(known=True, done=False, begun=False), OrderNotBegun("o1")),
        (Probed(known=False), OrderLostContact("o1", Cause("outcome_unknown"))),
        (Probed(known=False, begun=False), OrderLostContact("o1", Cause("outcome_unknown"))),
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

        assert posted == [OrderDone("o2", CLEAN)]


# ---- looking -------------------------------------------------------------------------------------------------------


async def test_a_look_is_reported_with_all_gpus_of_the_host():
    async with acting(world()) as (actuator, posted, _):
        actuator.perform([Observe("box")])
        await anyio.sleep(1)

        (seen,) = posted
        assert seen == HostObserved("box", (*CLEAN, GpuObservation("box/gpu2", 999)), "boot1", seen.since)
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
        actuator.on_facts(GONE)
        await anyio.sleep(0.01)

        assert posted == []
        assert not actuator._under_way


@pytest.mark.parametrize("idempotent", [False, True])
async def test_an_order_that_comes_late_is_refused_and_no_driver_hears_of_it(idempotent):
    """It would undo what was sent after it."""
    driver = ScriptedDriver(idempotent=idempotent)
    late, last = order(m.OrderKind.PARK, "o1"), order(m.OrderKind.LOAD, "o2")
    async with acting(world(late, last), driver) as (actuator, posted, _):
        for told in (last, late):
            actuator.perform([Perform(told.id)])
            await anyio.sleep(100)

        assert [verb for verb, _ in driver.told] == ["load"]
        assert isinstance(posted[0], OrderDone)
        assert isinstance(posted[1], OrderFailed)
        assert "order o1 to park the rollout state of job 'math' on box/gpu0-1 comes late: o2 was sent after it" in str(
            posted[1]
        )


async def test_what_was_seen_last_is_remembered_for_people():
    backend = ScriptedBackend()

    async def busy() -> Observation:
        return Observation((GpuObservation("box/gpu0", 70_000, ("pid 7 left-over",)),), "boot1")

    backend.sees = busy
    async with acting(world(), backend=backend) as (actuator, _, _):
        assert actuator.seen == {}
        actuator.perform([Observe("box")])
        await anyio.sleep(0.1)
        seen = actuator.seen["box/gpu0"]
        assert (seen.used_mb, seen.processes) == (70_000, ("pid 7 left-over",))
        assert seen.at == 0, "by the clock that it was given"


async def test_looks_asked_for_during_a_look_are_one_more_look():
    backend = ScriptedBackend()

    async def slow():
        await anyio.sleep(1)
        return Observation(CLEAN, "boot1")

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
            HostObserved("nowhere", unreachable=Cause("no_backend")),
            HostObserved("box", unreachable=said("no answer within 10 s")),
        ]


async def test_a_sight_for_a_release_is_bounded_and_says_nothing_where_it_cannot_know():
    backend = ScriptedBackend()
    async with acting(world(), backend=backend) as (actuator, _, _):
        assert await actuator.observe("box", ("box/gpu1",)) == CLEAN[1:]
        backend.sees = anyio.sleep_forever
        began = asyncio.get_running_loop().time()
        assert await actuator.observe("box", ("box/gpu1",)) == ()
        assert asyncio.get_running_loop().time() - began == pytest.approx(5)
        assert await actuator.observe("nowhere", ("x",)) == ()


async def test_a_kill_goes_where_the_job_is_with_pid_and_start_time_and_is_looked_after():
    state = world()
    state.jobs["j1"].reason = Cause("memory_kept", {"kept_gb": 9.0, "gpu": "g", "clean_gb": 1.0, "pools": ["train"]})
    async with acting(state) as (actuator, posted, backend):
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)

        assert backend.killed == [("box", 4711, "t0", "j1", "team")]
        assert [type(report) for report in posted] == [Audit, HostObserved]
        assert (posted[0].fact.action, posted[0].fact.who, posted[0].fact.about) == ("kill_process", "rollmuxd", "j1")
        assert posted[0].fact.before == "pid 4711 on box (n1)"
        assert "9" in posted[0].fact.reason, "the cause of this kill"


async def test_what_the_backend_does_not_know_for_the_jobs_is_not_written_down_as_killed():
    backend = ScriptedBackend()
    backend.ends = False
    async with acting(world(), backend=backend) as (actuator, posted, _):
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)

        assert len(backend.killed) == 1
        assert [type(report) for report in posted] == [HostObserved]


def with_crate(state: State) -> State:
    """And a second host, with a node on which the job has never been."""
    state.hosts["crate"] = m.Host("crate", "fake", 1000)
    state.nodes["crate/gpu0"] = m.Node("crate/gpu0", "crate", {"crate/gpu0": m.Gpu()}, ("rollout",))
    return state


async def test_a_process_is_ended_only_on_a_host_where_the_job_has_or_had_a_node():
    state = with_crate(world())
    async with acting(state) as (actuator, _, backend):
        state.sessions["n1"].host = "crate"
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert backend.killed == []

        job = state.jobs["j1"]
        job.last_pins, job.pins = {"rollout": ("crate/gpu0",)}, {}
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert [killed[0] for killed in backend.killed] == ["crate"]

        job.pins = {"rollout": ("box/gpu0-1", "crate/gpu0")}
        for host in ("box", "elsewhere"):
            state.sessions["n1"].host = host
            actuator.perform([Kill("j1", 1, "n1")])
            await anyio.sleep(1)
        assert [killed[0] for killed in backend.killed] == ["crate", "box", "box", "crate"]


async def test_a_job_that_never_had_a_place_ends_no_process_even_where_there_is_one_host_only():
    state = world()
    state.jobs["j1"].pins = {}
    async with acting(state) as (actuator, _, backend):
        for host in ("elsewhere", "box", ""):
            state.sessions["n1"].host = host
            actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert backend.killed == []


async def test_a_process_in_which_another_job_lives_is_not_ended_for_this_one():
    state = world()
    other = m.Session("n2", "j2", 1, 0, pid=4711, host="box", started="t0")
    state.sessions["n2"] = other
    async with acting(state) as (actuator, posted, backend):
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert backend.killed == []
        assert [type(report) for report in posted] == [HostObserved]

        other.started = "t1"  # another process, with the same number
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert len(backend.killed) == 1
        other.started, other.status = "t0", m.SessionStatus.LOST
        actuator.perform([Kill("j1", 1, "n1")])
        await anyio.sleep(1)
        assert len(backend.killed) == 2


async def test_a_driver_is_told_in_which_phase_the_state_was_used_last():
    """Engines may sleep in one way after one phase, and in another after another."""
    state, driver = world(order()), ScriptedDriver()
    phases = (PhaseSpec("rollout", ("rollout",)), PhaseSpec("eval", ("rollout",)), PhaseSpec("train", ("train",)))
    state.jobs["j1"].spec = JobSpec("math", phases, (), states=(StateSpec("rollout"),))
    async with acting(state, driver) as (actuator, _, _):
        for number, phase in enumerate(("", "eval", "train", "rollout")):
            if phase:
                granted(state, f"s{number}", phase)
            actuator.perform([Perform("o1")])
            await anyio.sleep(0.01)
    assert [told.phase for _, told in driver.told] == ["", "eval", "eval", "rollout"]


async def test_the_phase_is_remembered_when_the_state_has_forgotten_its_slot():
    """A job may train in several phases before another job comes for the GPUs of its rollouts."""
    state, driver = world(order()), ScriptedDriver()
    phases = (PhaseSpec("rollout", ("rollout",)), PhaseSpec("sync", ("rollout",)), PhaseSpec("train", ("train",)))
    state.jobs["j1"].spec = JobSpec("math", phases, (), states=(StateSpec("rollout"),))
    async with acting(state, driver) as (actuator, _, _):
        for number, phase in enumerate(("rollout", "train")):
            fact = granted(state, f"s{number}", phase)
            actuator.on_facts(entries(state, [(number, fact)], {}))
        del state.slots["s0"]
        state.slots_of["j1"] = ["s1"]
        actuator.perform([Perform("o1")])
        await anyio.sleep(0.01)
        ended = f.JobEnded(0, "j1", said("enough"))
        actuator.on_facts(entries(state, [(2, ended)], {}))
        assert actuator._phases == {}
    assert [told.phase for _, told in driver.told] == ["rollout"]


def granted(state, slot, phase):
    """A slot of job j1, and the fact that it was granted."""
    state.slots[slot] = m.Slot(slot, "j1", 1, "n1", phase, slot, 0, granted_at=0)
    state.slots_of["j1"] = [*state.slots_of.get("j1", ()), slot]
    return f.SlotGranted(0, slot, Fence(1, 1))


# ---- plugins at their worst ----------------------------------------------------------------------------------------


async def test_a_driver_that_is_cancelled_from_within_has_its_order_reported_as_unknown():
    """Whoever waits for a connection that somebody else is making is cancelled with it, and nobody had asked for it."""
    driver = ScriptedDriver(asyncio.CancelledError())
    async with acting(world(order(), order(id="o2")), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        assert posted == [OrderLostContact("o1", said("the plugin's own call was cancelled, and not by the daemon"))]
        actuator.perform([Perform("o2")])
        await anyio.sleep(1)
        assert posted[1:] == [OrderDone("o2", CLEAN)]


class CancelsItself(ScriptedDriver):
    async def _do(self, verb, order):
        asyncio.current_task().cancel()
        await asyncio.sleep(1)


async def test_a_driver_that_cancels_its_own_task_is_not_said_to_have_been_late():
    async with acting(world(order()), CancelsItself()) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        assert posted == [OrderLostContact("o1", said("the plugin's own call was cancelled, and not by the daemon"))]


@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(2)])
async def test_a_backend_that_is_cancelled_from_within_or_exits_costs_its_own_look_only(error):
    """It was the end of the actuator, without a word: a task that ends cancelled cancels the group that it is in."""
    backend = ScriptedBackend()
    backend.ends = False

    async def torn() -> Observation:
        raise error

    good, backend.sees = backend.sees, torn
    async with acting(world(order()), ScriptedDriver(), backend) as (actuator, posted, _):
        actuator.perform([Observe("box"), Kill("j1", 1, "n1")])
        assert await actuator.observe("box", ("box/gpu0",)) == ()
        await anyio.sleep(1)
        assert posted
        assert all(report.unreachable is not None for report in posted)
        posted.clear()
        backend.sees = good
        actuator.perform([Perform("o1"), Observe("box")])
        await anyio.sleep(1)
        assert {type(report) for report in posted} == {OrderDone, HostObserved}


@pytest.mark.parametrize(
    "observation",
    [
        None,
        Observation(None, "boot1"),
        Observation((GpuObservation("box/gpu0", 12.5), GpuObservation("box/gpu1", 0)), "boot1"),
        Observation((GpuObservation("box/gpu0", None), GpuObservation("box/gpu1", 0)), "boot1"),
        Observation((GpuObservation("box/gpu0", -1), GpuObservation("box/gpu1", 0)), "boot1"),
        Observation((GpuObservation("box/gpu0", 0), GpuObservation("box/gpu0", 0)), "boot1"),
        Observation(CLEAN, None),
        Observation(CLEAN, "boot \udcff"),
        Observation(CLEAN, "boot1", unread={"box/gpu2": 7}),
    ],
    ids=["none", "no gpus", "float", "no mb", "below zero", "twice", "no boot id", "no text", "no reason"],
)
async def test_a_sight_that_is_none_is_believed_by_nobody_and_ends_nothing(observation):
    """What is not of the contract's types would stop the daemon here, or be journalled and never be read again."""
    backend = ScriptedBackend()

    async def lie() -> Observation:
        return observation

    good, backend.sees = backend.sees, lie
    async with acting(world(order()), ScriptedDriver(), backend) as (actuator, posted, _):
        actuator.perform([Observe("box")])
        assert await actuator.observe("box", ("box/gpu0", "box/gpu1")) == ()
        await anyio.sleep(1)
        (report,) = posted
        assert "cannot be used" in sentence(report.unreachable)
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        assert posted[1:] == [OrderDone("o1", ())]
        backend.sees = good
        actuator.perform([Observe("box")])
        await anyio.sleep(1)
        assert type(posted[-1]) is HostObserved


async def test_what_a_plugin_says_is_text_that_can_be_journalled_and_read():
    driver = ScriptedDriver(NotDone("no file 'x\udcff'"), NotDone("x" * 1_000_000))
    async with acting(world(order(), order(id="o2")), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1"), Perform("o2")])
        await anyio.sleep(1)

        first, second = posted
        assert first == OrderFailed("o1", said("no file 'x\\udcff'"))
        assert len(sentence(second.error)) < 5_000
        assert sentence(second.error).endswith("xxx [...]")


async def test_the_time_limit_of_an_order_is_for_all_its_tries_together():
    """Others wait for it: told again three times, each time as long as once, it would keep them three times as long."""

    class LateNo(ScriptedDriver):
        async def _do(self, verb, order):
            self.told.append((verb, order))
            await anyio.sleep(100)
            raise NotDone("no")

    driver = LateNo(idempotent=True)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(121)
        assert len(posted) == 1
        assert len(driver.told) == 2
        await anyio.sleep(1000)
        assert len(driver.told) == 2
        assert posted == [OrderLostContact("o1", said("no answer within 120 s"))]


class Stubborn(ScriptedDriver):
    """Takes no for an answer of nobody: a bare ``except`` in a loop, or a thread that hangs."""

    def __init__(self, takes_s: float, **options) -> None:
        super().__init__(**options)
        self.ends = 0.0
        self.takes_s = takes_s

    async def _do(self, verb, order):
        self.told.append((verb, order))
        self.ends = anyio.current_time() + self.takes_s
        while anyio.current_time() < self.ends:
            try:
                await asyncio.sleep(1)
            except asyncio.CancelledError:
                continue


async def test_a_driver_that_cannot_be_stopped_costs_its_time_limit_and_may_be_asked_afterwards():
    driver = Stubborn(300, probed=Probed(known=True, done=False, error="half way"))
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(200)
        assert posted == [OrderLostContact("o1", said("no answer within 120 s, and it does not let itself be stopped"))]
        actuator.perform([Probe("o1")])
        await anyio.sleep(1)
        assert posted[1:] == [OrderFailed("o1", said("half way"))]
        await anyio.sleep(400)
        assert len(posted) == 2, "what it says then is of no use to anybody"


async def test_the_daemon_stops_in_bounded_time_whatever_a_driver_does():
    driver = Stubborn(300)
    async with acting(world(order()), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        began = anyio.current_time()
    assert anyio.current_time() - began < 10
    assert posted == []
    driver.ends = 0.0
    await anyio.sleep(2)


class Slow(ScriptedDriver):
    """Takes three seconds to stop, and fails at that."""

    stopped = 0.0

    async def _do(self, verb, order):
        self.told.append((verb, order))
        try:
            await asyncio.sleep(self.script.pop(0))
        except asyncio.CancelledError:
            for _ in range(3):
                await asyncio.sleep(1)
            self.stopped = anyio.current_time()
            raise ConnectionResetError("while it stopped") from None


GONE = [Entry(7, f.StateObserved(7, "j1", "rollout", "box/gpu0-1", m.StateStatus.GONE), None, None, None)]


def errors_unread() -> Callable[[], list[str]]:
    """From now on: what asyncio says of errors that nobody has looked at, once all that could is gone."""
    found: list[str] = []

    def collected() -> list[str]:
        gc.collect()
        return found

    asyncio.get_running_loop().set_exception_handler(lambda _, context: found.append(context["message"]))
    return collected


async def test_an_order_that_is_being_stopped_is_under_way_until_its_driver_has_stopped():
    """Also if more is seen meanwhile, and the daemon ends."""
    unread, driver, state = errors_unread(), Slow(60.0), world(order(m.OrderKind.LOAD))
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        del state.orders["o1"]
        actuator.on_facts(GONE)
        await anyio.sleep(1)
        actuator.on_facts(GONE)
        await anyio.sleep(1)
        assert list(actuator._under_way) == ["o1"]
    assert driver.stopped, "the daemon has ended before it"
    assert posted == []
    assert unread() == []


async def test_an_order_that_leaves_the_books_while_its_late_driver_is_being_stopped_leaves_no_error_unread():
    unread, driver, state = errors_unread(), Slow(1e6), world(order(m.OrderKind.LOAD))
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(121)
        del state.orders["o1"]
        actuator.on_facts(GONE)
        await anyio.sleep(10)
        assert driver.stopped
        assert (posted, list(actuator._under_way)) == ([], [])
    assert unread() == []


async def test_an_order_that_comes_back_to_the_books_while_it_is_being_stopped_is_asked_for_once_it_has_stopped():
    """It had left them in memory, and what took it out could not be written down. It has to end in a report."""
    driver, state = Slow(60.0), world(order(m.OrderKind.LOAD))
    driver.probed, driver.traits = Probed(known=True, done=True), DriverTraits(probes=True)
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        taken = state.orders.pop("o1")
        actuator.on_facts(GONE)
        await anyio.sleep(1)
        state.orders["o1"] = taken
        actuator.begin(state)
        actuator.perform([Probe("o1"), Probe("o1")])
        await anyio.sleep(1)
        assert [verb for verb, _ in driver.told] == ["load"]
        await anyio.sleep(3)
        assert driver.stopped
        assert [verb for verb, _ in driver.told] == ["load", "probe"]
        assert posted == [OrderDone("o1")]
        assert not actuator._under_way


async def test_an_order_that_comes_back_while_it_is_being_stopped_does_not_outlive_the_daemon():
    unread, driver, state = errors_unread(), Slow(60.0), world(order(m.OrderKind.LOAD))
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        taken = state.orders.pop("o1")
        actuator.on_facts(GONE)
        state.orders["o1"] = taken
        actuator.perform([Perform("o1", again=True)])
        await anyio.sleep(0.5)
    assert driver.stopped
    assert [verb for verb, _ in driver.told] == ["load"]
    assert posted == []
    assert unread() == []


async def test_an_order_that_leaves_the_books_before_it_has_begun_is_not_under_way():
    driver, state = ScriptedDriver(), world(order())
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        taken = state.orders.pop("o1")
        actuator.on_facts(GONE)
        await anyio.sleep(1)
        assert (driver.told, posted, list(actuator._under_way)) == ([], [], [])
        state.orders["o1"] = taken
        actuator.perform([Perform("o1")])
        await anyio.sleep(1)
        assert posted == [OrderDone("o1", CLEAN)]


class Deaf(ScriptedBackend):
    """Its looks do not let themselves be stopped. They end after a while, or when there have been so many."""

    def __init__(self, ends_s: float, at: int = 1_000) -> None:
        super().__init__()
        self.ends_s, self.at = ends_s, at

    async def observe(self, host: str) -> Observation:
        self.looks.append(anyio.current_time())
        until = anyio.current_time() + self.ends_s
        while len(self.looks) < self.at and anyio.current_time() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.sleep(1)
        return Observation(CLEAN, "boot1")


async def test_a_look_that_cannot_be_stopped_keeps_nobody_from_looking_again():
    backend = Deaf(100, at=2)
    async with acting(world(), backend=backend) as (actuator, posted, _):
        actuator.perform([Observe("box")])
        await anyio.sleep(16)
        assert sentence(posted[0].unreachable) == "no answer within 10 s, and it does not let itself be stopped"
        actuator.perform([Observe("box")])
        await anyio.sleep(3)
        assert [report.unreachable is None for report in posted] == [False, True]


async def test_looks_that_cannot_be_stopped_become_no_more_than_eight_and_when_one_has_ended_it_is_looked_again():
    backend = Deaf(600)
    async with acting(world(), backend=backend) as (actuator, posted, _):
        for _ in range(20):
            actuator.perform([Observe("box")])
            await anyio.sleep(16)
        assert len(backend.looks) == 8
        assert [sentence(report.unreachable).split(":")[0] for report in posted[7:9]] == [
            "no answer within 10 s, and it does not let itself be stopped",
            "not asked",
        ]
        await anyio.sleep(backend.looks[0] + 601 - anyio.current_time())
        actuator.perform([Observe("box")])
        await anyio.sleep(1)
        assert len(backend.looks) == 9
        await anyio.sleep(700)


async def test_what_a_call_raises_as_its_asker_is_cancelled_is_no_error_of_the_loops():
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, said: unheard.append(said))

    async def fails():
        askers[0].cancel()
        raise OSError("the host is gone")

    askers = [asyncio.create_task(ask(1, fails()))]
    await asyncio.wait(askers)
    askers.clear()
    gc.collect()
    assert unheard == []


async def test_calls_that_take_a_moment_to_stop_are_no_reason_not_to_ask():
    async def slow():
        try:
            await asyncio.sleep(60)
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.sleep(STOPS_S - 1)

    async def prompt():
        return "an answer"

    async with anyio.create_task_group() as tasks:
        for _ in range(2 * STUCK_AT_MOST):
            tasks.start_soon(no_answer, ask(1, slow(), purpose="look"))
        await anyio.sleep(2)
        assert await ask(1, prompt(), purpose="look") == "an answer"


async def no_answer(asked):
    with pytest.raises(NoAnswer, match=r"no answer within 1 s$"):
        await asked


async def test_an_order_that_has_left_the_books_unseen_is_stopped_when_the_writer_begins_anew():
    """The writer went down just as it happened: no sink was told, and the GPUs may be somebody else's after all."""
    driver, state = ScriptedDriver(60.0, 60.0), world(order(m.OrderKind.LOAD), order(m.OrderKind.LOAD, id="o2"))
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1"), Perform("o2")])
        await anyio.sleep(1)
        del state.orders["o1"]
        actuator.begin(state)
        await anyio.sleep(1)
        assert list(actuator._under_way) == ["o2"]
        await anyio.sleep(100)
        assert posted == [OrderDone("o2")]


async def test_an_order_of_which_there_is_no_word_is_not_told_again_but_asked_for():
    """Its result came while the writer was down: the start has had it told again before the result was known."""
    lost = order()
    lost.status = m.OrderStatus.LOST_CONTACT
    driver = ScriptedDriver(probed=Probed(known=True, done=True), idempotent=True)
    async with acting(world(lost), driver) as (actuator, posted, _):
        actuator.perform([Perform("o1", again=True), Probe("o1")])
        await anyio.sleep(1)

        assert [verb for verb, _ in driver.told] == ["probe"]
        assert posted == [OrderDone("o1", CLEAN)]


async def test_an_order_that_has_left_the_books_is_not_tried_again():
    state, driver = world(order()), ScriptedDriver(NotDone("no"), idempotent=True)
    async with acting(state, driver) as (actuator, posted, _):
        actuator.perform([Perform("o1")])
        await anyio.sleep(0.5)
        del state.orders["o1"]
        await anyio.sleep(60)

        assert len(driver.told) == 1
        assert posted == [OrderFailed("o1", said("no"))]
