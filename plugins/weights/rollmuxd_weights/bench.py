"""How fast weights move: a trainer or a rollout host as a process, and transfers between many of them.

A host is ``python -m rollmuxd_weights.bench CONFIG``: it reads one JSON object a line, does what it says, and answers
with one. The weights are made of a seed, so every host can be held against the same bytes.
"""

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from rollmuxd_weights.namespaces import Clusters
from rollmuxd_weights.publish import KEY

Json: TypeAlias = dict[str, Any]
#: small enough for many chunks a line at 10 Mbit/s
CHUNK = 256 << 10


# ---- one host, in a process of its own -------------------------------------------------------------------------------


def main() -> None:
    """Be one host until the end of the input."""
    config = json.loads(sys.argv[1])
    with contextlib.ExitStack() as stack:
        host = (_Trainer if config["me"] in config["hosts"]["trainers"] else _Rollout)(config, stack)
        _answer({"ready": True})
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                _answer(getattr(host, asked.pop("do"))(**asked))
            except Exception as error:  # it is the other side's to judge
                _answer({"error": f"{type(error).__name__}: {error}"})


def _answer(told: Json) -> None:
    sys.stdout.write(json.dumps(told) + "\n")
    sys.stdout.flush()


class _Trainer:
    def __init__(self, config: Json, stack: contextlib.ExitStack) -> None:
        from rollmuxd_weights import Publisher

        where, chunk, delta = config["dir"], config["chunk"], config.get("delta", False)
        made = Publisher("bench", config["hosts"], me=config["me"], dir=where, chunk=chunk, delta=delta)
        self._publisher = stack.enter_context(made)
        self._words: Any = None

    def publish(self, version: int, mb: float, changed: float) -> Json:
        """Publish random bf16 words; of those of the version before, this share changes."""
        import numpy as np

        rng = np.random.default_rng(version)
        words = int(mb * (1 << 20)) // 2
        if self._words is None or changed >= 1 or len(self._words) != words:
            self._words = rng.integers(0, 1 << 16, words, dtype=np.uint16)
        else:
            self._words[rng.integers(0, words, int(changed * words))] ^= np.uint16(1)
        made = self._publisher.publish({"weights": self._words}, version)
        return {
            "bytes": made.bytes,
            "delta_bytes": made.delta_bytes,
            "seconds": made.seconds,
            "copy_s": made.copy_s,
            "sha256": _sum(made.path),
        }


class _Rollout:
    def __init__(self, config: Json, stack: contextlib.ExitStack) -> None:
        from rollmuxd_weights import Puller

        self._came: list[Any] = []
        self._puller = Puller(
            "bench", config["hosts"], me=config["me"], dir=config["dir"], flat=config.get("flat", False),
            on_chunk=self._came.append,
        )  # fmt: skip
        stack.callback(self._puller.close)

    def pull(self) -> Json:
        """Pull what is newest."""
        self._came.clear()
        began = time.monotonic()
        found = self._puller.pull(wait_s=30)
        if found is None:
            return {"error": f"there was nothing to pull ({self._puller.failure})"}
        return {
            "began": began,
            "cpu_s": time.process_time(),
            "ended": time.monotonic(),
            "sha256": _sum(found.path),
            "slow_bytes": found.slow_bytes,
            "fabric_bytes": found.fabric_bytes,
            "taken_over": found.taken_over,
            "resumed": found.resumed,
            "wrong": found.wrong,
            "rates": found.rates,
            "came": [[came.at_s - began, came.over, came.slow, came.chunk] for came in self._came],
        }


def _sum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


# ---- many of them ----------------------------------------------------------------------------------------------------


class Run:
    """Hosts as processes; a context manager. ``command``: puts a host's command where it is to run."""

    def __init__(self, hosts: Mapping[str, Mapping[str, Sequence[str]]], command: Any = None, **config: Any) -> None:
        self.hosts = hosts
        self._command = command or (lambda _, *words: list(words))
        self._config = {"chunk": CHUNK, **config}
        self._folder, self._key = "", secrets.token_hex(16)
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def __enter__(self) -> Self:
        memory = Path("/dev/shm")  # noqa: S108 -- a folder of a random name is made there
        self._folder = tempfile.mkdtemp(prefix="rollmuxd-weights-bench-", dir=memory if memory.is_dir() else None)
        try:
            for host in (*self.hosts["trainers"], *self.hosts["rollouts"]):
                self._start(host)
            self._answers(list(self.processes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _start(self, host: str) -> None:
        config = {**self._config, "hosts": self.hosts, "me": host, "dir": f"{self._folder}/{host}"}
        words = self._command(host, sys.executable, "-m", "rollmuxd_weights.bench", json.dumps(config))
        self.processes[host] = subprocess.Popen(
            words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, KEY: self._key}
        )

    def ask(self, hosts: Sequence[str], **what: Any) -> dict[str, Json]:
        """Ask hosts the same at the same time. Raises RuntimeError with what one could not do."""
        for host in hosts:
            pipe = self.processes[host].stdin
            assert pipe is not None
            pipe.write(json.dumps(what) + "\n")
            pipe.flush()
        return self._answers(hosts)

    def _answers(self, hosts: Sequence[str]) -> dict[str, Json]:
        found = {}
        for host in hosts:
            pipe = self.processes[host].stdout
            assert pipe is not None
            found[host] = json.loads(pipe.readline() or '{"error": "it ended"}')
            if "error" in found[host]:
                raise RuntimeError(f"host {host}: {found[host]['error']}")
        return found

    def close(self) -> None:
        """End the hosts, and remove what they have written."""
        for process in self.processes.values():
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(OSError):
                process.stdin.close()
        for process in self.processes.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            assert process.stdout is not None
            process.stdout.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def transfer(self, version: int, mb: float, *, changed: float = 1.0, during: Any = None) -> Json:
        """Publish on every trainer, then pull on every rollout host at once. Seconds, bytes, and what each host got.

        ``during``: called in a thread once the pull has begun.
        """
        made = self.ask(list(self.hosts["trainers"]), do="publish", version=version, mb=mb, changed=changed)
        aside = threading.Thread(target=during or (lambda: None))
        aside.start()
        pulled = self.ask(list(self.hosts["rollouts"]), do="pull")
        aside.join()
        seconds = max(one["ended"] for one in pulled.values()) - min(one["began"] for one in pulled.values())
        first = next(iter(made.values()))
        return {
            "bytes": first["bytes"],
            "delta_bytes": first["delta_bytes"],
            "publish_s": max(one["seconds"] for one in made.values()),
            "copy_s": max(one["copy_s"] for one in made.values()),
            "seconds": seconds,
            "slow_bytes": sum(one["slow_bytes"] for one in pulled.values()),
            "taken_over": sum(one["taken_over"] for one in pulled.values()),
            "identical": len({one["sha256"] for one in (*made.values(), *pulled.values())}) == 1,
            "load": os.getloadavg()[0],
            "hosts": pulled,
        }


def loopback(train: int, rollout: int) -> dict[str, dict[str, list[str]]]:
    """Hosts on this machine, at ports that are free now."""
    with contextlib.ExitStack() as stack:
        ports = iter(
            [
                stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
                for _ in range(train + rollout)
            ]
        )
        return {
            "trainers": {f"train{number}": [f"127.0.0.1:{next(ports)}"] for number in range(train)},
            "rollouts": {f"roll{number}": [f"127.0.0.1:{next(ports)}"] for number in range(rollout)},
        }


@contextlib.contextmanager
def in_namespaces(clusters: Clusters, **config: Any) -> Iterator[Run]:
    """The hosts of these clusters, each in its namespace."""
    with Run(clusters.hosts, clusters.command, **config) as run:
        yield run


# ---- the picture -----------------------------------------------------------------------------------------------------


def picture(found: Json, title: str, cut_s: float | None = None) -> str:
    """A page with a lane for each host's slow line and one for what it gets through the fabric: chunks as they come."""
    width, lane = 1000, 14
    scale = width / max(found["seconds"], 1e-9)
    chunks = 1 + max(chunk for host in found["hosts"].values() for _, _, _, chunk in host["came"])
    rows, y = [], 20
    for name, slow in (("slow lines", True), ("fabric", False)):
        rows.append(f'<text x="0" y="{y - 5}" class="head">{name}</text>')
        for host, told in found["hosts"].items():
            rows.append(f'<text x="0" y="{y + lane - 4}">{host}</text>')
            for at, over, is_slow, chunk in told["came"]:
                if is_slow == slow:
                    colour = f"hsl({330 * chunk // chunks} 70% 45%)"
                    rows.append(
                        f'<rect x="{60 + at * scale:.1f}" y="{y}" width="3" height="{lane - 2}" fill="{colour}">'
                        f"<title>chunk {chunk} at {at:.2f} s over {over}</title></rect>"
                    )
            y += lane
        y += 30
    if cut_s is not None:
        x = 60 + cut_s * scale
        rows.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{y - 30}" stroke="red" stroke-dasharray="4"/>')
    facts = (
        f"{found['bytes'] / 1e6:.1f} MB to {len(found['hosts'])} hosts in {found['seconds']:.2f} s; "
        f"{found['slow_bytes'] / 1e6:.1f} MB crossed the slow lines; {found['taken_over']} chunks were taken over; "
        f"{'bit-identical on every host' if found['identical'] else 'NOT identical'}."
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:2em}text{font-size:10px}.head{font-weight:bold}</style>"
        f"<h1>{title}</h1><p>{facts} A mark is a chunk that came, coloured by its place in the file"
        f"{'; the dashed line is when a slow line was cut' if cut_s is not None else ''}.</p>"
        f'<svg viewBox="0 0 {width + 80} {y}" width="100%">{"".join(rows)}</svg></html>'
    )


if __name__ == "__main__":
    main()
