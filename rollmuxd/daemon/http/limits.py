"""What the calls of one owner may cost: the sizes of numbers, bodies and answers, and how many questions wait.

:mod:`~rollmuxd.daemon.http.routing` applies the limits of every call, the routes those of their own answers.
"""

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Generator
from contextlib import asynccontextmanager
from functools import partial
from types import coroutine
from typing import Any, Final, TypeVar, cast

import anyio

from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.wire.plan import PlanBody

T = TypeVar("T")

#: bytes of a registration's body; the daemon keeps its content in memory and in the journal
REGISTRATION: Final = 32_000
#: bytes of one owner's bodies that have arrived in part and not to their end
BODIES: Final = 8_000_000
#: bytes from which an answer is long
LONG: Final = 64_000
#: bytes of one owner's long answers that were not taken yet
ANSWERS: Final = 32_000_000
#: bytes of the items of a page, after which it ends
PAGE: Final = 2_000_000
#: pages of one owner that are made or wait, and reports
PAGES: Final = 100
#: seconds of work for one call after which the loop is left to other calls, and for how many times as long
SLICE_S: Final = 0.001
SLICE_PAUSE: Final = 3
#: while others call, an owner's charged calls have 1 / (1 + this) of the loop's time, after ``CALLS_BURST_S`` seconds
#: of it
CALLS_PAUSE: Final = 4
CALLS_BURST_S: Final = 0.1
#: pauses that are shorter are left out
SHORTEST_PAUSE_S: Final = 0.001
#: seconds after an owner's call in which it counts as calling
CALLING_S: Final = 1.0
#: seconds that are charged for a call which changes something: other owners' facts wait for its commit
COMMIT_S: Final = 0.004
#: made-up nodes of a plan, and its made-up GPUs times its jobs
PLANNED_NODES: Final = 5_000
PLANNED: Final = 1_000_000
#: questions of one owner that are answered or wait; the first of them competes with other owners' questions
QUESTIONS: Final = 4
#: questions of different owners that are answered at a time: a long one does not make all other owners wait
AT_ONCE: Final = 2
#: an owner's questions have 1 / (1 + this) of a processor's time, once they have had ``QUESTIONS_BURST_S`` of it
QUESTIONS_PAUSE: Final = 4
QUESTIONS_BURST_S: Final = 2.0


def check_plan(body: PlanBody) -> None:
    """Refuse a plan on more made-up nodes or GPUs than can be planned for."""
    nodes = sum(pool.nodes for pool in body.pools.values())
    gpus = sum(pool.nodes * pool.gpus for pool in body.pools.values())
    if nodes > PLANNED_NODES or gpus * len(body.jobs) > PLANNED:
        raise Refusal(
            problems.INVALID,
            f"body: pools: {nodes} nodes with {gpus} GPUs for {len(body.jobs)} jobs; a plan has at most "
            f"{PLANNED_NODES} made-up nodes, and {PLANNED} GPUs times jobs: plan for fewer of them at a time",
            data={"in": "body", "field": "pools"},
        )


# ---- bytes -----------------------------------------------------------------------------------------------------------


class Bytes:
    """How many bytes of each owner's calls the daemon holds: of bodies that come, or of answers that go."""

    def __init__(self, most: int, what: str, first: str) -> None:
        self._most, self._what, self._first = most, what, first
        self._held: dict[str, int] = {}

    def add(self, owner: str, size: int) -> None:
        """Count more bytes. Raises Refusal where the owner's other calls hold too many."""
        if (held := self._held.get(owner, 0)) + size > self._most:
            raise Refusal(
                problems.TOO_FAST,
                f"{held} bytes of {self._what} of owner {owner} are held by the daemon, and the limit is {self._most}; "
                f"{self._first}, and try again",
                data={"limit": self._most},
                headers=(("retry-after", "5"),),
            )
        self._held[owner] = held + size

    def free(self, owner: str, size: int) -> None:
        """A call is complete, or over."""
        left = self._held.pop(owner, 0) - size
        if left > 0:
            self._held[owner] = left


# ---- turns -----------------------------------------------------------------------------------------------------------


class Account:
    """What each has used of something that all share: an owner that has used up its burst pauses after a use."""

    #: a caller may use any number of addresses; those that have nothing to pay need not be remembered
    KEPT: Final = 10_000

    def __init__(self, pause: float, burst_s: float) -> None:
        self._pause, self._burst_s = pause, burst_s
        #: by owner that was charged, until when the pauses would last
        self._paid_at: dict[str, float] = {}

    def charge(self, owner: str, seconds: float) -> None:
        """The owner has used it for so long."""
        now = asyncio.get_running_loop().time()
        self._paid_at[owner] = max(self._paid_at.get(owner, now), now) + self._pause * seconds
        if len(self._paid_at) > self.KEPT:
            self._paid_at = {name: at for name, at in self._paid_at.items() if at > now}
            while len(self._paid_at) > self.KEPT:
                del self._paid_at[next(iter(self._paid_at))]

    def pause_s(self, owner: str) -> float:
        """Seconds until the owner may use it again."""
        if (paid_at := self._paid_at.get(owner)) is None:
            return 0.0
        left = paid_at - asyncio.get_running_loop().time()
        if left <= 0:
            del self._paid_at[owner]
        pause_s = left - self._pause * self._burst_s
        return pause_s if pause_s > SHORTEST_PAUSE_S else 0.0


class Paces:
    """In each turn of the loop one call of each owner begins: a burst of one owner's does not make others' calls wait.

    An owner whose calls come one at a time never waits, and a burst takes hardly longer: its turns are short.

    Calls that are charged for (:meth:`charge`) are a line of their own. An owner that has used up its burst waits after
    each call while another owner calls. The wait is ``CALLS_PAUSE`` times as long as its call held the loop.
    """

    def __init__(self) -> None:
        #: by owner, and whether its calls are charged for: the calls that wait behind one that has begun
        self._waiting: dict[tuple[str, bool], deque[asyncio.Future[None]]] = {}
        self._account = Account(CALLS_PAUSE, CALLS_BURST_S)
        self._last_owner, self._alternated_at = "", -math.inf

    def take(self, owner: str, *, charged: bool = False) -> "asyncio.Future[None] | None":
        """A call of this owner is to begin: None, at once, else when this is done."""
        loop = asyncio.get_running_loop()
        if owner != self._last_owner:
            self._last_owner, self._alternated_at = owner, loop.time()
        line = (owner, charged)
        if (waiting := self._waiting.get(line)) is None:
            self._waiting[line] = waiting = deque()
            loop.call_soon(self._next, line)
            if not charged or self._account.pause_s(owner) == 0:
                return None
        turn = loop.create_future()
        waiting.append(turn)
        return turn

    def charge(self, owner: str, seconds: float) -> None:
        """A call of this owner has held the loop up for so long."""
        if asyncio.get_running_loop().time() - self._alternated_at < CALLING_S:
            self._account.charge(owner, seconds)

    async def pause(self, owner: str) -> None:
        """Wait until a charged call of this owner may begin: for a call that holds the loop late."""
        await anyio.sleep(self._account.pause_s(owner))

    def _next(self, line: tuple[str, bool]) -> None:
        waiting, loop = self._waiting[line], asyncio.get_running_loop()
        while waiting and waiting[0].done():  # its caller may have hung up
            waiting.popleft()
        if not waiting:
            del self._waiting[line]
        elif line[1] and (pause_s := self._account.pause_s(line[0])):
            loop.call_later(pause_s, self._next, line)
        else:
            waiting.popleft().set_result(None)
            loop.call_soon(self._next, line)


class Slices:
    """The work for one long call, in slices: after each the loop is left to other calls."""

    def __init__(self) -> None:
        self._began = time.perf_counter()

    async def pause(self, least_s: float | None = None) -> bool:
        """Leave the loop to others if it was held for so long since the last pause (``SLICE_S``). True: it was."""
        held_s = time.perf_counter() - self._began
        if held_s <= (SLICE_S if least_s is None else least_s):
            return False
        await anyio.sleep(SLICE_PAUSE * held_s)
        self._began = time.perf_counter()
        return True


@coroutine
def metered(work: Coroutine[Any, Any, T], charge: Callable[[float], None]) -> Generator[Any, Any, T]:
    """Await something; ``charge`` gets, for each step, the seconds for which it held the loop."""
    step = partial(work.send, None)
    while True:
        began = time.perf_counter()
        try:
            waits_for = step()
        except StopIteration as done:
            return cast("T", done.value)
        finally:
            charge(time.perf_counter() - began)
        try:
            yield waits_for
        except BaseException as error:  # it is cancelled, and may have something to say to that
            step = partial(work.throw, error)
        else:
            step = partial(work.send, None)


class Lines:
    """One call of each owner at a time has its turn; ``most`` of an owner's may have it or wait for it."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._turns: dict[str, anyio.Lock] = {}

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn of a call. Raises Refusal where too many of the owner's calls wait already."""
        mine = self._turns.setdefault(owner, anyio.Lock())
        there = mine.statistics()
        if (number := there.locked + there.tasks_waiting) >= self._most:
            raise Refusal(
                problems.TOO_FAST,
                f"{number} {self._what} of owner {owner} are being made or wait, which is the limit; try again "
                "when one of them is answered",
                data={"limit": self._most},
                headers=(("retry-after", "2"),),
            )
        try:
            async with mine:
                yield
        finally:
            if not mine.locked():
                self._turns.pop(owner, None)


class Questions(Lines):
    """Of all questions ``AT_ONCE`` are answered at a time, of different owners. Each owner has one that waits for that.

    An owner pauses for the processor time that its questions took (``account``), and keeps no other owner from asking.
    """

    def __init__(self) -> None:
        super().__init__(QUESTIONS, "plans and explanations")
        self._free = anyio.Semaphore(AT_ONCE)
        self.account = Account(QUESTIONS_PAUSE, QUESTIONS_BURST_S)

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn of a question. Raises Refusal where too many of the owner's wait already."""
        async with super().turn(owner):
            await anyio.sleep(self.account.pause_s(owner))
            async with self._free:
                yield
