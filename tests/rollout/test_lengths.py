"""The forecast of lengths: it finds what lengths were drawn with, uses siblings, and covers what it says."""

import numpy as np
import pytest

from rollmuxd.rollout.lengths import Prior, Progress, fit, fresh, levels, quantile, sample

TRUE = Prior(mu=8.0, tau=0.5, sigma=0.3, limit=1_000_000)


def drawn(prompts, samples, seed=0, prior=TRUE):
    draw = np.random.default_rng(seed)
    level = draw.normal(prior.mu, prior.tau, (prompts, 1))
    lengths = np.exp(level + draw.normal(0, prior.sigma, (prompts, samples)))
    return np.clip(np.ceil(lengths), 1, prior.limit).astype(int)


def at_time(lengths, tokens):
    """The step when every response has generated so many tokens, or is finished."""
    flat = lengths.ravel()
    group = np.repeat(np.arange(len(lengths)), lengths.shape[1])
    return Progress(group, np.minimum(flat, tokens), flat <= tokens)


def test_a_fit_finds_what_the_lengths_were_drawn_with():
    seen = fit(drawn(400, 8), TRUE.limit)
    assert (seen.mu, seen.tau, seen.sigma) == pytest.approx((8.0, 0.5, 0.3), abs=0.05)


def test_samples_of_long_prompts_that_differ_less_are_forecast_so():
    draw = np.random.default_rng(3)
    z = draw.normal(0, 1, (400, 1))
    lengths = np.exp(8 + 0.5 * z + draw.normal(0, 1, (400, 8)) * 0.3 * (1 - 0.2 * z))
    seen = fit(lengths.astype(int), TRUE.limit)
    assert seen.slope == pytest.approx(-0.2, abs=0.06)
    assert seen.after(lengths.astype(int)).slope == pytest.approx(seen.slope)
    assert fit(drawn(400, 8), TRUE.limit).slope == pytest.approx(0, abs=0.05)
    assert seen.sigmas[0] > seen.sigma > seen.sigmas[-1]


def test_too_few_lengths_change_nothing():
    assert fit([[5]], 100) is None
    assert TRUE.after([[5]]) is TRUE
    assert TRUE.after([]) is TRUE


def test_each_step_counts_half_of_what_comes_after():
    after = TRUE.after([[1000, 1000], [1000, 1000]])
    assert after.mu == pytest.approx((8.0 + np.log(1000)) / 2)


def test_scenarios_of_a_step_that_has_not_begun_look_like_the_steps_before():
    found = np.log(sample(TRUE, fresh(TRUE, 200, 8), 16, np.random.default_rng(1)))
    assert found.mean() == pytest.approx(8.0, abs=0.05)
    assert found.std() == pytest.approx(np.hypot(0.5, 0.3), rel=0.1)
    by_prompt = found.reshape(16, 200, 8).mean(axis=2)
    assert by_prompt.std() == pytest.approx(np.hypot(0.5, 0.3 / np.sqrt(8)), rel=0.1)


def test_forecasts_are_longer_than_what_is_there_and_within_the_limit():
    prior = Prior(8.0, 0.5, 0.3, 4000)
    lengths = drawn(20, 8, prior=prior)
    seen = at_time(lengths, 3000)
    found = sample(prior, seen, 8, np.random.default_rng(1))
    assert found.shape == (8, len(seen.unfinished))
    assert found.min() > 3000
    assert found.max() <= 4000


def test_a_prompt_whose_samples_were_short_is_expected_to_stay_short():
    group, made = np.repeat([0, 1], 4), np.array([500, 520, 480, 10, 9000, 9500, 8800, 10])
    done = np.array([True, True, True, False] * 2)
    short, long = quantile(TRUE, Progress(group, made, done), 0.5)
    assert short < 1500 < 3000 < long
    assert levels(TRUE, Progress(group, made, done)).sum(axis=1) == pytest.approx([1, 1])


@pytest.mark.parametrize("tokens", [1500, 2500, 4000, 6000])
def test_nine_of_ten_are_within_the_90_percent_quantile(tokens):
    within = []
    for seed in range(8):
        lengths = drawn(64, 8, seed)
        seen = at_time(lengths, tokens)
        within.append(lengths.ravel()[seen.unfinished] <= quantile(TRUE, seen, 0.9))
    assert np.concatenate(within).mean() == pytest.approx(0.9, abs=0.04)


def test_quantiles_and_scenarios_agree():
    seen = at_time(drawn(30, 8), 2500)
    scenarios = sample(TRUE, seen, 2000, np.random.default_rng(2))
    assert np.quantile(scenarios, 0.6, axis=0) == pytest.approx(quantile(TRUE, seen, 0.6), rel=0.05)


def test_nothing_unfinished_gives_nothing():
    seen = at_time(drawn(3, 4), 10**9)
    assert sample(TRUE, seen, 4, np.random.default_rng(0)).shape == (4, 0)
    assert len(quantile(TRUE, seen, 0.5)) == 0
