"""SkyRL: ``python -m rollmuxd_hooks.skyrl ARGS`` in place of ``python -m skyrl.train.entrypoints.main_base ARGS``.

For an experiment of one's own: ``class Experiment(Sharing, MyExp)``, in the place of ``MyExp``. One whose trainer is a
``FullyAsyncRayPPOTrainer``: ``class Experiment(SharingAsync, MyExp)``. Its slot is for training and the weights after
it. Its rollouts are tasks of the same event loop, so the loop waits for a slot in a thread.
"""

import asyncio
import importlib.metadata
import os
import sys
from collections.abc import Mapping
from typing import Any, Final

from rollmuxd_hook_kit.contract import look_at_or_exit, release
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import SKYRL, SKYRL_ASYNC
from rollmuxd_hooks.loop import FILE, Loop, Shape, from_file, refuse

look_at_or_exit(SKYRL, __name__)

import ray  # noqa: E402
from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
from skyrl.train.fully_async_trainer import FullyAsyncRayPPOTrainer  # noqa: E402
from skyrl.train.trainer import RayPPOTrainer  # noqa: E402
from skyrl.train.utils import validate_cfg  # noqa: E402
from skyrl.train.utils.utils import initialize_ray  # noqa: E402

#: variables that stay here
_OURS: Final = (FILE, "ROLLMUX_API_KEY")
#: what a mixin is mixed into, to a type checker
_Experiment: Any = object


class Sharing(_Experiment):  # type: ignore[misc]
    """Mixin for a ``BasePPOExp``, to come first."""

    #: keywords of :func:`rollmuxd.job`
    rollmux: Mapping[str, Any] = {}
    #: the trainer that the hook knows
    known: type = RayPPOTrainer

    def run(self) -> None:
        """SkyRL's, as a job."""
        placed = self.cfg.trainer.placement
        shape = Shape.ONE_POOL if placed.colocate_all else Shape.TWO_POOLS
        self._loop = Loop(
            self.rollmux,
            name=str(self.cfg.trainer.run_name),
            shape=Shape.ASYNCHRONOUS if self.known is FullyAsyncRayPPOTrainer else shape,
            stays=""
            if placed.colocate_all or self.known is FullyAsyncRayPPOTrainer
            else "SkyRL takes models and engines off the GPUs only with trainer.placement.colocate_all=true",
        )
        self._loop.begin()
        with self._loop.to_its_end():
            super().run()

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's, with brackets around its methods."""
        trainer = super().get_trainer(*args, **kwargs)
        if type(trainer).train is not self.known.train:  # type: ignore[attr-defined]
            raise refuse(
                f"{type(trainer).__name__} has a loop of its own",
                "Sharing is for RayPPOTrainer's, and SharingAsync for FullyAsyncRayPPOTrainer's",
            )
        (bracket_async if self._loop.asynchronous else bracket)(trainer, self._loop)
        return trainer


class SharingAsync(Sharing):
    """Mixin for a ``BasePPOExp`` whose trainer is a ``FullyAsyncRayPPOTrainer``, to come first."""

    known = FullyAsyncRayPPOTrainer

    def run(self) -> None:
        """SkyRL's, as a job."""
        if release(importlib.metadata.version("skyrl")) < SKYRL_ASYNC.since:
            raise refuse("a FullyAsyncRayPPOTrainer before SkyRL 0.3", "take a newer release")
        super().run()


def bracket(trainer: Any, loop: Loop) -> None:
    """Put the trainer's methods into phases. (It puts its engines to sleep between generating and what follows.)"""
    around(trainer, "generate", before=loop.rollout)
    around(trainer, "postprocess_generator_output", before=loop.rest)
    around(trainer, "fwd_logprobs_values_reward", before=loop.train)
    around(trainer, "train_critic_and_policy", before=loop.train)
    around(trainer, "eval", within=loop.evaluating)
    around(trainer, "save_checkpoints", within=loop.saving)
    around(trainer, "save_models", within=loop.saving)

    def built() -> None:
        around(trainer.dispatch, "save_weights_for_sampler", before=loop.sync)
        if trainer.colocate_all and not loop.resident:
            loop.parked_by(lambda: offload(trainer.dispatch), pool="train")

    around(trainer, "build_models", after=built)


def bracket_async(trainer: Any, loop: Loop) -> None:
    """Put training, and the weights after it, into slots. SkyRL itself moves no models of such a run."""
    train = trainer._run_training  # noqa: SLF001

    async def run_training(*args: Any, **kwargs: Any) -> Any:
        await asyncio.to_thread(loop.train)
        return await train(*args, **kwargs)

    trainer._run_training = run_training  # noqa: SLF001
    for name in ("save_checkpoints", "save_models", "update_ref_with_policy"):
        around(trainer, name, within=loop.saving)

    def built() -> None:
        send = trainer.dispatch.save_weights_for_sampler

        async def save_weights_for_sampler(*args: Any, **kwargs: Any) -> Any:
            sent = await send(*args, **kwargs)
            await asyncio.to_thread(loop.turns.leave)
            return sent

        trainer.dispatch.save_weights_for_sampler = save_weights_for_sampler
        groups = trainer.dispatch._actor_groups  # noqa: SLF001
        if not loop.resident:
            loop.parked_by(
                lambda: [group.offload_to_cpu() for group in groups.values()],
                load=lambda: [group.backload_to_gpu() for group in groups.values()],
                pool="train",
            )

    around(trainer, "build_models", after=built)


def offload(dispatch: Any) -> None:
    """Take off the GPUs what training has left there; SkyRL brings back what it needs, when it needs it."""
    for model, state in dispatch._gpu_state.items():  # noqa: SLF001
        if state.model_on_gpu or state.optimizer_on_gpu:
            dispatch._offload(model)  # noqa: SLF001


class Experiment(Sharing, BasePPOExp):  # type: ignore[misc]
    """SkyRL's, taking part in rollmuxd."""


@ray.remote(num_cpus=1)  # type: ignore[untyped-decorator]
def _run(config: Any, rollmux: Mapping[str, Any]) -> None:
    experiment = Experiment(config)
    experiment.rollmux = rollmux
    experiment.run()


def main() -> None:
    """Train as the command line says, as SkyRL's own entry point does."""
    config = SkyRLTrainConfig.from_cli_overrides(sys.argv[1:])
    validate_cfg(config)
    initialize_ray(config)
    # The loop runs on some node of the cluster, which may have neither this file nor this environment. (What Ray
    # gets of an environment, any caller may read that reaches it.)
    daemon = {name: value for name, value in os.environ.items() if name.startswith("ROLLMUX_") and name not in _OURS}
    ray.get(_run.options(runtime_env={"env_vars": daemon}).remote(config, from_file()))


if __name__ == "__main__":
    main()
