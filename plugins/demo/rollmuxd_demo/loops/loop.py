"""The loop of all three jobs: each iteration is a rollout and a training, each in a slot of its pool.

With ``--asynchronous`` a thread rolls out all the time, and only training is in slots. Each rollout is made with the
weights of the step before the last. So the weights are the same bit for bit here too, whatever waits for what.
"""

from queue import SimpleQueue
from threading import Thread

from cores import pinned
from grpo import Array, Batch, Learner, Task, Work
from record import Record, settings

import rollmuxd

#: What a job keeps on each pool's GPUs.  Small, so that moving it costs little beside these short phases.
STATE = dict(nodes=1, gpu_gb=0.05, ram_gb=0.1, driver="mock")


#: Batches that a rollout is ahead of the training, beyond the one that is trained on.
AHEAD = 1
#: The core that rollouts share, where they are no phase.
ROLLOUTS = ("gpu0",)


def main(name: str, about: str | None, task: Task, work: Work) -> None:
    run = settings(name, about)
    learner, record = Learner(task, work, run.seed, run.scale), Record(run)
    if run.asynchronous:
        asynchronous(learner, Learner(task, work, run.seed, run.scale), record)
        return
    with rollmuxd.job(run.name, phases=("rollout", "train"), rollout=STATE, train=STATE) as job:
        for _ in range(run.iterations):
            with job.phase("rollout") as slot, pinned(slot.gpus), record.phase("rollout"):
                mean_reward = learner.rollout(slot.progress)
            with job.phase("train") as slot, pinned(slot.gpus), record.phase("train"):
                learner.train()
            record.iteration(mean_reward)
    record.save(learner)


def asynchronous(learner: Learner, roller: Learner, record: Record) -> None:
    """Train in slots on what a thread rolls out meanwhile."""
    run = record.settings
    weights: SimpleQueue[Array] = SimpleQueue()
    rollouts: SimpleQueue[tuple[Batch | None, float]] = SimpleQueue()

    def roll_out() -> None:
        with pinned(ROLLOUTS):
            for _ in range(run.iterations):
                roller.policy.theta[:] = weights.get()
                mean_reward = roller.rollout(lambda done, of: None)
                rollouts.put((roller.batch, mean_reward))

    for _ in range(1 + AHEAD):
        weights.put(learner.policy.theta.copy())
    Thread(target=roll_out, daemon=True).start()
    with rollmuxd.job(run.name, phases={"train": "train"}, train=STATE, asynchronous={"ahead": AHEAD}) as job:
        for _ in range(run.iterations):
            learner.batch, mean_reward = rollouts.get()  # complete, in host memory: no slot is held for it
            with job.phase("train") as slot, pinned(slot.gpus), record.phase("train"):
                learner.train()
                weights.put(learner.policy.theta.copy())
            record.iteration(mean_reward)
    record.save(learner)
