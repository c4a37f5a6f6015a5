"""The channel residency driver: the workload itself loads and parks its state, told over a line that its ranks dial.

The daemon's end of that line is ``/v1/channel``; this driver gives orders into it and makes one verdict of what the
ranks answer. It needs no port, pid or privilege on the workload's side.
"""

from rollmuxd_channel.residency import ChannelResidency, RanksFailed

__all__ = ["ChannelResidency", "RanksFailed"]
