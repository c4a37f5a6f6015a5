"""AReaL: ``from rollmuxd_hooks.areal import PPOTrainer`` in place of AReaL's.

Colocated, its loop takes rollouts, models and optimizers on and off the GPUs by four methods, which are all that is
bracketed. Else rollouts never stop; then the train pool alone is shared, where the models are taken off it.
"""

import os
from collections.abc import Mapping
from typing import Any

from rollmuxd_hook_kit.contract import check_class, look_at
from rollmuxd_hooks.contract import AREAL
from rollmuxd_hooks.loop import Loop, Shape, get

look_at(AREAL)

from areal.trainer.rl_trainer import PPOTrainer as Theirs  # noqa: E402

__all__ = ["PPOTrainer"]


class PPOTrainer(Theirs):  # type: ignore[misc]
    """AReaL's, taking part in rollmuxd. ``rollmux``: keywords of :func:`rollmuxd.job`."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        check_class(AREAL, cls, PPOTrainer, Theirs)

    def __init__(self, config: Any, *args: Any, rollmux: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ValueError(
                "each rank of torchrun has a loop of its own here, and one process is to talk for a job: start AReaL "
                "with a scheduler (scheduler.type=local, ray or slurm)"
            )
        colocated = bool(self._is_actor_rollout_colocated(config))
        self._loop = Loop(
            rollmux,
            name=f"{get(config, 'experiment_name', default='areal')}-{get(config, 'trial_name', default='trial')}",
            shape=Shape.ONE_POOL if colocated else Shape.ASYNCHRONOUS,
            stays=_staying(config, colocated=colocated),
        )
        self._colocated = colocated
        self._loop.begin()
        with self._loop.ending_with_an_error():
            super().__init__(config, *args, **kwargs)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """AReaL's, as a job; it ends with this."""
        with self._loop.to_its_end():
            if not self._colocated:  # what comes first is a rollout, on other GPUs
                self._loop.turns.leave()
            return super().train(*args, **kwargs)

    def _onload_rollout(self, is_eval: bool = False) -> None:
        if not is_eval:
            self._loop.rollout()
        elif self.eval_rollout is not None:
            self._loop.turns.go(self._loop.eval_phase)
        super()._onload_rollout(is_eval)

    def _offload_rollout(self, is_eval: bool = False) -> None:
        super()._offload_rollout(is_eval)
        # (The slot of an evaluation is the next rollout's too, unless it is declared.)
        if not is_eval or self._loop.eval_phase == "eval":
            self._loop.rest()

    def _onload_model(self, engine: Any, role: str) -> None:
        self._loop.train()
        super()._onload_model(engine, role)

    def _offload_model(self, engine: Any, role: str) -> None:
        super()._offload_model(engine, role)
        if role == "actor":  # the last of a step
            self._loop.rest()


def _staying(config: Any, *, colocated: bool) -> str:
    """Why a model of this run would stay on its GPUs, if one would."""
    models = ["critic", "ref", "teacher", *(() if colocated else ("actor",))]
    if not get(config, "actor", "kl_ctl"):  # then AReaL makes no reference
        models.remove("ref")
    staying = [f"{name}.offload=true" for name in models if get(config, name) and not get(config, name, "offload")]
    return f"models of this run stay on the GPUs: say {', '.join(staying)} (and enable_offload=true)" if staying else ""
