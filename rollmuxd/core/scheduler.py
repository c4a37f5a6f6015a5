"""The scheduler: inputs in, facts and effects out.

:mod:`rollmuxd.core.handlers` has a function for each input. It refuses first, then records what the input means
(``c.fact``, ``c.do``), with steps where it needs them. After every input :mod:`~rollmuxd.core.reconcile` takes the
steps of :mod:`rollmuxd.core.steps`: slots end, jobs are admitted, turns are given, jobs move.
"""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

from rollmuxd.core import inputs as i
from rollmuxd.core.config import Config
from rollmuxd.core.context import NOTHING, Context
from rollmuxd.core.decision import Answer, Decision, Directive
from rollmuxd.core.errors import BrokenInvariant, Rejected
from rollmuxd.core.facts import name
from rollmuxd.core.handlers import hosts, jobs, orders, resize, slots
from rollmuxd.core.ids import Millis, SessionId, SlotId
from rollmuxd.core.policy import HeedsOwners, Policy
from rollmuxd.core.reconcile import reconcile
from rollmuxd.core.state import State
from rollmuxd.core.steps import drain, launch, lend, overrun, replan

_NO_CHANGE = Decision((), (), NOTHING)


def _tick(c: Context, _: i.Tick) -> Answer:
    """Deadlines have passed."""
    for kind, key in c.timers.due(c.now):
        _DUE[kind](c, key)
    return NOTHING


_HANDLERS: dict[type, Callable[[Context, Any], Answer]] = {
    i.Tick: _tick,
    i.RegisterJob: jobs.register,
    i.EndJob: jobs.end,
    i.PauseJob: jobs.pause,
    i.ResumeJob: jobs.resume,
    i.OpenSession: jobs.open_session,
    i.CloseSession: jobs.close_session,
    i.GiveBack: slots.give_back,
    i.Heartbeat: resize.heartbeat,
    i.ProcessGone: jobs.process_gone,
    i.RequestSlot: slots.request,
    i.DetachSlot: slots.detach,
    i.WithdrawSlot: slots.withdraw,
    i.ReleaseSlot: slots.release,
    i.ShrinkSlot: slots.shrink,
    i.GrowSlot: resize.grow,
    i.RevokeSlot: slots.revoke,
    i.HostEnds: hosts.host_ends,
    i.DrainNode: hosts.drain,
    i.UndrainNode: hosts.undrain,
    i.DeclareClean: hosts.declare_clean,
    i.Audit: hosts.audit,
    i.Start: hosts.start,
    i.HostObserved: hosts.host_observed,
    **dict.fromkeys((i.OrderDone, i.OrderFailed, i.OrderNotBegun, i.OrderLostContact), orders.order_reported),
    i.Launched: jobs.launched,
    i.Stalled: hosts.stalled,
}

#: what a deadline of each kind leads to; its key is a session, job, slot, group, host or node
_DUE: dict[str, Callable[[Context, str], None]] = {
    "lease": jobs.lease_ran_out,
    "opened": jobs.never_opened,
    "relaunch": launch.relaunch,
    "reap": jobs.reap,
    "detach": slots.give_up,
    "dispatch": lambda c, group: c.dirty.group(group),
    "overrun": overrun.due,
    "look": hosts.look_again,
    "clean": hosts.clean_limit_passed,
    "move": lambda c, job: c.dirty.jobs.setdefault(job),
    "regroup": replan.look_for_moves,
    "relieve": replan.look_again,
    "leave": drain.look_again,
    "lend": lambda c, node: c.dirty.lend.setdefault(node),
    "homes": lend.search_again,
    "yield": slots.yield_due,
    "admit": lambda c, _: c.dirty.try_again(),
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
            own = {name: owner.max_nodes for name, owner in config.owners.items()}
            policy.max_nodes = defaultdict(lambda: config.others.max_nodes, own)
        #: what the steps work with. For reading only: explanations are made of it
        self.context = Context(config, policy, state if state is not None else State())

    @property
    def state(self) -> State:
        """What is journalled. For reading only: facts write it."""
        return self.context.state

    def handle(self, given: i.Input, now: Millis) -> Decision:
        """Decide upon one input at a time ``now`` (integer milliseconds, never going back).

        Raises:
            Rejected: the input is refused, and nothing has changed.
            BrokenInvariant: a bug of ours; the state is not to be used any more.
        """
        context = self.context
        if now < context.state.at:
            raise BrokenInvariant(f"time went back from {context.state.at} to {now}")
        context.now = now
        context.facts, context.effects, context.spent = [], [], 0
        try:
            answer = _HANDLERS[type(given)](context, given)
            reconcile(context)
        except Rejected:
            if context.facts:
                raise BrokenInvariant(f"{type(given).__name__} was refused after {name(context.facts[-1])}") from None
            raise
        if not context.facts and not context.effects and answer is NOTHING:
            return _NO_CHANGE
        return Decision(tuple(context.facts), tuple(context.effects), answer)

    def deadline(self) -> Millis | None:
        """When the next ``Tick`` is due at the latest; None: nothing is waited for."""
        return self.context.timers.next_due()

    # ---- questions; they change nothing ------------------------------------------------------------------------------

    def directives(self, session: SessionId, slot: SlotId, now: Millis) -> tuple[Directive, ...]:
        """What the session's slot would be asked by a heartbeat now; no lease is renewed by the question."""
        self.context.now = now
        return resize.directives(self.context, session, slot)
