"""Rounds on asyncio: samples are made and graded beside each other, and groups come as each completes."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from msgspec import Struct

from rollmuxd_rounds.core.ledger import Kind, Ledger, Plan
from rollmuxd_rounds.core.limits import Adaptive, RewardTimeout
from rollmuxd_rounds.generate import Generate, Refused, Response, Unavailable

log = logging.getLogger(__name__)

#: seconds before a sample is made again: the first time, and at most; it doubles
_AGAIN_S: Final = 0.5
_AGAIN_MOST_S: Final = 30.0
#: seconds that a sample waits for a server; then its error is the loop's
_UNAVAILABLE_S: Final = 600.0

Reward = Callable[[Any, Response], Awaitable[float]]


class MixedWeights(RuntimeError):
    """Samples of one round come from different weights: the round is not on-policy."""


class Sample(Struct, frozen=True):
    """A response and what it is worth. ``reward`` is None where nothing grades."""

    response: Response
    reward: float | RewardTimeout | None = None


class Group(Struct, frozen=True):
    """The samples of one prompt. ``failed``: they could not be made, and there are none."""

    index: int
    prompt: Any
    samples: tuple[Sample, ...]
    failed: str = ""


class Round:
    """One round; ``async for`` gives its groups, exactly as many as it wants."""

    def __init__(self, plan: Plan, groups: "asyncio.Queue[Group | BaseException]") -> None:
        self.plan = plan
        self.taken: list[int] = []
        self._groups = groups

    @property
    def kind(self) -> Kind:
        """``short``, ``long`` or ``flush``."""
        return self.plan.kind

    def __aiter__(self) -> AsyncIterator[Group]:
        return self

    async def __anext__(self) -> Group:
        if len(self.taken) == self.plan.want:
            raise StopAsyncIteration
        got = await self._groups.get()
        if isinstance(got, BaseException):
            raise got
        self.taken.append(got.index)
        return got


class How(Struct, frozen=True):
    """What the rounds of one loop have in common."""

    prompts: Sequence[Any]
    generate: Generate
    reward: Reward | None
    deadline: Adaptive
    graders: int
    max_failures: int


class Rounds:
    """Tail batching over ``prompts``; see :class:`~rollmuxd_rounds.core.ledger.Ledger` for the numbers.

    ``reward`` grades a sample as soon as it is made, at most ``graders`` at a time, within ``deadline``. An answer is
    *correct* for the deadline where its reward is above 0. A sample that cannot be made is made again; where one fails
    ``max_failures`` times, its prompt comes as a failed group.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        generate: Generate,
        *,
        n: int,
        want: int,
        eta: float = 1.25,
        eta_n: float = 1.25,
        reward: Reward | None = None,
        deadline: Adaptive | None = None,
        graders: int = 64,
        max_failures: int = 3,
        seed: int = 0,
    ) -> None:
        limits = Adaptive() if deadline is None else deadline
        self._how = How(prompts, generate, reward, limits, graders, max_failures)
        self._ledger = Ledger(len(prompts), n=n, want=want, eta=eta, eta_n=eta_n, seed=seed)

    @property
    def epoch_done(self) -> bool:
        """Whether the last commit has ended an epoch."""
        return self._ledger.epoch_done

    def commit(self, rnd: Round) -> None:
        """The trainer has the round's groups in its weights. Raises ValueError where not all of them were taken."""
        self._ledger.commit(rnd.plan, rnd.taken)

    def state_dict(self) -> dict[str, Any]:
        """For the checkpoint that has the weights: the two go back together."""
        return self._ledger.state_dict()

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Continue from a checkpoint; None: there is none."""
        self._ledger.load_state_dict(state)

    @asynccontextmanager
    async def next(self) -> AsyncIterator[Round]:
        """The next round. Whatever of it is not needed, or not taken, is cancelled at the latest when it is left."""
        plan = self._ledger.next()
        made = _Making(self._how, plan)
        running = asyncio.create_task(made.run())
        try:
            yield Round(plan, made.groups)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


class _Making:
    """One round under way."""

    def __init__(self, how: How, plan: Plan) -> None:
        self._how, self._plan = how, plan
        self.groups: asyncio.Queue[Group | BaseException] = asyncio.Queue()
        self._grading = asyncio.Semaphore(how.graders)
        self._weights: str | None = None
        #: there are enough groups: what is not among them is aborted
        self.late = asyncio.Event()
        #: prompts whose samples are made, in the order in which they were
        self._made: list[int] = []

    async def run(self) -> None:
        """Make groups until there are enough, abort the others, and see the grading of these to its end."""
        tasks = {index: asyncio.create_task(self._group(index)) for index in self._plan.prompts}
        enough = asyncio.create_task(self.late.wait())
        try:
            pending: set[asyncio.Task[Any]] = {enough, *tasks.values()}
            while pending:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
                if self.late.is_set():
                    late = {task for index, task in tasks.items() if index not in self._made}
                    await _ended(late)
                    pending -= late
        except asyncio.CancelledError:
            raise
        except Exception as error:  # it is for the one that takes the groups
            await self.groups.put(error)
        finally:
            await _ended((enough, *tasks.values()))

    async def _group(self, index: int) -> None:
        """Make the samples of one prompt, keep the first, and hand them over when they are graded."""
        how, plan = self._how, self._plan
        prompt, launched, failed = how.prompts[index], plan.launch, ""
        #: of each sample under way, how often it has failed
        making = {asyncio.create_task(self._sample(prompt, number)): 0 for number in range(launched)}
        grading: list[asyncio.Task[Sample]] = []
        try:
            while making and len(grading) < plan.n and not failed:
                done, _ = await asyncio.wait(making, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    failures, error = making.pop(task), task.exception()
                    if isinstance(error, Unavailable | Refused):
                        raise error
                    if error is None:
                        if len(grading) < plan.n:
                            grading.append(asyncio.create_task(self._grade(index, prompt, task.result())))
                        continue
                    failures += 1
                    if failures >= how.max_failures:
                        failed = f"a sample could not be made {failures} times: {type(error).__name__}: {error}"
                    making[asyncio.create_task(self._sample(prompt, launched, _pause_s(failures)))] = failures
                    launched += 1
            await _ended(making)
            if not self._is_in_time(index):
                return
            samples = () if failed else tuple(await asyncio.gather(*grading))
            await self.groups.put(Group(index, prompt, samples, failed))
        finally:
            await _ended((*making, *grading))

    def _is_in_time(self, index: int) -> bool:
        """Whether a prompt is among the first; the last of these aborts all others."""
        if len(self._made) == self._plan.want:
            return False
        self._made.append(index)
        if len(self._made) == self._plan.want:
            self.late.set()
        return True

    async def _sample(self, prompt: Any, number: int, after_s: float = 0.0) -> Response:
        """One sample, as soon as a server takes it. Raises Unavailable where none does for long."""
        await asyncio.sleep(after_s)
        loop, tries = asyncio.get_running_loop(), 0
        until = loop.time() + _UNAVAILABLE_S
        while True:
            try:
                return await self._how.generate(prompt, number)
            except Unavailable as error:
                tries += 1
                pause_s = max(error.after_s, _pause_s(tries))
                if loop.time() + pause_s > until:
                    raise
                log.warning("a sample waits %g s: %s", pause_s, error)
                await asyncio.sleep(pause_s)

    async def _grade(self, index: int, prompt: Any, response: Response) -> Sample:
        """What a sample is worth. Raises MixedWeights."""
        how, loop = self._how, asyncio.get_running_loop()
        if self._weights is None:
            self._weights = response.weights
        if response.weights != self._weights:
            raise MixedWeights(
                f"round {self._plan.number} has samples of weights {self._weights!r} and {response.weights!r}: update "
                "the weights of all engines between two rounds, and not in one"
            )
        if how.reward is None:
            return Sample(response)
        async with self._grading:
            limit_s, began = how.deadline.limit_s(index), loop.time()
            try:
                async with asyncio.timeout(limit_s):
                    reward = await how.reward(prompt, response)
            except TimeoutError:
                return Sample(response, RewardTimeout(limit_s))
        how.deadline.took(index, loop.time() - began, correct=reward > 0)
        return Sample(response, reward)


def _pause_s(failures: int) -> float:
    return min(_AGAIN_MOST_S, _AGAIN_S * 2.0 ** min(failures - 1, 10))


async def _ended(tasks: Iterable["asyncio.Task[Any]"]) -> None:
    """Cancel what runs of these, and wait for it. Takes their errors, so that asyncio logs none as not retrieved."""
    tasks = tuple(tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
