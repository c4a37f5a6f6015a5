"""The real GRPOTrainer of the installed TRL, on a tiny model: where its phases are, and that they change no bit of it.

The fake daemon grants at once and writes down which phases ran; the runs are those of ``examples/trl_grpo.py``.
"""

import importlib.util
import sys
import warnings
from pathlib import Path

import pytest

# Looked for only: each of pytest's workers reads this file, and one or two of them need torch and TRL.
if importlib.util.find_spec("trl") is None or importlib.util.find_spec("torch") is None:
    pytest.skip("TRL is not installed: pip install 'trl>=1.0,<1.17'", allow_module_level=True)

import rollmuxd
from rollmuxd import SlotLost
from rollmuxd.testing import fake_daemon
from rollmuxd_hook_trl import UnknownTrl

EXAMPLE = Path(__file__).parents[3] / "examples" / "trl_grpo.py"

# TRL and transformers warn of each other; to import both takes its time.
pytestmark = [pytest.mark.filterwarnings("ignore")]

CYCLE = ["rollout", "train"]


@pytest.fixture(scope="module")
def runs():
    """The example, as a module."""
    import torch

    spec = importlib.util.spec_from_file_location("trl_grpo", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sys.modules["trl_grpo"] = module
        spec.loader.exec_module(module)
    yield module
    del sys.modules["trl_grpo"]
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def trl(runs):
    import trl

    return trl


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch, tmp_path):
    for name in ("URL", "SOCKET", "API_KEY", "REQUIRED", "JOB", "RUN_KEY"):
        monkeypatch.delenv(f"ROLLMUX_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def out(tmp_path):
    return str(tmp_path / "out")


@pytest.fixture
def daemon():
    with fake_daemon() as fake:
        yield fake


def solo(runs, trl, out, task="high", **settings):
    """The weights of the same run by TRL alone."""
    run = runs.trainer(task, out, kind=trl.GRPOTrainer, **settings)
    run.train()
    return runs.digest(run.model)


def phase_of(run):
    """The phase that a run is in."""
    return run._turns.current


# ---- where the phases are --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "rollouts"),
    [
        (dict(max_steps=3), 3),
        (dict(max_steps=2, gradient_accumulation_steps=2), 2),
        (dict(max_steps=4, num_iterations=2), 2),
        (dict(max_steps=4, steps_per_generation=4), 1),
        (dict(max_steps=1, gradient_accumulation_steps=4, steps_per_generation=2), 2),
    ],
    ids=["a step each", "accumulated", "iterated", "several steps of one rollout", "several rollouts in one step"],
)
def test_a_rollout_and_all_steps_on_it_are_one_turn_each_and_change_no_bit(runs, trl, out, daemon, settings, rollouts):
    run = runs.trainer("high", out, **settings)
    run.train()
    assert daemon.phases == ["init", "init", *CYCLE * rollouts]
    assert daemon.ended == {"trl-high": "finished"}
    assert runs.digest(run.model) == solo(runs, trl, out, **settings)


def test_generation_is_in_the_rollout_and_loss_and_optimizer_are_phase_of(runs, out, daemon):
    seen = []

    class Watched(runs.GRPOTrainer):
        def _generate_single_turn(self, *args, **kwargs):
            seen.append(("generates", phase_of(self)))
            return super()._generate_single_turn(*args, **kwargs)

        def _compute_loss(self, *args, **kwargs):
            seen.append(("computes", phase_of(self)))
            return super()._compute_loss(*args, **kwargs)

    run = runs.trainer("high", out, kind=Watched, max_steps=2)

    class Watch(runs_callback()):
        def on_pre_optimizer_step(self, *_, **__):
            seen.append(("steps", phase_of(run)))

    run.add_callback(Watch())
    run.train()
    assert seen == [("generates", "rollout"), ("computes", "train"), ("steps", "train")] * 2


def runs_callback():
    from transformers import TrainerCallback

    return TrainerCallback


def test_reward_functions_run_while_the_job_holds_no_gpu(runs, out, daemon, monkeypatch):
    held = []

    def reward(completions, **_):
        held.append(phase_of(run))
        return [float(len(text)) for text in completions]

    monkeypatch.setitem(runs.TASKS, "high", reward)
    run = runs.trainer("high", out, max_steps=2)
    run.train()
    assert held == [None, None]


def test_where_log_probabilities_come_first_scoring_is_part_of_train(runs, out, daemon, monkeypatch):
    held = []
    plain = runs.TASKS["high"]

    def reward(completions, **more):
        held.append(phase_of(run))
        return plain(completions, **more)

    monkeypatch.setitem(runs.TASKS, "high", reward)
    run = runs.trainer("high", out, max_steps=4, num_iterations=2)
    run.train()
    assert held == ["train", "train"]


def talk(daemon):
    """What was asked of the daemon, call by call: a phase, or a release and what it carried."""
    said = []
    for call in daemon.calls:
        if call.path.endswith("/slots"):
            said.append(call.body["phase"])
        elif call.path.endswith("/release"):
            said.append(("release", (call.body.get("next") or {}).get("phase")))
    return said


ONWARD = [("release", "train"), ("release", "rollout")]


def test_where_log_probabilities_come_first_a_rollout_and_its_steps_are_two_calls(runs, trl, out, daemon):
    more = dict(max_steps=6, num_iterations=2)
    run = runs.trainer("high", out, **more)
    run.train()
    start = ["init", ("release", None), "init", ("release", "rollout")]
    first = [("release", None), "train", ("release", "rollout")]  # which tells what comes first
    assert talk(daemon) == [*start, *first, *ONWARD, *ONWARD[:1], ("release", None)]
    assert daemon.phases == ["init", "init", *CYCLE * 3]
    assert runs.digest(run.model) == solo(runs, trl, out, **more)


def test_what_comes_first_is_learnt_of_training_and_anew_each_time(runs, out, daemon, monkeypatch):
    held = []
    plain = runs.TASKS["high"]

    def reward(completions, **more):
        if run.model.training:
            held.append(phase_of(run))
        return plain(completions, **more)

    class Changes(runs_callback()):
        def on_step_end(self, _args, state, *_, **__):
            # (Of TRL's own conditions for log-probabilities this is the one that can be changed between two steps.)
            run.num_iterations = 2 if state.global_step in {2, 3, 4} else 1

    monkeypatch.setitem(runs.TASKS, "high", reward)
    evaluated = dict(eval_strategy="steps", eval_steps=1, eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}))
    run = runs.trainer("high", out, max_steps=8, callbacks=[Changes()], **evaluated)
    run.train()
    # Log-probabilities come first in the third and the fourth rollout. So one reward function is within train after
    # these that need not be, and no further one.
    assert held == [None, None, "train", "train", "train", None, None]


def test_evaluation_and_saving_are_in_train_and_change_no_bit(runs, trl, out, daemon):
    more = dict(
        max_steps=4,
        eval_strategy="steps",
        eval_steps=2,
        eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}),
        save_strategy="steps",
        save_steps=2,
    )
    run = runs.trainer("high", out, **more)
    run.train()
    assert daemon.phases == ["init", "init", *CYCLE * 4]
    assert (Path(out) / "checkpoint-4").is_dir()
    assert runs.digest(run.model) == solo(runs, trl, out + "-solo", **more)


def test_evaluation_and_saving_have_side_phases_where_they_are_declared(runs, trl, out, daemon):
    more = dict(
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}),
        save_strategy="steps",
        save_steps=2,
    )
    saved = []

    class Watched(runs.GRPOTrainer):
        def _save_optimizer_and_scheduler(self, *args, **kwargs):
            saved.append(phase_of(self))
            return super()._save_optimizer_and_scheduler(*args, **kwargs)

    side = dict(eval=dict(seconds=30, every=1), save=dict(seconds=30, every=2))
    run = runs.trainer("high", out, kind=Watched, rollmux=dict(side=side), **more)
    run.train()
    assert saved == ["save"]
    assert daemon.phases == ["init", "init", *CYCLE, "eval", *CYCLE, "eval", "save", "train"]
    (body,) = daemon.registered
    assert [(phase.name, phase.pools, phase.every) for phase in body.side if phase.name != "init"] == [
        ("eval", ["train"], 1),
        ("save", ["train"], 2),
    ]
    assert runs.digest(run.model) == solo(runs, trl, out + "-solo", **more)


def test_evaluating_and_saving_between_construction_and_training_have_slots_of_their_own(runs, out, daemon):
    run = runs.trainer("high", out, max_steps=1, eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}))
    run.evaluate()
    run.save_model(out)
    assert daemon.phases == ["init", "train", "train"]
    run.train()
    assert daemon.phases[3:] == ["init", *CYCLE]


def test_what_was_generated_goes_with_the_rollout(runs, out, daemon):
    runs.trainer("high", out, max_steps=1).train()
    ((phase, figures),) = daemon.measured
    assert phase == "rollout"
    assert figures["sequences"] == 8
    assert 8 <= figures["tokens"] <= 64


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt(), "interrupted"), (OSError("no disk"), "failed")])
@pytest.mark.parametrize("where", ["_generate_single_turn", "_compute_loss", "_calculate_rewards"])
def test_whatever_ends_a_run_releases_its_slot_and_ends_the_job(runs, out, daemon, monkeypatch, where, error, reason):
    run = runs.trainer("high", out, max_steps=2)
    monkeypatch.setattr(run, where, lambda *_, **__: raising(error))
    with pytest.raises(type(error)):
        run.train()
    assert daemon.ended["trl-high"].startswith(reason)
    assert len(daemon.phases) == len([call for call in daemon.calls if call.path.endswith("/release")])


def raising(error):
    raise error


def test_a_constructor_that_fails_gives_the_gpus_back(runs, out, daemon):
    with pytest.raises(ValueError, match="reward weights"):
        runs.trainer("high", out, reward_weights=[1.0, 2.0])
    assert daemon.phases == ["init"]
    assert len([call for call in daemon.calls if call.path.endswith("/release")]) == 1
    assert daemon.ended["trl-high"].startswith("failed: ValueError")


def test_a_lost_slot_ends_the_run_where_the_phase_is_left(runs, out, daemon):
    daemon.lose("train", after=1)
    run = runs.trainer("high", out, max_steps=5)
    with pytest.raises(SlotLost):
        run.train()
    assert run.state.global_step == 2


def test_a_second_training_is_a_second_run(runs, out, daemon):
    run = runs.trainer("high", out, max_steps=1)
    run.train()
    run.train()
    assert daemon.phases == ["init", "init", *CYCLE, "init", *CYCLE]
    assert len(daemon.registered) == 2


# ---- what is registered ----------------------------------------------------------------------------------------------


def test_without_a_server_both_phases_are_on_the_trainers_gpus(runs, out, daemon):
    runs.trainer("high", out, max_steps=1, rollmux=dict(name="mine", slo=2.0, train=dict(gpus=4)))
    (body,) = daemon.registered
    assert (body.name, body.slo, list(body.wants), body.wants["train"].gpus) == ("mine", 2.0, ["train"], 4)
    assert [(phase.name, phase.pools) for phase in body.phases] == [("rollout", ["train"]), ("train", ["train"])]
    assert body.states == {}


def test_a_name_is_made_of_what_the_run_is_called(runs, tmp_path, daemon):
    runs.trainer("high", str(tmp_path / "out dir"), run_name=None)
    runs.trainer("high", str(tmp_path / "x"), run_name="Math 7B: lr=1e-6")
    assert [body.name for body in daemon.registered] == ["out-dir", "Math-7B--lr-1e-6"]


@pytest.fixture
def job_file(daemon, monkeypatch):
    """Register a job as `rollmuxd run` does, and have what makes a command of it join that run."""
    started = []

    def register(**job):
        made = rollmuxd.job("math", idempotency_key="the-key", **job)
        made.start()
        started.append(made)
        monkeypatch.setenv("ROLLMUX_JOB", "math")
        monkeypatch.setenv("ROLLMUX_RUN_KEY", "the-key")

    yield register
    for made in started:
        made.leave()


def test_a_run_that_rollmuxd_run_has_started_joins_that_job_whatever_it_is_called_itself(runs, out, daemon, job_file):
    job_file(train=dict(nodes=1), phases=dict(rollout="train", train="train"))
    told = dict(phases=dict(rollout=dict(pools="train"), train=dict(seconds=2)))  # the same, in other words
    runs.trainer("high", out, max_steps=1, run_name="lr=1e-6", rollmux=told).train()
    assert [body.name for body in daemon.registered] == ["math"]
    assert daemon.phases == ["init", "init", *CYCLE]
    assert daemon.ended == {"math": "finished"}


def test_a_run_whose_phases_are_not_those_of_its_job_file_uses_no_gpu(runs, out, daemon, job_file):
    job_file(rollout=dict(nodes=1), train=dict(nodes=1))
    with pytest.raises(ValueError, match=r'say in its file phases = {rollout = \["train"\], train = \["train"\]}, and'):
        runs.trainer("high", out)
    assert daemon.phases == []
    assert daemon.ended == {}  # that is left to `rollmuxd run`


def test_parking_what_also_generates_in_another_pool_is_refused(runs, out, daemon):
    with pytest.raises(ValueError, match="generates on the GPUs that it trains on, so give it those of train= only"):
        runs.trainer("high", out, rollmux=dict(rollout=dict(nodes=1), train=dict(nodes=1), parking=True))
    assert daemon.calls == []


def test_communicators_are_kept_unless_the_job_says_otherwise(runs, out, daemon):
    with pytest.raises(ValueError, match=r"communicators='drop'"):
        runs.trainer("high", out, rollmux=dict(parking=True, communicators="drop"))
    assert daemon.calls == []
    run = runs.trainer("high", out, max_steps=1, rollmux=dict(parking=True, communicators="suspend"))
    run.train()
    assert daemon.phases == ["init", "init", *CYCLE]


def test_a_wait_for_the_gpus_makes_no_context_on_any_that_it_has_no_memory_on(runs, monkeypatch):
    import torch

    from rollmuxd_hook_kit import ranks

    waited = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: [0, 4096, 4096][index])
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)
    ranks.settle()
    assert waited == [1, 2]


def test_a_misspelt_setting_is_answered_with_the_nearest(runs, out, daemon):
    with pytest.raises(TypeError, match="priority"):
        runs.trainer("high", out, rollmux=dict(priorty=3))
    assert daemon.calls == []


def test_a_trainer_that_hides_what_the_hook_needs_is_refused_before_there_is_one(runs, trl):
    from rollmuxd_hook_trl import Sharing

    class Own(trl.GRPOTrainer):
        def _generate(self, prompts):
            return prompts

    with pytest.raises(UnknownTrl, match=r"Own\._generate takes the place"):
        type("Shared", (Sharing, Own), {})


# ---- with a vLLM server ----------------------------------------------------------------------------------------------


SERVED = dict(use_vllm=True, vllm_mode="server", vllm_importance_sampling_correction=False)


@pytest.fixture
def server(trl, monkeypatch):
    from fake_trl import FakeGeneration
    from trl.trainer import grpo_trainer

    monkeypatch.setattr(grpo_trainer, "VLLMGeneration", FakeGeneration)


@pytest.mark.usefixtures("server")
def test_weights_go_to_a_server_with_both_pools_and_before_the_rollout(runs, trl, out, daemon):
    run = runs.trainer("high", out, max_steps=3, **SERVED)
    run.vllm_generation.watch = lambda: phase_of(run)
    run.train()
    assert run.vllm_generation.asked == [("sync", "sync"), ("generate", "rollout")] * 3
    assert daemon.phases == ["init", "init", *["sync", "rollout", "train"] * 3]
    (body,) = daemon.registered
    assert {phase.name: phase.pools for phase in body.phases} == {
        "rollout": ["rollout"],
        "train": ["train"],
        "sync": ["rollout", "train"],
    }
    assert runs.digest(run.model) == solo(runs, trl, out, max_steps=3, **SERVED)


@pytest.mark.usefixtures("server")
def test_a_rollout_with_weights_that_the_server_has_needs_no_sync(runs, out, daemon):
    runs.trainer("high", out, max_steps=1, gradient_accumulation_steps=4, steps_per_generation=2, **SERVED).train()
    assert daemon.phases == ["init", "init", "sync", *CYCLE, *CYCLE]


@pytest.mark.usefixtures("server")
def test_evaluation_with_a_server_has_both_pools_for_all_of_it(runs, trl, out, daemon):
    more = dict(
        max_steps=2,
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}),
        save_strategy="steps",
        save_steps=1,
        **SERVED,
    )
    run = runs.trainer("high", out, **more)
    run.vllm_generation.watch = lambda: phase_of(run)
    run.train()
    # The evaluation of a step has sent its weights, so the next rollout needs not.
    evaluated = ["sync", "train"]  # and the checkpoint was saved
    assert daemon.phases == ["init", "init", "sync", *CYCLE, *evaluated, *CYCLE, *evaluated, "train"]
    assert {phase for what, phase in run.vllm_generation.asked if what == "sync"} == {"sync"}
    assert runs.digest(run.model) == solo(runs, trl, out + "-solo", **more)


@pytest.mark.usefixtures("server")
def test_an_evaluation_that_was_declared_sends_weights_within_its_own_slot(runs, out, daemon):
    more = dict(eval_strategy="steps", eval_steps=1, eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}))
    side = dict(eval=dict(seconds=30, every=1))
    run = runs.trainer("high", out, max_steps=1, rollmux=dict(side=side), **SERVED, **more)
    run.vllm_generation.watch = lambda: phase_of(run)
    run.train()
    assert run.vllm_generation.asked[2] == ("sync", "eval")
    assert set(run.vllm_generation.asked[3:]) == {("generate", "eval")}
    assert daemon.phases == ["init", "init", "sync", *CYCLE, "eval", "train"]


@pytest.mark.usefixtures("server")
def test_a_server_that_would_roll_out_with_dropped_weights_is_refused(runs, out, daemon):
    def made(options, **more):
        rollout = dict(nodes=1, driver="vllm", gpu_gb=1, ram_gb=1, options=options)
        return runs.trainer("high", out, rollmux=dict(rollout=rollout, train=dict(nodes=1)), **SERVED, **more)

    two_rollouts_a_step = dict(gradient_accumulation_steps=4, steps_per_generation=2)
    for options, more in [
        ({"level": 2}, {}),
        ({"level.rollout": 2}, {}),
        ({"level": 2, "level.sync": 1}, two_rollouts_a_step),
    ]:
        with pytest.raises(ValueError, match="drops its weights"):
            made(options, **more)
    assert daemon.calls == []
    made({"level": 2, "level.sync": 1})
    assert [body.states["rollout"].driver for body in daemon.registered] == ["vllm"]


class Between:
    """A mover: copies of the weights stand for what travels. It writes down which phase was held at each step."""

    expected_s = 7.5

    def __init__(self):
        self.run = None
        self.seen = []

    def publish(self, fence):
        assert fence, "an older slot must not publish"
        self.seen.append(("publish", phase_of(self.run)))
        self.host = {name: tensor.clone() for name, tensor in self.run.model.state_dict().items()}

    def wait(self):
        self.seen.append(("wait", phase_of(self.run)))

    def load(self):
        self.seen.append(("load", phase_of(self.run)))
        self.run.vllm_generation._engine.load_state_dict(self.host)


@pytest.mark.usefixtures("server")
def test_weights_may_travel_while_no_gpu_is_held(runs, trl, out, daemon):
    mover = Between()
    mover.run = run = runs.trainer("high", out, max_steps=3, rollmux=dict(weights=mover), **SERVED)
    run.vllm_generation.watch = lambda: phase_of(run)
    run.train()
    held = ["init", "train", "train"]
    assert mover.seen == [one for at in held for one in (("publish", at), ("wait", None), ("load", "rollout"))]
    assert run.vllm_generation.asked == [("generate", "rollout")] * 3, "TRL's collective is never begun"
    assert daemon.phases == ["init", "init", *CYCLE * 3]
    (body,) = daemon.registered
    assert {phase.name: (phase.pools, phase.gap_s) for phase in body.phases} == {
        "rollout": (["rollout"], 7.5),
        "train": (["train"], 0),
    }
    assert runs.digest(run.model) == solo(runs, trl, out, max_steps=3, **SERVED)


@pytest.mark.usefixtures("server")
def test_an_evaluation_has_both_pools_and_moves_the_weights_in_its_slot(runs, out, daemon):
    more = dict(eval_strategy="steps", eval_steps=1, eval_dataset=runs.Dataset.from_dict({"prompt": ["1="] * 8}))
    mover = Between()
    mover.run = run = runs.trainer("high", out, max_steps=1, rollmux=dict(weights=mover), **SERVED, **more)
    run.vllm_generation.watch = lambda: phase_of(run)
    run.train()
    assert mover.seen[3:] == [("publish", "eval"), ("wait", "eval"), ("load", "eval")]
    assert daemon.phases == ["init", "init", *CYCLE, "eval", "train"]
    assert {tuple(phase.pools) for phase in daemon.registered[0].side if phase.name == "eval"} == {("rollout", "train")}


def test_without_a_server_there_is_nowhere_for_weights_to_go(runs, out, daemon):
    with pytest.raises(ValueError, match="no server that weights go to"):
        runs.trainer("high", out, rollmux=dict(weights=Between()))
    assert daemon.calls == []


# ---- parking ---------------------------------------------------------------------------------------------------------


def lora(runs, kind):
    """A kind of trainer that trains adapters only; its frozen model stands for the reference too."""
    peft = pytest.importorskip("peft", reason="PEFT is not installed: pip install peft")
    adapters = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return dict(kind=lambda **more: kind(peft_config=adapters, **more), beta=0.1)


def own_rollouts(runs, kind):
    """A kind of trainer with a ``rollout_func`` of the user's."""
    import torch

    def rollout(prompts, trainer):
        ids = torch.tensor([trainer.processing_class(prompt)["input_ids"] for prompt in prompts])
        made = trainer.model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=8)
        tokens = made[:, ids.shape[1] :].tolist()
        return {"prompt_ids": ids.tolist(), "completion_ids": tokens, "logprobs": [[0.0] * len(one) for one in tokens]}

    return dict(kind=lambda **more: kind(rollout_func=rollout, **more))


@pytest.mark.parametrize("shape", [lora, own_rollouts])
def test_of_another_shape_it_is_parked_between_phases_all_the_same(runs, trl, out, daemon, shape):
    moved = []

    class Parked(runs.GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            if self._turns.current is None or shape is lora:  # (its log-probabilities come first)
                assert daemon.result_of(daemon.order("park", "train")).ok
                moved.append({tensor.untyped_storage().nbytes() for tensor in self.model.parameters()})
                assert daemon.result_of(daemon.order("load", "train", warm=True)).ok
            return super()._calculate_rewards(*args, **kwargs)

    run = runs.trainer("high", out, max_steps=2, rollmux=dict(parking=True), **shape(runs, Parked))
    run.train()
    assert moved == [{0}] * 2
    assert daemon.phases == ["init", "init", *CYCLE * 2]
    alone = runs.trainer("high", out, max_steps=2, **shape(runs, trl.GRPOTrainer))
    alone.train()
    assert runs.digest(run.model) == runs.digest(alone.model)


def test_deepspeed_cannot_be_parked_and_is_refused_before_anything_is_asked_for(runs, out, daemon):
    config = runs.GRPOConfig(output_dir=out, use_cpu=True, bf16=False)
    config.deepspeed = {"zero_optimization": {"stage": 3}}
    with pytest.raises(ValueError, match=r"DeepSpeed keeps weights .* train with FSDP"):
        runs.GRPOTrainer(model=None, args=config, rollmux=dict(parking=True))
    assert daemon.calls == []


def test_parked_and_loaded_between_any_two_phases_not_a_bit_is_different(runs, trl, out, daemon):
    moved = []

    class Parked(runs.GRPOTrainer):
        """Between phases everything goes to host memory and back, as if another job had had a turn."""

        def _generate(self, prompts):
            if self._turns.current is not None:
                self._turns.leave()
            moved.append(self._moved())
            return super()._generate(prompts)

        def _calculate_rewards(self, *args, **kwargs):
            moved.append(self._moved())
            return super()._calculate_rewards(*args, **kwargs)

        def _moved(self):
            assert daemon.result_of(daemon.order("park", "train")).ok
            sizes = {tensor.untyped_storage().nbytes() for tensor in self.model.parameters()}
            assert daemon.result_of(daemon.order("load", "train", warm=True)).ok
            return sizes

    more = dict(max_steps=3)
    run = runs.trainer("high", out, kind=Parked, rollmux=dict(parking=True), **more)
    run.train()
    assert moved == [{0}] * 6
    assert runs.digest(run.model) == solo(runs, trl, out, **more)


def test_a_resumed_run_is_parked_like_any_other(runs, trl, out, daemon):
    more = dict(max_steps=2, save_strategy="steps", save_steps=1)
    runs.trainer("high", out, **more).train()
    parked = []

    class Parked(runs.GRPOTrainer):
        def _calculate_rewards(self, *args, **kwargs):
            for kind in ("park", "load"):
                parked.append(daemon.result_of(daemon.order(kind, "train", warm=True)).error)
            return super()._calculate_rewards(*args, **kwargs)

    run = runs.trainer("high", out, kind=Parked, rollmux=dict(parking=True), **more)
    run.train(resume_from_checkpoint=f"{out}/checkpoint-1")
    assert parked == ["", ""]
    assert runs.digest(run.model) == solo(runs, trl, out + "-solo", **more)


def test_after_training_the_model_is_the_users_again(runs, out, daemon, monkeypatch):
    from rollmuxd_hook_trl import trainer

    states = []

    class Kept(trainer.TorchState):
        def attach(self, *args, **kwargs):
            states.append(self)
            return super().attach(*args, **kwargs)

    monkeypatch.setattr(trainer, "TorchState", Kept)
    run = runs.trainer("high", out, max_steps=1, rollmux=dict(parking=True))
    run.train()
    states[0].discard()  # as a daemon orders it of a job that has ended
    assert 0 not in [tensor.untyped_storage().nbytes() for tensor in run.model.parameters()]
    run.save_model(out)
    assert (Path(out) / "model.safetensors").stat().st_size > 10_000


# ---- without a daemon ------------------------------------------------------------------------------------------------


def test_without_a_daemon_nothing_is_different(runs, trl, out, capfd, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime._said_alone", False)
    run = runs.trainer("same", out, max_steps=3)
    run.train()
    assert runs.digest(run.model) == solo(runs, trl, out, "same", max_steps=3)
    assert "no daemon" in capfd.readouterr().err
