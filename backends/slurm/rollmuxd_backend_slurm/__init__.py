"""The slurm backend: hosts are the nodes of a Slurm allocation, each reached by one kept step.

:class:`SlurmBackend` is the backend; :class:`~rollmuxd_backend_slurm.line.Line` keeps the step of one node.
"""

from rollmuxd_backend_slurm.backend import SlurmBackend
from rollmuxd_backend_slurm.options import SlurmOptions

__all__ = ["SlurmBackend", "SlurmOptions"]
