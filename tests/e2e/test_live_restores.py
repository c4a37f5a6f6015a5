"""A backup is restored while jobs live: what they have done since is not in it."""

import shutil
import sys
import time

import forked
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def journal(daemon, *words):
    command = [sys.executable, "-m", "rollmuxd", "journal", *words, "--state-dir", str(daemon.state)]
    forked.run(command, check=True, capture_output=True)


def restored(daemon, backup):
    daemon.stop()
    journal(daemon, "restore", backup)
    daemon.restart()


def test_gpus_that_a_job_was_given_after_the_backup_are_given_to_nobody_before_it_has_gone(live):
    daemon = live.daemon()
    a = live.holder("a")
    a.do("leave")
    journal(daemon, "backup", f"{live.folder}/backup")  # by which a's state is on the GPUs
    b = live.holder("b")
    assert b.happened("granted")[0]["gpus"] == ["mock/gpu0"]

    restored(daemon, f"{live.folder}/backup")
    over = a.fails("enter", phase="rollout")
    assert (over["error"], "was restored" in over["text"]) == ("JobEnded", True)
    c = live.trainer("c")
    c.do("start")
    asked = c.ask("enter", phase="rollout")
    live.until("c waits", lambda: daemon.waits("c"))

    time.sleep(1.2)  # at least two looks at the host, by its settings: b is still there
    assert c.done(asked) is None
    assert b.fails("leave")["error"] == "SlotLost"
    b.kill()
    c.answer(asked)
    c.do("leave")


def test_jobs_that_held_and_waited_when_the_backup_was_made_start_again_and_go_on(live):
    daemon = live.daemon()
    a = live.holder("a")
    b, asked = live.waiter("b")
    journal(daemon, "backup", f"{live.folder}/backup")
    a.do("leave")
    b.answer(asked)
    b.do("leave")

    restored(daemon, f"{live.folder}/backup")
    over = a.fails("enter", phase="train")
    assert (over["error"], "was restored" in over["text"]) == ("JobEnded", True)
    over = b.fails("enter", phase="train")
    assert (over["error"], "was restored" in over["text"]) == ("JobEnded", True)
    a.kill()
    b.kill()

    for name in ("a", "b"):
        again = live.trainer(name)
        again.do("loop", rounds=2, seconds=0.02)
        assert daemon.job(name)["run"] == 2


def test_who_lives_on_after_a_restore_that_left_nothing_is_taken_for_nobody_else(live):
    daemon = live.daemon()
    journal(daemon, "backup", f"{live.folder}/backup")
    a = live.holder("a")
    (session,) = daemon.facts("session_opened")

    restored(daemon, f"{live.folder}/backup")
    c = live.trainer("c")
    c.do("start")
    asked = c.ask("enter", phase="rollout")
    live.until("c waits", lambda: daemon.waits("c"))
    assert [opened["session"] != session["session"] for opened in daemon.facts("session_opened")] == [True]
    assert a.fails("leave")["error"] == "SlotLost"
    assert c.done(asked) is None
    a.kill()
    c.answer(asked)
    c.do("leave")


def begun_again(daemon):
    """The daemon is killed, its state directory is deleted, and it is started."""
    daemon.kill9()
    shutil.rmtree(daemon.state)
    daemon.restart()


def test_a_client_of_a_journal_that_is_gone_is_no_job_of_the_new_one(live):
    daemon = live.daemon()
    a = live.holder("a")
    (gone,) = daemon.facts("session_opened")

    begun_again(daemon)
    b = live.trainer("b")
    b.do("start")
    (mine,) = daemon.facts("session_opened")
    assert (mine["session"], mine["job"]) == (gone["session"], gone["job"]), "ids are given again"
    asked = b.ask("enter", phase="rollout")
    live.until("b waits", lambda: daemon.waits("b"))

    assert b.done(asked) is None, "a is still there"
    lost = a.fails("leave")
    assert (lost["error"], "another" in lost["text"] or "not the one" in lost["text"]) == ("SlotLost", True)
    over = a.fails("enter", phase="train")
    assert (over["error"], "register again" in over["text"]) == ("JobEnded", True)
    assert b.done(asked) is None
    assert daemon.job("b")["session"] == mine["session"]
    a.kill()
    b.answer(asked)
    b.do("leave")
    assert len(daemon.facts("slot_queued")) == 1


def test_a_damaged_log_after_a_kill_loses_every_run_and_no_gpu_gets_two_holders(live):
    daemon = live.daemon()
    a = live.holder("a")
    daemon.kill9()
    log = daemon.state / "journal.sqlite3-wal"
    content = bytearray(log.read_bytes())
    content[len(content) // 2] ^= 1
    log.write_bytes(content)
    checked = forked.run(
        [sys.executable, "-m", "rollmuxd", "journal", "check", "--state-dir", str(daemon.state)],
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 1
    assert "lost its end" in checked.stdout + checked.stderr

    daemon.restart()
    (started, *_) = reversed(daemon.facts("daemon_started"))
    assert started["lost"]["code"] == "facts_missing"
    b = live.trainer("b")
    b.do("start")
    asked = b.ask("enter", phase="rollout")
    live.until("b waits", lambda: daemon.waits("b"))
    assert a.fails("leave")["error"] == "SlotLost"
    assert b.done(asked) is None
    a.kill()
    b.answer(asked)
    b.do("leave")
