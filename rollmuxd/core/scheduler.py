"""The scheduler: inputs in, facts and effects out. This file is its interface; each handler lives in a room of its own.

The rooms, each building on those before it: ``turns`` (whose turn it is in a group), ``admission`` (who gets in),
``letting_go`` (ending things, and when GPUs are clear), ``orders`` (what drivers report), ``lives`` (jobs and
sessions), ``requests`` (what jobs ask of slots), ``overstay`` (slots that run for too long), ``inventory`` (hosts and
nodes). A handler reads: may it be (all refusing comes first), what happened (``c.fact``), what must be done
(``c.do``).
"""

from collections.abc import Callable
from typing import Any

from rollmuxd.core import draining, drift, growing, inventory, lives, moving, orders, overstay, requests
from rollmuxd.core import inputs as i
from rollmuxd.core.admission import admit, begin_round, go_on, position
from rollmuxd.core.config import Config
from rollmuxd.core.cycle import NOTHING, Cycle
from rollmuxd.core.decision import Answer, Decision
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.estimates import credit_ms, slowdown
from rollmuxd.core.facts import name
from rollmuxd.core.model import GroupId, JobId, Millis, SessionId
from rollmuxd.core.policy import HeedsOwners, Policy
from rollmuxd.core.soft import Soft
from rollmuxd.core.state import State
from rollmuxd.core.turns import dispatch

_NO_CHANGE = Decision((), (), NOTHING)

_HANDLERS: dict[type, Callable[[Cycle, Any], Answer]] = {
    i.RegisterJob: lives.register,
    i.EndJob: lives.end,
    i.PauseJob: lives.pause,
    i.ResumeJob: lives.resume,
    i.ReinstateJob: lives.reinstate,
    i.OpenSession: lives.open_session,
    i.CloseSession: lives.close_session,
    i.Heartbeat: growing.heartbeat,
    i.ProcessGone: lives.process_gone,
    i.RequestSlot: requests.request,
    i.DetachSlot: requests.detach,
    i.WithdrawSlot: requests.withdraw,
    i.ReleaseSlot: requests.release,
    i.ShrinkSlot: requests.shrink,
    i.GrowSlot: growing.grow,
    i.RevokeSlot: requests.revoke,
    i.DrainNode: inventory.drain,
    i.UndrainNode: inventory.undrain,
    i.DeclareClear: inventory.declare_clear,
    i.Audit: inventory.audit,
    i.Start: inventory.start,
    i.HostSeen: inventory.host_seen,
    i.HostUnreachable: inventory.host_unreachable,
    i.OrderDone: orders.order_done,
    i.OrderFailed: orders.order_failed,
    i.OrderNotBegun: orders.order_not_begun,
    i.OrderLostContact: orders.order_lost_contact,
    i.Launched: lives.launched,
    i.LaunchFailed: lives.launch_failed,
    i.Stalled: inventory.stalled,
}

#: what a deadline of each kind leads to; its key is a session, job, slot, group, host or node
_DUE: dict[str, Callable[[Cycle, str], None]] = {
    "lease": lives.lease_ran_out,
    "opened": lives.never_opened,
    "relaunch": lives.relaunch,
    "reap": lives.reap,
    "detach": requests.give_up,
    "dispatch": dispatch,
    "overstay": overstay.due,
    "look": inventory.look_again,
    "clear": inventory.not_clear,
    "move": moving.look_again,
    "regroup": moving.regroup,
    "relieve": drift.look_again,
    "leave": draining.look_again,
    "admit": begin_round,
}


class Scheduler:
    """Turns one input into facts and effects. No clock, no IO, no logging, no randomness.

    After calling :meth:`handle`:

    - make ``facts`` durable, then answer the caller;
    - only then perform ``effects``, in order;
    - call :meth:`handle` with a ``Tick`` no later than :meth:`deadline`.
    """

    def __init__(self, config: Config, policy: Policy, state: State | None = None) -> None:
        self.config, self.policy = config, policy
        if isinstance(policy, HeedsOwners):
            policy.max_nodes = {name: owner.max_nodes for name, owner in config.owners.items() if owner.max_nodes}
        self._cycle = Cycle(config, policy, state if state is not None else State())

    @property
    def state(self) -> State:
        """What is journalled. For reading only: facts write it."""
        return self._cycle.state

    @property
    def context(self) -> Cycle:
        """What the steps work with. For reading only: explanations are made of it."""
        return self._cycle

    @property
    def soft(self) -> Soft:
        """What is not journalled. For reading only."""
        return self._cycle.soft

    def handle(self, given: i.Input, now: Millis) -> Decision:
        """Decide upon one input at a time ``now`` (integer milliseconds, never going back).

        Raises:
            Rejected: the input is refused, and nothing has changed.
            BrokenInvariant: a bug of ours; the state is not to be used any more.
        """
        cycle = self._cycle
        if now < cycle.state.at:
            raise BrokenInvariant(f"time went back from {cycle.state.at} to {now}")
        cycle.now = now
        cycle.facts, cycle.effects, cycle.spent = [], [], 0
        try:
            answer = self._tick() if type(given) is i.Tick else _HANDLERS[type(given)](cycle, given)
            moving.follow(cycle)
            if drift.follow(cycle):
                moving.follow(cycle)
            draining.follow(cycle)
        except Rejected:
            if cycle.facts:
                raise BrokenInvariant(f"{type(given).__name__} was refused after {name(cycle.facts[-1])}") from None
            raise
        if not cycle.facts and not cycle.effects and answer is NOTHING:
            return _NO_CHANGE
        return Decision(tuple(cycle.facts), tuple(cycle.effects), answer)

    def _tick(self) -> Answer:
        cycle = self._cycle
        # A thousand leases may run out at once: each departure lets somebody in, and one look finds all of them.
        cycle.admits_later = False
        for kind, key in cycle.soft.due(cycle.now, cycle.config):
            _DUE[kind](cycle, key)
        wanted, cycle.admits_later = cycle.admits_later, None
        if wanted:
            admit(cycle)
        elif cycle.soft.round is not None and not cycle.soft.round.is_over():
            go_on(cycle)
        return NOTHING

    def deadline(self) -> Millis | None:
        """When the next ``Tick`` is due at the latest; None: nothing is waited for."""
        return self._cycle.soft.next_due()

    # ---- questions; they change nothing ------------------------------------------------------------------------------

    def job_position(self, job: JobId, now: Millis) -> int:
        """Its place among the waiting jobs; 1: the next to be tried; 0: it does not wait."""
        return position(self._cycle, job, now)

    def lease_left_ms(self, session: SessionId, now: Millis) -> Millis:
        """How long a session's lease lasts without another heartbeat."""
        seen = self.soft.seen.get(session)
        return 0 if seen is None else max(0, seen + self.config.lease_ms - now)

    def silent_ms(self, session: SessionId, now: Millis) -> Millis | None:
        """For how long no heartbeat has come, if that is longer than expected; None: it is not.

        A lease has room for two heartbeats at least, so one is late after half of it.
        """
        seen = self.soft.seen.get(session)
        return None if seen is None or 2 * (now - seen) <= self.config.lease_ms else now - seen

    def silent(self, now: Millis) -> list[SessionId]:
        """The sessions of which no heartbeat has come for longer than expected."""
        return [session for session in self.soft.seen if self.silent_ms(session, now) is not None]

    def group_period_ms(self, group: GroupId) -> Millis | None:
        """The group's planned period."""
        return self.policy.period_ms(self.state, group) if group in self.state.groups else None

    def slowdown(self, job: JobId) -> float | None:
        """Mean iteration over solo iteration, of all finished iterations; None before the first."""
        return slowdown(self.state.job(job))

    def credit_ms(self, job: JobId) -> Millis | None:
        """By how much the job is ahead of its bound; None without an SLO."""
        return credit_ms(self.state.job(job))
