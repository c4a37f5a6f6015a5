"""The same run by verl's trainer whose rollouts are one step ahead, over the workers of ``verl_tiny``.

Real is the trainer, ``OneStepOffRayTrainer``. Its engines, and what brings weights to them, are chosen by verl's own
settings.
"""

import importlib
from types import SimpleNamespace
from typing import Any

import ray
import verl_tiny as tiny
from verl.single_controller.base import Worker
from verl.trainer.ppo.utils import Role
from verl.utils.ray_utils import auto_await


class Manager:
    """In place of ``CheckpointEngineManager``, by ``checkpoint_manager_class``."""

    def __init__(self, actor_wg: tiny.Workers, **_: Any) -> None:
        self.workers = actor_wg

    def update_weights(self, step: int) -> dict[str, float]:
        self.workers.asked.append(("send", self.workers.watch()))
        self.workers.engine.take(self.workers.model.state_dict())
        return {}


class Agents(tiny.Agents):
    """In place of ``AgentLoopManager``, by ``agent_loop_manager_class``: it generates beside the trainer's calls."""

    @auto_await
    async def generate_sequences(self, batch: Any) -> Any:
        return super().generate_sequences(batch)


def _alone() -> Any:
    """The trainer once more, made from one that takes no part."""
    from verl.experimental.one_step_off_policy import ray_trainer as theirs
    from verl.experimental.separation import ray_trainer as base

    hooked = tiny.ray_trainer.RayPPOTrainer, base.SeparateRayPPOTrainer, theirs.OneStepOffRayTrainer
    tiny.ray_trainer.RayPPOTrainer = hooked[0].theirs
    importlib.reload(base)
    kind = importlib.reload(theirs).OneStepOffRayTrainer
    tiny.ray_trainer.RayPPOTrainer, base.SeparateRayPPOTrainer, theirs.OneStepOffRayTrainer = hooked
    return kind


def trainer(out: str, *more: str, alone: bool = False) -> Any:
    """A trainer with its workers; ``alone`` without the hook."""
    tiny.stand_in()
    from verl.experimental.one_step_off_policy import ray_trainer as theirs

    group: list[tiny.Workers] = []

    class Group(tiny.Group):
        def spawn(self, prefix_set: Any) -> dict[str, tiny.Workers]:
            group.append(tiny.Workers(1))
            return dict.fromkeys(prefix_set, group[-1])

    kind = _alone() if alone else theirs.OneStepOffRayTrainer
    theirs.LLMServerManager = SimpleNamespace(create=lambda **_: tiny.Servers(group[-1].engine))
    pool = object()
    return kind(
        config=tiny.config(
            out,
            "actor_rollout_ref.hybrid_engine=False",
            "actor_rollout_ref.rollout.mode=async",
            "actor_rollout_ref.rollout.checkpoint_manager_class=verl_tiny_one_step.Manager",
            "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_tiny_one_step.Agents",
            *more,
        ),
        tokenizer=tiny.TOKENIZER,
        role_worker_mapping={Role.Actor: ray.remote(type("Tiny", (Worker,), {}))},
        resource_pool_manager=SimpleNamespace(
            create_resource_pool=lambda: None,
            resource_pool_dict={"global_pool": pool},
            get_resource_pool=lambda _: pool,
            get_n_gpus=lambda: 1,
        ),
        ray_worker_group_cls=Group,
        train_dataset=tiny.Questions(24),
        val_dataset=tiny.Questions(6),
    )
