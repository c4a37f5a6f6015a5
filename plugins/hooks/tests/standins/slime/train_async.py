"""A driver that asks for the next rollout before it trains on this one, in the order of slime's."""

import sys
from types import SimpleNamespace

import ray

from rollmuxd_hooks.slime import create_placement_groups, create_rollout_manager, create_training_models

flags = sys.argv[1:]
args = SimpleNamespace(
    colocate=False, offload_train="stays" not in flags, offload_rollout=False, use_critic="critic" in flags,
    num_rollout=3,
)  # fmt: skip
pgs = create_placement_groups(args)
rollout_manager, _ = create_rollout_manager(args, pgs["rollout"])
actor_model, _ = create_training_models(args, pgs, rollout_manager)
actor_model.update_weights()
data, following = None, rollout_manager.generate.remote(0)
for rollout_id in range(args.num_rollout):
    data = ray.get(following) if following is not None else data
    following = rollout_manager.generate.remote(rollout_id + 1) if rollout_id + 1 < args.num_rollout else None
    ray.get(actor_model.async_train(rollout_id, data))
    if rollout_id == 1:
        actor_model.save_model(rollout_id)
    data = ray.get(following) if following is not None else None
    following = None
    actor_model.update_weights()
    if rollout_id == 0:
        ray.get(rollout_manager.eval.remote(rollout_id))
ray.get(rollout_manager.dispose.remote())
