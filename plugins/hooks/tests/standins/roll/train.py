"""A user's script: the pipeline is made and run."""

import sys
from types import SimpleNamespace

from rollmuxd_hooks.roll import RLVRPipeline


class Failing(RLVRPipeline):
    """One of the user's own, which adds to ROLL's."""

    def val(self, global_step):
        super().val(global_step)
        raise RuntimeError("out of memory")


if "hides" in sys.argv:

    class Hiding(RLVRPipeline):
        """One that takes the place of what the hook looks at."""

        def model_update(self, global_step):
            return {}


trains, generates = ([0, 1], [0, 1]) if "colocate" in sys.argv else ([0], [1])
(Failing if "fails" in sys.argv else RLVRPipeline)(
    pipeline_config=SimpleNamespace(
        exp_name="roll",
        async_pipeline="async" in sys.argv,
        max_steps=2,
        adv_estimator="gae",
        enable_reference=True,
        critic=SimpleNamespace(device_mapping=[2] if "stray" in sys.argv else trains),
        reference_configs={"math": SimpleNamespace(device_mapping=trains)},
        rewards={"math": SimpleNamespace(device_mapping=None)},
        actor_train=SimpleNamespace(device_mapping=trains),
        actor_infer=SimpleNamespace(device_mapping=generates),
    )
).run()
