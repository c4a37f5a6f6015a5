"""``rollmuxd run``: commands on the GPUs of a job's place, by a real daemon; and ``rollmuxd job logs``."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import forked
import pytest
from click.testing import CliRunner
from patience import PATIENCE_S

from rollmuxd.cli.main import cli
from rollmuxd.cli.run import job_file

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

JOB = """
name = "math"
rollout = {nodes = 1}
train = {nodes = 1}
"""

#: a training loop: iterations as many as it is told, and then its exit status
LOOP = """
import os, sys, json, time, rollmuxd
shown = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "ROLLMUX_GPUS")
print(json.dumps({name: os.environ.get(name) for name in shown}))
with rollmuxd.job("math") as job:
    for step in range(int(sys.argv[1])):
        with job.phase("rollout"):
            pass
        with job.phase("train"):
            pass
        print("step", step, flush=True)
sys.exit(int(sys.argv[2]))
"""

#: a server, with a worker that has left its group and its session
SERVER = """
import os, subprocess, sys, time
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
open("pids", "w").write(f"{os.getpid()} {worker.pid}")
time.sleep(600)
"""

#: takes its time over a signal, and tells it
POLITE = """
import signal, sys, time
def told(number, _):
    print("told", number, flush=True)
    sys.exit(7)
signal.signal(signal.SIGTERM, told)
signal.signal(signal.SIGINT, told)
open("ready", "w").close()
time.sleep(600)
"""

#: leaves two behind: the head of a Ray, and one of those that talk to it
RAY = """
import os, subprocess, sys, time
waits = "import os, signal, sys, time; signal.signal(signal.SIGTERM, told); open(sys.argv[1], 'w'); time.sleep(600)"
head = "def told(*_): open('then', 'w').write(str(os.path.exists('other is over'))); os._exit(0)\\n" + waits
other = "def told(*_): time.sleep(0.5); open('other is over', 'w'); os._exit(0)\\n" + waits
os.symlink(os.path.realpath(sys.executable), "gcs_server")
for program, text in (("./gcs_server", head), (sys.executable, other)):
    subprocess.Popen([program, "-I", "-S", "-c", text, "here-" + os.path.basename(program)])
while not all(os.path.exists("here-" + os.path.basename(one)) for one in ("gcs_server", sys.executable)):
    time.sleep(0.02)
"""


class Runs:
    """``rollmuxd run`` in a folder, as a user types it."""

    def __init__(self, live, folder):
        self.live, self.folder, self.started = live, folder, []
        self.write("job.toml", JOB)
        for name, text in (("loop.py", LOOP), ("server.py", SERVER), ("polite.py", POLITE)):
            self.write(name, text)

    def write(self, name, text):
        (self.folder / name).write_text(text)

    def env(self):
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
        return {**plain, "ROLLMUX_URL": self.live.daemons[-1].url, "HOME": str(self.folder), "PYTHONUNBUFFERED": "1"}

    def start(self, *arguments):
        process = forked.Popen(
            [sys.executable, "-m", "rollmuxd", *arguments],
            cwd=self.folder, env=self.env(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        self.started.append(process)
        return process

    def run(self, *command, options=()):
        return self.start("run", "--job", "job.toml", *options, "--", *command)

    def loop(self, steps, status=0, options=()):
        return self.run(sys.executable, "loop.py", str(steps), str(status), options=options)

    def end(self):
        for process in self.started:
            while process.poll() is None:  # the third time it kills what it has started
                process.terminate()
                time.sleep(0.2)
            process.communicate()


@pytest.fixture
def runs(live, tmp_path):
    made = Runs(live, tmp_path)
    yield made
    made.end()


def test_a_command_is_one_run_on_its_gpus_and_its_exit_status_is_ours(live, runs):
    daemon = live.daemon()
    process = runs.loop(2, 3)

    out, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 3, err
    assert json.loads(out.splitlines()[0]) == {
        "CUDA_VISIBLE_DEVICES": "0,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID", "ROLLMUX_GPUS": "mock/gpu0,mock/gpu1",
    }  # fmt: skip
    assert out.splitlines()[-1] == "step 1"
    job = daemon.job("math")
    assert (job["run"], job["iterations"], job["status"]) == (1, 2, "ended")


def test_a_command_that_knows_nothing_of_rollmuxd_has_its_place_until_it_ends(live, runs):
    daemon = live.daemon()
    process = runs.run(sys.executable, "polite.py")
    live.until("it runs", (runs.folder / "ready").exists)
    began = daemon.facts("session_opened")[0]["at"]

    # Longer than a lease: the session is kept by rollmuxd run.
    live.until(
        "two leases went by", lambda: daemon.get("/v1/me")["now"] and _later(daemon, began + 2_000 * live.lease_s)
    )
    assert daemon.job("math")["status"] in ("probing", "admitted")
    process.send_signal(signal.SIGTERM)

    out, err = process.communicate(timeout=PATIENCE_S)
    assert (process.returncode, out) == (7, "told 15\n"), err
    job = daemon.job("math")
    assert (job["status"], job["reason"]) == ("ended", "main ended with exit status 7")


def _later(daemon, at):
    from datetime import datetime

    return datetime.fromisoformat(daemon.get("/v1/me")["now"]).timestamp() * 1000 > at


def test_roles_see_the_gpus_of_their_pools_and_end_together_with_all_that_they_started(live, runs):
    daemon = live.daemon()
    runs.write(
        "job.toml",
        JOB
        + f'[roles.server]\ncommand = ["{sys.executable}", "server.py"]\npool = "rollout"\n'
        + f'[roles.trainer]\ncommand = "{sys.executable} loop.py 1 0"\npool = "train"\n',
    )

    process = runs.start("run", "--job", "job.toml")
    out, err = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 0, err
    assert json.loads(out.splitlines()[0])["ROLLMUX_GPUS"] == "mock/gpu1"
    assert "on mock/gpu0" in err
    assert "trainer ended with exit status 0; the others are ended" in err
    pids = [int(pid) for pid in (runs.folder / "pids").read_text().split()]
    assert [pid for pid in pids if live.lives(pid)] == []
    assert daemon.job("math")["status"] == "ended"


def test_the_head_of_a_ray_is_asked_to_end_when_nothing_is_left_that_talks_to_it(live, runs):
    """Else it would not end by itself, and the job have its place for as long as the grace is."""
    live.daemon()
    runs.write("ray.py", RAY)
    process = runs.run(sys.executable, "ray.py", options=("--grace", str(PATIENCE_S)))
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert (runs.folder / "then").read_text() == "True"


def test_who_waits_for_a_place_is_told_why_and_leaves_nothing_behind_when_interrupted(live, runs):
    daemon = live.daemon((("0", "rollout"),))
    runs.write("job.toml", 'name = "math"\nslo = 1.0\nrollout = {nodes = 1, seconds = 10}\n')
    other = live.trainer("other", train=None, phases=["rollout"], slo=1.0, rollout={"seconds": 10})
    other.do("start")
    process = runs.loop(1)
    said = process.stderr.readline()
    assert "waits for a place" in said
    assert daemon.job("math")["status"] == "waiting"

    process.send_signal(signal.SIGINT)

    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert daemon.job("math")["status"] == "ended"
    other.do("end")


def test_killing_the_daemon_stops_no_command(live, runs):
    daemon = live.daemon()
    process = runs.loop(60)
    live.until("it has begun", lambda: daemon.jobs().get("math", {}).get("iterations", 0) > 1)

    daemon.kill9()
    daemon.restart()

    out, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, err
    assert [line for line in out.splitlines() if line.startswith("step")] == [f"step {n}" for n in range(60)]
    assert (daemon.job("math")["run"], daemon.job("math")["status"]) == (1, "ended")


def test_a_job_that_is_ended_by_somebody_ends_its_commands(live, runs):
    daemon = live.daemon()
    process = runs.run(sys.executable, "server.py", options=("--grace", "0.5"))
    live.until("it runs", (runs.folder / "pids").exists)

    assert daemon.call("DELETE", "/v1/jobs/math", {"reason": "no more money"}).status_code == 200

    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "run 1 was ended" in err
    assert "no more money" in err
    pids = [int(pid) for pid in (runs.folder / "pids").read_text().split()]
    assert [pid for pid in pids if live.lives(pid)] == []


def test_a_detached_job_goes_on_by_itself_and_its_logs_can_be_followed(live, runs):
    daemon = live.daemon()
    told = runs.loop(3, options=("--detach",))
    out, err = told.communicate(timeout=PATIENCE_S)
    assert told.returncode == 0, err
    assert out.splitlines()[-1] == "rollmuxd job logs -f math"

    logs = runs.start("job", "logs", "-f", "math", "--role", "main")
    out, err = logs.communicate(timeout=PATIENCE_S)

    assert logs.returncode == 0, err
    assert out.splitlines()[1:] == ["step 0", "step 1", "step 2"]
    assert (daemon.job("math")["run"], daemon.job("math")["status"]) == (1, "ended")
    everything = runs.start("job", "logs", "math").communicate(timeout=PATIENCE_S)[0].splitlines()
    assert "main | step 2" in everything
    assert any(line.startswith("run | rollmuxd: main: pid ") for line in everything)


@pytest.mark.parametrize(
    ("file", "said"),
    [
        ("rollout = {nodes = 1}", "there is no name in it"),
        (JOB + '[roles.server]\ncommand = "x"\n', "says what to run (roles), and so does the command line"),
        (JOB + "machine = 2\n", "machine=2"),
        (JOB + "slow = 2\n", "did you mean slo?"),
        (
            'name = "math"\ngpu_gb = 60\n',
            "'gpu_gb' is not a key here; pools are tables, such as train = {gpu_gb = ...}",
        ),
        (
            'name = "math"\nreplace = true\n',
            "'replace' is not a key here; pools are tables, such as train = {nodes = 1}",
        ),
        ('name = "math"\npools = {train = {nodes = 1}}\n', "'pools' is not a key here"),
        ('name = "math"\nrollout = {nods = 1}\n', "did you mean nodes?"),
        ("name = ", "Invalid value"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_name_before_anybody_is_called(tmp_path, file, said):
    path = tmp_path / "job.toml"
    path.write_text(file)
    refused = CliRunner().invoke(cli, ["run", "--job", str(path), "--url", "http://127.0.0.1:1", "--", "train.sh"])
    assert refused.exit_code == 1
    assert refused.stderr.startswith(f"rollmuxd: {path}")
    assert said in refused.stderr


def test_a_file_with_nothing_but_a_name_wants_what_a_loop_wants_that_says_no_more(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "math"')
    body = job_file.read(path, ["train.sh"]).registration("key")
    assert {pool: want.nodes for pool, want in body.wants.items()} == {"rollout": 1, "train": 1}
    assert [phase.name for phase in body.phases] == ["rollout", "train"]


def test_a_program_that_is_not_there_is_named_and_the_job_ended(live, runs):
    daemon = live.daemon()
    process = runs.run("/no/such/program")
    _, err = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    assert "/no/such/program could not be started" in err
    assert daemon.job("math")["status"] == "ended"
    assert not list(Path(runs.folder).glob("pids"))
