"""``ChannelResidency``: one order, all ranks, one verdict.

all ranks answered ok                 done
any rank answered with an error       RanksFailed (NotDone), naming ranks and errors
the channel forgot a rank             ContactLost
not all ranks have dialled in         waits; the daemon's time limit ends that, and counts as contact lost
... and it is a discard               waits ``discard_wait_s``, then ContactLost: the workload may be gone, and its rest
                                      is seen on the GPUs
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self

import anyio

from rollmuxd.spi import (
    Channel,
    ChannelCommand,
    ContactLost,
    DriverTraits,
    NotDone,
    OrderKind,
    Probed,
    RankResult,
    StateOrder,
)
from rollmuxd.spi.options import Options

DEFAULT_DISCARD_WAIT_S: Final = 5.0

#: A verdict over a thousand ranks is still to be read by people: so many are given in full, with so much of each.
_RANKS_TOLD: Final = 4
_ERROR_TOLD: Final = 500


class RanksFailed(NotDone):
    """Some ranks did not do it; ``failed`` has their answers, ``results`` everybody's."""

    def __init__(self, order: StateOrder, results: Sequence[RankResult]) -> None:
        failed = tuple(result for result in results if not result.ok)
        super().__init__(f"{_about(order)}: {_told(order, failed)}")
        self.failed, self.results = failed, tuple(results)


class ChannelResidency:
    """Tells the ranks of a workload to move their own state.

    Option ``discard_wait_s`` (default 5): how long a discard waits for ranks that are not there.
    """

    #: A rank does an order once, and repeats its answer when told again.
    traits = DriverTraits(idempotent=True, probes=True)

    def __init__(self, channel: Channel, *, discard_wait_s: float = DEFAULT_DISCARD_WAIT_S) -> None:
        self._channel = channel
        self.discard_wait_s = discard_wait_s

    @classmethod
    async def open(cls, channel: Channel, options: Mapping[str, Any]) -> Self:
        """Make the driver on the daemon's channel. Raises ValueError for an unknown or impossible option."""
        given = Options("residency driver channel", options, ("discard_wait_s",))
        return cls(channel, discard_wait_s=given.seconds("discard_wait_s", DEFAULT_DISCARD_WAIT_S))

    async def load(self, order: StateOrder) -> None:
        """Every rank brings its part onto its GPUs. Raises RanksFailed, ContactLost."""
        await self._move(order)

    async def park(self, order: StateOrder) -> None:
        """Every rank brings its part to host RAM. Raises RanksFailed, ContactLost."""
        await self._move(order)

    async def discard(self, order: StateOrder) -> None:
        """Every rank drops its part. Raises RanksFailed; ContactLost when ranks are not there to be told."""
        if not self._missing(order):
            await self._move(order)
            return
        results = await self._tell_those_who_are_there(order)
        if results is None:
            raise ContactLost(
                f"{_about(order)}: {_ranks(self._missing(order))} of {order.ranks} did not dial in within "
                f"{self.discard_wait_s:g} s; what is left on the GPUs will be seen"
            )
        _judge(order, results)

    async def probe(self, order: StateOrder) -> Probed:
        """What the ranks answered, as far as the channel still knows."""
        results = self._channel.last(order.job, order.order)
        if results is None:
            return Probed(known=False)
        try:
            _judge(order, results)
        except ContactLost:
            return Probed(known=False)
        except NotDone as error:
            return Probed(known=True, error=str(error))
        return Probed(known=True, done=True)

    async def close(self) -> None:
        """The channel is the daemon's, and stays."""

    async def _move(self, order: StateOrder) -> None:
        _judge(order, await self._tell(order))

    async def _tell(self, order: StateOrder) -> tuple[RankResult, ...]:
        command = ChannelCommand(
            order=order.order,
            kind=order.kind,
            pool=order.pool,
            node=order.node,
            gpus=order.gpus,
            warm=order.warm,
            source=order.source or "",
        )
        return await self._channel.tell(order.job, order.ranks, command)

    async def _tell_those_who_are_there(self, order: StateOrder) -> tuple[RankResult, ...] | None:
        """Tell, so that ranks that live drop their part, but wait for the others only for a while: then None.

        Once all have dialled in, nothing is cut short any more: from there on it is a discard like any other.
        """
        with anyio.CancelScope() as told:

            def give_up() -> None:
                if self._missing(order):
                    told.cancel()

            timer = asyncio.get_running_loop().call_later(self.discard_wait_s, give_up)
            try:
                return await self._tell(order)
            finally:
                timer.cancel()
        return None

    def _missing(self, order: StateOrder) -> tuple[int, ...]:
        there = self._channel.ranks(order.job)
        return tuple(rank for rank in range(order.ranks) if rank not in there)


def _judge(order: StateOrder, results: Sequence[RankResult]) -> None:
    """One verdict over all ranks. An error counts before a missing answer: it is certain."""
    if any(not result.ok for result in results):
        raise RanksFailed(order, results)
    answered = {result.rank for result in results}
    if missing := tuple(rank for rank in range(order.ranks) if rank not in answered):
        raise ContactLost(f"{_about(order)}: no answer is known of {_ranks(missing)} of {order.ranks}")


def _told(order: StateOrder, failed: Sequence[RankResult]) -> str:
    some = "; ".join(f"rank {result.rank}: {_short(result.error)}" for result in failed[:_RANKS_TOLD])
    more = f"; and {len(failed) - _RANKS_TOLD} more" if len(failed) > _RANKS_TOLD else ""
    return f"{len(failed)} of {order.ranks} ranks failed: {some}{more}"


def _short(error: str) -> str:
    text = " ".join(error.split()) or "no reason given"
    return text if len(text) <= _ERROR_TOLD else text[:_ERROR_TOLD] + " ..."


def _ranks(ranks: Sequence[int]) -> str:
    some = ", ".join(str(rank) for rank in ranks[:8])
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {some}{more}"


def _about(order: StateOrder) -> str:
    kind: OrderKind = order.kind
    return f"{kind.value} of job {order.name!r} for pool {order.pool} on {order.node} (order {order.order})"
