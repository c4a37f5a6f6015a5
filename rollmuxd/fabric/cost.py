"""What fabrics cost: the bill of materials that each counts of itself (:meth:`.topology.Fabric.bill`), times prices.

Prices are the caller's, with source and date. The outcome is held to the published column (OrchestrRL, arXiv
2601.01209, as reported). The paper's own price list was not found.
"""

from msgspec import Struct

from rollmuxd.fabric.topology import Bill


class Prices(Struct, frozen=True, forbid_unknown_fields=True):
    """Dollars each, of one generation of links.

    Raises ValueError for a price that is not above 0.
    """

    transceiver: float
    electrical_port: float
    optical_port: float
    patch_port: float
    source: str
    #: when it was read, ``2025-12``
    date: str
    #: whether the source was read, or a figure was recalled
    verified: bool = False

    def __post_init__(self) -> None:
        for name in ("transceiver", "electrical_port", "optical_port", "patch_port"):
            if not 0 < getattr(self, name) < 1e9:
                raise ValueError(f"{name} = {getattr(self, name):g}: a price in dollars, above 0")


def dollars(of: Bill, prices: Prices) -> float:
    """Return what the things of a bill cost."""
    return (
        of.electrical_ports * prices.electrical_port
        + of.transceivers * prices.transceiver
        + of.optical_ports * prices.optical_port
        + of.patch_ports * prices.patch_port
    )
