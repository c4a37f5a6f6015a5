"""What the author of a backend, residency driver or policy imports; everything else of ours may change.

A **backend** knows how to *reach* a host. A **residency driver** knows how to *move* one job's state there, and uses
whatever backend reaches the host. A **policy** decides which jobs share which nodes. Each is found by an entry point
(``rollmuxd.backends``, ``rollmuxd.residency``, ``rollmuxd.policies``), and each has a suite in
:mod:`rollmuxd.spi.contract` that it must pass. Ours have no privileges over a stranger's.
"""

from rollmuxd.core.config import DriverTraits
from rollmuxd.core.ids import GpuId, HostId, JobId, LaunchId, NodeId
from rollmuxd.core.inputs import GpuObservation
from rollmuxd.core.model import OrderKind
from rollmuxd.core.spec import OptionValue, StateSpec
from rollmuxd.spi.backend import (
    Backend,
    ChecksHosts,
    EndsSometime,
    ExchangesBytes,
    Finding,
    FindsHosts,
    FoundHost,
    GpuInfo,
    HostConfig,
    HostEnd,
    Inventory,
    Observation,
    Output,
    Process,
    ProcessOrder,
    Ran,
    RunsCommands,
    StartsProcesses,
    exchanges_bytes,
    runs_commands,
)
from rollmuxd.spi.errors import ContactLost, NotDone, NotInstalled, PluginError
from rollmuxd.spi.fabric import Circuit, FabricController, FabricOrder, Ports
from rollmuxd.spi.residency import (
    Channel,
    ChannelCommand,
    Probed,
    RankResult,
    Residency,
    StateOrder,
    TakesOptions,
)

__all__ = [
    "Backend",
    "Channel",
    "ChannelCommand",
    "ChecksHosts",
    "Circuit",
    "ContactLost",
    "DriverTraits",
    "EndsSometime",
    "ExchangesBytes",
    "FabricController",
    "FabricOrder",
    "Finding",
    "FindsHosts",
    "FoundHost",
    "GpuId",
    "GpuInfo",
    "GpuObservation",
    "HostConfig",
    "HostEnd",
    "HostId",
    "Inventory",
    "JobId",
    "LaunchId",
    "NodeId",
    "NotDone",
    "NotInstalled",
    "Observation",
    "OptionValue",
    "OrderKind",
    "Output",
    "PluginError",
    "Ports",
    "Probed",
    "Process",
    "ProcessOrder",
    "Ran",
    "RankResult",
    "Residency",
    "RunsCommands",
    "StartsProcesses",
    "StateOrder",
    "StateSpec",
    "TakesOptions",
    "exchanges_bytes",
    "runs_commands",
]
