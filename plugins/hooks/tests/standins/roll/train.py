"""A user's script: the pipeline is made and run."""

import sys
from types import SimpleNamespace

from rollmuxd_hooks.roll import RLVRPipeline

trains, generates = ([0, 1], [0, 1]) if "colocate" in sys.argv else ([0], [1])
RLVRPipeline(
    pipeline_config=SimpleNamespace(
        exp_name="roll",
        async_pipeline="async" in sys.argv,
        max_steps=2,
        critic=SimpleNamespace(device_mapping=[2] if "stray" in sys.argv else trains),
        reference_configs={"math": SimpleNamespace(device_mapping=trains)},
        rewards={"math": SimpleNamespace(device_mapping=None)},
        actor_train=SimpleNamespace(device_mapping=trains),
        actor_infer=SimpleNamespace(device_mapping=generates),
    )
).run()
