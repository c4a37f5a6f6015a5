"""verl's own trainer loop on one CPU: ``RayPPOTrainer.fit`` of the installed release, over workers that stand in.

    VERL_USE_EXTERNAL_MODULES=rollmuxd_hook_verl python verl_tiny.py --name math --steps 4 +rollmux.slo=2.0

Real are the trainer, its configuration, its data loader, DataProto, the checkpoint engine's manager, and a tiny torch
model that learns. Standing in: the group of workers, the engine that generates, and who asks it (no Ray, no vLLM). The
checksum of the weights is printed last.
"""

import argparse
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import ray
import torch
from verl import DataProto
from verl.single_controller.base import Worker
from verl.trainer.ppo import ray_trainer
from verl_tiny_parts import TOKENIZER, Engine, Questions, Workers, config, digest, reward


class Group:
    """In place of ``RayWorkerGroup``: the workers are in this process."""

    seed = 1

    def __init__(self, **_: Any) -> None: ...

    def spawn(self, prefix_set: Any) -> dict[str, Workers]:
        return dict.fromkeys(prefix_set, Workers(self.seed))


class Servers:
    """In place of ``LLMServerManager``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def create(cls, config: Any, worker_group: Workers, **_: Any) -> "Servers":
        return cls(worker_group.engine)

    def get_client(self) -> Engine:
        return self.engine

    def get_replicas(self) -> list[Engine]:
        return [self.engine]


class RewardModel:
    """In place of ``RewardLoopManager``, with a reward model beside the trainer."""

    reward_loop_workers = None

    def __init__(self, config: Any, rm_resource_pool: Any) -> None:
        self.asked: list[Any] = []
        self.watch: Callable[[], Any] = lambda: None

    def compute_rm_score(self, batch: DataProto) -> DataProto:
        self.asked.append(self.watch())
        return DataProto.from_dict(tensors={"rm_scores": reward(batch.batch["prompts"], batch.batch["responses"])})


class Agents:
    """In place of ``AgentLoopManager``: has the engine generate, and gives the reward."""

    def __init__(self, engine: Engine, config: Any) -> None:
        self.engine = engine
        self.seed = config.data.seed
        self.rewards = not config.reward.reward_model.enable

    @classmethod
    def create(cls, config: Any, llm_client: Engine, **_: Any) -> "Agents":
        return cls(llm_client, config)

    def generate_sequences(self, batch: DataProto) -> DataProto:
        prompts = torch.tensor([list(prompt) for prompt in batch.non_tensor_batch["raw_prompt"]])
        validate = batch.meta_info.get("validate", False)
        seed = 1000 * self.seed + 2 * batch.meta_info["global_steps"] + validate
        answers = self.engine.generate(prompts, seed)
        ids = torch.cat([prompts, answers], dim=1)
        many = len(prompts)
        return DataProto.from_dict(
            tensors={
                "prompts": prompts,
                "responses": answers,
                "response_mask": torch.ones_like(answers),
                "input_ids": ids,
                "attention_mask": torch.ones_like(ids),
                "position_ids": torch.arange(ids.shape[1]).repeat(many, 1),
                **({"rm_scores": reward(prompts, answers)} if self.rewards else {}),
            },
            non_tensors={
                "multi_modal_inputs": np.array([{}] * many, dtype=object),
                "__num_turns__": np.array([2] * many, dtype=np.int32),
            },
            meta_info={"timing": {}},
        )


def stand_in() -> None:
    """Put what needs Ray and GPUs out of the way of the trainer, in this process."""
    import verl.experimental.reward_loop as rewards
    from verl.checkpoint_engine import base

    base.ray = SimpleNamespace(get=lambda given: given)
    rewards.RewardLoopManager = RewardModel
    ray_trainer.LLMServerManager = Servers
    sys.modules.setdefault("verl_tiny", sys.modules[__name__])


def trainer(out: str, *more: str, seed: int = 1, role: str = "ActorRollout") -> Any:
    """A trainer with its workers."""
    stand_in()
    settings = config(out, *more)
    pool = object()
    return ray_trainer.RayPPOTrainer(
        config=settings,
        tokenizer=TOKENIZER,
        role_worker_mapping={ray_trainer.Role[role]: ray.remote(type("Tiny", (Worker,), {}))},
        resource_pool_manager=SimpleNamespace(
            create_resource_pool=lambda: None,
            resource_pool_dict={"global_pool": pool},
            get_resource_pool=lambda _: pool,
            get_n_gpus=lambda: 1,
        ),
        ray_worker_group_cls=type("Seeded", (Group,), {"seed": seed}),
        train_dataset=Questions(24),
        val_dataset=Questions(6),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", default="tiny")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", default="verl-out", help="where checkpoints go")
    parser.add_argument("--alone", action="store_true", help="once more without the hook, after this")
    parser.add_argument("more", nargs="*", help="as on verl's command line")
    asked = parser.parse_intermixed_args()
    torch.set_num_threads(1)
    more = [f"trainer.experiment_name={asked.name}", f"trainer.total_training_steps={asked.steps}", *asked.more]
    for out in (asked.out, *([asked.out + "-alone"] if asked.alone else [])):
        run = trainer(out, *more, seed=asked.seed)
        run.init_workers()
        run.fit()
        print(f"{asked.name}: weights {digest(run.actor_rollout_wg.model)}", flush=True)
        ray_trainer.RayPPOTrainer = getattr(run, "theirs", type(run))


if __name__ == "__main__":
    main()
