"""A driver that asks for the next rollout before it trains on this one."""

from types import SimpleNamespace

import ray

from rollmuxd_hooks.slime import create_placement_groups, create_rollout_manager, create_training_models

args = SimpleNamespace(colocate=False, offload_train=True, offload_rollout=True, num_rollout=2)
pgs = create_placement_groups(args)
rollout_manager, _ = create_rollout_manager(args, pgs["rollout"])
actor_model, _ = create_training_models(args, pgs, rollout_manager)
following = rollout_manager.generate.remote(0)
for rollout_id in range(args.num_rollout):
    data = ray.get(following)
    following = rollout_manager.generate.remote(rollout_id + 1)
    ray.get(actor_model.async_train(rollout_id, data))
