"""A user's script, as ``run_grpo.py`` is one."""

import sys
from types import SimpleNamespace

from rollmuxd_hooks.nemo_rl import async_grpo_train, grpo_train, setup

master_config = SimpleNamespace(
    grpo={"async_grpo": {"enabled": "async" in sys.argv, "in_flight_weight_updates": "waits" not in sys.argv}},
    data_plane={"enabled": "plane" in sys.argv},
    policy={"generation": {"colocated": {"enabled": "apart" not in sys.argv}}},
    logger={"wandb": {"name": "grpo"}},
)
policy, policy_generation = setup(master_config, None, None, None)
(async_grpo_train if "async" in sys.argv else grpo_train)(policy, policy_generation, range(2), True)
