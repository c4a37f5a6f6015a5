"""What is to be looked at after a fact is said once for each, in one of two tables."""

from rollmuxd.core import facts as f
from rollmuxd.core.marks import MARKS, NOTHING_FOLLOWS


def test_every_fact_marks_something_or_is_known_to_be_followed_by_nothing() -> None:
    marked = set(MARKS)
    assert not marked & NOTHING_FOLLOWS
    assert marked | NOTHING_FOLLOWS == set(f.KINDS)
