"""What each hook rests on: releases that were looked at, and the classes, methods, parameters and calls. Data only.

How a table of classes is read: :func:`rollmuxd_hook_kit.contract.classes`.
"""

from typing import Final

from rollmuxd_hook_kit.contract import Contract, classes

OPENRLHF: Final = Contract(
    framework="OpenRLHF",
    package="openrlhf",
    hook="rollmuxd_hooks.openrlhf",
    known=((0, 10), (0, 12)),
    classes=classes("""
    openrlhf/trainer/ppo_trainer.py:BasePPOTrainer
        train_step(self, rollout_samples, global_step): experience_maker.make_experience_batch ppo_train
            broadcast_to_vllm
        broadcast_to_vllm(self)
        save_logs_and_checkpoints(self, global_step, logs_dict, client_states)
        save_best_checkpoint(self, eval_metrics, global_step, client_states)
        mentions self.args.ds.enable_sleep self.args.vllm.enable_sleep
    openrlhf/trainer/ppo_trainer.py:PPOTrainer
        __init__(self, pretrain, strategy, ...)
        fit(self, global_step): samples_generator.generate_samples train_step save_logs_and_checkpoints evaluate
            broadcast_to_vllm
        evaluate(self, global_step): samples_generator.generate_eval_samples
    openrlhf/trainer/ppo_utils/samples_generator.py:SamplesGenerator
        generate_samples(self)
        generate_eval_samples(self)
        mentions self.args.vllm.enable_sleep
    openrlhf/trainer/ray/launcher.py:RayActorGroup
        async_save_model(self)
    openrlhf/cli/train_ppo_ray.py
        train(args): get_strategy PPOTrainer.remote ppo_trainer.fit.remote actor_model.async_save_model
        mentions args.train.async_enable args.train.colocate_all args.vllm.enable_sleep
    """),
    take_out="python -m openrlhf.cli.train_ppo_ray",
)

#: whose loop hands its weights on by the dispatch
(SKYRL_ASYNC,) = (
    known._replace(since=(0, 3))
    for known in classes("""
    skyrl/train/fully_async_trainer.py:FullyAsyncRayPPOTrainer
        train(self): _run_training dispatch.save_weights_for_sampler eval
        _run_training(self, training_input)
        mentions self.save_checkpoints self.save_models
    """)
)

SKYRL: Final = Contract(
    framework="SkyRL",
    package="skyrl",
    hook="rollmuxd_hooks.skyrl",
    known=((0, 2), (0, 4)),
    classes=classes("""
    skyrl/train/trainer.py:RayPPOTrainer
        train(self): generate postprocess_generator_output fwd_logprobs_values_reward train_critic_and_policy
            save_checkpoints save_models eval dispatch.save_weights_for_sampler inference_engine_client.sleep
        generate(self, input_batch)
        postprocess_generator_output(self, generator_output, uids, ...)
        fwd_logprobs_values_reward(self, training_input)
        train_critic_and_policy(self, data)
        eval(self, ...)
        save_checkpoints(self)
        save_models(self)
        build_models(self, PolicyWorker, CriticWorker, RefWorker)
        mentions self.colocate_all
    skyrl/backends/skyrl_train/workers/worker_dispatch.py:WorkerDispatch
        save_weights_for_sampler(self, ...)
        _ensure_on_gpu(self, model, need_optimizer, need_model)
        _offload(self, model, offload_optimizer, offload_model)
        mentions self._ensure_on_gpu self._gpu_state self._actor_groups state.model_on_gpu state.optimizer_on_gpu
    skyrl/train/entrypoints/main_base.py:BasePPOExp
        run(self): _setup_trainer
        _setup_trainer(self): get_trainer trainer.build_models
        get_trainer(self, cfg, ...)
    skyrl/train/entrypoints/main_base.py
        main(): SkyRLTrainConfig.from_cli_overrides validate_cfg initialize_ray
    """)
    + (SKYRL_ASYNC,),
    take_out="python -m skyrl.train.entrypoints.main_base",
)

AREAL: Final = Contract(
    framework="AReaL",
    package="areal",
    hook="rollmuxd_hooks.areal",
    known=((1, 0, 3), (1, 0, 5)),
    classes=classes("""
    areal/trainer/rl_trainer.py:PPOTrainer
        __init__(self, config, ...)
        train(self, workflow, ...): _onload_rollout actor.prepare_batch _offload_rollout _onload_model actor.ppo_update
            actor.update_weights _offload_model _evaluate
        _is_actor_rollout_colocated(self, config)
        _onload_rollout(self, is_eval)
        _offload_rollout(self, is_eval)
        _onload_model(self, engine, role)
        _offload_model(self, engine, role)
        mentions self._should_offload_rollout self._should_offload_actor config.actor.offload config.critic.offload
            config.ref.offload self.eval_rollout
    """),
    take_out="from areal import PPOTrainer",
    chained=("train", "_onload_rollout", "_offload_rollout", "_onload_model", "_offload_model"),
)

SLIME: Final = Contract(
    framework="slime",
    package="",
    hook="rollmuxd_hooks.slime",
    known=((0, 2, 4), (0, 3, 2)),
    classes=classes("""
    slime/ray/placement_group.py
        create_placement_groups(args)
        create_rollout_manager(args, pg)
        create_training_models(args, pgs, rollout_manager, ...)
        mentions args.colocate args.offload_rollout
    slime/ray/rollout.py:RolloutManager
        generate(self, rollout_id)
        eval(self, rollout_id)
        offload(self)
        onload(self, tags)
        onload_weights(self)
        onload_kv(self)
        dispose(self)
    slime/ray/actor_group.py:RayTrainGroup
        async_train(self, rollout_id, rollout_data_ref, ...)
        save_model(self, rollout_id, force_sync)
        update_weights(self)
    """),
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
    classes=classes("""
    roll/pipeline/rlvr/rlvr_pipeline.py:RLVRPipeline
        __init__(self, pipeline_config)
        run(self): actor_train.offload_states model_update actor_infer.load_states val actor_infer.offload_states
            actor_train.compute_log_probs critic.compute_values critic.train_step actor_train.train_step do_checkpoint
        val(self, ...)
        mentions self.pipeline_config.async_pipeline self.reference
    roll/pipeline/base_pipeline.py:BasePipeline
        model_update(self, global_step)
        do_checkpoint(self, global_step, ...)
    """),
    repository="https://github.com/alibaba/ROLL",
    take_out="from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline",
    chained=("run", "model_update", "val", "do_checkpoint"),
)

NEMO_RL: Final = Contract(
    framework="NeMo-RL",
    package="",
    hook="rollmuxd_hooks.nemo_rl",
    known=((0, 6), (0, 8)),
    classes=classes("""
    nemo_rl/algorithms/grpo.py
        setup(master_config, ...)
        grpo_train(policy, policy_generation, ...): refit_policy_generation policy_generation.prepare_for_generation
            policy_generation.finish_generation policy.prepare_for_lp_inference policy.prepare_for_training policy.train
            policy.save_checkpoint
        async_grpo_train(policy, policy_generation, ...): refit_policy_generation policy.prepare_for_lp_inference
            policy.prepare_for_training policy.train policy.save_checkpoint
        refit_policy_generation(policy, policy_generation, colocated_inference, ...): policy.offload_before_refit
            policy_generation.prepare_for_generation policy.offload_after_refit
    nemo_rl/models/policy/interfaces.py:ColocatablePolicyInterface
        offload_before_refit(self)
        offload_after_refit(self)
        prepare_for_lp_inference(self)
    nemo_rl/models/generation/interfaces.py:GenerationInterface
        prepare_for_generation(self, ...)
        finish_generation(self, ...)
    """),
    repository="https://github.com/NVIDIA-NeMo/RL",
    take_out="from nemo_rl.algorithms.grpo import grpo_train, setup",
)

PRIME_RL: Final = Contract(
    framework="prime-rl",
    package="",
    hook="rollmuxd_hooks.prime_rl",
    known=((0, 7), (0, 9)),
    classes=classes("""
    prime_rl/trainer/rl/train.py
        train(config): setup_model setup_optimizer setup_weight_broadcast DataLoader dataloader.wait_for_batch
            dataloader.get_batch optimizer.step optimizer.zero_grad weight_broadcast.broadcast_weights
            ckpt_manager.save
        main(): train cli
        mentions config.weight_broadcast.type config.data.fake config.max_steps
    prime_rl/trainer/rl/data.py:DataLoader
        wait_for_batch(self): receiver.wait
        get_batch(self): receiver.receive
    """),
    repository="https://github.com/PrimeIntellect-ai/prime-rl",
    take_out="python -m prime_rl.trainer.rl.train",
)

CONTRACTS: Final = (OPENRLHF, SKYRL, AREAL, SLIME, ROLL, NEMO_RL, PRIME_RL)
