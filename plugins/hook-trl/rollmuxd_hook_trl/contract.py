"""What must be so of a TRL for the hook to be right. No TRL is imported: its source is read.

The hook rests on methods with a leading underscore, which TRL may change in any release: see
:mod:`rollmuxd_hook_kit.contract`.
"""

from typing import Final

from rollmuxd_hook_kit.contract import Contract, classes

TRL: Final = Contract(
    framework="TRL",
    package="trl",
    hook="rollmuxd_hook_trl",
    known=((1, 0), (1, 17)),
    # What it must mention is how it is known that weights are about to be sent, and where.
    classes=classes("""
    trl/trainer/grpo_trainer.py:GRPOTrainer
        _prepare_inputs(self, generation_batch): _generate_and_score_completions
        _generate_and_score_completions(self, inputs): _generate _calculate_rewards _get_per_token_logps_and_entropies
        _generate(self, prompts): _generate_single_turn
        _calculate_rewards(self, inputs, prompts, completions, completion_ids_list)
        _get_per_token_logps_and_entropies(self, model, ...)
        compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        prediction_step(self, model, inputs, ...): _prepare_inputs compute_loss
        _save_checkpoint(self, model, trial)
        mentions self._last_loaded_step self.vllm_generation.sync_weights self.use_vllm self.reward_funcs
    """),
    take_out="from trl import GRPOTrainer",
    chained=("_prepare_inputs", "_generate_and_score_completions", "_generate", "compute_loss"),
)

#: a trainer of TRL's experiments, with releases of its own that were looked at
ASYNC: Final = Contract(
    framework="AsyncGRPO",
    package="trl",
    hook="rollmuxd_hook_trl.AsyncGRPOTrainer",
    known=((1, 16), (1, 17)),
    classes=classes("""
    trl/experimental/async_grpo/async_grpo_trainer.py:AsyncGRPOTrainer
        get_train_dataloader(self): accelerator.prepare
        compute_loss(self, model, inputs, return_outputs, num_items_in_batch)
        training_step(self, model, inputs, num_items_in_batch)
        _sync_weight(self)
        _save_checkpoint(self, model, trial)
        _inner_training_loop(self)
    trl/experimental/async_grpo/async_grpo_trainer.py:_TrainBeginCallback
        on_train_begin(self, _args, _state, _control): _trainer._sync_weight _trainer.rollout_worker.start
    """),
    take_out="from trl.experimental.async_grpo import AsyncGRPOTrainer",
    chained=("get_train_dataloader", "get_batch_samples", "compute_loss", "_inner_training_loop"),
)
CONTRACTS: Final = (TRL, ASYNC)
