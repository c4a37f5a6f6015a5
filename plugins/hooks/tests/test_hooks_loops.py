"""The loops of frameworks, driven to their ends: each thing that they do on GPUs is done in its phase.

Of OpenRLHF, SkyRL, AReaL and prime-rl these are the released loops (``loops.py``); workers write down what they are
told. A line is one slot: the phase, and what was done in it.
"""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from patience import PATIENCE_S

LOOPS = Path(__file__).with_name("loops.py")
FRAMEWORKS = Path(sys.prefix) / "frameworks"
SLEEPING = ("--train.colocate_all", "--vllm.enable_sleep", "--ds.enable_sleep")


def drive(home, *arguments, hook="", **environment):
    """One loop, in a process of its own under a daemon that grants everything."""
    framework, release = arguments[:2]
    if framework in ("openrlhf", "skyrl", "areal", "prime-rl") and not (FRAMEWORKS / f"{framework}-{release}").is_dir():
        pytest.skip(
            f'{framework} {release} is not here: make drift ARGS="--keep .venv/frameworks {framework}=={release}"'
        )
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
    if hook:
        (home / "job.toml").write_text(hook)
        env["ROLLMUX_HOOK"] = str(home / "job.toml")
    return subprocess.run(
        [sys.executable, LOOPS, *arguments],
        env={**env, "HOME": str(home), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def slots(told):
    """What was done, a line a slot."""
    assert told.returncode == 0, told.stderr
    lines = []
    last = None
    for what, phase, slot, _ in json.loads(told.stdout.splitlines()[-1]):
        if (phase, slot) != last:
            lines.append(f"{phase}:")
            last = (phase, slot)
        lines[-1] += f" {what}"
    return lines


STEP = [
    "rollout: engines.generate",
    "train: actor.forward actor.append actor.reload_states actor.fit actor.offload_states",
]
WEIGHTS = "rollout: engines.wake_up actor.broadcast_to_vllm"


@pytest.mark.parametrize("release", ["0.10.4", "0.11.2"])
def test_openrlhf_generates_and_trains_in_turn(tmp_path, release):
    found = slots(drive(tmp_path, "openrlhf", release, *SLEEPING))
    last = {
        # (0.10.4 drops what it has generated last.)
        "0.10.4": ["train: actor.save_model"],
        "0.11.2": [STEP[1], f"{WEIGHTS} actor.save_model"],
    }[release]
    assert found == [
        "init: engines.start actor.load",
        *STEP,
        f"{WEIGHTS} engines.generate",
        STEP[1],
        f"{WEIGHTS} actor.save_checkpoint engines.generate_eval engines.generate",
        *last,
    ]


UPDATE = "engines.wake_up weights policy.broadcast_to_inference_engines policy.offload engines.wake_up kv_cache"
TRAIN = "train: policy.backload policy.forward policy.backload policy.train"


@pytest.mark.parametrize("release", ["0.2.0", "0.3.0"])
def test_skyrl_generates_and_trains_in_turn_and_has_rewards_while_it_holds_no_gpu(tmp_path, release):
    found = slots(drive(tmp_path, "skyrl", release))
    assert found == [
        "init: engines.start models.build",
        f"rollout: policy.backload {UPDATE} engines.generate engines.sleep",
        "None: rewards",
        TRAIN,
        f"rollout: policy.offload {UPDATE} engines.generate engines.sleep",
        "None: rewards",
        f"{TRAIN} policy.save",
        f"rollout: policy.offload {UPDATE} engines.generate_eval engines.sleep"
        # (0.2.0 saves what it has just saved.)
        + {"0.2.0": " policy.save", "0.3.0": ""}[release],
    ]


AREAL_TRAIN = (
    "train: ref.onload ref.compute_logp ref.offload actor.onload actor.ppo_update actor.update_weights actor.save "
    "actor.offload"
)
AREAL_ROLLOUT = "rollout.onload actor.prepare_batch rollout.offload"
AREAL_EVAL = "rollout: eval_rollout.onload eval_rollout.generate eval_rollout.offload"


def test_areal_colocated_generates_and_trains_in_turn(tmp_path):
    assert slots(drive(tmp_path, "areal", "1.0.4")) == [
        "init: models.build rollout.offload ref.offload actor.offload",
        f"rollout: {AREAL_ROLLOUT}",
        AREAL_TRAIN,
        f"{AREAL_EVAL} {AREAL_ROLLOUT}",
        AREAL_TRAIN,
        AREAL_EVAL,
    ]


def test_areals_evaluation_has_slots_of_its_own_where_the_job_declares_them(tmp_path):
    found = slots(drive(tmp_path, "areal", "1.0.4", hook="[side.eval]\nseconds = 60\nevery = 1\n"))
    assert [line.partition(":")[0] for line in found] == ["init", *["rollout", "train", "eval"] * 2]


def test_areal_apart_shares_the_gpus_that_it_trains_on(tmp_path):
    assert slots(drive(tmp_path, "areal", "1.0.4", "apart")) == [
        "init: models.build ref.offload actor.offload",
        "None: actor.prepare_batch",
        AREAL_TRAIN,
        "None: eval_rollout.generate actor.prepare_batch",
        AREAL_TRAIN,
        "None: eval_rollout.generate",
    ]


SLIME_WEIGHTS = "engines.onload_weights actor.update_weights engines.onload_kv"


def test_slime_with_two_pools_has_both_for_the_weights(tmp_path):
    assert slots(drive(tmp_path, "slime", "train", "offload")) == [
        "init: gpus.found engines.start engines.offload actor.load",
        f"sync: {SLIME_WEIGHTS}",
        "rollout: engines.generate engines.offload",
        "train: actor.train",
        f"sync: {SLIME_WEIGHTS} engines.generate_eval",
        "rollout: engines.generate engines.offload",
        "train: actor.train actor.save",
        f"sync: {SLIME_WEIGHTS}",
    ]


def test_slime_with_a_mover_holds_no_gpu_while_weights_travel(tmp_path):
    engines = "engines.onload_weights mover.load engines.onload_kv"
    assert slots(drive(tmp_path, "slime", "train", "offload", hook='weights = "loops:Between"')) == [
        "init: gpus.found engines.start engines.offload actor.load mover.publish",
        "None: mover.wait",
        f"rollout: {engines} engines.generate engines.offload",
        "train: actor.train mover.publish",
        "None: mover.wait",
        f"rollout: {engines}",
        "eval: engines.generate_eval",
        "rollout: engines.generate engines.offload",
        "train: actor.train actor.save mover.publish",
        "None: mover.wait",
        f"rollout: {engines}",
    ]


def test_slime_colocated_takes_weights_with_the_rollout_that_follows(tmp_path):
    assert slots(drive(tmp_path, "slime", "train", "offload", "colocate")) == [
        "init: gpus.found engines.start engines.offload actor.load",
        f"rollout: {SLIME_WEIGHTS} engines.generate engines.offload",
        "train: actor.train",
        f"rollout: {SLIME_WEIGHTS} engines.generate_eval engines.generate engines.offload",
        "train: actor.train actor.save",
        f"rollout: {SLIME_WEIGHTS}",
    ]


@pytest.mark.parametrize("release", ["0.2.4", "0.3.1"])
@pytest.mark.parametrize("layout", ["colocated", "apart"])
def test_the_driver_of_slime_has_these_slots(tmp_path, release, layout):
    if not (FRAMEWORKS / f"slime-{release}" / "train.py").is_file():
        what = f"slime=={release}"
        pytest.skip(f'{what} is not here: make drift ARGS="--keep .venv/frameworks {what}"')
    weights = {"colocated": "rollout", "apart": "sync"}[layout]
    # (0.2.4 tells its trainers to leave, too.)
    trained = {"0.2.4": "train: actor.train actor.save actor.offload", "0.3.1": "train: actor.train actor.save"}[
        release
    ]
    found = slots(drive(tmp_path, "slime-released", release, layout))
    assert found[0] == "init: gpus.found engines.start engines.offload actor.load"
    assert found[1].startswith(f"{weights}: {SLIME_WEIGHTS} engines.generate_eval")
    assert " ".join(found).count("engines.generate engines.offload") == 2
    assert [line for line in found if line.startswith("train:")] == [trained] * 2
    assert {line.partition(":")[0] for line in found} == {"init", "rollout", "train", weights}


@pytest.mark.parametrize("release", [None, "0.2.4", "0.3.1"])
def test_an_asynchronous_run_of_slime_waits_for_its_rollouts_without_a_slot(tmp_path, release):
    if release and not (FRAMEWORKS / f"slime-{release}" / "train_async.py").is_file():
        what = f"slime=={release}"
        pytest.skip(f'{what} is not here: make drift ARGS="--keep .venv/frameworks {what}"')
    released = ("slime-released", release, "apart", "train_async")
    found = slots(drive(tmp_path, *(released if release else ("slime", "train_async"))))
    assert found[0] == "init: gpus.found engines.start actor.load actor.update_weights"
    assert found[1].startswith("None: engines.generate")
    assert {line.partition(":")[0] for line in found} == {"init", "None", "train"}
    assert not any("engines" in line for line in found if line.startswith("train:"))
    if not release:  # the weights of one step and the training of the next are one slot, but for an evaluation
        assert "train: actor.update_weights actor.train" in found
        assert "None: engines.generate_eval engines.generate" in found


ROLL_TRAIN = (
    "train: reference.compute_log_probs critic.compute_values actor_train.compute_log_probs critic.train_step "
    "actor_train.train_step actor_train.save"
)
ROLL_ROOM = "critic.offload_states actor_train.offload_states"


def test_roll_with_two_pools_has_both_for_the_weights(tmp_path):
    assert slots(drive(tmp_path, "roll", "train")) == [
        f"init: clusters.start {ROLL_ROOM}",
        "sync: actor_train.model_update",
        "rollout: actor_infer.load_states actor_infer.generate actor_infer.offload_states",
        f"{ROLL_TRAIN} {ROLL_ROOM}",
        "sync: actor_train.model_update",
        "rollout: actor_infer.load_states actor_infer.validate actor_infer.generate actor_infer.offload_states",
        ROLL_TRAIN,
    ]


def test_roll_with_a_mover_holds_no_gpu_while_weights_travel(tmp_path):
    infer = "actor_infer.load_states actor_infer.generate actor_infer.offload_states"
    found = slots(drive(tmp_path, "roll", "train", hook='weights = "loops:Between"'))
    assert found == [
        f"init: clusters.start {ROLL_ROOM} mover.publish",
        "None: mover.wait",
        f"rollout: mover.load {infer}",
        f"{ROLL_TRAIN} {ROLL_ROOM} mover.publish",
        "None: mover.wait",
        f"rollout: mover.load {infer.replace('actor_infer.generate', 'actor_infer.validate actor_infer.generate')}",
        ROLL_TRAIN,
    ]


def test_roll_colocated_takes_weights_with_the_rollout_that_follows(tmp_path):
    found = slots(drive(tmp_path, "roll", "train", "colocate"))
    assert [line.partition(":")[0] for line in found] == ["init", "rollout", "train", "rollout", "train"]
    assert found[1].startswith("rollout: actor_train.model_update actor_infer.load_states")


def test_nemo_rl_leaves_the_gpus_when_generation_is_finished(tmp_path):
    refit = (
        "policy.offload_before_refit engines.wake_up engines.load_weights policy.offload_after_refit engines.wake_up"
    )
    trained = (
        "train: policy.prepare_for_lp_inference policy.get_logprobs policy.prepare_for_training policy.train "
        f"policy.save_checkpoint {refit}"
    )
    assert slots(drive(tmp_path, "nemo_rl", "train")) == [
        "init: models.build",
        f"train: {refit} engines.generate engines.sleep",
        f"{trained} engines.generate engines.sleep",
        f"{trained} engines.sleep",
        "train: engines.wake_up engines.validate engines.sleep",
    ]


def test_an_asynchronous_run_of_nemo_rl_is_offloaded_after_each_refit_and_brought_back_for_a_checkpoint(tmp_path):
    trained = "policy.prepare_for_lp_inference policy.get_logprobs policy.prepare_for_training policy.train"
    step = [
        f"train: {trained} policy.broadcast_weights_for_collective policy.offload_after_refit",
        "None: engines.wake_up engines.validate engines.sleep",
        "train: policy.prepare_for_training policy.save_checkpoint policy.offload_after_refit",
    ]
    assert slots(drive(tmp_path, "nemo_rl", "train", "async", "apart")) == [
        "init: models.build policy.broadcast_weights_for_collective policy.offload_after_refit",
        "None: engines.wake_up engines.validate engines.sleep engines.generate",
        *step,
        "None: engines.generate",
        *step,
    ]


def test_batches_are_made_while_an_asynchronous_run_of_skyrl_waits_for_its_slot(tmp_path):
    train = "train: policy.forward policy.train policy.broadcast_to_inference_engines"
    saved = ["None: engines.generate_eval", "train: policy.save"]
    assert slots(drive(tmp_path, "skyrl", "0.3.0", "fully async")) == [
        "init: engines.start models.build policy.broadcast_to_inference_engines",
        "None: engines.generate engines.generate",
        train,
        "None: engines.generate",
        train,
        *saved,
        train,
        *saved,
        "train: policy.save",
    ]


@pytest.mark.parametrize("release", ["0.7.0", "0.8.0"])
def test_prime_rl_waits_for_a_batch_without_a_slot_and_parked_meanwhile_not_a_bit_is_different(tmp_path, release):
    *found, weights = slots(drive(tmp_path, "prime-rl", release, "parked"))
    step = "train: ranks.barrier model.forward model.forward optimizer.step"
    assert found == [
        "init: model.build weights.broadcast 0",
        "None: batch.arrives",
        f"{step} weights.broadcast 1",
        "None: batch.arrives",
        f"{step} model.save",  # (nothing is sampled from what it would broadcast now)
        "None: batch.arrives",
        f"{step} model.save",
    ]
    assert weights == slots(drive(tmp_path, "prime-rl", release, "alone"))[-1]


@pytest.mark.parametrize(
    ("arguments", "sends"),
    [
        (("prime-rl", "0.8.0"), "weights.broadcast 1"),
        (("skyrl", "0.3.0", "fully async"), "policy.broadcast_to_inference_engines"),
        (("areal", "1.0.4", "apart"), "actor.update_weights"),
        (("nemo_rl", "train", "async", "apart"), "policy.broadcast_weights_for_collective"),
        (("slime", "train_async"), "actor.update_weights"),
    ],
    ids=lambda value: value[0] if isinstance(value, tuple) else "",
)
def test_where_weights_cannot_be_sent_the_slot_is_given_back_and_the_job_ends_with_that(tmp_path, arguments, sends):
    told = drive(tmp_path, *arguments, LOOPS_FAILS=sends)
    assert told.returncode == 1
    *_, done, last = [line for line in told.stderr.splitlines() if line.startswith(("done: ", "ended: "))]
    assert done == f"done: {sends}", "something was done to the engines after that"
    assert list(ast.literal_eval(last.removeprefix("ended: ")).values()) == [
        f"failed: ConnectionError: no answer to {sends}"
    ]
    assert "held: None" in told.stderr


# ---- refusals --------------------------------------------------------------------------------------------------------

UNKNOWN = "the hook does not know where this loop needs its GPUs"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ("openrlhf", "0.11.2", "--train.async_enable"),
            "--train.async_enable: its training step holds the GPUs while it",
        ),
        (
            ("slime", "train_async", "critic"),
            "--use-critic with train_async.py: where only the critic trains, the slot",
        ),
        (("slime", "train_async", "stays"), "slime takes its state off the GPUs only with --offload-train; for"),
        (
            ("roll", "train", "hides"),
            "Hiding.model_update takes the place of ROLL's, which the hook needs to be called",
        ),
        (("roll", "train", "async"), f"async_generation_ratio > 0: {UNKNOWN}; set it to 0"),
        (
            ("roll", "train", "stray"),
            "critic is on GPUs 2, which are none of actor_train's, and it works while the job",
        ),
        (("nemo_rl", "train", "async", "waits"), "grpo.async_grpo.in_flight_weight_updates=false: a refit would hold"),
        (
            ("prime-rl", "0.8.0", "nixl"),
            "weight_broadcast.type=nixl: engines read the trainer's weights where they were, and another",
        ),
        (
            ("prime-rl", "0.8.0", "full offload"),
            "model.full_offload: gradients are in buffers of prime-rl's own, which parking would lose",
        ),
        (("prime-rl", "0.8.0", "several runs"), "max_concurrent_runs > 1: the optimizers of several runs come and go"),
        (("nemo_rl", "train", "plane"), "data_plane.enabled: NeMo-RL takes another loop for it (grpo_sync)"),
        (
            ("openrlhf", "0.11.2", "--train.colocate_all"),
            "off the GPUs only with --train.colocate_all, --vllm.enable_sleep",
        ),
        (
            ("skyrl", "0.3.0", "apart"),
            "off the GPUs only with trainer.placement.colocate_all=true; for a daemon that only",
        ),
        (
            ("areal", "1.0.4", "stays"),
            "models of this run stay on the GPUs: say ref.offload=true (and enable_offload=true)",
        ),
        (("slime", "train"), "off the GPUs only with --offload-rollout and --offload-train"),
        (("nemo_rl", "train", "apart"), "off the GPUs only with policy.generation.colocated.enabled=true"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_that_cannot_share_is_refused_before_anything_is_started(tmp_path, arguments, said):
    told = drive(tmp_path, *arguments)
    assert told.returncode == 1
    assert said in told.stderr.splitlines()[-1]
    assert "done:" not in told.stderr


def test_what_stays_on_its_gpus_may_say_so_where_nothing_is_handed_on(tmp_path):
    found = slots(drive(tmp_path, "skyrl", "0.3.0", "apart", hook="resident = true\n"))
    assert found[:5] == [
        "init: engines.start models.build",
        "sync: policy.broadcast_to_inference_engines",
        "rollout: engines.generate",
        "None: rewards",
        "train: policy.forward policy.train",
    ]


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    told = drive(tmp_path, "roll", "train", hook="name = \n")
    assert told.returncode == 1
    assert f"ROLLMUX_HOOK={tmp_path / 'job.toml'}: Invalid value" in told.stderr.splitlines()[-1]


def test_a_trainer_of_skyrl_with_a_loop_of_its_own_is_refused_before_it_has_models(tmp_path):
    told = drive(tmp_path, "skyrl", "0.3.0", "loop of its own")
    assert told.returncode == 1
    assert f"Trainer has a loop of its own: {UNKNOWN}" in told.stderr
    assert "done: models.build" not in told.stderr
    assert "ended: {'sky': \"failed: ValueError: Trainer has a loop of its own" in told.stderr


def test_areal_with_a_loop_in_each_rank_is_refused(tmp_path):
    told = drive(tmp_path, "areal", "1.0.4", WORLD_SIZE="2")
    assert told.returncode == 1
    assert "each rank of torchrun has a loop of its own here" in told.stderr
    assert "done:" not in told.stderr


def test_a_loop_that_fails_releases_what_it_held_and_ends_the_job_with_its_error(tmp_path):
    told = drive(tmp_path, "roll", "train", "fails")
    assert told.returncode == 1
    assert "RuntimeError: out of memory" in told.stderr
    assert "ended: {'roll': 'failed: RuntimeError: out of memory'}" in told.stderr


@pytest.mark.parametrize("arguments", [("slime", "train", "offload"), ("nemo_rl", "train")])
def test_a_loop_that_comes_to_its_end_has_the_job_finished(tmp_path, arguments):
    told = drive(tmp_path, *arguments)
    assert list(ast.literal_eval(told.stderr.rpartition("ended: ")[2]).values()) == ["finished"]
