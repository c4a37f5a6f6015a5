"""A Ray cluster for the demo and for tests: all of its nodes on this machine, each with GPUs that Ray takes for real.

    python tests/shared/ray_nodes.py FOLDER NODE...

starts a head and these nodes. It writes ``{"address": "127.0.0.1:41234"}`` in one line when they are there, and serves
until it is ended, or its parent is gone. Needs Ray.
"""

import contextlib
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import forked
from networks import descendants, free_port

#: what a node has: of its object store little is needed, and Ray makes none that is smaller
OBJECTS: Final = 80 * 2**20
GPUS: Final = 2
CPUS: Final = 4
#: so that a node's death is known within two seconds, and not after fifteen; and as few processes as may be
SOON: Final = {
    "health_check_initial_delay_ms": 500,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2_000,
    "health_check_failure_threshold": 3,
    "prestart_worker_first_driver": False,  # one for each cluster member that joins, which are not used
}
_LOOK_S: Final = 0.5


class Cluster:
    """A head and nodes, as processes of this machine."""

    #: Ray's own settings
    system_config: Mapping[str, Any] = SOON

    def __init__(self, names: Sequence[str]) -> None:
        self.names = tuple(names)
        self._port = free_port()
        self.nodes: dict[str, Any] = {}
        self.cluster: Any = None

    @property
    def address(self) -> str:
        """Where drivers join it."""
        return str(self.cluster.address)

    def start(self) -> None:
        """Returns when all are there."""
        from ray.cluster_utils import Cluster as Processes

        self.cluster = Processes(
            initialize_head=True,
            shutdown_at_exit=False,  # that is done here, without the patience that Ray has with itself
            head_node_args={
                "node_name": "head",
                "num_cpus": 1,
                "num_gpus": 0,
                "object_store_memory": OBJECTS,
                "gcs_server_port": self._port,
                "include_dashboard": False,
                "include_log_monitor": False,
                "no_monitor": True,
                "_system_config": dict(self.system_config),
                **self.head_args(),
            },
        )
        for name in self.names:
            self.start_node(name)

    def start_node(self, name: str) -> None:
        """One of them, if it is not there. Its GPUs are numbers to Ray: it looks for none where they are stated."""
        if name not in self.nodes:
            self.nodes[name] = self.cluster.add_node(
                num_cpus=CPUS,
                num_gpus=GPUS,
                node_name=name,
                labels={"rack": name},
                object_store_memory=OBJECTS,
            )

    def head_args(self) -> dict[str, Any]:
        """More arguments of the head."""
        return {}

    def stop(self) -> None:
        """End it with all its processes."""
        if self.cluster is not None:
            kill([pid for node in (*self.nodes.values(), self.cluster.head_node) for pid in pids(node)])


@contextlib.contextmanager
def serving(cluster: Cluster, folder: str) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Run a cluster until the block is left; gives what writes an answer in a line."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # Ray's own output is not for the reader of the answers

    def answer(said: Mapping[str, Any]) -> None:
        answers.write(json.dumps(said) + "\n")
        answers.flush()

    with _short(folder) as short:
        os.environ["RAY_TMPDIR"] = short
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        os.environ["RAY_AUTH_MODE"] = "disabled"  # whatever token there is in this user's home
        (Path(short) / "ray").mkdir(exist_ok=True)
        try:
            cluster.start()
            answer({"address": cluster.address})
            yield answer
        finally:
            cluster.stop()


def main(folder: str, *names: str) -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    parent = os.getppid()
    with serving(Cluster(names), folder):
        while os.getppid() == parent:
            time.sleep(_LOOK_S)


@contextlib.contextmanager
def _short(folder: str) -> Iterator[str]:
    """The same folder by a short name: of the 107 bytes that a socket's path may have, Ray needs seventy for itself."""
    with tempfile.TemporaryDirectory(prefix="rx", ignore_cleanup_errors=True) as name:
        link = Path(name) / "r"
        link.symlink_to(Path(folder).absolute())
        yield str(link)


def pids(node: Any) -> list[int]:
    """Of what was started for it here."""
    return [process.process.pid for some in node.all_processes.values() for process in some]


def kill(pids: Sequence[int]) -> None:
    """With what they have started; not what has left them: a job's processes continue."""
    there = descendants(pids)
    for pid in there:  # it grows: of the copies that stand-ins have had made another process is the parent
        if copy := forked.copy_of(pid):
            there += descendants([copy])
    for pid in there:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
