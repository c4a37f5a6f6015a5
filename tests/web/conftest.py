"""A real daemon under load, and a real browser in front of it.

The load is jobs that go round their cycle over HTTP, on a mock backend, in a process of its own (``load.py``). Where
there is no Chromium, or no playwright, tests of the page are skipped and say so; ``.ci/run`` installs both.
"""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from patience import PATIENCE_S, until

LOAD = Path(__file__).with_name("load.py")
FORWARD = Path(__file__).with_name("forward.py")
#: rollmuxd, with a mock backend whose calls can go wrong
FAULTY = Path(__file__).parents[1] / "shared" / "faulty_mock.py"
#: The shell comes first: it spends half of the processor time, being without the windows and pages of a browser's own.
BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "google-chrome-stable")

CONFIG = """
[daemon]
listen = "127.0.0.1:0"
state_dir = {state}

[lease]
lease_s = 600
heartbeat_s = 60

[limits]
calls_per_s = 0

"""
HOST = """
[[hosts]]
id = "{name}"
backend = "mock"
ram_gb = 512
options = {{ copy_gbps = 40, watch_pids = false, memory = "", faults = {faults} }}
"""
NODE = """
[[hosts.nodes]]
gpus = "{first}-{last}"
pools = ["{pool}"]
gpu_gb = 96
gpu_type = "{kind}"
price_per_gpu_hour = {price}
"""


class Cluster:
    """A daemon with nodes of two GPUs each, eight of them on a host, and whoever works there."""

    until = staticmethod(until)

    def __init__(self, folder: Path, *, rollout: int, train: int, inside: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self._inside = inside
        self.state = folder / "state"
        self.faults = folder / "faults.json"
        self._processes: list[subprocess.Popen[bytes]] = []
        text = CONFIG.format(state=json.dumps(str(self.state)))
        pools = [("rollout", "H20", 1.85)] * rollout + [("train", "H800", 5.28)] * train
        for number, (pool, kind, price) in enumerate(pools):
            host, here = divmod(number, 8)
            if not here:
                text += HOST.format(name=f"h{host + 1}", faults=json.dumps(str(self.faults)))
            text += NODE.format(first=2 * here, last=2 * here + 1, pool=pool, kind=kind, price=price)
        self.config = folder / "rollmux.toml"
        self.config.write_text(text)
        self._env = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
        self._env["HOME"] = str(folder)
        self.daemon = self._start()

    def _run(self, *command: str) -> "subprocess.Popen[bytes]":
        with (self.folder / "stderr.log").open("ab") as log:
            process = forked.Popen(
                [*self._inside, sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._env,
            )
        self._processes.append(process)
        return process

    def _start(self) -> "subprocess.Popen[bytes]":
        process = self._run(str(FAULTY), "daemon", "run", "--config", str(self.config))
        until("the daemon is ready", lambda: self._ready(process))
        return process

    def _ready(self, process: "subprocess.Popen[bytes]") -> bool:
        assert process.poll() is None, (self.folder / "stderr.log").read_text()[-3000:]
        with contextlib.suppress(OSError, ValueError, httpx.TransportError):
            if json.loads((self.state / "daemon.json").read_text())["pid"] == process.pid:
                return self.call("GET", "/readyz").status_code == 200
        return False

    @property
    def url(self) -> str:
        return str(json.loads((self.state / "daemon.json").read_text())["url"])

    @property
    def socket(self) -> Path:
        return self.state / "rollmux.sock"

    def call(self, method: str, path: str, body: Any = None, **params: Any) -> httpx.Response:
        """A call on the Unix socket, where the kernel says that we are the operator."""
        transport = httpx.HTTPTransport(uds=str(self.socket))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=PATIENCE_S) as line:
            return line.request(method, path, json=body, params=params)

    def get(self, path: str, **params: Any) -> Any:
        return self.call("GET", path, **params).json()

    def facts(self) -> list[dict[str, Any]]:
        """All of the journal, however long the load has gone on."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/v1/facts", after=found[-1]["seq"] if found else 0, limit=10_000)
            found += page["facts"]
            if not page["facts"]:
                return found

    def key(self, role: str = "admin", owner: str = "team", user: str = "someone") -> str:
        body = {"owner": owner, "user": user, "role": role}
        return str(self.call("POST", "/v1/keys", body).json()["secret"])

    def load(self, jobs: int, *more: str) -> "subprocess.Popen[bytes]":
        """Jobs that go round their cycles, until all is closed."""
        there = len(self.get("/v1/jobs", limit=1000)["items"])
        process = self._run(str(LOAD), str(self.socket), str(jobs), *more)
        until(f"{jobs} jobs are there", lambda: len(self.get("/v1/jobs", limit=1000)["items"]) >= there + jobs)
        return process

    @contextlib.contextmanager
    def forwarded(self) -> Iterator[int]:
        """A port that leads to the Unix socket, as ``ssh -L PORT:SOCKET`` makes one."""
        command = [*self._inside, sys.executable, str(FORWARD), str(self.socket)]
        with forked.Popen(command, stdout=subprocess.PIPE, env=self._env) as process:
            assert process.stdout is not None
            try:
                yield int(process.stdout.readline())
            finally:
                process.kill()

    def restart(self) -> None:
        """kill -9, and another one on the same port."""
        port = self.url.rpartition(":")[2]
        self.daemon.kill()
        self.daemon.wait()
        self.config.write_text(self.config.read_text().replace('"127.0.0.1:0"', f'"127.0.0.1:{port}"'))
        self.daemon = self._start()

    def close(self) -> None:
        for process in reversed(self._processes):
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def inside() -> Iterator[tuple[str, ...]]:
    """What to put before a command to run it in a network of these tests' own; nothing where none can be made.

    Chromium drops all that it is reading whenever an address of its machine comes or goes (``ERR_NETWORK_CHANGED``),
    and tests beside these ones make and cut links.
    """
    name = f"rollmux-web-{os.getpid()}"
    made = os.geteuid() == 0 and shutil.which("ip") is not None and _ip("netns", "add", name)
    try:
        yield ("ip", "netns", "exec", name) if made and _ip("-n", name, "link", "set", "lo", "up") else ()
    finally:
        if made:
            _ip("netns", "delete", name)


def _ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@pytest.fixture(scope="module")
def browser(inside: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A Chromium. Of a module and not of the session: while it is there its loop runs, and no other can."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not there: pip install playwright")
    path = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip("no Chromium is there (apt-get install chromium): the page is not looked at")
    program = tmp_path_factory.mktemp("browser") / "chromium"
    program.write_text(f'#!/bin/sh\nexec {shlex.join((*inside, path))} "$@"\n')
    program.chmod(0o755)
    with sync_api.sync_playwright() as playwright:
        # As root, which containers run as, Chromium's own sandbox does not work.
        made = playwright.chromium.launch(
            executable_path=program, args=["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
        )
        yield made
        made.close()


@pytest.fixture(scope="module")
def cluster(inside: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Four nodes of each pool, and twelve jobs under load."""
    made = Cluster(tmp_path_factory.mktemp("web"), rollout=4, train=4, inside=inside)
    try:
        made.load(12)
        yield made
    finally:
        made.close()
