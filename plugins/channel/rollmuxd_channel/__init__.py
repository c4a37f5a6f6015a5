"""The channel residency driver: the workload itself loads and parks its state, told over a line that its ranks dial.

The daemon's end of that line is ``/v1/channel``; this driver gives orders into it and makes one verdict of what the
ranks answer. It needs no port, pid or privilege on the workload's side. What a workload imports from here is
:mod:`rollmuxd_channel.torch_state`; the driver itself is loaded in the daemon only.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmuxd_channel.residency import ChannelResidency, RanksFailed

__all__ = ["ChannelResidency", "RanksFailed"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rollmuxd_channel import residency

        return getattr(residency, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
