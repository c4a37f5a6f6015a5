"""What a fake daemon takes the place of. While :mod:`rollmuxd.testing` sets one here, jobs of this process use it."""

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from rollmuxd.client.heartbeat import HeartbeatProcess
    from rollmuxd.client.runtime import HeartbeatListener


class Fake(Protocol):
    """What a fake daemon provides."""

    #: by how much pauses between tries are shortened
    haste: float

    @property
    def transport(self) -> Any:
        """An httpx transport, for sync and async."""
        ...

    def heartbeat(self, listener: "HeartbeatListener") -> "HeartbeatProcess":
        """Take the place of the heartbeat process."""
        ...


#: set by ``rollmuxd.testing.fake_daemon()`` only
current: Fake | None = None


def scaled(seconds: float) -> float:
    """Return how long to pause: a test of a user's loop should not have to wait for our back-off."""
    return seconds if current is None else seconds * current.haste
