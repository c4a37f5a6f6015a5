"""Has the methods of ROLL's pipeline of this name; its clusters write down what they are told."""

from loops import done

from roll.pipeline.base_pipeline import BasePipeline


class Cluster:
    def __init__(self, role):
        self.role = role

    def offload_states(self, blocking=True):
        done(f"{self.role}.offload_states")

    def load_states(self, blocking=True):
        done(f"{self.role}.load_states")

    def compute_log_probs(self, batch, blocking=True):
        done(f"{self.role}.compute_log_probs")

    def compute_values(self, batch, blocking=True):
        done(f"{self.role}.compute_values")

    def train_step(self, batch, blocking=True):
        done(f"{self.role}.train_step")


class RLVRPipeline(BasePipeline):
    def __init__(self, pipeline_config):
        self.pipeline_config = pipeline_config
        self.actor_train, self.actor_infer, self.critic, self.reference = (
            Cluster(role) for role in ("actor_train", "actor_infer", "critic", "reference")
        )
        self.references = {"reference": self.reference}
        done("clusters.start")

    def run(self):
        assert not self.pipeline_config.async_pipeline
        for global_step in range(self.pipeline_config.max_steps):
            self.critic.offload_states(blocking=True)
            self.actor_train.offload_states(blocking=True)
            self.model_update(global_step)
            self.actor_infer.load_states(blocking=True)
            if global_step == 1:
                self.val(global_step=global_step)
            done("actor_infer.generate")
            self.actor_infer.offload_states()
            self.reference.compute_log_probs(None, blocking=True)
            self.critic.compute_values(None, blocking=False)
            self.actor_train.compute_log_probs(None, blocking=False)
            self.critic.train_step(None, blocking=False)
            self.actor_train.train_step(None, blocking=False)
            self.do_checkpoint(global_step=global_step)

    def val(self, global_step):
        done("actor_infer.validate")
