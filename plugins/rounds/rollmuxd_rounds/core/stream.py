"""Training that begins while the rollout runs (RollPacker, stream trainer): when, and with what gradient.

For a job on one pool, inside the slot that it holds. Not together with giving a tail's GPUs to other jobs.
"""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct


class EarlyStart:
    """Says at each further ``every`` of the responses, from ``frm`` to ``to``, whether half of the replicas may train.

    Each milestone is asked once; a yes is the last one.
    """

    def __init__(self, frm: float = 0.2, to: float = 0.5, every: float = 0.05) -> None:
        if not (0 <= frm <= to <= 1 and every > 0):
            raise ValueError(f"frm {frm:g}, to {to:g}, every {every:g}: 0 <= frm <= to <= 1, and every is above 0")
        self._frm, self._to, self._every = frm, to, every
        self._asked = -1
        self._moved = False

    def may_move(
        self, done: int, total: int, *, replicas: int, kv_tokens: int, made: Sequence[int], lengths: Sequence[int]
    ) -> bool:
        """Whether half of ``replicas`` may change sides now.

        ``kv_tokens`` is what the KV cache of one replica holds. ``made`` has the tokens of each unfinished response
        with its prompt, ``lengths`` those of responses of earlier steps.
        """
        share = done / total if total else 0.0
        milestone = int((share - self._frm) / self._every + 1e-9)
        if self._moved or not self._frm - 1e-9 <= share <= self._to + 1e-9 or milestone <= self._asked:
            return False
        self._asked = milestone
        self._moved = replicas >= 2 and projected(made, lengths) <= (replicas - replicas // 2) * kv_tokens
        return self._moved


def projected(made: Sequence[int], lengths: Sequence[int]) -> float:
    """The KV tokens of all unfinished responses at their ends. Each is as long as, on average, earlier ones that got so
    far; where none did, as it is now.
    """
    ordered = sorted(lengths)
    total = 0.0
    for tokens in made:
        longer = [length for length in ordered if length > tokens]
        total += sum(longer) / len(longer) if longer else tokens
    return total


class Sums(Struct):
    """Gradients that were added up, and of how many samples."""

    gradients: list[Any]
    samples: int = 0


class Accumulator:
    """Adds up gradients of *sums* of per-sample losses, and divides by the samples at the end.

    So batches of different sizes, on different replicas, give the gradient of the whole batch. Works with any arrays
    that add and divide. Nothing is synchronised before :meth:`mean`.
    """

    def __init__(self) -> None:
        #: what was added since the last mean
        self.sums: Sums | None = None

    def add(self, gradients: Sequence[Any], samples: int) -> None:
        """Gradients of the summed losses of so many samples, one for each parameter."""
        if samples < 1:
            raise ValueError(f"{samples} samples: a batch has at least one")
        if self.sums is None:
            self.sums = Sums([gradient * 1 for gradient in gradients], samples)
            return
        if len(gradients) != len(self.sums.gradients):
            raise ValueError(f"{len(gradients)} gradients, and the batches before had {len(self.sums.gradients)}")
        self.sums.gradients = [a + b for a, b in zip(self.sums.gradients, gradients, strict=True)]
        self.sums.samples += samples

    def merge(self, other: "Accumulator") -> None:
        """Take in what another replica has added up."""
        if other.sums is not None:
            self.add(other.sums.gradients, other.sums.samples)

    def mean(self) -> list[Any]:
        """The gradient of the mean loss of all samples; begins again."""
        sums, self.sums = self.sums, None
        if sums is None:
            raise ValueError("no batch was added")
        return [gradient / sums.samples for gradient in sums.gradients]
