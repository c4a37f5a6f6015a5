"""Real processes, and raw HTTP to talk to them: prepared bytes on kept connections, so that the client costs little."""

import asyncio
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from figures import Json

#: long enough that no heartbeat is needed while something is measured
LEASE_S: Final = 3_600.0
TICK_S: Final = os.sysconf("SC_CLK_TCK")
PAGE: Final = os.sysconf("SC_PAGE_SIZE")
HERE: Final = Path(__file__).parent


# ---- processes -------------------------------------------------------------------------------------------------------


def clean_environment(home: Path) -> dict[str, str]:
    """Nothing of rollmuxd's that whoever measures has set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_"))}
    return {**env, "HOME": str(home)}


def start(command: list[str], folder: Path, **more: Any) -> "subprocess.Popen[bytes]":
    """Start a Python process; what it says on stderr goes into a file, as a daemon's log would."""
    with (folder / "stderr.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.DEVNULL,
            stderr=log,
            env=clean_environment(folder),
            cwd=folder,
            **more,
        )


def end(process: "subprocess.Popen[bytes]") -> None:
    process.send_signal(signal.SIGKILL)
    process.wait()


@contextmanager
def bare_server(folder: Path) -> Iterator[tuple[int, int]]:
    """The bare app of ``bare.py``: its pid, and its port."""
    process = start([str(HERE / "bare.py")], folder, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        with process.stdout as said:
            pid, port = map(int, said.readline().split())
        yield pid, port
    finally:
        end(process)


def processor_s(pid: int) -> float:
    """Processor time that a process has had, all its threads together."""
    after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(after[11]) + int(after[12])) / TICK_S


def rss_kb(pid: int) -> float:
    """Memory of a process that is in RAM, in units of 1024 bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE / 1024


CONFIG: Final = """
[daemon]
listen = "127.0.0.1:0"
state_dir = {state}

[lease]
lease_s = {lease_s}
heartbeat_s = 60

[policy.rollmux]
max_group = {max_group}
"""

HOST: Final = """
[[hosts]]
id = "{id}"
backend = "mock"
ram_gb = 2000
# Copies and looks at processes take no time: what the daemon does around them is measured.
options = {{ copy_gbps = 1e12, watch_pids = false, memory = "" }}

[[hosts.nodes]]
gpus = "0-7"
pools = ["{pool}"]
gpu_gb = 96
price_per_gpu_hour = {price}
"""


#: more of the configuration, for one owner with thousands of jobs
NO_LIMIT: Final = "[defaults.owner]\nmax_jobs = 0\n"


class Daemon:
    """A daemon with a state directory of its own, with mock hosts of one node of eight GPUs each.

    ``more``: what else its configuration says.
    """

    def __init__(
        self, folder: Path, hosts: list[tuple[str, str, float]], *, max_group: int = 5, more: str = ""
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.state = folder / "state"
        self.socket = self.state / "rollmux.sock"
        self.config = folder / "rollmux.toml"
        text = CONFIG.format(state=json.dumps(str(self.state)), lease_s=LEASE_S, max_group=max_group)
        self.config.write_text(
            text + "".join(HOST.format(id=name, pool=pool, price=price) for name, pool, price in hosts) + more
        )
        self._process: subprocess.Popen[bytes] | None = None
        self.program = ["-m", "rollmuxd"]

    def start(self) -> float:
        """Start it; returns the seconds from before its ``exec`` to the first answer that it is ready."""
        began = time.perf_counter()
        self._process = start([*self.program, "daemon", "run", "--config", str(self.config)], self.folder)
        while not ready(self.socket):
            if self._process.poll() is not None:
                log = (self.folder / "stderr.log").read_text(errors="replace")[-2_000:]
                raise RuntimeError(f"the daemon ended with {self._process.returncode}:\n{log}")
            if time.perf_counter() - began > 60:
                raise TimeoutError("the daemon is not ready after a minute")
            time.sleep(0.002)
        return time.perf_counter() - began

    def end(self) -> None:
        """Kill it, which is safe."""
        if self._process is not None:
            end(self._process)

    @property
    def pid(self) -> int:
        """As it says itself: what was started may stand in for it."""
        pid: int = json.loads((self.state / "daemon.json").read_text())["pid"]
        return pid

    @property
    def port(self) -> int:
        """Where it listens on TCP."""
        url: str = json.loads((self.state / "daemon.json").read_text())["url"]
        return int(url.rpartition(":")[2])

    def rows(self, after: int = 0) -> list[tuple[int, int, str, str]]:
        """The journal's facts after a number, as they lie on the disk."""
        return self._ask("SELECT seq, at, kind, body FROM facts WHERE seq > ? ORDER BY seq", after)

    def last_seq(self) -> int:
        return int(self._ask("SELECT max(seq) FROM facts")[0][0])

    def count(self, kind: str) -> int:
        """How many facts of a kind there are."""
        return int(self._ask("SELECT count(*) FROM facts WHERE kind = ?", kind)[0][0])

    def _ask(self, query: str, *values: object) -> list[Any]:
        path = self.state / "journal.sqlite3"
        with closing(sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)) as connection:
            return connection.execute(query, values).fetchall()


def ready(path: Path) -> bool:
    """Whether a daemon answers on this Unix socket that it is ready."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as there:
            there.settimeout(5.0)
            there.connect(str(path))
            there.sendall(b"GET /readyz HTTP/1.1\r\nHost: rollmuxd\r\nConnection: close\r\n\r\n")
            return there.recv(12) == b"HTTP/1.1 200"
    except OSError:
        return False


@contextmanager
def daemon(
    folder: Path, hosts: list[tuple[str, str, float]], *, max_group: int = 5, more: str = ""
) -> Iterator[Daemon]:
    """A daemon that runs."""
    made = Daemon(folder, hosts, max_group=max_group, more=more)
    try:
        made.start()
        yield made
    finally:
        made.end()


# ---- HTTP ------------------------------------------------------------------------------------------------------------


class Reply(NamedTuple):
    """An answer, and when its last byte was there."""

    status: int
    body: bytes
    at: float

    def json(self) -> Json:
        if self.status >= 300:
            raise RuntimeError(f"status {self.status}: {self.body.decode(errors='replace')[:500]}")
        found = json.loads(self.body)
        assert isinstance(found, dict)
        return found


class Line(asyncio.Protocol):
    """One connection that is kept, and one call at a time on it.

    A server hangs up on one that is idle for 75 s. A call then fails at once, and :meth:`reopen` connects again.
    """

    def __init__(self, connect: Callable[[Callable[[], "Line"]], Awaitable[object]]) -> None:
        self._connect = connect
        self._transport: asyncio.Transport | None = None
        self._answer: asyncio.Future[Reply] | None = None
        self._read = b""

    @classmethod
    async def tcp(cls, port: int) -> "Line":
        loop = asyncio.get_running_loop()
        line = cls(lambda make: loop.create_connection(make, "127.0.0.1", port))
        await line.reopen()
        return line

    @classmethod
    async def unix(cls, path: Path) -> "Line":
        loop = asyncio.get_running_loop()
        line = cls(lambda make: loop.create_unix_connection(make, str(path)))
        await line.reopen()
        return line

    @property
    def closed(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    async def reopen(self) -> None:
        """Connect, unless it is connected."""
        if self.closed:
            await self._connect(lambda: self)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(exc or ConnectionError("the server has hung up"))

    def send(self, request: bytes) -> "asyncio.Future[Reply]":
        """Send a call; its answer comes, or ConnectionError."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        if self.closed:  # asyncio would drop what is written, and say nothing
            self._answer.set_exception(ConnectionError("the server hung up before the call"))
        else:
            self._transport.write(request)
        return self._answer

    def data_received(self, data: bytes) -> None:
        at = time.perf_counter()
        read = self._read = self._read + data
        head, found, body = read.partition(b"\r\n\r\n")
        if not found:
            return
        length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
        if len(body) < int(length):
            return
        self._read = b""
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():  # nobody waits any more, at the end
            answer.set_result(Reply(int(head[9:12]), body, at))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def call(method: str, path: str, body: Any = None, *, key: str = "") -> bytes:
    """A call, ready to be sent."""
    content = b"" if body is None else json.dumps(body).encode()
    lines = [f"{method} {path} HTTP/1.1", "host: rollmuxd", f"content-length: {len(content)}"]
    if content:
        lines.append("content-type: application/json")
    if key:
        lines.append(f"authorization: Bearer {key}")
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + content


async def new_key(made: Daemon, role: str = "user") -> str:
    """An API key, asked for on the Unix socket, where the kernel says that we are the operator."""
    line = await Line.unix(made.socket)
    try:
        body = {"owner": "team", "user": "someone", "role": role}
        return str((await line.send(call("POST", "/v1/keys", body))).json()["secret"])
    finally:
        line.close()


class Member:
    """A job of one phase, and its process: one connection, on which it asks for its turn, waits and gives it back."""

    def __init__(self, line: Line, key: str, job: str, session: str) -> None:
        self.line, self.job = line, job
        self._key, self._session = key, session
        self._count = 0
        #: of the call that is under way
        self.asked: asyncio.Future[Reply] | None = None
        self._release = b""

    @classmethod
    async def join(cls, line: Line, key: str, name: str, node: str, *, states: bool) -> "Member":
        """Register a job for one node, and open its session."""
        body: Json = {
            "name": name,
            "phases": [{"name": "rollout", "pools": ["rollout"], "seconds": 60}],
            "wants": {"rollout": {"named": [node]}},
            "idempotency_key": name,
        }
        if states:
            body["states"] = {"rollout": {"gpu_gb": 0.001, "ram_gb": 0.001, "driver": "mock"}}
        job = (await line.send(call("POST", "/v1/jobs", body, key=key))).json()
        assert job["status"] == "admitted", job
        opening = {"idempotency_key": name, "pid": os.getpid(), "started": name}
        session = (await line.send(call("POST", f"/v1/jobs/{job['job']}/sessions", opening, key=key))).json()
        return cls(line, key, job["job"], session["session"])

    def next_call(self, wait_s: float) -> bytes:
        """The request for its next slot."""
        self._count += 1
        return self.this_call(wait_s)

    def this_call(self, wait_s: float) -> bytes:
        """The same request again."""
        body = {
            "phase": "rollout",
            "request_id": f"{self.job}-{self._count}",
            "session": self._session,
            "wait_s": wait_s,
        }
        return call("POST", f"/v1/jobs/{self.job}/slots", body, key=self._key)

    def ask(self, wait_s: float = 300) -> "asyncio.Future[Reply]":
        """Ask for its next slot."""
        self.asked = self.line.send(self.next_call(wait_s))
        return self.asked

    def ask_on(self) -> bool:
        """Ask on, if its call has waited for as long as a call may, and its slot is still queued."""
        if self.asked is None or not self.asked.done() or self.asked.result().json()["status"] != "queued":
            return False
        self.asked = self.line.send(self.this_call(300))
        return True

    def withdraw(self, slot: str) -> bytes:
        """The call that takes a request back."""
        return call("DELETE", f"/v1/slots/{slot}", key=self._key)

    def granted(self, reply: Reply) -> None:
        """It holds the slot of this answer."""
        view = reply.json()
        assert view["status"] == "running", view
        self.asked = None
        self._release = call("POST", f"/v1/slots/{view['slot']}/release", {"fence": view["fence"]}, key=self._key)

    def release(self) -> "asyncio.Future[Reply]":
        """Give it back."""
        return self.line.send(self._release)
