"""What is not journalled: lease deadlines, attachment, progress, and when to look again.

It starts empty with the daemon, and is no part of replay equality. Whatever comes of it (a session lost, a request
withdrawn) is a fact. Deadlines lie in a heap of hints. A hint that comes up early is put back at its true time, so
renewing a lease costs one store into a dict.
"""

from collections.abc import Iterable, Iterator
from heapq import heappop, heappush

from msgspec import Struct

from rollmuxd.core.config import Config
from rollmuxd.core.ids import GpuId, HostId, JobId, Millis, PoolName, SessionId, SlotId
from rollmuxd.core.model import SessionStatus, SlotStatus
from rollmuxd.core.state import State


class AdmissionPass(Struct):
    """One pass over the waiting jobs, on the room that there is."""

    #: jobs that are still to be tried, in their order
    names: list[JobId] = []
    #: by shape, the loosest SLO that was refused: with a tighter one it fits even less
    refused: dict[object, float] = {}
    #: pools that are kept for a job that has waited too long
    kept: set[PoolName] = set()
    #: whether room has come since it began, so that another pass follows. Begun again at once, it might never reach the
    #: last jobs
    grew: bool = False


class Timers:
    """Deadlines and what they are derived from."""

    def __init__(self) -> None:
        #: when each living session was heard of last
        self.seen: dict[SessionId, Millis] = {}
        #: requests that no call attends: until when they stay queued, and until when others wait for them at their turn
        self.detached: dict[SlotId, tuple[Millis, Millis]] = {}
        #: how far running slots are: done, total
        self.progress: dict[SlotId, tuple[int, int]] = {}
        #: what was seen last on GPUs that were not clean, for people
        self.used_mb: dict[GpuId, int] = {}
        #: when the last look at each host began
        self.looked_at: dict[HostId, Millis] = {}
        #: how long the wait for the look after the next one is
        self._pause: dict[HostId, Millis] = {}
        #: states that are to be discarded again: the earliest time, and the wait before the time after that
        self._again: dict[str, tuple[Millis, Millis]] = {}
        #: when every lease was last renewed in full
        self.renewed_at: Millis = 0
        #: waiting jobs as they are tried on the room that there is
        self.round = AdmissionPass()
        #: fillers for which a node is to be searched after a pause
        self.fillers: dict[JobId, None] = {}
        self._heap: list[tuple[Millis, str, str]] = []
        self._planned: dict[tuple[str, str], Millis] = {}

    # ---- sessions and requests -----------------------------------------------------------------------------------

    def see(self, session: SessionId, now: Millis, lease_ms: Millis) -> None:
        """A session is there; its lease begins or is renewed."""
        if session not in self.seen:
            self.at(now + lease_ms, "lease", session)
        self.seen[session] = now

    def detach(self, slot: SlotId, *, until: Millis, awaited_until: Millis) -> None:
        """No call attends the request."""
        self.detached[slot] = until, awaited_until
        self.at(until, "detach", slot)

    def attach(self, slot: SlotId) -> bool:
        """A call attends it again; returns whether it was detached."""
        return self.detached.pop(slot, None) is not None

    def forget_slot(self, slot: SlotId) -> None:
        """The request or slot has ended."""
        self.attach(slot)
        self.progress.pop(slot, None)

    def restart(self, state: State, now: Millis, config: Config) -> None:
        """The daemon has started: leases in full, every request detached until it is asked for again."""
        self.renewed_at = now
        self.seen.clear()
        for session in state.sessions.values():
            if session.status is SessionStatus.ALIVE:
                self.see(session.id, now, config.lease_ms)
        for job in state.jobs.values():
            for kind in ("opened", "reap", "overrun"):  # whether there is anything to do is seen then
                self.at(now + config.lease_ms, kind, job.id)
            if job.relaunch_at is not None:
                self.at(job.relaunch_at, "relaunch", job.id)
        for node in state.nodes.values():
            if node.loan is not None:
                self.at(now, "lend", node.id)
                self.at(now, "yield", node.loan)
        for name in state.at_risk:
            self.at(now + config.lease_ms, "relieve", state.jobs[name].group or "")
        for slot in state.slots.values():
            if slot.status in (SlotStatus.QUEUED, SlotStatus.LOADING):
                # a client that could not reach the daemon comes back within a lease, or has lost its session
                self.detach(slot.id, until=now + config.reattach_ms, awaited_until=now + config.lease_ms)

    # ---- looking again -----------------------------------------------------------------------------------------------

    def observe_soon(self, host: HostId, now: Millis, config: Config) -> None:
        """Something on a host should become clean, and it is looked at now: the next looks follow soon, too."""
        self._pause[host] = config.observe_after_ms
        self.at(now + config.observe_after_ms, "look", host)

    def observe_later(self, host: HostId, now: Millis, config: Config) -> None:
        """It is not clean yet: look again, each time after twice as long.

        The look that every host gets now and then asks no driver, so it does not take the place of one that does.
        """
        if ("look", host) not in self._planned:
            pause = self._pause.get(host, config.observe_after_ms)
            self._pause[host] = min(2 * pause, config.observe_at_least_ms)
            self.at(now + pause, "look", host)

    def may_discard_again(self, state: str, now: Millis, config: Config) -> bool:
        """Whether a state may be told to be discarded once more: each time after twice as long."""
        due, pause = self._again.get(state, (now, config.observe_after_ms))
        if now < due:
            return False
        self._again[state] = (now + pause, min(2 * pause, config.observe_at_least_ms))
        return True

    def forget_discards(self, states: Iterable[str]) -> None:
        """Nothing has to be discarded there any more."""
        for state in states:
            self._again.pop(state, None)

    # ---- deadlines ------------------------------------------------------------

    def at(self, due: Millis, kind: str, key: str) -> None:
        """Something is to be looked after at that time. Said twice, the earlier holds."""
        planned = self._planned.get((kind, key))
        if planned is None or due < planned:
            self._planned[kind, key] = due
            heappush(self._heap, (due, kind, key))

    def next_due(self) -> Millis | None:
        """When the earliest hint comes up."""
        return self._heap[0][0] if self._heap else None

    def due(self, now: Millis) -> Iterator[tuple[str, str]]:
        """The hints that have come up by now. What is not due yet is planned again where it is looked at."""
        while self._heap and self._heap[0][0] <= now:
            at, kind, key = heappop(self._heap)
            if self._planned.get((kind, key)) == at:  # else overtaken by an earlier hint
                del self._planned[kind, key]
                yield kind, key
