"""Rounds on asyncio, against a generator whose times are known: virtual time, no engine."""

import asyncio

import pytest

from rollmuxd_rounds import Adaptive, MixedWeights, Response, RewardTimeout, Rounds, Unavailable

pytestmark = [pytest.mark.asyncio, pytest.mark.looptime]


class Engine:
    """Makes a sample of prompt ``p`` in ``p`` seconds, the sample's number in hundredths more; remembers aborts."""

    def __init__(self):
        self.began, self.aborted, self.weights = [], [], {}
        self.fails = {}

    async def __call__(self, prompt, sample):
        self.began.append((prompt, sample))
        try:
            await asyncio.sleep(prompt + sample / 100)
        except asyncio.CancelledError:
            self.aborted.append((prompt, sample))
            raise
        if self.fails.get(prompt, 0):
            self.fails[prompt] -= 1
            raise RuntimeError(f"no luck with {prompt}")
        return Response(f"{prompt}.{sample}", 1, self.weights.get((prompt, sample), "v1"))


async def taken(rounds):
    async with rounds.next() as rnd:
        groups = [group async for group in rnd]
    rounds.commit(rnd)
    return rnd, groups


async def test_a_short_round_is_over_with_its_first_groups_and_the_rest_is_aborted():
    engine, loop = Engine(), asyncio.get_running_loop()
    rounds = Rounds(list(range(1, 101)), engine, n=2, want=4)
    began = loop.time()

    rnd, groups = await taken(rounds)

    launched = sorted({prompt for prompt, _ in engine.began})
    assert rnd.kind == "short"
    assert len(engine.began) == 5 * 3
    assert [group.prompt for group in groups] == launched[:4], "as each completes"
    assert loop.time() - began == pytest.approx(launched[3] + 0.01, abs=0.005), "as long as the fourth, not the fifth"
    assert {prompt for prompt, sample in engine.aborted if sample < 2} == {launched[4]}
    assert all(
        [it.response.text for it in group.samples] == [f"{group.prompt}.0", f"{group.prompt}.1"] for group in groups
    )


async def test_all_prompts_are_trained_on_once_in_an_epoch():
    rounds = Rounds(list(range(1, 24)), Engine(), n=2, want=4)
    seen, kinds = [], []

    while not rounds.epoch_done:
        rnd, groups = await taken(rounds)
        seen += [group.prompt for group in groups]
        kinds.append(rnd.kind)

    assert sorted(seen) == list(range(1, 24))
    assert "long" in kinds


async def test_a_round_that_is_left_early_leaves_no_call_open_and_comes_again():
    engine = Engine()
    rounds = Rounds(list(range(1, 101)), engine, n=2, want=4)
    async with rounds.next() as rnd:
        await anext(aiter(rnd))
    with pytest.raises(ValueError, match="4 groups, and 1 are committed"):
        rounds.commit(rnd)

    open_calls = len(engine.began) - len(engine.aborted) - 2
    assert open_calls == 0
    assert (await taken(rounds))[0].plan == rnd.plan


async def test_a_sample_that_fails_is_made_again():
    engine = Engine()
    engine.fails = dict.fromkeys(range(1, 101), 1)
    _, groups = await taken(Rounds(list(range(1, 101)), engine, n=2, want=4, eta_n=1.0))

    assert all(len(group.samples) == 2 and not group.failed for group in groups)


async def test_a_prompt_that_fails_and_fails_is_handed_over_as_failed_and_never_as_an_empty_answer():
    engine = Engine()
    engine.fails = dict.fromkeys(range(1, 101), 99)
    _, groups = await taken(Rounds(list(range(1, 101)), engine, n=2, want=4, max_failures=3))

    assert all(group.samples == () and "a sample could not be made 3 times" in group.failed for group in groups)
    assert all("no luck with" in group.failed for group in groups)


async def test_failures_count_for_each_sample_and_not_for_all_of_a_prompt_together():
    engine, failed = Engine(), set()

    async def each_fails_twice(prompt, sample):
        made = await engine(prompt, sample)
        if sample < 16:  # eight of them, and eight more for these
            failed.add(sample)
            raise RuntimeError("no luck")
        return made

    _, (group,) = await taken(Rounds([1], each_fails_twice, n=8, want=1, eta_n=1.0, max_failures=3))

    assert failed == set(range(16))
    assert (len(group.samples), group.failed) == (8, "")


async def test_a_server_that_is_not_there_yet_is_waited_for_and_is_no_failure_of_the_prompts():
    engine, loop = Engine(), asyncio.get_running_loop()
    ready_at = loop.time() + 100

    async def generate(prompt, sample):
        if loop.time() < ready_at:
            raise Unavailable("503", after_s=5)
        return await engine(prompt, sample)

    _, groups = await taken(Rounds([1, 2, 3, 4], generate, n=2, want=4))

    assert all(len(group.samples) == 2 for group in groups)
    assert loop.time() < ready_at + 60


async def test_a_server_that_never_comes_is_an_error_of_the_loop():
    async def generate(prompt, sample):
        raise Unavailable("nothing listens")

    with pytest.raises(Unavailable, match="nothing listens"):
        await taken(Rounds([1, 2], generate, n=1, want=2))


async def test_a_sample_that_fails_is_not_made_again_at_once():
    engine, loop = Engine(), asyncio.get_running_loop()
    engine.fails, began = {1: 2}, loop.time()
    await taken(Rounds([1], engine, n=1, want=1, eta_n=1.0))

    assert loop.time() - began > 3 + 0.5 + 1.0


async def test_samples_of_two_versions_of_the_weights_are_no_round():
    engine = Engine()
    engine.weights = {(prompt, 1): "v2" for prompt in range(1, 101)}

    with pytest.raises(MixedWeights, match="'v1' and 'v2'"):
        await taken(Rounds(list(range(1, 101)), engine, n=2, want=4))


async def test_a_sample_is_graded_when_it_ends_and_those_beyond_n_are_not():
    graded, loop = [], asyncio.get_running_loop()

    async def reward(prompt, response):
        graded.append((response.text, round(loop.time() - began, 2)))
        await asyncio.sleep(1)
        return 1.0

    rounds = Rounds([5, 6], Engine(), n=2, want=1, eta=2.0, eta_n=1.5, reward=reward)
    began = loop.time()
    _, (group,) = await taken(rounds)

    assert graded == [("5.0", 5.0), ("5.1", 5.01)]
    assert [sample.reward for sample in group.samples] == [1.0, 1.0]


async def test_a_grader_that_never_ends_is_cut_at_one_and_a_half_times_the_longest_correct_answer():
    calls = []

    async def reward(prompt, response):
        calls.append(response.text)
        await asyncio.sleep(4 if len(calls) == 1 else 10**6)
        return 1.0

    loop, rounds = asyncio.get_running_loop(), Rounds([1], Engine(), n=2, want=1, eta_n=1.0, reward=reward, graders=1)
    began = loop.time()
    _, (group,) = await taken(rounds)

    assert [sample.reward for sample in group.samples] == [1.0, RewardTimeout(6.0)]
    assert loop.time() - began == pytest.approx(1 + 4 + 6)


async def test_no_more_than_so_many_graders_at_a_time():
    at_once = [0, 0]

    async def reward(prompt, response):
        at_once[0] += 1
        at_once[1] = max(at_once)
        await asyncio.sleep(50)
        at_once[0] -= 1
        return 0.0

    await taken(Rounds([1] * 8, Engine(), n=4, want=8, reward=reward, graders=5, deadline=Adaptive(most_s=60)))

    assert at_once == [0, 5]


async def test_an_error_of_the_grader_is_the_loops():
    async def reward(prompt, response):
        raise KeyError("expected_answer")

    with pytest.raises(KeyError, match="expected_answer"):
        await taken(Rounds([1, 2], Engine(), n=1, want=1, reward=reward))
