"""What a fake daemon takes the place of. While :mod:`rollmuxd.testing` sets one here, jobs of this process use it."""

from typing import Any, Protocol

from rollmuxd.wire.answers import Directive, SessionView


class Listener(Protocol):
    """Hears what the heartbeat hears. Called in a thread of its own; must not raise."""

    def directed(self, directives: list[Directive]) -> None:
        """What the daemon asks now: all of it, so that a directive that is not there is over."""
        ...

    def session_refused(self, status: int, detail: str) -> None:
        """A heartbeat was refused (404, 409, 410); others follow."""
        ...

    def troubled(self, text: str) -> None:
        """Say that the daemon is away, or back."""
        ...


class Heartbeat(Protocol):
    """Keeps the session alive."""

    def session(self, view: SessionView) -> None:
        """Beat for this session."""
        ...

    def slot(self, slot: str | None) -> None:
        """Report for this slot from now on; its progress starts at 0."""
        ...

    def progress(self, done: int, total: int) -> None:
        """Go out with the next beat."""
        ...

    def stop(self) -> None:
        """End. Takes :data:`~rollmuxd.client.heartbeat.STOP_S` at most."""
        ...


class Fake(Protocol):
    """What a fake daemon provides."""

    #: by how much pauses between tries are shortened
    haste: float

    @property
    def transport(self) -> Any:
        """An httpx transport, for sync and async."""
        ...

    def heartbeat(self, listener: Listener) -> Heartbeat:
        """Take the place of the heartbeat process."""
        ...


#: set by ``rollmuxd.testing.fake_daemon()`` only
current: Fake | None = None


def scaled(seconds: float) -> float:
    """Return how long to pause: a test of a user's loop should not have to wait for our back-off."""
    return seconds if current is None else seconds * current.haste
