"""Whatever is wrong with the settings is answered with the file, the key and the remedy, all of it at once."""

import os
import re
import tomllib
from pathlib import Path

import pytest

from rollmuxd.core.config import DriverTraits, OwnerLimits
from rollmuxd.core.inputs import HostSpec, NodeSpec
from rollmuxd.daemon.settings import (
    BadSettings,
    Settings,
    is_loopback,
    load_settings,
    node_id,
    parse_gpus,
    split_address,
)

REPOSITORY = Path(__file__).parents[2]
HOST = '[[hosts]]\nid = "box"\nbackend = "mock"\nnodes = [{gpus = "0-1", pools = ["rollout"]}]\n'


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("ROLLMUX_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def write(text: str, path: str = "rollmux.toml") -> Path:
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def wrong(text: str) -> str:
    with pytest.raises(BadSettings) as caught:
        load_settings(write(text))
    return str(caught.value)


# ---- the sample ----------------------------------------------------------------------------------------------------


TABLES = [name for name in Settings.model_fields if name not in {"owners", "hosts", "fabric", "backends", "residency"}]


def test_the_sample_in_the_repository_loads_and_gives_the_defaults():
    sample = load_settings(REPOSITORY / "rollmux.toml")
    bare = Settings()

    assert [host.id for host in sample.hosts] == ["box1", "box2"]
    for table in TABLES:
        assert getattr(sample, table) == getattr(bare, table), table


def test_the_sample_names_every_setting():
    text = (REPOSITORY / "rollmux.toml").read_text()
    sample = tomllib.loads(re.sub(r"^# ([a-z_]+ = )", r"\1", text, flags=re.MULTILINE))
    for table in set(TABLES) - {"policy"}:
        assert set(sample[table]) == set(type(getattr(Settings(), table)).model_fields), table
    host = sample["hosts"][0]
    fields = Settings.model_fields["hosts"].annotation.__args__[0].model_fields
    assert set(host) == set(fields)
    assert set(host["nodes"][0]) == set(fields["nodes"].annotation.__args__[0].model_fields)


# ---- where they come from ------------------------------------------------------------------------------------------


def test_without_a_file_the_defaults_make_a_daemon_without_hosts():
    settings = load_settings()

    assert settings.hosts == ()
    assert settings.daemon.listen == "127.0.0.1:7878"
    assert settings.lease.lease_s == 60


def test_the_first_file_that_is_found_counts(tmp_path):
    write("[lease]\nlease_s = 90", f"{tmp_path}/home/.config/rollmux/rollmux.toml")
    assert load_settings().lease.lease_s == 90
    write("[lease]\nlease_s = 80")
    assert load_settings().lease.lease_s == 80
    write("[lease]\nlease_s = 70", "other.toml")
    assert load_settings(Path("other.toml")).lease.lease_s == 70


def test_a_file_that_is_named_and_missing_is_an_error(monkeypatch):
    with pytest.raises(BadSettings, match=r"nowhere\.toml: there is no such file"):
        load_settings(Path("nowhere.toml"))
    monkeypatch.setenv("ROLLMUX_CONFIG", "gone.toml")
    with pytest.raises(BadSettings, match=r"gone\.toml"):
        load_settings()


def test_the_environment_goes_over_the_file(monkeypatch):
    write("[lease]\nlease_s = 90\nheartbeat_s = 20")
    monkeypatch.setenv("ROLLMUX_LEASE__LEASE_S", "45")
    monkeypatch.setenv("ROLLMUX_HOSTS", '[{"id": "h", "backend": "b", "nodes": [{"gpus": [0], "pools": ["p"]}]}]')
    settings = load_settings()

    assert (settings.lease.lease_s, settings.lease.heartbeat_s) == (45, 20)
    assert settings.hosts[0].id == "h"


def test_the_clients_own_variables_are_no_business_of_the_daemon(monkeypatch):
    for name in ("URL", "API_KEY", "API_KEY_FILE", "SOCKET", "REQUIRED", "GIVE_UP_S"):
        monkeypatch.setenv(f"ROLLMUX_{name}", "x")
    load_settings()


# ---- what is wrong -------------------------------------------------------------------------------------------------


def test_a_typo_is_answered_with_the_key_that_was_meant():
    text = HOST.replace("gpus =", "gpu =")
    lines = wrong(text).splitlines()

    # And not also that the list of nodes is too short, which only follows.
    assert sorted(lines) == [
        "rollmux.toml: hosts[0].nodes[0].gpu is not a setting; did you mean gpus?",
        "rollmux.toml: hosts[0].nodes[0].gpus is missing",
    ]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("[lesae]", "rollmux.toml: lesae is not a setting; did you mean lease?"),
        ("[lease]\nlease = 5", "rollmux.toml: lease.lease is not a setting; did you mean lease_s?"),
        ("[log]\nzzz = 5", "rollmux.toml: log.zzz is not a setting; known here: level, format"),
        (
            "[policy.rolmux]\nmax_group = 2",
            "rollmux.toml: policy.rolmux is not a setting; did you mean policy.rollmux?",
        ),
        (
            "[defaults.owner]\nmax_job = 2",
            "rollmux.toml: defaults.owner.max_job is not a setting; did you mean max_jobs?",
        ),
        (
            '[owners."*"]\nmax_jobs = 2',
            'rollmux.toml: owners: "*" is no owner; [defaults.owner] has what holds for all others',
        ),
        ("[owners.team-a]\nshar = 2", "rollmux.toml: owners.team-a.shar is not a setting; did you mean share?"),
        (
            "[policy.rollmux]\nmax_grup = 1",
            "rollmux.toml: policy.rollmux.max_grup is not a setting; did you mean max_group?",
        ),
        ("[lease]\nlease_s = -1", "rollmux.toml: lease.lease_s: input should be greater than 0 (it is -1)"),
        ("[lease]\nlease_s = 20", "rollmux.toml: lease: lease_s (20) must be at least twice heartbeat_s (15)"),
        ("[lease]\nlease_s = nan", "lease.lease_s: input should be a finite number"),
        ('[daemon]\nmode = "watch"', "rollmux.toml: daemon.mode: input should be 'share' or 'observe'"),
        ('[daemon]\nlisten = "here"', "rollmux.toml: daemon.listen: 'here' is no address"),
        (f'[daemon]\nsocket = "/{"x" * 120}"', "longer than the 103 bytes"),
        ("[daemon", "rollmux.toml: this is not TOML: "),
        (HOST + HOST, "rollmux.toml: hosts: box is there twice"),
        (HOST.replace('"0-1"', '"1-0"'), "hosts[0].nodes[0].gpus: '1-0' names no GPUs"),
        (HOST.replace('"0-1"', "[0, 0]"), "hosts[0].nodes[0].gpus: a GPU is named twice"),
        (HOST.replace('"0-1"', "[]"), "hosts[0].nodes[0].gpus: a node has at least one GPU"),
        (
            HOST.replace('"box"', '"a/b"'),
            "hosts[0].id: letters, digits, . _ - are needed (first a letter or digit) (it is 'a/b')",
        ),
        (
            HOST.replace("[[hosts]]", "[hosts]"),
            "rollmux.toml: hosts: it is one table, and a list of tables is needed; ",
        ),
        ("[fabric]", "rollmux.toml: fabric: it is one table, and a list of tables is needed; write [[fabric]]"),
        ('[tls]\nnames = "a.b"', "rollmux.toml: tls.names: a list is needed; write [\"a.b\"] (it is 'a.b')"),
        (
            HOST.replace("nodes = [{", 'nodes = [{gpus = [1], pools = ["train"]}, {'),
            "hosts[0]: GPU 1 is in nodes[0] and in nodes[1]",
        ),
    ],
)
def test_what_is_wrong_is_said_with_file_key_and_remedy(text, answer):
    assert answer in wrong(text)


def test_everything_that_is_wrong_is_said_at_once():
    assert len(wrong("[lease]\nlease = 1\n[log]\nlevel = 'loud'\n[limits]\norder_s = 0").splitlines()) == 3


@pytest.mark.parametrize(
    ("variable", "answer"),
    [
        ("ROLLMUX_DAEMON__LISTN", "environment: daemon.listn is not a setting; did you mean listen?"),
        ("ROLLMUX_APIKEY", "did you mean ROLLMUX_API_KEY?"),
        ("ROLLMUX_LEASE_S", "ROLLMUX_LEASE_S is not a setting"),
        ("ROLLMUX_DAEMON__LISTEN__X", "environment: ROLLMUX_DAEMON__LISTEN__X: daemon.listen: input should be"),
    ],
)
def test_a_variable_that_sets_nothing_is_answered(tmp_path, monkeypatch, variable, answer):
    monkeypatch.setenv(variable, "x")
    (tmp_path / "rollmux.toml").touch()
    with pytest.raises(BadSettings) as caught:
        load_settings(tmp_path / "rollmux.toml")
    assert answer in str(caught.value)


def test_a_bad_value_in_the_environment_is_said_to_be_there(monkeypatch):
    monkeypatch.setenv("ROLLMUX_LEASE__LEASE_S", "soon")
    with pytest.raises(BadSettings, match=r"^environment: lease\.lease_s: .*'soon'"):
        load_settings()


def test_options_of_backends_and_of_other_policies_are_theirs_to_check(monkeypatch):
    monkeypatch.setenv("ROLLMUX_BACKENDS__MOCK__SPEED", "7")
    settings = load_settings(write('[daemon]\npolicy = "mine"\n[policy.mine]\nx = 1\n[backends.mock]\nseed = 3'))

    assert settings.backends["mock"] == {"seed": 3, "speed": "7"}
    assert settings.policy_options() == {"x": 1}


def test_who_says_nothing_has_thrift_with_its_guard():
    settings = load_settings()

    assert settings.daemon.policy == "thrift"
    assert settings.policy_options()["promise"] == "measured"


def test_what_the_environment_gave_is_not_blamed_on_the_file(monkeypatch):
    monkeypatch.setenv("ROLLMUX_HOSTS", '[{"id": 1}]')
    lines = wrong("[lease]\nlease_s = 90").splitlines()

    assert "environment: ROLLMUX_HOSTS: hosts[0].backend is missing" in lines
    assert all(line.startswith("environment: ROLLMUX_HOSTS: hosts[0].") for line in lines)


def test_settings_know_the_file_that_they_are_from():
    assert load_settings().source == "settings"
    assert load_settings(write(HOST, "mine.toml")).source == "mine.toml"


# ---- over the border -----------------------------------------------------------------------------------------------


def test_the_core_gets_milliseconds_megabytes_and_ids():
    settings = load_settings(
        write("[lease]\nlease_s = 30.5\n[limits]\nclean_tolerance_gb = 0.25\n" + HOST + "ram_gb = 1.5\n")
    )
    config = settings.to_core_config({"channel": DriverTraits(probes=True)})
    start = settings.to_start()

    assert (config.lease_ms, config.clean_tolerance_mb) == (30_500, 250)
    assert config.drivers["channel"].probes
    assert start.hosts == (HostSpec("box", "mock", 1500),)
    assert start.nodes == (NodeSpec("box/gpu0-1", "box", ("box/gpu0", "box/gpu1"), ("rollout",)),)


def test_the_core_gets_what_owners_may_have():
    text = "[owners.team-a]\nshare = 3\nmax_nodes = 8\nmax_priority = 5\n"
    config = load_settings(write(text)).to_core_config()

    limits = config.owners["team-a"]
    assert (limits.share, limits.max_nodes, limits.max_priority, limits.max_jobs) == (3, 8, 5, 1_000)


def test_what_is_not_said_of_an_owner_is_as_the_defaults_say_it(monkeypatch):
    text = "[defaults.owner]\nmax_jobs = 7\nmax_priority = 3\n[owners]\nnlp = {share = 2, max_jobs = 0}\n"
    monkeypatch.setenv("ROLLMUX_DEFAULTS__OWNER__MAX_WAITING", "4")
    config = load_settings(write(text)).to_core_config()

    assert config.owners["nlp"] == OwnerLimits(share=2, max_jobs=0, max_waiting=4, max_priority=3)
    assert config.others == OwnerLimits(share=1, max_jobs=7, max_waiting=4, max_priority=3)
    monkeypatch.delenv("ROLLMUX_DEFAULTS__OWNER__MAX_WAITING")
    assert Settings().to_core_config().others == OwnerLimits(share=1, max_jobs=1_000)


def test_the_core_is_told_to_revoke_only_where_that_was_said():
    assert Settings().to_core_config().overrun_revoke is False
    config = load_settings(write('[overrun]\naction = "revoke"\ngrace_s = 7\n')).to_core_config()
    assert (config.overrun_revoke, config.overrun_grace_ms) == (True, 7_000)


@pytest.mark.parametrize(
    ("gpus", "printed"),
    [((0, 1, 2, 3), "h/gpu0-3"), ((0,), "h/gpu0"), ((3, 0, 1), "h/gpu0-1,3"), ((0, 2), "h/gpu0,2")],
)
def test_a_node_is_printed_by_its_gpus(gpus, printed):
    assert node_id("h", gpus) == printed
    assert parse_gpus(printed.removeprefix("h/gpu")) == tuple(sorted(gpus))


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    assert is_loopback("[::1]:80")
    assert is_loopback("127.8.8.8:1")
    assert is_loopback("localhost:1")
    assert not is_loopback("[::]:1")
    assert not is_loopback("example.org:1")
    with pytest.raises(ValueError, match="no address"):
        split_address("127.0.0.1:70000")


EVERYWHERE = '[daemon]\nlisten = "0.0.0.0:80"\n'


def test_beyond_loopback_it_is_https_with_keys_without_being_told():
    settings = load_settings(write(EVERYWHERE))
    assert settings.uses_tls
    assert settings.access.require_keys
    assert not load_settings(write("")).uses_tls
    assert load_settings(write('[tls]\nmode = "on"')).uses_tls


@pytest.mark.parametrize("lacking", ['[tls]\nmode = "off"', "[access]\nrequire_keys = false"])
@pytest.mark.parametrize("listen", ["0.0.0.0:80", "[::]:80", "10.0.0.1:80", "gpu-box:80"])
def test_beyond_loopback_without_tls_or_without_keys_only_when_told_that_it_is_meant(lacking, listen):
    said = wrong(f'[daemon]\nlisten = "{listen}"\n{lacking}')
    assert "can be reached from other machines" in said
    assert "access.insecure = true" in said
    if "access" in lacking:
        meant = f"{lacking}\ninsecure = true"
    else:
        meant = f"{lacking}\n[access]\ninsecure = true"
    settings = load_settings(write(f'[daemon]\nlisten = "{listen}"\n{meant}'))
    assert settings.daemon.listen == listen
    assert not settings.uses_tls


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('[tls]\ncertificate = "c.pem"', "tls: key is missing"),
        ('[tls]\nkey = "k.pem"', "tls: certificate is missing"),
        ('[tls]\nmode = "off"\ncertificate = "c.pem"\nkey = "k.pem"', 'mode is "off"'),
        ('[tls]\nnames = ["a b"]', "tls.names[0]"),
    ],
)
def test_what_does_not_go_together_about_tls_is_said(text, said):
    assert said in wrong(text)
