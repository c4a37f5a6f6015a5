"""Ids and log-probabilities: four and eight bytes a token, where Python's lists take five times as much."""

from array import array
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    Ids: TypeAlias = array[int]
    Floats: TypeAlias = array[float]
else:  # Python 3.11 has no array[int] at run time
    Ids = Floats = array


def no_ids() -> Ids:
    """Empty, for 32-bit ids."""
    return array("i")


def no_floats() -> Floats:
    """Empty, for doubles."""
    return array("d")
