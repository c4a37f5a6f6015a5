"""``[ray]`` of a job's file: what is started for it. In Ray's place is a program that writes down how it was called."""

import re

import pytest

from rollmuxd.cli.common import Failed
from rollmuxd.cli.run import job_file
from rollmuxd.cli.run.private_ray import RayTable, own_ray

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
        env = {"PATH": "/usr/bin:/bin", "RAY_ADDRESS": "the-users:1", "ROLLMUX_API_KEY": "rmx_secret"}
        with own_ray(table, gpus, env, out, self._beat) as told:
            return told

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


def test_where_the_daemon_only_watches_ray_finds_its_gpus_itself(ray):
    ray.start(ray.table(), gpus=None)
    assert not [one for one in ray.argv if one.startswith("--num-gpus")]


def test_a_ray_that_does_not_start_says_why(ray, tmp_path):
    with (tmp_path / "out").open("wb") as out, pytest.raises(Failed, match=r"exit status 3: .*GCS is overloaded"):
        ray.start(ray.table("echo the GCS is overloaded >&2; exit 3"), out=out)
    assert "GCS is overloaded" in (tmp_path / "out").read_text()
    with pytest.raises(Failed, match=r"/no/such/ray could not be started.*name it"):
        ray.start(RayTable("/no/such/ray"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ray = true", "it is a table with the keys program, arguments"),
        ("[ray]\naddress = '10.0.0.1:1'", "unknown field `address`.* the keys program, arguments"),
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
