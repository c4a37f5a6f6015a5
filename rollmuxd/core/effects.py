"""What must be done: orders to residency drivers and questions to backends.

Effects are performed in order, after the facts of the same decision are durable. Each order ends in exactly one
input: :class:`~rollmuxd.core.inputs.OrderDone`, ``OrderFailed`` or ``OrderLostContact``. A question ends in
``HostSeen`` or ``HostUnreachable``.
"""

from typing import TypeAlias

from msgspec import Struct

from rollmuxd.core.model import HostId, JobId, OrderId, SessionId


class Perform(Struct, frozen=True):
    """Tell the driver the order (its particulars are in ``State.orders``), then look at its GPUs.

    ``again`` says that it was told before (a restart): only for drivers that are idempotent.
    """

    order: OrderId
    again: bool = False


class Probe(Struct, frozen=True):
    """Ask the driver what became of an order. Ends like the order itself."""

    order: OrderId


class Observe(Struct, frozen=True):
    """Look at a host's GPUs now."""

    host: HostId


class Kill(Struct, frozen=True):
    """End the processes of a lost job, where the backend owns them."""

    job: JobId
    run: int
    session: SessionId | None


Effect: TypeAlias = Perform | Probe | Observe | Kill
