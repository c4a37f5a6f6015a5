"""What is not in a life-cycle table cannot happen: it raises BrokenInvariant and changes nothing.

The edges below are written out by hand from DESIGN section 5, in its notation, not derived from the code.
"""

import itertools
from collections.abc import Mapping

import msgspec
import pytest

from rollmuxd.core import facts as f
from rollmuxd.core import lifecycle
from rollmuxd.core.apply import apply
from rollmuxd.core.causes import Cause, said
from rollmuxd.core.errors import BrokenInvariant
from rollmuxd.core.ids import Fence
from rollmuxd.core.inputs import HostSpec, NodeSpec
from rollmuxd.core.model import JobStatus, NodeStatus, OrderKind, OrderStatus, PlannedTurn, SlotStatus, StateStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State, state_key

ALL_FACTS = f.KINDS


def edges(text: str) -> set[tuple[str, str]]:
    """``a | b -> c | d`` line by line; ``<->`` goes both ways."""
    found = set()
    for line in text.strip().splitlines():
        for arrow in line.split(";"):
            left, both, right = arrow.partition("<->") if "<->" in arrow else arrow.partition("->")
            for one, other in itertools.product(left.split("|"), right.split("|")):
                found.add((one.strip().lower(), other.strip().lower()))
                if both == "<->":
                    found.add((other.strip().lower(), one.strip().lower()))
    return found


LIVE = "WAITING | PROBING | ADMITTED | PAUSED"
JOB = edges(f"""
    WAITING -> PROBING | ADMITTED ; PROBING -> ADMITTED | WAITING ; ADMITTED <-> MOVING
    PROBING | ADMITTED -> WAITING
    WAITING | PROBING | ADMITTED <-> PAUSED
    {LIVE} -> QUARANTINED ; QUARANTINED -> WAITING
    {LIVE} | QUARANTINED -> LOST | ENDED ; LOST -> ENDED
    LOST | ENDED -> WAITING
""")  # anything else abandons a move first; the last line: a new registration is a new run of the same job (section 2)
SLOT = edges("""
    QUEUED -> LOADING | WITHDRAWN ; LOADING -> RUNNING | FAULTED | LOST | REVOKED
    RUNNING -> TAIL | RELEASED | LOST | REVOKED ; TAIL -> RUNNING | RELEASED | LOST | REVOKED
    FAULTED | LOST | REVOKED | RELEASED -> OVER
""")
STATE = edges("""
    GONE | PARKED -> LOADING ; LOADING -> LOADED ; LOADED -> PARKING ; PARKING -> PARKED
    LOADED | PARKED -> DISCARDING ; DISCARDING -> GONE
    GONE | PARKED | LOADING | LOADED | PARKING | DISCARDING -> UNKNOWN
    UNKNOWN -> LOADED | PARKED | GONE
""")
NODE = edges("""
    UNKNOWN -> UP | OCCUPIED ; UP <-> OCCUPIED ; UP | OCCUPIED -> DRAINING ; DRAINING -> DRAINED
    DRAINING | DRAINED -> UNKNOWN
    UNKNOWN | UP | OCCUPIED | DRAINING | DRAINED -> QUARANTINED | LOST ; QUARANTINED | LOST -> UNKNOWN
""")
ORDER = edges("ISSUED -> DONE | FAILED | LOST_CONTACT ; LOST_CONTACT -> DONE | FAILED")

#: edges that the tables have and DESIGN's one line does not spell out; each with its reason
BEYOND = {
    "slot": {("loading", "queued")},  # what could not be loaded after a move waits for another place (decision 0015)
    "state": {("loaded", "loading")},  # onto more GPUs, for a slot that began on a part of its node
    "node": {
        ("unknown", "draining"),  # an operator drains a node before it was seen
        ("up", "unknown"), ("occupied", "unknown"),  # to be seen anew
        ("quarantined", "lost"),  # DESIGN: any -> LOST
    },
}  # fmt: skip


def of_table(table: Mapping) -> set[tuple[str, str]]:
    return {
        (str(now), str(to)) for now, facts in table.items() for choices in facts.values() for to in choices if now != to
    }


@pytest.mark.parametrize(
    ("table", "wanted", "statuses", "name"),
    [
        (lifecycle.JOB, JOB, JobStatus, "job"),
        (lifecycle.SLOT, SLOT, SlotStatus, "slot"),
        (lifecycle.STATE, STATE, StateStatus, "state"),
        (lifecycle.NODE, NODE, NodeStatus, "node"),
        (lifecycle.ORDER, ORDER, OrderStatus, "order"),
    ],
    ids=["job", "slot", "state", "node", "order"],
)
def test_the_table_has_the_edges_of_the_design(table: Mapping, wanted: set, statuses: type, name: str) -> None:
    beyond = BEYOND.get(name, set())
    assert of_table(table) - beyond == wanted - beyond
    assert set(table) == set(statuses), "every status has its row"
    dead_ends = {str(status) for status in statuses} - {one for one, _ in wanted}
    assert dead_ends == {"slot": {"withdrawn", "over"}, "order": {"done", "failed"}}.get(name, set())


# ---- every fact in every status ----------------------------------------------------------------------------------


def a_world() -> State:
    """One node with one job, its session, a slot and a state; each test sets the status it is about."""
    state = State()
    spec = JobSpec("A", (PhaseSpec("rollout", ("rollout",), 10),), (Want("rollout"),), states=(StateSpec("rollout"),))
    for fact in (
        f.HostAdded(0, HostSpec("h", "mock", 1000)),
        f.NodeAdded(0, NodeSpec("n", "h", ("h/gpu0", "h/gpu1"), ("rollout",))),
        f.NodeUp(0, "n"),
        f.JobRegistered(0, "j1", "team", "ann", 1, spec),
        f.JobPlaced(
            0, "j1", "g1", {"rollout": ("n",)}, (PlannedTurn("j1", "rollout"),), JobStatus.ADMITTED, "isolated"
        ),
        f.SessionOpened(0, "e1", "j1", 1),
        f.SlotQueued(0, "s1", "j1", 1, "e1", "rollout", "r1"),
    ):
        apply(state, fact)
    return state


FACTS_OF_A_JOB = {
    f.JobPlaced: f.JobPlaced(1, "j1", "g1", {"rollout": ("n",)}, (), JobStatus.ADMITTED, "isolated"),
    f.FillerPlaced: f.FillerPlaced(1, "j1", "rollout", "n"),
    f.JobPromised: f.JobPromised(1, "j1", True),
    f.JobUnplaced: f.JobUnplaced(1, "j1", said("x")),
    f.MovePlanned: f.MovePlanned(1, "j1", "g2", {"rollout": ("n",)}, (), said("x"), "isolated"),
    f.MoveBegan: f.MoveBegan(1, "j1"),
    f.MoveEnded: f.MoveEnded(1, "j1"),
    f.MoveAbandoned: f.MoveAbandoned(1, "j1", said("x")),
    f.JobPaused: f.JobPaused(1, "j1", "x"),
    f.JobResumed: f.JobResumed(1, "j1", "x"),
    f.JobQuarantined: f.JobQuarantined(1, "j1", said("x")),
    f.JobLost: f.JobLost(1, "j1", said("x")),
    f.JobEnded: f.JobEnded(1, "j1", said("x")),
    f.JobRegistered: f.JobRegistered(1, "j1", "team", "ann", 2, a_world().jobs["j1"].spec),
}
FACTS_OF_A_SLOT = {
    f.SlotWithdrawn: f.SlotWithdrawn(1, "s1", said("x")),
    f.SlotClaimed: f.SlotClaimed(1, "s1", ("h/gpu0",), 0),
    f.YieldAsked: f.YieldAsked(1, "s1", Cause("wanted"), 5),
    f.SlotGranted: f.SlotGranted(1, "s1", Fence(1, 1)),
    f.SlotResized: f.SlotResized(1, "s1", ("h/gpu0",), tail=True),
    f.SlotReleased: f.SlotReleased(1, "s1"),
    f.SlotTakenAway: f.SlotTakenAway(1, "s1", SlotStatus.REVOKED, said("x"), "y"),
    f.SlotOverran: f.SlotOverran(1, "s1", 5, 4),
    f.SlotOver: f.SlotOver(1, "s1"),
}
FACTS_OF_A_NODE = {
    f.NodeUp: f.NodeUp(1, "n"),
    f.NodeOccupied: f.NodeOccupied(1, "n", said("x")),
    f.NodeUnknown: f.NodeUnknown(1, "n"),
    f.NodeLost: f.NodeLost(1, "n", said("x")),
    f.NodeQuarantined: f.NodeQuarantined(1, "n", said("x")),
    f.NodeDraining: f.NodeDraining(1, "n", "x"),
    f.NodeDrained: f.NodeDrained(1, "n"),
    f.NodeUndrained: f.NodeUndrained(1, "n", "x"),
}
#: facts that lead nowhere else or say which way; nothing in a table speaks of them
NOT_IN_A_TABLE = {
    f.DaemonStarted, f.LoopStalled, f.HostAdded, f.HostRemoved, f.HostBooted,
    f.NodeAdded, f.NodeRemoved,
    f.GpusVerifiedClean, f.GpusNotClean,
    f.PlacementEnded, f.SessionOpened, f.SessionLost, f.SessionClosed, f.SlotQueued,
    f.TurnAdded, f.TurnSkipped, f.Audited, f.ProcessLaunched, f.ProcessStarted,
    f.ProcessOver, f.NodeLeft, f.GuardChanged, f.ResidualMemoryObserved,
    f.TimesDrifted, f.GroupReplanned, f.LoanEnded,
}  # fmt: skip
FACTS_OF_ORDERS = {f.OrderIssued, f.OrderEnded, f.OrderFaulted, f.OrderContactLost, f.StateUnknown, f.StateObserved}


def test_every_fact_is_in_a_table_or_said_not_to_be() -> None:
    known = {*FACTS_OF_A_JOB, *FACTS_OF_A_SLOT, *FACTS_OF_A_NODE, *FACTS_OF_ORDERS, *NOT_IN_A_TABLE}
    assert set(ALL_FACTS) == known


def meets(state: State, fact: f.Fact, allowed: bool) -> bool:
    """Apply a fact: it happens iff it may; where it may not, BrokenInvariant and the same bytes as before."""
    before = msgspec.json.encode(state)
    if not allowed:
        with pytest.raises(BrokenInvariant):
            apply(state, fact)
        state.at = 0  # the clock may have moved; nothing else
        assert msgspec.json.encode(state) == before
    return allowed


@pytest.mark.parametrize("status", JobStatus)
@pytest.mark.parametrize("kind", FACTS_OF_A_JOB, ids=lambda kind: kind.__name__)
def test_a_job_meets_only_the_facts_of_its_row(status: JobStatus, kind: type[f.Fact]) -> None:
    state = a_world()
    state.jobs["j1"].status = status
    if status is not JobStatus.WAITING:
        state.waiting.pop("j1", None)
    meets(state, FACTS_OF_A_JOB[kind], allowed=kind in lifecycle.JOB[status])


@pytest.mark.parametrize("status", SlotStatus)
@pytest.mark.parametrize("kind", FACTS_OF_A_SLOT, ids=lambda kind: kind.__name__)
def test_a_slot_meets_only_the_facts_of_its_row(status: SlotStatus, kind: type[f.Fact]) -> None:
    state = a_world()
    state.slots["s1"].status = status
    meets(state, FACTS_OF_A_SLOT[kind], allowed=kind in lifecycle.SLOT[status])


@pytest.mark.parametrize("status", NodeStatus)
@pytest.mark.parametrize("kind", FACTS_OF_A_NODE, ids=lambda kind: kind.__name__)
def test_a_node_meets_only_the_facts_of_its_row(status: NodeStatus, kind: type[f.Fact]) -> None:
    state = a_world()
    state.nodes["n"].status = status
    if meets(state, FACTS_OF_A_NODE[kind], allowed=kind in lifecycle.NODE[status]):
        apply(state, FACTS_OF_A_NODE[kind])
        assert (str(status), str(state.nodes["n"].status)) in NODE | BEYOND["node"] or state.nodes["n"].status is status


def issued(kind: OrderKind, at: int = 1) -> f.OrderIssued:
    return f.OrderIssued(at, "o1", kind, "j1", 1, "rollout", "n", "channel")


@pytest.mark.parametrize("status", StateStatus)
@pytest.mark.parametrize("kind", OrderKind)
def test_a_state_is_ordered_only_where_its_row_says_so(status: StateStatus, kind: OrderKind) -> None:
    state = a_world()
    key = state_key("j1", "rollout", "n")
    state.states[key].status = status
    may = {OrderKind.LOAD: "gone parked loaded", OrderKind.PARK: "loaded", OrderKind.DISCARD: "loaded parked"}
    if status in may[kind].split():
        apply(state, issued(kind))
        to = {"load": "loading", "park": "parking", "discard": "discarding"}[kind]
        assert state.states[key].status == to
    else:
        with pytest.raises(BrokenInvariant):
            apply(state, issued(kind))
        assert state.states[key].status is status
        assert not state.orders


@pytest.mark.parametrize("status", StateStatus)
@pytest.mark.parametrize("seen", StateStatus)
def test_only_an_unknown_state_is_seen_and_only_as_what_can_be_seen(status: StateStatus, seen: StateStatus) -> None:
    state = a_world()
    state.states[state_key("j1", "rollout", "n")].status = status
    allowed = status is StateStatus.UNKNOWN and seen in ("loaded", "parked", "gone")
    fact = f.StateObserved(1, "j1", "rollout", "n", seen)
    if meets(state, fact, allowed):
        apply(state, fact)
        assert state.states[state_key("j1", "rollout", "n")].status is seen


@pytest.mark.parametrize("kind", OrderKind)
@pytest.mark.parametrize("end", [f.OrderEnded, f.OrderFaulted, f.OrderContactLost])
def test_an_order_ends_once(kind: OrderKind, end: type[f.Fact]) -> None:
    state = a_world()
    key = state_key("j1", "rollout", "n")
    state.states[key].status = StateStatus.LOADED if kind is not OrderKind.LOAD else StateStatus.GONE
    apply(state, issued(kind))
    apply(state, end(1, "o1") if end is f.OrderEnded else end(1, "o1", "x"))
    done = {"load": "loaded", "park": "parked", "discard": "gone"}[kind]
    assert state.states[key].status == (done if end is f.OrderEnded else "unknown")
    if end is f.OrderContactLost:
        with pytest.raises(BrokenInvariant):
            apply(state, f.OrderContactLost(1, "o1", said("again")))
        apply(state, f.OrderEnded(1, "o1"))
    assert not state.orders


def test_time_does_not_go_back() -> None:
    state = a_world()
    apply(state, f.LoopStalled(5, 1))
    before = msgspec.json.encode(state)
    with pytest.raises(BrokenInvariant, match="time went back"):
        apply(state, f.LoopStalled(4, 1))
    assert msgspec.json.encode(state) == before


@pytest.mark.parametrize("kind", ALL_FACTS, ids=lambda kind: kind.__name__)
def test_every_fact_survives_the_journal(kind: type[f.Fact]) -> None:
    facts = {**FACTS_OF_A_JOB, **FACTS_OF_A_SLOT, **FACTS_OF_A_NODE}
    others = {
        f.DaemonStarted: f.DaemonStarted(1, 2), f.LoopStalled: f.LoopStalled(1, 5),
        f.HostAdded: f.HostAdded(1, HostSpec("h", "mock", 5)), f.HostRemoved: f.HostRemoved(1, "h"),
        f.HostBooted: f.HostBooted(1, "h", "b"), f.NodeAdded: f.NodeAdded(1, NodeSpec("n", "h", ("h/gpu0",), ("p",))),
        f.NodeRemoved: f.NodeRemoved(1, "n"),
        f.GpusVerifiedClean: f.GpusVerifiedClean(1, "n", ("h/gpu0",), "x", said("y")),
        f.GpusNotClean: f.GpusNotClean(1, "n", Cause("not_clean", {"gpus": ["h/gpu0"]}, said("x"))),
        f.PlacementEnded: f.PlacementEnded(1, "j1", said("x")),
        f.SessionOpened: f.SessionOpened(1, "e1", "j1", 1, 5, "h", "t"),
        f.ProcessLaunched: f.ProcessLaunched(1, "j1", 1, "l1", "h"),
        f.ProcessStarted: f.ProcessStarted(1, "j1", "l1", 7, "t"),
        f.ProcessOver: f.ProcessOver(1, "j1", "l1", said("x")),
        f.SessionLost: f.SessionLost(1, "e1"), f.SessionClosed: f.SessionClosed(1, "e1"),
        f.NodeLeft: f.NodeLeft(1, "j1", "n"),
        f.GuardChanged: f.GuardChanged(1, "j1", True, -5),
        f.TimesDrifted: f.TimesDrifted(1, "j1", {"p": 15}, {"p": 10}, {"p": 8}),
        f.GroupReplanned: f.GroupReplanned(1, "g1", "j1", 30, (PlannedTurn("j1", "p"),), ("j1",), said("x")),
        f.SlotQueued: f.SlotQueued(1, "s1", "j1", 1, "e1", "p", "r", True, True),
        f.LoanEnded: f.LoanEnded(1, "s1", "j1", "n", 8, 5, "wanted"),
        f.TurnAdded: f.TurnAdded(1, "g1", "j1", "p"),
        f.TurnSkipped: f.TurnSkipped(1, "g1", 1, "j1", "p"),
        f.OrderIssued: issued(OrderKind.PARK), f.OrderEnded: f.OrderEnded(1, "o1"),
        f.OrderFaulted: f.OrderFaulted(1, "o1", said("x")),
        f.OrderContactLost: f.OrderContactLost(1, "o1", said("x")), f.StateUnknown: f.StateUnknown(1, "j1", "p", "n"),
        f.StateObserved: f.StateObserved(1, "j1", "p", "n", StateStatus.GONE),
        f.ResidualMemoryObserved: f.ResidualMemoryObserved(1, "j1", "p", "n", 4_500, 2_000),
        f.Audited: f.Audited(1, "drain_node", "ops/op", "admin", "uid 0", "r", "n", "up", "draining", "x", 3),
    }  # fmt: skip
    fact = {**facts, **others}[kind]
    assert f.decode(f.encode(fact)) == fact
    assert f.encode(f.decode(f.encode(fact))) == f.encode(fact)
