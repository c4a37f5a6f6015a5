"""Hosts that are reached through a process there, with which the daemon speaks over one kept stream of bytes.

:class:`Reached` is the part of a backend that looks, runs commands and opens connections that way, over an
:class:`AgentConnection`. Which process opens the stream is the backend's business. ``ray`` has a member in the
cluster. ``ssh`` and ``slurm`` send its program to a Python on the node (:class:`SentAgent`).
"""

from rollmuxd_backend_local.agent.connection import AgentConnection
from rollmuxd_backend_local.agent.reached import Reached
from rollmuxd_backend_local.agent.sent import SentAgent
from rollmuxd_backend_local.agent.stream import NodeStream

__all__ = ["AgentConnection", "NodeStream", "Reached", "SentAgent"]
