"""The demo's host behind another backend: by SSH, as a node of a Ray cluster, or of a Slurm allocation.

``rollmuxd demo --backend NAME`` runs this file by its path. Server and clusters are the demo's own. The host's GPUs are
made up in a file of the host, which the backend reads, and in which the mock's driver moves bytes by commands. The SSH
server is OpenSSH's. It is in a network namespace with an address of its own where this user may make one, else on a
port of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from rollmuxd.cli.common import Failed
from rollmuxd_demo.children import Children, environment, tail
from rollmuxd_demo.reached import NODES, Host

#: what runs the servers and clusters, a program for each backend
SERVERS: Final = Path(__file__).parent


@dataclass(frozen=True)
class Server:
    """What serves a host to a backend. It says in JSON how that is reached, which fills in the texts."""

    #: the program, what has to be installed for it, and how
    program: str
    packages: tuple[str, ...]
    remedy: str
    #: where the host is
    where: str
    #: lines of ``[backends.NAME]``, by what the server calls it
    options: Mapping[str, str]
    longer: float = 1.0


SERVED: Final[Mapping[str, Server]] = {
    "ssh": Server(
        "ssh_servers.py",
        ("asyncssh",),
        "it comes with the extra ssh: pip install 'rollmuxd[ssh]'",
        "the host is reached by ssh, at {where[box]}",
        {"config": "config"},  # as a user's own ssh would find it
    ),
    "ray": Server(
        "ray_nodes.py",
        ("ray",),
        "pip install ray",
        "the host is a node of a Ray cluster, whose head is at {address}",
        {"address": "address"},
    ),
    "slurm": Server(
        "slurm_cluster.py",
        (),
        "",
        "the host is a node of allocation {allocation} of a Slurm cluster, {config}",
        {"allocation": "allocation", "config": "conf"},
        longer=3.0,  # each look, and each command of a driver, is a step
    ),
}


class Elsewhere(Host):
    """A host behind something of the demo's own, that runs for as long as the demo does."""

    rollmuxd: Sequence[str] = (str(SERVERS / "made_up_mock.py"),)

    def __init__(self, name: str, folder: Path, children: Children) -> None:
        of = SERVED[name]
        program = SERVERS / of.program
        missing = [package for package in of.packages if find_spec(package) is None]
        if missing:
            raise Failed(f"the demo over {name} needs {' and '.join(missing)}; {of.remedy}")

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
            raise Failed(f"what the demo reaches by {name} has not started: {tail(log, 1) or 'it said nothing'}")
        told = json.loads(said)
        self.name, self.where, self.longer = name, of.where.format(**told), of.longer
        self._options = "\n".join(f"{option} = {json.dumps(told[key])}" for key, option in of.options.items())

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
{self._options}
python = {json.dumps(sys.executable)}

[residency.mock]
made_up_gpus = {json.dumps(str(gpus))}
record = {json.dumps(str(folder / "witness.jsonl"))}
python = {json.dumps(sys.executable)}
"""
