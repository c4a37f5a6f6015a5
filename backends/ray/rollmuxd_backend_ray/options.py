"""The options of a host that is a node of a Ray cluster: ``[hosts.options]``, with ``[backends.ray]`` as defaults."""

from typing import Annotated

from msgspec import Meta, field

from rollmuxd_backend_local.agent.reached import ReachedOptions


class RayOptions(ReachedOptions, frozen=True, kw_only=True):
    """What can be said of a host. Which node it is, all of ``node``, ``labels`` and ``resources`` say together."""

    #: the cluster, as for ``ray.init``: ``10.0.0.1:6379`` or ``auto`` where a node of it runs on the daemon's machine,
    #: else ``ray://10.0.0.1:10001``
    address: str = "auto"
    #: the node's name (``ray start --node-name``), host name or address; not given: the host's id, or whatever
    #: ``labels`` and ``resources`` say
    node: str = ""
    #: labels that it has (``ray start --labels``)
    labels: dict[str, str] = field(default_factory=dict)
    #: resources that it has at least so much of (``ray start --resources``)
    resources: dict[str, Annotated[float, Meta(gt=0)]] = field(default_factory=dict)
    #: seconds that joining the cluster may take
    connect_s: Annotated[float, Meta(gt=0, le=600)] = 30.0
    #: seconds that reaching the node may take: that its actor is there, that an address answers
    reach_s: Annotated[float, Meta(gt=0, le=600)] = 7.0
