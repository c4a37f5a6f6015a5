"""A daemon with its documented defaults, and real client processes that share its make-believe nodes."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import httpx
from figures import Json
from live import HERE, Daemon, clean_environment

Phases: TypeAlias = Sequence[tuple[str, float]]
#: what happens at some time happens by then, however slow the machine is
LIMIT_S: Final = 300.0

CONFIG: Final = """
[daemon]
listen = "127.0.0.1:0"
state_dir = {state}
"""

HOST: Final = """
[[hosts]]
id = "{id}"
backend = "mock"
ram_gb = 512
options = {{ copy_gbps = {copy_gbps} }}

[[hosts.nodes]]
gpus = "0-7"
pools = ["{pool}"]
gpu_gb = 80
"""


class Pairs(Daemon):
    """A daemon with so many nodes of each of two pools, eight GPUs each; what it is not told here is by default."""

    def __init__(self, folder: Path, pairs: int, *, copy_gbps: float = 20.0) -> None:
        super().__init__(folder, [])
        hosts = [(f"{pool}{number}", pool) for pool in ("rollout", "train") for number in range(pairs)]
        text = CONFIG.format(state=json.dumps(str(self.state)))
        self.config.write_text(
            text + "".join(HOST.format(id=name, pool=pool, copy_gbps=copy_gbps) for name, pool in hosts)
        )


class Sharer:
    """A client process: see ``sharer.py``."""

    def __init__(self, daemon: Daemon, phases: Phases, job: Mapping[str, Any]) -> None:
        self.name = job["name"]
        self._log = (daemon.folder / f"{self.name}.log").open("wb")
        self._process = subprocess.Popen(
            [sys.executable, str(HERE / "sharer.py"), json.dumps({"job": job, "phases": list(phases)})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**clean_environment(daemon.folder), "ROLLMUX_URL": f"unix://{daemon.socket}", "ROLLMUX_REQUIRED": "1"},
        )

        if self._process.stdout is None or self._process.stdout.readline() != b"ready\n":
            raise RuntimeError(f"job {self.name} did not start:\n{Path(self._log.name).read_text()[-2_000:]}")

    def begin(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()

    def end(self) -> list[float]:
        """Let it end after its iteration; returns the clock at its beginning and after each iteration."""
        said, _ = self._process.communicate(timeout=LIMIT_S)
        if self._process.returncode:
            raise RuntimeError(f"job {self.name} failed:\n{Path(self._log.name).read_text()[-2_000:]}")
        return [float(line) for line in said.split()]

    def close(self) -> None:
        """End it at once."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@contextmanager
def sharers(daemon: Daemon, jobs: Sequence[tuple[Phases, dict[str, Any]]]) -> Iterator[list[Sharer]]:
    """These jobs: each registers in its turn, and they begin when all of them have."""
    with ExitStack() as stack:
        made = []
        for phases, job in jobs:
            made.append(Sharer(daemon, phases, job))
            stack.callback(made[-1].close)
        for one in made:
            one.begin()
        yield made


def jobs(daemon: Daemon) -> list[Json]:
    """What the daemon says of its jobs."""
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.socket)), base_url="http://rollmuxd") as client:
        found: list[Json] = client.get("/v1/jobs").raise_for_status().json()["items"]
        return found


def until(so: Callable[[], bool], what: str) -> None:
    """Wait for something to be so."""
    late = time.monotonic() + LIMIT_S
    while not so():
        if time.monotonic() > late:
            raise TimeoutError(f"after {LIMIT_S:.0f} s it is not so that {what}")
        time.sleep(0.1)
