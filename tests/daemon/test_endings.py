"""A host that goes away: nothing new begins there shortly before, and an end that is put off is heard of."""

import json
from types import SimpleNamespace

import anyio
import pytest

from rollmuxd.core.inputs import DrainNode, HostEnds, UndrainNode
from rollmuxd.daemon.hosts import endings as module
from rollmuxd.daemon.hosts.endings import Endings
from rollmuxd.spi import ContactLost, HostEnd

END = HostEnd(at=10_000.0, drain_before_s=600.0, what="allocation 4711")


class World:
    """A state with one host of two nodes, which does what is asked."""

    def __init__(self, folder):
        self.now, self.told, self.ends, self.refuses = 0.0, [], [], set()
        nodes = {name: SimpleNamespace(host="h1", drain=False, pinned=[]) for name in ("h1/gpu0", "h1/gpu1")}
        hosts = {name: SimpleNamespace(nodes=of, ends_at=None) for name, of in {"h1": tuple(nodes), "h2": ()}.items()}
        self.state = SimpleNamespace(hosts=hosts, nodes=nodes, jobs={})
        self.kept = folder / "endings.json"

    def post(self, given):
        if isinstance(given, HostEnds):
            self.state.hosts[given.host].ends_at = given.ends_at
            self.ends.append(given)
            return
        self.told.append(given)
        if given.node not in self.refuses:
            self.state.nodes[given.node].drain = isinstance(given, DrainNode)

    def endings(self, backends=None):
        return Endings(backends or {}, lambda: self.state, self.post, self.kept, now=lambda: self.now)

    def drained(self):
        return [name for name, node in self.state.nodes.items() if node.drain]


@pytest.fixture
def world(tmp_path):
    return World(tmp_path)


def test_nodes_are_drained_when_it_is_time_and_once_and_it_says_what_ends(world):
    endings = world.endings()
    endings.ends["h1"] = END
    world.now = 9_399.0
    endings.look()
    assert world.told == []
    world.now = 9_400.0
    endings.look()
    endings.look()
    by = "the end of allocation 4711 at 1970-01-01 02:46 UTC"
    assert world.told == [DrainNode(node="h1/gpu0", by=by), DrainNode(node="h1/gpu1", by=by)]


def test_nothing_begins_that_could_not_end_in_time(world, monkeypatch):
    monkeypatch.setattr(module, "solo_ms", lambda job: job)
    world.state.jobs = {"short": 60_000, "long": 2_000_000, "unknown": None}
    world.state.nodes["h1/gpu1"].pinned = ["short", "long", "unknown"]
    endings = world.endings()
    endings.ends["h1"] = END
    world.now = 7_999.0
    endings.look()
    assert world.drained() == []
    world.now = 8_000.0
    endings.look()
    assert world.drained() == ["h1/gpu0", "h1/gpu1"]


def test_an_end_that_is_put_off_gives_the_nodes_back_also_after_a_restart(world):
    endings = world.endings()
    endings.ends["h1"], world.now = END, 9_500.0
    endings.look()
    assert sorted(json.loads(world.kept.read_text())) == ["h1/gpu0", "h1/gpu1"]
    again = world.endings()
    again.look()
    assert world.drained() == ["h1/gpu0", "h1/gpu1"], "no backend has said yet when the host ends"
    again.ends["h1"] = HostEnd(at=90_000.0, drain_before_s=600.0, what="allocation 4712")
    again.look()
    assert world.drained() == []
    assert json.loads(world.kept.read_text()) == {}


def test_what_an_operator_drained_is_not_given_back_and_what_an_operator_gave_back_is_not_drained_again(world):
    endings = world.endings()
    endings.ends["h1"] = END
    world.state.nodes["h1/gpu0"].drain = True
    endings.look()
    assert world.drained() == ["h1/gpu0"]
    world.now = 9_500.0
    endings.look()
    world.state.nodes["h1/gpu1"].drain = False
    endings.look()
    assert world.drained() == ["h1/gpu0"]


def test_the_core_hears_once_of_each_end(world):
    endings = world.endings()
    endings.ends["h1"] = END
    endings.look()
    endings.look()
    endings.ends["h1"] = None
    endings.look()
    assert world.ends == [HostEnds("h1", 10_000_000), HostEnds("h1", None)]


def test_a_node_that_refuses_is_told_again(world):
    endings = world.endings()
    endings.ends["h1"], world.now, world.refuses = END, 9_500.0, {"h1/gpu0"}
    endings.look()
    assert world.drained() == ["h1/gpu1"]
    world.refuses = set()
    endings.look()
    assert world.drained() == ["h1/gpu0", "h1/gpu1"]


class Backend:
    """Says what a test puts in; without an answer it has lost contact."""

    def __init__(self):
        self.says = [END, ContactLost("the controller is away"), None]
        self.asked = []

    async def ends_at(self, host):
        self.asked.append(host)
        said = self.says.pop(0) if self.says else None
        if isinstance(said, Exception):
            raise said
        return said


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_the_backend_is_asked_once_a_minute_and_what_it_said_holds_while_it_does_not_answer(world):
    backend = Backend()
    endings, seen = world.endings({"h1": backend}), []
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(endings.run)
        for _ in range(3):
            await anyio.sleep(30)
            seen.append(endings.ends.get("h1"))
            await anyio.sleep(30)
        tasks.cancel_scope.cancel()
    assert seen == [END, END, None]
    assert backend.asked[:3] == ["h1", "h1", "h1"]
    assert [given for given in world.told if isinstance(given, UndrainNode)] == []


@pytest.mark.asyncio
@pytest.mark.looptime
async def test_an_end_that_is_lifted_gives_the_nodes_back(world):
    backend = Backend()
    backend.says, world.now = [END, None], 9_500.0
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(world.endings({"h1": backend}).run)
        await anyio.sleep(30)
        assert world.drained() == ["h1/gpu0", "h1/gpu1"]
        await anyio.sleep(60)
        assert world.drained() == []
        tasks.cancel_scope.cancel()
