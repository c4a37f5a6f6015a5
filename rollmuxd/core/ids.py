"""Ids, times and fences: the small types that everything in the core shares."""

from typing import NamedTuple, TypeAlias

Millis: TypeAlias = int
HostId: TypeAlias = str
NodeId: TypeAlias = str  #: printed ``host1/gpu0-3``
GpuId: TypeAlias = str  #: printed ``host1/gpu0``
PoolName: TypeAlias = str
JobId: TypeAlias = str
SessionId: TypeAlias = str
SlotId: TypeAlias = str
GroupId: TypeAlias = str
OrderId: TypeAlias = str
LaunchId: TypeAlias = str


class Fence(NamedTuple):
    """A fencing number: it only grows. Each start of the daemon begins a new incarnation."""

    incarnation: int
    number: int
