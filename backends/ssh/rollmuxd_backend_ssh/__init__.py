"""The ssh backend: hosts that are reached over SSH, on which nothing is installed but Python.

:class:`SshBackend` is the backend; :class:`~rollmuxd_backend_ssh.connection.HostConnection` keeps one host connected.
"""

from rollmuxd_backend_ssh.backend import SshBackend
from rollmuxd_backend_ssh.options import SshOptions

__all__ = ["SshBackend", "SshOptions"]
