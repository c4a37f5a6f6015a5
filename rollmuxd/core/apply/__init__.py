"""The one place that writes the core's memory: ``apply``, fact by fact, in rooms by what the facts are about.

``apply`` holds no policy: every number that was decided is in the fact. It is the same code live, in replay and in
the simulator, so replaying a journal gives the very state that the live scheduler had.
"""

from collections.abc import Callable
from typing import Any

from rollmuxd.core import facts as f
from rollmuxd.core.apply import groups, hosts, jobs, loans, moves, orders, pins, slots
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.state import State


def apply(state: State, fact: f.Fact) -> None:
    """Let one thing have happened.

    Raises:
        BrokenInvariant: the life-cycle tables do not know it; the state is then not to be used any more.
    """
    if fact.at < state.at:
        raise BrokenInvariant(f"time went back from {state.at} to {fact.at} ({f.name(fact)})")
    state.at = fact.at
    _FOLD[type(fact)](state, fact)


def _nothing(state: State, fact: f.Fact) -> None:
    """The fact is for people and other readers of the journal."""


_FOLD: dict[type[f.Fact], Callable[[State, Any], None]] = {
    f.DaemonStarted: hosts.daemon_started,
    f.LoopStalled: _nothing,
    f.HostAdded: hosts.host_added,
    f.HostRemoved: hosts.host_removed,
    f.HostBooted: hosts.host_booted,
    f.HostEndObserved: hosts.host_end_observed,
    f.NodeAdded: hosts.node_added,
    f.NodeRemoved: hosts.node_removed,
    f.NodeUp: hosts.node_moved,
    f.NodeOccupied: hosts.node_moved,
    f.NodeUnknown: hosts.node_moved,
    f.NodeLost: hosts.node_moved,
    f.NodeQuarantined: hosts.node_moved,
    f.NodeDraining: hosts.node_moved,
    f.NodeDrained: hosts.node_moved,
    f.NodeUndrained: hosts.node_moved,
    f.GpusVerifiedClean: hosts.gpus_verified_clean,
    f.GpusNotClean: hosts.gpus_not_clean,
    f.JobRegistered: jobs.job_registered,
    f.JobPlaced: jobs.job_placed,
    f.JobPromised: jobs.job_promised,
    f.TimesDrifted: jobs.times_drifted,
    f.GroupReplanned: groups.group_replanned,
    f.PlacementEnded: jobs.placement_ended,
    f.JobUnplaced: jobs.job_unplaced,
    f.MovePlanned: moves.move_planned,
    f.MoveBegan: moves.move_began,
    f.MoveEnded: moves.move_ended,
    f.MoveAbandoned: moves.move_abandoned,
    f.NodeLeft: pins.node_left,
    f.JobGuarded: jobs.guard_changed,
    f.GuardEnded: jobs.guard_changed,
    f.JobPaused: jobs.job_paused,
    f.JobResumed: jobs.job_resumed,
    f.JobQuarantined: jobs.job_quarantined,
    f.JobReinstated: jobs.job_reinstated,
    f.JobLost: jobs.job_lost,
    f.RelaunchPlanned: jobs.relaunch_planned,
    f.ProcessLaunched: jobs.process_launched,
    f.ProcessStarted: jobs.process_started,
    f.ProcessOver: jobs.process_over,
    f.JobEnded: jobs.job_ended,
    f.SessionOpened: jobs.session_opened,
    f.SessionFenced: jobs.session_over,
    f.SessionLost: jobs.session_over,
    f.SessionClosed: jobs.session_over,
    f.SlotQueued: slots.slot_queued,
    f.SlotWithdrawn: slots.slot_withdrawn,
    f.TurnAdded: groups.turn_added,
    f.TurnSkipped: groups.turn_skipped,
    f.SlotClaimed: slots.slot_claimed,
    f.FillerPlaced: loans.filler_placed,
    f.NodeLent: loans.node_lent,
    f.YieldAsked: loans.yield_asked,
    f.LoanEnded: loans.loan_ended,
    f.SlotGranted: slots.slot_granted,
    f.SlotShrunk: slots.slot_shrunk,
    f.SlotGrown: slots.slot_grown,
    f.SlotRequeued: slots.slot_requeued,
    f.SlotReleased: slots.slot_released,
    f.NextAnswered: slots.next_answered,
    f.SlotFaulted: slots.slot_taken_away,
    f.SlotLost: slots.slot_taken_away,
    f.SlotRevoked: slots.slot_taken_away,
    f.SlotOverran: slots.slot_overran,
    f.SlotReclaiming: slots.slot_reclaiming,
    f.SlotOver: slots.slot_over,
    f.OrderIssued: orders.order_issued,
    f.OrderEnded: orders.order_ended,
    f.OrderFaulted: orders.order_faulted,
    f.OrderContactLost: orders.order_contact_lost,
    f.StateUnknown: orders.state_unknown,
    f.StateObserved: orders.state_observed,
    f.ResidualMemoryObserved: orders.residual_memory_observed,
    f.Audited: _nothing,
}
