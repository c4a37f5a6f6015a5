"""The log that ``rollmuxd daemon start`` makes lies on the journal's disk: for months, it must not fill it.

Each of these is a process of its own, as it is its stderr that is replaced.
"""

import json
import os
import stat
import subprocess
import sys
import time

import anyio
import anyio.from_thread
import pytest
import structlog
from patience import PATIENCE_S

from rollmuxd.daemon import log_file

BEGINS = """
import os, pathlib, sys
from rollmuxd.daemon import log_file, logs
logs.set_up("warning", "json")
path = pathlib.Path({path!r})
def tend(limit=100):
    log_file.tend(path, limit)
def say(text):
    print(text, file=sys.stderr)
def status():
    return {{file.name: (file.stat().st_ino, file.read_bytes()) for file in path.parent.iterdir()}}
"""
LONG = "a" * 100


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "state").mkdir()
    return tmp_path / "state"


@pytest.fixture
def run(folder):
    """A program whose stdout and stderr are the log, as ``daemon start`` has it; what is in the folder then."""

    def it(program, *, at="daemon.log", out=None, flags=os.O_APPEND):
        log = os.open(folder / at, os.O_WRONLY | os.O_CREAT | flags, 0o600)
        try:
            words = [sys.executable, "-c", BEGINS.format(path=str(folder / "daemon.log")) + program]
            env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
            ran = subprocess.run(words, stdout=log if out is None else out, stderr=log, env=env, timeout=PATIENCE_S)
        finally:
            os.close(log)
        found = {file.name: file.read_text() for file in folder.iterdir()}
        assert ran.returncode == 0, found
        return found

    return it


def test_beyond_the_limit_it_is_begun_anew_and_what_was_said_is_beside_it(run, folder):
    found = run(f"say('{LONG}'); tend(); say('after'); print('on stdout')")
    assert found == {"daemon.log.1": f"{LONG}\n", "daemon.log": "after\non stdout\n"}
    assert stat.S_IMODE((folder / "daemon.log").stat().st_mode) == 0o600


def test_up_to_the_limit_it_goes_on(run):
    assert run(f"say('{LONG[1:]}'); tend(); say('after')") == {"daemon.log": f"{LONG[1:]}\nafter\n"}


def test_there_are_never_more_than_two(run):
    found = run("for number in range(5): say(str(number) * 100); tend()")
    assert found == {"daemon.log.1": "4" * 100 + "\n", "daemon.log": ""}


def test_whatever_the_daemon_starts_says_what_it_has_to_say_there_too(run):
    found = run(f"say('{LONG}'); tend(); os.system('echo one; echo two >&2')")
    assert found["daemon.log"] == "one\ntwo\n"


def test_it_is_only_ever_added_to(run):
    """Who else writes there (an operator's note, a second daemon that is refused) must not be written over."""
    add = "with path.open('a') as other: other.write('other\\n')\n"
    found = run(f"say('{LONG}'); tend(); say('one')\n{add}say('two')", flags=0)
    assert found["daemon.log"] == "one\nother\ntwo\n"


def test_what_is_written_elsewhere_is_left_to_whom_it_belongs(run):
    found = run(f"path.touch(); say('{LONG}'); tend()", at="elsewhere")
    assert found == {"elsewhere": f"{LONG}\n", "daemon.log": ""}


def test_without_a_file_of_that_name_nothing_is_done(run):
    assert run(f"say('{LONG}'); tend()", at="elsewhere") == {"elsewhere": f"{LONG}\n"}


def test_a_link_to_another_disk_is_left_to_who_made_it(run, folder):
    (folder / "daemon.log").symlink_to(folder / "elsewhere")
    run(f"say('{LONG}'); tend()")
    assert sorted(file.name for file in folder.iterdir()) == ["daemon.log", "elsewhere"]
    assert (folder / "daemon.log").is_symlink()


def test_a_stderr_that_is_no_file_is_left_alone(folder):
    (folder / "daemon.log").write_text(LONG)
    program = BEGINS.format(path=str(folder / "daemon.log")) + "tend(); say('there')"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=PATIENCE_S)
    assert ran.stderr == b"there\n"
    assert [file.name for file in folder.iterdir()] == ["daemon.log"]


def test_a_stdout_of_its_own_stays_where_it_is(run, tmp_path):
    with (tmp_path / "out").open("wb") as out:
        found = run(f"say('{LONG}'); tend(); print('answer')", out=out)
    assert (tmp_path / "out").read_text() == "answer\n"
    assert found["daemon.log"] == ""


def test_without_a_stdout_it_is_begun_anew_all_the_same(run):
    found = run(f"os.close(1); say('{LONG}'); tend(); say('after')\ntry: os.fstat(1)\nexcept OSError: say('closed')")
    assert found == {"daemon.log.1": f"{LONG}\n", "daemon.log": "after\nclosed\n"}


def test_a_line_that_was_begun_ends_where_it_began(run):
    """As after a write that the disk had no room for: the rest of it waits in this process."""
    found = run(
        f"say('{LONG}'); sys.stderr.reconfigure(line_buffering=False); sys.stderr.write('it'); tend(); say('!')"
    )
    assert found == {"daemon.log.1": f"{LONG}\nit", "daemon.log": "!\n"}


def test_without_a_stderr_nothing_is_done(run):
    assert run(f"say('{LONG}'); os.close(2); tend()") == {"daemon.log": f"{LONG}\n"}


@pytest.mark.parametrize("call", ["open", "link", "replace", "unlink", "lstat"])
@pytest.mark.parametrize("error", ["OSError(28, 'No space left on device')", "FileNotFoundError(2, 'gone')"])
def test_where_it_fails_all_is_as_it_was_and_it_is_tried_again(run, call, error):
    """``daemon.log`` is the file that is written to, or it would never be looked at again."""
    of = "os" if call in ("open", "link") else "pathlib.Path"
    found = run(f"""
say('{LONG}')
was, had = status(), getattr({of}, '{call}')
def fails(*words, **named):
    if '{call}' == 'unlink' and not named.get('missing_ok'):
        return had(*words, **named)
    raise {error}
setattr({of}, '{call}', fails)
try:
    tend()
except OSError:
    pass
setattr({of}, '{call}', had)
if '{call}' == 'unlink':
    path.with_name('daemon.log.new').unlink(missing_ok=True)
now = status()
assert all(was['daemon.log'] == file for file in now.values()), now  # the file before may be another name of it
assert now.keys() <= {{'daemon.log', 'daemon.log.1'}}
assert os.path.samestat(os.fstat(2), path.stat())
tend()
say('after')
""")
    assert found == {"daemon.log.1": f"{LONG}\n", "daemon.log": "after\n"}


def test_a_folder_that_is_gone_is_no_trouble(run, folder):
    run(f"say('{LONG}'); path.unlink(); tend(); path.parent.rmdir(); tend(); path.parent.mkdir()")


@pytest.mark.parametrize("at", ["os.link", "os.rename", "os.remove", "open"])
def test_a_daemon_that_is_killed_in_the_midst_of_it_leaves_nothing_that_harms_the_next(run, at):
    """Killed before each of its steps; the next one finds a log with all that was said, and goes on from there."""
    lines = run(f"""
path.with_name('daemon.log.1').write_text('older')
say('{LONG}')
def look(event, words):
    if event == '{at}' and str(words[0]).startswith(str(path.parent)):
        os._exit(0)
sys.addaudithook(look)
tend()
raise SystemExit('it was to be killed')
""")
    assert lines["daemon.log"] == f"{LONG}\n"
    found = run("say('next'); tend(); say('after')")
    assert found == {"daemon.log.1": f"{LONG}\nnext\n", "daemon.log": "after\n"}


def test_there_is_a_log_at_every_moment(run):
    found = run(f"""
path.with_name('daemon.log.1').write_text('older')
say('{LONG}')
seen = []
def look(event, words):
    if event.startswith('os.') or event == 'open':
        seen.append((event, os.access(path, os.F_OK)))
sys.addaudithook(look)
tend()
print(sorted(seen))
""")
    assert "('os.rename', True)" in found["daemon.log"]
    assert "False" not in found["daemon.log"]


def test_what_is_said_at_any_moment_of_it_is_in_one_of_the_two_and_in_order(run):
    """The loop goes on writing while a thread does this: here, between any two of its steps."""
    found = run(f"""
say('{LONG}')
said = 0
def look(frame, event, _):
    global said
    if frame.f_code is log_file.tend.__code__:
        logs.log.warning('line', number=said)
        said += 1
        return look
sys.settrace(look)
tend()
sys.settrace(None)
logs.log.warning('line', number=said)
""")
    before, after = (
        [json.loads(line)["number"] for line in found[name].splitlines() if line != LONG]
        for name in ("daemon.log.1", "daemon.log")
    )
    assert before + after == list(range(len(before + after)))
    assert len(before) > 5
    assert len(after) > 3


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file somebody else's")
def test_what_root_has_begun_anew_is_the_daemons(run, folder):
    """Else the daemon, which runs as the folder's owner, could not be started any more."""
    os.chown(folder, 12_344, 12_345)
    run(f"say('{LONG}'); tend()")
    made = (folder / "daemon.log").stat()
    assert (made.st_uid, made.st_gid) == (12_344, 12_345)


@pytest.mark.asyncio
async def test_what_keeps_failing_is_said_once_and_ends_nobody(tmp_path, monkeypatch):
    full, other = OSError(28, "No space left on device"), RuntimeError("can't start new thread")
    outcomes = iter([full, full, None, full, other, other])
    done = anyio.Event()

    def tend(path):
        outcome = next(outcomes, "over")
        if outcome == "over":
            anyio.from_thread.run_sync(done.set)
        elif outcome is not None:
            raise outcome

    monkeypatch.setattr(log_file, "EVERY_S", 0)
    monkeypatch.setattr(log_file, "tend", tend)
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(log_file.watch, tmp_path / "daemon.log")
            await done.wait()
            tasks.cancel_scope.cancel()
    assert [(entry["event"], entry["reason"]) for entry in logs] == [
        ("log_not_begun_anew", str(error)) for error in (full, full, other)
    ]


@pytest.mark.e2e
def test_a_daemon_begins_its_log_anew_and_goes_on_writing(tmp_path):
    folder, limit = tmp_path / "state", 64_000_000
    folder.mkdir(mode=0o700)
    (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{folder}"\nlisten = ""\n')
    (folder / "daemon.log").touch(0o600)
    os.truncate(folder / "daemon.log", limit + 1)  # it takes no room: it is a hole

    def typed(*words):
        words = [sys.executable, "-m", "rollmuxd", "daemon", *words, "--config", tmp_path / "rollmux.toml"]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S)
        assert ran.returncode == 0, ran.stderr
        return json.loads(ran.stdout)

    def begun_anew():
        log = (folder / "daemon.log").stat()
        return log.st_size <= limit and all(os.path.samestat(os.stat(f"/proc/{pid}/fd/{at}"), log) for at in (1, 2))

    pid = typed("start", "--json")["pid"]
    try:
        until = time.monotonic() + PATIENCE_S
        while not begun_anew():
            assert time.monotonic() < until
            time.sleep(0.05)
    finally:
        typed("stop", "--json")
    last = (folder / "daemon.log").read_text()
    with (folder / "daemon.log.1").open() as before:
        before.seek(limit + 1)
        events = [line.partition("] ")[2].split()[0] for line in (before.read() + last).splitlines()]
    for said in ("daemon_started", "ready", "log_begun_anew", "stopped"):
        assert events.count(said) == 1, (said, events)
    assert "] stopped" in last
