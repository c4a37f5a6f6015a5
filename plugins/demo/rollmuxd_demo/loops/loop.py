"""The loop of all three jobs: each iteration is a rollout and a training, each in a slot of its pool."""

from cores import pinned
from grpo import Learner, Task, Work
from record import Record, settings

import rollmuxd

#: What a job keeps on each pool's GPUs.  Small, so that moving it costs little beside these short phases.
STATE = dict(nodes=1, gpu_gb=0.05, ram_gb=0.1, driver="mock")


def main(name: str, about: str | None, task: Task, work: Work) -> None:
    run = settings(name, about)
    learner, record = Learner(task, work, run.seed, run.scale), Record(run)
    with rollmuxd.job(run.name, phases=("rollout", "train"), rollout=STATE, train=STATE) as job:
        for _ in range(run.iterations):
            with job.phase("rollout") as slot, pinned(slot.gpus), record.phase("rollout"):
                mean_reward = learner.rollout(slot.progress)
            with job.phase("train") as slot, pinned(slot.gpus), record.phase("train"):
                learner.train()
            record.iteration(mean_reward)
    record.save(learner)
