"""What must be so of a TRL for the hook to be right. No TRL is imported: its source is read.

The hook rests on methods with a leading underscore, which TRL may change in any release: see
:mod:`rollmuxd_hook_kit.contract`.
"""

from collections.abc import Mapping
from typing import Any, Final

from rollmuxd_hook_kit import contract as kit
from rollmuxd_hook_kit.contract import Class, Contract, Method, UnknownFramework, classes

#: raised for a TRL, or a trainer class made from it, that the hook does not know; nothing has begun
UnknownTrl = UnknownFramework

_TRAINER: Final = Class(
    path="trl/trainer/grpo_trainer.py",
    name="GRPOTrainer",
    methods={
        "_prepare_inputs": Method(("self", "generation_batch"), calls=("_generate_and_score_completions",)),
        "_generate_and_score_completions": Method(
            ("self", "inputs"), calls=("_generate", "_calculate_rewards", "_get_per_token_logps_and_entropies")
        ),
        "_generate": Method(("self", "prompts"), calls=("_generate_single_turn",)),
        "_calculate_rewards": Method(("self", "inputs", "prompts", "completions", "completion_ids_list")),
        "_get_per_token_logps_and_entropies": Method(("self", "model", "...")),
        "compute_loss": Method(("self", "model", "inputs", "return_outputs", "num_items_in_batch")),
        "prediction_step": Method(("self", "model", "inputs", "..."), calls=("_prepare_inputs", "compute_loss")),
        "_save_checkpoint": Method(("self", "model", "trial")),
    },
    # How it is known that weights are about to be sent, and where.
    mentions=("self._last_loaded_step", "self.vllm_generation.sync_weights", "self.use_vllm", "self.reward_funcs"),
)

TRL: Final = Contract(
    framework="TRL",
    package="trl",
    hook="rollmuxd_hook_trl",
    known=((1, 0), (1, 17)),
    classes=(_TRAINER,),
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


def differences(version: str, facts: Mapping[str, Any]) -> list[str]:
    """Return in words what is not as it must be; nothing, if the hook is right for this TRL."""
    return kit.differences(TRL, version, facts)


def facts_of(source: str) -> dict[str, Any]:
    """Return what :func:`differences` needs to know of ``trl/trainer/grpo_trainer.py``, from its text."""
    return {_TRAINER.key: kit.facts_of(source, _TRAINER)}


def check(version: str, source: str) -> None:
    """Raise :class:`UnknownTrl` if the hook is not right for this TRL."""
    kit.check(TRL, version, facts_of(source))


def check_class(trainer: type, hook: type, trls: type) -> None:
    """Raise :class:`UnknownTrl` for a class on the way from ours to TRL's that hides what the hook looks at."""
    kit.check_class(TRL, trainer, hook, trls)
