"""Has the functions of slime's module of this name; what they make writes down what it is told."""

import ray
from loops import done

from slime.ray.actor_group import RayTrainGroup
from slime.ray.rollout import RolloutManager


def create_placement_groups(args):
    done("gpus.found")
    return {"rollout": None, "actor": None}


def create_rollout_manager(args, pg):
    manager = ray.remote(RolloutManager).remote(args)
    if args.offload_rollout:
        ray.get(manager.offload.remote())
    return manager, args.num_rollout


def create_training_models(args, pgs, rollout_manager, actor_cls=None):
    assert type(rollout_manager).__name__ == "Handle", "what goes to the workers must be the handle itself"
    assert args.colocate or args.num_rollout
    done("actor.load")
    return RayTrainGroup(args), None
