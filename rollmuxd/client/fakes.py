"""What a fake daemon takes the place of. While :mod:`rollmuxd.testing` sets one here, jobs of this process use it."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rollmuxd.testing import FakeDaemon

#: set by ``rollmuxd.testing.fake_daemon()`` only
current: "FakeDaemon | None" = None


def scaled(seconds: float) -> float:
    """Return how long to pause: a test of a user's loop should not have to wait for our back-off."""
    return seconds if current is None else seconds * current.haste
