"""The demo's processes: a daemon, jobs, and what is measured before them. Everything started here is ended here.

Two runs, each with a daemon and a state of its own: all jobs at once, and one after the other. The pools are the same
in both: one host with two made-up GPUs. gpu0 is the rollout pool and gpu1 the train pool, and each stands for one CPU
core that the jobs compute on. Every daemon and every job is a process of its own, as it would be elsewhere.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from rollmuxd.cli.common import Failed, connect
from rollmuxd_demo import spin
from rollmuxd_demo.children import Children, environment, tail
from rollmuxd_demo.measure import JobRecord, RunRecord, core_gain
from rollmuxd_demo.reached import Host

if TYPE_CHECKING:
    from rollmuxd_demo.live import Lines, Screen

#: The RL loops: programs that run by their paths.
LOOPS = Path(__file__).with_name("loops")
#: The three shapes: trains longer than it samples, samples longer than it trains, and balanced.
SHAPES = {"modular-sum": "modular_sum.py", "close-brackets": "close_brackets.py", "sort-digits": "sort_digits.py"}
#: Longer than any phase by far: what has said nothing for so long hangs.
SILENCE_S = 240.0
READY_S = 120.0
CALIBRATION_SCALE = 0.15
#: A Unix socket's path may have 107 bytes.
LONGEST_SOCKET = 100


@dataclass(frozen=True)
class JobPlan:
    """A job that will run."""

    name: str
    shape: str
    script: Path
    seed: int


@dataclass(frozen=True)
class Plan:
    """What both runs do."""

    jobs: tuple[JobPlan, ...]
    iterations: int
    scale: float


def plan_jobs(count: int) -> tuple[JobPlan, ...]:
    """So many jobs, cycling through the shapes; each has a seed of its own."""
    shapes = list(SHAPES)
    jobs = []
    for number in range(count):
        shape, again = shapes[number % len(shapes)], number // len(shapes)
        name = shape if not again else f"{shape}-{again + 1}"
        jobs.append(JobPlan(name, shape, LOOPS / SHAPES[shape], seed=number))
    return tuple(jobs)


def cores() -> list[int]:
    """The cores this process may use; GPU i of the demo stands for the i-th, counted round, as in the examples."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))


# ---- processes -------------------------------------------------------------------------------------------------------


class JobFailed(Exception):
    """A job ended badly, or hangs."""

    def __init__(self, name: str, what: str, stderr: str) -> None:
        super().__init__(f"job {name} {what}")
        self.name, self.what, self.stderr = name, what, stderr


# ---- what is measured before -----------------------------------------------------------------------------------------


def measure_shapes(plan: Sequence[JobPlan], folder: Path, children: Children) -> dict[str, dict[str, float]]:
    """CPU seconds per phase at scale 1, of each shape, from a short run of it without a daemon."""
    measured: dict[str, dict[str, float]] = {}
    for job in plan:
        if job.shape in measured:
            continue
        log = folder / f"calibrate-{job.shape}.log"
        with log.open("w") as stderr:
            child = children.start(
                [sys.executable, job.script, "--iterations", "2", "--scale", str(CALIBRATION_SCALE), "--json"],
                env=environment(ROLLMUX_URL="off"),
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
            output, _ = child.communicate(timeout=SILENCE_S)
        lines = [line for line in map(_parsed, output.splitlines()) if line is not None]
        if child.returncode != 0 or not lines:
            raise JobFailed(job.name, f"failed in the measurement before, with status {child.returncode}", tail(log))
        # The last iteration: the first one also warms caches up. CPU time: what else runs here must not count.
        seconds = {name: value for name, value in lines[-1].items() if name.endswith("_cpu_s")}
        measured[job.shape] = {
            name.removesuffix("_cpu_s"): max(took, 1e-3) / CALIBRATION_SCALE for name, took in seconds.items()
        }
    return measured


def measure_core_gain(rounds: int = 3, seconds: float = 0.12) -> float | None:
    """By how much both pools' cores at once do more than one of them alone; None if there is one core only.

    None, too, where the machine was too busy for every round of the measurement.
    """
    pair = cores()[:2]
    return core_gain(spin.rates(pair, rounds, seconds)) if len(pair) == 2 else None


# ---- the daemon ------------------------------------------------------------------------------------------------------


def configuration(folder: Path, socket: Path, hosts: str) -> str:
    """The ``rollmux.toml`` of one run, with the tables of its hosts."""
    return f"""\
# Written by `rollmuxd demo`: a host with two GPUs, one in each pool.

[daemon]
state_dir = {json.dumps(str(folder / "state"))}
socket = {json.dumps(str(socket))}
listen = "127.0.0.1:0"  # for the dashboard; jobs use the socket

[limits]
clean_tolerance_gb = 0.0  # the demo's states are smaller than the default, which would take their GPUs for clean

{hosts}"""


class DaemonProcess:
    """A daemon of the demo's own. Killed, it can be started again on the same state."""

    def __init__(self, folder: Path, socket: Path, children: Children, reached: Host) -> None:
        self.folder, self.socket, self.children, self.reached = folder, socket, children, reached
        self.url = f"unix://{socket}"
        self.log = folder / "daemon.log"
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it, and wait until it is ready."""
        from rollmuxd.cli.daemon import readiness

        config = self.folder / "rollmux.toml"
        config.write_text(configuration(self.folder, self.socket, self.reached.tables(self.folder)))
        with self.log.open("a") as log:
            self._process = self.children.start(
                [sys.executable, *self.reached.rollmuxd, "daemon", "run", "--config", config],
                env=environment(),
                stdout=log,
                stderr=log,
            )
        give_up = time.monotonic() + READY_S
        while readiness(str(self.socket)) is None:
            if self._process.poll() is not None:
                raise Failed(f"the demo's daemon ended with status {self._process.returncode}:\n{tail(self.log)}")
            if time.monotonic() > give_up:
                raise Failed(f"the demo's daemon is not ready after {READY_S:g} s:\n{tail(self.log)}")
            time.sleep(0.05)

    def dashboard(self) -> tuple[str, str]:
        """Where its dashboard is, and a key for it: one that lets look, and do nothing."""
        with closing(connect(self.url, None)) as daemon:
            me = daemon.get("/v1/me")
            made = daemon.post("/v1/keys", {"owner": me["owner"], "user": "demo", "role": "viewer"})
        return json.loads((self.folder / "state" / "daemon.json").read_text())["url"], made["secret"]

    def stop(self) -> None:
        """End it in good order."""
        if self._process is not None:
            self.children.end([self._process], patience_s=10.0)

    def facts(self) -> tuple[dict[str, Any], ...]:
        """Everything that happened under it, kills included."""
        facts: list[dict[str, Any]] = []
        after = 0
        with closing(connect(self.url, None)) as daemon:
            while True:
                page = daemon.get("/v1/facts", after=after, wait_ms=0)
                facts += page["facts"]
                if page["last"] == after:
                    return tuple(facts)
                after = page["last"]


def violations(witness: Path) -> list[dict[str, Any]]:
    """What the mock backend saw that must never happen, from its own record."""
    if not witness.exists():
        return []
    lines = (_parsed(line) for line in witness.read_text().splitlines())
    return [line for line in lines if line is not None and line.get("event") == "violation"]


# ---- one run ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Iterated:
    """A job has finished an iteration."""

    job: str
    line: dict[str, Any]


@dataclass(frozen=True)
class Exited:
    """A job's process has ended, and all that it said was read."""

    job: str
    status: int


Event: TypeAlias = Iterated | Exited


class Run:
    """All jobs under one daemon, at once or in turn."""

    def __init__(self, plan: Plan, folder: Path, children: Children, watcher: Lines | Screen, reached: Host) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.reached = reached
        self.plan, self.folder, self.children, self.watcher = plan, folder, children, watcher
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def at_once(self) -> RunRecord:
        """All jobs together."""
        return self._run([self.plan.jobs], look=True)

    def in_turn(self) -> RunRecord:
        """Each job alone on the same two pools."""
        return self._run([(job,) for job in self.plan.jobs])

    def _run(self, batches: Sequence[Sequence[JobPlan]], *, look: bool = False) -> RunRecord:
        with _short_folder() as short:
            daemon = DaemonProcess(self.folder, short / "d.sock", self.children, self.reached)
            daemon.start()
            if look:
                page, key = daemon.dashboard()
                self.watcher.note(f"look at it in a browser: {page}/  (log in with {key})")
            self.watcher.begins(daemon.url)
            try:
                for batch in batches:
                    self._until_done(batch, daemon.url)
                facts = daemon.facts()
            finally:
                daemon.stop()
        records = [
            JobRecord.read(json.loads((self.folder / "out" / f"{job.name}.json").read_text())) for job in self.plan.jobs
        ]
        return RunRecord(tuple(records), facts)

    def _until_done(self, batch: Sequence[JobPlan], url: str) -> None:
        running = {job.name: self._start(job, url) for job in batch}
        heard = time.monotonic()
        while running:
            try:
                event = self._events.get(timeout=0.25)
            except queue.Empty:
                event = None
            now = time.monotonic()
            if event is not None:
                heard = now
                self.watcher.saw(event)
            if now - heard > SILENCE_S:
                name = next(iter(running))
                raise JobFailed(name, f"has said nothing for {SILENCE_S:g} s", tail(self._stderr(name)))
            if isinstance(event, Exited):
                del running[event.job]
                if event.status != 0:
                    raise JobFailed(event.job, f"ended with status {event.status}", tail(self._stderr(event.job)))
            self.watcher.tick()

    def _stderr(self, job: str) -> Path:
        return self.folder / f"{job}.stderr"

    def _start(self, job: JobPlan, url: str) -> subprocess.Popen[str]:
        with self._stderr(job.name).open("w") as stderr:
            child = self.children.start(
                [
                    *(sys.executable, job.script, "--json", "--name", job.name, "--seed", str(job.seed)),
                    *("--iterations", str(self.plan.iterations), "--scale", str(self.plan.scale)),
                    *("--out", self.folder / "out"),
                ],
                env=environment(ROLLMUX_URL=url, ROLLMUX_REQUIRED="1"),
                stdout=subprocess.PIPE,
                stderr=stderr,
            )
        threading.Thread(target=self._read, args=(job.name, child), daemon=True).start()
        return child

    def _read(self, job: str, child: subprocess.Popen[str]) -> None:
        assert child.stdout is not None
        for text in child.stdout:
            line = _parsed(text)
            if line is not None and "step" in line:
                self._events.put(Iterated(job, line))
        self._events.put(Exited(job, child.wait()))


@contextmanager
def _short_folder() -> Iterator[Path]:
    """A folder for a socket, whose path must be short even where the user keeps everything far down."""
    root = None if len(tempfile.gettempdir()) < LONGEST_SOCKET // 2 else "/tmp"  # noqa: S108  (mkdtemp makes its own)
    with tempfile.TemporaryDirectory(prefix="rollmuxd-", dir=root) as name:
        yield Path(name)


def _parsed(text: str) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
