"""The slurm backend, over a real cluster: its steps are real, its GPUs are made up in a file.

All live tests are in this file, so that they share one cluster.
"""

import asyncio
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import ANY

import forked
import pytest
from patience import PATIENCE_S, eventually, until

from rollmuxd.spi import ContactLost, HostConfig, ProcessOrder
from rollmuxd.spi.contract import BackendContract
from rollmuxd_backend_slurm import SlurmBackend

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

GPUS = ("rx1/gpu0", "rx1/gpu1")


class TestSlurmBackend(BackendContract):
    host = "rx1"
    cancelled_after_turns = range(0, 12, 4)  # each call is a program that is started
    cancelled_after_s = (0.002, 0.02, 0.05)

    @pytest.fixture(autouse=True)
    def place(self, cluster, allocate, tmp_path, made_up):
        self.cluster, self.allocate, self.state, self.made_up = cluster, allocate, tmp_path, made_up
        self.allocation = allocate("--nodelist=rx1")
        self.ours = []
        yield
        cluster.start_node("rx1")
        for process in self.ours:
            process.kill()
            process.wait()

    def options(self):
        return {
            "allocation": self.allocation,
            "conf": str(self.cluster.config),
            "state_dir": str(self.state),
            "made_up_gpus": self.made_up(),
            "python": sys.executable,
            "connect_s": PATIENCE_S,
            "silent_s": PATIENCE_S,
            "owns_sessions": True,
            "starts_processes": True,
            "logs": str(self.state / "logs"),
        }

    async def make(self):
        return await SlurmBackend.open([HostConfig(id="rx1", gpus=GPUS)], self.options())

    async def make_again(self):
        return await self.make()

    async def make_unreachable(self):
        """A node that the allocation does not have."""
        return await SlurmBackend.open([HostConfig(id="rx1", gpus=GPUS)], {**self.options(), "node": "rx2"})

    async def open_with(self, options):
        return await SlurmBackend.open([HostConfig(id="rx1", gpus=GPUS, options=options)], self.options())

    async def take_away(self, backend):
        """The slurmd is ended, and the step's srun as Slurm ends it."""
        self.cluster.kill("rx1")
        for line in backend._lines.values():
            if line._process is not None:
                os.kill(line._process.pid, signal.SIGKILL)

    async def bring_back(self, backend):
        self.cluster.start_node("rx1")

    async def occupy(self, backend):
        self.made_up([{"uuid": "GPU-0", "total_mb": 80_000}, {"uuid": "GPU-1", "total_mb": 80_000, "more_mb": 5_000}])
        return "rx1/gpu1", 5_000

    async def start_process(self, backend):
        process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        self.ours.append(process)
        stat = Path(f"/proc/{process.pid}/stat").read_text()
        return process.pid, stat.rpartition(")")[2].split()[19]

    async def is_running(self, backend, pid):
        return next(one for one in self.ours if one.pid == pid).poll() is None


@pytest.fixture
def opened(cluster, made_up, tmp_path):
    """A function that opens a backend for hosts: names, or names with options of their own."""

    async def open_(hosts, **options):
        given = {
            "conf": str(cluster.config),
            "made_up_gpus": made_up(),
            "state_dir": str(tmp_path),
            "python": sys.executable,
            "logs": str(tmp_path / "logs"),
            "connect_s": PATIENCE_S,
            "silent_s": PATIENCE_S,
            **options,
        }
        return await SlurmBackend.open([HostConfig(id=host, options=own) for host, own in hosts.items()], given)

    return open_


async def lost(backend, host="rx1", says=""):
    """What is said of a host that is away, once it is and that is said: Slurm takes its time to end a step."""
    for pause in itertools.chain((0.1, 0.2, 0.4), itertools.repeat(1.0)):
        try:
            await backend.observe(host)
        except ContactLost as error:
            if says in str(error):
                return str(error)
        await asyncio.sleep(pause)
    raise AssertionError


async def seen(backend, host="rx1"):
    """Ask again and again, until it is seen."""

    async def once():
        with contextlib.suppress(ContactLost):
            return await backend.observe(host)

    while (found := await once()) is None:
        await asyncio.sleep(0.1)
    return found


def children_of(pids):
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[1]) in pids:
                found.append(int(stat.parent.name))
    return found


def order(launch, *argv, job="j1", env=None):
    return ProcessOrder(launch=launch, job=job, run=1, owner="o", user="u", name="n", argv=argv, cwd="/", env=env or {})


@pytest.mark.asyncio
async def test_components_of_a_heterogeneous_allocation_are_told_apart(cluster, allocate, opened, monkeypatch):
    allocation = allocate("--nodelist=rx1,rx2", ":", "--exclusive", "--gres=gpu:2", "--nodelist=rx3")
    backend = await opened({"rx1": {"component": 0}, "rx3": {"component": 1}}, allocation=allocation)
    for host in ("rx1", "rx3"):
        assert [gpu.gpu for gpu in (await backend.observe(host)).gpus] == [f"{host}/gpu0", f"{host}/gpu1"]
        ran = await backend.run(host, ("sh", "-c", "echo $SLURMD_NODENAME $SLURM_GPUS_ON_NODE"))
        assert ran.stdout == f"{host} 2\n".encode()
    await backend.close()

    for options, said in (
        ({}, "has 2 components; say in options.component which one the node is in"),
        ({"component": 2}, "has no component 2; it has 0, 1"),
        ({"component": 1}, f"node rx1 is not in allocation {allocation}, or has failed"),
    ):
        backend = await opened({"rx1": options}, allocation=allocation)
        assert said in await lost(backend)
        await backend.close()

    monkeypatch.setenv("SLURM_CONF", str(cluster.config))
    monkeypatch.setenv("PATH", cluster.env["PATH"])
    monkeypatch.setenv("SLURM_JOB_ID", allocation)
    found = await SlurmBackend.find("")
    assert [(host.id, host.options, host.kind) for host in found] == [
        ("rx1", {"component": 0}, 0),
        ("rx2", {"component": 0}, 0),
        ("rx3", {"component": 1}, 1),
    ]


@pytest.mark.asyncio
async def test_a_controller_that_dies_is_not_missed_by_kept_steps_and_new_ones_wait_for_it(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1,rx2")
    backend = await opened({"rx1": {}, "rx2": {}}, allocation=allocation)
    await backend.observe("rx1")
    cluster.kill("slurmctld", signal.SIGTERM)  # it saves first: one that is killed may forget the allocation
    try:
        await backend.observe("rx1")
        said = await lost(backend, "rx2")
        assert "the Slurm controller" in said
        assert "is over" not in said, "that is no end of the allocation"
        with pytest.raises(ContactLost):
            await backend.ends_at("rx1")
        await backend.observe("rx1")
    finally:
        cluster.start_controller()
    await seen(backend, "rx2")
    await backend.close()


@pytest.mark.asyncio
async def test_a_job_outlives_a_daemon_that_is_killed_with_its_sruns_and_the_kept_step_does_not(
    allocate, opened, tmp_path
):
    allocation = allocate("--nodelist=rx1")
    backend = await opened({"rx1": {}}, allocation=allocation, starts_processes=True, silent_s=20.0)
    beats = "i=0; while :; do i=$((i+1)); echo $i; sleep 0.2; done"
    started = await backend.start("rx1", order("l1", "sh", "-c", beats))
    kept = int((await backend.run("rx1", ("sh", "-c", "echo $PPID"))).stdout)
    line = backend._lines["rx1"]
    sruns = [line._process.pid, *(one.pid for one in backend._steps._sruns)]
    for pid in (*children_of(sruns), *sruns):  # the child of an srun would cancel its step
        with contextlib.suppress(ProcessLookupError):  # it has ended with its child
            os.kill(pid, signal.SIGKILL)
    # As a daemon that is gone: it says nothing to its step any more, and does not close its input either.
    for task in (line._listening, line._beating):
        task.cancel()
    await eventually("the step that hears nothing ends itself", lambda: not Path(f"/proc/{kept}").exists())
    again = await opened({"rx1": {}}, allocation=allocation, starts_processes=True)
    assert await again.alive("rx1", "l1")
    assert await again.start("rx1", order("l1", "sh", "-c", beats)) == started
    before = (await again.output("rx1", "l1", 0, 10_000_000)).next
    while (await again.output("rx1", "l1", before, 100)).data == b"":
        await asyncio.sleep(0.1)
    assert await again.stop("rx1", "l1")
    await again.close()
    await backend.close()


@pytest.mark.asyncio
async def test_a_command_continues_when_its_daemon_has_been_killed_and_its_srun_has_not(allocate, opened, tmp_path):
    backend = await opened({"rx1": {}}, allocation=allocate("--nodelist=rx1"))
    script = 'touch "$0/begun"; until [ -e "$0/go" ]; do sleep 0.02; done; touch "$0/done"'
    running = asyncio.create_task(backend.run("rx1", ("sh", "-c", script, str(tmp_path)), timeout_s=PATIENCE_S))
    await eventually("it has begun", (tmp_path / "begun").exists)
    backend._lines["rx1"]._process.stdin.close()
    await asyncio.sleep(0.3)  # by then the step most likely has noticed; noticed later, it is the same
    (tmp_path / "go").touch()
    await eventually("it has come to its end", (tmp_path / "done").exists)
    with pytest.raises(ContactLost):
        await running
    await backend.close()


@pytest.mark.asyncio
async def test_an_allocation_that_is_over_is_said_and_hangs_nothing(cluster, allocate, opened, tmp_path):
    allocation, mark = allocate("--nodelist=rx1"), tmp_path / "mark"
    backend = await opened({"rx1": {}}, allocation=allocation)
    command = asyncio.create_task(backend.run("rx1", ("sh", "-c", f"echo > {mark}; sleep 600"), timeout_s=600))
    await eventually("the command runs", mark.exists)
    cluster.command("scancel", allocation)
    with contextlib.suppress(ContactLost):  # Slurm ends what the step runs, then the step, which may still tell of it
        assert (await command).exit_code != 0
    await lost(backend, says="is over")
    for _ in range(3):
        said = await lost(backend)
        assert f"allocation {allocation} is over" in said
        assert "job" not in said.replace("job id", ""), "a job is something else here"
    await backend.close()


@pytest.mark.asyncio
async def test_the_end_of_an_allocation_is_asked_for_and_may_be_put_off(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1", "--time=30")
    backend = await opened({"rx1": {}}, allocation=allocation, drain_before_s=120.0)

    def squeue():
        return float(
            subprocess.run(
                ("squeue", "-h", "-j", allocation, "-o", "%e"),
                env={**cluster.env, "SLURM_TIME_FORMAT": "%s"},
                capture_output=True,
                check=True,
            ).stdout
        )

    end = await backend.ends_at("rx1")
    assert (end.at, end.drain_before_s, end.what) == (squeue(), 120.0, f"allocation {allocation}")
    assert [found.level for found in await backend.check("rx1") if found.what == "allocation"] == ["good"]
    cluster.command("scontrol", "update", f"JobId={allocation}", "TimeLimit=60")
    assert (await backend.ends_at("rx1")).at == squeue() == end.at + 1_800
    cluster.command("scontrol", "update", f"JobId={allocation}", "TimeLimit=UNLIMITED")
    assert (await backend.ends_at("rx1")) is None or (await backend.ends_at("rx1")).at > end.at + 86_400
    await backend.close()


@pytest.mark.asyncio
async def test_a_node_that_failed_is_gone_for_its_allocation_and_the_others_are_not(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1,rx2", "--no-kill")
    backend = await opened({"rx1": {}, "rx2": {}}, allocation=allocation)
    await backend.observe("rx2")
    cluster.command("scontrol", "update", "NodeName=rx2", "State=DOWN", "Reason=test")
    try:
        await lost(backend, "rx2", "does not come back to its allocation")
        await backend.observe("rx1")
    finally:
        with contextlib.suppress(RuntimeError):  # it has come back by itself
            cluster.command("scontrol", "update", "NodeName=rx2", "State=RESUME")
    assert "does not come back to its allocation" in await lost(backend, "rx2")
    await backend.close()


@pytest.mark.asyncio
async def test_a_slurmd_that_dies_takes_its_node_away_for_good_and_no_other(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1,rx2", "--no-kill")
    backend = await opened({"rx1": {}, "rx2": {}}, allocation=allocation)
    for host in ("rx1", "rx2"):
        await backend.observe(host)
    try:
        with cluster.site(SlurmdTimeout="5"):
            cluster.kill("rx2")
            await lost(backend, "rx2", "does not come back to its allocation")
        await backend.observe("rx1")
    finally:
        cluster.start_node("rx2")
    assert "does not come back to its allocation" in await lost(backend, "rx2")
    await backend.close()


@pytest.mark.asyncio
async def test_without_no_kill_a_node_that_fails_ends_the_allocation(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1,rx2")
    backend = await opened({"rx1": {}, "rx2": {}}, allocation=allocation)
    await backend.observe("rx1")
    cluster.command("scontrol", "update", "NodeName=rx2", "State=DOWN", "Reason=test")
    try:
        for host in ("rx1", "rx2"):
            await lost(backend, host, f"allocation {allocation} is over: its state is NODE_FAIL")
    finally:
        with contextlib.suppress(RuntimeError):  # it has come back by itself
            cluster.command("scontrol", "update", "NodeName=rx2", "State=RESUME")
    await backend.close()


@pytest.mark.asyncio
async def test_a_limit_of_steps_is_not_used_up_by_looks_and_where_it_is_reached_it_is_said(cluster, allocate, opened):
    allocation = allocate("--nodelist=rx1")
    with cluster.site(MaxStepCount="3"):
        backend = await opened({"rx1": {}}, allocation=allocation, starts_processes=True)
        for _ in range(5):
            await backend.observe("rx1")
            await backend.run("rx1", ("true",))
        for number in (1, 2):
            await backend.start("rx1", order(f"l{number}", "sleep", "600", job=f"j{number}"))
        with pytest.raises(ContactLost, match=r"as many steps as the site allows \(MaxStepCount\)"):
            await backend.start("rx1", order("l3", "sleep", "600", job="j3"))
        assert [await backend.alive("rx1", f"l{number}") for number in (1, 2, 3)] == [True, True, False]
        await backend.close()
        assert "(MaxStepCount)" in await lost(await opened({"rx1": {}}, allocation=allocation))


WAITS_FOR_A_SIGNAL = """\
import pathlib, signal, sys, time
def told(number, frame):
    pathlib.Path(sys.argv[1]).write_text(signal.Signals(number).name)
signal.signal(signal.SIGUSR1, told)
pathlib.Path(sys.argv[1]).write_text("up")
while True:
    time.sleep(1)
"""


@pytest.mark.asyncio
async def test_a_signal_before_the_end_reaches_the_job_and_ends_neither_its_step_nor_the_kept_one(
    cluster, allocate, opened, tmp_path
):
    allocation, said = allocate("--nodelist=rx1"), tmp_path / "said"
    backend = await opened({"rx1": {}}, allocation=allocation, starts_processes=True)
    argv = (sys.executable, "-c", WAITS_FOR_A_SIGNAL, str(said))
    await backend.start("rx1", order("l1", *argv))
    await eventually("the job runs", lambda: said.exists() and said.read_text() == "up")
    kept = (await backend.run("rx1", ("sh", "-c", "echo $PPID"))).stdout
    cluster.command("scancel", "--signal=USR1", allocation)  # what --signal=USR1@60 sends, to all steps
    await eventually("the job has heard it", lambda: said.read_text() == "SIGUSR1")
    assert await backend.alive("rx1", "l1")
    assert (await backend.run("rx1", ("sh", "-c", "echo $PPID"))).stdout == kept
    assert all(one.poll() is None for one in backend._steps._sruns), "the job's step is there"
    await backend.close()


#: ignores SIGTERM, in a session of its own, under a parent that does not
LEAVES_ITS_SESSION = "(trap '' TERM; exec setsid sleep 86399) & sleep 86399"


@pytest.mark.parametrize("epilog", [False, True])
@pytest.mark.asyncio
async def test_what_outlives_its_allocation_is_found_and_stopped_from_the_next_unless_an_epilog_has_killed_it(
    cluster, allocate, opened, tmp_path, epilog
):
    script = tmp_path / "epilog"
    script.write_text(
        "#!/bin/sh\n"
        f"for its in $(grep -lszx 'LEFT_BY={tmp_path}' /proc/[0-9]*/environ); do\n"
        '  kill -9 "$(basename "$(dirname "$its")")"\n'
        "done\nexit 0\n"
    )
    script.chmod(0o755)
    with cluster.site(**({"Epilog": str(script)} if epilog else {})):
        allocation = allocate("--nodelist=rx1")
        backend = await opened({"rx1": {}}, allocation=allocation, starts_processes=True)
        await backend.start("rx1", order("l1", "sh", "-c", LEAVES_ITS_SESSION, env={"LEFT_BY": str(tmp_path)}))
        cluster.release(allocation)
        await lost(backend, says="is over")
        await backend.close()
    again = await opened({"rx1": {}}, allocation=allocate("--nodelist=rx1"), starts_processes=True)
    assert await again.alive("rx1", "l1") is not epilog
    assert await again.stop("rx1", "l1") is not epilog
    assert not await again.alive("rx1", "l1")
    await again.close()


@pytest.mark.asyncio
async def test_a_users_step_that_holds_everything_is_in_nobodys_way(cluster, allocate, opened, tmp_path):
    allocation, mark = allocate("--nodelist=rx1"), tmp_path / "mark"
    user = subprocess.Popen(
        ("srun", f"--jobid={allocation}", "--ntasks=1", "--gres=gpu:2", "sh", "-c", f"echo > {mark}; sleep 600"),
        env=cluster.env,
        stdin=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        await eventually("the user's step runs", mark.exists)
        backend = await opened({"rx1": {}}, allocation=allocation)
        await backend.observe("rx1")
        findings = {found.what: found for found in await backend.check("rx1")}
        assert findings["step"].level == "good"
        assert findings["tracking"].level == "warning"
        await backend.close()
    finally:
        user.kill()
        user.wait()


CONFIG = """\
[daemon]
listen = ""
state_dir = "{folder}/state"
socket = "{folder}/rollmux.sock"

[limits]
observe_s = 1

[backends.slurm]
conf = "{conf}"
python = "{python}"
connect_s = 600
silent_s = 600
drain_before_s = {drain_before_s}

[[hosts]]
id = "rx1"
backend = "slurm"
ram_gb = 16
options = {{component = 0, made_up_gpus = "{folder}/rx1.json"}}

[[hosts.nodes]]
gpus = [0, 1]
pools = ["rollout"]

[[hosts]]
id = "rx3"
backend = "slurm"
ram_gb = 16
options = {{component = 1, made_up_gpus = "{folder}/rx3.json"}}

[[hosts.nodes]]
gpus = [0, 1]
pools = ["train"]
"""


class InBatchStep:
    """A daemon that runs in the batch step of a heterogeneous allocation, by a script of its own or the how-to's."""

    def __init__(self, cluster, folder, script, *first):
        self.cluster, self.folder = cluster, folder
        self.url = f"unix://{folder}/rollmux.sock"
        for node in cluster.nodes:
            gpus = [{"uuid": f"GPU-{node}-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in (0, 1)]
            (folder / f"{node}.json").write_text(json.dumps({"gpus": gpus}))
        (folder / "batch.sh").write_text(script)
        self.allocation = self._sbatch(*first, str(folder / "batch.sh"))

    def _sbatch(self, *argv):
        ran = subprocess.run(
            ("sbatch", "--parsable", "--output=log", "--open-mode=append", *argv),
            cwd=self.folder,
            env=with_path(self),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
        )
        return ran.stdout.strip()

    def says(self, *words):
        """What a command answers; None while there is no daemon yet."""
        ran = forked.run(
            [sys.executable, "-m", "rollmuxd", *words, "--json"],
            env={**os.environ, "ROLLMUX_URL": self.url},
            capture_output=True,
            check=False,
        )
        return json.loads(ran.stdout) if ran.returncode == 0 else None

    def nodes(self):
        """Each node's status, once the daemon answers."""
        found = self.says("node", "list")
        return {} if found is None else {node["node"]: node["status"] for node in found["items"]}

    def state(self):
        """What Slurm says of it; of its first component."""
        said = self.cluster.command("squeue", "--noheader", "--states=all", f"--jobs={self.allocation}", "--format=%T")
        return said.split()[0]

    def update(self, setting):
        """Of both components; the last one may have come too late, since the other one has had its effect on both."""
        for component in (1, 0):
            number = str(int(self.allocation) + component)
            with contextlib.suppress(RuntimeError):
                self.cluster.command("scontrol", "update", f"JobId={number}", setting)

    def log(self):
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""


def with_path(daemon):
    """An environment with this Python, and the programs in a test's own folder."""
    path = (f"{daemon.folder}/bin", os.path.dirname(sys.executable), daemon.cluster.env["PATH"])
    return {**daemon.cluster.env, "PATH": ":".join(path)}


@pytest.fixture
def unhurried(cluster):
    """A cluster that kills what it ends only after a time that a busy machine needs as well."""
    with cluster.site(KillWait=f"{PATIENCE_S:g}"):
        yield cluster


@pytest.fixture
def in_batch_step(unhurried, tmp_path):
    """A function that starts a daemon with its configuration, on rx1 and rx3."""
    started = []

    def start(*options, drain_before_s=0):
        names = {"folder": tmp_path, "conf": unhurried.config, "python": sys.executable}
        (tmp_path / "rollmux.toml").write_text(CONFIG.format(**names, drain_before_s=drain_before_s))
        script = f"#!/bin/sh\nexec {sys.executable} -m rollmuxd daemon run --config {tmp_path}/rollmux.toml\n"
        one, other = (("--exclusive", "--gres=gpu:2", f"--nodelist={node}", "--time=30") for node in ("rx1", "rx3"))
        started.append(InBatchStep(unhurried, tmp_path, script, *options, *one, ":", *other))
        return started[-1]

    yield start
    unhurried.release(*(one.allocation for one in started))


def journal_is_whole(folder):
    ran = forked.run(
        [sys.executable, "-m", "rollmuxd", "journal", "check", str(folder)], capture_output=True, check=False
    )
    return ran.returncode == 0, ran.stdout + ran.stderr


def test_a_daemon_in_the_batch_step_finds_its_allocation_and_stops_in_good_order_with_it(in_batch_step, tmp_path):
    daemon = in_batch_step()
    until("both components are up", lambda: set(daemon.nodes().values()) == {"up"})
    assert sorted(daemon.nodes()) == ["rx1/gpu0-1", "rx3/gpu0-1"]
    assert daemon.says("host", "show", "rx3")["reachable"]
    until("the core has heard when it ends", lambda: daemon.says("host", "show", "rx3")["ends_at"] is not None)
    daemon.cluster.release(daemon.allocation)
    assert "stopping" in daemon.log()
    assert journal_is_whole(tmp_path / "state") == (True, ANY)


def test_a_signal_before_the_end_leaves_a_daemon_as_it_is_and_at_the_end_it_stops_in_good_order(
    in_batch_step, tmp_path
):
    daemon = in_batch_step("--signal=B:USR1@60")
    until("both components are up", lambda: set(daemon.nodes().values()) == {"up"})
    daemon.cluster.command("scancel", "--batch", "--signal=USR1", daemon.allocation)
    until("it has heard it", lambda: "signal=SIGUSR1" in daemon.log())
    assert set(daemon.nodes().values()) == {"up"}
    daemon.update("EndTime=now+1")  # Slurm looks at limits twice a minute
    until("its time is over", lambda: daemon.state() == "TIMEOUT", every=1.0)
    assert "stopping" in daemon.log()
    assert journal_is_whole(tmp_path / "state") == (True, ANY)


def test_shortly_before_the_end_nothing_new_begins_and_it_says_why(in_batch_step):
    daemon = in_batch_step(drain_before_s=80_000)
    until("both are drained", lambda: set(daemon.nodes().values()) == {"drained"})
    shown = daemon.says("node", "show", "rx1/gpu0-1")
    assert f"the end of allocation {daemon.allocation} at " in shown["reason"]


#: ``rollmuxd`` on nodes whose GPUs are made up in files, and on a machine that may be busy
ROLLMUXD = """\
#!{python}
from msgspec.structs import replace
from rollmuxd.cli.main import main
from rollmuxd.daemon import init_config
from rollmuxd_backend_local import asking
from rollmuxd_backend_slurm import SlurmBackend

asking.LOOK_S = init_config.LOOK_S = 600
opens = SlurmBackend.open.__func__

async def open_(cls, hosts, options):
    made_up = [
        replace(host, options={{"made_up_gpus": f"{folder}/{{host.id}}.json", **host.options}}) for host in hosts
    ]
    return await opens(cls, made_up, {{"connect_s": 600, "silent_s": 600, **options}})

SlurmBackend.open = classmethod(open_)
main()
"""


def how_to():
    """The blocks of the how-to, to be typed."""
    page = (Path(__file__).parents[3] / "docs" / "how-to" / "slurm.md").read_text()
    return [block.removeprefix("toml").strip("\n") + "\n" for block in page.split("```")[1::2]]


@pytest.fixture
def as_typed(tmp_path):
    """A function that fits what the how-to types to this cluster; and ``rollmuxd`` is on the PATH."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "rollmuxd"
    program.write_text(ROLLMUXD.format(python=sys.executable, folder=tmp_path))
    program.chmod(0o755)

    def fit(block, **here):
        for word, ours in here.items():
            assert word in block, block
            block = block.replace(word, ours)
        return block

    return fit


def test_the_recipe_of_the_how_to_runs_as_it_is_typed_and_again_on_other_nodes_when_it_was_preempted(
    unhurried, as_typed, tmp_path
):
    script, joins, roles, runs, *_ = how_to()
    sizes = {"--nodes=4": "--nodes=1", "--nodes=2": "--nodes=1", "gpu:8": "gpu:2", "/scratch/rollmux": str(tmp_path)}
    script = as_typed(script, **sizes)
    assert script.startswith("#!/bin/bash\n")
    daemon = InBatchStep(unhurried, tmp_path, script)
    try:
        until("both components are up", lambda: list(daemon.nodes().values()) == ["up"] * 2)
        assert sorted(daemon.nodes()) == ["rx1/gpu0-1", "rx2/gpu0-1"]
        here = {"4711": daemon.allocation, "/scratch/rollmux": str(tmp_path)}
        hello = Path(__file__).parents[3] / "examples" / "hello.py"
        joined = subprocess.run(
            ["bash", "-c", as_typed(joins, **here, **{"train.py": str(hello)})],
            env=with_path(daemon),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        assert joined.returncode == 0, joined.stderr
        assert b"step 9: centre" in joined.stdout
        (job,) = daemon.says("job", "list", "--all")["items"]
        assert (job["name"], job["status"]) == ("hello", "ended")

        for role, command in (("serve", "sleep 86399"), ("train", "sleep 1")):
            program = tmp_path / role
            program.write_text(f"#!/bin/sh\necho {role} $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES\n{command}\n")
            program.chmod(0o755)
        here = {"4711": daemon.allocation, "rx5": "rx2", "gpu0-7": "gpu0-1"}
        (tmp_path / "job.toml").write_text(as_typed(roles, **here))
        ran = subprocess.run(
            ["bash", "-c", runs],
            cwd=tmp_path,
            env={**with_path(daemon), "ROLLMUX_URL": daemon.url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert sorted(ran.stdout.splitlines()) == ["serve rx1 0,1", "train rx2 0,1"]
        listed = ("squeue", "--steps", "--noheader", "--format=%j")
        until("the server's step has ended with the job", lambda: "serve" not in unhurried.command(*listed), every=0.5)

        urgent = unhurried.allocate("--partition=urgent", "--exclusive", "--nodelist=rx1")
        try:
            until("it waits for nodes again", lambda: daemon.state() == "PENDING", every=0.5)
            assert "stopping" in daemon.log()
            daemon.update("StartTime=now")  # else it waits for two minutes
            until("it is there again", lambda: list(daemon.nodes().values()) == ["up"] * 2)
            assert sorted(daemon.nodes()) == ["rx2/gpu0-1", "rx3/gpu0-1"]
            jobs = daemon.says("job", "list", "--all")["items"]
            assert {job["name"] for job in jobs} == {"hello", "math-7b"}, "the state directory is the same"
        finally:
            unhurried.release(urgent, daemon.allocation)
    finally:
        unhurried.release(daemon.allocation)
    assert journal_is_whole(tmp_path) == (True, ANY)
