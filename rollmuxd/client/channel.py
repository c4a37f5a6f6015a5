"""The channel: this rank dials the daemon, waits for orders (load, park, discard), runs the workload's hooks, and
tells.

A thread with a connection of its own: its long polls and the training loop's calls do not delay each other. Hooks run
while the loop waits for its slot, which is when they are needed. An order is done once: if the daemon sends it again
(it did not get our result, or was restarted), it gets the result again. A result is repeated until it is acknowledged.
A hook that raises is a result too (``ok`` false, with its text): the daemon then sees to it that no other job suffers.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import msgspec

from rollmuxd.client import calls
from rollmuxd.client.calls import Call
from rollmuxd.client.discovery import Address
from rollmuxd.client.errors import Refused, RollmuxError, in_words
from rollmuxd.client.retry import Flow, Pause, persist, say
from rollmuxd.client.sync import Daemon
from rollmuxd.wire.answers import ChannelOrder
from rollmuxd.wire.requests import ResultBody

T = TypeVar("T")

Hook = Callable[[ChannelOrder], Any]

#: seconds that one poll for orders blocks
WAIT_S = 25.0
#: how many results are kept, to answer a repeated order; the daemon tells one order at a time per state
REMEMBERED = 64


class Hooks:
    """The workload's own functions, by kind and pool."""

    def __init__(self, job: str) -> None:
        self._job = job
        self._hooks: list[tuple[str, str | None, Hook]] = []
        self._warned: set[str] = set()

    def __bool__(self) -> bool:
        return bool(self._hooks)

    def add(self, kind: str, pool: str | None, hook: Hook) -> None:
        """Call ``hook`` for orders of that kind; ``pool`` None: of every pool."""
        self._hooks.append((kind, pool, hook))

    def pools(self) -> list[str]:
        """Pools that a hook is for; ``*``: all of them."""
        return [pool or "*" for _, pool, _ in self._hooks]

    def moves(self, pool: str) -> bool:
        """Whether a hook for loads or parks covers the pool."""
        return any(kind in {"load", "park"} and of in {None, pool} for kind, of, _ in self._hooks)

    def warn_of_idle(self, pools: Iterable[str]) -> None:
        """Say once of each pool that no hook moves its state."""
        idle = [pool for pool in pools if not self.moves(pool) and pool not in self._warned]
        self._warned.update(idle)
        if idle:
            what = f"pool{'s' if len(idle) > 1 else ''} {', '.join(idle)}"
            say(
                f"{self._job}: nothing moves its state in {what}: that is left to this process (driver 'channel'), and "
                "no hook is registered for it; give on_load and on_park before the start, or say driver=..."
            )

    def run(self, order: ChannelOrder) -> None:
        """Run what is registered for an order: in the order of registration, and backwards for parks and discards.

        (What was loaded last may use what was loaded first.)
        """
        hooks = [hook for kind, pool, hook in self._hooks if kind == order.kind and pool in {None, order.pool}]
        for hook in hooks if order.kind == "load" else reversed(hooks):
            hook(order)


class Channel:
    """Dials in and serves until stopped."""

    def __init__(
        self, address: Address, hooks: Hooks, *, job: str, journal: str, rank: int, session: Callable[[], str]
    ) -> None:
        #: the daemon's, in which the job was registered
        self.journal = journal
        self._hooks = hooks
        self._job = job
        self._rank = rank
        self._session = session
        self._results: dict[str, ResultBody] = {}
        #: pools and nodes where there is state that was loaded and not discarded; used by two threads, item by item
        self._kept: dict[tuple[str, str], None] = {}
        #: pools and nodes from where the state was loaded elsewhere, and those to where that could not be done
        self._moved_away: set[tuple[str, str]] = set()
        self._half_there: set[tuple[str, str]] = set()
        self._stopping = threading.Event()
        self._daemon = Daemon(address=address)
        self._daemon.journal = journal
        self._thread = threading.Thread(target=self._run, name="rollmuxd-channel", daemon=True)
        self._thread.start()

    @property
    def keeps_state(self) -> bool:
        """Whether there is something that this rank got an order to load, and none to discard since."""
        return bool(self._kept)

    def stop(self) -> None:
        """Take no further orders. Does not wait for the poll at hand, which holds nothing."""
        self._stopping.set()

    def _run(self) -> None:
        said = ""
        try:
            while not self._stopping.is_set():
                try:
                    self._daemon.run(self.serve())
                except RollmuxError as error:
                    if self._stopping.is_set():
                        return
                    # Only what no repetition cures comes here. State that cannot be moved is the daemon's to notice;
                    # this thread continues, since a new session may cure it.
                    if str(error) != said:
                        said = str(error)
                        say(f"channel of rank {self._rank}: {error}; dialling again")
                    self._stopping.wait(5.0)
        except Exception:  # a bug of ours must not go unnoticed, nor stop the training loop
            say(f"channel of rank {self._rank} ended:\n{traceback.format_exc()}")
        finally:
            self._daemon.close()

    def serve(self) -> Flow[None]:
        """Dial in and serve, as a flow that returns when it is stopped."""
        session = ""
        early = 0
        while not self._stopping.is_set():
            # After the end of the job there is none: what is still to be done is done for the one that has ended it.
            session = self._session() or session
            if not session:
                yield Pause(1.0)
                continue
            asked = time.monotonic()
            asks = {"rank": self._rank, "session": session, "wait_s": WAIT_S}
            try:
                view = yield from self._persist(calls.orders(self._job, params=asks))
                if view.order is not None:
                    early = 0
                    result = self._results.get(view.order.order) or self._obey(view.order)
                    # By whatever session is the present one: the order may have taken longer than the last.
                    body = msgspec.structs.replace(result, session=self._session() or session)
                    yield from self._persist(calls.result(self._job, body))
                    if view.order.kind == "discard":  # not before the daemon knows: then we may be stopped
                        self._kept.pop((view.order.pool, view.order.node), None)
            except Refused as error:
                if error.status not in {404, 409, 410}:
                    raise
                # An older session: the heartbeat gets us a new one. It will tell the order again, and get the result.
                session = ""
                yield Pause(1.0)
                continue
            if view.order is None and time.monotonic() - asked < WAIT_S / 2:
                yield Pause(min(1.0, 0.05 * 2.0 ** min(early, 8)))  # it did not block: do not spin
                early += 1

    def _persist(self, call: Call[T]) -> Flow[T]:
        return persist(call, unless=self._stopping.is_set)

    def _obey(self, order: ChannelOrder) -> ResultBody:
        began = time.monotonic()
        error = ""
        if order.kind == "load":
            self._kept[order.pool, order.node] = None
        try:
            self._do(order)
        except BaseException as raised:  # also SystemExit and asyncio's CancelledError: this thread has to continue
            say(f"the hook for {order.kind} of {order.pool} failed:\n{traceback.format_exc()}")
            error = in_words(raised)[:10_000]
        seconds = time.monotonic() - began
        result = ResultBody(
            session=self._session(), rank=self._rank, order=order.order, ok=not error, error=error, seconds=seconds
        )
        self._results[order.order] = result
        while len(self._results) > REMEMBERED:
            del self._results[next(iter(self._results))]
        return result

    def _do(self, order: ChannelOrder) -> None:
        """Run the hooks, once for each state: this process has it in one place, whatever nodes the orders name.

        After a move nothing is left on the node that the state came from. Where it could not be loaded, what there is
        of it goes back to RAM, from where it is loaded elsewhere.
        """
        here = (order.pool, order.node)
        if order.kind == "load":
            self._hooks.warn_of_idle([order.pool])
        if order.kind == "load" and order.source:
            self._half_there.add(here)
        if order.kind == "discard" and here in self._half_there:
            self._hooks.run(msgspec.structs.replace(order, kind="park"))
        elif order.kind != "discard" or here not in self._moved_away:
            self._hooks.run(order)
        self._moved_away.discard(here)
        self._half_there.discard(here)
        if order.kind == "load" and order.source:
            self._moved_away.add((order.pool, order.source))
