"""The local backend: the machine that the daemon runs on, its GPUs by NVML, its processes.

:class:`LocalBackend` is the backend. What it asks the machine is in :mod:`rollmuxd_backend_local.onhost`, which other
backends send to theirs (:class:`Asking`, :mod:`rollmuxd_backend_local.payload`).
"""

from rollmuxd_backend_local.asking import Asking
from rollmuxd_backend_local.backend import LocalBackend
from rollmuxd_backend_local.options import HostOptions

__all__ = ["Asking", "HostOptions", "LocalBackend"]
