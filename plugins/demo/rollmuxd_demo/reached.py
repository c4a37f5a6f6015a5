"""How the demo's host is reached: by the mock, by SSH, as a node of a Ray cluster, or of a Slurm allocation.

Server and clusters are the demo's own.

With backends other than the mock its GPUs are made up as well. They are in a file of the host, which the backend reads,
and in which the mock's driver moves bytes by commands. The SSH server is OpenSSH's. It is in a network namespace with
an address of its own where this user may make one, else on a port of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from rollmuxd.cli.common import Failed
from rollmuxd_demo.children import Children, environment, tail

#: what runs the servers and clusters, a program for each backend, as in the project's own tests
SERVERS = Path(__file__).parents[3] / "tests" / "shared"
NODES = """
[[hosts.nodes]]
gpus = [0]
pools = ["rollout"]

[[hosts.nodes]]
gpus = [1]
pools = ["train"]
"""


class Reached(Protocol):
    """A host, as the file of one run names it."""

    #: where it is, for people
    where: str
    #: a switch here takes so many times as long as the mock's, or less; and so do phases and the whole demo
    longer: float
    #: how Python runs a ``rollmuxd`` that can move bytes there
    rollmuxd: Sequence[str]

    def tables(self, folder: Path) -> str:
        """The tables of the run whose files are in ``folder``; its witness writes ``witness.jsonl`` there."""


def reach(backend: str, folder: Path, children: Children) -> Reached:
    """The demo's host. Raises Failed where it cannot be made."""
    match backend:
        case "ssh":
            return Ssh(folder / "ssh", children)
        case "ray":
            return Ray(folder / "ray", children)
        case "slurm":
            return Slurm(folder / "slurm", children)
    return Mock()


class Mock:
    """A host without hardware."""

    where = ""
    longer = 1.0
    rollmuxd: Sequence[str] = ("-m", "rollmuxd")

    def tables(self, folder: Path) -> str:
        """Its GPUs are in a file, so that they outlive the daemon."""
        return f"""\
[[hosts]]
id = "mock"
backend = "mock"
ram_gb = 16

[hosts.options]
gpu_gb = 1
copy_gbps = 20
record = {json.dumps(str(folder / "witness.jsonl"))}
memory = {json.dumps(str(folder / "memory.json"))}
{NODES}"""


class Elsewhere(ABC):
    """A host behind something of the demo's own, that runs for as long as the demo does."""

    #: the backend, the program that serves it, what has to be installed for it, and how
    name: str
    program: str
    packages: tuple[str, ...]
    remedy: str
    where: str
    longer = 1.0
    rollmuxd: Sequence[str] = (str(SERVERS / "made_up_mock.py"),)

    def __init__(self, folder: Path, children: Children) -> None:
        program = SERVERS / self.program
        if not program.is_file():
            raise Failed(
                f"there is no {program}: the demo over {self.name} starts a server from the project's tests; run it in "
                "a checkout, or in the unpacked source archive, after `make setup`"
            )
        missing = [package for package in self.packages if find_spec(package) is None]
        if missing:
            raise Failed(f"the demo over {self.name} needs {' and '.join(missing)}; {self.remedy}")

        folder.mkdir(parents=True)
        log = folder / "servers.log"
        with log.open("w") as stderr:
            server = children.start(
                [sys.executable, program, folder, "box"],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert server.stdout is not None
        with server.stdout:
            said = server.stdout.readline()
        if not said:
            raise Failed(f"what the demo reaches by {self.name} has not started: {tail(log, 1) or 'it said nothing'}")
        self.told(json.loads(said))

    @abstractmethod
    def told(self, what: dict[str, Any]) -> None:
        """What the server has said of itself."""

    @abstractmethod
    def options(self) -> str:
        """The lines of ``[backends.NAME]``."""

    def tables(self, folder: Path) -> str:
        """Its GPUs are in a file of the host, as the backend and the driver know it."""
        gpus = folder / "gpus.json"
        if not gpus.exists():
            made = [{"uuid": f"GPU-demo-{number}", "name": "made up", "total_mb": 1000} for number in (0, 1)]
            gpus.write_text(json.dumps({"gpus": made}))
        return f"""\
[[hosts]]
id = "box"
backend = "{self.name}"
ram_gb = 16
options = {{made_up_gpus = {json.dumps(str(gpus))}}}
{NODES}
[backends.{self.name}]
{self.options()}
python = {json.dumps(sys.executable)}

[residency.mock]
made_up_gpus = {json.dumps(str(gpus))}
record = {json.dumps(str(folder / "witness.jsonl"))}
python = {json.dumps(sys.executable)}
"""


class Ssh(Elsewhere):
    """A host behind a server."""

    name, program, packages = "ssh", "ssh_servers.py", ("asyncssh",)
    remedy = "it comes with the extra ssh: pip install 'rollmuxd[ssh]'"

    def told(self, what: dict[str, Any]) -> None:
        """Its ssh configuration, and where it is."""
        self._config: str = what["config"]
        self.where = f"the host is reached by ssh, at {what['where']['box']}"

    def options(self) -> str:
        """As a user's own ssh would find it."""
        return f"config = {json.dumps(self._config)}"


class Ray(Elsewhere):
    """A node of a cluster."""

    name, program, packages = "ray", "ray_nodes.py", ("ray",)
    remedy = "pip install ray"

    def told(self, what: dict[str, Any]) -> None:
        """Where its head is."""
        self._address: str = what["address"]
        self.where = f"the host is a node of a Ray cluster, whose head is at {self._address}"

    def options(self) -> str:
        """The cluster's address; the node has the host's name."""
        return f"address = {json.dumps(self._address)}"


class Slurm(Elsewhere):
    """A node of an allocation."""

    name, program, packages = "slurm", "slurm_cluster.py", ()
    remedy = ""
    longer = 3.0  # each look, and each command of a driver, is a step

    def told(self, what: dict[str, Any]) -> None:
        """Its configuration, and the allocation."""
        self._config, self._allocation = what["config"], what["allocation"]
        self.where = f"the host is a node of allocation {self._allocation} of a Slurm cluster, {self._config}"

    def options(self) -> str:
        """The cluster and the allocation; the node has the host's name."""
        return f"allocation = {json.dumps(self._allocation)}\nconf = {json.dumps(self._config)}"
