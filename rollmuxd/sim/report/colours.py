"""Which policy of rollouts has which colour: legible on white and on black, and never told by the colour alone."""

from typing import Final, NamedTuple
from zlib import crc32


class Look(NamedTuple):
    """A colour, and how a line of it is broken."""

    colour: str
    dash: tuple[float, ...] = ()


_DASHES: Final = ((), (5.0, 1.5), (1.5, 1.5), (6.0, 1.5, 1.5, 1.5), (8.0, 2.0, 3.0, 2.0))

_COLOURS: Final = ("#4f8f2f", "#b0568a", "#5a7fb0", "#b35c43", "#3d9488", "#8d7a3c", "#7a6fc0", "#a06a4a")


def of_policy(name: str) -> Look:
    """The policy's own look, by its name."""
    number = crc32(name.encode())
    return Look(_COLOURS[number % len(_COLOURS)], _DASHES[number // len(_COLOURS) % len(_DASHES)])
