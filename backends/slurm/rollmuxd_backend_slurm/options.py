"""The options of a host that is a node of an allocation: ``[hosts.options]``, with ``[backends.slurm]`` as defaults."""

from typing import Annotated

from msgspec import Meta

from rollmuxd_backend_local.agent.reached import ReachedOptions


class SlurmOptions(ReachedOptions, frozen=True, kw_only=True):
    """What can be said of a host. Everything runs as the owner of the allocation."""

    #: the allocation's number, of several components the first one's; empty: ``SLURM_JOB_ID`` of the daemon
    allocation: Annotated[str, Meta(pattern=r"^[0-9]*$")] | Annotated[int, Meta(ge=1)] = ""
    #: which component of a heterogeneous allocation the node is in; there, every host needs it, also 0
    component: Annotated[int, Meta(ge=0, le=127)] | None = None
    #: the node's name in Slurm; empty: the host's id
    node: str = ""
    #: the cluster's ``slurm.conf``; empty: where Slurm's commands find it
    conf: str = ""
    #: more options for each ``srun``, where a site needs them
    srun: tuple[str, ...] = ()
    #: a Python of the node, 3.8 or newer
    python: str = "python3"
    #: seconds that a step may take to be there
    connect_s: Annotated[float, Meta(gt=0, le=600)] = 15.0
    #: nothing new begins on the node in so many seconds before the allocation ends
    drain_before_s: Annotated[float, Meta(ge=0, le=86_400)] = 600.0
    #: a step that hears nothing from the daemon for so long ends itself, when its commands have ended
    silent_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0
