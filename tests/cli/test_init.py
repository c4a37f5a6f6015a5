"""``rollmuxd init``: what it writes, a daemon can be started with; and nothing that is there is written over."""

import json
import tomllib

import pytest

from rollmuxd.daemon import init_config
from rollmuxd.daemon.settings import load_settings
from rollmuxd.spi import FoundHost, GpuInfo, discovery
from rollmuxd_backend_local import LocalBackend

H20 = {"name": "NVIDIA H20", "total_mb": 97_871}
H800 = {"name": "NVIDIA H800", "total_mb": 81_559}


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A function that says which GPUs this machine has."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(init_config, "this_host", lambda: "box")
    path = tmp_path / "gpus.json"

    class Made(LocalBackend):
        @classmethod
        async def open(cls, hosts, options):
            return await super().open(hosts, {**options, "made_up_gpus": str(path)})

    monkeypatch.setattr(discovery, "find", lambda kind, name: Made)

    def has(*gpus, **more):
        named = [{**gpu, "uuid": f"GPU-{number}"} for number, gpu in enumerate(gpus)]
        path.write_text(json.dumps({"gpus": named, **more}))

    return has


def written(tmp_path):
    """The nodes of the file, as the daemon's settings have them: GPUs and pools."""
    settings = load_settings(tmp_path / "rollmux.toml")
    return [(host.id, host.backend, [(node.gpus, node.pools) for node in host.nodes]) for host in settings.hosts]


def test_half_of_the_gpus_are_for_each_pool(rollmuxd, here, tmp_path):
    here(*[H20] * 8)
    ran = rollmuxd("init")

    assert (ran.code, ran.err) == (0, "")
    assert "box: 8 GPUs (NVIDIA H20)" in ran.out
    assert "rollmuxd doctor" in ran.out
    assert written(tmp_path) == [("box", "local", [((0, 1, 2, 3), ("rollout",)), ((4, 5, 6, 7), ("train",))])]


def test_shared_is_one_pool(rollmuxd, here, tmp_path):
    here(*[H20] * 8)
    assert rollmuxd("init --shared").code == 0
    assert written(tmp_path) == [("box", "local", [((0, 1, 2, 3, 4, 5, 6, 7), ("rollout", "train"))])]


def test_a_single_gpu_is_in_both_pools(rollmuxd, here, tmp_path):
    here(H20)
    assert rollmuxd("init").code == 0
    assert written(tmp_path) == [("box", "local", [((0,), ("rollout", "train"))])]


def test_gpus_of_different_types_are_in_nodes_of_their_own(rollmuxd, here, tmp_path):
    here(H20, H800, H20, H800)
    assert rollmuxd("init").code == 0
    assert written(tmp_path) == [("box", "local", [((0, 2), ("rollout",)), ((1, 3), ("train",))])]


def test_a_split_gpu_and_a_lost_one_are_left_out(rollmuxd, here, tmp_path):
    here(H20, {**H20, "mig": True}, {**H20, "errors": {"uuid": 15}}, H20)
    assert rollmuxd("init --shared").code == 0
    assert written(tmp_path) == [("box", "local", [((0, 3), ("rollout", "train"))])]


def test_what_is_there_is_not_written_over(rollmuxd, here, tmp_path):
    here(H20)
    (tmp_path / "rollmux.toml").write_text("# mine\n")
    ran = rollmuxd("init")
    assert ran.code == 1
    assert "is there already, and is not written over" in ran.err
    assert (tmp_path / "rollmux.toml").read_text() == "# mine\n"
    assert rollmuxd("init --output other.toml").code == 0


def test_without_a_gpu_it_says_so_and_writes_what_is_to_be_filled_in(rollmuxd, here, tmp_path):
    here(errors={"start": 12})
    ran = rollmuxd("init")
    assert ran.code == 0
    assert "box: no GPU was seen: there is no NVIDIA driver here" in ran.err
    assert "rollmuxd demo" in ran.out
    assert written(tmp_path) == []
    filled_in = [line.removeprefix("# ") for line in (tmp_path / "rollmux.toml").read_text().splitlines()]
    table = "\n".join(filled_in[filled_in.index("[[hosts]]") :]).replace("\n#\n", "\n\n")
    nodes = tomllib.loads(table)["hosts"][0]["nodes"]
    assert nodes == [{"gpus": "0-3", "pools": ["rollout"]}, {"gpus": "4-7", "pools": ["train"]}]
    assert "rollmuxd init --mock" in ran.out


def test_with_made_up_gpus_it_writes_what_a_daemon_accepts_and_what_the_default_job_fits(rollmuxd, tmp_path):
    assert rollmuxd(f"init --mock --output {tmp_path}/rollmux.toml").code == 0
    assert written(tmp_path) == [("mock", "mock", [((0, 1, 2, 3), ("rollout",)), ((4, 5, 6, 7), ("train",))])]


def test_hosts_are_asked_by_ssh_and_those_that_are_away_are_named(rollmuxd, here, tmp_path, monkeypatch):
    here(*[H20] * 4)
    look = init_config._look

    async def asked(kind, name, host):
        assert name == "ssh"
        if host.id == "gone":
            return init_config.Found(host.id, name, why="gone cannot be reached by ssh: no route to host")
        return await look(kind, name, host)

    monkeypatch.setattr(init_config, "_look", asked)
    ran = rollmuxd("init --ssh gpu1 --ssh gone --ssh gpu2")
    assert ran.code == 0
    assert "gone: no GPU was seen: gone cannot be reached by ssh: no route to host" in ran.err
    assert written(tmp_path) == [
        ("gpu1", "ssh", [((0, 1, 2, 3), ("rollout",))]),
        ("gpu2", "ssh", [((0, 1, 2, 3), ("train",))]),
    ]
    ran = rollmuxd("init --ssh gone --output other.toml")
    assert (ran.code, "no GPU was seen on these hosts (gone: gone cannot be reached by ssh" in ran.err) == (1, True)
    assert not (tmp_path / "other.toml").exists(), "a second run would be refused"


def test_of_a_heterogeneous_allocation_each_component_is_a_pool_and_the_file_says_which(
    rollmuxd, here, tmp_path, monkeypatch
):
    here(*[H20] * 2)

    class Found(discovery.find("backend", "any")):
        @classmethod
        async def find(cls, where):
            if not where:
                raise ValueError("this is no Slurm allocation")
            parts = (("rx1", 0), ("rx2", 1), ("rx3", 1))
            return tuple(FoundHost(name, {"allocation": where, "component": part}, part) for name, part in parts)

    async def looked(kind, name, host):
        gpus = (GpuInfo(f"{host.id}/gpu0", "H20", 96_000),)
        return init_config.Found(host.id, name, gpus, 1_000_000, "", host.options, host.kind)

    monkeypatch.setattr(discovery, "find", lambda kind, name: Found)
    monkeypatch.setattr(init_config, "_look", looked)
    assert rollmuxd("init --slurm 4711").code == 0
    assert written(tmp_path) == [
        ("rx1", "slurm", [((0,), ("rollout",))]),
        ("rx2", "slurm", [((0,), ("train",))]),
        ("rx3", "slurm", [((0,), ("train",))]),
    ]
    hosts = load_settings(tmp_path / "rollmux.toml").hosts
    assert [host.options for host in hosts] == [{"allocation": "4711", "component": part} for part in (0, 1, 1)]
    ran = rollmuxd("init --output other.toml --slurm")
    assert (ran.code, "this is no Slurm allocation" in ran.err) == (1, True)
    assert rollmuxd("init --output other.toml --ssh a --slurm 1").code == 1

    async def saw_one(kind, name, host):
        return await looked(kind, name, host) if host.id == "rx2" else await saw_none(kind, name, host)

    async def saw_none(kind, name, host):
        return init_config.Found(host.id, name, why="no driver", options=host.options, kind=host.kind)

    monkeypatch.setattr(init_config, "_look", saw_none)
    ran = rollmuxd("init --output other.toml --slurm 4711")
    assert ran.code == 1
    assert "no GPU was seen on the nodes of the allocation (rx1: no driver;" in ran.err
    assert not (tmp_path / "other.toml").exists(), "a daemon would start without hosts"

    monkeypatch.setattr(init_config, "_look", saw_one)
    assert rollmuxd("init --output other.toml --slurm 4711").code == 0
    samples = (tmp_path / "other.toml").read_text().split("[[hosts]]")
    assert [line for one in (samples[1], samples[3]) for line in one.splitlines() if "pools" in line] == [
        '# pools = ["rollout"]',
        '# pools = ["train"]',
    ], "the sample of a component is in its pool"


def test_a_host_that_needs_more_than_a_name_is_to_be_named_for_ssh(rollmuxd, here):
    ran = rollmuxd("init --ssh ann@gpu1")
    assert ran.code == 1
    assert "'ann@gpu1' cannot be a host's id; name it, with its user and port, in ~/.ssh/config" in ran.err


def test_as_json_it_says_what_it_saw(rollmuxd, here):
    here(H20)
    (host,) = rollmuxd("init --json").json["hosts"]
    assert host["gpus"] == [{"gpu": "box/gpu0", "type": "NVIDIA H20", "memory_mb": 97_871, "uuid": "GPU-0"}]
    assert host["ram_mb"] > 0
    assert list(host) == ["host", "backend", "gpus", "ram_mb", "why"]  # not what only the file's writer needs


def test_the_name_of_this_machine_makes_an_id(monkeypatch):
    for name, id_ in (("gpu-7.lab.example", "gpu-7"), ("_böx_", "b-x"), ("", "box")):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert init_config.this_host() == id_
