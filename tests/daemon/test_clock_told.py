"""A daemon whose time is in doubt says so: in its log, in ``daemon.json``, and to who starts it or asks how it is."""

import json
import subprocess
import sys
import time

import anyio
import pytest
import structlog
from patience import PATIENCE_S

from rollmuxd.core.facts import HostAdded
from rollmuxd.core.inputs import HostSpec
from rollmuxd.daemon import app
from rollmuxd.daemon.journal import Journal

pytestmark = pytest.mark.asyncio
NOW = int(time.time() * 1000)
DAY = 86_400_000


async def begin(state_dir, at):
    journal = Journal.open(state_dir)
    await journal.append([(1, HostAdded(at, HostSpec("h1", "gone", 0)))])
    await journal.close()


def typed(tmp_path, *words):
    words = [sys.executable, "-m", "rollmuxd", "daemon", *words, "--config", tmp_path / "rollmux.toml"]
    return subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S).stdout


@pytest.mark.e2e
@pytest.mark.parametrize(
    ("days", "said"),
    [(1461, "1461 days ahead of this machine's clock"), (-1461, "began 1461 days after its last fact"), (0, "")],
)
async def test_who_starts_a_daemon_or_asks_how_it_is_is_told(tmp_path, days, said):
    await begin(tmp_path / "state", NOW + days * DAY)
    (tmp_path / "rollmux.toml").write_text(f'[daemon]\nstate_dir = "{tmp_path}/state"\nlisten = ""\n')
    try:
        for words in (["start"], ["status"], ["status", "--json"]):
            told = await anyio.to_thread.run_sync(typed, tmp_path, *words)
            assert "ready" in told
            assert (said in told) if said else ("clock" not in told)
        log = (tmp_path / "state" / "daemon.log").read_text()
        assert ("clock_in_doubt" in log) is bool(said)
    finally:
        await anyio.to_thread.run_sync(typed, tmp_path, "stop")


async def test_it_is_said_again_every_hour_and_when_it_is_over(tmp_path, monkeypatch):
    path, said = tmp_path / "daemon.json", ["3 days ahead"]
    path.write_text('{"pid": 17, "started": "5", "url": null, "socket": "/x", "fingerprint": "new"}')
    monkeypatch.setattr(app, "CLOCK_EVERY_S", 0.01)
    with structlog.testing.capture_logs() as logs:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(app.watch_clock, lambda: said[0], path)
            while len(logs) < 2:
                await anyio.sleep(0.01)
            assert json.loads(path.read_text()) == {
                "pid": 17, "started": "5", "url": None, "socket": "/x", "fingerprint": "new", "clock": "3 days ahead",
            }  # fmt: skip
            said[0] = ""
            with anyio.fail_after(PATIENCE_S):
                while "clock" in json.loads(path.read_text()):
                    await anyio.sleep(0.01)
            count = len(logs)
            path.unlink()  # it stops: nothing is left behind, and nothing falls over
            await anyio.sleep(0.05)
            tasks.cancel_scope.cancel()
    assert {entry["event"] for entry in logs} == {"clock_in_doubt"}
    assert len(logs) == count
    assert not path.exists()
