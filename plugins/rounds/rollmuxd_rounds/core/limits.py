"""How long a reward may take: by what correct answers to the same prompt took (RollPacker, reward scheduler)."""

from collections.abc import Hashable

from msgspec import Struct


class RewardTimeout(Struct, frozen=True):
    """The reward of a sample whose grader took too long. What that is worth, the loop decides."""

    limit_s: float


class Adaptive:
    """``min(max(least_s, factor * anchor), most_s)``; the anchor is the longest time of a correct answer so far.

    Before the first correct answer to a prompt the limit is ``most_s``: a limit that no answer could meet would never
    find an anchor.
    """

    def __init__(self, *, factor: float = 1.5, least_s: float = 2.0, most_s: float = 30.0) -> None:
        if not 0 < least_s <= most_s or factor < 1:
            raise ValueError(f"factor {factor:g}, least_s {least_s:g}, most_s {most_s:g}: 1 <= factor, least <= most")
        self._factor, self._least_s, self._most_s = factor, least_s, most_s
        self._anchors: dict[Hashable, float] = {}

    def limit_s(self, prompt: Hashable) -> float:
        """The limit for the next answer to this prompt."""
        anchor = self._anchors.get(prompt)
        return self._most_s if anchor is None else min(max(self._least_s, self._factor * anchor), self._most_s)

    def took(self, prompt: Hashable, seconds: float, *, correct: bool) -> None:
        """A grader has ended by itself."""
        if correct:
            self._anchors[prompt] = max(seconds, self._anchors.get(prompt, 0.0))
