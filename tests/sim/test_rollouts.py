"""Inside one rollout: every policy finishes every response, moves lose no token, and the two baselines are there."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from rollmuxd.cli.main import cli
from rollmuxd.rollout.lengths import fit
from rollmuxd.rollout.plan import Gate
from rollmuxd.sim.rollouts import run as run_module
from rollmuxd.sim.rollouts import study
from rollmuxd.sim.rollouts.batches import AIME, Lengths, read
from rollmuxd.sim.rollouts.run import Policy, Setting, play
from rollmuxd.sim.rollouts.tail_batching import Rounds
from rollmuxd.sim.workload import Malformed

SMALL = Setting(nodes=2, prompts=8, samples=4)
DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(
    not (DATA / AIME).is_file(), reason=f"the lengths of AIME are not shipped: ../shared/data/{AIME} is not there"
)


def one(policy, setting=SMALL, lengths="skythought", seed=0):
    source = read(lengths)
    before, batch = (source.draw(setting.prompts, setting.samples, f"{seed} {i}") for i in (0, 1))
    return batch, play(setting, policy, batch, fit(before, source.limit), seed)


@pytest.mark.parametrize("name", ["static-tp2", "start", "proactive", "reactive", "full", "clairvoyant"])
def test_every_response_is_finished_with_all_its_tokens(name):
    policy = next(it for it in study._KNOWN if it.name == name)
    setting = Setting(nodes=2, prompts=8, samples=4, slower=(3.0, 1.0), gate=Gate(least_share=0.01, dwell_s=0, most=9))
    batch, result = one(policy, setting)
    lengths = [length for group in batch for length in group]
    assert all(end > 0 for end in result.ends)
    assert result.seconds == max(result.ends)
    # a request's last span ends with all its tokens, wherever the earlier ones were
    last = {span.request: span for span in sorted(result.spans, key=lambda it: it.ends)}
    assert [last[i].tokens for i in range(len(lengths))] == lengths
    assert sum(span.ends > 0 for span in result.spans) == len(lengths) + result.moves + _cut_by(result)


def _cut_by(result):
    """Requests that a change of the degree moved."""
    return sum(span.ends == switch.at for switch in result.switches for span in result.spans if span.ends == switch.at)


def test_moves_help_where_a_node_is_slow_and_are_few_where_none_is():
    slow = Setting(nodes=2, prompts=16, samples=8, slower=(1.5, 1.0))
    start, reactive = Policy("start", ""), Policy("reactive", "", moves=True)
    with_moves = one(reactive, slow)[1]
    assert one(start, slow)[1].seconds > 1.15 * with_moves.seconds
    assert with_moves.moves > 10
    alike = Setting(nodes=2, prompts=16, samples=8)
    assert one(reactive, alike)[1].moves < 10


def test_nobody_says_that_a_node_is_slow_and_its_tokens_do(monkeypatch):
    slow = Setting(nodes=2, prompts=16, samples=8, slower=(1.5, 1.0))
    reactive = Policy("reactive", "", moves=True)
    seen = []
    slower = run_module._Watched.slower
    monkeypatch.setattr(run_module._Watched, "slower", lambda *args: seen.append(slower(*args)) or seen[-1])
    watched = one(reactive, slow)[1].seconds
    assert seen[0] == (1.0, 1.0)  # before the first look nothing is known
    assert seen[10] == pytest.approx((1.5, 1.0), rel=0.1)
    monkeypatch.setattr(run_module._Watched, "slower", lambda *args: (1.0, 1.0))
    assert one(reactive, slow)[1].seconds > 1.1 * watched


def test_clairvoyance_is_never_slower_than_the_best_static_degree(tmp_path):
    lengths = tmp_path / "mine.csv"
    lengths.write_text("prompt,tokens\na,100\na,200\nb,50\n")
    for source in ("skythought", str(lengths)):
        setting = Setting(nodes=1, prompts=8, samples=4)
        statics = [one(Policy("", "", degree), setting, source)[1].seconds for degree in (1, 2, 4, 8)]
        assert one(study._PLAIN["clairvoyant"], setting, source)[1].seconds <= min(statics)


def test_equal_seeds_give_equal_results():
    full = Policy("full", "", moves=True, changes=True)
    setting = Setting(nodes=2, prompts=8, samples=4, slower=(2.0, 1.0))
    assert one(full, setting)[1] == one(full, setting)[1]


@needs_data
def test_a_mix_has_half_of_its_prompts_from_each_source_and_is_cut():
    mix, aime = read("mix", str(DATA)), read("aime", str(DATA))
    batch = mix.draw(64, 16, "0")
    assert (len(batch), {len(group) for group in batch}) == (64, {16})
    known = {length for prompt in aime.sources[0] for length in prompt}
    assert 32 <= sum(set(group) <= known for group in batch) <= 40  # a few short ones are in both
    assert max(max(group) for group in batch) <= 16_000
    assert mix.draw(64, 16, "0") == batch != mix.draw(64, 16, "1")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("prompt,tokens\nA,12\nA,many\n", "line 3, column 'tokens': 'many' is there, expected a whole number"),
        ("prompt,tokens\nA,0\n", "line 2, column 'tokens'"),
        ("prompt,tokens\nA\n", "line 2, column 'prompt': 1 cells are there, expected 2"),
        ("prompt,length\nA,1\n", "line 1, column 'tokens': there is no such column"),
        ("prompt,tokens\n", "no row is there"),
        (b"prompt,tokens\n\xff,1\n", "is no UTF-8"),
    ],
)
def test_lengths_that_cannot_be_read_are_refused_by_file_line_and_column(tmp_path, body, says):
    path = tmp_path / "mine.csv"
    path.write_bytes(body if isinstance(body, bytes) else body.encode())
    with pytest.raises(Malformed, match=says) as refused:
        read(str(path))
    assert str(refused.value).startswith(f"{path}, line ")


@pytest.mark.parametrize("name", ["aime", "mix"])
def test_lengths_that_are_not_shipped_are_looked_for_in_the_data_folder(tmp_path, monkeypatch, name):
    monkeypatch.delenv("ROLLMUX_DATA", raising=False)
    small = ["--lengths", name, "--nodes", "1", "--prompts", "2", "--samples", "2", "--policies", "start"]
    code, output = run(*small)
    assert code != 0
    assert f"{AIME} is not there: neither --data nor $ROLLMUX_DATA names a data folder" in output
    assert "aime and mix need it, with the columns prompt_id and output_tokens" in output
    assert "skythought needs no file" in output
    assert f"looked for {tmp_path / AIME}" in run(*small, "--data", str(tmp_path))[1]

    (tmp_path / AIME).parent.mkdir()
    (tmp_path / AIME).write_text("prompt_id,sample,output_tokens\nA,0,100\nA,1,200\n")
    assert run(*small, "--data", str(tmp_path))[0] == 0
    monkeypatch.setenv("ROLLMUX_DATA", str(tmp_path))
    assert run(*small)[0] == 0
    assert read("aime").sources == (((100, 200),),)

    (tmp_path / AIME).write_text("prompt_id,sample,output_tokens\nA,0,long\n")
    assert f"{tmp_path / AIME}, line 2, column 'output_tokens': 'long' is there" in run(*small)[1]


def test_tail_batching_hands_on_as_many_prompts_in_less_time():
    setting = Setting(nodes=2, prompts=16, samples=4)
    source = read("skythought")
    prior = fit(source.draw(16, 4, "0 0"), source.limit)
    rounds = Rounds(setting, source, prior, 0)
    plain = [one(Policy("start", ""), setting, "skythought", seed)[1].seconds for seed in range(4)]
    assert rounds.run() < sum(plain) / len(plain)
    assert len(rounds._deferred) < 16 + 4


def run(*words):
    result = CliRunner().invoke(cli, ["sim", "rollout", *words])
    return result.exit_code, result.output


def test_the_command_prints_both_baselines_and_writes_a_trace_and_a_report(tmp_path):
    pytest.importorskip("matplotlib")
    trace, html = tmp_path / "t.json", tmp_path / "r.html"
    words = ["--policies", "start,full,oracle-tp,rollpacker", "--nodes", "2", "--prompts", "8", "--samples", "4"]
    code, output = run(*words, "--json", "--trace", str(trace), "--html", str(html))
    assert code == 0, output
    told = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    rows = {(row["policy"], row["dispatch"]): row for row in told["rows"]}
    assert rows["static-tp2", "contiguous"]["over_static_tp2"] == 1
    best = min(row["seconds"] for (name, word), row in rows.items() if name.startswith("static") and word == "spread")
    assert rows["start", "spread"]["over_best_static"] == pytest.approx(best / rows["start", "spread"]["seconds"])
    assert rows["oracle-tp", "spread"]["seconds"] <= best
    assert told["checks"] == []
    events = json.loads(trace.read_bytes())["traceEvents"]
    assert {event["args"]["name"] for event in events if event["name"] == "process_name"} == {"start", "full"}
    assert {event["ph"] for event in events} >= {"M", "X", "C"}
    assert "Requests per replica" in html.read_text()
    assert "Degree over time" in html.read_text()


def test_a_change_of_the_degree_stands_beside_what_it_has_won(tmp_path):
    report = pytest.importorskip("rollmuxd.sim.report.rollouts", exc_type=ImportError)
    setting = Setting(nodes=2, prompts=16, samples=8, gate=Gate(least_share=0.02, dwell_s=0))
    asked = study.Asked((read("skythought"),), ("proactive",), setting=setting)
    result = study.one_step(asked)["proactive"]
    assert result.switches
    # without its changes it is the static degree, with the samples of a prompt on one replica
    static = study.one_step(study.Asked((read("skythought"),), ("static-tp2",), setting=setting))["static-tp2"]
    assert (result.unchanged_s, static.unchanged_s) == (static.seconds, 0.0)
    page = tmp_path / "r.html"
    report.write(page, study.compare(asked), {"proactive": result}, title="t", command="c")
    assert "REALISED s" in page.read_text()
    assert f"{result.unchanged_s - result.seconds:.1f}" in page.read_text()


def test_a_loop_that_trains_beside_the_next_rollout_gains_what_its_training_leaves():
    """One step of asynchrony: an iteration takes the longer of the two."""
    source = read("skythought")
    asked = study.Asked((source,), ("start",), setting=Setting(nodes=2, prompts=8, samples=4))
    together, apart = study.compare(asked), study.compare(study.Asked(**{**vars_of(asked), "asynchrony": 1}))
    for row, other in zip(apart.rows, together.rows, strict=True):
        assert row.seconds == other.seconds
    static = next(row for row in apart.rows if row.dispatch == "contiguous")
    start = next(row for row in apart.rows if row.policy == "start")
    # against a loop that trains after each rollout, as in the table without asynchrony
    train = static.seconds / study.GENERATION_TO_TRAINING
    assert static.iteration_s == static.seconds
    assert static.end_to_end == static.over_synchronous == pytest.approx(1 + 1 / study.GENERATION_TO_TRAINING)
    assert start.end_to_end == pytest.approx((static.seconds + train) / max(start.seconds, train))
    assert {row.over_synchronous for row in together.rows} == {1.0}
    given = study.compare(study.Asked(**{**vars_of(asked), "train_s": 7.0}))
    assert all(row.iteration_s == pytest.approx(row.seconds + 7) for row in given.rows)


def vars_of(struct):
    return {name: getattr(struct, name) for name in struct.__struct_fields__}


def test_checks_judge_the_part_that_was_asked_for_and_name_value_and_bar():
    rows = [
        study.Row("mix", 2.0, "static-tp2", "contiguous", 200.0, [200.0], 1.0, 0.7),
        study.Row("mix", 2.0, "static-tp4", "spread", 140.0, [140.0], 1.43, 1.0),
        study.Row("mix", 2.0, "start", "spread", 140.0, [140.0], 1.43, 1.0),
        study.Row("mix", 2.0, "full", "spread", 125.0, [125.0], 1.6, 1.12341),
    ]
    asked = study.Asked((Lengths("mix", (), 16_000),), ("start", "full"), seeds=4)
    found = {it.check: (it.value, it.bar, it.ok) for it in study._checks(asked, rows)}
    assert found == {
        "mix, 2 ms a step: start over static-tp2 contiguous": (1.43, (1.25, 1.5), True),
        "mix, 2 ms a step: full over static-tp2 contiguous": (1.6, (1.22, 1.52), False),
        "mix, 2 ms a step: start over the best static, spread": (1.0, (0.98, 1.05), True),
        "mix, 2 ms a step: full over the best static, spread": (1.1234, (0.98, 1.05), False),
    }
    assert not study.Study(Setting(), 0, rows, list(study._checks(asked, rows))).ok
    assert study.check("none", None, 0, 1).ok is False


@pytest.mark.parametrize(
    ("full", "known", "said", "ok"),
    [(1.02, 1.07, "; clairvoyant: 1.070", True), (1.054, 1.07, "; clairvoyant: 1.070", True),
     (1.056, 1.07, "; clairvoyant: 1.070", False)],
)  # fmt: skip
def test_a_gain_over_the_best_static_stands_beside_that_with_lengths_known(full, known, said, ok):
    rows = [
        study.Row("mix", 2.0, "full", "spread", 130.0, [130.0], 1.4, full),
        study.Row("mix", 2.0, "clairvoyant", "spread", 125.0, [125.0], 1.4, known),
    ]
    asked = study.Asked((Lengths("mix", (), 16_000),), ("full", "clairvoyant"), seeds=4)
    (found,) = (it for it in study._checks(asked, rows) if "best static" in it.check)
    assert (found.value, found.note, found.ok) == (full, f"judged in whole percent, as the bar is{said}", ok)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--policies", "fastest"], "there is no policy 'fastest'"),
        (["--policies", "reactiv"], "there is no policy 'reactiv'; did you mean reactive? (static-tp1"),
        (["--lengths", "nowhere.csv"], "there are no lengths 'nowhere.csv'"),
        (["--dispatch", "random"], "dispatch is 'random': contiguous or spread"),
        (["--model", "gpt-9"], "no figures are known for model 'gpt-9'"),
        (["--gpu", "h9"], "no figures are known for GPU 'h9'"),
        (["--model", "qwen2.5-72b", "--policies", "static-tp1"], "fits on 4, 8 GPUs of type h800; leave it out"),
        (["--prompts", "1", "--samples", "1"], "a step of 1 responses: 2 to 200,000 are needed"),
        (["--prompts", "60000", "--samples", "1000"], "a step of 60000000 responses"),
        (["--html", "/nowhere/r.html"], "there is no folder /nowhere"),
        (["--trace", "/nowhere/t.json"], "there is no folder /nowhere"),
        (["--c-step", "fast"], "--c-step is 'fast'"),
        (["--c-step", "nan"], "--c-step is 'nan'"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_runs(words, says):
    code, output = run(*words)
    assert code != 0
    assert says in output
