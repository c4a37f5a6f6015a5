"""The kept connection to one cluster: the member's process and the socket to it, made again when they are gone."""

import asyncio
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rollmuxd_backend_local.agent.connection import AgentConnection, Opened, end_process

#: what the cluster member may take to end by itself
_END_S: Final = 2.0
#: a member looks for the cluster's head for so long, and then ends: the next one finds it, or another in its place
_HEAD_S: Final = "10"
_SAID_KEPT: Final = 4_000
#: how the folder begins that is made for a cluster member's socket, and goes with the cluster member
FOLDER: Final = "rollmuxd-ray-"
#: what the daemon has for itself: settings, a cluster of its own, where it tells systemd how it is (``man sd_notify``)
_THE_DAEMONS: Final = ("ROLLMUX_", "RAY_ADDRESS", "NOTIFY_SOCKET", "WATCHDOG_")


class ClusterConnection(AgentConnection):
    """The member in one cluster, which is started and ended here, and the connection to it."""

    _agent = "the member in the cluster"

    def __init__(self, address: str, connect_s: float, *, now: Callable[[], float] = time.monotonic) -> None:
        super().__init__(connect_s, now)
        self._address = address
        self._what = f"the Ray cluster at {address}"
        self._process: asyncio.subprocess.Process | None = None
        self._folder = ""

    async def _open(self) -> Opened:
        return await asyncio.open_unix_connection(await self._start())

    async def _start(self) -> str:
        """Start the cluster member; where it serves. Raises EOFError: it has ended, and why."""
        self._folder = tempfile.mkdtemp(prefix=FOLDER)
        socket = f"{self._folder}/s"
        env = {name: value for name, value in os.environ.items() if not name.startswith(_THE_DAEMONS)}
        env.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", _HEAD_S)
        log = Path(self._folder) / "said"
        with log.open("wb") as said:
            process = self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "rollmuxd_backend_ray.cluster_member", socket, self._address),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=said,
                env=env,
                start_new_session=True,
            )
        assert process.stdout is not None
        while line := await process.stdout.readline():
            if line == b"ready\n":
                return socket
        await process.wait()
        told = log.read_text(errors="replace")[-_SAID_KEPT:].strip().splitlines()
        raise EOFError(told[-1] if told else f"the cluster member ended with exit code {process.returncode}")

    async def _end(self) -> None:
        """End the cluster member's process, if there is one."""
        process, self._process = self._process, None
        if process is not None:
            await end_process(process, _END_S)
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = ""
