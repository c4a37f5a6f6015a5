"""``FakeChannel``: a channel whose ranks are functions of a test. :mod:`rollmuxd.spi` does not import it, nor anyio."""

from collections.abc import Awaitable, Callable
from typing import TypeAlias

import anyio

from rollmuxd.core.ids import JobId, OrderId
from rollmuxd.spi.residency import ChannelCommand, RankResult

#: What a rank does with a command. What it raises is its answer.
Work: TypeAlias = Callable[[ChannelCommand], Awaitable[None]]


class FakeChannel:
    """A channel without HTTP, whose ranks are functions of the test: :meth:`dial`, :meth:`hang_up`.

    Each rank does an order once and repeats its answer. Other than with real ranks, the work itself ends when ``tell``
    is cancelled, and is then not remembered.
    """

    def __init__(self) -> None:
        self._ranks: dict[JobId, dict[int, Work]] = {}
        self._answers: dict[tuple[JobId, OrderId], dict[int, RankResult]] = {}
        self._dialled = anyio.Event()
        #: each command as often as it was sent, with its job
        self.told: list[tuple[JobId, ChannelCommand]] = []
        #: each time that a rank really did something
        self.worked: list[tuple[JobId, int, ChannelCommand]] = []

    def dial(self, job: JobId, rank: int, work: Work | None = None) -> None:
        """A rank dials in (again). Without ``work`` it does nothing and answers ok."""
        self._ranks.setdefault(job, {})[rank] = work if work is not None else _nothing
        self._dialled.set()
        self._dialled = anyio.Event()

    def hang_up(self, job: JobId, rank: int) -> None:
        """A rank goes away."""
        self._ranks.get(job, {}).pop(rank, None)

    def forget(self) -> None:
        """All answers are forgotten, as by a restart of the daemon."""
        self._answers.clear()

    def ranks(self, job: JobId) -> tuple[int, ...]:
        """The ranks that are there."""
        return tuple(sorted(self._ranks.get(job, {})))

    async def tell(self, job: JobId, ranks: int, command: ChannelCommand) -> tuple[RankResult, ...]:
        """Wait for all ranks to dial in, then for all of them to have answered."""
        self.told.append((job, command))
        while not set(range(ranks)) <= set(self.ranks(job)):
            await self._dialled.wait()
        answers = self._answers.setdefault((job, command.order), {})
        async with anyio.create_task_group() as group:
            for rank in range(ranks):
                if rank not in answers:
                    group.start_soon(self._work, job, rank, command, answers)
        return tuple(answers[rank] for rank in range(ranks))

    def last(self, job: JobId, order: OrderId) -> tuple[RankResult, ...] | None:
        """What the ranks answered."""
        answers = self._answers.get((job, order))
        return tuple(answers[rank] for rank in sorted(answers)) if answers else None

    async def _work(self, job: JobId, rank: int, command: ChannelCommand, answers: dict[int, RankResult]) -> None:
        self.worked.append((job, rank, command))
        try:
            await self._ranks[job][rank](command)
        except Exception as error:
            answers[rank] = RankResult(rank=rank, ok=False, error=str(error) or type(error).__name__)
        else:
            answers[rank] = RankResult(rank=rank, ok=True)


async def _nothing(command: ChannelCommand) -> None:
    pass
