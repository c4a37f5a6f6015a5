"""A Ray cluster that tests break: ``python ray_server.py FOLDER PYTHON [--apart] NODE...``.

It starts as :mod:`ray_nodes` does. Each line of its standard input is a command, which it answers
with a line: ``kill NODE`` (as a machine that is switched off), ``start NODE``, ``restart NODE...`` (another cluster at
the same address, with these nodes).

``--apart``: each node is in a network namespace with an address of its own, and its Ray starts again whenever it ends,
as under a service manager; ``cut NODE`` and ``mend NODE`` are about its link. Needs root, and ``ip`` (iproute2).
"""

import contextlib
import os
import selectors
import shlex
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from networks import Namespace
from patience import PATIENCE_S
from ray_nodes import CPUS, GPUS, OBJECTS, SOON, Cluster, kill, pids, serving

LOOK_S = 0.5


class BreakableCluster(Cluster):
    """A cluster whose nodes can be killed, started again and, apart, cut off."""

    def __init__(self, names: Sequence[str], *, apart: bool = False) -> None:
        super().__init__(names)
        self._links = {name: Namespace(number) for number, name in enumerate(names)} if apart else {}
        if apart:
            # A cut link is noticed by the caller (eight seconds), and then by Ray (thirteen), as with Ray's own values.
            self.system_config = {**SOON, "health_check_timeout_ms": 4_000}

    def head_args(self) -> dict[str, Any]:
        """Where every node finds the head, whichever link is cut: this end of one stays up."""
        return {"node_ip_address": next(iter(self._links.values())).gateway} if self._links else {}

    def start(self) -> None:
        if self.cluster is None:
            for link in self._links.values():
                link.make()
        super().start()

    def start_node(self, name: str) -> None:
        if name in self._links and name not in self.nodes:
            self.nodes[name] = self._start_apart(name)
            self._until_there(name)
        else:
            super().start_node(name)

    def _start_apart(self, name: str) -> "subprocess.Popen[bytes]":
        link = self._links[name]
        argv = (
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", self.address),
            *("--node-ip-address", link.address, "--node-name", name, "--labels", f"rack={name}"),
            *("--num-cpus", str(CPUS), "--num-gpus", str(GPUS), "--object-store-memory", str(OBJECTS)),
            *("--include-log-monitor", "false"),
        )
        again = f"while :; do {shlex.join(argv)}; sleep 0.2; done"
        # By itself it writes to a terminal.
        return subprocess.Popen(link.inside("sh", "-c", again), stdin=subprocess.DEVNULL, stdout=sys.stderr)

    def _until_there(self, name: str) -> None:
        give_up = time.monotonic() + PATIENCE_S
        while not any(node["NodeName"] == name and node["Alive"] for node in self.cluster.global_state.node_table()):
            if time.monotonic() > give_up:
                raise RuntimeError(f"node {name} is not there after {PATIENCE_S:g} s")
            time.sleep(0.05)

    def cut(self, name: str) -> None:
        """Nothing comes to this node, nor from it; the node does not know."""
        self._links[name].cut()

    def mend(self, name: str) -> None:
        """Its link is as before."""
        self._links[name].mend()

    def kill_node(self, name: str) -> None:
        """With all its workers and without a word, as a machine that is switched off."""
        node = self.nodes.pop(name, None)
        if node is not None:
            kill(_pids(node))
            self.cluster.worker_nodes.discard(node)

    def restart(self, names: Sequence[str]) -> None:
        """Kill all of it, and start another cluster at its address: nothing of it is kept."""
        self.names = tuple(names)
        for name in list(self.nodes):
            self.kill_node(name)
        kill(pids(self.cluster.head_node))
        self.start()

    def stop(self) -> None:
        """End it with all its processes and links."""
        for name in list(self._links):
            self.kill_node(name)
        super().stop()
        for link in self._links.values():
            link.remove()


def _pids(node: Any) -> list[int]:
    return [node.pid] if isinstance(node, subprocess.Popen) else pids(node)


def _commands() -> Iterator[str]:
    """Lines of standard input, until the parent is gone."""
    parent = os.getppid()
    with selectors.DefaultSelector() as waiting:
        with contextlib.suppress(PermissionError):  # a file, or nothing: there are no commands
            waiting.register(sys.stdin, selectors.EVENT_READ)
        while os.getppid() == parent:
            if waiting.select(LOOK_S):
                line = sys.stdin.readline()
                if line:
                    yield line
                else:
                    waiting.unregister(sys.stdin)


def main(folder: str, python: str, *words: str) -> None:
    """Serve until SIGTERM, or until the parent is gone."""
    sys.executable = python  # what Ray starts its own processes with
    cluster = BreakableCluster([word for word in words if word != "--apart"], apart="--apart" in words)
    with serving(cluster, folder) as answer:
        for line in _commands():
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


if __name__ == "__main__":
    main(*sys.argv[1:])
