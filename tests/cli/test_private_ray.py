"""``[ray]`` of a job's file: what is started for it. In Ray's place is a program that writes down how it was called."""

import fcntl
import json
import os
import re
import threading

import pytest

from rollmuxd.cli.common import Failed
from rollmuxd.cli.run import job_file, private_ray
from rollmuxd.cli.run.private_ray import OwnRay, RayTable

#: says how it was called; what it is told to do besides comes before
RAY = """#!/bin/sh
printf '%s\\n' "$@" > {folder}/argv; env > {folder}/env
{does}
for one in "$@"; do case "$one" in
    --temp-dir=*) printf 10.0.0.9:4321 > "${{one#--temp-dir=}}/ray_current_cluster" ;;
esac; done
"""


class Ray:
    """That program."""

    def __init__(self, folder):
        self.folder, self.path = folder, folder / "ray"
        self.beats = 0

    def table(self, does="", **more):
        self.path.write_text(RAY.format(folder=self.folder, does=does))
        self.path.chmod(0o755)
        return RayTable(str(self.path), **more)

    def start(self, table, gpus=("box/gpu2", "box/gpu3"), out=None):
        with OwnRay(table, "math-7b") as own:
            env = {"PATH": "/usr/bin:/bin", "RAY_ADDRESS": "the-users:1", "ROLLMUX_API_KEY": "rmx_secret"}
            return own.start(gpus, env, out, self._beat)

    def _beat(self):
        self.beats += 1

    @property
    def argv(self):
        return (self.folder / "argv").read_text().splitlines()


@pytest.fixture
def ray(tmp_path):
    return Ray(tmp_path)


def test_a_ray_of_its_own_has_the_jobs_gpus_and_no_port_or_folder_that_another_could_have(ray):
    told = [ray.start(ray.table()), ray.argv]
    again = [ray.start(ray.table()), ray.argv]

    for found, argv in (told, again):
        assert argv[:1] == ["start"]
        assert {"--head", "--port=0", "--num-gpus=2", "--min-worker-port=0", "--max-worker-port=0"} < set(argv)
        assert found["RAY_ADDRESS"] == "10.0.0.9:4321"
        dashboard = next(one for one in argv if one.startswith("--dashboard-port=")).partition("=")[2]
        assert found["RAY_API_SERVER_ADDRESS"] == f"http://127.0.0.1:{dashboard}"
        assert f"--temp-dir={found['RAY_TMPDIR']}" in argv
        assert len(found["RAY_TMPDIR"]) < 30, "there is no room for the names of Ray's sockets"
    assert f"RAY_AUTH_TOKEN={again[0]['RAY_AUTH_TOKEN']}" in (ray.folder / "env").read_text().splitlines()
    assert told[0]["RAY_AUTH_TOKEN"] != again[0]["RAY_AUTH_TOKEN"], "one of them lets the other in"
    own = re.compile("--(temp-dir|dashboard-port|dashboard-agent-listen-port)=")
    assert not {one for one in told[1] if own.match(one)} & {one for one in again[1] if own.match(one)}


def test_the_ray_that_the_users_shell_is_in_is_not_the_jobs(ray):
    ray.start(ray.table())
    assert "RAY_ADDRESS" not in (ray.folder / "env").read_text()


def test_a_node_in_a_shared_ray_has_no_gpus_that_anybody_may_be_given(ray):
    told = ray.start(ray.table(address="10.0.0.1:6379", arguments=("--num-cpus=4",)))

    assert told == {"RAY_ADDRESS": "10.0.0.1:6379", "ROLLMUX_RAY_RESOURCE": "rollmuxd_gpu_math_7b"}
    assert {"--address=10.0.0.1:6379", "--num-gpus=0", "--num-cpus=4"} < set(ray.argv)
    resources = next(one for one in ray.argv if one.startswith("--resources=")).partition("=")[2]
    assert json.loads(resources) == {"rollmuxd_gpu_math_7b": 2}
    assert "--head" not in ray.argv


def test_a_key_is_for_the_jobs_own_ray_and_not_for_a_node_that_anybodys_tasks_may_run_on(ray):
    ray.start(ray.table())
    assert "rmx_secret" in (ray.folder / "env").read_text()
    ray.start(ray.table(address="10.0.0.1:6379"))
    assert "rmx_secret" not in (ray.folder / "env").read_text()


def test_where_the_daemon_only_watches_ray_finds_its_gpus_itself(ray):
    ray.start(ray.table(), gpus=None)
    assert not [one for one in ray.argv if one.startswith("--num-gpus")]
    with pytest.raises(Failed, match="leave address out"):
        ray.start(ray.table(address="10.0.0.1:6379"), gpus=None)


def test_two_nodes_on_one_machine_start_one_after_the_other_and_sessions_live_meanwhile(ray):
    table = ray.table(f"cd {ray.folder}; mkdir busy || touch both; sleep 0.3; rmdir busy", address="10.0.0.1:6379")
    runs = [threading.Thread(target=ray.start, args=(table,)) for _ in range(2)]
    for run in runs:
        run.start()
    for run in runs:
        run.join()
    assert not (ray.folder / "both").exists()
    assert ray.beats > 4


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of another user's")
def test_nobody_else_of_the_machine_can_hold_up_a_ray_by_its_lock(ray, tmp_path, monkeypatch):
    monkeypatch.setattr(private_ray, "_SHORT", str(tmp_path))
    theirs = tmp_path / ".rollmuxd-ray-0.lock"
    theirs.touch()
    os.chown(theirs, 65534, 65534)
    with theirs.open() as held, pytest.raises(Failed, match="belongs to another user of this machine; have it removed"):
        fcntl.flock(held, fcntl.LOCK_EX)
        ray.start(ray.table(address="10.0.0.1:6379"))


def test_a_ray_that_does_not_start_says_why(ray, tmp_path):
    with (tmp_path / "out").open("wb") as out, pytest.raises(Failed, match=r"exit status 3: .*GCS is overloaded"):
        ray.start(ray.table("echo the GCS is overloaded >&2; exit 3"), out=out)
    assert "GCS is overloaded" in (tmp_path / "out").read_text()
    with pytest.raises(Failed, match=r"/no/such/ray could not be started.*name it"):
        ray.start(RayTable("/no/such/ray"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ray = true", "it is a table with the keys program, address, arguments"),
        ("[ray]\nadress = '10.0.0.1:1'", "unknown field `adress`.* the keys program, address, arguments"),
        ("[ray]\naddress = 6379", r"Expected `str`, got `int` - at `\$.address`"),
        ("[ray]\nprogram = ''", r"length >= 1 - at `\$.program`"),
        ("[ray]\narguments = '--num-cpus=4'", r"Expected `array`, got `str` - at `\$.arguments`"),
    ],
)
def test_a_table_that_cannot_be_is_refused_by_file_and_key(tmp_path, text, said):
    path = tmp_path / "job.toml"
    path.write_text(f'name = "a"\n{text}\n')
    with pytest.raises(Failed, match=f"job.toml: .*{said}"):
        job_file.read(path, ("true",))


def test_a_job_with_a_ray_registers_nothing_of_it(tmp_path):
    path = tmp_path / "job.toml"
    path.write_text('name = "a"\n[ray]\narguments = ["--num-cpus=4"]\n')
    job = job_file.read(path, ("true",))
    assert job.ray == RayTable(arguments=("--num-cpus=4",))
    registered = job.registration("k")
    assert registered.name == "a"
    assert "ray" not in str(registered)
