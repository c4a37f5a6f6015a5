"""Commands that the local backend runs: of the daemon's own they have little."""

import os
from pathlib import Path

import pytest

from rollmuxd.spi import HostConfig, NotDone
from rollmuxd_backend_local import LocalBackend

SECRETS = ("AWS_SECRET_ACCESS_KEY", "OTEL_EXPORTER_OTLP_HEADERS", "ROLLMUX_API_KEY", "NOTIFY_SOCKET", "WATCHDOG_USEC")


@pytest.fixture
def oom_score():
    """A score of this process that is not the usual one."""
    score = Path("/proc/self/oom_score_adj")
    before = score.read_text()
    score.write_text(str(max(int(before), 300)))
    yield
    score.write_text(before)


@pytest.mark.asyncio
async def test_a_command_has_of_the_daemons_environment_only_what_it_needs(monkeypatch):
    for name in SECRETS:
        monkeypatch.setenv(name, "s3cret")
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    here = await LocalBackend.open([HostConfig(id="box")], {})
    ran = await here.run("box", ("env",), env={"GIVEN": "too"})
    told = dict(line.split("=", 1) for line in ran.stdout.decode().splitlines())
    assert "s3cret" not in told.values()
    assert told.items() >= {"NCCL_IB_HCA": "mlx5", "GIVEN": "too", "PATH": os.environ["PATH"]}.items()


@pytest.mark.usefixtures("oom_score")
@pytest.mark.asyncio
async def test_a_command_does_not_have_the_daemons_place_when_memory_is_short():
    here = await LocalBackend.open([HostConfig(id="box")], {})
    ran = await here.run("box", ("sh", "-c", "cat /proc/self/oom_score_adj; echo $0 $1; exit 3", "a b", "$HOME"))
    assert (ran.exit_code, ran.stdout) == (3, b"0\na b $HOME\n")
    with pytest.raises(NotDone, match="there is no such program"):
        await here.run("box", ("no-such-program",))
