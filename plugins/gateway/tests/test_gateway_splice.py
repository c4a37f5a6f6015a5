"""The rules of B1.4: a request that was cut any number of times ends as one that was not, or is not cut at all."""

from array import array
from collections import Counter
from math import exp

import pytest
from gateway_world import World, alone
from hypothesis import given, settings
from hypothesis import strategies as st

from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core import splice
from rollmuxd_gateway.core.model import Replica, Request
from rollmuxd_gateway.fakes.hashlm import EOS, Model, text_of

MODEL = Model(median=120, sigma=0.3)
PROMPT = [11, 12, 13, 14, 15, 16, 17, 18, 19]


def run_cut(params, cuts, *, prompt=PROMPT, max_tokens=64, **engine):
    """The request, moved to the other replica at each of these lengths."""
    world = World(2, model=MODEL, **engine)
    name = world.ask(prompt, max_tokens=max_tokens, temperature=params.pop("temperature", 0), **params)
    cuts = sorted(set(cuts))
    while not world.gateway.requests[name].over:
        world.step()
        request = world.gateway.requests[name]
        if cuts and len(request.ids) >= cuts[0] and not request.over:
            cuts.pop(0)
            world.tell(i.Move(name))
    return world.ended[name]


@st.composite
def rows(draw):
    """Parameters that may move and do not depend on luck."""
    params = {}
    if draw(st.booleans()):
        params["min_tokens"] = draw(st.integers(0, 60))
    if draw(st.booleans()):
        params["stop_token_ids"] = draw(st.lists(st.integers(1, 255), max_size=3))
    if draw(st.booleans()):
        params["logit_bias"] = {str(draw(st.integers(1, 255))): draw(st.floats(-2, 2))}
    if draw(st.booleans()):
        params["repetition_penalty"] = draw(st.sampled_from([0.8, 1.0, 1.3]))
    if draw(st.booleans()):
        params["ignore_eos"] = True
    if draw(st.booleans()):
        params["seed"], params["temperature"] = draw(st.integers(0, 2**31)), 1.0
    return params


@settings(max_examples=60, deadline=None)
@given(rows(), st.lists(st.integers(1, 60), max_size=5), st.lists(st.integers(1, 255), min_size=1, max_size=20))
def test_any_cuts_of_any_row_end_as_an_uncut_request_does(params, cuts, prompt):
    once = alone(MODEL, prompt, engine={"positional_seed": True}, **{"temperature": 0, **params})
    cut = run_cut(dict(params), cuts, prompt=prompt, positional_seed=True)
    assert cut.ids == once.out
    assert cut.logprobs == once.logprobs
    assert (cut.finish, cut.stop_reason) == (once.finish, once.stop_reason)


PLAIN = alone(MODEL, PROMPT, temperature=0).out


def stop_across(cut_at):
    """A stop string that lies across the cut."""
    text = text_of(PLAIN[cut_at - 2 : cut_at + 2])
    return text if "\ufffd" not in text else ""


CUTS = [at for at in range(3, 50) if stop_across(at)]


@pytest.mark.parametrize("at", CUTS)
def test_a_stop_string_across_the_cut_is_found(at):
    stop = stop_across(at)
    once = alone(MODEL, PROMPT, temperature=0, stop=[stop])
    assert once.finish == "stop"
    assert run_cut({"stop": [stop]}, [at]).ids == once.out


def test_without_the_rewind_stop_strings_across_the_cut_are_missed(monkeypatch):
    monkeypatch.setattr(splice, "rewind", lambda _: 0)
    missed = 0
    for at in CUTS:
        stop = [stop_across(at)]
        missed += run_cut({"stop": stop}, [at]).ids != alone(MODEL, PROMPT, temperature=0, stop=stop).out
    assert missed > len(CUTS) / 2


def repeats(request, at):
    """The share of tokens after the cut whose draw is that of the same place after the start."""
    drawn = [index for index in range(at) if index + at < len(request.ids)]
    return sum(request.ids[index] == request.ids[index + at] for index in drawn) / len(drawn)


def test_a_seed_of_a_generator_is_renewed_at_each_cut_and_one_of_a_position_is_kept():
    target = Replica("r", "http://r")
    request = Request("q", "q", 0, "q", array("i", PROMPT), None, {"seed": 7}, max_tokens=64)
    assert splice.continued(request, target, 0)["seed"] == 7
    seeds = {splice.continued(request, target, at)["seed"] for at in range(1, 64)}
    assert len(seeds) == 63
    assert 7 not in seeds
    target.positional_seed = True
    assert splice.continued(request, target, 9)["seed"] == 7


def uniforms(at, reseed, monkeypatch):
    """What an engine with one generator a request draws, around a cut."""
    import random

    drawn = []

    class Watched(random.Random):
        def random(self):
            drawn.append(super().random())
            return drawn[-1]

    monkeypatch.setattr("rollmuxd_gateway.fakes.hashlm.random.Random", Watched)
    if not reseed:
        monkeypatch.setattr(splice, "reseeded", lambda seed, offset: seed)
    run_cut({"seed": 5, "temperature": 1.0, "ignore_eos": True}, [at])
    return drawn


@pytest.mark.parametrize("reseed", [True, False])
def test_a_seed_sent_again_as_it_is_would_replay_its_random_stream(reseed, monkeypatch):
    drawn = uniforms(20, reseed, monkeypatch)
    replayed = sum(value in drawn[:20] for value in drawn[20:40])
    assert replayed == 0 if reseed else replayed > 10


def drawn(cut_at, tokens, batches):
    """Responses to five prompts, each moved after so many tokens, together with what stands before them."""
    found = []
    for batch in range(batches):
        world = World(2, model=MODEL, max_num_seqs=10**6)
        for number, engine in enumerate(world.engines.values()):
            engine._rng.seed(f"{cut_at} {batch} {number}")
        prompts = [[*PROMPT, 30 + number % 5] for number in range(50)]
        names = {world.ask(prompt, max_tokens=tokens, ignore_eos=True): prompt for prompt in prompts}
        while len(world.ended) < len(names):
            world.step()
            for name in names:
                request = world.gateway.requests[name]
                if not request.over and len(request.ids) == cut_at and len(request.segments) == 1:
                    world.tell(i.Move(name))
        found += [(prompt, world.ended[name].ids) for name, prompt in names.items()]
    return found


def odds(state):
    """What may come next and how likely it is, the likeliest first."""
    tokens, values, _ = MODEL.logits(state)
    if tokens == [EOS]:  # the end is ignored
        tokens = [1 + state.digest[8] % 127]
    weights = sorted(((exp(value), token) for token, value in zip(tokens, values, strict=True)), reverse=True)
    total = sum(weight for weight, _ in weights)
    return [(token, weight / total) for weight, token in weights]


def deviation(responses, cut_at):
    """By how many standard deviations the chi-square of the tokens is too large (Wilson and Hilferty).

    Each token is held against the odds that the model gives it after all that stands before it, at each place. Counted
    apart are its rank among the candidates, its upper bit, and the rank of the token that was drawn as many places
    before as were drawn before the cut: that one repeats where a random stream starts again.
    """
    seen, expected = Counter(), Counter()
    for prompt, ids in responses:
        state, ranks = MODEL.start(), []
        for token in prompt:
            MODEL.roll(state, token)
        for place, token in enumerate(ids):
            candidates = odds(state)
            before = ranks[place - cut_at] if place >= cut_at else 0
            for rank, (one, share) in enumerate(candidates):
                expected[place, before, rank, one >= 128] += share
            ranks.append([one for one, _ in candidates].index(token))
            seen[place, before, ranks[-1], token >= 128] += 1
            MODEL.roll(state, token)
    common = [row for row in expected if expected[row] >= 5]
    chi = sum((seen[row] - expected[row]) ** 2 / expected[row] for row in common)
    degrees = len(common) - len({row[:2] for row in common})
    return ((chi / degrees) ** (1 / 3) - 1 + 2 / (9 * degrees)) / (2 / (9 * degrees)) ** 0.5


@pytest.mark.parametrize(("cut_at", "tokens", "batches"), [(1, 2, 200), (5, 10, 40)])
def test_the_tokens_before_and_after_a_cut_have_the_odds_that_the_model_gives_them(cut_at, tokens, batches):
    assert deviation(drawn(cut_at, tokens, batches), cut_at) < 4


def test_tokens_that_are_taken_back_for_their_values_would_change_the_distribution(monkeypatch):
    monkeypatch.setattr(splice, "rewind", lambda request: 1 if request.ids and request.ids[-1] >= 128 else 0)
    assert deviation(drawn(1, 2, batches=200), 1) > 4


@pytest.mark.parametrize(
    ("params", "engine"),
    [
        ({"presence_penalty": 0.5}, "vllm"),
        ({"frequency_penalty": 0.5}, "vllm"),
        ({"repetition_penalty": 1.2}, "sglang"),
        ({"structured_outputs": {"regex": "a+"}}, "vllm"),
        ({"response_format": {"type": "json_object"}}, "vllm"),
        ({"bad_words": ["no way"]}, "vllm"),
        ({"best_of": 2}, "vllm"),
        ({"a_parameter_of_next_year": 1}, "vllm"),
    ],
)
def test_what_is_counted_over_the_output_or_unknown_stays_where_it_runs(params, engine):
    request = Request("q", "q", 0, "q", array("i", PROMPT), None, params, engine=engine)
    assert splice.pin(request)


@pytest.mark.parametrize(
    "params",
    [
        {"presence_penalty": 0},
        {"repetition_penalty": 1.0},
        {"response_format": {"type": "text"}},
        {"temperature": 0.7, "top_p": 0.9, "top_k": 50, "min_p": 0.1},
        {"stop": ["x"], "seed": 1, "min_tokens": 3, "prompt_logprobs": 1},
    ],
)
def test_what_looks_at_no_border_may_move(params):
    assert not splice.pin(Request("q", "q", 0, "q", array("i", PROMPT), None, params, engine="vllm"))


def test_with_penalties_a_naive_cut_would_change_what_follows(monkeypatch):
    params = {"frequency_penalty": 1.5, "presence_penalty": 1.0}
    prompts = [[*PROMPT, extra] for extra in range(1, 25)]
    whole = [alone(MODEL, prompt, temperature=0, **params).out for prompt in prompts]
    pinned = [run_cut(dict(params), [30], prompt=prompt) for prompt in prompts]
    assert [request.ids for request in pinned] == whole
    assert all(len(request.segments) == 1 for request in pinned)
    monkeypatch.setattr(splice, "pin", lambda _: "")
    cut = [run_cut(dict(params), [30], prompt=prompt).ids for prompt in prompts]
    assert sum(ids != out for ids, out in zip(cut, whole, strict=True)) > 5


def test_a_request_with_all_its_tokens_is_finished_without_another_call():
    world = World(2, model=MODEL)
    name = world.ask(PROMPT, max_tokens=30, temperature=0, ignore_eos=True)
    while len(world.gateway.requests[name].ids) < 29:
        world.step()
    request = world.gateway.requests[name]
    request.max_tokens = 29
    world.tell(i.Move(name))
    assert (request.finish, len(request.segments)) == ("length", 1)


def test_other_weights_refuse_a_continuation():
    request = Request("q", "q", 0, "q", array("i", PROMPT), None, {}, ids=array("i", [1]), weights="3", engine="vllm")
    assert "version 4" in splice.refuses(request, Replica("r", "u", weights="4"), mix_versions=False)
    assert not splice.refuses(request, Replica("r", "u", weights="4"), mix_versions=True)
    assert not splice.refuses(request, Replica("r", "u", weights="3"), mix_versions=False)
