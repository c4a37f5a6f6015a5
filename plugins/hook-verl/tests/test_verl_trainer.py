"""verl's own ``RayPPOTrainer.fit`` over workers that stand in (``verl_tiny``): where its phases are, and that they
change no bit of what it learns.

The fake daemon grants at once and writes down which phases ran.
"""

import asyncio
import contextlib
import importlib.util
import os
import sys
import warnings
from pathlib import Path

import pytest

# Looked for only: each of pytest's workers imports this file, and one of them verl.
if any(importlib.util.find_spec(needed) is None for needed in ("torch", "ray", "tensordict", "verl")):
    pytest.skip("verl is not installed: .ci/run says what these tests need of it", allow_module_level=True)

from rollmuxd import SlotLost
from rollmuxd.testing import fake_daemon
from rollmuxd_hook_verl import UnknownVerl

# verl, Ray and transformers warn of each other; to import them takes its time.
pytestmark = [pytest.mark.filterwarnings("ignore")]

STEP = ["rollout", "train", "sync"]


@pytest.fixture(scope="module")
def tiny():
    """The program, as a module, in a verl that has imported the hook."""
    import torch

    # looptime asks for a loop, which verl's asyncio.run would leave to nobody: unclosed, it fails some other test.
    with contextlib.suppress(RuntimeError):
        asyncio.get_event_loop_policy().get_event_loop().close()
    asyncio.set_event_loop(None)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "rollmuxd_hook_verl")
        yield importlib.import_module("verl_tiny")
    sys.path.remove(str(Path(__file__).parent))
    torch.set_num_threads(threads)


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


def steps(many):
    return f"trainer.total_training_steps={many}"


def ran(trainer):
    """The same trainer, through its whole run; all that is asked of engine and workers is noted with the phase."""
    trainer.init_workers()
    workers = trainer.actor_rollout_wg
    workers.watch = workers.engine.watch = lambda: trainer._turns.current
    trainer.fit()
    return trainer


def solo(tiny, out, *more):
    """The weights of the same run by verl alone."""
    theirs = tiny.ray_trainer.RayPPOTrainer.theirs
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.ray_trainer, "RayPPOTrainer", theirs)
        trainer = tiny.trainer(out, *more)
    trainer.init_workers()
    trainer.fit()
    assert not hasattr(trainer, "_turns")
    return tiny.digest(trainer.actor_rollout_wg.model)


# ---- where the phases are --------------------------------------------------------------------------------------------


def test_each_step_is_a_rollout_a_train_and_a_sync_and_not_a_bit_is_different(tiny, out, daemon):
    trainer = ran(tiny.trainer(out, steps(3), "trainer.experiment_name=math 7B"))
    assert daemon.phases == ["init", *STEP * 3]
    assert daemon.ended == {"math-7B": "finished"}
    assert tiny.digest(trainer.actor_rollout_wg.model) == solo(tiny, out, steps(3))


def test_the_engine_generates_in_the_rollout_and_sleeps_before_it_is_left(tiny, out, daemon):
    workers = ran(tiny.trainer(out, steps(2))).actor_rollout_wg
    asked = [("generate", "rollout"), ("sleep", "rollout"), ("update", "sync")]
    assert workers.engine.asked == [("sleep", None), ("update", "init"), *asked * 2]
    assert workers.asked == [("init", None), *[("log_prob", "train"), ("update_actor", "train")] * 2]


def test_a_resumed_run_loads_its_checkpoint_in_init_and_learns_the_same(tiny, out, daemon):
    more = ("trainer.save_freq=2", "trainer.resume_mode=auto")
    ran(tiny.trainer(out, steps(2), *more))
    resumed = ran(tiny.trainer(out, steps(4), *more)).actor_rollout_wg
    assert ("load", "init") in resumed.asked
    assert tiny.digest(resumed.model) == solo(tiny, out + "-solo", steps(4))


def test_validation_and_saving_are_in_sync_and_train_where_they_are_not_declared(tiny, out, daemon):
    more = ("trainer.val_before_train=True", "trainer.test_freq=1", "trainer.save_freq=2")
    workers = ran(tiny.trainer(out, steps(2), *more)).actor_rollout_wg
    assert daemon.phases == ["init", "sync", *[*STEP, "sync"] * 2]
    assert ("save", "train") in workers.asked
    assert [phase for what, phase in workers.engine.asked if what == "generate"] == ["sync", *["rollout", "sync"] * 2]


def test_validation_and_saving_have_side_phases_where_they_are_declared(tiny, out, daemon):
    side = ("+rollmux.side.eval.seconds=30", "+rollmux.side.save={seconds: 30, every: 2}")
    more = ("trainer.val_before_train=True", "trainer.test_freq=1", "trainer.save_freq=2")
    trainer = ran(tiny.trainer(out, steps(2), *side, *more))
    workers = trainer.actor_rollout_wg
    assert daemon.phases == ["init", "eval", *STEP, "eval", "rollout", "train", "save", "sync", "eval"]
    assert ("save", "save") in workers.asked
    assert [phase for what, phase in workers.engine.asked if what == "generate"] == ["eval", *["rollout", "eval"] * 2]
    (body,) = daemon.registered
    assert [(phase.name, phase.every) for phase in body.side] == [("init", 0), ("eval", 0), ("save", 2)]
    assert tiny.digest(workers.model) == solo(tiny, out + "-solo", steps(2), *more)


def test_a_reference_model_computes_in_train(tiny, out, daemon):
    more = "actor_rollout_ref.actor.use_kl_loss=True"
    trainer = tiny.trainer(out, steps(1), more, role="ActorRolloutRef")
    workers = ran(trainer).actor_rollout_wg
    assert workers.asked == [("init", None), ("log_prob", "train"), ("ref", "train"), ("update_actor", "train")]


def test_a_reward_model_beside_the_trainer_scores_in_train_and_in_validation(tiny, out, daemon):
    more = ("reward.reward_model.enable=True", "trainer.test_freq=1", "+rollmux.side.eval.seconds=30")
    trainer = tiny.trainer(out, steps(1), *more)
    trainer.init_workers()
    model, engine = trainer.reward_loop_manager, trainer.actor_rollout_wg.engine
    model.watch = engine.watch = lambda: trainer._turns.current
    trainer.fit()
    assert model.asked == ["train", "eval"]
    assert engine.asked[-3:] == [("generate", "eval"), ("sleep", "eval"), ("update", "eval")]
    assert daemon.phases == ["init", *STEP, "eval"]


def test_what_the_controller_does_between_phases_holds_no_gpu(tiny, out, daemon, monkeypatch):
    held = []

    def noting(name):
        done = getattr(trainer, name)
        monkeypatch.setattr(
            trainer, name, lambda *a, **k: (held.append((name, trainer._turns.current)), done(*a, **k))[1]
        )

    trainer = tiny.trainer(out, steps(2))
    noting("_get_gen_batch")  # after init, and after sync
    noting("_balance_batch")  # after the rollout
    ran(trainer)
    assert held == [("_get_gen_batch", None), ("_balance_batch", None)] * 2


def test_what_was_generated_goes_with_the_rollout(tiny, out, daemon):
    ran(tiny.trainer(out, steps(1)))
    assert daemon.measured == [("rollout", {"sequences": 24.0, "tokens": 144.0})]


# ---- verl's newer trainer --------------------------------------------------------------------------------------------


@pytest.fixture
def v1(tiny):
    """The program for ``trainer.use_v1=True``."""
    return importlib.import_module("verl_tiny_v1")


def test_the_newer_trainer_has_the_same_phases_and_not_a_bit_is_different(v1, tiny, out, daemon):
    more = (steps(2), "trainer.val_before_train=True", "trainer.test_freq=1", "trainer.save_freq=2")
    side = ("+rollmux.side.eval.seconds=30", "+rollmux.side.save.seconds=30", "trainer.experiment_name=tiny")
    trainer, agents = v1.trainer(out, *more, *side)
    workers = trainer.actor_rollout_wg
    workers.watch = workers.engine.watch = lambda: trainer._turns.current
    trainer.fit(agents)
    assert daemon.phases == ["init", "eval", *STEP, "eval", "rollout", "train", "save", "sync", "eval"]
    assert daemon.ended == {"tiny": "finished"}
    generated = [("generate", "rollout")] * 4  # one for each answer to a question
    step = [*generated, ("sleep", "rollout"), ("update", "sync"), ("generate", "eval")]
    assert workers.engine.asked[2:] == [("generate", "eval"), *step * 2]
    learned = [("log_prob", "train"), ("update_actor", "train")]
    assert workers.asked == [("init", None), *learned * 2, ("save", "save")]

    alone, agents = v1.trainer(out + "-alone", *more, alone=True)
    alone.fit(agents)
    assert not hasattr(alone, "_turns")
    assert tiny.digest(workers.model) == tiny.digest(alone.actor_rollout_wg.model)


#: without which verl itself refuses the mode
SEPARATE = (
    "trainer.v1.trainer_mode=separate_async",
    "trainer.v1.separate_async.parameter_sync_step=1",
    "actor_rollout_ref.rollout.nnodes=1",
    "actor_rollout_ref.rollout.n_gpus_per_node=1",
    "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
)
ALONE = "actor_rollout_ref.hybrid_engine=False"


def test_an_asynchronous_run_trains_and_sends_weights_in_a_slot_and_waits_for_batches_without(v1, tiny, out, daemon):
    more = (*SEPARATE, ALONE, steps(3), "trainer.val_before_train=True", "trainer.test_freq=1")
    trainer, agents = v1.trainer(out, *more, "trainer.experiment_name=tiny")
    workers = trainer.actor_rollout_wg
    workers.watch = workers.engine.watch = lambda: trainer._turns.current
    trainer.fit(agents)
    assert daemon.phases == ["init", "train", "train", "train"]
    assert daemon.ended == {"tiny": "finished"}
    assert {where for what, where in workers.engine.asked if what == "generate"} == {None}
    assert [where for what, where in workers.engine.asked if what == "update"][1:] == ["train"] * 3
    assert workers.asked == [("init", None), *[("copy", "train"), ("log_prob", "train"), ("update_actor", "train")] * 3]

    alone, agents = v1.trainer(out + "-alone", *more, alone=True)
    alone.fit(agents)
    assert not hasattr(alone, "_turns")
    assert tiny.digest(workers.model) == tiny.digest(alone.actor_rollout_wg.model)


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["trainer.v1.trainer_mode=colocate_async"], "use the same GPUs all the time"),
        ([*SEPARATE], "an engine of this run would wake on the trainer's GPUs"),
    ],
    ids=["colocate_async", "an_engine_beside_the_trainer"],
)
def test_modes_of_the_newer_trainer_that_would_use_gpus_of_another_job_are_refused(v1, out, daemon, more, said):
    with pytest.raises(ValueError, match=said):
        v1.trainer(out, *more)
    assert daemon.calls == []


def test_an_error_of_the_newer_trainer_ends_the_job(v1, out, daemon):
    trainer, agents = v1.trainer(out, steps(2), "trainer.experiment_name=tiny")
    trainer.actor_rollout_wg.update_actor = lambda *_: raising(OSError("no disk"))
    with pytest.raises(OSError, match="no disk"):
        trainer.fit(agents)
    assert daemon.ended["tiny"].startswith("failed")
    assert daemon.phases == ["init", "rollout", "train"]
    assert len([call for call in daemon.calls if call.path.endswith("/release")]) == 3


# ---- verl's trainer whose rollouts are one step ahead ----------------------------------------------------------------


@pytest.fixture
def one_step(tiny):
    """The program for ``one_step_off_policy``."""
    return importlib.import_module("verl_tiny_one_step")


def test_rollouts_one_step_ahead_run_beside_the_slot_in_which_it_sends_weights_and_trains(one_step, tiny, out, daemon):
    more = (steps(3), "trainer.val_before_train=True", "trainer.test_freq=1", "trainer.save_freq=2")
    trainer = one_step.trainer(out, *more, "trainer.experiment_name=tiny", "+rollmux.side.save.seconds=30")
    trainer.init_workers()
    workers = trainer.actor_rollout_wg
    workers.watch = lambda: trainer._turns.current
    asyncio.run(trainer.fit())
    assert daemon.phases == ["init", "train", "train", "save", "train", "save"]
    assert daemon.ended == {"tiny": "finished"}
    step = [("send", "train"), ("log_prob", "train"), ("update_actor", "train")]
    assert workers.asked == [("init", None), ("send", "init"), *step, *step, ("save", "save"), *step, ("save", "save")]
    (body,) = daemon.registered
    assert (body.asynchronous.ahead, [phase.name for phase in body.phases]) == (0, ["train"])

    alone = one_step.trainer(out + "-alone", *more, alone=True)
    alone.init_workers()
    asyncio.run(alone.fit())
    assert not hasattr(alone, "_turns")
    assert tiny.digest(workers.model) == tiny.digest(alone.actor_rollout_wg.model)


def test_rollouts_one_step_ahead_are_waited_for_without_a_slot_and_made_while_it_trains(one_step, out, daemon):
    trainer = one_step.trainer(out, steps(3))
    trainer.init_workers()
    engine = trainer.actor_rollout_wg.engine
    engine.watch = lambda: trainer._turns.current
    asyncio.run(trainer.fit())
    assert engine.asked == [
        ("update", "init"),
        ("generate", None),
        ("update", "train"),
        ("generate", "train"),
        ("update", "train"),
        ("generate", "train"),
        ("update", "train"),
    ]


def test_where_weights_cannot_be_sent_the_slot_is_given_back_and_the_job_ends_with_that(one_step, out, daemon):
    trainer = one_step.trainer(out, steps(3), "trainer.experiment_name=tiny")
    trainer.init_workers()
    send = trainer.checkpoint_manager.update_weights
    gone = ConnectionError("an engine is gone")
    trainer.checkpoint_manager.update_weights = lambda step: raising(gone) if step else send(step)
    with pytest.raises(ConnectionError, match="an engine is gone"):
        asyncio.run(trainer.fit())
    assert daemon.ended == {"tiny": "failed: ConnectionError: an engine is gone"}
    assert daemon.phases == ["init", "train"]
    assert len([call for call in daemon.calls if call.path.endswith("/release")]) == 2


# ---- what is registered ----------------------------------------------------------------------------------------------


def test_what_stands_under_rollmux_is_what_the_job_says(tiny, out, daemon):
    ran(tiny.trainer(out, steps(1), "+rollmux={name: mine, slo: 2.0, train: {ram_gb: 3}}", "trainer.n_gpus_per_node=4"))
    (body,) = daemon.registered
    assert (body.name, body.slo, list(body.wants), body.wants["train"].gpus) == ("mine", 2.0, ["train"], 4)
    assert body.states["train"].ram_gb == 3
    assert {phase.name: phase.pools for phase in body.phases} == {phase: ["train"] for phase in STEP}


def test_what_the_how_to_says_is_what_verls_command_line_takes(tiny):
    from verl_tiny_parts import composed

    from rollmuxd_hook_verl.trainer import _given

    said = ("+rollmux.name=math-7b", "+rollmux.slo=2.0", "+rollmux.side.eval.seconds=120", "+rollmux.train.ram_gb=80")
    given = _given(composed(*said))
    assert given == {"name": "math-7b", "slo": 2.0, "side": {"eval": {"seconds": 120}}, "train": {"ram_gb": 80}}


def test_the_engine_is_asleep_where_the_cycle_ends_and_another_job_follows(tiny, out, daemon):
    ran(tiny.trainer(out, steps(1)))
    (body,) = daemon.registered
    assert [phase.name for phase in body.phases] == ["sync", "rollout", "train"]


def test_what_rollmuxd_run_has_started_is_called_as_its_job(tiny, out, daemon, monkeypatch):
    monkeypatch.setenv("ROLLMUX_JOB", "math-7b")
    monkeypatch.setenv("ROLLMUX_RUN_KEY", "k1")
    ran(tiny.trainer(out, steps(1), "trainer.experiment_name=another"))
    (body,) = daemon.registered
    assert (body.name, body.idempotency_key) == ("math-7b", "k1")


@pytest.mark.parametrize(
    ("more", "error", "said"),
    [
        ("+rollmux.priorty=3", TypeError, "priority"),
        ("+rollmux=math", TypeError, "is a mapping"),
        ("+rollmux.movable=warm", ValueError, "load their state where it was, and cannot on other GPUs"),
        ("+rollmux.rollout.nodes=1", ValueError, "the GPUs that it trains on"),
        ("+rollmux.phases={rollout: train, train: train}", ValueError, "there is no sync among rollout, train"),
        ("trainer.device=cuda", ValueError, r"actor\.fsdp_config\.param_offload=True .*optimizer_offload=True"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_anything_is_sent(tiny, out, daemon, more, error, said):
    with pytest.raises(error, match=said):
        tiny.trainer(out, more)
    assert daemon.calls == []


def test_a_trainer_with_a_loop_of_its_own_is_refused(tiny, out, daemon, monkeypatch):
    class Own(tiny.ray_trainer.RayPPOTrainer):
        def fit(self):
            return None

    monkeypatch.setattr(tiny.ray_trainer, "RayPPOTrainer", Own)
    with pytest.raises(UnknownVerl, match=r"Own\.fit takes the place of verl's"):
        tiny.trainer(out)
    assert daemon.calls == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("separation.ray_trainer", "SeparateRayPPOTrainer"),
        ("fully_async_policy.fully_async_trainer", "FullyAsyncTrainer"),
    ],
)
def test_verls_experiments_with_loops_of_their_own_are_refused(tiny, module, name):
    kind = getattr(importlib.import_module(f"verl.experimental.{module}"), name)
    kind = getattr(getattr(kind, "__ray_metadata__", None), "modified_class", kind)  # what an actor is made of
    with pytest.raises(UnknownVerl, match=r"takes the place of verl's.*unset VERL_USE_EXTERNAL_MODULES"):
        kind(config=None)


# ---- what goes wrong -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "reason"), [(KeyboardInterrupt(), "interrupted"), (OSError("no disk"), "failed")])
@pytest.mark.parametrize("where", ["compute_log_prob", "update_actor", "update_weights"])
def test_whatever_ends_a_run_releases_its_slot_and_ends_the_job(tiny, out, daemon, where, error, reason):
    trainer = tiny.trainer(out, steps(2), "trainer.experiment_name=tiny")
    trainer.init_workers()
    setattr(trainer.actor_rollout_wg, where, lambda *_, **__: raising(error))
    with pytest.raises(type(error)):
        trainer.fit()
    assert daemon.ended["tiny"].startswith(reason)
    assert len(daemon.phases) == len([call for call in daemon.calls if call.path.endswith("/release")])


def raising(error):
    raise error


def test_workers_that_cannot_be_made_give_the_gpus_back(tiny, out, daemon):
    trainer = tiny.trainer(out, "trainer.experiment_name=tiny")
    trainer.resource_pool_manager.create_resource_pool = lambda: raising(ValueError("no GPUs left"))
    with pytest.raises(ValueError, match="no GPUs left"):
        trainer.init_workers()
    assert daemon.phases == ["init"]
    assert len([call for call in daemon.calls if call.path.endswith("/release")]) == 1
    assert daemon.ended["tiny"].startswith("failed: ValueError")


def test_a_lost_slot_ends_the_run_where_the_phase_is_left(tiny, out, daemon):
    daemon.lose("train", after=1)
    trainer = tiny.trainer(out, steps(5))
    trainer.init_workers()
    with pytest.raises(SlotLost):
        trainer.fit()
    assert trainer.global_steps == 2


# ---- parking ---------------------------------------------------------------------------------------------------------


class Parked:
    """Between phases the GPUs are another job's: parked, seen to be empty, and loaded again."""

    def __init__(self, trainer, daemon):
        self.daemon = daemon
        self.slept = []
        go = trainer._turns.go

        def moved(phase):
            if trainer._turns.current not in (None, phase):
                trainer._turns.leave()
            if trainer._turns.current is None and phase != "init":
                self.ordered("park")
                self.slept.append((phase, trainer.actor_rollout_wg.engine.weights is None))
                self.ordered("load")
            go(phase)

        trainer._turns.go = moved

    def ordered(self, kind):
        assert self.daemon.result_of(self.daemon.order(kind, "train", warm=True)).ok


def test_parked_and_loaded_between_any_two_phases_not_a_bit_is_different(tiny, out, daemon):
    more = (steps(3), "trainer.test_freq=1")
    trainer = tiny.trainer(out, "+rollmux.parking=True", "+rollmux.side.eval.seconds=9", *OFFLOAD, *more)
    parked = Parked(trainer, daemon)
    workers = ran(trainer).actor_rollout_wg
    assert parked.slept == [(phase, True) for phase in ["rollout", "train", "sync", "eval"] * 3]
    # It is woken for those who generate, and not for the others.
    assert [what for what, _ in workers.engine.asked].count("update") == 1 + 3 * 3
    assert tiny.digest(workers.model) == solo(tiny, out, *more)


OFFLOAD = (
    "actor_rollout_ref.actor.fsdp_config.param_offload=True",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
)


def test_parking_is_refused_where_verl_would_keep_something_on_the_gpus(tiny, out, daemon):
    more = ("actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.actor.use_kl_loss=True")
    with pytest.raises(ValueError, match="between its phases") as refused:
        tiny.trainer(out, "+rollmux.parking=True", OFFLOAD[0], *more, role="ActorRolloutRef")
    for name in (
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.ref.fsdp_config.param_offload=True",
        "actor_rollout_ref.rollout.free_cache_engine=True",
    ):
        assert name in str(refused.value)
    assert "actor.fsdp_config.param_offload" not in str(refused.value)
    assert daemon.calls == []


# ---- without a daemon ------------------------------------------------------------------------------------------------


def test_without_a_daemon_nothing_is_different(tiny, out, capfd, monkeypatch):
    monkeypatch.setattr("rollmuxd.client.runtime._said_alone", False)
    trainer = ran(tiny.trainer(out, steps(2)))
    assert tiny.digest(trainer.actor_rollout_wg.model) == solo(tiny, out, steps(2))
    assert "no daemon" in capfd.readouterr().err
    assert os.environ.get("ROLLMUX_URL") is None
