"""NeMo-RL: ``from rollmuxd_hooks.nemo_rl import grpo_train, setup`` in place of those of ``nemo_rl.algorithms.grpo``.

And ``async_grpo_train``: its slot is from log-probabilities to the end of the refit. Then the hook itself has the
policy offloaded, which NeMo-RL does only where generation is colocated. Weights have to be updated in flight: else a
refit waits for all rollouts that were begun.

Colocated, NeMo-RL leaves the GPUs once in a step: when generation is finished, until log-probabilities are computed.
From there through training and the refit to the end of generation the policy is on them, so all that is one phase.
"""

from collections.abc import Callable, Mapping
from typing import Any

from rollmuxd_hook_kit.contract import look_at
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import NEMO_RL
from rollmuxd_hooks.loop import Loop, Shape, get, refuse

look_at(NEMO_RL)

from nemo_rl.algorithms import grpo as theirs  # noqa: E402

__all__ = ["async_grpo_train", "grpo_train", "setup"]


def setup(master_config: Any, *args: Any, rollmux: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """NeMo-RL's, in the job's ``init``. ``rollmux``: keywords of :func:`rollmuxd.job`."""
    asynchronous = bool(get(master_config, "grpo", "async_grpo", "enabled"))
    if asynchronous and not get(master_config, "grpo", "async_grpo", "in_flight_weight_updates"):
        raise refuse(
            "grpo.async_grpo.in_flight_weight_updates=false",
            "set it to true",
            "a refit would hold the trainer's GPUs while it waits for this run's own rollouts",
        )
    if get(master_config, "data_plane", "enabled"):
        raise ValueError(
            "data_plane.enabled: NeMo-RL takes another loop for it (grpo_sync), which the hook does not know"
        )
    colocated = get(master_config, "policy", "generation", "colocated", "enabled")
    loop = Loop(
        rollmux,
        name=str(get(master_config, "logger", "wandb", "name", default="nemo-rl")),
        shape=Shape.ASYNCHRONOUS if asynchronous else Shape.TRAIN_ONLY,
        stays=""
        if colocated or asynchronous
        else "NeMo-RL takes policy and engines off the GPUs only with policy.generation.colocated.enabled=true",
    )
    loop.begin()
    with loop.ending_with_an_error():
        return theirs.setup(master_config, *args, **kwargs)


def grpo_train(policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's, as the job that :func:`setup` has begun; it ends with this."""
    loop = Loop.begun("setup from rollmuxd_hooks.nemo_rl")
    for name in ("prepare_for_lp_inference", "prepare_for_training", "offload_before_refit", "offload_after_refit"):
        around(policy, name, before=loop.train)
    around(policy_generation, "prepare_for_generation", before=loop.train)
    around(policy_generation, "finish_generation", after=loop.rest)
    with loop.to_its_end():
        return theirs.grpo_train(policy, policy_generation, *args, **kwargs)


def async_grpo_train(policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's, as the job that :func:`setup` has begun; it ends with this."""
    loop = Loop.begun("setup from rollmuxd_hooks.nemo_rl")
    bring, park, save = policy.prepare_for_training, policy.offload_after_refit, policy.save_checkpoint

    def rest() -> None:
        park()
        loop.turns.leave()

    def save_checkpoint(*args: Any, **kwargs: Any) -> Any:
        """The weights were sent before this, so the policy is brought back for it."""
        with loop.saving():
            bring()
            saved = save(*args, **kwargs)
            park()
        return saved

    for name in ("prepare_for_lp_inference", "prepare_for_training"):
        around(policy, name, before=loop.train)
    policy.save_checkpoint = save_checkpoint
    sent = theirs.refit_policy_generation
    around(theirs, "refit_policy_generation", before=lambda: _refits(loop, bring), after=rest)
    try:
        with loop.to_its_end():
            return theirs.async_grpo_train(policy, policy_generation, *args, **kwargs)
    finally:
        theirs.refit_policy_generation = sent


def _refits(loop: Loop, bring: Callable[[], Any]) -> None:
    """Weights are about to be sent: at first in ``init``, then in the slot of training, else from the host."""
    if loop.turns.on and loop.turns.current not in ("init", "train"):
        loop.train()
        bring()
