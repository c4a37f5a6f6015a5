"""``rollmuxd doctor``: what is wrong with a host is found, and said with what to do."""

import json
import pwd
import time
from pathlib import Path

import pytest

from rollmuxd.daemon import doctor
from rollmuxd.daemon.settings import HostTable
from rollmuxd.spi import GpuInfo, GpuObservation, Inventory, Observation
from rollmuxd_backend_local import findings

GPU = {"uuid": "GPU-0", "name": "NVIDIA H20", "total_mb": 97_871}


@pytest.fixture
def settings(tmp_path):
    """A function from GPUs and settings of the host to the path of a rollmux.toml."""

    def write(*gpus, host="", node="", more="", **box):
        (tmp_path / "gpus.json").write_text(json.dumps({"gpus": gpus, **box}))
        path = tmp_path / "rollmux.toml"
        path.write_text(
            f'[daemon]\nstate_dir = "{tmp_path}/state"\n'
            f'[[hosts]]\nid = "box"\nbackend = "local"\n{host}\n'
            f'options = {{made_up_gpus = "{tmp_path}/gpus.json"}}\n'
            f'[[hosts.nodes]]\ngpus = [0]\npools = ["rollout"]\n{node}\n{more}\n'
        )
        return path

    return write


def found(ran, host="box"):
    """What was found, by what was looked at."""
    (one,) = [one for one in ran.json["hosts"] if one["host"] == host]
    return {finding["what"]: finding for finding in one["findings"]}


def test_a_good_host_is_good(rollmuxd, settings):
    ran = rollmuxd(f"doctor --config {settings(GPU)}")
    assert (ran.code, ran.err) == (0, "")
    assert ran.lines[0] == "box (local)"
    for what in ("driver", "box/gpu0", "RAM", "pinned memory", "python", "clock", "look"):
        assert any(line.split()[1:2] == [what] or what in line for line in ran.lines), what
    assert "bad" not in ran.out


def test_without_a_file_it_says_where_it_looked_and_what_writes_one(rollmuxd, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rollmuxd.daemon.settings.search_path", lambda: (Path("rollmux.toml"),))

    ran = rollmuxd("doctor")

    assert ran.code == 1
    assert "no rollmux.toml found (looked at rollmux.toml); `rollmuxd init` writes" in ran.err
    assert "`rollmuxd init --mock`" in ran.err


def test_it_writes_nothing_where_the_daemon_keeps_its_own(rollmuxd, settings, tmp_path):
    rollmuxd(f"doctor --config {settings(GPU)}")
    assert not (tmp_path / "state").exists()


@pytest.mark.parametrize(
    ("gpus", "host", "node", "what", "words"),
    [
        ([{**GPU, "errors": {"uuid": 15}}], "", "", "box/gpu0", "restart the machine"),
        ([{**GPU, "mig": True}], "", "", "box/gpu0", "-mig 0"),
        ([], "", "", "box/gpu0", "take it out"),
        ([GPU], "", "gpu_gb = 141", "box/gpu0", "leave gpu_gb out"),
        ([GPU], "ram_gb = 900000", "", "RAM", "leave ram_gb out"),
    ],
)
def test_what_keeps_a_host_from_being_used_is_bad(rollmuxd, settings, gpus, host, node, what, words):
    path = settings(*gpus, host=host, node=node)
    ran = rollmuxd(f"doctor --json --config {path}")
    finding = [one for one in ran.json["hosts"][0]["findings"] if one["what"] == what and one["level"] == "bad"]
    assert (ran.code, ran.json["good"]) == (1, False)
    assert words in finding[0]["remedy"]
    assert "not fit to be used: box" in rollmuxd(f"doctor --config {path}").err


def test_a_user_whose_keys_are_not_the_daemons_hears_as_which_to_look(rollmuxd, settings, tmp_path, monkeypatch):
    path = settings()
    (tmp_path / "state").mkdir()
    assert "sudo" not in rollmuxd(f"doctor --config {path}").err
    monkeypatch.setattr("os.geteuid", lambda: tmp_path.stat().st_uid + 1)
    name = pwd.getpwuid(tmp_path.stat().st_uid).pw_name
    assert f"sudo -Hu {name} rollmuxd doctor" in rollmuxd(f"doctor --config {path}").err


def test_a_host_without_a_driver_is_bad_once(rollmuxd, settings):
    ran = rollmuxd(f"doctor --json --config {settings(errors={'start': 9})}")
    bad = [finding for finding in ran.json["hosts"][0]["findings"] if finding["level"] == "bad"]
    assert [finding["what"] for finding in bad] == ["driver"]
    assert "modprobe nvidia" in bad[0]["remedy"]


def test_a_foreign_process_is_a_warning_and_named(rollmuxd, settings):
    ran = rollmuxd(f"doctor --json --config {settings({**GPU, 'processes': [{'pid': 1, 'mb': 5_000}]})}")
    assert ran.code == 0
    assert found(ran)["box/gpu0"]["level"] == "warning"
    assert "pid 1" in found(ran)["box/gpu0"]["said"]


def test_a_backend_that_checks_nothing_is_looked_through_all_the_same(rollmuxd, settings):
    mock = '[[hosts]]\nid = "made"\nbackend = "mock"\n[[hosts.nodes]]\ngpus = [0]\npools = ["train"]'
    path = settings(GPU, more=mock)
    ran = rollmuxd(f"doctor --json --config {path}")
    assert found(ran, "made")["look"]["level"] == "good"
    assert [one["host"] for one in rollmuxd(f"doctor --json --host made --config {path}").json["hosts"]] == ["made"]


def test_a_backend_that_is_not_installed_and_options_that_are_wrong_are_findings(rollmuxd, settings, tmp_path):
    more = (
        '[[hosts]]\nid = "lab"\nbackend = "lab"\n[[hosts.nodes]]\ngpus = [0]\npools = ["train"]\n'
        '[[hosts]]\nid = "made"\nbackend = "mock"\noptions = {copy_gbs = 1}\n'
        '[[hosts.nodes]]\ngpus = [0]\npools = ["train"]'
    )
    ran = rollmuxd(f"doctor --json --config {settings(GPU, more=more)}")
    assert ran.code == 1
    assert "install" in found(ran, "lab")["backend"]["remedy"]
    assert "did you mean copy_gbps" in found(ran, "made")["configuration"]["said"]
    assert found(ran, "box")["driver"]["level"] == "good"


def test_what_is_wrong_with_the_options_of_a_backend_is_said_once_for_all_of_its_hosts(rollmuxd, settings):
    made = '[[hosts]]\nid = "{}"\nbackend = "mock"\n[[hosts.nodes]]\ngpus = [0]\npools = ["train"]\n'
    more = "[backends.mock]\ncopy_gbs = 1\n" + made.format("rx1") + made.format("rx2")
    ran = rollmuxd(f"doctor --config {settings(GPU, more=more)}")
    assert ran.code == 1
    assert ran.out.count("did you mean copy_gbps") == 1
    assert "as for rx1: no host of backend mock can be looked at" in ran.out
    assert "not fit to be used: rx1, rx2" in ran.err


def test_without_hosts_it_says_where_to_get_some(rollmuxd, tmp_path):
    (tmp_path / "rollmux.toml").write_text("")
    ran = rollmuxd(f"doctor --config {tmp_path}/rollmux.toml")
    assert ran.code == 1
    assert "rollmuxd init" in ran.err
    assert "there is no host 'bix'" not in ran.err


def test_a_host_that_is_not_configured_is_not_looked_for(rollmuxd, settings):
    ran = rollmuxd(f"doctor --host bix --config {settings(GPU)}")
    assert (ran.code, "there is no host 'bix'" in ran.err) == (1, True)


@pytest.mark.parametrize(
    ("cables", "options", "code", "what", "level", "words"),
    [
        ("[1, 2]", "{ports = 16}", 0, "circuits", "good", "0 circuits"),
        ("[1, 40]", "{ports = 16}", 1, "ports", "bad", "fabric[0].ports.box/gpu0: port 40 is not one of 1 to 16"),
        ("[1, 9]", "{ports = 16, protected = [9]}", 1, "ports", "bad", "port 9 is protected"),
        ("[1, 2]", "{prots = 16}", 1, "configuration", "bad", "prots is not an option"),
    ],
)
def test_a_switch_is_looked_at_too(rollmuxd, settings, cables, options, code, what, level, words):
    switch = f'[[fabric]]\nname = "ocs"\ndriver = "mock"\noptions = {options}\nports = {{"box/gpu0" = {cables}}}'
    path = settings(GPU, more=switch)
    ran = rollmuxd(f"doctor --json --config {path}")
    finding = found(ran, "fabric ocs")[what]
    assert (ran.code, finding["level"]) == (code, level)
    assert words in finding["said"]
    assert [one["host"] for one in rollmuxd(f"doctor --json --host box --config {path}").json["hosts"]] == ["box"]


def test_a_switch_that_is_away_is_a_warning(rollmuxd, settings):
    options = '{url = "http://127.0.0.1:1", ports = 16}'
    switch = f'[[fabric]]\nname = "ocs"\ndriver = "polatis"\noptions = {options}\nports = {{"box/gpu0" = [1]}}'
    ran = rollmuxd(f"doctor --json --config {settings(GPU, more=switch)}")
    finding = found(ran, "fabric ocs")["circuits"]
    assert (ran.code, finding["level"]) == (0, "warning")
    assert "the switch cannot be reached" in finding["said"]


# ---- what is made of what hosts say ----------------------------------------------------------------------------------


def about(**machine):
    ram = {"total_mb": 100_000, "available_mb": 90_000}
    usual = dict(ram=ram, memlock_mb=-1, shm_mb=50_000, python="3.8.1", kernel="6", user="ann", pid_namespace=False)
    return {"machine": {**usual, "time": time.time(), **machine}, "no_gpus": "none"}


def test_two_ways_to_one_machine_are_noticed():
    def shown(host):
        gpus = (GpuInfo(f"{host}/gpu0", "H20", 97_000), GpuInfo(f"{host}/gpu1", "H20", 97_000))
        seen = tuple(GpuObservation(gpu.gpu, 0) for gpu in gpus)
        observation = Observation(seen, "boot1", {f"{host}/gpu0": "GPU-a", f"{host}/gpu1": "GPU-b"})
        return doctor.Seen(Inventory(gpus, 1000), observation)

    def host(id, gpu):
        return HostTable(id=id, backend="local", nodes=({"gpus": (gpu,), "pools": ("train",)},))

    seen = {"box": shown("box"), "alias": shown("alias")}
    ((about, warning),) = doctor._between(seen, [host("box", 0), host("alias", 1)])
    assert (about, warning.level, warning.said) == ("alias", "warning", "alias and box are the same machine")
    (_, bad), _ = doctor._between(seen, [host("box", 0), host("alias", 0)])
    assert (bad.what, bad.level, bad.said) == ("alias/gpu0", "bad", "it is the same GPU as box/gpu0 (GPU-a)")


@pytest.mark.parametrize(
    ("machine", "what", "words"),
    [
        (dict(memlock_mb=8), "pinned memory", "memlock"),
        (dict(shm_mb=64), "shared memory", "--shm-size"),
        (dict(pid_namespace=True), "processes", "--pid host"),
        (dict(time=time.time() - 100), "clock", "NTP"),
    ],
)
def test_limits_and_clocks_are_warned_about_with_what_to_do(machine, what, words):
    now = time.time()

    def of(said):
        return {finding.what: finding for finding in findings.of(said, (), "box", (now, now + 0.1))}

    assert of(about(**machine))[what].level == "warning"
    assert words in of(about(**machine))[what].remedy
    assert what not in of(about()) or of(about())[what].level == "good"
