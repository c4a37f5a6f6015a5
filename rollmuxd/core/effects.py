"""What must be done: orders to residency drivers and questions to backends.

Effects are performed in order, after the facts of the same decision are durable. Each order ends in exactly one
input: :class:`~rollmuxd.core.inputs.OrderDone`, ``OrderFailed`` or ``OrderLostContact``; one that was asked about, in
``OrderNotBegun`` too. A look ends in ``HostObserved``.
"""

from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.ids import HostId, JobId, LaunchId, OrderId, SessionId


class Perform(Struct, frozen=True):
    """Tell the driver the order (its particulars are in ``State.orders``), then look at its GPUs.

    ``again`` says that it was sent before (a restart): only for drivers that are idempotent, and orders not begun.
    """

    order: OrderId
    again: bool = False


class Probe(Struct, frozen=True):
    """Ask the driver what became of an order. Ends like the order itself."""

    order: OrderId


class Observe(Struct, frozen=True):
    """Look at a host's GPUs now."""

    host: HostId


class Launch(Struct, frozen=True):
    """Start a job's process (its particulars are in ``State.jobs``): once, however often this is sent.

    Ends in one input: ``Launched``.
    """

    job: JobId
    launch: LaunchId


class Kill(Struct, frozen=True):
    """End the processes of a job that is lost, ended or started again, where the backend owns them."""

    job: JobId
    run: int
    session: SessionId | None
    #: the process that a backend started for it, and on which host
    launch: LaunchId = ""
    host: HostId = ""


Effect: TypeAlias = Perform | Probe | Observe | Launch | Kill
