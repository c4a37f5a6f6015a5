"""Where the newest of what a job has parked is, after moves."""

from rollmuxd.core.apply.pins import follow
from rollmuxd.core.model import Job, JobState, StateStatus
from rollmuxd.core.spec import JobSpec, PhaseSpec, StateSpec, Want
from rollmuxd.core.state import State, state_key


def parked(newest):
    """A job on q1, with something parked there and on r1, which it has left; ``newest``: where a slot had it last."""
    kept = StateSpec("rollout", ram_mb=1, driver="channel")
    spec = JobSpec("A", (PhaseSpec("rollout", ("rollout",), 1),), (Want("rollout"),), states=(kept,))
    job = Job("j1", "ann", "ann", spec, 0, pins={"rollout": ("q1",)}, newest={"rollout": (newest,)}, left=["r1"])
    state = State(jobs={"j1": job})
    for node in ("r1", "q1"):
        key = state_key("j1", "rollout", node)
        state.states[key] = JobState("j1", "rollout", node, kept, status=StateStatus.PARKED)
        job.states.append(key)
    return state


def test_what_is_parked_where_a_job_sits_and_is_older_is_not_loaded():
    state = parked("r1")

    assert state.source_of(state.states["j1|rollout|q1"]).node == "r1"


def test_what_is_parked_where_a_job_sits_is_loaded_from_there():
    state = parked("q1")

    assert state.source_of(state.states["j1|rollout|q1"]) is None


def test_who_stays_keeps_its_own_and_the_others_follow_in_order():
    assert follow(("a", "b", "c"), ("a", "b", "c"), ("b", "d", "e")) == ("b", "a", "c")


def test_what_was_not_used_yet_is_still_where_it_was():
    assert follow(("b", "c"), ("a", "c"), ("d", "c")) == ("a", "c")


def test_a_job_on_more_nodes_has_some_parts_twice_and_on_fewer_nodes_the_first():
    assert follow(("a",), ("a",), ("b", "c")) == ("a", "a")
    assert follow(("a", "b"), ("a", "b"), ("c",)) == ("a",)


def test_where_there_was_nothing_each_node_has_its_own():
    assert follow((), (), ("a", "b")) == ("a", "b")
