"""A short storm in the default tests (the long one: ``make -s chaos``); and the oracle, seeing what is wrong."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from patience import PATIENCE_S

STORM = Path(__file__).with_name("storm.py")


@pytest.mark.e2e
@pytest.mark.slow
def test_a_short_storm_loses_nothing_and_everybody_finishes():
    with blowing("--budget", "18", "--clients", "8", "--seed", "short") as ended:
        # What the storm itself allows to its parts adds up to less, with its start and its verdict.
        stdout, stderr = ended.communicate(timeout=PATIENCE_S)

    assert stdout, stderr[-3000:]
    found = json.loads(stdout)
    assert (found["violations"], found["lost"]) == (0, 0), found["what"]
    assert ended.returncode == 0
    # It has blown, and there was something to blow upon.
    assert found["kills"] >= 1
    assert found["acknowledged"]["granted"] > 8
    assert found["acknowledged"]["ended"] == 8
    assert found["facts_followed"] > 100
    # Drivers and backends have failed, and the daemon knows of it: else they would have been let off.
    assert found["faults"]["injected"] > 0
    assert found["faults"]["known"] > 0


@pytest.mark.e2e
@pytest.mark.slow
def test_a_storm_that_is_told_to_stop_leaves_no_process_behind(tmp_path):
    with blowing("--budget", "300", "--clients", "2", "--seed", "stop", "--keep", str(tmp_path)) as storm:
        while not any(path.stat().st_size for path in tmp_path.glob("c*.jsonl")):
            assert storm.poll() is None, storm.communicate()
            time.sleep(0.1)
        assert len(at_work_in(tmp_path)) >= 2, "the daemon and a client"
        storm.terminate()
        storm.communicate(timeout=PATIENCE_S)
        assert storm.returncode == 128 + signal.SIGTERM
        until = time.monotonic() + PATIENCE_S
        while left := at_work_in(tmp_path):
            assert time.monotonic() < until, left
            time.sleep(0.1)


@contextmanager
def blowing(*arguments):
    """A storm's process, of which nothing is left afterwards: it ends what it has started, and is given time for it."""
    storm = subprocess.Popen(
        [sys.executable, str(STORM), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    with storm:
        try:
            yield storm
        finally:
            if storm.poll() is None:
                storm.terminate()
                with suppress(subprocess.TimeoutExpired):
                    storm.communicate(timeout=PATIENCE_S)
            with suppress(ProcessLookupError):
                os.killpg(storm.pid, signal.SIGKILL)


def at_work_in(folder):
    """The processes whose folder it is, with what they run."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if (process / "cwd").readlink() == folder:
                found[process.name] = (process / "cmdline").read_text().split("\0")[:4]
    return found


# ---- the oracle ------------------------------------------------------------------------------------------------------


def load(job, at, *, gpu="h/gpu0", mb=2000, event="load", pid=1):
    return {
        "event": event,
        "gpu": gpu,
        "job": job,
        "name": job,
        "run": 1,
        "pool": "p",
        "mb": mb,
        "mono": at,
        "pid": pid,
    }


def test_the_oracle_sees_a_load_onto_anothers_bytes(oracle):
    witness = [load("a", 1.0), load("b", 2.0, pid=2)]

    assert oracle.two_on_a_gpu(witness, {}) == ["b was loaded onto h/gpu0, where [('a', 1, 'p')] were"]
    assert oracle.two_on_a_gpu([load("a", 1.0), load("a", 1.5, event="park", mb=0), load("b", 2.0)], {}) == []
    assert oracle.two_on_a_gpu(witness, {1: 1.5}) == [], "its process was dead by then"


def test_the_oracle_sees_two_clients_that_hold_a_gpu_at_a_time(oracle):
    held = [("h/gpu0", 1.0, 3.0, "a"), ("h/gpu0", 2.0, 4.0, "b"), ("h/gpu1", 2.0, 4.0, "c")]

    (one,) = oracle.overlaps(held)
    assert one == "h/gpu0: a held it from 1.000 to 3.000, and b from 2.000"
    assert oracle.overlaps([("h/gpu0", 1.0, 2.0, "a"), ("h/gpu0", 2.0, 4.0, "b")]) == []


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ({"event": "granted", "slot": "s1", "fence": "1.2"}, {"fact": "slot_granted", "slot": "s1", "fence": [1, 2]}),
        ({"event": "released", "slot": "s1"}, {"fact": "slot_released", "slot": "s1"}),
        ({"event": "queued", "slot": "s1"}, {"fact": "slot_queued", "slot": "s1"}),
        ({"event": "ended", "job": "j1"}, {"fact": "job_ended", "job": "j1"}),
    ],
)
def test_the_oracle_misses_what_was_acknowledged(oracle, line, fact):
    assert oracle.acknowledged({"a": [line]}, [fact]) == []
    assert len(oracle.acknowledged({"a": [line]}, [])) == 1
    assert len(oracle.acknowledged({"a": [line]}, [{**fact, "slot": "s9", "job": "j9"}])) == 1


def test_the_oracle_misses_a_fact_that_the_feed_has_shown(oracle):
    facts = [{"seq": 1, "fact": "x"}, {"seq": 2, "fact": "y"}]

    assert oracle.unfollowed({1: "x", 2: "y"}, facts, lambda fact: fact["fact"]) == []
    assert len(oracle.unfollowed({2: "z"}, facts, lambda fact: fact["fact"])) == 1
    assert len(oracle.unfollowed({3: "z"}, facts, lambda fact: fact["fact"])) == 1


def slots(*facts):
    return [
        {"seq": number, "at": number, "fact": f"slot_{kind}", "slot": slot, **more}
        for number, (kind, slot, more) in enumerate(facts, 1)
    ]


def test_the_oracle_reads_the_journal_for_itself(oracle):
    mine = {"gpus": ["g"], "turn": 0}
    good = slots(
        ("queued", "s1", {}), ("claimed", "s1", mine), ("granted", "s1", {"fence": [1, 1]}), ("released", "s1", {}),
        ("over", "s1", {}), ("claimed", "s2", mine), ("granted", "s2", {"fence": [1, 2]}),
    )  # fmt: skip

    assert oracle.journal(good) + oracle.claims(good) == []
    assert oracle.journal(good[1:]), "a hole"
    assert oracle.journal(slots(("claimed", "s", mine), ("over", "s", {}), ("granted", "s", {"fence": [1, 1]})))
    assert oracle.journal([*good, {**good[-1], "seq": 8, "slot": "s3", "fence": [1, 2]}]), "a fence twice"
    assert oracle.journal([*good[:-1], {**good[-1], "at": 0}]), "back in time"
    assert oracle.claims([fact for fact in good if fact["fact"] != "slot_over"])
    assert oracle.fences({"a": [{"event": "granted", "fence": fence, "slot": fence} for fence in ("1.2", "1.1")]})


def test_the_oracle_counts_the_faults_that_were_met_and_those_that_the_journal_knows(oracle):
    one = '{"do":"lose","method":"park","host":"h1","times":1,"id":"f1"}'
    other = one.replace("f1", "f2")
    hang = '{"do":"hang","method":"load","host":"h1","times":1,"id":"f3"}'
    assert oracle.faults_met([{"fired": {one: 1, other: 2}}, {"fired": {hang: 1}}]) == {"park lose": 3, "load hang": 1}
    assert oracle.faults_met([{"fired": {}}]).total() == 0

    facts = [
        {"fact": "order_contact_lost", "error": "park on h1: fault lose was injected"},
        {"fact": "order_contact_lost", "error": "no answer within 6 s"},
        {"fact": "order_faulted", "error": "its process has died"},
        {"fact": "job_quarantined", "reason": "no word of it: park on h1: fault lose was injected"},
        {"fact": "node_lost", "reason": "observe on h1: fault fail was injected"},
    ]
    assert oracle.faults_known(facts) == {"order_contact_lost": 2, "node_lost": 1}


def test_the_oracle_asks_why_a_session_was_lost(oracle):
    facts = [{"fact": "session_opened", "session": "e1", "pid": 7}, {"fact": "session_lost", "session": "e1"}]

    assert oracle.unprovoked(facts, {7: oracle.Process("a", 7, 9.0, False)})
    assert oracle.unprovoked(facts, {7: oracle.Process("a", 7, 9.0, True)}) == []
