"""``sim validate`` and ``sim calibrate``: each figure has a value and a bar, and a bad log is refused by its place."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollmuxd.cli.main import cli
from rollmuxd.cli.sim.rollout import show_checks
from rollmuxd.rollout import calibrate
from rollmuxd.rollout.engine import Engine, Replica, Request, Tuning
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd.sim import validate
from rollmuxd.sim.rollouts.batches import AIME

LINE = '{"input_toks":100,"output_toks":50,"queued_ts":5.0,"last_token_ts":7.5}\n'


def run(*words):
    return CliRunner().invoke(cli, ["sim", *words])


DATA = Path(__file__).parents[3] / "shared" / "data"


@pytest.mark.slow
def test_every_figure_is_within_its_bar(monkeypatch):
    """With the lengths of AIME where they are: they are not shipped."""
    monkeypatch.delenv("ROLLMUX_DATA", raising=False)
    there = (DATA / AIME).is_file()
    result = run("validate", *(["--data", str(DATA)] if there else []), "--json")
    told = json.loads(result.output)
    missed = [it["check"].split(" ")[0] for it in told["checks"] if not it["ok"]]
    assert (result.exit_code, told["ok"], missed) == (0, True, [] if there else ["V8"])
    rows = {it["check"].split(" ")[0].rstrip(":") for it in told["checks"]}
    assert rows >= {"V1", "V2", "V3", "V4", "V5", "V6", "V7", "V8", "V9", "S1"}
    assert any(name.startswith("V10") for name in told["reported"])
    assert "held out" in told["reported"]["V1 qwen3-32b_rtx-pro-6000"]
    (ahead,) = (it for it in told["checks"] if it["check"].startswith("V5"))
    assert (ahead["bar"], ahead["note"]) == ([13, None], "of 19; 13 is 15 of 23, rounded up")


def test_where_there_are_no_lengths_a_check_is_skipped_which_fails_nothing(monkeypatch):
    monkeypatch.delenv("ROLLMUX_DATA", raising=False)
    for others in ("_v3", "_v4_v5_v10", "_v7", "_v9"):
        monkeypatch.setattr(validate, others, lambda found: None)
    monkeypatch.setattr(validate, "_v1", lambda found: [0.0])
    monkeypatch.setattr(validate, "_v2", lambda found: 0.0)
    monkeypatch.setattr(validate, "_v6", lambda found: [0.0])
    result = run("validate", "--json")
    told = json.loads(result.output)
    skipped, mean = told["checks"]
    assert (result.exit_code, told["ok"], mean["ok"]) == (0, True, True)
    assert (skipped["check"].split(" ")[0], skipped["value"], skipped["ok"]) == ("V8", None, None)
    assert skipped["note"] == f"neither --data nor $ROLLMUX_DATA names a folder with {AIME}"


def test_a_folder_that_is_named_has_to_have_the_lengths(tmp_path):
    refused = run("validate", "--data", str(tmp_path / "nowhere"))
    assert refused.exit_code != 0
    assert f"{AIME} is not there: looked for {tmp_path / 'nowhere' / AIME}" in " ".join(refused.output.split())


def test_a_skipped_check_is_shown_as_such(capsys):
    found = validate.Validation([], {})
    validate._v8(found, None)
    assert found.ok
    show_checks(found.checks)
    line = capsys.readouterr().out.splitlines()[-1]
    assert line.startswith("V8 AIME")
    assert "skipped  neither --data nor" in line


def test_lengths_that_cannot_be_read_are_refused_before_anything_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(validate, "_v1", None)
    (tmp_path / AIME).parent.mkdir()
    (tmp_path / AIME).write_text("prompt_id,output_tokens\n")
    result = run("validate", "--data", str(tmp_path))
    assert result.exit_code == 1
    assert f"{tmp_path / AIME}, line 2, column 'output_tokens': no row is there" in result.output


def test_an_engine_that_is_slower_than_its_model_misses_the_bar(monkeypatch):
    monkeypatch.setattr(validate, "H100_MS", 30.0)
    found = validate.Validation([], {})
    assert validate._v2(found) == pytest.approx(0.29, abs=0.02)
    assert not found.ok


def test_constants_are_found_again_from_a_log_that_was_made_with_them():
    true = Tuning(weights=0.7, prefill=0.4, step_s=0.005)
    engine = Engine(gpu("h100"), model("qwen2.5-7b"), 1, true)
    replica = Replica(engine)
    asked = [Request(i, 300 + 40 * (i % 50), 100 + 13 * (i % 37), i * 0.05) for i in range(200)]
    replica.submit(asked)
    ends = {name: when for when, name in replica.advance()}
    served = [calibrate.Served(it.prompt, it.length, it.arrives, ends[it.id]) for it in asked]
    case = calibrate.Case(Engine(gpu("h100"), model("qwen2.5-7b"), 1), served)
    assert abs(calibrate.compare(case).makespan) > 0.02
    found = calibrate.fit([case])
    assert calibrate.compare(case, found).latency < 0.01
    assert found.prefill == pytest.approx(0.4, rel=0.25)


def test_a_log_gives_its_requests_by_arrival_from_zero():
    later = LINE.replace("5.0", "4.0")
    first, second, *_ = calibrate.parse([LINE, "\n", later, *[LINE] * 18], "a.jsonl")
    assert (first.arrives, second.arrives, second.ends) == (0.0, 1.0, 3.5)


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([LINE, "{nope}\n"], "a.jsonl, line 2: no JSON object"),
        (["[1]\n"], "a.jsonl, line 1: expected a JSON object with input_toks"),
        ([LINE.replace('"output_toks":50,', "")], "line 1, key 'output_toks': it is missing"),
        ([LINE.replace("100", '"many"')], "line 1, key 'input_toks': many is there, expected a whole number"),
        ([LINE.replace("50", "0")], "line 1, key 'output_toks': 0 is there"),
        ([LINE.replace("50", "true")], "line 1, key 'output_toks': True is there"),
        ([LINE.replace("7.5", "4.0")], "line 1, key 'last_token_ts': it is before queued_ts"),
        ([LINE.replace("50", "1000000000")], "key 'output_toks': at most 1,000,000 tokens of a request are read"),
        ([LINE.replace("50", "999000")] * 201, "line 201: at most 200,000,000 tokens are read"),
        ([], "a.jsonl: it has no request"),
        ([LINE] * 19, "a.jsonl: it has 19 requests; at least 20 are needed to fit three constants"),
    ],
)
def test_a_log_that_cannot_be_read_is_refused_by_line_and_key(lines, says):
    with pytest.raises(calibrate.BadLog) as refused:
        calibrate.parse(lines, "a.jsonl")
    assert says in str(refused.value)


def test_a_log_that_says_its_constants_is_fitted_with_ok_and_taken_by_sim_rollout(tmp_path):
    log, tuned = tmp_path / "a.jsonl", tmp_path / "tuning.json"
    replica = Replica(Engine(gpu("h100"), model("qwen2.5-7b"), 1, Tuning(weights=0.7, prefill=0.4, step_s=0.005)))
    asked = [Request(i, 300 + 40 * (i % 50), 100 + 13 * (i % 37), i * 0.05) for i in range(60)]
    replica.submit(asked)
    ends = {name: when for when, name in replica.advance()}
    keys = ("input_toks", "output_toks", "queued_ts", "last_token_ts")
    rows = [dict(zip(keys, (it.prompt, it.length, it.arrives, ends[it.id]), strict=True)) for it in asked]
    log.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    fitted = run("calibrate", "--log", str(log), "--model", "qwen2.5-7b", "--hardware", "h100", "--json")
    told = json.loads(fitted.stdout)
    assert (fitted.exit_code, told["ok"], told["at_bounds"], fitted.stderr) == (0, True, {}, "")
    tuned.write_text(fitted.stdout)
    small = ["rollout", "--prompts", "4", "--samples", "2", "--nodes", "1", "--policies", "start", "--json"]
    assert run(*small, "--tuning", str(tuned)).exit_code == 0


def test_the_command_fits_a_log_and_refuses_what_it_does_not_know(tmp_path):
    log = tmp_path / "a.jsonl"
    log.write_text(20 * LINE)
    words = ["calibrate", "--log", str(log), "--model", "qwen2.5-7b"]
    fitted = run(*words, "--hardware", "h100", "--json")
    told = json.loads(fitted.stdout)
    assert told["requests"] == 20
    # requests that are all alike do not tell what reading weights takes from what a step does
    assert (fitted.exit_code, told["ok"], {*told["at_bounds"]} <= {*told["tuning"]}) == (1, False, True)
    assert told["at_bounds"]
    assert "is as far as it may go" in fitted.stderr
    assert "(--model, --hardware, --tp, --max-seqs, --kv-tokens)" in fitted.stderr
    assert told["after"]["latency"] <= told["before"]["latency"]
    assert "weights =" in run(*words, "--hardware", "h100").output
    tuned = tmp_path / "tuning.json"
    small = ["rollout", "--prompts", "4", "--samples", "2", "--nodes", "1", "--policies", "start", "--json"]
    plain = json.loads(run(*small).output)["rows"][0]["seconds"]
    tuned.write_text(json.dumps({"tuning": {"step_s": 0.02}}))
    slower = json.loads(run(*small, "--tuning", str(tuned)).output)["rows"][0]
    assert (slower["c_step_ms"], slower["seconds"] > 1.5 * plain) == (20.0, True)
    for body, key in (
        ("nothing", "line 1, key 'tuning'"),
        ("{}", "line 1, key 'tuning'"),
        ('{"tuning":\n {"weights": "all"}}', "line 2, key 'tuning.weights'"),
        ('{"tuning": {"weights": 7}}', "line 1, key 'tuning.weights'"),
        ('{"tuning": {"layer_s": -1}}', "line 1, key 'tuning.layer_s'"),
        ('{"tuning": {"wieghts": 0.7}}', "line 1, key 'tuning.wieghts'"),
        (fitted.stdout, "line 1, key 'ok': it is false: a constant ended at a bound of the fit"),
    ):
        tuned.write_text(body)
        refused = run(*small, "--tuning", str(tuned))
        assert refused.exit_code != 0
        assert f"{tuned}, {key}" in refused.output
    assert "no figures are known for GPU 'abacus'" in run(*words, "--hardware", "abacus").output
    log.write_text("{}\n")
    refused = run(*words, "--hardware", "h100")
    assert refused.exit_code != 0
    assert f"{log}, line 1, key 'input_toks': it is missing" in refused.output
