"""How the demo's host is reached: it is the mock's, without hardware, unless a backend is named.

What ``--backend`` names reaches servers and clusters of the project's tests, so that needs a checkout.
"""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rollmuxd.cli.common import Failed
from rollmuxd_demo.children import Children

#: hosts behind other backends, with servers of the project's own tests
ELSEWHERE: Final = Path(__file__).parents[3] / "tests" / "shared" / "demo_hosts.py"
NODES = """
[[hosts.nodes]]
gpus = [0]
pools = ["rollout"]

[[hosts.nodes]]
gpus = [1]
pools = ["train"]
"""


class Host:
    """The demo's host, as the file of one run names it: the mock's, without hardware."""

    #: where it is, for people
    where = ""
    #: a switch here takes so many times as long as the mock's, or less; and so do phases and the whole demo
    longer = 1.0
    #: how Python runs a ``rollmuxd`` that can move bytes there
    rollmuxd: Sequence[str] = ("-m", "rollmuxd")

    def tables(self, folder: Path) -> str:
        """The tables of the run whose files are in ``folder``; its witness writes ``witness.jsonl`` there.

        The GPUs are in a file, so that they outlive the daemon.
        """
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


def reach(backend: str, folder: Path, children: Children) -> Host:
    """The demo's host. Raises Failed where it cannot be made."""
    if backend == "mock":
        return Host()
    if not ELSEWHERE.is_file():
        raise Failed(
            f"there is no {ELSEWHERE}: the demo over {backend} starts a server from the project's tests; run it in a "
            "checkout, or in the unpacked source archive, after `make setup`"
        )
    host: Host = runpy.run_path(str(ELSEWHERE))["Elsewhere"](backend, folder / backend, children)
    return host
