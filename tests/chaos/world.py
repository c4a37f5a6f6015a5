"""The processes of a storm: a daemon on mock hosts, and clients. What is started is ended by :meth:`World.close`."""

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

HERE = Path(__file__).parent
#: where the mock backend with faults is: for the storm, which is a program, and for its daemon
SHARED = HERE.parent / "shared"
sys.path.append(str(SHARED))
import forked  # noqa: E402

LEASE_S, HEARTBEAT_S = 5.0, 0.8

CONFIG = """
[daemon]
listen = ""
state_dir = {state}
shutdown_s = 5

[lease]
lease_s = {lease_s}
heartbeat_s = {heartbeat_s}
reattach_s = 30
grace_s = 1

[limits]
order_s = 6
clean_timeout_s = 15
observe_s = 0.5
"""

HOST = """
[[hosts]]
id = "{host}"
backend = "mock"
ram_gb = 200
options = {{ copy_gbps = 400, memory = {memory}, record = {record}, faults = {faults} }}

[[hosts.nodes]]
gpus = "0-1"
pools = ["rollout"]
gpu_gb = 96

[[hosts.nodes]]
gpus = "2-3"
pools = ["train"]
gpu_gb = 96
"""

#: a line of the daemon's log that is never to be there
FAULTS_OF_ITS_OWN = (
    "broken_invariant",
    "input_crashed",
    "order_crashed",
    "driver_crashed",
    "backend_crashed",
    "sink_failed",
    "request_crashed",
    "Traceback",
)


def environment(home: Path, **more: str) -> dict[str, str]:
    """Nothing of rollmuxd's that whoever started this has set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_", "PYTEST"))}
    return {**env, "HOME": str(home), "PYTHONUNBUFFERED": "1", **more}


def children_of(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [int(child) for thread in threads for child in (thread / "children").read_text().split()]
    except OSError:
        return []


def send(pid: int, what: signal.Signals) -> None:
    """A signal, to a process that may have gone meanwhile."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, what)


class Daemon:
    """One daemon process after the other, on one state directory."""

    def __init__(self, folder: Path, hosts: int) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.socket = self.state / "rollmux.sock"
        self.url = f"unix://{self.socket}"
        self.log = folder / "daemon.log"
        self.record = folder / "witness.jsonl"
        self.faults = folder / "faults.json"
        self.memories = [folder / f"memory{number}.json" for number in range(hosts)]
        text = CONFIG.format(state=json.dumps(str(self.state)), lease_s=LEASE_S, heartbeat_s=HEARTBEAT_S)
        record, faults = json.dumps(str(self.record)), json.dumps(str(self.faults))
        for number, path in enumerate(self.memories):
            text += HOST.format(host=f"h{number}", memory=json.dumps(str(path)), record=record, faults=faults)
        self.config = folder / "rollmux.toml"
        self.config.write_text(text)
        self.process: subprocess.Popen[bytes] | None = None
        self.ready = False
        self.began = 0.0

    def start(self) -> None:
        """Begin to start it; :meth:`look` tells when it is ready."""
        with self.log.open("ab") as log:
            self.process = forked.Popen(
                [sys.executable, SHARED / "faulty_mock.py", "daemon", "run", "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.folder),
                cwd=self.folder,
            )
        self.ready, self.began = False, time.monotonic()

    def look(self) -> bool:
        """Whether it is ready by now."""
        if not self.ready and self.process is not None:
            try:
                mine = json.loads((self.state / "daemon.json").read_text())["pid"] == self.process.pid
                self.ready = mine and self.get("/readyz").status_code == 200
            except (OSError, ValueError, httpx.TransportError):
                pass
        return self.ready

    def get(self, path: str, within: float = 5.0, **params: Any) -> httpx.Response:
        with self._line(within) as line:
            return line.get(path, params=params)

    def post(self, path: str, within: float = 5.0) -> httpx.Response:
        with self._line(within) as line:
            return line.post(path)

    def _line(self, within: float) -> httpx.Client:
        transport = httpx.HTTPTransport(uds=str(self.socket))
        return httpx.Client(transport=transport, base_url="http://rollmuxd", timeout=within)

    def hardware(self) -> list[dict[str, Any]]:
        """What is in the mock's memory files: its hosts' states, and how often each fault was met."""
        found = []
        for path in filter(Path.exists, self.memories):
            fired = path.with_suffix(".fired")
            met = json.loads(fired.read_bytes()) if fired.exists() else {}
            found.append({**json.loads(path.read_bytes()), "fired": met})
        return found

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self.ready = False

    def descriptors(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/fd").iterdir()))

    def threads(self) -> int:
        return len(list(Path(f"/proc/{self.pid}/task").iterdir()))

    def rss_mb(self) -> float:
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6

    def faults_of_its_own(self) -> list[str]:
        with self.log.open(errors="replace") as lines:
            return [line.strip()[:500] for line in lines if any(word in line for word in FAULTS_OF_ITS_OWN)]


@dataclass
class Life:
    """One process of a client."""

    process: "subprocess.Popen[bytes]"
    key: str
    began: float
    died: float = float("inf")
    provoked: bool = False
    #: stopped until then
    frozen: float = 0.0


@dataclass
class Client:
    """One process after the other, of one job."""

    name: str
    lives: list[Life] = field(default_factory=list)
    done: bool = False
    #: started again then
    next_life: float | None = None
    #: how: with the run's key, in place of the run, or when that is over
    next_way: str = "plain"

    @property
    def life(self) -> Life:
        return self.lives[-1]

    @property
    def lives_now(self) -> bool:
        return bool(self.lives) and self.life.process.poll() is None


class World:
    """A daemon, and clients that loop."""

    def __init__(self, folder: Path, *, clients: int, hosts: int, seed: str, **environment: str) -> None:
        self.folder = folder
        #: of the clients
        self.environment = environment
        folder.mkdir(parents=True, exist_ok=True)
        self.seed = seed
        self.daemon = Daemon(folder, hosts)
        self.clients = [Client(f"c{number}") for number in range(clients)]

    def start(self, client: Client, way: str) -> None:
        """A process for a client: ``same`` has the key of the one before, ``replace`` ends that one's run."""
        key = client.life.key if way == "same" else f"{client.name}-{len(client.lives)}"
        command = [str(HERE / "workload.py"), client.name, str(self.folder), self.daemon.url, key, way, self.seed]
        with (self.folder / f"{client.name}.log").open("ab") as log:
            process = forked.Popen(
                [sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=environment(self.folder, ROLLMUX_REQUIRED="1", **self.environment),
                cwd=self.folder,
            )
        client.lives.append(Life(process, key, time.monotonic()))
        client.next_life = None

    def kill(self, client: Client) -> None:
        """SIGKILL to the client and its heartbeat."""
        life = client.life
        pids = [*children_of(life.process.pid), life.process.pid]
        life.died, life.provoked = time.monotonic(), True
        for pid in pids:
            send(pid, signal.SIGKILL)
        life.process.wait()

    def lines(self, client: Client) -> list[dict[str, Any]]:
        return read_lines(self.folder / f"{client.name}.jsonl")

    def close(self) -> None:
        for client in self.clients:
            for life in client.lives:
                if life.process.poll() is None:
                    for pid in (*children_of(life.process.pid), life.process.pid):
                        send(pid, signal.SIGKILL)
                    life.process.wait()
        if self.daemon.process is not None and self.daemon.process.poll() is None:
            self.daemon.kill()

    def clean(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """JSON lines; the last may be cut where its writer was killed."""
    if not path.exists():
        return []
    found = []
    for line in path.read_bytes().split(b"\n"):
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def render(fact: Mapping[str, Any]) -> str:
    """A fact as text, the same for the same fact."""
    return json.dumps(fact, sort_keys=True)


def pick(chance: random.Random, weights: Mapping[str, float]) -> str:
    return chance.choices(list(weights), list(weights.values()))[0]


def alive(clients: Iterable[Client]) -> list[Client]:
    """Those that run, and are not stopped."""
    return [client for client in clients if client.lives_now and not client.life.frozen]
