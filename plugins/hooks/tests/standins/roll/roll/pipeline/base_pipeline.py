"""Has the methods of ROLL's pipeline that its kinds share."""

from loops import done


class BasePipeline:
    def model_update(self, global_step):
        done("actor_train.model_update")
        return {}

    def do_checkpoint(self, global_step, is_last_step=None):
        done("actor_train.save")
