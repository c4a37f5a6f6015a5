"""Has the methods of NeMo-RL's policies that are asked to make room."""

from loops import done


class ColocatablePolicyInterface:
    def __getattr__(self, name):
        return lambda *_, **__: done(f"policy.{name}")

    def offload_before_refit(self):
        done("policy.offload_before_refit")

    def offload_after_refit(self):
        done("policy.offload_after_refit")

    def prepare_for_lp_inference(self):
        done("policy.prepare_for_lp_inference")
