"""Which circuits held slots get, and what has to change on the switch."""

from hypothesis import given
from hypothesis import strategies as st

from rollmuxd.fabric.live import Change, Wish, change, talking, wanted

WIRED = {"a": (1, 2), "b": (3, 4), "c": (5, 6), "d": (7, 8)}
NONE = frozenset()


def _circuits(*wishes, seen=NONE, wired=WIRED):
    got = wanted(wishes, wired, frozenset(seen))
    return {slot: sorted(circuits) for slot, circuits in got.items()}


def test_a_ring_uses_all_ports_of_its_nodes():
    assert _circuits(Wish("s", "ring", (("a", "b", "c"),))) == {"s": [(1, 3), (2, 4), (3, 5), (4, 6), (5, 1), (6, 2)]}


def test_two_pools_talk_in_pairs():
    assert talking(Wish("s", "pairs", (("a",), ("b", "c")))) == [("a", "b"), ("b", "a"), ("a", "c"), ("c", "a")]
    assert _circuits(Wish("s", "pairs", (("a",), ("b", "c")))) == {"s": [(1, 3), (2, 5), (3, 1), (5, 2)]}


def test_one_node_alone_wants_nothing():
    for traffic in ("ring", "mesh", "pairs"):
        assert talking(Wish("s", traffic, (("a",),))) == []


def test_a_node_without_cables_is_left_out():
    assert _circuits(Wish("s", "mesh", (("a", "b", "elsewhere"),))) == {"s": [(1, 3), (2, 4), (3, 1), (4, 2)]}


def test_what_a_slot_has_stays_though_a_newer_one_wants_its_ports():
    first, second = Wish("first", "ring", (("a", "b"),)), Wish("second", "mesh", (("b", "c"),))
    assert _circuits(first, second) == {"first": [(1, 3), (2, 4), (3, 1), (4, 2)], "second": []}


def test_circuits_that_are_there_are_taken_first():
    # ports could also be joined as (1, 3), (2, 4)
    seen = {(1, 4), (2, 3), (3, 2), (4, 1)}
    assert _circuits(Wish("s", "ring", (("a", "b"),)), seen=seen) == {"s": sorted(seen)}


def test_an_ended_slots_circuits_go_only_where_their_ports_are_needed():
    seen = frozenset({(1, 3), (5, 7)})
    assert change(seen, {(1, 5)}) == Change(remove=((1, 3),), add=((1, 5),))
    assert change(seen, {(1, 3)}) == Change()
    assert not change(seen, NONE)


_nodes = st.lists(st.sampled_from("abcdef"), max_size=4, unique=True).map(tuple)
_wishes = st.lists(
    st.builds(lambda traffic, pools: (traffic, tuple(pools)), st.sampled_from(["ring", "mesh", "pairs"]),
              st.lists(_nodes, min_size=1, max_size=2)), max_size=4,
)  # fmt: skip
_seen = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=8)


@given(_wishes, _seen)
def test_no_port_is_in_two_circuits_whatever_is_there_and_wanted(wishes, seen):
    wired = {name: (2 * at + 1, 2 * at + 2) for at, name in enumerate("abcdef")}
    there: dict[int, int] = {}
    for a, b in seen:
        if b not in there.values():
            there.setdefault(a, b)
    before = frozenset(there.items())
    got = wanted([Wish(str(at), *wish) for at, wish in enumerate(wishes)], wired, before)
    target = [circuit for circuits in got.values() for circuit in circuits]
    todo = change(before, target)
    after = (before - set(todo.remove)) | set(todo.add)
    assert set(target) <= after
    assert len({a for a, _ in after}) == len({b for _, b in after}) == len(after)
    assert not change(frozenset(after), target)
