"""What the calls of one owner may cost: the sizes of numbers, bodies and answers, and how many questions wait.

:mod:`~rollmuxd.daemon.http.routing` applies the limits of every call, the routes those of their own answers.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import anyio
import msgspec

from rollmuxd.core.ids import JobId
from rollmuxd.core.spec import JobSpec
from rollmuxd.core.state import State
from rollmuxd.daemon.http import problems
from rollmuxd.daemon.http.problems import Refusal
from rollmuxd.wire.plan import PlanBody

T = TypeVar("T")
V = TypeVar("V")

#: the largest integer of a body, and the smallest below zero: JSON readers that use doubles hold it exactly
INTEGER: Final = 2**53
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
#: pages of one owner that are made or wait
PAGES: Final = 100
#: while a page is made, the loop has so many times longer for others
PAGE_PAUSE: Final = 3
#: seconds of work on a page after which the loop is left to other calls
PAGE_HELD_S: Final = 0.003
#: made-up nodes of a plan, and its made-up GPUs times its jobs
PLANNED_NODES: Final = 5_000
PLANNED: Final = 1_000_000
#: questions of one owner that are answered or wait; the first of them competes with other owners' questions
QUESTIONS: Final = 4
#: after a question was made from a copy of the state, the loop has so many times longer for others
QUESTION_PAUSE: Final = 100


# ---- numbers ---------------------------------------------------------------------------------------------------------


def check_integers(raw: bytes) -> None:
    """Refuse a body with an integer beyond ``INTEGER``. Raises msgspec's errors for what is not JSON."""
    path = _too_large(msgspec.json.decode(raw))
    if path is not None:
        raise Refusal(
            problems.INVALID,
            f"body: {path or 'the number'}: an integer must be from -2^53 to 2^53; send a smaller one",
            data={"in": "body", "field": path, "limit": INTEGER},
        )


def _too_large(value: Any) -> str | None:
    """Where the first integer beyond ``INTEGER`` is; None: there is none. Linear, however deep the parts lie."""
    if type(value) is int and abs(value) > INTEGER:
        return ""
    stack: list[tuple[Any, Any]] = [(value, None)]
    while stack:
        part, at = stack.pop()
        items = part.items() if isinstance(part, dict) else enumerate(part) if isinstance(part, list) else ()
        for key, each in items:
            if isinstance(each, dict | list):
                stack.append((each, (at, key)))
            elif type(each) is int and abs(each) > INTEGER:
                return _path((at, key))
    return None


def _path(at: Any) -> str:
    """The field that a chain of keys leads to, the last key first: ``jobs[0].slo``."""
    keys = []
    while at is not None:
        at, key = at
        keys.append(f"[{key}]" if isinstance(key, int) else f".{key}")
    return "".join(reversed(keys)).removeprefix(".")


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


# ---- pages -----------------------------------------------------------------------------------------------------------


def fitting(
    found: Sequence[T], view: Callable[[T], V], key: Callable[[T], str], following: str | None
) -> tuple[list[V], str | None]:
    """The views of as many items as a page may have in bytes, at least one; and the key after which the next begins."""
    views: list[V] = []
    size = 0
    for item in found:
        shown = view(item)
        size += len(msgspec.json.encode(shown))
        if views and size > PAGE:
            return views, key(found[len(views) - 1])
        views.append(shown)
    return views, following


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
                headers=(("retry-after", "5"), ("connection", "close")),  # of a body, the rest is not read
            )
        self._held[owner] = held + size

    def free(self, owner: str, size: int) -> None:
        """A call is complete, or over."""
        left = self._held.pop(owner, 0) - size
        if left > 0:
            self._held[owner] = left


def coming_bodies() -> Bytes:
    """Of bodies that have arrived in part and not to their end."""
    return Bytes(BODIES, "bodies in calls that are not complete", "complete those calls first")


def unread_answers() -> Bytes:
    """Of long answers that the caller has not taken."""
    return Bytes(ANSWERS, "answers that were not taken", "read those answers first")


# ---- turns -----------------------------------------------------------------------------------------------------------


class _Line:
    """The calls of one owner: the first one has its turn."""

    def __init__(self) -> None:
        self.length = 0
        self.first = anyio.Lock()


class Lines:
    """One call of each owner at a time has its turn; ``most`` of an owner's may have it or wait for it."""

    def __init__(self, most: int, what: str) -> None:
        self._most, self._what = most, what
        self._lines: dict[str, _Line] = {}

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn of a call. Raises Refusal where too many of the owner's calls wait already."""
        line = self._lines.setdefault(owner, _Line())
        if line.length >= self._most:
            raise Refusal(
                problems.TOO_FAST,
                f"{line.length} {self._what} of owner {owner} are being made or wait, which is the limit; try again "
                "when one of them is answered",
                data={"limit": self._most},
                headers=(("retry-after", "2"),),
            )
        line.length += 1
        try:
            async with line.first:
                yield
        finally:
            line.length -= 1
            if not line.length:
                del self._lines[owner]


class Questions(Lines):
    """Of all questions one at a time is answered. Each owner has one that waits for that."""

    def __init__(self) -> None:
        super().__init__(QUESTIONS, "plans and explanations")
        self._one = anyio.Lock()
        self._next = 0.0
        self._specs: dict[JobId, tuple[JobSpec, msgspec.Raw]] = {}

    def specs_of(self, state: State) -> dict[JobId, Any]:
        """The jobs' specs, encoded. They do not change, and are most of a copy of the state."""
        known = self._specs
        self._specs = {
            name: one if (one := known.get(name)) and one[0] is job.spec else (job.spec, _encoded(job.spec))
            for name, job in state.jobs.items()
        }
        return {name: raw for name, (_, raw) in self._specs.items()}

    @asynccontextmanager
    async def turn(self, owner: str) -> AsyncIterator[None]:
        """Wait for the turn of a question. Raises Refusal where too many of the owner's wait already."""
        async with super().turn(owner), self._one:
            await anyio.sleep_until(self._next)
            yield

    def held(self, seconds: float) -> None:
        """The question was made, and held the loop up for so long: the next one waits."""
        self._next = anyio.current_time() + QUESTION_PAUSE * seconds


def _encoded(spec: JobSpec) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(spec))
