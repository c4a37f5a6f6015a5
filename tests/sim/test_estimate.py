"""Training logs are read as their frameworks write them, and what sharing would do is worked out from their steps."""

import json
from pathlib import Path
from random import Random

import pytest
from click.testing import CliRunner

from rollmuxd.cli.main import cli
from rollmuxd.sim.estimate import Gpus, _drifts, estimate
from rollmuxd.sim.training_logs import Step, read

LOGS = Path(__file__).parents[3] / "shared" / "data" / "rl_steps"

VERL = (
    "(Runner pid=71) step:{0} - actor/loss:0.1 - timing_s/gen:20.5 - timing_s/reward:0.5 - timing_s/old_log_prob:2.0 "
    "- timing_s/ref:1.0 - timing_s/adv:0.25 - timing_s/update_actor:np.float64(10.25) - timing_s/update_weights:1.5"
    " - timing_s/step:36.0 - timing_s/testing:80.0 - perf/throughput:3.5\n"
)
EASY_R1 = '{{"step": {0}, "actor": {{"loss": 1}}, "timing_s": {{"gen": 5, "old": 1, "update_actor": 4, "step": 11}}}}\n'
VERL_FILE = '{{"step": {0}, "data": {{"timing_s/gen": 5.0, "timing_s/update_actor": 4.0, "timing_s/step": 9.5}}}}\n'
NEMO = """⏱️  Timing:
  • Total step time: 44.74s
  • generation: 32.82s (73.4%)
  • policy_training: 5.06s (11.3%)
  • policy_and_reference_logprobs: 2.40s (5.4%)
  • prepare_for_generation/total: 0.62s (1.4%)
  • reward_calculation: 0.03s (0.1%)
🔍 Performance Metrics: step {0}
"""
OPEN_RLHF = (
    "2026-01-01 10:00:0{0} INFO ppo_trainer.py:270 Global step {0}: {{'loss': 0.1, 'timing/make_experience': 3.0, "
    "'timing/ppo_train': 7.0, 'timing/broadcast': 0.5, 'timing/generation': 12.0, 'timing/step_total': 22.5}}\n"
)
TRL = """{{"profiling/Time taken: GRPOTrainer.transformers.generate": 4.0}}
{{"profiling/Time taken: GRPOTrainer._calculate_rewards": 0.5}}
{{"profiling/Time taken: GRPOTrainer.compute_loss": 0.75}}
{{"loss": 0.1, "step_time": 6.5, "epoch": {0}}}
"""


@pytest.mark.parametrize(
    ("name", "text", "step"),
    [
        ("verl.log", VERL, Step(20.5, 13.5, 1.5, 0.5)),
        ("easyr1.jsonl", EASY_R1, Step(5.0, 5.0)),
        ("verl.jsonl", VERL_FILE, Step(5.0, 4.0)),
        ("nemo.txt", NEMO, Step(32.82, 7.46, 0.62, 0.03)),
        ("openrlhf.log", OPEN_RLHF, Step(12.0, 10.0, 0.5)),
        ("trl.jsonl", TRL, Step(4.0, 2.0, 0.0, 0.5)),
        ("steps.csv", "step,gen_s,train_s,ref_s\n", Step(8.0, 5.0)),
        ("metrics.csv", "step,timing_s_gen,timing_s_update_actor,timing_s_ref\n", Step(8.0, 5.0)),
        ("nemo.csv", "step,timing_train_generation,timing_train_policy_training,timing_train_ref\n", Step(8.0, 5.0)),
    ],
)
def test_a_log_is_read_as_its_framework_writes_it_and_its_first_step_left_out(tmp_path, name, text, step):
    path = tmp_path / name
    body = "".join(text.format(number) for number in range(1, 5))
    path.write_text(text + "1,9,9,9\n2,8,4,1\n3,8,4,1\n4,8,4,\n" if name.endswith(".csv") else body)

    found = read(path)

    assert len(found) == 3
    assert [found[0].rollout_s, found[0].train_s, found[0].sync_s, found[0].gap_s] == pytest.approx(
        [step.rollout_s, step.train_s, step.sync_s, step.gap_s]
    )


@pytest.mark.parametrize("bad", ["90s", "1,5", "-3"])
def test_a_time_of_a_csv_that_is_no_number_of_seconds_is_named_and_not_left_out(tmp_path, bad):
    path = tmp_path / "t.csv"
    path.write_text(f'gen_s,train_s\n100,90\n101,"{bad}"\n102,\n')
    with pytest.raises(
        ValueError, match=rf"t\.csv, line 3, column 'train_s': '{bad}' is there, and seconds are needed"
    ):
        read(path)


@pytest.mark.parametrize("text", ["", "epoch 1 loss 0.3\n", '{"step_time": 3.0}\n', "{'timing/generation': 'x'}\n"])
def test_a_log_that_does_not_tell_both_phases_is_refused_with_what_is_known(tmp_path, text):
    path = tmp_path / "train.log"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"train\.log: no step.*verl"):
        read(path)


ONE_STEP_OFF = (
    "step:{0} - timing_s/wait_prev_gen:12.5 - timing_s/gen:20.5 - timing_s/update_actor:30.0 - timing_s/step:45.0\n"
)
FULLY_ASYNC = "step:{0} - timing_s/gen:21.3 - timing_s/update_actor:273.0 - fully_async/count/stale_samples:3.0\n"
NEMO_ASYNC = """Total step time: 302.0s
  • exposed_generation: 193.0s (64%)
  • policy_training: 69.0s (23%)
"""


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("one-step-off.log", ONE_STEP_OFF, "only such a trainer logs wait_prev_gen"),
        ("fully-async.log", FULLY_ASYNC, "only such a trainer logs fully_async"),
        ("nemo.txt", NEMO_ASYNC, "only such a trainer logs exposed_generation"),
        (
            "steps.csv",
            "step,gen_s,train_s,old_logprob_s,step_s\n1,900,900,9,900\n2,458,337,108,520\n",
            "a step takes 520.0 s (step_s), clearly less than its rollout of 458.0 s and its training of 445.0 s",
        ),
        (
            "engine.csv",  # the trainer sees only the end of a rollout that began long before
            "step,gen_s,train_s,step_s,gen_engine_s\n1,21,273,294,250\n2,21,273,294,250\n",
            "a step takes 294.0 s (step_s), clearly less than its rollout of 250.0 s and its training of 273.0 s",
        ),
    ],
)
def test_the_log_of_an_asynchronous_run_is_refused_with_the_columns_and_advice(tmp_path, name, text, said):
    path = tmp_path / name
    path.write_text(text if name.endswith(".csv") else "".join(text.format(number) for number in range(1, 4)))

    with pytest.raises(ValueError) as refused:
        read(path)

    assert f"{name}: this is the log of an asynchronous run: {said}" in str(refused.value)
    assert "Log about 30 steps of the same job with its synchronous trainer" in str(refused.value)

    told = CliRunner().invoke(cli, ["estimate", "--log", str(path)])
    assert (told.exit_code, told.stdout) == (1, "")
    assert "asynchronous" in told.stderr


def test_the_ranges_of_a_run_that_drifts_reach_to_where_it_gets():
    # Rollouts grow from a fifth of training to as long as it: sharing gains ever more.
    log = [Step(24.0 + 2 * number, 120.0 + number % 3) for number in range(50)]
    found = estimate([log[:25]] * 2, Gpus(8, 8))
    half = found.against[0].gain
    then = estimate([log[25:35]] * 2, Gpus(8, 8)).against[0].gain

    assert half.low < 1.2 < 1.5 < then.middle < half.high

    (drift,) = found.drifts[:1]
    assert (drift.log, drift.phase, round(drift.shortest_s), round(drift.last_s)) == (0, "rollout", 28, 68)


def test_noise_alone_is_no_drift():
    draw = Random(4)
    log = [Step(draw.lognormvariate(4.0, 0.5), draw.lognormvariate(4.0, 0.3)) for _ in range(200)]
    assert not [*_drifts(0, log)]


def test_the_command_says_that_a_run_drifts(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("gen_s,train_s\n" + "".join(f"{24 + 2 * number},{120 + number % 3}\n" for number in range(51)))

    told = CliRunner().invoke(cli, ["estimate", "--log", str(path)])

    assert (
        f"{path} drifts: rollout took 35.0 s on average in one fifth of it, and 115.0 s in another\n"
        "so the ranges also cover each fifth by itself, and as much drift again as in the second half\n"
    ) in told.output
    assert told.output.count("drifts") == 1  # both jobs are like this one log


def test_two_jobs_with_equal_phases_and_free_switches_take_half_the_time_of_one_after_the_other():
    log = [Step(60.0, 60.0)] * 10
    found = estimate([log, log], Gpus(8, 8), 0.0)

    in_turn, colocated = found.against
    assert in_turn.gain.middle == pytest.approx(2.0, rel=0.03)  # but for the first and the last turn
    assert in_turn.worth
    # On all GPUs at once each phase would take half as long, if it lost nothing by it: that gains just as much.
    assert colocated.gain.low == pytest.approx(1.0, rel=0.03)
    assert colocated.gain.high == pytest.approx(2**0.3, rel=0.03)
    assert found.slowdown.middle == pytest.approx(1.0, rel=0.03)


def test_switches_eat_the_gain_and_a_lopsided_job_has_none():
    balanced, lopsided = [Step(60.0, 60.0)] * 10, [Step(110.0, 10.0)] * 10
    free = estimate([balanced] * 2, Gpus(8, 8), 0.0).against[0].gain.middle
    dear = estimate([balanced] * 2, Gpus(8, 8), 20.0).against[0].gain.middle
    assert dear < 0.8 * free
    alone = estimate([lopsided] * 2, Gpus(8, 8), 0.0).against[0]
    assert alone.gain.middle < 1.15
    assert not alone.worth


def test_a_log_of_both_phases_on_the_same_gpus_is_stretched_to_the_pools():
    # On 8 GPUs a minute each; on 4 each takes two, if nothing was lost on 8.
    found = estimate([[Step(60.0, 60.0)] * 10] * 2, Gpus(4, 4, ran_on=8), 0.0)
    assert found.against[0].wall_s.high == pytest.approx(2 * 30 * 240.0)
    assert found.against[1].wall_s.high == pytest.approx(2 * 30 * 120.0)
    assert found.shared_s.high == pytest.approx(2**0.3 * found.shared_s.low, rel=0.01)


@pytest.mark.parametrize(
    ("logs", "gpus", "said"),
    [(1, Gpus(8, 8), "1 jobs"), (6, Gpus(8, 8), "6 jobs"), (2, Gpus(0, 8), "0 rollout GPUs")],
)
def test_numbers_that_cannot_be_are_refused(logs, gpus, said):
    with pytest.raises(ValueError, match=said):
        estimate([[Step(1.0, 1.0)]] * logs, gpus)


def test_the_same_log_gives_the_same_figures():
    log = [Step(10.0 + number % 7, 12.0 - number % 5) for number in range(40)]
    assert estimate([log] * 2, Gpus(4, 4)) == estimate([log] * 2, Gpus(4, 4))


def test_the_command_tells_people_and_programs(tmp_path):
    path = tmp_path / "train.log"
    path.write_text("".join(VERL.format(number) for number in range(30)))

    told = CliRunner().invoke(cli, ["estimate", "--log", str(path), "--switch-s", "0"])
    assert told.exit_code == 0, told.output
    assert "29 steps, rollout 20.5 s, train 13.5 s on average" in told.output
    assert "one after the other on the same pools" in told.output
    assert "assumed: pools of 8 and 8 GPUs, and 0 s to load or to park a state" in told.output

    figures = CliRunner().invoke(cli, ["estimate", "--log", str(path), "--switch-s", "0", "--json"])
    assert json.loads(figures.output)["jobs"] == 2
    refused = CliRunner().invoke(cli, ["estimate", "--log", str(Path(__file__).with_name("test_world.py"))])
    assert refused.exit_code == 1
    assert "no step in it" in refused.stderr


@pytest.mark.skipif(
    not LOGS.is_dir(), reason="the logged runs are not shipped: they are not at ../shared/data/rl_steps"
)
def test_every_logged_run_is_read():
    for path in sorted(LOGS.glob("*.csv")):
        if path.name != "runs.csv":
            assert len(read(path)) > 10, path.name
