"""One real Slurm cluster for the tests here: a controller and four nodes of this machine, in a folder of their own."""

import json

import pytest
from slurm_cluster import PACKAGES, Cluster, missing, short_folder

from rollmuxd_backend_local import asking

GPUS = [{"uuid": f"GPU-{number}", "name": "NVIDIA H20", "total_mb": 80_000} for number in range(2)]


@pytest.fixture(scope="module")
def cluster():
    """The cluster, up, with the nodes rx1 to rx4; skipped where Slurm is not installed."""
    if absent := missing():
        pytest.skip(f"there is no {absent[0]} here; apt-get install {PACKAGES}")
    with short_folder() as folder, Cluster(folder, ("rx1", "rx2", "rx3", "rx4")) as running:
        yield running


@pytest.fixture
def allocate(cluster):
    """A function that makes allocations, which end with the test."""
    made = []

    def make(*options):
        made.append(cluster.allocate("--exclusive", "--gres=gpu:2", *options))
        return made[-1]

    yield make
    cluster.release(*made)


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


@pytest.fixture(autouse=True)
def time_to_look(monkeypatch):
    """A look is a program on the node, which takes its time where the machine is busy."""
    monkeypatch.setattr(asking, "LOOK_S", 600.0)
