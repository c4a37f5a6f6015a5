"""One Ray cluster for the tests here, and a cluster member in it."""

import contextlib
import json
import subprocess
import sys
from importlib.util import find_spec

import forked
import pytest
from ray_cluster import IMPORTED_BY_RAY

GPUS = [{"uuid": f"GPU-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in range(2)]


class Live:
    """The cluster, and which of its nodes are there."""

    def __init__(self, cluster, folder):
        self.cluster, self.folder = cluster, folder
        self.up = {"box", "crate"}
        self.socket = str(folder / "member")
        self._cluster_member = None

    @property
    def address(self):
        return self.cluster.address

    @property
    def joined(self):
        """Whether a cluster member has been started that all may use."""
        return self._cluster_member is not None

    def kill(self, name):
        if name in self.up:
            self.cluster.do("kill", name)
            self.up.discard(name)

    def start(self, name="box"):
        if name not in self.up:
            self.cluster.do("start", name)
            self.up.add(name)

    def member(self):
        """The socket of a cluster member that all may use, as long as the cluster is the same."""
        if self._cluster_member is None or self._cluster_member.poll() is not None:
            self._cluster_member = self.start_member(self.socket)
        return self.socket

    def start_member(self, socket):
        member = forked.Popen(
            [sys.executable, "-m", "rollmuxd_backend_ray.cluster_member", socket, self.address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            imported=IMPORTED_BY_RAY,
        )
        assert member.stdout.readline() == b"ready\n"
        return member

    def stop(self):
        if self._cluster_member is not None:
            end(self._cluster_member)


def end(process):
    with contextlib.suppress(OSError):
        process.kill()
    process.communicate()


@pytest.fixture(scope="module")
def live(tmp_path_factory):
    """A cluster with the nodes ``box`` and ``crate``; skipped where there is no Ray."""
    if find_spec("ray") is None:
        pytest.skip("there is no Ray here; pip install ray")
    from ray_cluster import ClusterProcess

    folder = tmp_path_factory.mktemp("ray")
    with ClusterProcess(folder / "c", ("box", "crate")) as cluster:
        found = Live(cluster, folder)
        try:
            yield found
        finally:
            found.stop()


@pytest.fixture
def made_up(tmp_path):
    """A file of GPUs for the nodes; a function that writes others into it."""
    path = tmp_path / "gpus.json"

    def write(gpus=None, **more):
        beside = path.with_suffix(".new")
        beside.write_text(json.dumps({"gpus": gpus if gpus is not None else GPUS, **more}))
        beside.replace(path)
        return str(path)

    write()
    return write
