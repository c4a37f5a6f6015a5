"""``rollmuxd doctor --bundle``: enough for a bug report, and nothing in it that opens a door."""

import asyncio
import json
import tarfile
from pathlib import Path

import pytest

from rollmuxd.core import facts as f
from rollmuxd.core.inputs import HostSpec
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.daemon.access.keys import Role, new_key
from rollmuxd.daemon.journal.bundle import Scrubber
from rollmuxd.daemon.journal.store import Journal

#: where a secret may be planted, and what it is there
PLANTED = {
    "an idempotency key": "idem-7f3a9c41d2",
    "a host's option": "hunter2-of-the-host",
    "a backend's option": "s3cr3t/of+the=backend",
    "a driver's option": "driver pass phrase",
    "a nested option": "nested-credential-99",
    "a word of a job's driver": "planted-word-71",
    "an option of a job's driver": "planted-option-72",
    "the environment": "env-secret-value-1234",
    "a bearer in the log": "Zm9vYmFyYmF6cXV4",
    "a password in the log": "correct-horse",
    "a token in the log": "tok-0987654321",
    "a url in the log": "ann:opensesame",
    "a hub token in the log": "hf_abcdefghijklmnopqrstuvwxyz012345",
    "a reason": "reason-token-5555",
}
PEM = "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQEF\n-----END PRIVATE KEY-----"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A state directory, a configuration and an environment, all full of secrets."""
    state_dir = tmp_path / "state"
    options = (
        ("park", ("/opt/ctl", PLANTED["a word of a job's driver"])),
        ("dsn", PLANTED["an option of a job's driver"]),
    )
    spec = JobSpec(
        name="math",
        phases=(PhaseSpec("rollout", ("rollout",)),),
        wants=(Want("rollout"),),
        states=(StateSpec("rollout", driver="command", options=options),),
    )
    key, secret = new_key("team", "ann", Role.ADMIN, 5)

    async def write():
        journal = Journal.open(state_dir)
        facts = [
            f.HostAdded(1, HostSpec("box1", "mock", 5)),
            f.JobRegistered(2, "j1", "team", "ann", 1, spec, PLANTED["an idempotency key"]),
            f.JobPaused(3, "j1", f"ann, token={PLANTED['a reason']}"),
        ]
        await journal.append(list(enumerate(facts, 1)))
        await journal.add_key(key)
        await journal.close()

    asyncio.run(write())
    (state_dir / "daemon.log").write_text(
        "\n".join(
            [
                "2026-11-21 [info] ready pid=17",
                f"Authorization: Bearer {PLANTED['a bearer in the log']}",
                f"connecting password={PLANTED['a password in the log']} to box1",
                f'{{"api_token": "{PLANTED["a token in the log"]}", "host": "box1"}}',
                f"GET https://{PLANTED['a url in the log']}@example.com/x",
                f"pulled with {PLANTED['a hub token in the log']}",
                f"made key {secret}",
                f"environment was {PLANTED['the environment']}",
                PEM,
                "2026-11-21 [info] the last line",
            ]
        )
    )
    config = tmp_path / "rollmux.toml"
    config.write_text(
        f"""
[daemon]
state_dir = "{state_dir}"
[[hosts]]
id = "box1"
backend = "mock"
options = {{ user = "{PLANTED["a host's option"]}", deep = {{ more = ["{PLANTED["a nested option"]}"] }} }}
[[hosts.nodes]]
gpus = "0-1"
pools = ["rollout"]
[backends.mock]
anything = "{PLANTED["a backend's option"]}"
[residency.channel]
word = "{PLANTED["a driver's option"]}"
"""
    )
    monkeypatch.setenv("WANDB_API_KEY", PLANTED["the environment"])
    monkeypatch.setenv("ROLLMUX_API_KEY", secret)
    PLANTED["an API key"] = secret
    PLANTED["an API key's hash"] = key.hashed
    return config


def read(path):
    with tarfile.open(path) as bundle:
        return {member.name.partition("/")[2]: bundle.extractfile(member).read().decode() for member in bundle}


def test_no_secret_gets_in_wherever_it_was(rollmuxd, place, tmp_path):
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    inside = read(tmp_path / "b.tar.gz")
    for what, secret in PLANTED.items():
        for name, content in inside.items():
            assert secret not in content, f"{what} is in {name}"
            assert json.dumps(secret)[1:-1] not in content, f"{what} is in {name}"
    assert not any("MIIEvQ" in content for content in inside.values())


def test_what_a_report_needs_is_in_it_and_is_listed(rollmuxd, place, tmp_path):
    ran = rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}")
    inside = read(tmp_path / "b.tar.gz")
    assert set(inside) == {"about.json", "settings.json", "journal.json", "facts.jsonl", "state.json", "daemon.log"}
    assert all(name in ran.out for name in inside)
    assert "Look through it before you send it" in ran.out
    settings = json.loads(inside["settings.json"])
    assert settings["lease"]["lease_s"] == 60
    assert settings["hosts"][0]["id"] == "box1"
    assert settings["hosts"][0]["options"] == {"user": "(left out: str)", "deep": {"more": "(left out: list)"}}
    assert settings["access"]["require_keys"] is True
    assert json.loads(inside["journal.json"])["good"] is True
    facts = [json.loads(line) for line in inside["facts.jsonl"].splitlines()]
    assert [(fact["seq"], fact["fact"]) for fact in facts] == [
        (1, "host_added"),
        (2, "job_registered"),
        (3, "job_paused"),
    ]
    assert facts[1]["spec"]["name"] == "math"
    state = json.loads(inside["state.json"])
    assert state["jobs"]["j1"]["status"] == "paused"
    for spec in (facts[1]["spec"], state["jobs"]["j1"]["spec"]):
        assert spec["states"][0]["options"] == {"park": "(left out: list)", "dsn": "(left out: str)"}
    assert "the last line" in inside["daemon.log"]
    assert json.loads(inside["about.json"])["packages"]["rollmuxd"]


def test_of_a_long_log_the_last_lines_are_in_it(rollmuxd, place, tmp_path):
    (tmp_path / "state" / "daemon.log").write_text("a\n" * 9_000 + "password=hush-hush\n" + "b\n" * 3)
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    assert read(tmp_path / "b.tar.gz")["daemon.log"] == "a\n" * 1_996 + "password=(left out)\n" + "b\n" * 3


def test_only_its_owner_can_read_it_and_nothing_is_written_over(rollmuxd, place, tmp_path):
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    assert (tmp_path / "b.tar.gz").stat().st_mode & 0o777 == 0o600
    again = rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}")
    assert again.code == 1
    assert "is there already; name another file" in again.err


def test_a_file_that_goes_while_it_is_made_is_left_out(rollmuxd, place, tmp_path, monkeypatch):
    there = Path.iterdir
    gone = tmp_path / "state" / "daemon.log.new"
    monkeypatch.setattr(Path, "iterdir", lambda folder: (*there(folder), gone))
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    files = json.loads(read(tmp_path / "b.tar.gz")["about.json"])["files"]
    assert "daemon.log" in files
    assert "daemon.log.new" not in files


def test_of_a_damaged_journal_there_is_what_can_be_read(rollmuxd, place, tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "state" / "journal.sqlite3") as connection:
        connection.execute('UPDATE facts SET body = \'{"fact":"host_\' WHERE seq = 1')
    connection.close()
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place} --json").code == 0
    inside = read(tmp_path / "b.tar.gz")
    assert json.loads(inside["journal.json"])["good"] is False
    assert "fact 1 of 3 is damaged" in json.loads(inside["state.json"])["cannot be made"]
    assert len(inside["facts.jsonl"].splitlines()) == 3


def test_of_a_damaged_fact_nothing_is_told_that_might_be_an_option(rollmuxd, place, tmp_path):
    import sqlite3

    with sqlite3.connect(tmp_path / "state" / "journal.sqlite3") as connection:
        connection.execute("UPDATE facts SET body = substr(body, 1, length(body) - 3) WHERE seq = 2")
    connection.close()
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    facts = read(tmp_path / "b.tar.gz")["facts.jsonl"]
    assert "job_registered" in facts.splitlines()[1]
    assert "planted" not in facts


def test_without_a_journal_there_is_a_bundle_that_says_so(rollmuxd, tmp_path):
    (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{tmp_path}/nowhere"\n')
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {tmp_path}/rollmux.toml").code == 0
    inside = read(tmp_path / "b.tar.gz")
    assert "no such file" in inside["journal.json"]
    assert "No such file" in inside["daemon.log"]


@pytest.mark.parametrize(
    ("said", "left"),
    [
        ("slot_granted fence=1.17 slot=s4", "slot_granted fence=1.17 slot=s4"),
        ("the phase token of g1 is at 3", "the phase token of g1 is at 3"),
        ("x-api-key: abc", "x-api-key: (left out)"),
        ("Cookie: a=b; c", "Cookie: (left out); c"),
        ("client_secret='a b'", "client_secret=(left out)"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIi.abc", "(left out)"),
        ("ctl --token hunter2 --host box1", "ctl --token (left out) --host box1"),
        ("ctl --wandb-api-key 'a b' --host box1", "ctl --wandb-api-key (left out) --host box1"),
        ("ctl --password=hunter2 -v", "ctl --password=(left out) -v"),
        ("ran ['ctl', '--password', 'a b', '-v']", "ran ['ctl', '--password', (left out), '-v']"),
        ("pwd: hunter2, pass=hunter2 auth=hunter2", "pwd: (left out), pass=(left out) auth=(left out)"),
        ("MYSQL_PWD=hunter2; PGPASS=hunter2", "MYSQL_PWD=(left out); PGPASS=(left out)"),
        ("the author passed 3: ok", "the author passed 3: ok"),
        ("401 for https://tok3n@wandb.local/api", "401 for https://(left out)@wandb.local/api"),
        ("got https://s3/b/c?X-Amz-Signature=ab&n=1 twice", "got https://s3/b/c?(left out) twice"),
        ("sig=AbC%3D, X-Amz-Signature=ab12", "sig=(left out), X-Amz-Signature=(left out)"),
        ("github_pat_11ABCDEFG0abcdef gsk_abcdefghijkl", "(left out) (left out)"),
        ("AIzaSyA1234567890abcdefghijklmnopqrstuv", "(left out)"),
        (r'{"password": "a\"b tail", "n": 1}', '{"password": (left out), "n": 1}'),
        (r'"{\"token\": \"a\\\"b tail\", \"n\": 1}"', r'"{\"token\": (left out), \"n\": 1}"'),
        ('password="never closed', "password=(left out)"),
    ],
)
def test_a_line_of_text_keeps_what_it_says_and_loses_what_it_must_not(said, left):
    assert Scrubber().text(said) == left


@pytest.mark.parametrize(
    ("said", "left"),
    [
        (
            {"pwd": "hunter2", "pass": "hunter2", "auth": "hunter2"},
            dict.fromkeys(("pwd", "pass", "auth"), "(left out)"),
        ),
        ([["password", "x"], ["host", "box1"]], [["password", "(left out)"], ["host", "box1"]]),
        (["ctl", "--hf-token", "x", "-v"], ["ctl", "--hf-token", "(left out)", "-v"]),
        (["--token", "x"], ["--token", "(left out)"]),
        ({"passed": "two", "author": "ann"}, {"passed": "two", "author": "ann"}),
    ],
)
def test_a_structure_keeps_its_names_and_loses_what_they_are_for(said, left):
    assert Scrubber().value(said) == left


def test_the_folder_that_one_is_in_is_no_secret(rollmuxd, place, tmp_path, monkeypatch):
    monkeypatch.setenv("PWD", str(tmp_path))
    assert rollmuxd(f"doctor --bundle {tmp_path}/b.tar.gz --config {place}").code == 0
    assert json.loads(read(tmp_path / "b.tar.gz")["settings.json"])["daemon"]["state_dir"] == f"{tmp_path}/state"
