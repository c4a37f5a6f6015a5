"""Has the methods of NeMo-RL's engines that wake them and put them to sleep."""

from loops import done


class GenerationInterface:
    def prepare_for_generation(self, *args, **kwargs):
        done("engines.wake_up")

    def finish_generation(self, *args, **kwargs):
        done("engines.sleep")
