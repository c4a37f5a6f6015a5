"""A Ray cluster for tests and for the demo: all of its nodes on this machine, each with GPUs that Ray takes for real.

    python -m rollmuxd_backend_ray.testing FOLDER NODE...

starts a head and these nodes, says ``{"address": "127.0.0.1:41234"}`` in one line when they are there, and serves until
it is ended, or who has started it is gone. What it is told on its standard input it does, a line each, and answers with
a line: ``kill NODE`` (as a machine that is switched off), ``start NODE``, ``restart NODE...`` (another cluster at the
same address, with these). Needs Ray.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Final, Self

#: what a node has: of its object store little is needed, and Ray makes none that is smaller
_OBJECTS: Final = 80 * 2**20
GPUS: Final = 2
_CPUS: Final = 4
#: so that a node's death is known within two seconds, and not after fifteen
_SOON: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
}
_PATIENCE_S: Final = 60.0
_LOOK_S: Final = 0.5


class Cluster:
    """A head and nodes, as processes of this machine."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._port = _free_port()
        self._nodes: dict[str, Any] = {}
        self._cluster: Any = None

    @property
    def address(self) -> str:
        """Where drivers join it."""
        return str(self._cluster.address)

    def start(self) -> None:
        """Returns when all are there."""
        from ray.cluster_utils import Cluster as Processes

        self._cluster = Processes(
            initialize_head=True,
            shutdown_at_exit=False,  # that is done here, without the patience that Ray has with itself
            head_node_args={
                "node_name": "head",
                "num_cpus": 1,
                "num_gpus": 0,
                "object_store_memory": _OBJECTS,
                "gcs_server_port": self._port,
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
                "_system_config": _SOON,
            },
        )
        for name in self._names:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """One of them, if it is not there. Its GPUs are numbers to Ray: it looks for none where it is told."""
        if name not in self._nodes:
            self._nodes[name] = self._cluster.add_node(
                num_cpus=_CPUS,
                num_gpus=GPUS,
                node_name=name,
                labels={"rack": name},
                object_store_memory=_OBJECTS,
            )

    def kill_node(self, name: str) -> None:
        """With all its workers and without a word, as a machine that is switched off."""
        node = self._nodes.pop(name, None)
        if node is not None:
            _kill(process.process.pid for some in node.all_processes.values() for process in some)
            self._cluster.worker_nodes.discard(node)

    def restart(self, names: Sequence[str]) -> None:
        """All of it is killed, and another cluster is at its address: nothing of it was kept."""
        self._names = tuple(names)
        for name in list(self._nodes):
            self.kill_node(name)
        head = self._cluster.head_node
        _kill(process.process.pid for some in head.all_processes.values() for process in some)
        self.start()

    def stop(self) -> None:
        """End it with all its processes."""
        if self._cluster is not None:
            nodes = [*self._nodes.values(), self._cluster.head_node]
            _kill(p.process.pid for node in nodes for some in node.all_processes.values() for p in some)


class ClusterProcess:
    """A cluster in a process of its own: Ray does not come into this one."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder, self._names = folder, names
        self.address = ""
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        self.folder.mkdir(parents=True, exist_ok=True)
        log = self.folder / "cluster.log"
        with log.open("w") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "rollmuxd_backend_ray.testing", str(self.folder), *self._names],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )
        try:
            self.address = self._answer()["address"]
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def do(self, *words: str) -> None:
        """Have it done, and return when it is."""
        assert self._process is not None
        assert self._process.stdin is not None
        self._process.stdin.write(" ".join(words) + "\n")
        self._process.stdin.flush()
        self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        line = _line(self._process.stdout)
        if not line:
            said = (self.folder / "cluster.log").read_text(errors="replace")[-2_000:]
            raise RuntimeError(f"the Ray cluster does not answer: {said}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def serving(names: Sequence[str]) -> Iterator[Cluster]:
    """A cluster that runs until the block is left."""
    cluster = Cluster(names)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.stop()


def main(folder: str, *names: str) -> None:
    """Serve until SIGTERM, or the end of who has started this."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with _short(folder) as short:
        _serve(short, names)


def _serve(folder: str, names: Sequence[str]) -> None:
    os.environ["RAY_TMPDIR"] = folder
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    os.environ["RAY_AUTH_MODE"] = "disabled"  # whatever token there is in this user's home
    (Path(folder) / "ray").mkdir(exist_ok=True)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what Ray has to say is not for who reads the answers

    def answer(said: dict[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    with serving(names) as cluster:
        answer({"address": cluster.address})
        for line in _told():
            match line.split():
                case ["kill", name]:
                    cluster.kill_node(name)
                case ["start", name]:
                    cluster.start_node(name)
                case ["restart", *these]:
                    cluster.restart(these)
            answer({"done": line.strip()})


def _told() -> Iterator[str]:
    """Lines of standard input, which may have none, until the parent is gone."""
    parent = os.getppid()
    with selectors.DefaultSelector() as waiting:
        with contextlib.suppress(PermissionError):  # a file, or nothing: there is nobody who says anything
            waiting.register(sys.stdin, selectors.EVENT_READ)
        while os.getppid() == parent:
            if waiting.select(_LOOK_S):
                line = sys.stdin.readline()
                if line:
                    yield line
                else:
                    waiting.unregister(sys.stdin)


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """The same folder by a short name: of the 107 bytes that a socket's path may have, Ray needs seventy for itself."""
    with tempfile.TemporaryDirectory(prefix="rx", ignore_cleanup_errors=True) as name:
        link = Path(name) / "r"
        link.symlink_to(Path(folder).absolute())
        yield str(link)


def _line(stream: IO[str]) -> str:
    """The next line; empty where there is none within the time."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(stream, selectors.EVENT_READ)
        return stream.readline() if waiting.select(_PATIENCE_S) else ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _kill(pids: "Iterator[int] | Sequence[int]") -> None:
    """With what they have started; not what has left them: a job's processes go on."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
    found = list(pids)
    for one in found:  # grows while it is gone through
        found.extend(pid for pid, parent in parents.items() if parent == one)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
