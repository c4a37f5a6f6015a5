"""ROLL: ``from rollmuxd_hooks.roll import RLVRPipeline`` in place of ROLL's.

ROLL loads and offloads its clusters by itself, step by step, wherever their GPUs are.
"""

from collections.abc import Mapping
from typing import Any

from rollmuxd_hook_kit.contract import check_class, look_at
from rollmuxd_hook_kit.turns import around
from rollmuxd_hooks.contract import ROLL
from rollmuxd_hooks.loop import Loop, Shape, get, refuse

look_at(ROLL)

from roll.pipeline.rlvr.rlvr_pipeline import RLVRPipeline as Theirs  # noqa: E402

__all__ = ["RLVRPipeline"]


class RLVRPipeline(Theirs):  # type: ignore[misc]
    """ROLL's, taking part in rollmuxd. ``rollmux``: keywords of :func:`rollmuxd.job`."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        check_class(ROLL, cls, RLVRPipeline, Theirs)

    def __init__(self, pipeline_config: Any, rollmux: Mapping[str, Any] | None = None) -> None:
        if pipeline_config.async_pipeline:
            raise refuse("async_generation_ratio > 0", "set it to 0")
        name = str(get(pipeline_config, "exp_name", default="roll"))
        self._loop = Loop(rollmux, name=name, shape=_shape(pipeline_config))
        self._loop.begin()
        with self._loop.ending_with_an_error():
            super().__init__(pipeline_config)
            self._bracket()

    def run(self) -> Any:
        """ROLL's, as a job; it ends with this."""
        with self._loop.to_its_end():
            return super().run()

    def model_update(self, global_step: Any) -> Any:
        """ROLL's, in a slot for both; or the mover's, in the rollout's."""
        return self._loop.send(lambda: super(RLVRPipeline, self).model_update(global_step)) or {}

    def val(self, global_step: Any) -> Any:
        """ROLL's; rollouts follow, in the same slot."""
        self._loop.rollout()
        return super().val(global_step)

    def do_checkpoint(self, *args: Any, **kwargs: Any) -> Any:
        """ROLL's, in a slot that is held anyway."""
        with self._loop.saving():
            return super().do_checkpoint(*args, **kwargs)

    def _bracket(self) -> None:
        loop = self._loop
        around(self.actor_infer, "load_states", before=loop.rollout)
        references = get(self, "references", default={}).values()
        models = [self.actor_train, *references, get(self, "reference"), get(self, "critic")]
        for cluster in models:
            for method in ("compute_log_probs", "compute_values", "train_step"):
                if hasattr(cluster, method):
                    around(cluster, method, before=loop.train)
        if loop.rollout_pool == "rollout" and not loop.resident:
            # From the weights' arrival until the rollout has its turn they are there, and others may want the GPUs.
            loop.parked_by(lambda: self.actor_infer.offload_states(blocking=True), pool="rollout")


def _shape(config: Any) -> Shape:
    """One pool if any GPU both generates and trains. Raises ValueError for a model that is on neither's GPUs."""
    generates, trains = _gpus(get(config, "actor_infer")), _gpus(get(config, "actor_train"))
    if generates & trains:
        return Shape.ONE_POOL
    models: dict[str, Any] = {}
    if get(config, "enable_reference"):
        models = {"reference": get(config, "reference"), **dict(get(config, "reference_configs", default={}))}
    if get(config, "adv_estimator") == "gae":
        models["critic"] = get(config, "critic")
    for role, model in models.items():
        _check(role, _gpus(model) - trains, "actor_train")
    for role, model in dict(get(config, "rewards", default={})).items():
        _check(f"reward {role}", _gpus(model) - generates, "actor_infer")
    return Shape.TWO_POOLS


def _gpus(model: Any) -> set[int]:
    return set(get(model, "device_mapping", default=()))


def _check(role: str, stray: set[int], beside: str) -> None:
    if stray:
        raise ValueError(
            f"{role} is on GPUs {', '.join(map(str, sorted(stray)))}, which are none of {beside}'s, and it works while "
            f"the job holds only these: put them into {beside}'s device_mapping, or take GPUs of these"
        )
