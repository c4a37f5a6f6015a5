"""What each hook rests on: releases that were looked at, and the classes, methods, parameters and calls. Data only."""

from typing import Final

from rollmuxd_hook_kit.contract import Class, Contract, Method

_PPO_TRAINER: Final = "openrlhf/trainer/ppo_trainer.py"
OPENRLHF: Final = Contract(
    framework="OpenRLHF",
    package="openrlhf",
    hook="rollmuxd_hooks.openrlhf",
    known=((0, 10), (0, 12)),
    classes=(
        Class(
            path=_PPO_TRAINER,
            name="BasePPOTrainer",
            methods={
                "train_step": Method(
                    ("self", "rollout_samples", "global_step"),
                    calls=("experience_maker.make_experience_batch", "ppo_train", "broadcast_to_vllm"),
                ),
                "broadcast_to_vllm": Method(("self",)),
                "save_logs_and_checkpoints": Method(("self", "global_step", "logs_dict", "client_states")),
                "save_best_checkpoint": Method(("self", "eval_metrics", "global_step", "client_states")),
            },
            mentions=("self.args.ds.enable_sleep", "self.args.vllm.enable_sleep"),
        ),
        Class(
            path=_PPO_TRAINER,
            name="PPOTrainer",
            methods={
                "__init__": Method(("self", "pretrain", "strategy", "...")),
                "fit": Method(
                    ("self", "global_step"),
                    calls=(
                        "samples_generator.generate_samples",
                        "train_step",
                        "save_logs_and_checkpoints",
                        "evaluate",
                        "broadcast_to_vllm",
                    ),
                ),
                "evaluate": Method(("self", "global_step"), calls=("samples_generator.generate_eval_samples",)),
            },
        ),
        Class(
            path="openrlhf/trainer/ppo_utils/samples_generator.py",
            name="SamplesGenerator",
            methods={"generate_samples": Method(("self",)), "generate_eval_samples": Method(("self",))},
            mentions=("self.args.vllm.enable_sleep",),
        ),
        Class(
            path="openrlhf/trainer/ray/launcher.py",
            name="RayActorGroup",
            methods={"async_save_model": Method(("self",))},
        ),
        Class(
            path="openrlhf/cli/train_ppo_ray.py",
            name="",
            methods={
                "train": Method(
                    ("args",),
                    calls=(
                        "get_strategy",
                        "PPOTrainer.remote",
                        "ppo_trainer.fit.remote",
                        "actor_model.async_save_model",
                    ),
                )
            },
            mentions=("args.train.async_enable", "args.train.colocate_all", "args.vllm.enable_sleep"),
        ),
    ),
    take_out="python -m openrlhf.cli.train_ppo_ray",
)

SKYRL: Final = Contract(
    framework="SkyRL",
    package="skyrl",
    hook="rollmuxd_hooks.skyrl",
    known=((0, 2), (0, 4)),
    classes=(
        Class(
            path="skyrl/train/trainer.py",
            name="RayPPOTrainer",
            methods={
                "train": Method(
                    ("self",),
                    calls=(
                        "generate",
                        "postprocess_generator_output",
                        "fwd_logprobs_values_reward",
                        "train_critic_and_policy",
                        "save_checkpoints",
                        "save_models",
                        "eval",
                        "dispatch.save_weights_for_sampler",
                        "inference_engine_client.sleep",
                    ),
                ),
                "generate": Method(("self", "input_batch")),
                "postprocess_generator_output": Method(("self", "generator_output", "uids", "...")),
                "fwd_logprobs_values_reward": Method(("self", "training_input")),
                "train_critic_and_policy": Method(("self", "data")),
                "eval": Method(("self", "...")),
                "save_checkpoints": Method(("self",)),
                "save_models": Method(("self",)),
                "build_models": Method(("self", "PolicyWorker", "CriticWorker", "RefWorker")),
            },
            mentions=("self.colocate_all",),
        ),
        Class(
            path="skyrl/backends/skyrl_train/workers/worker_dispatch.py",
            name="WorkerDispatch",
            methods={
                "save_weights_for_sampler": Method(("self", "...")),
                "_ensure_on_gpu": Method(("self", "model", "need_optimizer", "need_model")),
                "_offload": Method(("self", "model", "offload_optimizer", "offload_model")),
            },
            mentions=("self._ensure_on_gpu", "self._gpu_state", "state.model_on_gpu", "state.optimizer_on_gpu"),
        ),
        Class(
            path="skyrl/train/entrypoints/main_base.py",
            name="BasePPOExp",
            methods={
                "run": Method(("self",), calls=("_setup_trainer",)),
                "_setup_trainer": Method(("self",), calls=("get_trainer", "trainer.build_models")),
                "get_trainer": Method(("self", "cfg", "...")),
            },
        ),
        Class(
            path="skyrl/train/entrypoints/main_base.py",
            name="",
            methods={
                "main": Method((), calls=("SkyRLTrainConfig.from_cli_overrides", "validate_cfg", "initialize_ray"))
            },
        ),
    ),
    take_out="python -m skyrl.train.entrypoints.main_base",
)

AREAL: Final = Contract(
    framework="AReaL",
    package="areal",
    hook="rollmuxd_hooks.areal",
    known=((1, 0, 3), (1, 0, 5)),
    classes=(
        Class(
            path="areal/trainer/rl_trainer.py",
            name="PPOTrainer",
            methods={
                "__init__": Method(("self", "config", "...")),
                "train": Method(
                    ("self", "workflow", "..."),
                    calls=(
                        "_onload_rollout",
                        "actor.prepare_batch",
                        "_offload_rollout",
                        "_onload_model",
                        "actor.ppo_update",
                        "actor.update_weights",
                        "_offload_model",
                        "_evaluate",
                    ),
                ),
                "_is_actor_rollout_colocated": Method(("self", "config")),
                "_onload_rollout": Method(("self", "is_eval")),
                "_offload_rollout": Method(("self", "is_eval")),
                "_onload_model": Method(("self", "engine", "role")),
                "_offload_model": Method(("self", "engine", "role")),
            },
            mentions=(
                "self._should_offload_rollout",
                "self._should_offload_actor",
                "config.actor.offload",
                "config.critic.offload",
                "config.ref.offload",
                "self.eval_rollout",
            ),
        ),
    ),
    take_out="from areal import PPOTrainer",
    chained=("train", "_onload_rollout", "_offload_rollout", "_onload_model", "_offload_model"),
)

_GROUP: Final = ("self", "rollout_id")
SLIME: Final = Contract(
    framework="slime",
    package="",
    hook="rollmuxd_hooks.slime",
    known=((0, 2, 4), (0, 3, 2)),
    classes=(
        Class(
            path="slime/ray/placement_group.py",
            name="",
            methods={
                "create_placement_groups": Method(("args",)),
                "create_rollout_manager": Method(("args", "pg")),
                "create_training_models": Method(("args", "pgs", "rollout_manager", "...")),
            },
            mentions=("args.colocate", "args.offload_rollout"),
        ),
        Class(
            path="slime/ray/rollout.py",
            name="RolloutManager",
            methods={
                "generate": Method(_GROUP),
                "eval": Method(_GROUP),
                "offload": Method(("self",)),
                "onload": Method(("self", "tags")),
                "onload_weights": Method(("self",)),
                "onload_kv": Method(("self",)),
                "dispose": Method(("self",)),
            },
        ),
        Class(
            path="slime/ray/actor_group.py",
            name="RayTrainGroup",
            methods={
                "async_train": Method((*_GROUP, "rollout_data_ref", "...")),
                "save_model": Method((*_GROUP, "force_sync")),
                "update_weights": Method(("self",)),
            },
        ),
    ),
    repository="https://github.com/THUDM/slime",
    take_out=(
        "from slime.ray.placement_group import create_placement_groups, create_rollout_manager, create_training_models"
    ),
)

ROLL: Final = Contract(
    framework="ROLL",
    package="",
    hook="rollmuxd_hooks.roll",
    known=((0, 2, 1), (0, 3, 1)),
    classes=(
        Class(
            path="roll/pipeline/rlvr/rlvr_pipeline.py",
            name="RLVRPipeline",
            methods={
                "__init__": Method(("self", "pipeline_config")),
                "run": Method(
                    ("self",),
                    calls=(
                        "actor_train.offload_states",
                        "model_update",
                        "actor_infer.load_states",
                        "val",
                        "actor_infer.offload_states",
                        "actor_train.compute_log_probs",
                        "critic.compute_values",
                        "critic.train_step",
                        "actor_train.train_step",
                        "do_checkpoint",
                    ),
                ),
                "val": Method(("self", "...")),
            },
            mentions=("self.pipeline_config.async_pipeline", "self.reference"),
        ),
        Class(
            path="roll/pipeline/base_pipeline.py",
            name="BasePipeline",
            methods={
                "model_update": Method(("self", "global_step")),
                "do_checkpoint": Method(("self", "global_step", "...")),
            },
        ),
    ),
    repository="https://github.com/alibaba/ROLL",
    take_out="from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline",
    chained=("run", "model_update", "val", "do_checkpoint"),
)

NEMO_RL: Final = Contract(
    framework="NeMo-RL",
    package="",
    hook="rollmuxd_hooks.nemo_rl",
    known=((0, 6), (0, 8)),
    classes=(
        Class(
            path="nemo_rl/algorithms/grpo.py",
            name="",
            methods={
                "setup": Method(("master_config", "...")),
                "grpo_train": Method(
                    ("policy", "policy_generation", "..."),
                    calls=(
                        "refit_policy_generation",
                        "policy_generation.prepare_for_generation",
                        "policy_generation.finish_generation",
                        "policy.prepare_for_lp_inference",
                        "policy.prepare_for_training",
                        "policy.train",
                        "policy.save_checkpoint",
                    ),
                ),
                "refit_policy_generation": Method(
                    ("policy", "policy_generation", "colocated_inference", "..."),
                    calls=(
                        "policy.offload_before_refit",
                        "policy_generation.prepare_for_generation",
                        "policy.offload_after_refit",
                    ),
                ),
            },
        ),
        Class(
            path="nemo_rl/models/policy/interfaces.py",
            name="ColocatablePolicyInterface",
            methods={
                "offload_before_refit": Method(("self",)),
                "offload_after_refit": Method(("self",)),
                "prepare_for_lp_inference": Method(("self",)),
            },
        ),
        Class(
            path="nemo_rl/models/generation/interfaces.py",
            name="GenerationInterface",
            methods={
                "prepare_for_generation": Method(("self", "...")),
                "finish_generation": Method(("self", "...")),
            },
        ),
    ),
    repository="https://github.com/NVIDIA-NeMo/RL",
    take_out="from nemo_rl.algorithms.grpo import grpo_train, setup",
)

CONTRACTS: Final = (OPENRLHF, SKYRL, AREAL, SLIME, ROLL, NEMO_RL)
