"""SkyRL: ``python -m rollmuxd_hooks.skyrl ARGS`` in place of ``python -m skyrl.train.entrypoints.main_base ARGS``.

For an experiment of one's own: ``class Experiment(Sharing, MyExp)``, in the place of ``MyExp``.
"""

import os
import sys
from collections.abc import Mapping
from typing import Any, Final

import ray

from rollmuxd_hooks.contract import SKYRL
from rollmuxd_hooks.installed import look_at
from rollmuxd_hooks.loop import FILE, Loop, Shape, around, from_file, refuse

look_at(SKYRL, "skyrl")

from skyrl.train.config import SkyRLTrainConfig  # noqa: E402
from skyrl.train.entrypoints.main_base import BasePPOExp  # noqa: E402
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

    def run(self) -> None:
        """SkyRL's, as a job."""
        placed = self.cfg.trainer.placement
        self._loop = Loop(
            self.rollmux,
            name=str(self.cfg.trainer.run_name),
            shape=Shape.ONE_POOL if placed.colocate_all else Shape.TWO_POOLS,
            stays=""
            if placed.colocate_all
            else "SkyRL takes models and engines off the GPUs only with trainer.placement.colocate_all=true",
        )
        self._loop.begin()
        with self._loop.to_its_end():
            super().run()

    def get_trainer(self, *args: Any, **kwargs: Any) -> Any:
        """SkyRL's, with brackets around its methods."""
        trainer = super().get_trainer(*args, **kwargs)
        if type(trainer).train is not RayPPOTrainer.train:
            raise refuse(f"{type(trainer).__name__} has a loop of its own", "the hook is for RayPPOTrainer's")
        bracket(trainer, self._loop)
        return trainer


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
    # The loop runs on some node of the cluster, which may have neither this file nor this environment. (What Ray is
    # told of an environment, anybody may read who reaches it.)
    daemon = {name: value for name, value in os.environ.items() if name.startswith("ROLLMUX_") and name not in _OURS}
    ray.get(_run.options(runtime_env={"env_vars": daemon}).remote(config, from_file()))


if __name__ == "__main__":
    main()
