"""The seam for :mod:`rollmuxd.testing`: while a fake daemon is set here, jobs of this process use it."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollmuxd.client.pulse import Listener, Pulse


class Fake(Protocol):
    """What a fake daemon provides."""

    #: by how much pauses between tries are shortened
    haste: float

    @property
    def transport(self) -> Any:
        """An httpx transport, for sync and async."""
        ...

    def pulse(self, listener: "Listener") -> "Pulse":
        """Take the place of the heartbeat process."""
        ...


#: set by ``rollmuxd.testing.fake_daemon()`` and nobody else
current: Fake | None = None


def scaled(seconds: float) -> float:
    """Return how long to pause: a test of a user's loop should not have to wait for our back-off."""
    return seconds if current is None else seconds * current.haste
