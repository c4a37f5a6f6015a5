"""The one writer: inputs go in here, and nothing that follows from them leaves before it is durable.

An input is handled to its end in one turn of the event loop, in the task that brings it. The core computes, its facts
are sent to the journal, and the caller waits. No turn is ever interrupted, so there is one writer, no lock and no queue
of inputs. A queue, and a task that empties it, would cost two more turns of the loop for each hand-over of a GPU. Facts
of many inputs share one fsync, because the journal's thread takes all that wait at once.

When a commit returns, this is the order. Calls that wait for a slot are woken, the prompt sinks (channel, actuator) get
the facts, and effects begin. Then callers get their answers, and followers of the facts are woken. All of it is durable
by then, and jobs that get GPUs come first. (The channel thus knows of the end of a job before it gets the discards.)
The other sinks (logs, metrics) get the facts soon after, with what each is about.

What would surprise:

- The state in memory is ahead of the disk while a commit is under way. So a refusal, a repeat or a question is also
  answered only after all facts that it can have seen are durable. A heartbeat that finds no commit under way is
  answered at once.
- A failed commit *ends the writer*. It is unknown what is on the disk, so memory is dropped, and every waiting call
  gets :class:`Unavailable`. The journal is replayed once a test write succeeds. Results of orders that come meanwhile
  are kept for afterwards: a driver carries out an order only once.
- asyncio's own futures and timers are used for what happens on every input; anyio's are several times as dear.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from itertools import islice
from typing import Final, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
import msgspec
import structlog
from anyio.abc import TaskStatus

from rollmuxd.core.apply import apply
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.effects import Effect
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.facts import Fact, decode, encode
from rollmuxd.core.ids import GroupId, JobId, Millis, OrderId, SlotId
from rollmuxd.core.inputs import (
    Input,
    OpenSession,
    OrderDone,
    OrderFailed,
    OrderLostContact,
    OrderNotBegun,
    RegisterJob,
    RequestSlot,
    Stalled,
    Start,
    Tick,
)
from rollmuxd.core.model import Order
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State
from rollmuxd.daemon.access.audience import EVERYTHING, Audience, Topic
from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.entries import Entry, entries, orders_before
from rollmuxd.daemon.journal.file import JournalFailed, Unreadable
from rollmuxd.daemon.journal.store import DISK_FULL, Journal, until_large

T = TypeVar("T")
#: how often the writer looks whether a full disk has room again
LOOK_AFTER_S: Final = 10.0
#: durable facts that are kept in memory, so that a follower reads the journal for older ones only
RECENT: Final = 1_000
#: facts that are replayed in one turn of the loop: some ten milliseconds, after which a signal is heard
REPLAYED_AT_ONCE: Final = 2_000
#: how often a replay tells how far it is
TOLD_EVERY_S: Final = 5.0
#: after a tick the loop is left to others for so many times as long as that took, at most for so many seconds. The core
#: has one deadline after the other while there are waiting jobs to be tried
TICK_PAUSE, LONGEST_PAUSE_S = 10, 0.05
#: sinks (logs, metrics) are shown facts so much later, many at once
SINKS_AFTER_S: Final = 0.02
log = structlog.get_logger("rollmuxd.writer")

#: gets each batch of facts once it is durable; must be quick, and must not wait
Sink: TypeAlias = Callable[[Sequence[Entry]], None]

#: refused while the disk is full: what would make more work, which needs more space
GROWING: Final = (RegisterJob, RequestSlot, OpenSession)
#: kept while the writer is down: these are reported only once
RESULTS: Final = (OrderDone, OrderFailed, OrderNotBegun, OrderLostContact)


class Unavailable(Exception):
    """Nothing can be promised now, and nothing of what was asked may be taken as done: ask again later."""

    def __init__(self, why: str, *, retry_after_s: int = 1) -> None:
        super().__init__(why)
        self.why, self.retry_after_s = why, retry_after_s


class Waiter:
    """A call that waits for news of something."""

    __slots__ = ("_draining", "_news", "after")

    def __init__(self, draining: anyio.Event) -> None:
        #: the number of the last fact before the first news; None: there was none
        self.after: int | None = None
        self._draining = draining
        self._news = asyncio.Event()

    async def changed(self) -> None:
        """Return when something happened since the last time this returned, or since the waiter was made.

        Also returns when the daemon begins to drain (look at ``writer.draining``) and when the writer goes down (the
        next ``read`` says so). The caller bounds the wait.
        """
        if not self._draining.is_set():
            await self._news.wait()
        self._news.clear()

    def wake(self, after: int) -> None:
        """There is news after this fact (the writer's to call)."""
        if self.after is None:
            self.after = after
        self._news.set()


class Writer:
    """Runs one scheduler on a clock, a journal and an actuator. Used from one event loop.

    ``make`` makes a scheduler around a state. ``perform`` takes effects and returns at once. ``start`` is the input
    that begins every life of the writer, and ``lease_ms`` the lease by which lateness is judged. ``begun`` get the
    state that a replay has given, before anything else happens: sinks do not get replayed facts. If a replay takes long
    (after an upgrade it may be all facts), ``replaying`` gets now and then how many of how many are done.
    """

    def __init__(
        self,
        make: Callable[[State], Scheduler],
        journal: Journal,
        clock: SystemClock,
        perform: Callable[[Sequence[Effect]], None],
        start: Start,
        *,
        sinks: Sequence[Sink] = (),
        prompt: Sequence[Sink] = (),
        begun: Sequence[Callable[[State], None]] = (),
        replaying: Callable[[int, int], None] = lambda done, of: None,
        lease_ms: Millis = 60_000,
        snapshot_every: int = 10_000,
    ) -> None:
        self._make = make
        self._journal = journal
        self._clock = clock
        self._perform = perform
        self._start = msgspec.structs.replace(start, incarnation=journal.incarnation)
        self._sinks = tuple(sinks)
        self._prompt = tuple(prompt)
        self._untold: list[Entry] = []
        self._begun = tuple(begun)
        self._replaying = replaying
        self._late_ms = lease_ms // 4
        #: the loop shows that it lives at least this often, so that lateness is noticed whatever the next deadline
        self._pulse_ms = max(1, lease_ms // 8)
        self._snapshot_every = snapshot_every

        #: read by others through :meth:`read`, written by the core only
        self.scheduler = make(State())
        #: the number of the last fact, and of the last one that is durable
        self.last_seq = self.durable_seq = 0
        #: whose facts are
        self.belongs = Audience()
        #: set when the daemon is about to stop: long polls answer 503, and come again when it is back
        self.draining = anyio.Event()
        #: set when the writer has come to its end, in whatever way
        self.stopped = anyio.Event()

        self._up = False
        self._life = 0  # how often the writer has begun
        self._stopped_in_order = True  # the daemon before this one: it kept its state at its end
        self._why_down = "the daemon is starting"
        self._fatal: BaseException | None = None
        self._ended = asyncio.Event()  # the writer has ended, or is asked to
        self._stop_asked = asyncio.Event()
        self._snapshot_seq = 0
        self._snapshot_durable: asyncio.Future[None] | None = None
        #: what leaves once the facts up to a number are durable, in order
        self._answers: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._effects: deque[tuple[int, tuple[Effect, ...]]] = deque()
        self._results: deque[Input] = deque()
        self._waiters: dict[Topic, dict[Waiter, None]] = {}
        self._followers: dict[Topic, dict[Waiter, None]] = {}
        self._recent: deque[tuple[int, Fact]] = deque(maxlen=RECENT)
        self._timer: asyncio.Handle | None = None
        self._due: Millis = 0
        self._no_tick_before = 0.0  # by the loop's clock

    # ---- what others ask -------------------------------------------------------------------------------------------

    async def submit(self, given: Input, *, then: Callable[[], Input] | None = None) -> Answer:
        """Have the core decide. Returns when its facts, and all facts before them, are durable.

        ``then`` is asked for a second input once the first was decided: the facts of both are in one commit. That is
        for the audit of the caller (:class:`~rollmuxd.core.inputs.Audit`), which refuses nothing.

        Raises:
            Rejected: the core refuses, and nothing has changed.
            Unavailable: the writer is down. Whether it was done shows after it is up again: ask once more.
        """
        if self._journal.tight and isinstance(given, GROWING) and not self._has_asked(given):
            raise Unavailable(DISK_FULL, retry_after_s=5)
        return (await self._answered(lambda: self._decide(given, then))).answer

    def _has_asked(self, given: Input) -> bool:
        """Whether it is a request that waits already: turned away it would lose its place, and spare no room."""
        if not isinstance(given, RequestSlot):
            return False
        state = self.scheduler.state
        asked = (state.slots[name] for name in state.slots_of.get(given.job, ()))
        return any(slot.request_id == given.request_id for slot in asked)

    async def read(self, question: Callable[[Scheduler, Millis], T]) -> T:
        """Ask something of the scheduler, between two inputs. Answered when all that it can have seen is durable."""
        self._check_up()
        return await self._answered(lambda: question(self.scheduler, self._clock.now()))

    async def _answered(self, ask: Callable[[], T]) -> T:
        """An answer, or a refusal, once all facts that it can have seen are durable."""
        try:
            answer = ask()
        except Rejected:
            await self._durable()
            raise
        await self._durable()
        return answer

    def post(self, given: Input) -> None:
        """Tell the core something that no caller waits for: what backends and drivers report."""
        if not self._up:
            if isinstance(given, RESULTS):
                self._results.append(given)
            return
        try:
            self._decide(given)
        except Exception as error:
            # A refusal; or a crash, recorded where it was found: the reporter has nothing to do with it.
            log.debug("report_dropped", report=type(given).__name__, reason=str(error))

    def subscribe(self, slot: SlotId) -> AbstractContextManager[Waiter]:
        """Be told of news of a slot and of its job. Subscribe first, then look, then wait: no news is missed."""
        known = self.scheduler.state.slots.get(slot)
        job = () if known is None else (("job", known.job),)
        return self._waiting(self._waiters, (("slot", slot), *job))

    def subscribe_group(self, job: JobId) -> AbstractContextManager[Waiter]:
        """Be told of news of a job, and of the jobs and nodes of its group: what decides what its slot is asked."""
        known = self.scheduler.state.jobs.get(job)
        group = () if known is None or known.group is None else (("group", known.group),)
        return self._waiting(self._waiters, (("job", job), *group))

    @contextmanager
    def _waiting(self, waiters: dict[Topic, dict[Waiter, None]], topics: Collection[Topic]) -> Iterator[Waiter]:
        waiter = Waiter(self.draining)
        for topic in topics:
            waiters.setdefault(topic, {})[waiter] = None
        try:
            yield waiter
        finally:
            for topic in dict.fromkeys(topics):
                del waiters[topic][waiter]
                if not waiters[topic]:
                    del waiters[topic]

    def attended(self, job: JobId) -> None:
        """A request of the job is waited for again. No fact says so, and others may make room for it."""
        known = self.scheduler.state.jobs.get(job)
        if known is not None and known.group is not None:
            self._wake(self._waiters, [("group", known.group)], self.durable_seq)

    async def facts_after(
        self, seq: int, wait_ms: Millis, limit: int, topics: Collection[Topic] = (EVERYTHING,)
    ) -> tuple[list[tuple[int, Fact | Unreadable]], int]:
        """Durable facts with numbers above ``seq``, and the number to ask after next: fewer where they are large.

        Where there are none, waits up to ``wait_ms`` for one that has one of these ``topics``. What comes meanwhile and
        has none of them is passed over, so that it costs other waiting calls nothing.
        """
        if self.durable_seq <= seq and wait_ms > 0 and not self.draining.is_set():
            seq = max(seq, await self._news_of(topics, wait_ms / 1000))
        if self.durable_seq <= seq:
            return [], seq
        most = min(limit, self.durable_seq - seq)
        if self._recent and self._recent[0][0] <= seq + 1:
            begins = seq + 1 - self._recent[0][0]
            # As they will be read from the journal: what a caller sees of a fact does not depend on when it asks.
            rows = ((at, encode(fact)) for at, fact in islice(self._recent, begins, begins + most))
            found: list[tuple[int, Fact | Unreadable]] = [(at, decode(body)) for at, body in until_large(rows)]
        else:
            found = await self._journal.read(seq, most)
        return found, found[-1][0] if found else seq

    async def _news_of(self, topics: Collection[Topic], seconds: float) -> int:
        """Wait for a fact of one of these topics, for at most so long; the number after which there may be one."""
        with self._waiting(self._followers, topics) as follower:
            with anyio.move_on_after(seconds):
                await follower.changed()
            return self.durable_seq if follower.after is None else follower.after

    def drain(self) -> None:
        """Let everybody know that the daemon is about to stop."""
        self.draining.set()
        self._wake_all()

    def stop(self) -> None:
        """Let :meth:`run` come to its end, after a last snapshot."""
        self._stop_asked.set()
        self._ended.set()

    # ---- the life of the writer ------------------------------------------------------------------------------------

    async def run(self, *, task_status: TaskStatus[None] = anyio.TASK_STATUS_IGNORED) -> None:
        """Be the writer, until :meth:`stop`. Started when the journal is replayed and the start is durable.

        Raises:
            BrokenInvariant: a bug of ours; the journal has not seen it.
            JournalError: the journal cannot be read.
        """
        await self._begin()
        task_status.started()
        try:
            while not self._stop_asked.is_set():
                with anyio.move_on_after(LOOK_AFTER_S):
                    await self._ended.wait()
                self._ended.clear()
                if self._fatal is not None:
                    raise self._fatal
                if not self._up and not self._stop_asked.is_set():
                    await self._recover()
                elif self._journal.tight:
                    await self._journal.make_reserve()
                self._journal.touch()  # so the next daemon knows how long it was away
            if self._up:
                await self._durable()
                self._snapshot()
                if self._snapshot_durable is not None:
                    await self._snapshot_durable
        except (JournalFailed, Unavailable) as error:
            log.warning("no_last_snapshot", reason=str(error))  # nothing is lost: the facts are there
        finally:
            self._end(Unavailable("the daemon is stopping", retry_after_s=5))
            self.stopped.set()

    async def _begin(self) -> None:
        """Replay the journal, and let the core know that it starts."""
        state = await self._replay()
        self._clock.not_before(state.at)
        self.scheduler = self._make(state)
        for begun in self._begun:
            begun(state)
        self._life += 1
        self._up = True
        self._due = self._clock.now() + self._pulse_ms
        first = self._life == 1
        crashed = first and not self._stopped_in_order
        away_ms = self._journal.away_ms if first else 0
        # Of what was lost before an earlier start the core has heard then.
        lost = noted.why if (noted := self._journal.notes.lost).incarnation > state.incarnation else None
        self._decide(msgspec.structs.replace(self._start, crashed=crashed, lost=lost, away_ms=away_ms))
        results, self._results = self._results, deque()
        for given in results:  # should one of them crash, the others are kept again
            self.post(given)
        await self._durable()

    async def _replay(self) -> State:
        """The state that the journal comes to. The loop turns meanwhile, and a stop ends it.

        Raises:
            JournalError: the journal cannot be read.
            Unavailable: the daemon is stopping.
        """
        past = self._journal.load()
        self._stopped_in_order = past.seq == self._journal.last_seq
        state = State() if past.snapshot is None else msgspec.json.decode(past.snapshot, type=State)
        self.last_seq = past.seq
        all_of_it, told, told_at = self._journal.last_seq - past.seq, False, anyio.current_time()
        with closing(past.facts):
            while facts := list(islice(past.facts, REPLAYED_AT_ONCE)):
                for seq, fact in facts:
                    apply(state, fact)
                    self.last_seq = seq
                await anyio.lowlevel.checkpoint()
                if self._stop_asked.is_set():
                    raise Unavailable("the daemon is stopping", retry_after_s=5)
                if anyio.current_time() >= told_at + TOLD_EVERY_S:
                    told, told_at = True, anyio.current_time()
                    self._replaying(self.last_seq - past.seq, all_of_it)
        if told:
            self._replaying(all_of_it, all_of_it)
        # Facts that the life before did not know to be durable are not among the recent ones, and woke no follower.
        self._recent.clear()
        self._wake_all()
        self.durable_seq = self._snapshot_seq = self.last_seq
        return state

    async def _recover(self) -> None:
        """The writer has ended: try again until a test write succeeds, then replay."""
        # Not at once, so that an error which comes back each time does not take the whole processor.
        delay_s = 0.1
        while True:
            with anyio.move_on_after(delay_s):
                await self._stop_asked.wait()
                return
            try:
                await self._journal.recover()
                await self._begin()
            except (JournalFailed, Unavailable) as error:
                delay_s = min(delay_s * 2, 5.0)
                log.warning("writer_down", reason=str(error), retry_in_s=delay_s)
            else:
                log.info("writer_up", seq=self.durable_seq)
                return

    def _end(self, why: Unavailable) -> None:
        """Drop what is in memory: nothing that depends on it is sent."""
        self.tell_sinks()
        self._up = False
        self._why_down = why.why
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._effects.clear()
        waiting, self._answers = self._answers, deque()
        for _, future in waiting:
            if not future.done():
                future.set_exception(why)
        self._wake_all()
        self._ended.set()

    def _check_up(self) -> None:
        if not self._up:
            raise Unavailable(self._why_down)

    # ---- one input -------------------------------------------------------------------------------------------------

    def _decide(self, given: Input, then: Callable[[], Input] | None = None) -> Decision:
        """Handle one input, in this turn of the loop: from core to journal."""
        self._check_up()
        now, decision = self._clock.now(), None
        before = orders_before(self.scheduler.state, given)
        try:
            if now > self._due + self._late_ms and not self.draining.is_set():  # while stopping there is no pulse
                # Clients could not be heard meanwhile, so none counts as silent: first of all, every lease is renewed.
                late_ms = now - self._due
                self._due = now + self._pulse_ms
                log.warning("loop_stalled", late_ms=late_ms)
                self._take(self.scheduler.handle(Stalled(late_ms=late_ms), now), {})
            decision = self.scheduler.handle(given, now)
            if then is not None:
                noted = self.scheduler.handle(then(), now)
                decision = Decision(decision.facts + noted.facts, decision.effects + noted.effects, decision.answer)
            self._take(decision, before)
        except Exception as error:
            if isinstance(error, Rejected) and decision is None and not isinstance(given, Tick):
                raise
            if isinstance(error, BrokenInvariant):
                log.critical("broken_invariant", given=type(given).__name__, error=str(error), exc_info=True)
                self._fatal = error
                self._end(Unavailable("the daemon found a fault of its own, and stops", retry_after_s=5))
            else:
                # Half-handled, or not written down: as after a failed commit memory cannot be trusted, the journal can.
                log.exception("input_crashed", given=type(given).__name__)
                self._end(Unavailable(f"the daemon starts over after an error ({type(error).__name__})"))
            raise
        if isinstance(given, Tick):
            pause_s = min(LONGEST_PAUSE_S, TICK_PAUSE * (self._clock.now() - now) / 1000)
            self._no_tick_before = asyncio.get_running_loop().time() + pause_s
        self._arm(now)
        return decision

    def _take(self, decision: Decision, before: Mapping[OrderId, Order]) -> None:
        """Send a decision's facts to the journal; keep back its effects until they are durable.

        ``before``: the orders that it may have ended, as they were.
        """
        if decision.facts:
            facts = [(self.last_seq + number, fact) for number, fact in enumerate(decision.facts, 1)]
            self.last_seq = facts[-1][0]
            life, of = self._life, entries(self.scheduler.state, facts, before)
            self._journal.append(facts).add_done_callback(lambda done: self._committed(life, of, done))
        if decision.effects:
            if self.last_seq <= self.durable_seq:
                self._perform(decision.effects)
            else:
                self._effects.append((self.last_seq, decision.effects))

    async def _durable(self) -> None:
        self._check_up()
        if self.last_seq > self.durable_seq:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._answers.append((self.last_seq, future))
            await future

    # ---- one commit ------------------------------------------------------------------------------------------------

    def _committed(self, life: int, facts: Sequence[Entry], done: "asyncio.Future[None]") -> None:
        """Facts are durable: let out what waited for them. Or they are not: end."""
        error = None if done.cancelled() else done.exception()
        if not self._up or life != self._life or done.cancelled():
            return  # that life has ended
        if error is not None:
            log.error("commit_failed", reason=str(error))
            self._end(Unavailable(f"the journal cannot be written: {error}"))
            return
        self.durable_seq = facts[-1].seq
        self._recent.extend((entry.seq, entry.fact) for entry in facts)
        self._wake_for(facts)
        for sink in self._prompt:
            _tell(sink, facts)
        while self._effects and self._effects[0][0] <= self.durable_seq:
            self._perform(self._effects.popleft()[1])
        while self._answers and self._answers[0][0] <= self.durable_seq:
            future = self._answers.popleft()[1]
            if not future.done():
                future.set_result(None)
        if self._followers:
            topics = dict.fromkeys(
                topic for entry in facts for topic in self.belongs.topics(entry.fact, self.scheduler.state)
            )
            self._wake(self._followers, topics, facts[0].seq - 1)
        # Later and not soon: a hand-over goes round the loop a dozen times, and need not wait for a log line.
        if not self._untold:
            asyncio.get_running_loop().call_later(SINKS_AFTER_S, self.tell_sinks)
        self._untold += facts
        if self.durable_seq - self._snapshot_seq >= self._snapshot_every:
            self._snapshot()

    def _wake_for(self, of: Sequence[Entry]) -> None:
        if not self._waiters:
            return
        nodes, before = self.scheduler.state.nodes, of[0].seq - 1
        for _, fact, job, slot, _ in of:
            at = job or nodes.get(getattr(fact, "node", ""))
            group: GroupId | None = getattr(fact, "group", None) or (None if at is None else at.group)
            named = ("slot", slot.id if slot else ""), ("job", job.id if job else ""), ("group", group or "")
            self._wake(self._waiters, named, before)

    @staticmethod
    def _wake(waiters: "dict[Topic, dict[Waiter, None]]", topics: Iterable[Topic], before: int) -> None:
        for topic in topics:
            for waiter in waiters.get(topic, ()):
                waiter.wake(before)

    def _wake_all(self) -> None:
        for waiters in (self._waiters, self._followers):
            self._wake(waiters, waiters, self.durable_seq)

    def tell_sinks(self) -> None:
        """Give the sinks the facts that they do not have yet: soon after a commit, and whenever a call reads them."""
        facts, self._untold = self._untold, []
        if facts:
            for sink in self._sinks:
                _tell(sink, facts)

    def _snapshot(self) -> None:
        """Have the state as it is kept. It is encoded here, where it cannot change; the journal's thread writes it."""
        if self.last_seq == self._snapshot_seq or (self._snapshot_durable and not self._snapshot_durable.done()):
            return
        self._snapshot_seq = self.last_seq
        state = msgspec.json.encode(self.scheduler.state)
        written = asyncio.ensure_future(self._journal.snapshot(self.last_seq, state))
        # It follows its facts in the journal's queue; should it fail, the next append fails too and is heard of.
        written.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._snapshot_durable = written

    # ---- time ------------------------------------------------------------------------------------------------------

    def _arm(self, now: Millis) -> None:
        """See to it that the core is called by its deadline, and that the loop shows a pulse."""
        deadline = self.scheduler.deadline()
        # Not before now: what was due in a stall says nothing of the inputs that are handled before the timer comes.
        due = now + self._pulse_ms if deadline is None else max(now, min(deadline, now + self._pulse_ms))
        if self._timer is not None:
            if due >= self._due:
                return  # the timer comes first, and arms the next
            self._timer.cancel()
        self._due = due
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(max(loop.time() + max(1, due - now) / 1000, self._no_tick_before), self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        if not self.draining.is_set():  # while stopping, no client can renew a lease: the next start renews them all
            self.post(Tick())


def _tell(sink: Sink, facts: Sequence[Entry]) -> None:
    try:
        sink(facts)
    except Exception:
        log.exception("sink_failed", sink=getattr(sink, "__qualname__", repr(sink)))
