"""A whole daemon but for its sockets and its backends: the real core, writer, journal in memory, and HTTP interface."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import forked
import httpx
import pytest
from memory_journal import MemoryJournal
from patience import PATIENCE_S

from rollmuxd.core.causes import said
from rollmuxd.core.config import Config, DriverTraits
from rollmuxd.core.effects import Observe, Perform
from rollmuxd.core.inputs import GpuObservation, HostObserved, HostSpec, NodeSpec, OrderDone, OrderFailed, Start
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.daemon import question
from rollmuxd.daemon.access.gate import PEER_EXTENSION, Peer
from rollmuxd.daemon.access.keys import Role, new_key
from rollmuxd.daemon.app import make_policy
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.hosts.actuator import Seen
from rollmuxd.daemon.hosts.channel import ChannelHub
from rollmuxd.daemon.hosts.circuits import Circuits
from rollmuxd.daemon.http import background
from rollmuxd.daemon.http.app import make_app
from rollmuxd.daemon.metrics import Metrics
from rollmuxd.daemon.services import Services
from rollmuxd.daemon.settings import Settings
from rollmuxd.daemon.usage.daily import LiveUsage
from rollmuxd.daemon.writer import Writer
from rollmuxd.spi import NotDone, Output, Ports
from rollmuxd.spi.fake_fabric import FakeSwitch, MockFabric

ROLLOUT, TRAIN = "h1/gpu0-1", "h1/gpu2-3"


class Backends:
    """Does every order at once and sees every GPU clean, unless told otherwise."""

    def __init__(self) -> None:
        self.post: Callable[[Any], None] = lambda given: None
        self.state: Callable[[], Any] = lambda: None
        self.used_mb: dict[str, int] = {}
        #: orders are kept here instead of being done
        self.hold: list[str] | None = None
        self.fail: str = ""
        self.observations: list[tuple[str, tuple[str, ...]]] = []
        self.seen: dict[str, Seen] = {}

    def perform(self, effects: Any) -> None:
        for effect in effects:
            if isinstance(effect, Observe):
                nodes = [node for node in self.state().nodes.values() if node.host == effect.host]
                gpus = tuple(GpuObservation(gpu, self.used_mb.get(gpu, 0)) for node in nodes for gpu in node.gpus)
                self.post(HostObserved(effect.host, gpus))
            elif isinstance(effect, Perform):
                if self.hold is not None:
                    self.hold.append(effect.order)
                elif self.fail:
                    self.post(OrderFailed(effect.order, said(self.fail)))
                else:
                    self.done(effect.order)

    async def output(self, job: str, after: int, limit: int) -> Output:
        raise NotDone(f"nothing of {job} is kept")

    def done(self, order: str) -> None:
        node = self.state().nodes[self.state().orders[order].node]
        self.post(OrderDone(order, tuple(GpuObservation(gpu, self.used_mb.get(gpu, 0)) for gpu in node.gpus)))

    async def observe(self, host: str, gpus: Any) -> tuple[GpuObservation, ...]:
        self.observations.append((host, tuple(gpus)))
        return tuple(GpuObservation(gpu, self.used_mb.get(gpu, 0)) for gpu in gpus)


class Clock(SystemClock):
    """Between two looks at it at least a millisecond passes: a phase of 0 ms, on a fast machine, has run nothing."""

    def now(self) -> int:
        while super().now() == self._looked_at:
            self._anchor_ms += 1
        self._looked_at = self._last
        return self._last

    _looked_at = 0


class World:
    """A running daemon, and callers of all roles."""

    def __init__(self, settings: Settings) -> None:
        self.journal = MemoryJournal()
        self.backends = Backends()
        self.metrics = Metrics()
        self.clock = Clock()
        self.hub = ChannelHub()
        config = Config(
            drivers={"channel": DriverTraits(idempotent=True, probes=True), "vllm": DriverTraits()},
            observe_after_ms=20,
            launch_hosts=("h1",),
            owners=settings.to_core_config().owners,
            others=settings.to_core_config().others,
            max_jobs=settings.limits.max_jobs,
        )
        start = Start(
            hosts=(HostSpec("h1", "fake", 1_000_000),),
            nodes=(
                NodeSpec(ROLLOUT, "h1", ("h1/gpu0", "h1/gpu1"), ("rollout",), "H20", 96_000, 2.0),
                NodeSpec(TRAIN, "h1", ("h1/gpu2", "h1/gpu3"), ("train",), "H800", 80_000, 5.0),
            ),
        )
        self.today = LiveUsage(self.journal, self.settled)
        self.writer = Writer(
            lambda state: Scheduler(config, make_policy(settings), state),
            self.journal,
            self.clock,
            self.backends.perform,
            start,
            sinks=(self.metrics.sink,),
            prompt=(self.hub.on_facts,),
        )
        self.backends.state = lambda: self.writer.scheduler.state
        # As a real backend: it reports later, and not within the decision that orders it.
        self.backends.post = lambda given: _soon(self.writer.post, given)
        self.services = Services(
            writer=self.writer,
            actuator=self.backends,
            journal=self.journal,
            settings=settings,
            hub=self.hub,
            clock=self.clock,
            today=self.today,
            switches=Circuits(
                {"ocs": ("mock", MockFabric(FakeSwitch(Ports(4))), {ROLLOUT: (1,), TRAIN: (2,)})}, lambda: self.state
            ).switches,
        )
        self.app = make_app(self.services, self.metrics)
        self.secrets: dict[str, str] = {}

    async def settled(self) -> tuple[int, int]:
        """The time, and the last fact before it, once that is durable."""
        return await self.writer.read(lambda core, now: (now, self.writer.last_seq))

    @property
    def state(self) -> Any:
        return self.writer.scheduler.state

    def attached(self, slot: str) -> bool:
        """Whether a call attends the request, as far as the core knows."""
        return slot not in self.writer.scheduler.context.timers.detached

    async def add_key(self, name: str, owner: str, user: str, role: Role, *, expires_at: int | None = None) -> None:
        key, self.secrets[name] = new_key(owner, user, role, self.clock.now(), expires_at=expires_at)
        await self.journal.add_key(key)

    def client(self, name: str | None = "alice") -> httpx.AsyncClient:
        """A client with somebody's key; None: without any."""
        headers = {} if name is None else {"Authorization": f"Bearer {self.secrets[name]}"}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://rollmuxd", headers=headers, timeout=PATIENCE_S)

    def on_socket(self, uid: int) -> httpx.AsyncClient:
        """A client at the Unix socket."""

        async def app(scope: Any, receive: Any, send: Any) -> None:
            await self.app({**scope, "extensions": {PEER_EXTENSION: Peer(1, uid, uid)}}, receive, send)

        return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://rollmuxd", timeout=PATIENCE_S)

    async def settle(self) -> None:
        """Let everything that is under way come to its end: until nothing else has been ready for ten turns."""
        ready, quiet = asyncio.get_running_loop()._ready, 0  # type: ignore[attr-defined]
        for _ in range(100):
            await anyio.sleep(0)
            quiet = 0 if ready else quiet + 1
            if quiet == 10:
                break

    async def job(self, client: httpx.AsyncClient, name: str = "math", **more: Any) -> "RunningJob":
        """A registered job with a session."""
        said = await client.post("/v1/jobs", json=registration(name, **more))
        assert said.status_code == 201, said.text
        job = said.json()["job"]
        opened = await client.post(f"/v1/jobs/{job}/sessions", json={"pid": 1, "host": "h1"})
        assert opened.status_code == 201, opened.text
        return RunningJob(client, job, opened.json()["session"])


class RunningJob:
    """A job as its client process drives it."""

    def __init__(self, client: httpx.AsyncClient, job: str, session: str) -> None:
        self.client, self.id, self.session = client, job, session
        self._requests = 0

    async def ask(self, phase: str, *, wait_s: float = 5, request_id: str | None = None) -> httpx.Response:
        self._requests += 1
        body = {
            "phase": phase,
            "request_id": request_id or f"r{self._requests}",
            "session": self.session,
            "wait_s": wait_s,
        }
        return await self.client.post(f"/v1/jobs/{self.id}/slots", json=body)

    async def give_back(self, slot: dict[str, Any], **more: Any) -> httpx.Response:
        return await self.client.post(f"/v1/slots/{slot['slot']}/release", json={"fence": slot["fence"], **more})


def registration(name: str, **more: Any) -> dict[str, Any]:
    """The body of the registration of a job that wants one node of each pool."""
    phases = [
        {"name": "rollout", "pools": ["rollout"], "seconds": 10},
        {"name": "train", "pools": ["train"], "seconds": 10},
    ]
    return {"name": name, "phases": phases, "wants": {"rollout": {}, "train": {}}, **more}


def _soon(call: Callable[..., None], given: Any) -> None:
    asyncio.get_running_loop().call_soon(call, given)


@asynccontextmanager
async def _running(**tables: Any) -> AsyncIterator[World]:
    world = World(Settings(**tables))
    await world.add_key("root", "ops", "op", Role.ADMIN)
    await world.add_key("lead", "team", "lea", Role.LEAD)
    await world.add_key("alice", "team", "alice", Role.USER)
    await world.add_key("bob", "team", "bob", Role.USER)
    await world.add_key("viewer", "team", "vera", Role.VIEWER)
    await world.add_key("stranger", "others", "eve", Role.LEAD)
    async with anyio.create_task_group() as tasks:
        await tasks.start(world.writer.run)
        world.backends.perform([Observe("h1")])
        await world.settle()
        yield world
        world.writer.stop()


@pytest.fixture(autouse=True)
def patient_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers questions has as much of a processor as the tests beside it, and as much time as it needs."""
    monkeypatch.setattr(question, "NICE", 0)
    monkeypatch.setattr(question, "LIMIT_S", PATIENCE_S)


class CopiedProcess(background._Process, forked.Popen):
    """A process that answers a question, and that begins with its imports."""


@pytest.fixture(autouse=True)
def copied_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """What answers questions saves its imports. test_bounds.py is about the process, and starts real ones."""
    monkeypatch.setattr(background, "_Process", CopiedProcess)
    monkeypatch.setattr(background, "_COMMAND", (sys.executable, "-m", question.__name__))


@pytest.fixture
def running() -> Callable[..., Any]:
    """``async with running() as world``: within the test, so that a crash of the daemon fails it."""
    return _running


@pytest.fixture
def body_of_job() -> Callable[..., dict[str, Any]]:
    return registration


@pytest.fixture
def send_raw() -> Callable[..., Any]:
    """Call an ASGI app with messages of one's own: returns what it sent."""

    async def send_raw(
        app: Any, method: str, path: str, receive: Any, *, headers: dict[str, str] | None = None, query: str = ""
    ) -> list[dict[str, Any]]:
        sent: list[dict[str, Any]] = []

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": query.encode(),
            "headers": [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        await app(scope, receive, send)
        return sent

    return send_raw


class HeldQuestions:
    """Processes that answer questions, and do not begin before they may."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def pids(self) -> list[int]:
        """The processes that there have been."""
        return [int(file.name) for file in self.folder.iterdir() if file.name.isdigit()]

    def let_go(self) -> None:
        (self.folder / "go").touch()

    async def have_begun(self, number: int) -> None:
        while len(self.pids) < number:
            await anyio.sleep(0.01)


@pytest.fixture
def held_questions(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> HeldQuestions:
    """Questions from now on wait for ``let_go``."""
    folder = tmp_path / "questions"
    folder.mkdir()
    script = f'cd {folder}; touch $$; until [ -e go ]; do sleep 0.05; done; exec "$@"'
    monkeypatch.setattr(background, "_COMMAND", ("/bin/sh", "-c", script, "sh", *background._COMMAND))
    return HeldQuestions(folder)
