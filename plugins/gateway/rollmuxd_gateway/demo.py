"""``rollmuxd gateway demo``: a real daemon, two jobs, four engines each on the same four GPUs, and a gateway for each.

The two jobs run twice: with the tail of a rollout released, and with it kept. Engines are ``hashlm``: processes that
take a lock on their GPU while they are awake. So two of them on one GPU would be noticed.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from msgspec import Struct

from rollmuxd.cli.common import Failed
from rollmuxd_demo.children import Children, environment, tail
from rollmuxd_demo.reached import Host as DemosHost
from rollmuxd_demo.run import DaemonProcess, violations

JOBS: Final = ("first", "second")
GPUS: Final = 4
READY_S: Final = 120.0
SILENCE_S: Final = 300.0
#: what each job is promised where the gateway is the job
SLO: Final = 2.0


class Shape(Struct, frozen=True):
    """What each job does."""

    iterations: int = 4
    requests: int = 64
    median: float = 160.0
    sigma: float = 0.7
    step_ms: float = 10.0
    per_request_us: float = 300.0
    max_tokens: int = 1_200
    train_s: float = 0.5


class Host(DemosHost):
    """A host of made-up GPUs: four in the rollout pool, one in the train pool."""

    def tables(self, folder: Path) -> str:
        """As ``rollmux.toml`` has it."""
        return f"""\
[[hosts]]
id = "mock"
backend = "mock"
ram_gb = 256

[hosts.options]
record = {json.dumps(str(folder / "witness.jsonl"))}
memory = {json.dumps(str(folder / "memory.json"))}

[[hosts.nodes]]
gpus = [0, 1, 2, 3]
pools = ["rollout"]

[[hosts.nodes]]
gpus = [4]
pools = ["train"]
"""


class Part:
    """One run: a daemon, the engines and gateways of both jobs, and their loops."""

    def __init__(self, folder: Path, children: Children, shape: Shape, *, release: bool, link: str = "loop") -> None:
        self.folder, self.children, self.shape, self.release, self.link = folder, children, shape, release, link
        folder.mkdir(parents=True)
        self.gpus = folder / "gpus"
        self.gpus.mkdir()
        self.facts: tuple[dict[str, Any], ...] = ()
        self.rollouts: dict[str, list[dict[str, Any]]] = {}
        self.bars: dict[str, Any] = {}

    def run(self, names: Sequence[str] = JOBS) -> dict[str, Any]:
        """These jobs to their ends."""
        with _short_folder() as short:
            daemon = DaemonProcess(self.folder, short / "d.sock", self.children, Host())
            daemon.start()
            started: dict[str, list[subprocess.Popen[str]]] = {name: [] for name in names}
            try:
                urls = {name: self._gateway(name, daemon.url, started[name]) for name in names}
                began = time.time()
                loops = {name: self._loop(name, urls[name], daemon.url) for name in names}
                with ThreadPoolExecutor() as pool:
                    waiting = [pool.submit(self._until_done, name, loops[name], urls, started) for name in names]
                    outcomes = [one.result() for one in waiting]
                self.facts = daemon.facts()
            finally:
                self.children.end([child for children in started.values() for child in children])
                daemon.stop()
        seen = violations(self.folder / "witness.jsonl") + self._engine_violations()
        return {
            "wall_s": max(outcome["all_done"] for outcome in outcomes) - began,
            "took_s": {name: outcome["all_done"] - began for name, outcome in zip(names, outcomes, strict=True)},
            "responses": sum(outcome["responses"] for outcome in outcomes),
            "wrong": sum(outcome["wrong"] for outcome in outcomes),
            "violations": seen,
        }

    def _engine_violations(self) -> list[dict[str, Any]]:
        file = self.gpus / "engines.jsonl"
        lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [line for line in lines if line["event"] == "violation"]

    def _gateway(self, name: str, daemon: str, started: list[subprocess.Popen[str]]) -> str:
        """Its engines, asleep, and its gateway; returns the gateway's address."""
        shape = self.shape
        ports = []
        for number in range(GPUS):
            command: list[str | Path] = [
                *(sys.executable, "-m", "rollmuxd_gateway.fakes.server", "--asleep", "--seed", str(number)),
                *("--gpu", f"mock/gpu{number}", "--gpus", self.gpus, "--median", str(shape.median)),
                *("--sigma", str(shape.sigma), "--step-ms", str(shape.step_ms)),
                *("--per-request-us", str(shape.per_request_us)),
            ]
            ports.append(self._start(f"{name}-engine{number}", command, started))
        replicas = "".join(
            f'\n[[replica]]\nurl = "http://127.0.0.1:{port}"\ngpus = ["mock/gpu{number}"]\n'
            for number, port in enumerate(ports)
        )
        file = self.folder / f"{name}.toml"
        port = _free_port()
        own = ""
        if self.link == "own":
            own = f'link = "own"\n[job]\nname = "{name}"\nslo = {SLO}\n[job.train]\nnodes = 1\n'
            own += "[job.rollout]\nnodes = 1\nmin_gpus = 1\ngpu_gb = 40\nram_gb = 10\n"
        file.write_text(
            f'listen = "127.0.0.1:{port}"\ntail = "{"release" if self.release else "keep"}"\n'
            f"requests_per_rollout = {shape.requests}\n{own}{replicas}"
        )
        with (self.folder / f"{name}-gateway.log").open("w") as log:
            child = self.children.start(
                [sys.executable, "-m", "rollmuxd", "gateway", "run", "--config", file],
                env=environment(ROLLMUX_URL=daemon, ROLLMUX_REQUIRED="1"),
                stdout=log,
                stderr=log,
            )
        started.append(child)
        url = f"http://127.0.0.1:{port}"
        _until(lambda: _answers(f"{url}/healthz"), child, self.folder / f"{name}-gateway.log")
        return url

    def _start(self, name: str, command: Sequence[str | Path], started: list[subprocess.Popen[str]]) -> int:
        """A process that prints its port."""
        with (self.folder / f"{name}.log").open("w") as log:
            child = self.children.start(command, env=environment(), stdout=subprocess.PIPE, stderr=log)
        started.append(child)
        assert child.stdout is not None
        with child.stdout as said:  # it says nothing more
            line = said.readline().strip()
        if not line.isdigit():
            raise Failed(f"{name} did not start:\n{tail(self.folder / f'{name}.log')}")
        return int(line)

    def _loop(self, name: str, url: str, daemon: str) -> subprocess.Popen[str]:
        shape = self.shape
        with (self.folder / f"{name}.log").open("w") as log:
            return self.children.start(
                [
                    *(sys.executable, "-m", "rollmuxd_gateway.demo_loop", "--name", name, "--gateway", url),
                    *("--iterations", str(shape.iterations), "--requests", str(shape.requests)),
                    *("--median", str(shape.median), "--sigma", str(shape.sigma), "--train-s", str(shape.train_s)),
                    *("--max-tokens", str(shape.max_tokens), "--seed", str(JOBS.index(name))),
                    *(("--alone",) if self.link == "own" else ()),
                ],
                env=environment(ROLLMUX_URL=daemon, ROLLMUX_REQUIRED="1"),
                stdout=subprocess.PIPE,
                stderr=log,
            )

    def _until_done(
        self,
        name: str,
        loop: subprocess.Popen[str],
        urls: Mapping[str, str],
        started: Mapping[str, list[subprocess.Popen[str]]],
    ) -> dict[str, Any]:
        log = self.folder / f"{name}.log"
        lines: list[dict[str, Any]] = []
        assert loop.stdout is not None
        watch = threading.Timer(SILENCE_S, loop.kill)
        watch.start()
        for text in loop.stdout:
            lines.append(json.loads(text))
            if "all_done" in lines[-1]:
                self.bars[name] = _get(f"{urls[name]}/rollmux/bars")
                if self.link == "own":  # the gateway is the job, and the job is over
                    self.children.end(started[name][-1:])
        watch.cancel()
        loop.stdout.close()
        if loop.wait() != 0:
            raise Failed(f"job {name} ended with status {loop.returncode}:\n{tail(log)}")
        self.rollouts[name] = [line for line in lines if "step" in line]
        return {key: value for line in lines if "step" not in line for key, value in line.items()}

    # ---- figures -----------------------------------------------------------------------------------------------------

    def queued_at(self) -> dict[str, list[float]]:
        """Of each job, when it asked for a rollout, in seconds."""
        names = {fact["job"]: fact["spec"]["name"] for fact in self.facts if fact["fact"] == "job_registered"}
        found: dict[str, list[float]] = {name: [] for name in JOBS}
        for fact in self.facts:
            if fact["fact"] == "slot_queued" and fact["phase"] == "rollout":
                found[names[fact["job"]]].append(fact["at"] / 1000)
        return found

    def tails(self) -> list[dict[str, float]]:
        """Of each rollout that gave GPUs back: how long the directive took, and how long before its end it was."""
        queued, found = self.queued_at(), []
        for name, rollouts in self.rollouts.items():
            other = queued[JOBS[1 - JOBS.index(name)]]
            for it in rollouts:
                if "directive_at" not in it or not it["shrinks"]:
                    continue
                waited = [at for at in other if at <= it["directive_at"]]
                asked = max([it["crossed_at"], *waited[-1:]])
                found.append(
                    {
                        "directive_ms": round(1000 * (it["directive_at"] - asked)),
                        "released_before_end_s": round(it["ended"] - it["shrinks"][0][0], 3),
                        "shrink_ms": round(1000 * (it["shrinks"][-1][0] - it["directive_at"])),
                    }
                )
        return found


def unreleased(rollouts: Sequence[dict[str, Any]]) -> list[str]:
    """For each rollout that was asked and gave nothing back: the gateway's reason, or ``accepted``, or that it ended
    before the gateway was asked.
    """
    kept = [it for it in rollouts if "directive_at" in it and not it["shrinks"]]
    return [it.get("verdicts", ["ended"])[-1] for it in kept]


def run(folder: Path, children: Children, shape: Shape, say: Any) -> tuple[dict[str, Any], Part]:
    """Both runs, paired: what releasing the tail brings."""
    say("two jobs, with the tail released ...")
    on = Part(folder / "release", children, shape, release=True)
    with_tails = on.run()
    say("the same two jobs, with the tail kept ...")
    off = Part(folder / "keep", children, shape, release=False)
    kept = off.run()
    tails = on.tails()
    drains = [drain for rollouts in on.rollouts.values() for it in rollouts for drain in it.get("drains_ms", [])]
    ratio = kept["wall_s"] / with_tails["wall_s"]
    result = {
        "wall_ratio": round(ratio, 3),
        "wall_s": {"release": round(with_tails["wall_s"], 2), "keep": round(kept["wall_s"], 2)},
        "rollouts": sum(map(len, on.rollouts.values())),
        # no job waits beside the last rollout, so that one is not asked
        "asked": sum("directive_at" in it for rollouts in on.rollouts.values() for it in rollouts),
        "released": len(tails),
        "unreleased": unreleased([it for rollouts in on.rollouts.values() for it in rollouts]),
        "directive_after_crossing_ms": max((it["directive_ms"] for it in tails), default=None),
        "released_before_end_s": [it["released_before_end_s"] for it in tails],
        "drain_ms_p50": round(statistics.median(drains), 1) if drains else None,
        "moved": sum(it.get("moved", 0) for rollouts in on.rollouts.values() for it in rollouts),
        "responses": with_tails["responses"] + kept["responses"],
        "identical": with_tails["wrong"] + kept["wrong"] == 0,
        "violations": with_tails["violations"] + kept["violations"],
    }
    return result, on


def problems(result: dict[str, Any]) -> list[str]:
    """What is short of what was promised."""
    found = []
    if result["wall_ratio"] < 1.10:
        found.append(f"releasing tails made it {result['wall_ratio']:.2f}x as fast, and 1.10x was wanted")
    late = result["directive_after_crossing_ms"]
    if late is None:
        found.append("no rollout was asked to release its tail")
    elif late > 2_500:
        found.append(f"a directive came {late} ms after the tail began, and 2,500 ms were wanted")
    # A refusal is the gateway's to make: the rest may be too short, or not fit on fewer engines.
    kept = [why for why in result["unreleased"] if why in ("accepted", "ended")]
    if kept:
        found.append(f"{len(kept)} of the {result['asked']} rollouts that were asked released nothing: {kept}")
    if any(seconds <= 0 for seconds in result["released_before_end_s"]):
        found.append("a rollout gave its GPUs back only when it was over")
    if result["drain_ms_p50"] is not None and result["drain_ms_p50"] > 500:
        found.append(f"half of the drains took more than {result['drain_ms_p50']} ms, and 500 ms were wanted")
    if not result["identical"]:
        found.append("responses differ from what the model says")
    if result["violations"]:
        found.append(f"GPUs were used twice, {len(result['violations'])} times, first: {result['violations'][0]}")
    return found


def run_own(folder: Path, children: Children, shape: Shape, say: Any) -> tuple[dict[str, Any], Part]:
    """Loops that know one URL, and no phases: one alone, then both."""
    say("one loop alone, by its traffic ...")
    alone = Part(folder / "alone", children, shape, release=True, link="own").run(JOBS[:1])
    say("two loops, by their traffic ...")
    both = Part(folder / "both", children, shape, release=True, link="own")
    shared = both.run()
    phases = {name: both.bars[name]["phases"] for name in JOBS}
    slowdowns = {name: round(took / alone["wall_s"], 3) for name, took in shared["took_s"].items()}
    result = {
        "rollouts": sum(map(len, both.rollouts.values())),
        "phases_by_traffic": sum(one["rollout"] for one in phases.values()),
        "trainings_by_traffic": sum(one["train"] for one in phases.values()),
        "both_ended": len(both.rollouts) == len(JOBS),
        "alone_s": round(alone["wall_s"], 2),
        "slowdowns": slowdowns,
        "bound": SLO,
        "identical": alone["wrong"] + shared["wrong"] == 0,
        "violations": alone["violations"] + shared["violations"],
    }
    return result, both


def problems_own(result: dict[str, Any]) -> list[str]:
    """What is short of what was promised."""
    found = []
    if result["phases_by_traffic"] != result["rollouts"]:
        found.append(f"{result['phases_by_traffic']} rollout phases were held for {result['rollouts']} rollouts")
    slow = max(result["slowdowns"].values())
    if slow > result["bound"]:
        found.append(f"a loop ran {slow} times slower than alone, and {result['bound']} was promised")
    if not (result["both_ended"] and result["identical"]):
        found.append("a loop did not end, or its responses differ from what the model says")
    if result["violations"]:
        found.append(f"GPUs were used twice, {len(result['violations'])} times, first: {result['violations'][0]}")
    return found


# ---- small things ----------------------------------------------------------------------------------------------------


@contextmanager
def _short_folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="rollmuxd-") as name:
        yield Path(name)


def _free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def _answers(url: str) -> bool:
    import httpx

    try:
        return httpx.get(url, timeout=5).status_code == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _get(url: str) -> Any:
    import httpx

    return httpx.get(url, timeout=30).json()


def _until(done: Any, child: subprocess.Popen[str], log: Path) -> None:
    give_up = time.monotonic() + READY_S
    while not done():
        if child.poll() is not None or time.monotonic() > give_up:
            raise Failed(f"a process of the demo did not start:\n{tail(log)}")
        time.sleep(0.05)
