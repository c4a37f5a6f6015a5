"""Optical switches beside the phases: circuits follow slots, and a switch that fails is left alone."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.core import facts as f
from rollmuxd.core.model import Slot, SlotStatus
from rollmuxd.core.spec import PhaseSpec
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.hosts.circuits import DWELL_S, LEFT_ALONE_S, LOOK_S, RETRY_S, Circuits, FabricStatus
from rollmuxd.spi.fabric import Ports
from rollmuxd.spi.fake_fabric import FakeSwitch, MockFabric

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]

WIRED = {"a": (1, 2), "b": (3, 4), "c": (5, 6)}
RING_AB = {(1, 3), (2, 4), (3, 1), (4, 2)}
RING_BC = {(3, 5), (4, 6), (5, 3), (6, 4)}
WHILE_S = 3 * DWELL_S


def entry(fact):
    return Entry(1, fact, None, None, None)


class World:
    """Slots that come and go, and one switch."""

    def __init__(self, ports=Ports(16)):  # noqa: B008  # frozen
        self.state = SimpleNamespace(slots={}, jobs={}, nodes={}, incarnation=7)
        self.device = FakeSwitch(ports)
        self.circuits = Circuits({"ocs": ("mock", MockFabric(self.device), WIRED)}, lambda: self.state)
        self.switch = self.circuits.switches["ocs"]

    def claim(self, slot, nodes, traffic="ring"):
        phase = PhaseSpec("train", ("train",), traffic=traffic)
        spec = SimpleNamespace(phase=lambda name: phase)
        self.state.nodes[slot] = SimpleNamespace(holders=(slot,))
        self.state.jobs[slot] = SimpleNamespace(spec=spec, pins={"train": tuple(nodes)})
        self.state.slots[slot] = Slot(
            slot, slot, 1, "x", "train", "r", 0, status=SlotStatus.LOADING, claimed_at=len(self.state.slots)
        )
        self.circuits.on_facts([entry(f.SlotClaimed(at=0, slot=slot, gpus=(), turn=0))])

    def release(self, slot):
        self.state.slots[slot].status = SlotStatus.OVER
        self.circuits.on_facts([entry(f.SlotReleased(at=0, slot=slot))])


@asynccontextmanager
async def running(world):
    world.circuits.begin(world.state)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.circuits.run)
        await anyio.sleep(WHILE_S)
        yield world
        tasks.cancel_scope.cancel()


async def test_circuits_follow_the_slots():
    async with running(World()) as world:
        assert world.switch.status is FabricStatus.IDLE
        world.claim("s1", "ab")
        await anyio.sleep(WHILE_S)
        assert world.device.circuits == RING_AB
        assert world.switch.status is FabricStatus.ACTIVE
        world.release("s1")
        world.claim("s2", "bc")
        await anyio.sleep(WHILE_S)
        assert world.device.circuits == RING_BC


async def test_the_same_phase_again_changes_nothing():
    async with running(World()) as world:
        for slot in ("s1", "s2", "s3"):
            world.claim(slot, "ab")
            await anyio.sleep(WHILE_S)
            world.release(slot)
            await anyio.sleep(WHILE_S)
        assert len(world.device.obeyed) == 1


async def test_a_phase_that_says_nothing_of_its_traffic_gets_no_circuits():
    async with running(World()) as world:
        world.claim("s1", "ab", traffic="")
        await anyio.sleep(WHILE_S)
        assert not world.device.obeyed


async def test_after_a_restart_the_held_slots_keep_their_circuits_and_stamps_grow():
    world = World()
    async with running(world):
        world.claim("s1", "ab")
        await anyio.sleep(WHILE_S)
    before = world.device.obeyed[-1].stamp
    world.circuits = Circuits({"ocs": ("mock", MockFabric(world.device), WIRED)}, lambda: world.state)
    world.switch = world.circuits.switches["ocs"]
    world.state.incarnation += 1
    async with running(world):
        assert (world.switch.status, world.device.circuits) == (FabricStatus.ACTIVE, RING_AB)
        assert len(world.device.obeyed) == 1
        world.release("s1")
        world.claim("s2", "bc")
        await anyio.sleep(WHILE_S)
        assert world.device.obeyed[-1].stamp > before


async def test_one_failure_is_tried_again():
    async with running(World()) as world:
        world.device.faults.append("half")
        world.claim("s1", "ab")
        await anyio.sleep(2)
        assert world.switch.status is FabricStatus.FAILED
        assert world.switch.reason == "the switch does not answer"
        await anyio.sleep(10)
        assert (world.switch.status, world.device.circuits) == (FabricStatus.ACTIVE, RING_AB)


@pytest.mark.parametrize("fault", ["silent", "dark", "half", "reboot"])
async def test_two_failures_leave_the_switch_alone_for_an_hour(fault):
    async with running(World()) as world:
        world.device.faults.extend([fault, fault])
        world.claim("s1", "ab")
        await anyio.sleep(30)
        assert world.switch.status is FabricStatus.DEGRADED
        obeyed = len(world.device.obeyed)
        world.claim("s2", "bc")
        await anyio.sleep(LEFT_ALONE_S / 2)
        assert len(world.device.obeyed) == obeyed
        await anyio.sleep(LEFT_ALONE_S / 2)
        assert world.switch.status is FabricStatus.ACTIVE
        assert set(world.device.circuits) >= RING_AB


async def test_two_failures_far_apart_are_two_single_ones():
    async with running(World()) as world:
        for slot, nodes in (("s1", "ab"), ("s2", "bc")):
            world.device.faults.append("silent")
            world.claim(slot, nodes)
            await anyio.sleep(700)
            assert world.switch.status is FabricStatus.ACTIVE
            world.release(slot)


async def test_a_switch_that_forgot_its_circuits_gets_them_again():
    async with running(World()) as world:
        world.claim("s1", "ab")
        await anyio.sleep(WHILE_S)
        world.device.circuits = frozenset()
        await anyio.sleep(LOOK_S + WHILE_S)
        assert world.device.circuits == RING_AB


async def test_an_operator_leaves_it_alone_and_restores_it():
    async with running(World()) as world:
        world.switch.degrade("mirrors are cleaned")
        world.claim("s1", "ab")
        await anyio.sleep(10 * LEFT_ALONE_S)
        assert (world.switch.status, world.switch.reason) == (FabricStatus.DEGRADED, "mirrors are cleaned")
        assert not world.device.obeyed
        world.switch.restore()
        await anyio.sleep(WHILE_S)
        assert world.device.circuits == RING_AB


async def test_a_switch_that_is_left_alone_while_it_answers_gets_no_order(monkeypatch):
    answers = anyio.Event()

    async def seen(self):
        await answers.wait()
        return self.switch.seen()

    async with running(World()) as world:
        monkeypatch.setattr(MockFabric, "seen", seen)
        world.claim("s1", "ab")
        await anyio.sleep(1)
        world.switch.degrade("mirrors are cleaned")
        answers.set()
        await anyio.sleep(WHILE_S)
        assert (world.switch.status, world.device.obeyed) == (FabricStatus.DEGRADED, [])


@pytest.mark.parametrize(
    ("ports", "why"), [(Ports(5), "port 6 is not one of 1 to 5"), (Ports(16, (6,)), "port 6 is protected")]
)
async def test_a_switch_that_was_away_at_the_start_and_does_not_fit_is_left_alone_by_the_key(ports, why):
    world = World(ports)
    world.device.unplugged = True
    async with running(world):
        assert world.switch.status is FabricStatus.FAILED
        world.device.unplugged = False
        await anyio.sleep(2 * RETRY_S)
        assert (world.switch.status, world.switch.reason) == (FabricStatus.DEGRADED, f"fabric[0].ports.c: {why}")
        world.claim("s1", "ab")
        await anyio.sleep(10 * LEFT_ALONE_S)
        assert not world.device.obeyed
        world.device.ports = Ports(16)  # another one was put in its place
        world.switch.restore()
        await anyio.sleep(WHILE_S)
        assert world.device.circuits == RING_AB


async def test_an_order_that_cannot_be_is_not_sent_and_counts_as_no_failure_of_the_switch():
    world = World(Ports(16, protected=(9,)))
    world.device.circuits = frozenset({(1, 9)})  # by another program, and port 9 is not to be touched
    async with running(world):
        world.claim("s1", "ab")
        await anyio.sleep(10 * LOOK_S)
        assert world.switch.status is FabricStatus.FAILED
        assert world.switch.reason == "fabric[0]: circuit 1 -> 9: port 9 is protected"
        assert not world.device.obeyed
        world.release("s1")
        await anyio.sleep(WHILE_S)
        assert world.switch.status is FabricStatus.IDLE


_steps = st.lists(
    st.one_of(
        st.tuples(st.just("claim"), st.sampled_from(["ab", "bc", "ac", "abc"])),
        st.tuples(st.just("release"), st.just("")),
        st.tuples(st.just("fault"), st.sampled_from(["silent", "silent-done", "half", "dark", "reboot"])),
        st.tuples(st.just("wait"), st.just("")),
    ),
    max_size=14,
)


@given(_steps)
async def test_after_any_orders_and_faults_the_switch_has_what_is_wanted_or_is_left_alone(steps):
    async with running(World()) as world:
        held: list[str] = []
        for number, (what, of) in enumerate(steps):
            if what == "claim":
                world.claim(f"s{number}", of)
                held.append(f"s{number}")
            elif what == "release" and held:
                world.release(held.pop(0))
            elif what == "fault":
                world.device.faults.append(of)
            else:
                await anyio.sleep(7)
            await anyio.sleep(0.3)
            there = world.device.circuits
            assert len({a for a, _ in there}) == len({b for _, b in there}) == len(there)
        await anyio.sleep(5 * LOOK_S)
        assert world.switch.status in (FabricStatus.ACTIVE, FabricStatus.IDLE, FabricStatus.DEGRADED)
        if world.switch.status is not FabricStatus.DEGRADED:
            assert world.switch.wanted() <= world.device.circuits == world.switch.seen
        stamps = [order.stamp for order in world.device.obeyed]
        assert stamps == sorted(set(stamps))
