"""The mock backend: hosts without hardware, for the demo, for tests, and to read before writing a backend.

It is also a *witness*: it knows which bytes of which job are on which of its GPUs, writes that down while it
happens (option ``record``), and makes a second job's bytes on a GPU that is not clear a failure that nobody can miss.

:class:`MockBackend` reaches the hosts, :class:`MockResidency` moves states on them.
"""

from rollmuxd_backend_mock.backend import MockBackend
from rollmuxd_backend_mock.machine import DoubleHold, RamOverfull, Violation
from rollmuxd_backend_mock.options import MockOptions
from rollmuxd_backend_mock.residency import MockResidency
from rollmuxd_backend_mock.witness import Witness

__all__ = [
    "DoubleHold",
    "MockBackend",
    "MockOptions",
    "MockResidency",
    "RamOverfull",
    "Violation",
    "Witness",
]
