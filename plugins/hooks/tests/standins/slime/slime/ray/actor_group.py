"""Has the methods of slime's group of trainers."""

import ray
from loops import done


class RayTrainGroup:
    def __init__(self, args):
        self.args = args

    def async_train(self, rollout_id, rollout_data_ref, external_data=None):
        done("actor.train")
        return [ray.put(None)]

    def clear_memory(self): ...

    def offload(self):
        done("actor.offload")

    def save_model(self, rollout_id, force_sync=False):
        done("actor.save")

    def update_weights(self):
        done("actor.update_weights")
