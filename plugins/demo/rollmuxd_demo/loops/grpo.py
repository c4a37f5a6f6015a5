"""GRPO in numpy: a small autoregressive policy that learns by trial what a program can check.

What to know before reading:

- Each answer is really sampled token by token, and each gradient is written out by hand. Nothing is looked up: at the
  first step the policy knows nothing about its task.
- The run is a function of (task, work, seed, scale). One seeded generator is read in program order and BLAS has one
  thread. So the weights are the same bit for bit in any process, however its phases interleave with those of other
  processes.
- The amount of work per phase is fixed: answers have a fixed length, and a fixed number of groups is
  trained on.  A phase takes as long in the last iteration as in the first.
- Work is done in blocks whose activations stay within a core's L2 cache (2 MB). So two jobs on two cores do not contend
  for memory.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

# BLAS reads these once, when numpy loads, so a job imports numpy through this module only.  Two BLAS threads
# on one pinned core wait for each other by spinning, which is twenty times slower; they also reorder the sums.
for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_variable] = "1"

import numpy as np  # noqa: E402  (after the environment it reads)

Array = np.ndarray
Generator = np.random.Generator

#: Answers per prompt, whose rewards are compared with one another.
GROUP = 16
HIDDEN = 256
#: Groups per block.  Sampling keeps one row per answer, training one per answer and token.
SAMPLE_BLOCK = 16
TRAIN_BLOCK = 2
#: PPO's usual bound on how far one iteration may move the probability of a token.
CLIP = 0.2


@dataclass(frozen=True)
class Task:
    """What is to be learned: prompts to draw, and a program that gives an answer a reward from 0 to 1."""

    vocabulary: int
    prompt_length: int
    answer_length: int
    draw_prompts: Callable[[Generator, int], Array]
    reward: Callable[[Sequence[int], Sequence[int]], float]


@dataclass(frozen=True)
class Work:
    """How much one iteration does at scale 1; `scaled` multiplies both phases.

    The number of Adam steps (``epochs * minibatches``) stays: a smaller scale learns from noisier
    gradients, not in fewer steps.
    """

    sampled_groups: int
    trained_groups: int
    epochs: int
    minibatches: int
    learning_rate: float

    def scaled(self, scale: float) -> Work:
        least = self.minibatches * TRAIN_BLOCK
        trained = max(least, round(self.trained_groups * scale))
        sampled = max(trained, round(self.sampled_groups * scale))
        return Work(sampled, trained, self.epochs, self.minibatches, self.learning_rate)


class Policy:
    """An MLP that reads the prompt and the answer so far (one-hot) and gives logits for the next token.

    All weights are views of one vector, `theta`, so that the optimizer, the checksum and the gradient
    check need not know the layers.
    """

    def __init__(self, task: Task, rng: Generator, hidden: int = HIDDEN, dtype: type = np.float32) -> None:
        self.task = task
        self.inputs = (task.prompt_length + task.answer_length) * task.vocabulary + task.answer_length
        self.shapes = {
            "w1": (self.inputs, hidden), "b1": (hidden,),
            "w2": (hidden, hidden), "b2": (hidden,),
            "w3": (hidden, task.vocabulary), "b3": (task.vocabulary,),
        }  # fmt: skip
        self.theta = np.zeros(sum(int(np.prod(shape)) for shape in self.shapes.values()), dtype)
        self.weights = self.views(self.theta)
        for name in ("w1", "w2"):
            fan_in = task.prompt_length + task.answer_length if name == "w1" else hidden  # a one-hot lights one input
            self.weights[name][:] = rng.standard_normal(self.shapes[name]) / np.sqrt(fan_in)
        # w3 stays zero: the first answers are uniformly random.

    def views(self, flat: Array) -> dict[str, Array]:
        views, at = {}, 0
        for name, shape in self.shapes.items():
            size = int(np.prod(shape))
            views[name] = flat[at : at + size].reshape(shape)
            at += size
        return views

    def forward(self, x: Array) -> tuple[Array, Array, Array]:
        """Both hidden layers and the probabilities, for rows of input."""
        w = self.weights
        h1 = x @ w["w1"]
        h1 += w["b1"]
        np.tanh(h1, out=h1)
        h2 = h1 @ w["w2"]
        h2 += w["b2"]
        np.tanh(h2, out=h2)
        p = h2 @ w["w3"]
        p += w["b3"]
        p -= p.max(axis=1, keepdims=True)
        np.exp(p, out=p)
        p /= p.sum(axis=1, keepdims=True)
        return h1, h2, p

    def backward(self, x: Array, h1: Array, h2: Array, dlogits: Array, into: dict[str, Array]) -> None:
        """Add the gradient of the weights, given that of the logits.  Spoils h1 and h2 to save cache."""
        w = self.weights
        into["w3"] += h2.T @ dlogits
        into["b3"] += dlogits.sum(axis=0)
        d2 = dlogits @ w["w3"].T
        np.square(h2, out=h2)
        d2 *= np.subtract(1, h2, out=h2)
        into["w2"] += h1.T @ d2
        into["b2"] += d2.sum(axis=0)
        d1 = d2 @ w["w2"].T
        np.square(h1, out=h1)
        d1 *= np.subtract(1, h1, out=h1)
        into["w1"] += x.T @ d1
        into["b1"] += d1.sum(axis=0)

    def sample(self, prompts: Array, rng: Generator) -> tuple[Array, Array]:
        """One answer per prompt, a token at a time, and the log-probability each token had."""
        task, rows = self.task, np.arange(len(prompts))
        answers = np.zeros((len(prompts), task.answer_length), np.int64)
        logps = np.zeros(answers.shape, self.theta.dtype)
        x = np.zeros((len(prompts), self.inputs), self.theta.dtype)
        x[rows[:, None], np.arange(task.prompt_length) * task.vocabulary + prompts] = 1
        for t in range(task.answer_length):
            x[:, t - task.answer_length] = 1
            _, _, p = self.forward(x)
            below = np.cumsum(p, axis=1)
            # Above 0, so that no token of probability 0 is hit; up to the total, which rounding leaves near 1.
            dart = (1 - rng.random((len(prompts), 1), np.float32)) * below[:, -1:]
            answers[:, t] = (below < dart).sum(axis=1)
            logps[:, t] = np.log(p[rows, answers[:, t]])
            x[:, t - task.answer_length] = 0
            x[rows, (task.prompt_length + t) * task.vocabulary + answers[:, t]] = 1
        return answers, logps

    def contexts(self, prompts: Array, answers: Array) -> Array:
        """The inputs that `sample` saw, all steps at once: one row per answer and token."""
        task = self.task
        one_hot = np.eye(task.vocabulary, dtype=self.theta.dtype)
        steps, split = task.answer_length, task.prompt_length * task.vocabulary
        x = np.zeros((len(prompts), steps, self.inputs), self.theta.dtype)
        x[:, :, :split] = one_hot[prompts].reshape(len(prompts), 1, split)
        earlier = np.tri(steps, k=-1, dtype=self.theta.dtype)  # step t sees the tokens before t
        seen = one_hot[answers][:, None] * earlier[:, :, None]
        x[:, :, split:-steps] = seen.reshape(len(prompts), steps, -1)
        x[:, :, -steps:] = np.eye(steps, dtype=self.theta.dtype)
        return x.reshape(-1, self.inputs)


class Adam:
    def __init__(self, size: int, learning_rate: float, dtype: type = np.float32) -> None:
        self.learning_rate = learning_rate
        self.mean, self.square, self.steps = np.zeros(size, dtype), np.zeros(size, dtype), 0

    def step(self, theta: Array, gradient: Array, beta1: float = 0.9, beta2: float = 0.98) -> None:
        self.steps += 1
        self.mean += (1 - beta1) * (gradient - self.mean)
        self.square += (1 - beta2) * (gradient * gradient - self.square)
        mean = self.mean / (1 - beta1**self.steps)
        square = self.square / (1 - beta2**self.steps)
        theta -= self.learning_rate * mean / (np.sqrt(square) + 1e-8)


def advantages(rewards: Array) -> Array:
    """By how much each answer beats the others to its own prompt, in standard deviations (groups are rows)."""
    centred = rewards - rewards.mean(axis=1, keepdims=True)
    return centred / (rewards.std(axis=1, keepdims=True) + 1e-4)


@dataclass(frozen=True)
class Batch:
    """Sampled groups: the first axis is the prompt, the second the answer within its group."""

    prompts: Array
    answers: Array
    logps: Array
    advantages: Array

    def take(self, groups: Array | slice) -> Batch:
        return Batch(self.prompts[groups], self.answers[groups], self.logps[groups], self.advantages[groups])


def clipped_loss(policy: Policy, batch: Batch, tokens: int, into: dict[str, Array]) -> float:
    """PPO's clipped objective (negated) over a block; adds its gradient to `into`.

    `tokens` is the size of the whole minibatch, of which this block is a part, so that blocks add up.
    """
    answers = batch.answers.reshape(-1, policy.task.answer_length)
    x = policy.contexts(np.repeat(batch.prompts, batch.answers.shape[1], axis=0), answers)
    h1, h2, p = policy.forward(x)
    chosen, rows = answers.reshape(-1), np.arange(answers.size)
    advantage = np.repeat(batch.advantages.reshape(-1), policy.task.answer_length)
    ratio = p[rows, chosen] / np.exp(batch.logps.reshape(-1))
    free, clipped = ratio * advantage, np.clip(ratio, 1 - CLIP, 1 + CLIP) * advantage
    # Where the clipped branch is the smaller one it is constant, and the token teaches nothing.
    dlogp = np.where(free <= clipped, free, 0) / -tokens
    dlogits = p * -dlogp[:, None]
    dlogits[rows, chosen] += dlogp
    policy.backward(x, h1, h2, dlogits, into)
    return float(np.minimum(free, clipped).sum() / -tokens)


class Learner:
    """One experiment.  Call `rollout`, then `train`, as often as there are iterations."""

    def __init__(self, task: Task, work: Work, seed: int, scale: float = 1.0) -> None:
        self.task, self.work = task, work.scaled(scale)
        self.rng = np.random.default_rng(seed)
        self.policy = Policy(task, self.rng)
        self.adam = Adam(self.policy.theta.size, work.learning_rate)
        self.batch: Batch | None = None

    def rollout(self, progress: Callable[[int, int], object]) -> float:
        """Sample and check groups of answers, keep the most telling groups; the mean reward of all of them.

        More is sampled than trained on, and the groups whose answers differ most in reward are kept (as in DAPO). Where
        all answers are equally good there is nothing to compare.
        """
        groups, task = self.work.sampled_groups, self.task
        prompts = task.draw_prompts(self.rng, groups)
        answers = np.zeros((groups, GROUP, task.answer_length), np.int64)
        logps = np.zeros(answers.shape, np.float32)
        rewards = np.zeros((groups, GROUP), np.float32)
        for at in range(0, groups, SAMPLE_BLOCK):
            block = slice(at, min(at + SAMPLE_BLOCK, groups))
            repeated = np.repeat(prompts[block], GROUP, axis=0)
            sampled, logp = self.policy.sample(repeated, self.rng)
            answers[block] = sampled.reshape(-1, GROUP, task.answer_length)
            logps[block] = logp.reshape(-1, GROUP, task.answer_length)
            checked = [task.reward(p, a) for p, a in zip(repeated.tolist(), sampled.tolist(), strict=True)]
            rewards[block] = np.reshape(checked, (-1, GROUP))
            progress(block.stop, groups)
        telling = np.argsort(-rewards.std(axis=1), kind="stable")[: self.work.trained_groups]
        self.batch = Batch(prompts, answers, logps, advantages(rewards)).take(telling)
        return float(rewards.mean())

    def train(self) -> None:
        """Several epochs of minibatch steps on the last rollout, each summed over blocks that fit the cache."""
        if self.batch is None:
            raise RuntimeError("there is nothing to train on yet: call rollout() first")
        gradient = np.zeros_like(self.policy.theta)
        into = self.policy.views(gradient)
        for _ in range(self.work.epochs):
            order = self.rng.permutation(self.work.trained_groups)
            for minibatch in np.array_split(order, self.work.minibatches):
                gradient[:] = 0
                tokens = len(minibatch) * GROUP * self.task.answer_length
                for at in range(0, len(minibatch), TRAIN_BLOCK):
                    clipped_loss(self.policy, self.batch.take(minibatch[at : at + TRAIN_BLOCK]), tokens, into)
                self.adam.step(self.policy.theta, gradient)

    def save(self, path: Path) -> None:
        np.savez(path, **self.policy.weights)

    def checksum(self) -> str:
        return hashlib.sha256(self.policy.theta.tobytes()).hexdigest()
