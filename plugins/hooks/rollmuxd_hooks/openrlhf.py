"""OpenRLHF: ``python -m rollmuxd_hooks.openrlhf ARGS`` in place of ``python -m openrlhf.cli.train_ppo_ray ARGS``.

Its trainer is an actor of Ray, and what is before and after its loop (engines, models, the last save) is in the driver.
So that one process talks, the trainer lives in the driver here; it holds no GPU either way.
"""

import copy
import runpy
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from rollmuxd_hook_kit.contract import look_at_or_exit
from rollmuxd_hook_kit.late import when_imported
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import OPENRLHF
from rollmuxd_hooks.loop import Loop, Shape, get, refuse

look_at_or_exit(OPENRLHF, __name__)

import ray  # noqa: E402


class Local:
    """Stands for the handle of an actor: an object in this process, whose answers are put where Ray gets them."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._target, name)
        return SimpleNamespace(remote=lambda *args, **kwargs: ray.put(method(*args, **kwargs)))


class Run:
    """One run of ``train_ppo_ray``: its job begins with the strategy, which it makes first of its arguments."""

    def __init__(self) -> None:
        self.loop: Loop | None = None

    def begin(self, args: Any) -> None:
        """Register what these arguments describe. Raises ValueError for a run that cannot share."""
        if get(args, "train", "async_enable"):
            raise refuse(
                "--train.async_enable",
                "leave it out",
                "its training step holds the GPUs while it waits for its rollouts",
            )
        sleeps = args.train.colocate_all and args.vllm.enable_sleep and args.ds.enable_sleep
        self.loop = Loop(
            None,
            name=_name(args),
            shape=Shape.ONE_POOL if args.train.colocate_all else Shape.TWO_POOLS,
            stays=""
            if sleeps
            else "OpenRLHF takes engines and optimizers off the GPUs only with --train.colocate_all, "
            "--vllm.enable_sleep and --ds.enable_sleep",
        )
        self.loop.begin()

    def trainer(self, kind: Any, args: Any, kwargs: Any) -> Local:
        """Make the trainer, with brackets around its methods."""
        pretrain, strategy, *groups = args
        # Ray would have given the actor a copy, and the trainer writes into its arguments.
        made = kind(pretrain, copy.deepcopy(strategy), *groups, **kwargs)
        loop = self.loop
        assert loop is not None
        around(made.samples_generator, "generate_samples", before=loop.rollout, after=loop.rest)
        around(made, "train_step", before=loop.train)
        around(made, "broadcast_to_vllm", before=loop.sync)
        around(made, "evaluate", within=loop.evaluating)
        around(made, "save_logs_and_checkpoints", within=loop.saving)
        around(made, "save_best_checkpoint", within=loop.saving)
        return Local(made)

    def install(self) -> None:
        """Have it all done when ``train_ppo_ray`` imports what it needs."""

        def strategy(module: ModuleType) -> None:
            make = module.get_strategy

            def get_strategy(args: Any) -> Any:
                self.begin(args)
                return make(args)

            module.get_strategy = get_strategy  # type: ignore[attr-defined]

        def trainer(module: ModuleType) -> None:
            kind = module.PPOTrainer.__ray_metadata__.modified_class

            made = SimpleNamespace(remote=lambda *args, **kwargs: self.trainer(kind, args, kwargs))
            module.PPOTrainer = made  # type: ignore[attr-defined]

        def groups(module: ModuleType) -> None:
            save = module.RayActorGroup.async_save_model

            def async_save_model(group: Any) -> Any:
                assert self.loop is not None
                with self.loop.saving():
                    refs = save(group)
                    ray.wait(refs, num_returns=len(refs))
                return refs

            module.RayActorGroup.async_save_model = async_save_model

        when_imported("openrlhf.utils", strategy)
        when_imported("openrlhf.trainer.ray.launcher", groups)
        when_imported("openrlhf.trainer.ppo_trainer", trainer)

    def end(self, error: BaseException | None = None) -> None:
        """End the job, if it has begun."""
        if self.loop is not None:
            self.loop.end(error)


def main() -> None:
    """Run ``openrlhf.cli.train_ppo_ray`` with this process's arguments, as a job."""
    run = Run()
    run.install()
    try:
        runpy.run_module("openrlhf.cli.train_ppo_ray", run_name="__main__", alter_sys=True)
    except BaseException as error:
        run.end(error)
        raise
    run.end()


def _name(args: Any) -> str:
    folder = Path(get(args, "ckpt", "output_dir", default="openrlhf")).name
    return str(get(args, "logger", "wandb", "run_name", default=folder))


if __name__ == "__main__":
    main()
