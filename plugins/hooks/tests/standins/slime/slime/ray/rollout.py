"""Has the methods of slime's manager of rollouts."""

from loops import done


class RolloutManager:
    def __init__(self, args):
        done("engines.start")

    def generate(self, rollout_id):
        done("engines.generate")

    def eval(self, rollout_id):
        done("engines.generate_eval")

    def offload(self):
        done("engines.offload")

    def onload(self, tags=None):
        done("engines.onload")

    def onload_weights(self):
        done("engines.onload_weights")

    def onload_kv(self):
        done("engines.onload_kv")

    def save(self, rollout_id): ...

    def get_metrics_router_addr(self): ...

    def dispose(self): ...
