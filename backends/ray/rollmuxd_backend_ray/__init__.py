"""The ray backend: hosts that are nodes of a Ray cluster, each reached through an actor that is pinned to it.

:class:`RayBackend` is the backend. Ray itself is never imported by the daemon: a process of its own
(:mod:`rollmuxd_backend_ray.cluster_member`) is the member of the cluster.
:class:`~rollmuxd_backend_ray.connection.ClusterConnection` is the kept connection to it.
"""

from rollmuxd_backend_ray.backend import RayBackend
from rollmuxd_backend_ray.options import RayOptions

__all__ = ["RayBackend", "RayOptions"]
