"""The same run as verl starts it, on a Ray: what is `python -m verl.trainer.main_ppo` elsewhere, on CPUs.

    VERL_USE_EXTERNAL_MODULES=rollmuxd_hook_verl rollmuxd run --job job.toml -- python verl_tiny_ray.py --steps 4

Real are the way to the trainer (``run_ppo``, the task runner as an actor), TransferQueue with its actors, the placement
groups that reserve ``GPU``, the group of workers in their bundles and how calls are dispatched to them. Standing in is
what a worker does on its GPU (``verl_tiny_actors``). A checksum of the weights is written last, and one of the same run
without the hook and without Ray, in one process.
"""

import argparse
import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ray
import torch
import verl_tiny_actors as actors
import verl_tiny_parts as parts
from verl.trainer.main_ppo import TaskRunnerV1, run_ppo


class Agents:
    """For ``agent_loop_manager_class``."""

    @classmethod
    def create(cls, config: Any, llm_client: Any, **_: Any) -> Any:
        import transfer_queue
        import verl_tiny_v1

        return verl_tiny_v1.Agents(transfer_queue, llm_client, config.actor_rollout_ref.rollout.n)


class TinyRunner(TaskRunnerV1.__ray_metadata__.modified_class):  # type: ignore[misc]
    """verl's, with what stands in; then the same run once more, by verl alone."""

    def run(self, config: Any) -> None:
        from verl.trainer.ppo.v1 import trainer_base

        names = itertools.count()
        trainer_base.uuid = SimpleNamespace(uuid4=lambda: f"{next(names):08x}")
        trainer_base.ActorRolloutRefWorker = actors.TinyWorker
        trainer_base.RewardLoopManager = lambda **_: SimpleNamespace(reward_loop_worker_handles=[])
        trainer_base.LLMServerManager = actors.Servers
        trainer_base.create_rl_dataset = lambda *_, is_train, **__: parts.Questions(24 if is_train else 6)
        trainer_base.PPOTrainer._init_tokenizer = lambda trainer: vars(trainer).update(
            tokenizer=parts.TOKENIZER, processor=None
        )
        super().run(config)
        (told,) = self.trainer.actor_rollout_wg.told()
        tiny = config.actor_rollout_ref.tiny
        (Path(tiny.out) / "told.json").write_text(json.dumps({**told, "alone": alone(tiny.out, tiny.seed, *tiny.more)}))


def alone(out: str, seed: int, *more: str) -> str:
    """The checksum of a run's weights: no hook, no Ray, all of it in this process."""
    import verl_tiny_v1

    torch.set_num_threads(1)
    verl_tiny_v1.Group.seed = seed
    trainer, agents = verl_tiny_v1.trainer(out + "-alone", *more, alone=True)
    trainer.fit(agents)
    return parts.digest(trainer.actor_rollout_wg.model)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--out", default="verl-out", help="where it writes what it has seen")
    parser.add_argument("more", nargs="*", help="as on verl's command line")
    asked = parser.parse_intermixed_args()
    Path(asked.out).mkdir(parents=True, exist_ok=True)
    more = [f"trainer.total_training_steps={asked.steps}", *(one for one in asked.more if "rollmux" not in one)]
    config = parts.config(
        asked.out,
        "actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_tiny_ray.Agents",
        "actor_rollout_ref.rollout.calculate_log_probs=False",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"trainer.total_training_steps={asked.steps}",
        *asked.more,
    )
    config.actor_rollout_ref = {
        **config.actor_rollout_ref,
        "tiny": {"seed": asked.seed, "out": asked.out, "more": more},
    }
    run_ppo(config, ray.remote(num_cpus=1)(TinyRunner))


if __name__ == "__main__":
    import verl_tiny_ray

    verl_tiny_ray.main()  # actors find their classes by the module's name
