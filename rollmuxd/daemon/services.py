"""What the parts of a running daemon are, for those that need several of them: the HTTP layer above all.

Made by :mod:`rollmuxd.daemon.app`, and by tests, which put doubles in.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rollmuxd.daemon.clock import SystemClock
from rollmuxd.daemon.hosts.actuator import Actuator
from rollmuxd.daemon.hosts.channel import ChannelHub
from rollmuxd.daemon.hosts.circuits import Switch
from rollmuxd.daemon.journal.store import Journal
from rollmuxd.daemon.settings import Settings
from rollmuxd.daemon.usage.daily import LiveUsage
from rollmuxd.daemon.writer import Writer
from rollmuxd.spi import Residency


@dataclass(frozen=True, slots=True)
class Services:
    """The parts of one running daemon."""

    #: the one writer: inputs go to ``submit``, questions to ``read``
    writer: Writer
    #: ``await actuator.observe(host, gpus)``: what the backend sees now, for a release or a shrink
    actuator: Actuator
    #: API keys live here too: ``add_key``, ``list_keys``, ``revoke_key``
    journal: Journal
    settings: Settings
    #: the workload's ranks: ``dial``, ``next_order``, ``result``
    hub: ChannelHub
    clock: SystemClock
    #: the usage of days, which tends the journal
    today: LiveUsage
    #: residency drivers by name: asked what they say to a job's states before it is registered
    drivers: Mapping[str, Residency] = field(default_factory=dict)
    #: optical switches by name
    switches: Mapping[str, Switch] = field(default_factory=dict)
