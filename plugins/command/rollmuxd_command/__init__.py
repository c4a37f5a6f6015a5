"""The command residency driver: states are moved by argument vectors of the user's own, run on their host.

For what no other driver knows how to move. What the exit codes mean is in :mod:`rollmuxd_command.residency`.
"""

from rollmuxd_command.residency import CommandResidency

__all__ = ["CommandResidency"]
