"""A user's driver, in the order of slime's: rollout, training, weights."""

import sys
from types import SimpleNamespace

import ray

from rollmuxd_hooks.slime import create_placement_groups, create_rollout_manager, create_training_models

flags = sys.argv[1:]
args = SimpleNamespace(
    colocate="colocate" in flags, offload_train="offload" in flags, offload_rollout="offload" in flags, num_rollout=2
)
pgs = create_placement_groups(args)
rollout_manager, _ = create_rollout_manager(args, pgs["rollout"])
actor_model, _ = create_training_models(args, pgs, rollout_manager)


def weights():
    if args.offload_rollout:
        ray.get(rollout_manager.onload_weights.remote())
    actor_model.update_weights()
    if args.offload_rollout:
        ray.get(rollout_manager.onload_kv.remote())


weights()
for rollout_id in range(args.num_rollout):
    data = ray.get(rollout_manager.generate.remote(rollout_id))
    if args.offload_rollout:
        ray.get(rollout_manager.offload.remote())
    ray.get(actor_model.async_train(rollout_id, data))
    if rollout_id == 1:
        actor_model.save_model(rollout_id)
    weights()
    if rollout_id == 0:
        ray.get(rollout_manager.eval.remote(rollout_id))
ray.get(rollout_manager.dispose.remote())
