"""Hosts that are reached through a process there, with which the daemon speaks over one kept stream of bytes.

:class:`Reached` is the part of a backend that looks, runs commands and exchanges bytes that way, over an
:class:`AgentConnection`. Which process opens the stream is the backend's business. ``ray`` has a member in the
cluster. ``ssh`` and ``slurm`` send its program to a Python on the node (:class:`SentAgent`).
"""

from rollmuxd_backend_local.agent.connection import AgentConnection
from rollmuxd_backend_local.agent.reached import Reached
from rollmuxd_backend_local.agent.sent import SentAgent

__all__ = ["AgentConnection", "Reached", "SentAgent"]
