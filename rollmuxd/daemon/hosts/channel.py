"""The daemon's end of the line on which the ranks of workloads get commands to load, park and discard.

A rank dials in by asking for its next command, and asks again and again (a long poll). It does it, and repeats its
result until that is acknowledged. No port is open at the workload, and no pid need be known.

What may be relied on:

- A command is handed out at least once to each rank, and again until the rank has answered it. The client does each
  order once, and answers a repeat with its first answer. So does this end: the first result counts.
- A result counts for an order that the rank was handed, or that was open when the daemon started. Any other result is
  acknowledged and not kept. What a job can make this end keep is bounded: ranks, orders, results, words of errors.
- All of it is soft. After a restart of the daemon ranks dial in again, and orders are sent again or probed. A result
  that was not acknowledged is sent again.
- A line is its job's present session's from when that is opened, before any rank dials in. A newer session takes it
  over. The older one gets nothing more, and commands that it has fetched end in ContactLost. With the process the state
  on its GPUs is gone, and it is unknown how far it came.
- A session that is over is waited for only while it can be of use: a lost one not at all. A closed one, or one whose
  job has ended, is waited for while all its ranks are on the line, and at most LINGER_S. In that time a process that
  ends its job does its discards.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import anyio

from rollmuxd.core.errors import Conflict
from rollmuxd.core.facts import JobEnded, SessionClosed, SessionLost, SessionOpened
from rollmuxd.core.ids import JobId, OrderId, SessionId
from rollmuxd.core.model import SessionStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import Entry
from rollmuxd.spi import ChannelCommand, ContactLost, RankResult

#: a rank that was not heard of for this long is not counted as there
LATELY_S: Final = 90.0
#: for so long a process whose session is over may still carry out commands
LINGER_S: Final = 5.0
#: of such a process, a rank that neither waits for a command nor does one for so long has left
LEFT_S: Final = 1.0
#: orders of a job of which the results are remembered
ORDERS_KEPT: Final = 32
#: results in these, where no driver waits for them any longer
RESULTS_KEPT: Final = 20_000
#: characters of errors that are kept of one order: what a thousand ranks say is not read to its end
ERRORS_KEPT: Final = 100_000


@dataclass(slots=True)
class _Told:
    """One order on a line."""

    order: OrderId
    #: None: it was open when the daemon started, and has not been told again
    command: ChannelCommand | None = None
    ranks: int = 0
    #: calls of ``tell`` that wait for it; none: it is not handed out
    tellers: int = 0
    fetched: set[int] = field(default_factory=set)
    #: a daemon before this one may have handed it to any rank
    from_before: bool = False
    results: dict[int, RankResult] = field(default_factory=dict)
    #: characters of errors in these
    errors: int = 0
    lost: str = ""
    answered: asyncio.Event = field(default_factory=asyncio.Event)

    def lose(self, why: str) -> None:
        if not self.answered.is_set():
            self.lost = why
            self.answered.set()

    def settle(self) -> None:
        if self.lost or (self.command is not None and all(rank in self.results for rank in range(self.ranks))):
            self.answered.set()

    def take(self, rank: int, result: RankResult) -> None:
        """Keep a rank's first result, if the rank was to do this at all."""
        if rank in self.results or not (rank in self.fetched or self.from_before):
            return
        error = result.error[: ERRORS_KEPT - self.errors]
        self.errors += len(error)
        self.results[rank] = RankResult(rank, result.ok, error, result.seconds)
        self.settle()

    def in_order(self) -> tuple[RankResult, ...]:
        return tuple(self.results[rank] for rank in sorted(self.results))


@dataclass(slots=True)
class _Line:
    """One job's line."""

    #: whose it is: the job's present session, or the last one while its process may still do things
    session: SessionId = ""
    #: the ranks that have dialled in, and when they were heard of
    heard: dict[int, float] = field(default_factory=dict)
    told: dict[OrderId, _Told] = field(default_factory=dict)
    #: the calls that wait for a command, and the rank of each
    polls: dict[asyncio.Future[None], int] = field(default_factory=dict)
    #: the session is over, and its process may still do things until then
    over_at: float | None = None

    def there(self, rank: int, now: float) -> bool:
        """Whether the rank of a session that is over waits for a command, does one, or did so just now."""
        return (
            rank in self.polls.values()
            or any(rank in told.fetched and rank not in told.results for told in self.told.values() if told.tellers)
            or now - self.heard.get(rank, -LATELY_S) < LEFT_S
        )

    def lose(self, why: str) -> None:
        """The process is gone: what is waited for will not be done."""
        self.session = ""
        self.heard.clear()
        for told in self.told.values():
            told.lose(why)
        self.wake()

    def wake(self) -> None:
        polls, self.polls = self.polls, {}
        for poll in polls:
            if not poll.done():
                poll.set_result(None)


class ChannelHub:
    """All lines. ``time`` is in seconds and only ever grows."""

    def __init__(self, time: Callable[[], float] = anyio.current_time) -> None:
        self._time = time
        self._lines: dict[JobId, _Line] = {}
        self._closed = False
        #: every session that there is has been told of: a job without a line has no process
        self._begun = False
        self._takes_down_at = 0.0

    # ---- the ranks' side (HTTP) ------------------------------------------------------------------------------------

    def dial(self, job: JobId, session: SessionId, rank: int, ranks: int) -> None:
        """A rank is there. The caller has made sure that the session is the job's present one.

        ``ranks``: as many as the job was registered with.

        Raises:
            Conflict: a rank that the job does not have.
        """
        if rank >= ranks:
            raise Conflict(
                f"rank {rank} does not exist: job {job} was registered with ranks={ranks}, and ranks are counted from "
                "0; register the job with ranks= as many as it has"
            )
        self._open(job, session).heard[rank] = self._time()

    async def next_order(self, job: JobId, session: SessionId, rank: int, wait_s: float) -> ChannelCommand | None:
        """The oldest command that the rank has not answered, or None when none comes in time.

        Raises:
            Conflict: this session has not dialled in, or a newer one has.
        """
        line = self._line(job, session, rank)
        with anyio.move_on_after(wait_s):
            while not self._closed:
                self._line(job, session, rank)  # raises when that is over
                line.heard[rank] = self._time()
                for told in line.told.values():
                    wanted = told.tellers and not told.lost and rank < told.ranks and rank not in told.results
                    if wanted and told.command:
                        told.fetched.add(rank)
                        return told.command
                poll: asyncio.Future[None] = asyncio.get_running_loop().create_future()
                line.polls[poll] = rank
                try:
                    await poll
                finally:
                    line.polls.pop(poll, None)
        self._line(job, session, rank).heard[rank] = self._time()
        return None

    def result(self, job: JobId, session: SessionId, rank: int, order: OrderId, result: RankResult) -> None:
        """What a rank did. Returning is the acknowledgement; saying it again changes nothing.

        Of an order that the rank was not handed nothing is kept.

        Raises:
            Conflict: this session has not dialled in, or a newer one has.
        """
        line = self._line(job, session, rank)
        line.heard[rank] = self._time()
        if (told := line.told.get(order)) is not None:
            told.take(rank, result)

    # ---- the drivers' side (spi.Channel) ---------------------------------------------------------------------------

    def ranks(self, job: JobId) -> tuple[int, ...]:
        """The ranks of the job's present session that were heard of lately."""
        line, now = self._lines.get(job), self._time()
        if line is None:
            return ()
        if line.over_at is not None:
            return tuple(sorted(rank for rank in line.heard if now < line.over_at and line.there(rank, now)))
        return tuple(sorted(rank for rank, at in line.heard.items() if at >= now - LATELY_S))

    async def tell(self, job: JobId, ranks: int, command: ChannelCommand) -> tuple[RankResult, ...]:
        """Tell all ranks, also those that dial in only later, and wait until each has answered. The caller bounds it.

        Raises:
            ContactLost: the workload's process was replaced by another, or its session is over and it has left.
        """
        if self._begun and job not in self._lines:
            raise ContactLost("the job has no process: its last one has ended, and its line was taken down")
        line = self._lines.setdefault(job, _Line())
        told = self._told(line, command.order)
        told.command, told.ranks = command, ranks
        told.tellers += 1
        told.settle()
        self._give_up(line)
        line.wake()
        try:
            while not told.answered.is_set():
                with anyio.move_on_after(LEFT_S):
                    await told.answered.wait()
                self._give_up(line)
        finally:
            told.tellers -= 1  # at none it is no longer handed out: what no rank fetched is taken back
        if told.lost:
            raise ContactLost(told.lost)
        return told.in_order()[:ranks]

    def last(self, job: JobId, order: OrderId) -> tuple[RankResult, ...] | None:
        """What the ranks answered to an order so far, by rank; None when nothing is known of it."""
        line = self._lines.get(job)
        told = None if line is None else line.told.get(order)
        return told.in_order() if told is not None and told.results else None

    # ---- the daemon's side -----------------------------------------------------------------------------------------

    def begin(self, state: State) -> None:
        """A replay has given this state: sessions that are over are not waited for."""
        self._begun = True
        for job in state.jobs.values():
            session = state.sessions.get(job.session or "")
            if session is not None and session.status is SessionStatus.ALIVE:
                self._open(job.id, session.id)
                continue
            line = self._lines.setdefault(job.id, _Line())
            if line.over_at is None:
                line.over_at = self._time()
        for order in state.orders.values():
            line = self._lines[order.job]
            if order.id not in line.told:
                self._told(line, order.id).from_before = True

    def on_facts(self, facts: Sequence[Entry]) -> None:
        """A sink. It must get a fact before ranks get anything that follows from the fact."""
        for _, fact, job, *_ in facts:
            line = None if job is None else self._lines.get(job.id)
            match fact:
                case SessionOpened():
                    self._open(fact.job, fact.session)
                case SessionLost() if line is not None and line.session == fact.session:
                    line.over_at = self._time()
                    line.lose("the session of the job's process is lost")
                case SessionClosed() if line is not None and line.session == fact.session:
                    self._over(line)
                case JobEnded():
                    if line is not None:
                        self._over(line)
                    self._take_down()

    def lingers(self, job: JobId, session: SessionId) -> bool:
        """Whether the process of a session that was closed may still carry out commands.

        Also while that is being written down: this end learns of it afterwards, and its seconds begin then.
        """
        line = self._lines.get(job)
        return line is not None and line.session == session and (line.over_at is None or self._time() < line.over_at)

    def _open(self, job: JobId, session: SessionId) -> _Line:
        """From now on the line is this session's, whether its ranks have dialled in or not."""
        line = self._lines.setdefault(job, _Line())
        if line.session != session:
            for told in line.told.values():
                # A result that came again after a restart was never fetched here. What a process that is over was to
                # do is not for its successor, fetched or not.
                if told.fetched or told.results or line.over_at is not None:
                    told.lose("the job's process was replaced by another while this was to be done")
                told.from_before = False
            line.session, line.over_at = session, None
            line.heard.clear()
            line.wake()
        return line

    def _over(self, line: _Line) -> None:
        if line.over_at is None:
            line.over_at = self._time() + LINGER_S
        self._give_up(line)

    def _give_up(self, line: _Line) -> None:
        """Stop waiting for ranks of a session that is over, if they have left or their time is over."""
        now = self._time()
        if line.over_at is None:
            return
        if now >= line.over_at:
            line.lose("the job's process has ended, or did not do this in its last seconds")
            return
        for told in line.told.values():
            gone = [rank for rank in range(told.ranks) if rank not in told.results and not line.there(rank, now)]
            if gone:
                told.lose(f"the job's process has ended (rank {gone[0]} is not on the line)")

    def _take_down(self) -> None:
        """Forget the lines of processes that are gone, but for those on which something is still waited for."""
        now = self._time()
        if now < self._takes_down_at:
            return  # a thousand jobs may end at once, and there may be as many lines
        self._takes_down_at = now + LATELY_S
        for job, line in list(self._lines.items()):
            over = line.over_at is not None and now >= line.over_at + LATELY_S
            if over and not any(told.tellers for told in line.told.values()):
                del self._lines[job]

    def close(self) -> None:
        """The daemon stops: a rank that waits for a command gets none, and dials in again later."""
        self._closed = True
        for line in self._lines.values():
            line.wake()

    def _line(self, job: JobId, session: SessionId, rank: int) -> _Line:
        line = self._lines.get(job)
        over = line is not None and line.over_at is not None and self._time() >= line.over_at
        if line is None or line.session != session or rank not in line.heard or over:
            raise Conflict(f"session {session} is not on the line of job {job}: dial in first, or a newer session has")
        return line

    @staticmethod
    def _told(line: _Line, order: OrderId) -> _Told:
        told = line.told.get(order)
        if told is None:
            told = line.told[order] = _Told(order)
            settled = [old for old in line.told.values() if not old.tellers and old is not told]
            results = sum(len(old.results) for old in settled)
            for old in settled:
                if len(line.told) <= ORDERS_KEPT and results <= RESULTS_KEPT:
                    break
                results -= len(old.results)
                del line.told[old.order]
        return told
