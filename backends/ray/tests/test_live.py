"""The ray backend, over a real cluster: a head and two nodes that may be killed; GPUs are made up in a file.

All live tests are in this file, so that they share one cluster.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import anyio.abc
import pytest
from patience import PATIENCE_S

from rollmuxd.spi import ContactLost, HostConfig, ProcessOrder
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_ray import RayBackend
from rollmuxd_backend_ray.connection import ClusterConnection

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GPUS = ("box/gpu0", "box/gpu1")
BOX = HostConfig(id="box", gpus=GPUS)


class Served(ClusterConnection):
    """The connection to a cluster member that is there, if one is named."""

    serving = ""

    async def _start(self):
        return self.serving or await super()._start()


class Sharing(RayBackend):
    """One that finds a cluster member there: to start one for each test would take most of the time."""

    serving = ""

    def _new_line(self, options):
        line = Served(options.address, options.connect_s)
        line.serving = self.serving
        return line


class TestRayBackend(BackendContract):
    host = "box"
    cancelled_after_turns = range(0, 12, 4)  # each call is a program that is started
    cancelled_after_s = (0.002, 0.02, 0.05)

    @pytest.fixture(autouse=True)
    def place(self, live, tmp_path, made_up):
        self.live, self.state, self.made_up = live, tmp_path, made_up
        self.ours = []
        yield
        for process in self.ours:
            process.kill()
            process.wait()

    def options(self):
        return {
            "address": self.live.address,
            "state_dir": str(self.state),
            "made_up_gpus": self.made_up(),
            "owns_sessions": True,
            "starts_processes": True,
            "logs": str(self.state / "logs"),
        }

    async def make(self):
        begins = "box" not in self.live.up or not self.live.joined
        self.live.start("box")
        Sharing.serving = self.live.member()
        backend = await Sharing.open([BOX], self.options())
        if begins:  # what the contract bounds is a healthy host's answer, not the start of its first process
            await seen(backend)
        return backend

    async def make_again(self):
        return await self.make()

    async def make_unreachable(self):
        """A node that no cluster has yet."""
        Sharing.serving = self.live.member()
        return await Sharing.open([BOX], {**self.options(), "node": "nobody"})

    async def open_with(self, options):
        return await RayBackend.open([HostConfig(id="box", gpus=GPUS, options=options)], self.options())

    async def take_away(self, backend):
        self.live.kill("box")

    async def bring_back(self, backend):
        self.live.start("box")

    async def occupy(self, backend):
        self.made_up([{"uuid": "GPU-0", "total_mb": 80_000}, {"uuid": "GPU-1", "total_mb": 80_000, "more_mb": 5_000}])
        return "box/gpu1", 5_000

    async def start_process(self, backend):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ours.append(process)
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return process.pid, stat.rpartition(")")[2].split()[19]

    async def is_running(self, backend, pid):
        return next(one for one in self.ours if one.pid == pid).poll() is None


@pytest.fixture
def opened(live, made_up, tmp_path):
    """A function that opens a backend with a cluster member of its own, and these options."""

    async def open_(*hosts, kind=RayBackend, **options):
        given = {"address": live.address, "made_up_gpus": made_up(), "state_dir": str(tmp_path), **options}
        return await kind.open([HostConfig(id=host) for host in hosts], given)

    live.start("box")
    return open_


async def seen(backend, host="box"):
    """Ask again and again, until it is seen; what was said until then."""
    said = []
    with anyio.fail_after(PATIENCE_S):
        while True:
            try:
                await backend.observe(host)
            except ContactLost as error:
                said.append(str(error))
                await anyio.sleep(0.1)
            else:
                return said


@pytest.mark.asyncio
async def test_a_node_that_is_killed_breaks_what_is_under_way_there_and_nothing_elsewhere(live, opened, tmp_path):
    Sharing.serving = live.member()
    backend = await opened("box", "crate", kind=Sharing)
    held = []

    async def hold(stream):
        async with stream:
            held.append(await stream.receive())
            await anyio.sleep_forever()

    async with await anyio.create_tcp_listener(local_host="127.0.0.1") as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, hold)
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        begun, ended = tmp_path / "begun", []

        async def last():
            with pytest.raises(ContactLost) as lost:
                await backend.run("box", ("sh", "-c", f"echo > {begun}; sleep 600"), timeout_s=600)
            ended.append(str(lost.value))

        async def talk():
            with pytest.raises(ContactLost) as lost:
                await backend.exchange("box", "127.0.0.1", port, b"x", most=10)
            ended.append(str(lost.value))

        tasks.start_soon(last)
        tasks.start_soon(talk)
        with anyio.fail_after(PATIENCE_S):
            while not begun.exists() or not held:
                await anyio.sleep(0.02)
            live.kill("box")
            while len(ended) < 2:
                await anyio.sleep(0.02)
            await backend.observe("crate")
            for _ in range(3):
                with pytest.raises(ContactLost):
                    await backend.observe("box")
        tasks.cancel_scope.cancel()
    live.start("box")
    await seen(backend)
    await backend.close()


@pytest.mark.asyncio
async def test_jobs_processes_and_the_daemons_next_calls_outlive_cluster_member_that_is_killed(opened):
    backend = await opened("box", starts_processes=True)
    order = ProcessOrder(
        launch="l1", job="j1", run=1, owner="o", user="u", name="n", argv=("sleep", "600"), cwd="/", env={}
    )
    await seen(backend)
    process = await backend.start("box", order)
    member = next(iter(backend._lines.values()))._process
    os.kill(member.pid, signal.SIGKILL)
    await seen(backend)
    assert await backend.alive("box", "l1")
    assert await backend.start("box", order) == process, "it was started a second time"
    assert await backend.stop("box", "l1")
    await backend.close()


@pytest.mark.asyncio
async def test_cluster_member_ends_with_whoever_started_it_and_the_commands_that_it_had_with_it(live, opened, tmp_path):
    folder, mark = tmp_path / "rollmuxd-ray-1", tmp_path / "mark"
    folder.mkdir()
    socket = str(folder / "s")
    member = live.start_member(socket)
    Sharing.serving = socket
    backend = await opened("crate", kind=Sharing)
    async with anyio.create_task_group() as tasks:

        async def last():
            with pytest.raises(ContactLost):
                await backend.run("crate", ("sh", "-c", f"echo $$ > {mark}; sleep 600"), timeout_s=600)

        tasks.start_soon(last)
        with anyio.fail_after(PATIENCE_S):
            while not (mark.exists() and mark.read_text().strip()):
                await anyio.sleep(0.02)
            member.stdin.close()  # as it is when the daemon is killed
            while member.poll() is None:
                await anyio.sleep(0.02)
            while Path(f"/proc/{int(mark.read_text())}").exists():
                await anyio.sleep(0.02)
    member.stdout.close()
    assert not folder.exists()
    await backend.close()


@pytest.mark.asyncio
async def test_a_command_does_not_have_what_ray_has_told_its_own_worker(opened, live):
    Sharing.serving = live.member()
    backend = await opened("h100", kind=Sharing, labels={"rack": "crate"})
    assert b"RAY_" not in (await backend.run("h100", ("env",))).stdout
    await backend.close()


@pytest.mark.asyncio
async def test_a_host_is_the_node_that_labels_and_resources_say(opened, live):
    Sharing.serving = live.member()

    async def said(**options):
        backend = await opened("h100", kind=Sharing, **options)
        found = (await backend.check("h100"))[0]
        await backend.close()
        return found.said

    assert "crate at" in await said(labels={"rack": "crate"}, resources={"GPU": 2})
    assert "2 nodes of the cluster are with 2 GPU" in await said(resources={"GPU": 2})
    assert "labelled rack=crate and with 3 GPU" in await said(labels={"rack": "crate"}, resources={"GPU": 3})


@pytest.mark.asyncio
async def test_where_there_is_no_cluster_the_loop_goes_on_and_each_look_is_told_the_same(opened):
    backend = await opened("box", address="127.0.0.1:1", connect_s=2.0)
    turns = 0

    async def beat():
        nonlocal turns
        while True:
            await anyio.sleep(0.005)
            turns += 1

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(beat)
        with pytest.raises(ContactLost, match=r"box: the Ray cluster at 127\.0\.0\.1:1 cannot be reached") as tried:
            await backend.observe("box")
        tasks.cancel_scope.cancel()
    assert turns > 20
    connection = next(iter(backend._lines.values()))
    now = connection._now()
    connection._failed, connection._next_at, connection._now = 9, now + 30, lambda: now
    with pytest.raises(ContactLost) as between:
        await backend.observe("box")
    assert str(between.value) == str(tried.value)
    await backend.close()


def test_ray_is_not_imported_into_the_daemons_process():
    asked = """
import sys
import anyio
from rollmuxd.spi import ContactLost, HostConfig
from rollmuxd_backend_ray import RayBackend

async def look():
    backend = await RayBackend.open([HostConfig(id="box")], {"address": "127.0.0.1:1", "connect_s": 2.0})
    try:
        await backend.observe("box")
    except ContactLost as error:
        print(error)
    await backend.close()

anyio.run(look)
print("with ray" if "ray" in sys.modules else "without ray")
"""
    said = subprocess.run(
        [sys.executable, "-c", asked], capture_output=True, text=True, timeout=PATIENCE_S, check=True
    ).stdout
    assert "cannot be reached" in said
    assert said.endswith("without ray\n")


@pytest.mark.asyncio
async def test_a_head_that_has_begun_anew_is_joined_by_itself(live, opened):
    """The last one here: nothing of the old cluster is there any more."""
    backend = await opened("box")
    await seen(backend)
    live.cluster.do("restart", "box")
    live.up = {"box"}
    said = await seen(backend)
    assert said, "what answered was of the old cluster"
    await backend.close()
