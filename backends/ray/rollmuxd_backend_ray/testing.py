"""A Ray cluster for tests and for the demo: all of its nodes on this machine, each with GPUs that Ray takes for real.

    python -m rollmuxd_backend_ray.testing FOLDER [--apart] NODE...

starts a head and these nodes, says ``{"address": "127.0.0.1:41234"}`` in one line when they are there, and serves until
it is ended, or who has started it is gone. What it is told on its standard input it does, a line each, and answers with
a line: ``kill NODE`` (as a machine that is switched off), ``start NODE``, ``restart NODE...`` (another cluster at the
same address, with these). Needs Ray.

``--apart``: each node is in a network namespace with an address of its own, and its Ray is started again whenever it
ends, as a service manager does; ``cut NODE`` and ``mend NODE`` are about its link. Needs root, and ``ip`` (iproute2).
"""

import contextlib
import json
import os
import selectors
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from rollmuxd_backend_local.testing import Namespace

#: what a node has: of its object store little is needed, and Ray makes none that is smaller
_OBJECTS: Final = 80 * 2**20
GPUS: Final = 2
_CPUS: Final = 4
#: so that a node's death is known within two seconds, and not after fifteen; and as few processes as may be
_SOON: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,  # one for each envoy that joins, which nobody uses
}
#: a link that is cut is noticed by who asks (eight seconds), and only then by Ray (thirteen), as with Ray's own values
_LATER: Final = {**_SOON, "health_check_timeout_ms": 4_000}
_PATIENCE_S: Final = 600.0
_LOOK_S: Final = 0.5


class Cluster:
    """A head and nodes, as processes of this machine."""

    def __init__(self, names: Sequence[str], *, apart: bool = False) -> None:
        self._names = tuple(names)
        self._links = {name: Namespace(number) for number, name in enumerate(names)} if apart else {}
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

        if self._cluster is None:
            for link in self._links.values():
                link.make()
        apart: dict[str, Any] = {}
        if self._links:
            # Where every node finds it, whosever link is cut: this end of one stays up.
            apart = {"node_ip_address": next(iter(self._links.values())).gateway}
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
                "_system_config": _LATER if self._links else _SOON,
                **apart,
            },
        )
        for name in self._names:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """One of them, if it is not there. Its GPUs are numbers to Ray: it looks for none where it is told."""
        if name in self._links and name not in self._nodes:
            self._nodes[name] = self._start_apart(name)
            self._until_there(name)
        elif name not in self._nodes:
            self._nodes[name] = self._cluster.add_node(
                num_cpus=_CPUS,
                num_gpus=GPUS,
                node_name=name,
                labels={"rack": name},
                object_store_memory=_OBJECTS,
            )

    def _start_apart(self, name: str) -> "subprocess.Popen[bytes]":
        link = self._links[name]
        argv = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", self.address),
            *("--node-ip-address", link.address, "--node-name", name, "--labels", f"rack={name}"),
            *("--num-cpus", str(_CPUS), "--num-gpus", str(GPUS), "--object-store-memory", str(_OBJECTS)),
            *("--include-log-monitor", "false"),
        )
        again = f"while :; do {shlex.join(argv)}; sleep 0.2; done"
        # Of itself it tells a terminal.
        return subprocess.Popen(link.inside("sh", "-c", again), stdin=subprocess.DEVNULL, stdout=sys.stderr)

    def _until_there(self, name: str) -> None:
        give_up = time.monotonic() + _PATIENCE_S
        while not any(node["NodeName"] == name and node["Alive"] for node in self._cluster.global_state.node_table()):
            if time.monotonic() > give_up:
                raise RuntimeError(f"node {name} is not there after {_PATIENCE_S:g} s")
            time.sleep(0.05)

    def cut(self, name: str) -> None:
        """Nothing comes to this node, nor from it; it is not told."""
        self._links[name].cut()

    def mend(self, name: str) -> None:
        """Its link is as before."""
        self._links[name].mend()

    def kill_node(self, name: str) -> None:
        """With all its workers and without a word, as a machine that is switched off."""
        node = self._nodes.pop(name, None)
        if node is not None:
            _kill(_pids(node))
            self._cluster.worker_nodes.discard(node)

    def restart(self, names: Sequence[str]) -> None:
        """All of it is killed, and another cluster is at its address: nothing of it was kept."""
        self._names = tuple(names)
        for name in list(self._nodes):
            self.kill_node(name)
        _kill(_pids(self._cluster.head_node))
        self.start()

    def stop(self) -> None:
        """End it with all its processes."""
        if self._cluster is not None:
            _kill([pid for node in (*self._nodes.values(), self._cluster.head_node) for pid in _pids(node)])
        for link in self._links.values():
            link.remove()


@contextlib.contextmanager
def serving(names: Sequence[str], *, apart: bool = False) -> Iterator[Cluster]:
    """A cluster that runs until the block is left."""
    cluster = Cluster(names, apart=apart)
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

    with serving([name for name in names if name != "--apart"], apart="--apart" in names) as cluster:
        answer({"address": cluster.address})
        for line in _told():
            match line.split():
                case ["kill", name]:
                    cluster.kill_node(name)
                case ["start", name]:
                    cluster.start_node(name)
                case ["cut", name]:
                    cluster.cut(name)
                case ["mend", name]:
                    cluster.mend(name)
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


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _pids(node: Any) -> list[int]:
    """Of what was started for it here."""
    if isinstance(node, subprocess.Popen):
        return [node.pid]
    return [process.process.pid for some in node.all_processes.values() for process in some]


def _kill(pids: Sequence[int]) -> None:
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
