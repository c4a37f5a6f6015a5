"""Which policy has which colour: the same in every report, legible on white and on black, never by colour alone."""

from typing import Final, NamedTuple
from zlib import crc32


class Look(NamedTuple):
    """A colour, and how a line of it is broken."""

    colour: str
    dash: tuple[float, ...] = ()


_DASHES: Final = ((), (5.0, 1.5), (1.5, 1.5), (6.0, 1.5, 1.5, 1.5), (8.0, 2.0, 3.0, 2.0))

POLICIES: Final[dict[str, Look]] = {
    "default": Look("#1c93a8", _DASHES[1]),
    "rollmux": Look("#2f7fd6"),
    "rollmux-artifact": Look("#8266d4", _DASHES[3]),
    "solo": Look("#7f858c"),
    "colocated": Look("#c76a12", _DASHES[1]),
    "gavel": Look("#2b9a57", _DASHES[3]),
    "random": Look("#d4505b", _DASHES[2]),
    "most-idle": Look("#a5822a", _DASHES[2]),
    "optimal": Look("#c64fb4", _DASHES[4]),
}
_OTHERS: Final = ("#4f8f2f", "#b0568a", "#5a7fb0", "#b35c43", "#3d9488", "#8d7a3c", "#7a6fc0", "#a06a4a")


def of_policy(name: str) -> Look:
    """The policy's own look; of one that we do not know, by its name."""
    known = POLICIES.get(name)
    if known is not None:
        return known
    number = crc32(name.encode())
    return Look(_OTHERS[number % len(_OTHERS)], _DASHES[number // len(_OTHERS) % len(_DASHES)])
