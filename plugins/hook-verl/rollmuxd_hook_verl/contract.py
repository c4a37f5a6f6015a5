"""What must be so of a verl for the hook to be right. No verl is imported: its source is read."""

from typing import Final

from rollmuxd_hook_kit.contract import Contract, classes

#: what both trainers do on the trainer's GPUs, in a slot for ``train``
TRAINING: Final = (
    "_compute_reward_colocate",
    "_compute_old_log_prob",
    "_compute_ref_log_prob",
    "_compute_values",
    "_update_critic",
    "_update_actor",
)

PPO_TRAINER, MANAGER = classes("""
    verl/trainer/ppo/ray_trainer.py:RayPPOTrainer
        init_workers(self): checkpoint_manager.sleep_replicas
        fit(self): _load_checkpoint async_rollout_manager.generate_sequences checkpoint_manager.sleep_replicas
            checkpoint_manager.update_weights _save_checkpoint _validate _compute_reward_colocate _compute_old_log_prob
            _compute_ref_log_prob _compute_values _update_critic _update_actor
        _validate(self, merged): async_rollout_manager.generate_sequences
        _save_checkpoint(self)
        _compute_reward_colocate(self, batch)
        _compute_old_log_prob(self, batch)
        _compute_ref_log_prob(self, batch)
        _compute_values(self, batch)
        _update_critic(self, batch)
        _update_actor(self, batch)
        mentions self.config self.global_steps self.use_critic self.use_reference_policy
    verl/checkpoint_engine/base.py:CheckpointEngineManager
        sleep_replicas(self)
        wake_up_replicas(self)
        update_weights(self, global_steps)
""")

#: newer; of its modes: where the rollout ends, and where weights are sent
V1_TRAINER, V1_SYNC, V1_ASYNC = (
    known._replace(since=(0, 9))
    for known in classes("""
    verl/trainer/ppo/v1/trainer_base.py:PPOTrainer
        __init__(self, config)
        init(self): _setup on_init_end
        _setup(self): checkpoint_manager.sleep_replicas _load_checkpoint
        fit(self, agent_loop_manager): step _save_checkpoint on_step_end _validate
        step(self, metrics, timing_raw): _step_once
        _add_batch_to_generate(self)
        _balance_batch(self, batch, ...)
        _step_once(self, metrics, timing_raw, sample_batch_size): replay_buffer.sample on_sample_end
            _balance_batch
            _compute_reward_colocate _compute_old_log_prob _compute_ref_log_prob _compute_values _update_critic
            _update_actor
        _validate(self)
        _save_checkpoint(self)
        _compute_reward_colocate(self, batch, ...)
        _compute_old_log_prob(self, batch, ...)
        _compute_ref_log_prob(self, batch, ...)
        _compute_values(self, batch, ...)
        _update_critic(self, batch, ...)
        _update_actor(self, batch, ...)
        mentions self.config self.global_steps self.trainer_mode self.use_critic self.use_reference_policy
            self.local_trigger_step self.parameter_sync_step
    verl/trainer/ppo/v1/trainer_sync.py:PPOTrainerSync
        on_init_end(self): checkpoint_manager.update_weights
        on_step_end(self): checkpoint_manager.update_weights
        on_sample_end(self): checkpoint_manager.sleep_replicas
    verl/trainer/ppo/v1/trainer_separate_async.py:PPOTrainerSeparateAsync
        on_init_end(self): standalone_checkpoint_manager.update_weights
        on_step_end(self): standalone_checkpoint_manager.update_weights
        mentions self.standalone_checkpoint_manager
""")
)

#: an experiment of newer releases, whose rollouts are one step ahead; and what it is made from
ONE_STEP, SEPARATE = (
    known._replace(since=(0, 9))
    for known in classes("""
    verl/experimental/one_step_off_policy/ray_trainer.py:OneStepOffRayTrainer
        fit(self): _load_checkpoint _fit_update_weights _validate fit_step
        fit_step(self, batch_data_future, continuous_iterator): _fit_generate _fit_compute_reward
            _fit_compute_log_prob _fit_compute_ref_log_prob _fit_compute_critic _fit_update_critic _fit_update_actor
            _fit_validate _fit_save_checkpoint
        _fit_generate(self, batch_data_future, continuous_iterator): _fit_update_weights _async_gen_next_batch
    verl/experimental/separation/ray_trainer.py:SeparateRayPPOTrainer
        init_workers(self)
        _fit_update_weights(self): checkpoint_manager.update_weights
        _fit_update_actor(self, batch): _update_actor
        _fit_validate(self): _validate
        _fit_save_checkpoint(self): _save_checkpoint
""")
)

VERL: Final = Contract(
    framework="verl",
    package="verl",
    hook="rollmuxd_hook_verl",
    known=((0, 7, 1), (0, 10)),
    classes=(PPO_TRAINER, V1_TRAINER, V1_SYNC, V1_ASYNC, ONE_STEP, SEPARATE, MANAGER),
    take_out="unset VERL_USE_EXTERNAL_MODULES",
    chained=(
        "__init__",
        "init_workers",
        "init",
        "_setup",
        "fit",
        "step",
        "_step_once",
        "_balance_batch",
        "_validate",
        "_save_checkpoint",
        "fit_step",
        "_fit_generate",
        "_fit_update_weights",
        "_fit_update_actor",
        *TRAINING,
    ),
)
CONTRACTS: Final = (VERL,)
