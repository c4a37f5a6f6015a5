"""The demo around its figures: what it plans, draws, reports, refuses, and how its processes end."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from command_line import typed
from rich.console import Console

from rollmuxd.cli.common import Failed
from rollmuxd.client.errors import NoDaemon
from rollmuxd_demo import command, live, reached, run, show, spin
from rollmuxd_demo.children import Children, environment
from rollmuxd_demo.measure import JobRecord, Phase, RunRecord, result


def fact(kind, at, **fields):
    return {"fact": kind, "at": round(at * 1000), **fields}


def registered(job, name):
    return fact("job_registered", 0, job=job, spec={"name": name})


def stay(slot, job, phase, asked, granted=None, released=None):
    told = [fact("slot_queued", asked, slot=slot, job=job, phase=phase)]
    if granted is not None:
        told += [fact("slot_claimed", granted, slot=slot), fact("slot_granted", granted, slot=slot)]
    if released is not None:
        told.append(fact("slot_released", released, slot=slot))
    return told


# ---- planning ------------------------------------------------------------------------------------------------------


def test_jobs_cycle_through_the_shapes_and_each_has_a_name_and_a_seed_of_its_own():
    planned = run.plan_jobs(5)

    assert [job.shape for job in planned[3:]] == [job.shape for job in planned[:2]]
    assert len({job.name for job in planned}) == len({job.seed for job in planned}) == 5
    assert all(job.script.is_file() for job in planned)


def test_a_folder_with_something_in_it_is_not_written_into(tmp_path):
    (tmp_path / "thesis.tex").write_text("...")

    ran = typed(f"demo --keep {tmp_path}")

    assert ran.code == 1
    assert "is not empty" in ran.err
    assert [file.name for file in tmp_path.iterdir()] == ["thesis.tex"]


def test_the_demos_configuration_is_one_that_the_daemon_takes(tmp_path):
    from rollmuxd.daemon.settings import load_settings

    file = tmp_path / "rollmux.toml"
    quoted = tmp_path / 'with "quotes"'
    file.write_text(run.configuration(quoted, tmp_path / "d.sock", reached.Host().tables(quoted)))

    settings = load_settings(file)

    assert settings.daemon.listen == "127.0.0.1:0"
    assert settings.daemon.state_dir == tmp_path / 'with "quotes"' / "state"
    assert [(node.gpus, node.pools) for node in settings.hosts[0].nodes] == [((0,), ("rollout",)), ((1,), ("train",))]


def test_without_the_projects_tests_a_server_is_not_looked_for_and_a_checkout_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(reached, "ELSEWHERE", tmp_path / "tests" / "demo_hosts.py")

    with pytest.raises(Failed, match=r"there is no .*demo_hosts.py.*in a checkout"):
        reached.reach("ssh", tmp_path / "run", Children())
    assert not (tmp_path / "run").exists()


def test_children_have_one_numeric_thread_and_none_of_the_users_rollmuxd(monkeypatch):
    monkeypatch.setenv("ROLLMUX_URL", "http://production:7878")
    monkeypatch.setenv("ROLLMUX_API_KEY", "rmx_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "64")

    env = environment(ROLLMUX_REQUIRED="1")

    assert {name: value for name, value in env.items() if name.startswith("ROLLMUX_")} == {"ROLLMUX_REQUIRED": "1"}
    assert env["OMP_NUM_THREADS"] == env["OPENBLAS_NUM_THREADS"] == "1"


# ---- processes -----------------------------------------------------------------------------------------------------

STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
time.sleep(600)
"""


def gone(pid):
    for _ in range(2_000):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        time.sleep(0.02)
    return False


def test_whatever_happens_no_process_is_left_not_even_those_that_refuse(monkeypatch):
    monkeypatch.setattr(Children.end, "__defaults__", (0.2,))
    with pytest.raises(KeyboardInterrupt), Children() as children:
        child = children.start(
            [sys.executable, "-c", STUBBORN], env=environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        grandchild = int(child.stdout.readline())
        raise KeyboardInterrupt
    child.stdout.close()

    assert child.returncode == -9
    assert gone(grandchild)


def test_a_sigterm_ends_the_processes_and_is_the_exit_status():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as ended, Children() as children:
        child = children.start(
            [sys.executable, "-c", "import time; time.sleep(600)"],
            env=environment(),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.kill(os.getpid(), signal.SIGTERM)

    assert (ended.value.code, child.returncode) == (128 + signal.SIGTERM, -signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_violations_are_read_from_the_mock_backends_own_record(tmp_path):
    witness = tmp_path / "witness.jsonl"
    lines = [{"event": "load"}, {"event": "violation", "why": "two jobs"}, {"event": "clean"}]
    witness.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"event": "viola')

    assert run.violations(witness) == [lines[1]]
    assert run.violations(tmp_path / "none.jsonl") == []


# ---- what is shown meanwhile ---------------------------------------------------------------------------------------


LOOK = {
    "at": "2026-01-01T00:00:00Z",
    "pools": [],
    "groups": [],
    "jobs": [],
    "slots": [{"slot": "s1", "job": "j1", "name": "sort", "phase": "rollout", "status": "running", "owner": "me"}],
    "nodes": [
        {"node": f"h/gpu{at}", "pools": [pool], "status": "up", "group": "g1", "states": {}, "gpus": [gpu]}
        for at, (pool, gpu) in enumerate(
            (("rollout", {"holder": "s1", "dirty_by": "j1"}), ("train", {"holder": None, "dirty_by": None}))
        )
    ],
}


@pytest.fixture
def one_look(monkeypatch):
    """A daemon that is there for one look, and is killed then."""
    looks = [LOOK]

    class Watch:
        def __init__(self, call, owner):
            assert call.url == "unix:///nowhere"

        def look(self):
            if not looks:
                raise NoDaemon("it was killed")
            return looks.pop()

    monkeypatch.setattr(live, "Watch", Watch)
    monkeypatch.setattr(live, "DRAW_EVERY_S", 0.0)
    monkeypatch.setattr(live, "SAY_EVERY_S", 0.0)


def test_without_a_terminal_the_run_is_told_in_lines(capsys, monkeypatch, one_look):
    monkeypatch.setitem(LOOK, "jobs", [{"job": "j1", "name": "sort"}])
    lines = live.Lines("two jobs at once", err=True)
    lines.begins("unix:///nowhere")
    for reward in (0.25, 0.5):
        lines.saw(run.Iterated("sort", {"step": 0, "reward": reward}))
    lines.tick()
    lines.tick()
    lines.saw(run.Exited("sort", 0))
    lines.saw(run.Exited("sum", 3))

    said = capsys.readouterr()

    assert said.out == ""
    assert said.err.splitlines()[0] == "two jobs at once"
    assert [line.partition(" s  ")[2] for line in said.err.splitlines()[1:]] == [
        "rollout: sort rollout; train: -; sort 2, reward 0.25 to 0.50",
        "sort 2, reward 0.25 to 0.50",
        "sort is done",
        "sum is failed (3)",
    ]


def test_on_a_terminal_the_run_is_shown_as_by_top_also_while_its_daemon_is_away(monkeypatch, one_look):
    drawn = []
    with live.Screen("two jobs at once") as screen:
        monkeypatch.setattr(screen._live, "update", lambda picture, refresh: drawn.append(picture))
        screen.tick()
        assert drawn == [], "there is no daemon yet"
        screen.begins("unix:///nowhere")
        screen.saw(run.Iterated("sort", {"step": 0, "reward": 0.5}))
        screen.tick()
        screen.tick()

    console = Console(width=120, color_system=None)
    with console.capture() as capture:
        console.print(*drawn)
    assert len(drawn) == 1
    assert "rollmuxd top" in capture.get()
    assert "sort 1, reward 0.50 to 0.50" in capture.get()


# ---- the report ----------------------------------------------------------------------------------------------------


def a_record(name, sha256="a" * 64):
    phases = (Phase(name, 0, "rollout", 0.0, 2.0), Phase(name, 0, "train", 2.0, 5.0))
    return JobRecord(name, 1, (0.25, 0.75), sha256, phases)


def a_run(*records):
    told = []
    for record in records:
        told += [registered(record.name, record.name), *stay(f"s-{record.name}", record.name, "train", 0, 1, 6)]
    return RunRecord(records, tuple(told))


def test_the_report_names_the_times_the_bound_the_gain_and_the_weights(capsys):
    shared, alone = a_run(a_record("sort"), a_record("sum")), a_run(a_record("sort"), a_record("sum"))
    figures = result(shared, alone, scale=0.5, gain=1.9, cores=2)

    show.report(figures, shared, alone)

    out = capsys.readouterr().out
    assert "\x1b" not in out
    for words in (
        "all jobs at once",
        "6.0 s",
        "12.0 s",
        "2.00",
        "two cores here do 1.90 times the work of one",
        "bit for bit",
        "AAAA",
    ):
        assert words in out


def test_with_one_core_the_report_says_that_nothing_can_be_gained(capsys):
    shared = a_run(a_record("sort"))

    show.report(result(shared, shared, scale=0.5, gain=None, cores=1), shared, shared)

    assert "one core only" in capsys.readouterr().out


def test_where_the_cores_could_not_be_measured_the_report_says_so(capsys):
    shared = a_run(a_record("sort"))

    show.report(result(shared, shared, scale=0.5, gain=None, cores=2), shared, shared)

    out = capsys.readouterr().out
    assert "too busy to measure" in out
    assert "one core only" not in out


def test_the_rate_of_a_window_that_is_over_is_0():
    before = os.sched_getaffinity(0)
    try:
        assert spin.rate(run.cores()[0], time.monotonic() - 60, 1.0) == 0
    finally:
        os.sched_setaffinity(0, before)


def test_the_gain_of_two_cores_is_measured_by_processes_that_begin_together():
    if len(run.cores()) < 2:
        pytest.skip("one core only")

    assert run.measure_core_gain(rounds=2, seconds=0.1) > 0


def test_without_the_second_run_the_report_compares_nothing(capsys):
    shared = a_run(a_record("sort"))

    show.report(result(shared, None, scale=0.5, gain=1.9, cores=2), shared, None)

    assert "not compared" in capsys.readouterr().out


# ---- the whole, with its processes played --------------------------------------------------------------------------


@pytest.fixture
def played(monkeypatch):
    """The demo without processes: what each run is to bring, to be changed by the test."""
    runs = {"at-once": a_run(a_record("sort")), "in-turn": a_run(a_record("sort")), "violations": []}
    monkeypatch.setattr(run, "measure_core_gain", lambda: 1.9)
    monkeypatch.setattr(run.Run, "at_once", lambda self: bring(runs["at-once"]))
    monkeypatch.setattr(run.Run, "in_turn", lambda self: bring(runs["in-turn"]))
    monkeypatch.setattr(run, "violations", lambda path: runs["violations"] if "at-once" in str(path) else [])
    return runs


def bring(what):
    if isinstance(what, Exception):
        raise what
    return what


def test_a_good_run_is_0_and_json_is_one_object_on_stdout(played):
    ran = typed("demo --json --scale 0.5")

    assert ran.code == 0
    wanted = {"wall_s", "sequential_wall_s", "lower_bound_s", "first_fill_s", "speedup", "core_gain", "jobs"}
    wanted |= {"weights_identical", "ratio_to_bound", "utilisation", "switches", "scale"}
    assert wanted <= set(ran.json)
    assert ran.json["weights_identical"] is True


def test_weights_that_differ_fail_the_demo_and_name_the_job(played):
    played["in-turn"] = a_run(a_record("sort", sha256="b" * 64))

    ran = typed("demo --json --scale 0.5")

    assert ran.code == 1
    assert ran.json["weights_identical"] is False
    assert "the weights of sort differ" in ran.err


def test_what_the_witness_saw_fails_the_demo(played):
    played["violations"] = [{"event": "violation", "why": "j2 loads onto j1's bytes"}]

    ran = typed("demo --json --scale 0.5")

    assert ran.code == 1
    assert "j2 loads onto j1's bytes" in ran.err


def test_a_job_that_fails_is_named_with_the_end_of_its_stderr(played):
    played["at-once"] = run.JobFailed("sort", "ended with status 1", "MemoryError: no room")

    ran = typed("demo --scale 0.5")

    assert ran.code == 1
    assert "MemoryError: no room" in ran.err
    assert ran.err.splitlines()[-1].startswith("rollmuxd: job sort ended with status 1")


def test_what_is_kept_has_the_result_too(played, tmp_path):
    typed(f"demo --json --scale 0.5 --keep {tmp_path / 'new'}")

    assert json.loads((tmp_path / "new" / "result.json").read_text())["scale"] == 0.5


def test_two_jobs_are_too_few_for_the_three_shapes():
    assert typed("demo --jobs 2").code == 2


def test_nothing_wrong_is_found_where_nothing_was_compared():
    shared = a_run(a_record("sort"))
    figures = result(shared, None, scale=1, gain=None, cores=2)

    assert command.problems({**figures, "violations": []}) == []


def test_a_missing_numpy_is_told_with_the_remedy(monkeypatch):
    monkeypatch.setattr("rollmuxd.cli.common.find_spec", lambda name: None)

    found = CliRunner().invoke(command.demo)

    assert found.exit_code == 1
    assert "the demo's RL loops need numpy: pip install 'rollmuxd[demo]'" in found.output
