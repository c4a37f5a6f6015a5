"""How many tokens the unfinished responses will have: a two-level log-normal model, refitted after each step.

``ln length = mu + g + e``: ``g`` with deviation ``tau`` is the prompt's, ``e`` with deviation ``sigma`` the sample's.
Samples of long prompts differ less, since a limit is near: ``sigma`` changes with ``g``.
Inside a step, a prompt's ``g`` shows in its finished samples and in the progress of the others. So the forecast of a
response uses its siblings. Forecasts are *scenarios*, drawn from what is known: a plan that is good for the mean of the
lengths ignores the longest, which decides.
"""

import math
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

#: a step's own fit counts so much, and all earlier ones the rest
WEIGHT: Final = 0.5
#: where a prompt's ``g`` may lie, in deviations
_GRID: Final = np.linspace(-3.5, 3.5, 57)
#: of the standard normal: distribution and its inverse, tabulated
_Z: Final = np.linspace(-8.0, 8.0, 3201)
_PHI: Final = np.array([0.5 * math.erfc(-z / math.sqrt(2)) for z in _Z])
_TINY: Final = 1e-12
#: bounds of what a level makes of ``sigma``, and prompts from which on its slope is fitted
_SIGMAS: Final = (0.4, 1.8)
_SEVERAL: Final = 16


class Prior(Struct, frozen=True):
    """What is known before a step: mean of ln length, deviation between prompts and between samples; tokens at most."""

    mu: float
    tau: float
    sigma: float
    limit: int
    #: how much of ``sigma`` it changes by for each ``tau`` that a prompt is above the mean
    slope: float = 0.0

    @property
    def sigmas(self) -> Floats:
        """``sigma`` on each level of the grid."""
        found: Floats = self.sigma * np.clip(1 + self.slope * _GRID, *_SIGMAS)
        return found

    def after(self, groups: Sequence[Sequence[int]], weight: float = WEIGHT) -> "Prior":
        """With one more step's lengths, by prompt."""
        seen = fit(groups, self.limit)
        if seen is None:
            return self
        keep = 1 - weight
        return Prior(
            keep * self.mu + weight * seen.mu,
            math.sqrt(keep * self.tau**2 + weight * seen.tau**2),
            math.sqrt(keep * self.sigma**2 + weight * seen.sigma**2),
            self.limit,
            keep * self.slope + weight * seen.slope,
        )


def fit(groups: Sequence[Sequence[int]], limit: int) -> Prior | None:
    """One step by itself (analysis of variance); None: there is too little of it.

    Lengths at the limit count as they are: what is forecast is the length, and not what it would have been.
    """
    logs = [np.log(np.maximum(1, np.asarray(group, dtype=np.float64))) for group in groups if len(group)]
    count = sum(map(len, logs))
    if count < 2:
        return None
    mu = float(np.concatenate(logs).mean())
    several = [group for group in logs if len(group) > 1]
    freedom = sum(len(group) - 1 for group in several)
    total = float(np.concatenate(logs).var(ddof=1))
    within = sum(float(((group - group.mean()) ** 2).sum()) for group in several) / freedom if freedom else total
    between = max(0.0, total - within)
    slope = 0.0
    if len(several) >= _SEVERAL and between and within:
        level = np.array([group.mean() for group in several]) - mu
        spread = np.array([group.std(ddof=1) for group in several])
        # a regression on the true levels, whose variance is `between`; the samples' noise is in the observed ones
        slope = float(np.cov(level, spread)[0, 1] / math.sqrt(between) / spread.mean())
    return Prior(mu, max(0.02, math.sqrt(between)), max(0.02, math.sqrt(within)), limit, slope)


class Progress(Struct, frozen=True):
    """One step so far, response by response: arrays of one length."""

    #: which prompt it answers, from 0
    group: Ints
    #: tokens generated so far; of a finished one, its length
    made: Ints
    done: NDArray[np.bool_]

    @property
    def unfinished(self) -> Ints:
        """Their places."""
        found: Ints = np.flatnonzero(~self.done)
        return found


def levels(prior: Prior, seen: Progress) -> Floats:
    """The probability of each level of :func:`grid`, for each prompt: ``[prompts, levels]``.

    A finished sample says its length, an unfinished one that it is longer than what it has.
    """
    prompts = int(seen.group.max()) + 1 if len(seen.group) else 0
    log_p = np.tile(-0.5 * _GRID**2, (prompts, 1))
    sigmas = prior.sigmas[None]
    z = (np.log(np.maximum(1, seen.made))[:, None] - prior.mu - prior.tau * _GRID[None, :]) / sigmas
    at_limit = seen.made >= prior.limit
    exact = seen.done & ~at_limit
    each = np.where(exact[:, None], -0.5 * z**2 - np.log(sigmas), np.log(np.maximum(_TINY, 1 - _phi(z))))
    np.add.at(log_p, seen.group, each)
    log_p -= log_p.max(axis=1, keepdims=True)
    p = np.exp(log_p)
    found: Floats = p / p.sum(axis=1, keepdims=True)
    return found


def sample(prior: Prior, seen: Progress, scenarios: int, rng: np.random.Generator) -> Floats:
    """Total lengths of the unfinished responses, ``[scenarios, unfinished]``: more than what each has, limit at most.

    In one scenario all samples of a prompt share its level.
    """
    rest = seen.unfinished
    if not len(rest):
        return np.zeros((scenarios, 0))
    cumulated = np.cumsum(levels(prior, seen), axis=1)
    drawn = rng.random((scenarios, len(cumulated), 1))
    at = np.minimum((cumulated[None] < drawn).sum(axis=2), len(_GRID) - 1)
    level = prior.mu + prior.tau * _GRID[at][:, seen.group[rest]]
    sigma = prior.sigmas[at][:, seen.group[rest]]
    return _truncated(prior, level, sigma, seen.made[rest], rng.random((scenarios, len(rest))))


def exceeds(prior: Prior, seen: Progress) -> Callable[[Floats], Floats]:
    """The probability that each unfinished response would be longer than a length, if there were no limit."""
    rest = seen.unfinished
    p = levels(prior, seen)[seen.group[rest]]
    level = prior.mu + prior.tau * _GRID[None, :]

    def longer_than(length: Floats) -> Floats:
        found: Floats = 1 - _phi((np.log(np.maximum(1, length))[:, None] - level) / prior.sigmas)
        return found

    so_far = np.maximum(_TINY, longer_than(seen.made[rest].astype(np.float64)))
    return lambda length: np.minimum(1.0, (p * (np.maximum(0.0, longer_than(length)) / so_far)).sum(axis=1))


def quantile(prior: Prior, seen: Progress, q: float) -> Floats:
    """The q-quantile of the total length of each unfinished response."""
    made, longer = seen.made[seen.unfinished], exceeds(prior, seen)
    low, high = np.log(np.maximum(1, made)), np.full(len(made), math.log(prior.limit))
    for _ in range(30):
        middle = (low + high) / 2
        more = longer(np.exp(middle)) > 1 - q
        low, high = np.where(more, middle, low), np.where(more, high, middle)
    return _within(prior, np.exp(high), made)


def fresh(prior: Prior, prompts: int, samples: int) -> Progress:
    """A step that has not begun."""
    count = prompts * samples
    return Progress(np.repeat(np.arange(prompts), samples), np.zeros(count, np.int64), np.zeros(count, bool))


def _truncated(prior: Prior, level: Floats, sigma: Floats, made: Ints, u: Floats) -> Floats:
    below = _phi((np.log(np.maximum(1, made)) - level) / sigma)
    z = np.interp(np.minimum(below + u * (1 - below), 1 - _TINY), _PHI, _Z)
    return _within(prior, np.exp(level + sigma * z), made)


def _within(prior: Prior, length: Floats, made: Ints) -> Floats:
    found: Floats = np.clip(np.ceil(length), np.minimum(made + 1, prior.limit), prior.limit)
    return found


def _phi(z: Floats) -> Floats:
    found: Floats = np.interp(z, _Z, _PHI)
    return found
