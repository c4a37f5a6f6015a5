"""What must be so of a verl for the hook to be right. No verl is imported: its source is read."""

from typing import Final

from rollmuxd_hook_kit.contract import Class, Contract, Method

_SELF: Final = Method(("self",))
_BATCH: Final = Method(("self", "batch", "..."))

#: what both trainers do on the trainer's GPUs, in a slot for ``train``
TRAINING: Final = (
    "_compute_reward_colocate",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_update_critic",
    "_update_actor",
)

PPO_TRAINER: Final = Class(
    path="verl/trainer/ppo/ray_trainer.py",
    name="RayPPOTrainer",
    methods={
        "init_workers": Method(("self",), calls=("checkpoint_manager.sleep_replicas",)),
        "fit": Method(
            ("self",),
            calls=(
                "_load_checkpoint",
                "async_rollout_manager.generate_sequences",
                "checkpoint_manager.sleep_replicas",
                "checkpoint_manager.update_weights",
                "_save_checkpoint",
                "_validate",
                *TRAINING,
            ),
        ),
        "_validate": Method(("self", "merged"), calls=("async_rollout_manager.generate_sequences",)),
        "_save_checkpoint": _SELF,
        **dict.fromkeys(TRAINING, Method(("self", "batch"))),
    },
    mentions=("self.config", "self.global_steps", "self.use_critic", "self.use_reference_policy"),
)

V1_TRAINER: Final = Class(
    path="verl/trainer/ppo/v1/trainer_base.py",
    name="PPOTrainer",
    methods={
        "__init__": Method(("self", "config")),
        "init": Method(("self",), calls=("_setup", "on_init_end")),
        "_setup": Method(("self",), calls=("checkpoint_manager.sleep_replicas", "_load_checkpoint")),
        "fit": Method(("self", "agent_loop_manager"), calls=("step", "_save_checkpoint", "on_step_end", "_validate")),
        "step": Method(("self", "metrics", "timing_raw"), calls=("_step_once",)),
        "_add_batch_to_generate": _SELF,
        "_step_once": Method(
            ("self", "metrics", "timing_raw", "sample_batch_size"),
            calls=("replay_buffer.sample", "on_sample_end", *TRAINING),
        ),
        "_validate": _SELF,
        "_save_checkpoint": _SELF,
        **dict.fromkeys(TRAINING, _BATCH),
    },
    mentions=("self.config", "self.global_steps", "self.trainer_mode", "self.use_critic", "self.use_reference_policy"),
    since=(0, 9),
)

#: of the synchronous mode: where the rollout ends, and where weights are sent
V1_SYNC: Final = Class(
    path="verl/trainer/ppo/v1/trainer_sync.py",
    name="PPOTrainerSync",
    methods={
        "on_init_end": Method(("self",), calls=("checkpoint_manager.update_weights",)),
        "on_step_end": Method(("self",), calls=("checkpoint_manager.update_weights",)),
        "on_sample_end": Method(("self",), calls=("checkpoint_manager.sleep_replicas",)),
    },
    since=(0, 9),
)

MANAGER: Final = Class(
    path="verl/checkpoint_engine/base.py",
    name="CheckpointEngineManager",
    methods={
        "sleep_replicas": _SELF,
        "wake_up_replicas": _SELF,
        "update_weights": Method(("self", "global_steps")),
    },
)

VERL: Final = Contract(
    framework="verl",
    package="verl",
    hook="rollmuxd_hook_verl",
    known=((0, 7, 1), (0, 10)),
    classes=(PPO_TRAINER, V1_TRAINER, V1_SYNC, MANAGER),
    take_out="unset VERL_USE_EXTERNAL_MODULES",
    chained=("__init__", "init_workers", "init", "_setup", "fit", "step", "_validate", "_save_checkpoint", *TRAINING),
)
CONTRACTS: Final = (VERL,)
