"""How the demo's host is reached: by the mock, or by SSH to a server of the demo's own.

Over SSH its GPUs are made up as well: in a file of the host, which the backend reads there and in which the mock's
driver moves bytes by commands. The server is OpenSSH's, in a network namespace with an address of its own where this
user may make one, else on a port of this machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rollmuxd.cli.calls import Failed

if TYPE_CHECKING:
    from rollmuxd.cli.demo.run import Children

BACKENDS = ("mock", "ssh")

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

    def tables(self, folder: Path) -> str:
        """The tables of the run whose files are in ``folder``; its witness writes ``witness.jsonl`` there."""


def reach(backend: str, folder: Path, children: Children) -> Reached:
    """The demo's host. Raises Failed where it cannot be made."""
    return Mock() if backend == "mock" else Ssh(folder / "ssh", children)


class Mock:
    """A host without hardware."""

    where = ""

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


class Ssh:
    """A host behind a server that runs for as long as the demo does."""

    def __init__(self, folder: Path, children: Children) -> None:
        if find_spec("rollmuxd_backend_ssh") is None or find_spec("rollmuxd_backend_mock") is None:
            raise Failed(
                "the demo over ssh needs rollmuxd-backend-ssh and rollmuxd-backend-mock; make setup installs them"
            )
        from rollmuxd.cli.demo.run import environment, tail

        folder.mkdir(parents=True)
        log = folder / "servers.log"
        with log.open("w") as stderr:
            server = children.start(
                [sys.executable, "-m", "rollmuxd_backend_ssh.testing", folder, "box"],
                env=environment(),
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        assert server.stdout is not None
        with server.stdout:
            said = server.stdout.readline()
        if not said:
            raise Failed(f"the demo's ssh server has not started: {tail(log, 1) or 'it said nothing'}")
        told = json.loads(said)
        self._config: str = told["config"]
        self.where = f"the host is reached by ssh, at {told['where']['box']}"

    def tables(self, folder: Path) -> str:
        """Its GPUs are in a file of the host, as the backend and the driver know it."""
        gpus = folder / "gpus.json"
        if not gpus.exists():
            made = [{"uuid": f"GPU-demo-{number}", "name": "made up", "total_mb": 1000} for number in (0, 1)]
            gpus.write_text(json.dumps({"gpus": made}))
        return f"""\
[[hosts]]
id = "box"
backend = "ssh"
ram_gb = 16
options = {{made_up_gpus = {json.dumps(str(gpus))}}}
{NODES}
[backends.ssh]
config = {json.dumps(self._config)}
python = {json.dumps(sys.executable)}

[residency.mock]
made_up_gpus = {json.dumps(str(gpus))}
record = {json.dumps(str(folder / "witness.jsonl"))}
python = {json.dumps(sys.executable)}
"""
