"""What is to be looked at after a fact is said once for each."""

from rollmuxd.core import facts as f
from rollmuxd.core.marks import MARKS


def test_of_every_fact_it_is_said_what_follows() -> None:
    assert set(MARKS) == set(f.KINDS)
