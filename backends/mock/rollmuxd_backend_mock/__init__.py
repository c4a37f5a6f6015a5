"""The mock backend: hosts without hardware, for the demo, for tests, and to read before writing a backend.

It is also a *witness*: it knows which bytes of which job are on which of its GPUs, and writes that down (option
``record``). A second job's bytes on a GPU that is not clean are a failure that is always noticed.

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
