"""A gateway and its engines as processes, for what only processes show: locks on GPUs, ends, and beginnings."""

import contextlib
import json
import subprocess
import sys
import time

import forked
import httpx
from networks import free_port
from patience import PATIENCE_S

from rollmuxd_demo.children import Children, environment


class Processes:
    def __init__(self, folder):
        self.folder, self.started = folder, []
        (folder / "gpus").mkdir()

    def engine(self, gpus, *options):
        """One on these GPUs; returns its address."""
        command = [sys.executable, "-m", "rollmuxd_gateway.fakes.server", "--gpu", ",".join(gpus), *options]
        with (self.folder / "engines.log").open("a") as log:
            child = self._start([*command, "--gpus", self.folder / "gpus"], stdout=subprocess.PIPE, stderr=log)
        with child.stdout as said:
            return f"http://127.0.0.1:{int(said.readline())}"

    def gateway(self, text, port=None):
        """One with this configuration, once it answers; returns its process and its address."""
        port = port or free_port()
        file = self.folder / "gateway.toml"
        file.write_text(f'listen = "127.0.0.1:{port}"\n{text}')
        with (self.folder / "gateway.log").open("a") as log:
            child = self._start(
                [sys.executable, "-m", "rollmuxd", "gateway", "run", "--config", file], stdout=log, stderr=log
            )
        url, give_up = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                if httpx.get(f"{url}/healthz", timeout=PATIENCE_S).is_success:
                    return child, url
            assert child.poll() is None, (self.folder / "gateway.log").read_text()
            assert time.monotonic() < give_up, (self.folder / "gateway.log").read_text()
            time.sleep(0.05)

    def _start(self, command, **streams):
        child = forked.Popen(
            command, env=environment(), stdin=subprocess.DEVNULL, text=True, start_new_session=True, **streams
        )
        self.started.append(child)
        return child

    def notes(self):
        """What engines wrote down: when each was awake, and violations."""
        file = self.folder / "gpus" / "engines.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextlib.contextmanager
def processes(folder):
    it = Processes(folder)
    try:
        yield it
    finally:
        Children.end(it.started)
