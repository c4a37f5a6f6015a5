"""The demo's jobs are real learning, and sharing cannot change what they compute.

- Each of the three jobs gets visibly better at its task within fifteen iterations.
- The weights depend on the settings only: not on the process, its cores, its timing or the hash seed.
- A job computes in one thread, and in a slot on the cores of its GPUs.
- The gradient written by hand is the one that finite differences see.
- An advantage compares an answer with the others to its own prompt, and with nothing else.
"""

import importlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

RL = Path(__file__).parents[1] / "rollmuxd_demo" / "loops"
JOBS = {"sort_digits": "sort-digits", "close_brackets": "close-brackets", "modular_sum": "modular-sum"}
#: of the work of each iteration, enough to learn from
SCALES = {"sort_digits": "0.01", "close_brackets": "0.01", "modular_sum": "0.05"}


@pytest.fixture(scope="module", autouse=True)
def loops_on_the_path():
    sys.path.insert(0, str(RL))
    yield
    sys.path.remove(str(RL))


@pytest.fixture
def grpo():
    return importlib.import_module("grpo")


@pytest.fixture
def numpy(grpo):
    """numpy as `grpo` has set it up: loaded by a test before that, it might have many threads."""
    return importlib.import_module("numpy")


def no_daemon(folder: Path, **more: str) -> dict[str, str]:
    """An environment in which a developer's own daemon is not found."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX", "XDG_"))}
    return kept | {"HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)} | more


@pytest.fixture(scope="module", params=JOBS)
def records(request, tmp_path_factory):
    """What two processes leave that run the same job at the same time, one of them held to a single core."""
    cores, runs = importlib.import_module("cores"), []
    how = ["--json", "--scale", SCALES[request.param], "--seed", "3"]
    for hash_seed in ("1", "2"):
        out = tmp_path_factory.mktemp(request.param)
        command = [sys.executable, RL / f"{request.param}.py", *how, "--out", out]
        environment = no_daemon(out, PYTHONHASHSEED=hash_seed)
        with cores.pinned(("gpu0",) if hash_seed == "2" else ()):  # which the child inherits
            process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        runs.append((process, out / f"{JOBS[request.param]}.json"))
    records = []
    for process, path in runs:
        printed, _ = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0
        records.append(json.loads(path.read_text()) | {"printed": [json.loads(line) for line in printed.splitlines()]})
        assert path.with_suffix(".npz").exists()
    return records


def test_the_reward_rises_clearly_within_fifteen_iterations(records):
    rewards = records[0]["rewards"]
    assert len(rewards) == 15
    assert sum(rewards[-3:]) / 3 > 1.5 * rewards[0]


def test_two_processes_with_the_same_settings_end_with_the_same_weights(records):
    one, other = records
    assert one["sha256"] == other["sha256"]
    assert one["rewards"] == other["rewards"]


def test_the_record_tells_when_each_phase_began_and_ended_one_after_the_other(records):
    phases = records[0]["phases"]
    assert [(p["step"], p["phase"]) for p in phases] == [(s, p) for s in range(15) for p in ("rollout", "train")]
    times = [time for phase in phases for time in (phase["start"], phase["end"])]
    assert times == sorted(times)


def test_each_iteration_prints_one_line_of_json(records):
    assert [line["step"] for line in records[0]["printed"]] == list(range(15))
    told = {"step", "reward", "rollout_s", "train_s", "rollout_cpu_s", "train_cpu_s"}
    assert all(set(line) == told for line in records[0]["printed"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="threads are counted in /proc")
@pytest.mark.parametrize("job", JOBS)
def test_a_job_computes_in_one_thread(job, tmp_path):
    """Two BLAS threads pinned to one core spin against each other, and the order of sums is theirs to choose."""
    program = f"import os, {job}; print(len(os.listdir('/proc/self/task')))"
    done = subprocess.run([sys.executable, "-c", program], cwd=RL, env=no_daemon(tmp_path), capture_output=True)
    assert done.stdout.strip() == b"1", done.stderr


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system cannot pin")
def test_a_job_computes_on_the_core_of_its_gpu_and_nowhere_else_while_it_has_a_slot():
    cores = importlib.import_module("cores")
    before = os.sched_getaffinity(0)
    ordered = sorted(before)
    with cores.pinned(("mock/gpu0",)):
        assert os.sched_getaffinity(0) == {ordered[0]}
    with cores.pinned((f"mock/gpu{len(ordered) + 1}",)):
        assert os.sched_getaffinity(0) == {ordered[1 % len(ordered)]}
    with cores.pinned(()):
        assert os.sched_getaffinity(0) == before
    assert os.sched_getaffinity(0) == before


@pytest.fixture
def small(grpo, numpy):
    """A policy in double precision with nothing at zero, and groups it has sampled itself."""
    rng = numpy.random.default_rng(5)
    task = grpo.Task(4, 3, 2, lambda rng, count: rng.integers(0, 4, (count, 3)), lambda prompt, answer: 0.0)
    policy = grpo.Policy(task, rng, hidden=7, dtype=numpy.float64)
    policy.theta[:] = rng.standard_normal(policy.theta.size) * 0.5
    prompts = task.draw_prompts(rng, 6)
    answers, logps = policy.sample(numpy.repeat(prompts, 8, axis=0), rng)
    judged = grpo.advantages(rng.random((6, 8)))
    return policy, grpo.Batch(prompts, answers.reshape(6, 8, 2), logps.reshape(6, 8, 2), judged)


def test_training_sees_the_probabilities_that_sampling_saw(small, grpo, numpy):
    policy, batch = small
    answers = batch.answers.reshape(-1, 2)
    _, _, p = policy.forward(policy.contexts(numpy.repeat(batch.prompts, 8, axis=0), answers))
    again = numpy.log(p[numpy.arange(answers.size), answers.reshape(-1)])
    assert numpy.allclose(again, batch.logps.reshape(-1), rtol=0, atol=1e-12)


def test_the_gradient_is_the_one_that_finite_differences_see_with_clipped_tokens_among_the_others(small, grpo, numpy):
    policy, batch = small
    # As if some updates had been made since the answers were sampled: ratios on both sides of both bounds.
    drift = numpy.random.default_rng(6).normal(0, 0.3, batch.logps.shape)
    batch = grpo.Batch(batch.prompts, batch.answers, batch.logps + drift, batch.advantages)
    clipped = numpy.where(batch.advantages[..., None] > 0, drift < -numpy.log(1.2), drift > -numpy.log(0.8))
    assert 0.1 < clipped.mean() < 0.6

    def loss():
        return grpo.clipped_loss(policy, batch, 96, policy.views(numpy.zeros_like(policy.theta)))

    gradient = numpy.zeros_like(policy.theta)
    grpo.clipped_loss(policy, batch, 96, policy.views(gradient))
    for i in random.Random(7).sample(range(policy.theta.size), 80):
        kept, step = policy.theta[i], 1e-6
        policy.theta[i] = kept + step
        above = loss()
        policy.theta[i] = kept - step
        below = loss()
        policy.theta[i] = kept
        assert gradient[i] == pytest.approx((above - below) / (2 * step), rel=1e-5, abs=1e-8)


def test_the_gradient_of_a_minibatch_is_the_sum_over_its_blocks(small, grpo, numpy):
    policy, batch = small
    whole, blocks = numpy.zeros_like(policy.theta), numpy.zeros_like(policy.theta)
    grpo.clipped_loss(policy, batch, 96, policy.views(whole))
    for at in (0, 2, 4):
        grpo.clipped_loss(policy, batch.take(slice(at, at + 2)), 96, policy.views(blocks))
    assert numpy.allclose(whole, blocks, rtol=0, atol=1e-12)


def test_an_advantage_compares_an_answer_with_the_others_to_its_own_prompt(grpo, numpy):
    easy_and_hard = numpy.array([[1.0, 1.0, 0.0, 0.0], [0.1, 0.0, 0.0, 0.1], [0.7, 0.7, 0.7, 0.7]])
    judged = grpo.advantages(easy_and_hard)
    assert numpy.allclose(judged[0], [1, 1, -1, -1], atol=1e-2)
    assert numpy.allclose(judged[1], [1, -1, -1, 1], atol=1e-2), "a hard prompt's best answers count as much"
    assert numpy.allclose(judged[2], 0), "where all are alike there is nothing to learn"


@pytest.mark.parametrize(
    ("job", "prompt", "right", "half_right"),
    [
        ("sort_digits", [3, 1, 2, 9, 0, 0], [0, 0, 1, 2, 3, 9], [0, 0, 1, 9, 9, 2]),
        ("close_brackets", [0, 1, 2, 0, 0, 0, 0, 0], [3, 3, 3, 3, 3, 5, 4, 3], [3, 3, 3, 3, 4, 4, 5, 0]),
        ("modular_sum", [1, 2, 3, 4, 0], [1, 3, 1, 0, 0], [1, 3, 0, 1, 1]),
    ],
)
def test_a_right_answer_is_worth_one_and_a_partly_right_one_less(job, prompt, right, half_right):
    reward = importlib.import_module(job).reward
    assert reward(prompt, right) == 1
    assert 0.3 < reward(prompt, half_right) < 0.6
