"""Commands that backends run on the daemon's own machine."""

import pytest

from rollmuxd.spi import here


@pytest.mark.asyncio
async def test_a_command_does_not_hear_where_the_daemon_tells_systemd_how_it_is(monkeypatch):
    monkeypatch.setenv("NOTIFY_SOCKET", "/run/systemd/notify")
    monkeypatch.setenv("WATCHDOG_USEC", "60000000")
    monkeypatch.setenv("KEPT", "is kept")
    ran = await here.run(("sh", "-c", 'printf %s "[$NOTIFY_SOCKET$WATCHDOG_USEC] $KEPT $GIVEN"'), env={"GIVEN": "too"})
    assert ran.stdout == b"[] is kept too"
