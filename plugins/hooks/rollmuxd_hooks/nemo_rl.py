"""NeMo-RL: ``from rollmuxd_hooks.nemo_rl import grpo_train, setup`` in place of those of ``nemo_rl.algorithms.grpo``.

Colocated, NeMo-RL leaves the GPUs once in a step: when generation is finished, until log-probabilities are computed.
From there through training and the refit to the end of generation the policy is on them, so all that is one phase.
"""

from collections.abc import Mapping
from typing import Any

from rollmuxd_hooks.contract import NEMO_RL
from rollmuxd_hooks.installed import look_at
from rollmuxd_hooks.loop import Loop, Shape, around, get, refuse

look_at(NEMO_RL, "nemo_rl")

from nemo_rl.algorithms import grpo as theirs  # noqa: E402

__all__ = ["grpo_train", "setup"]

#: of this process: its driver makes one run
_run: dict[str, Loop] = {}


def setup(master_config: Any, *args: Any, rollmux: Mapping[str, Any] | None = None, **kwargs: Any) -> Any:
    """NeMo-RL's, in the job's ``init``. ``rollmux``: keywords of :func:`rollmuxd.job`."""
    if get(master_config, "grpo", "async_grpo", "enabled"):
        raise refuse("grpo.async_grpo.enabled", "set it to false")
    if get(master_config, "data_plane", "enabled"):
        raise ValueError(
            "data_plane.enabled: NeMo-RL takes another loop for it (grpo_sync), which the hook does not know"
        )
    colocated = get(master_config, "policy", "generation", "colocated", "enabled")
    loop = Loop(
        rollmux,
        name=str(get(master_config, "logger", "wandb", "name", default="nemo-rl")),
        shape=Shape.TRAIN_ONLY,
        stays=""
        if colocated
        else "NeMo-RL takes policy and engines off the GPUs only with policy.generation.colocated.enabled=true",
    )
    loop.begin()
    _run["loop"] = loop
    try:
        return theirs.setup(master_config, *args, **kwargs)
    except BaseException as error:
        loop.end(error)
        raise


def grpo_train(policy: Any, policy_generation: Any, *args: Any, **kwargs: Any) -> Any:
    """NeMo-RL's, as the job that :func:`setup` has begun; it ends with this."""
    if "loop" not in _run:
        raise RuntimeError("nobody has begun the job: import setup from rollmuxd_hooks.nemo_rl too")
    loop = _run["loop"]
    for name in ("prepare_for_lp_inference", "prepare_for_training", "offload_before_refit", "offload_after_refit"):
        around(policy, name, before=loop.train)
    around(policy_generation, "prepare_for_generation", before=loop.train)
    around(policy_generation, "finish_generation", after=loop.rest)
    with loop.to_its_end():
        return theirs.grpo_train(policy, policy_generation, *args, **kwargs)
