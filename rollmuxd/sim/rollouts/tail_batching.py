"""RollPacker's tail batching (arXiv 2509.21009) on the replicas of :mod:`rollmuxd.rollout.engine`.

A short round launches 1.25 times the prompts with 1.25 times the samples. A prompt is done with its first n samples,
the round with its first P prompts; the rest is cut, and its prompts are deferred. When P prompts are deferred, a long
round does exactly these, without over-sampling.
"""

import math
from collections.abc import Sequence
from typing import Final

import numpy as np

from rollmuxd.rollout.engine import Replica, Request
from rollmuxd.rollout.lengths import Prior
from rollmuxd.rollout.plan import start
from rollmuxd.sim.rollouts.batches import Lengths
from rollmuxd.sim.rollouts.run import SCENARIOS, Setting

#: over-sampling of prompts and of samples
ETA: Final = 1.25
#: rounds that are measured: four short ones defer a quarter of the prompts each, and a long one follows
ROUNDS: Final = 10
#: seconds between two looks at what is done
_LOOK_S: Final = 0.5


class Rounds:
    """Some rounds of one job. ``prior``: what is known of its lengths."""

    def __init__(self, setting: Setting, source: Lengths, prior: Prior, seed: int) -> None:
        self.setting, self.source, self.seed, self.prior = setting, source, seed, prior
        self.engines = setting.engines(source.limit)
        self.preemptions = 0
        self.degrees: set[int] = set()
        self._deferred: list[list[int]] = []
        self._rng = np.random.default_rng(seed)

    def run(self) -> float:
        """Mean seconds of a round: each hands on as many prompts as a step has."""
        want, n = self.setting.prompts, self.setting.samples
        took = 0.0
        for number in range(ROUNDS):
            if len(self._deferred) >= want:
                batch, self._deferred = self._deferred[:want], self._deferred[want:]
                took += self._round(batch, want, n)
            else:
                batch = self.source.draw(math.ceil(ETA * want), math.ceil(ETA * n), f"{self.seed} round {number}")
                took += self._round(batch, want, n)
        return took / ROUNDS

    def _round(self, batch: Sequence[list[int]], want: int, n: int) -> float:
        samples = len(batch[0])
        plan = start(
            self.prior, len(batch), samples, self.setting.prompt_tokens, self.setting.nodes, self.engines, self._rng,
            self.setting.gpus_per_node, SCENARIOS,
        )  # fmt: skip
        degree = plan.layout[0]
        self.degrees.add(degree)
        replicas = [
            Replica(self.engines[degree]) for _ in range(len(plan.layout) * self.setting.gpus_per_node // degree)
        ]
        requests = [
            Request(i * samples + j, self.setting.prompt_tokens, length)
            for i, group in enumerate(batch)
            for j, length in enumerate(group)
        ]
        for request in requests:
            replicas[request.id % len(replicas)].submit([request])
        left, over, ends, now = [n] * len(batch), 0, 0.0, 0.0
        while over < want:
            now += _LOOK_S
            for when, name in sorted(it for replica in replicas for it in replica.advance(now)):
                left[name // samples] -= 1
                if left[name // samples] == 0 and over < want:
                    over, ends = over + 1, when
                    group = range(name // samples * samples, (name // samples + 1) * samples)
                    for replica in replicas:
                        replica.take(group)
        self.preemptions += sum(replica.preemptions for replica in replicas)
        # a deferred prompt is generated once more, from the beginning, with n samples
        self._deferred += [group[:n] for group, missing in zip(batch, left, strict=True) if missing > 0]
        return ends
