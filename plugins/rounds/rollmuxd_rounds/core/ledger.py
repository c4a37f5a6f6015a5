"""Which prompts come in which round (RollPacker, arXiv 2509.21009, section on tail batching).

Short rounds launch more than they need and keep what is first; the rest is deferred. As soon as a round's worth of
prompts is deferred, the next round is exactly these, with only what is needed. So the longest responses come
together, and hold up one round in about five.

What may be relied on: a prompt is committed once in an epoch, and deferred once at most. What was planned and not
committed is planned again, the same.
"""

import math
import random
from collections.abc import Iterable
from typing import Any, Literal

from msgspec import Struct

Kind = Literal["short", "long", "flush"]


class Plan(Struct, frozen=True):
    """One round: its prompts by index, and how many of what is launched it keeps."""

    kind: Kind
    epoch: int
    number: int
    prompts: tuple[int, ...]
    #: groups that the round yields
    want: int
    #: samples that are launched for each prompt; the first ``n`` of them are kept
    launch: int
    n: int


class Ledger:
    """The prompts of an epoch: fresh, deferred, committed.

    ``count`` prompts, ``want`` groups a round, ``n`` samples a group; a short round launches ``eta`` times as many
    prompts and ``eta_n`` times as many samples.
    """

    def __init__(self, count: int, *, n: int, want: int, eta: float = 1.25, eta_n: float = 1.25, seed: int = 0) -> None:
        if min(count, n, want) < 1 or min(eta, eta_n) < 1:
            raise ValueError(
                f"prompts {count}, n {n}, want {want}, eta {eta:g}, eta_n {eta_n:g}: each is at least 1; "
                "eta = 1 and eta_n = 1 launch only what is needed"
            )
        self._count, self._n, self._want, self._seed = count, n, want, seed
        self._launched, self._samples = math.ceil(eta * want), math.ceil(eta_n * n)
        self.epoch, self.number, self.committed = 0, 0, 0
        self.fresh = self._shuffled()
        self.deferred: list[int] = []

    def _shuffled(self) -> list[int]:
        order = list(range(self._count))
        random.Random(f"rounds {self._seed} {self.epoch}").shuffle(order)
        return order

    def next(self) -> Plan:
        """The round that comes now. Changes nothing."""
        if len(self.deferred) >= self._want:
            kind: Kind = "long"
            prompts, launch = self.deferred[: self._want], self._n
        elif len(self.fresh) >= self._want:
            kind = "short"
            prompts, launch = self.fresh[: self._launched], self._samples
        else:
            kind = "flush"
            prompts, launch = [*self.deferred, *self.fresh][: self._want], self._n
        want = min(self._want, len(prompts))
        return Plan(kind, self.epoch, self.number, tuple(prompts), want, launch, self._n)

    def commit(self, plan: Plan, done: Iterable[int]) -> None:
        """The groups of these prompts were trained on; the plan's other prompts are deferred.

        Raises ValueError for another plan than the last one, and for prompts that are not those of a whole round.
        """
        kept = set(done)
        if plan != self.next():
            raise ValueError(f"round {plan.number} of epoch {plan.epoch} is not the one that is to be committed")
        if not kept <= set(plan.prompts) or len(kept) != plan.want:
            raise ValueError(
                f"round {plan.number} has {plan.want} groups, and {len(kept)} are committed: take all groups of a "
                "round before you commit it"
            )
        launched = set(plan.prompts)
        late = [prompt for prompt in plan.prompts if prompt not in kept]
        self.fresh = [prompt for prompt in self.fresh if prompt not in launched]
        self.deferred = [prompt for prompt in self.deferred if prompt not in launched] + late
        self.committed += plan.want
        self.number += 1
        if not self.fresh and not self.deferred:
            self.epoch, self.committed = self.epoch + 1, 0
            self.fresh = self._shuffled()

    @property
    def epoch_done(self) -> bool:
        """Whether the last commit has ended an epoch."""
        return self.number > 0 and self.committed == 0

    def state_dict(self) -> dict[str, Any]:
        """All of it, for the checkpoint that has the weights."""
        return {
            "prompts": self._count,
            "seed": self._seed,
            "epoch": self.epoch,
            "number": self.number,
            "committed": self.committed,
            "fresh": list(self.fresh),
            "deferred": list(self.deferred),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; None: there is none. Raises ValueError for other prompts or another seed."""
        if state is None:
            return
        if (state["prompts"], state["seed"]) != (self._count, self._seed):
            raise ValueError(
                f"the checkpoint is of {state['prompts']} prompts and seed {state['seed']}, and these rounds have "
                f"{self._count} and {self._seed}: give the same ones, or begin without it"
            )
        self.epoch, self.number, self.committed = state["epoch"], state["number"], state["committed"]
        self.fresh, self.deferred = list(state["fresh"]), list(state["deferred"])
