"""What grading beside the rollout gains: a step that waits for no reward, and graders that are cut by what others took.

The library's own :class:`rollmuxd_rounds.Rounds` in virtual time, so the figures are the same on every machine. A step
is a rollout, its rewards and the training. *After*: samples are graded when all are made, by as many graders, each with
one time limit. *Beside*: as the library does it. Graders that end take ``SHARE`` of a step that grades after; one in
fifty never ends. Both cases are shown: without such graders a step cannot gain more than 1 / (1 - SHARE).

The workload was fixed before its figures were seen: 128 groups of 8 a step, lengths of responses log-normal, 64
graders of 2 to 4 s, a limit of 30 s, eight epochs over 256 prompts. No over-sampling: that is another benchmark's gain.
"""

import asyncio
import heapq
import math
import random
from collections.abc import Callable, Coroutine
from typing import Any, Final

import looptime
from figures import Json, at_least, say, short

from rollmuxd_rounds import Adaptive, Response, Rounds

WANT: Final = 128
N: Final = 8
PROMPTS: Final = 256
EPOCHS: Final = 8
GRADERS: Final = 64
LIMIT_S: Final = 30.0
#: of a step that grades after its rollout, what grading takes
SHARE: Final = 0.13
NEVER: Final = 0.02
CORRECT: Final = 0.5
FACTOR: Final = 1.5


def run(budget_s: float, *, small: bool = False) -> Json:
    """Step times, and how soon graders without an end are cut."""
    del budget_s
    epochs = 1 if small else EPOCHS
    found: Json = {}
    for name, never in (("all_end", 0.0), ("some_never_end", NEVER)):
        found[name] = _compared(epochs, never)
        say(f"rewards: {name} {found[name]['gain']}")
    found["gain"] = found["some_never_end"]["gain"]
    found["most_if_all_end"] = short(1 / (1 - SHARE))
    found["cut_in_time"] = found["some_never_end"]["cut_in_time"]
    found["targets"] = {
        "gain": at_least(found["gain"], 1.15),
        "cut_in_time": at_least(found["cut_in_time"], 0.0 if small else 0.95),
    }
    return found


class Work:
    """What a prompt and a sample of it take. The same in both ways."""

    def __init__(self, never: float) -> None:
        self.never = never

    def made_s(self, prompt: int, sample: int, step: int) -> float:
        rng = random.Random(f"made {prompt} {sample} {step}")
        return 20.0 * math.exp(random.Random(prompt).gauss(0, 0.5) + rng.gauss(0, 0.34))

    def grading(self, prompt: int, sample: int, step: int) -> tuple[float, bool]:
        """Seconds, and whether the answer is correct. A correct one takes what its prompt's tests take."""
        rng = random.Random(f"graded {prompt} {sample} {step}")
        if rng.random() < self.never:
            return math.inf, False
        return random.Random(prompt).uniform(2.0, 3.5) * rng.uniform(0.9, 1.15), rng.random() < CORRECT


def _compared(epochs: int, never: float) -> Json:
    work = Work(never)
    ends = Work(0.0)  # the training is so long that graders which end take SHARE
    steps = epochs * PROMPTS // WANT
    rollouts, graded, waits = [], [], []
    for step, prompts in enumerate(_steps(steps)):
        rollouts.append(max(work.made_s(prompt, number, step) for prompt in prompts for number in range(N)))
        graded.append(_after(ends, prompts, step))
        waits.append(_after(work, prompts, step))
    train_s = sum(graded) / len(graded) / SHARE * (1 - SHARE) - sum(rollouts) / len(rollouts)
    assert train_s > 0, train_s
    after = sum(rollouts) + sum(waits) + steps * train_s
    took, cuts = _virtual(lambda: _beside(work, steps))
    beside = took + steps * train_s
    return {
        "gain": short(after / beside),
        "step_after_s": short(after / steps),
        "step_beside_s": short(beside / steps),
        "rewards_share": short(sum(waits) / after),
        "never_ended": len(cuts),
        "cut_in_time": short(sum(cuts) / len(cuts)) if cuts else 1.0,
    }


def _steps(steps: int) -> list[list[int]]:
    rounds = Rounds(list(range(PROMPTS)), _never, n=N, want=WANT, eta=1.0, eta_n=1.0)
    found = []
    for _ in range(steps):
        plan = rounds._ledger.next()
        found.append(list(plan.prompts))
        rounds._ledger.commit(plan, plan.prompts)
    return found


async def _never(prompt: Any, sample: int) -> Response:
    raise NotImplementedError


def _after(work: Work, prompts: list[int], step: int) -> float:
    """Seconds of grading all samples of a step, each within the one limit."""
    free = [0.0] * GRADERS
    for prompt in prompts:
        for number in range(N):
            heapq.heappush(free, heapq.heappop(free) + min(LIMIT_S, work.grading(prompt, number, step)[0]))
    return max(free)


async def _beside(work: Work, steps: int) -> tuple[float, list[bool]]:
    """Seconds of all rollouts and what they wait for, and of each grader without an end whether it was cut in time."""
    loop, step = asyncio.get_running_loop(), 0
    longest: dict[int, float] = {}
    cuts: list[bool] = []

    async def generate(prompt: Any, sample: int) -> Response:
        await asyncio.sleep(work.made_s(prompt, sample, step))
        return Response(str(sample), 1, str(step))

    async def reward(prompt: Any, response: Response) -> float:
        seconds, correct = work.grading(prompt, int(response.text), step)
        began = loop.time()
        try:
            await asyncio.sleep(seconds if math.isfinite(seconds) else 1e6)
        except asyncio.CancelledError:
            anchor = longest.get(prompt, 0.0)
            cuts.append(loop.time() - began <= FACTOR * anchor + 0.001)
            raise
        if correct:
            longest[prompt] = max(seconds, longest.get(prompt, 0.0))
        return float(correct)

    limits = Adaptive(factor=FACTOR, most_s=LIMIT_S)
    how: dict[str, Any] = {"reward": reward, "deadline": limits, "graders": GRADERS, "eta": 1.0, "eta_n": 1.0}
    rounds = Rounds(list(range(PROMPTS)), generate, n=N, want=WANT, **how)
    began = loop.time()
    for number in range(steps):
        step = number  # for what is made and graded in it
        async with rounds.next() as rnd:
            assert len([group async for group in rnd]) == WANT
        rounds.commit(rnd)
    return loop.time() - began, cuts


def _virtual(work: Callable[[], Coroutine[Any, Any, tuple[float, list[bool]]]]) -> tuple[float, list[bool]]:
    """Run it on a loop whose clock jumps to the next event, at once: it waits for no thread and no file."""
    loop = looptime.new_event_loop(_enabled=True, noop_cycles=1)
    try:
        return loop.run_until_complete(work())
    finally:
        loop.close()
