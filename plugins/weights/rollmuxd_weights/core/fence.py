"""Which version of a job's weights is newer.

A version has a unique identity: the run, the fence of the slot that it was made in, and the number of the optimizer
step. Files and addresses bear the whole identity, so bytes of two versions cannot meet under one name.
"""

import re
from typing import NamedTuple

_TEXT = re.compile(r"(\d{1,16})\.(\d{1,16})\.(\d{1,16})\.(\d{1,16})")
_FENCE = re.compile(r"(\d{1,16})\.(\d{1,16})")


class Identity(NamedTuple):
    """Later is newer, compared in this order: an older fence is older, whatever its step."""

    run: int
    incarnation: int
    number: int
    version: int

    def __str__(self) -> str:
        return ".".join(map(str, self))


def parse(text: str) -> Identity:
    """Read an identity as ``0.1.17.42``. Raises ValueError for anything else."""
    found = _TEXT.fullmatch(text)
    if found is None:
        raise ValueError(f"{text[:80]!r} is no identity of weights; it is RUN.INCARNATION.NUMBER.VERSION: 0.1.17.42")
    return Identity(*map(int, found.groups()))


def identity(version: int, *, fence: str | None, run: int) -> Identity:
    """Return the identity of a version. ``fence``: the slot's, as ``1.17``; None where there is no daemon.

    Raises ValueError for numbers below 0, and for a fence of another form.
    """
    text: object = fence or "0.0"
    found = _FENCE.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ValueError(f"fence={fence!r}: it is the fence of a slot, such as '1.17' (slot.fence), or None")
    return parse(f"{run}.{found[1]}.{found[2]}.{version}")
