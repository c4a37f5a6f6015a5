"""Live tests: a real daemon, real client processes, and the record of the mock backend as witness.

``live.daemon()`` starts a daemon of the test's own, with leases of six seconds; ``live.trainer(name)`` gives
a trainer (``workloads/trainer.py``), which does phase by phase what the test tells it, on its main thread, through the
public API; ``live.script(path)`` starts a whole program. What was started is killed at the end of the test, whatever
happened, and the logs of all of them are shown where the test has failed. What must hold in every test (no GPU held
twice, fences that only grow) is checked at the end of each.

Conditions are polled (``until``), with a deadline that says what was waited for: it is far off, since other people use
this machine too. What a test needs to be in a certain order it brings into that order: by a fact, a file, or somebody
who holds the GPUs until all are there. A ``time.sleep`` is there only where time that goes by is what is tested.
"""

import contextlib
import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import forked
import httpx
import pytest
from patience import PATIENCE_S, until
from ray_cluster import IMPORTED_BY_RAY

from rollmuxd.client.sync import Daemon as Line

WORKLOADS = Path(__file__).with_name("workloads")
#: rollmuxd, with a mock backend whose calls can go wrong
FAULTY = Path(__file__).parents[1] / "shared" / "faulty_mock.py"
LEASE_S, HEARTBEAT_S = 6.0, 0.5
#: what may come on top of any time limit: other people use this machine too
SLACK_S = 5.0

#: arguments of a Ray for one job, whose group of bundles reserves up to three CPUs for a GPU
LITTLE_RAY = ["--num-cpus=6", "--object-store-memory=80000000", "--include-log-monitor=no", "--include-dashboard=no"]

CONFIG = """
[daemon]
listen = "127.0.0.1:0"
state_dir = {state}
shutdown_s = {shutdown_s}
mode = "{mode}"
policy = "{policy}"

[lease]
lease_s = {lease_s}
heartbeat_s = {heartbeat_s}
reattach_s = {reattach_s}
grace_s = {grace_s}

[limits]
order_s = {order_s}
clean_timeout_s = {clean_timeout_s}
observe_s = {observe_s}

[[hosts]]
id = "mock"
backend = "mock"
ram_gb = 64

[hosts.options]
copy_gbps = 100
memory = {memory}
record = {record}
faults = {faults}
"""

NODE = """
[[hosts.nodes]]
gpus = {gpus}
pools = {pools}
gpu_gb = 96
"""


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    """The environment of all that is started: nothing of rollmuxd's that whoever runs the tests has set."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("ROLLMUX_", "XDG_", "PYTEST"))}
    return {**env, "HOME": str(home), "PYTHONUNBUFFERED": "1", **more}


def children_of(pid: int) -> list[int]:
    """Its child processes: of a trainer, the heartbeat."""
    found = ""
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # this thread has just ended
            found += (thread / "children").read_text()
    return [int(child) for child in found.split()]


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def descendants_of(pid: int) -> list[int]:
    try:
        children = children_of(pid)
    except OSError:
        return []  # it has gone
    return [*children, *(below for child in children for below in descendants_of(child))]


def names_below(pids: Iterable[int]) -> dict[int, str]:
    """What these processes have started, and that in turn, by pid: the name of each."""
    found = {}
    for pid in (pid for first in pids for pid in descendants_of(first)):
        with contextlib.suppress(OSError):  # it has gone by now
            found[pid] = Path(f"/proc/{pid}/comm").read_text().strip()
    return found


def end(process: "subprocess.Popen[Any]") -> None:
    """Ask it to end, once, and kill what is left of it after that, with what it had started."""
    started = descendants_of(process.pid)
    process.terminate()
    try:
        process.wait(PATIENCE_S)
    except subprocess.TimeoutExpired:
        started += descendants_of(process.pid)
        process.kill()
        process.wait()
    for pid in started:
        if lives(pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


class LiveDaemon:
    """One daemon process after the other, on one state directory."""

    def __init__(
        self, folder: Path, *, nodes: tuple[tuple[str, str], ...], settings: dict[str, float | str], tables: str = ""
    ) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.log = folder / "daemon.log"
        self._memory = folder / "memory.json"
        self._record = folder / "witness.jsonl"
        self._faults = folder / "faults.json"
        numbers = {
            "lease_s": LEASE_S,
            "heartbeat_s": HEARTBEAT_S,
            "reattach_s": PATIENCE_S,
            "grace_s": 1.0,
            "shutdown_s": 10.0,
            "mode": "share",
            "order_s": PATIENCE_S,
            "clean_timeout_s": 2 * PATIENCE_S,
            "observe_s": 0.5,
            "policy": "thrift",
            **settings,
        }
        paths = {"state": self.state, "memory": self._memory, "record": self._record, "faults": self._faults}
        text = CONFIG.format(**numbers, **{name: json.dumps(str(path)) for name, path in paths.items()})
        for gpus, pool in nodes:
            text += NODE.format(gpus=json.dumps(gpus), pools=json.dumps([pool]))
        self._config = folder / "rollmux.toml"
        self._config.write_text(text + tables)
        self.socket = self.state / "rollmux.sock"
        self.url = f"unix://{self.socket}"
        self.process: subprocess.Popen[bytes] | None = None
        self._line = Line(self.url)

    # ---- its life ----------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    @property
    def tcp(self) -> str:
        """Where it listens on TCP."""
        return str(json.loads((self.state / "daemon.json").read_text())["url"])

    def start(self) -> None:
        beside = [str(self.folder / "plugins"), *filter(None, [os.environ.get("PYTHONPATH")])]
        with self.log.open("ab") as log:
            self.process = forked.Popen(
                [sys.executable, FAULTY, "daemon", "run", "--config", str(self._config)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=clean_environment(self.folder, PYTHONPATH=os.pathsep.join(beside)),
                cwd=self.folder,
            )
        until("the daemon is ready", self._ready, every=0.05)

    def _ready(self) -> bool:
        assert self.process is not None
        if self.process.poll() is not None:
            pytest.fail(f"the daemon ended with {self.process.returncode}")
        try:
            if json.loads((self.state / "daemon.json").read_text())["pid"] != self.process.pid:
                return False
            return self.call("GET", "/readyz", quietly=True).status_code == 200
        except (OSError, ValueError, httpx.TransportError):
            return False

    def kill9(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        self._line.close()

    def stop(self) -> int:
        """SIGTERM, and the exit status."""
        assert self.process is not None
        self._line.close()
        self.process.terminate()
        return self.process.wait(PATIENCE_S)

    def restart(self) -> None:
        assert self.process is not None
        assert self.process.poll() is not None, "it is still running"
        self.start()

    def close(self) -> None:
        self._line.close()
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.wait()

    # ---- what it says ------------------------------------------------------------------------------------------------

    def get(self, path: str, **params: Any) -> Any:
        return self._line.get(path, **params)

    def post(self, path: str, body: Any = None) -> Any:
        return self._line.post(path, body)

    def call(
        self, method: str, path: str, body: Any = None, *, key: str = "", tcp: bool = False, quietly: bool = False
    ) -> httpx.Response:
        """One call by hand: its answer, whatever it is. (Retried by nobody.)"""
        transport = httpx.HTTPTransport() if tcp else httpx.HTTPTransport(uds=str(self.socket))
        headers = {"authorization": f"Bearer {key}"} if key else {}
        with httpx.Client(
            transport=transport, base_url=self.tcp if tcp else "http://rollmuxd", timeout=PATIENCE_S
        ) as line:
            return line.request(method, path, json=body, headers=headers)

    def facts(self, *kinds: str, after: int = 0, **having: Any) -> list[dict[str, Any]]:
        """The journal's facts after a number: of these kinds, if any, and with these fields."""
        found: list[dict[str, Any]] = []
        while True:
            page = self.get("/v1/facts", after=after)
            found += page["facts"]
            after = page["last"]
            if not page["facts"]:
                break
        return [
            fact
            for fact in found
            if (not kinds or fact["fact"] in kinds) and all(fact.get(name) == value for name, value in having.items())
        ]

    def last_seq(self) -> int:
        seqs = [fact["seq"] for fact in self.facts()]
        return seqs[-1] if seqs else 0

    def jobs(self) -> dict[str, dict[str, Any]]:
        """All jobs, by name."""
        return {job["name"]: job for job in self.get("/v1/jobs")["items"]}

    def job(self, name: str) -> dict[str, Any]:
        found = self.get(f"/v1/jobs/{name}")
        assert isinstance(found, dict)
        return found

    def slot(self, slot: str) -> dict[str, Any]:
        found = self.get(f"/v1/slots/{slot}")
        assert isinstance(found, dict)
        return found

    def renew(self, name: str) -> tuple[float, float]:
        """Renew the lease of a job's session, as its heartbeat does; wall time of it: not before, and not after.

        When a heartbeat was heard for the last time nobody knows who only looks on: it may have been held up.
        """
        session = self.job(name)["session"]
        asked = time.time()
        answer = self.call("POST", f"/v1/sessions/{session}/heartbeat", {})
        assert answer.status_code == 200, answer.text
        return asked, time.time()

    def loop_late_s(self, since: float, until: float) -> tuple[int, float]:
        """How often its loop was late between two wall times (it then renews all leases), and for how long together."""
        late = [fact["late_ms"] for fact in self.facts("loop_stalled") if since < fact["at"] / 1000 <= until]
        return len(late), sum(late) / 1000

    def waits(self, name: str) -> dict[str, Any] | None:
        """The job's queued slot, if it has one that a call attends."""
        job = self.job(name)
        slot = self.slot(job["slot"]) if job["slot"] else None
        if slot is None or slot["status"] != "queued" or any(why["code"] == "detached" for why in slot["reasons"]):
            return None
        return slot

    def witness(self) -> list[dict[str, Any]]:
        """What the mock's hardware has seen, in order."""
        if not self._record.exists():
            return []
        return [json.loads(line) for line in self._record.read_text().splitlines()]

    def fault(self, **script: Any) -> None:
        """Put this faults file in place, at once; without anything: all is well again."""
        beside = self._faults.with_suffix(".new")
        beside.write_text(json.dumps(script))
        beside.replace(self._faults)

    # ---- what must hold in every test --------------------------------------------------------------------------------

    def check(self) -> None:
        """What holds however a test has tried: nothing was held twice, and fences only grew."""
        witness = self.witness()
        assert [line["why"] for line in witness if line["event"] == "violation"] == []
        assert doubles(witness) == []
        if self.process is not None and self.process.poll() is None:
            facts = self.facts()
            assert [fact["seq"] for fact in facts] == list(range(1, len(facts) + 1))
            fences = [tuple(fact["fence"]) for fact in facts if fact["fact"] == "slot_granted"]
            assert fences == sorted(set(fences))


def doubles(witness: list[dict[str, Any]]) -> list[str]:
    """Loads of a job onto a GPU that had another job's bytes: by a reckoning of our own, beside the mock's."""
    there: dict[str, dict[tuple[str, int, str], int]] = {}
    found = []
    for line in witness:
        if line["event"] == "boot":
            there.clear()
        if "job" not in line or line["event"] == "violation":
            continue
        mine = there.setdefault(line["gpu"], {})
        who = (line["job"], line["run"], line["pool"])
        if line["event"] == "load" and (others := [other for other in mine if other[:2] != who[:2]]):
            found.append(f"{line['name']} onto {line['gpu']}, where {others} were")
        mine[who] = line["mb"]
        if not line["mb"]:
            del mine[who]
    return found


class Trainer:
    """A client process that does what it is told, and writes down when it held which GPUs."""

    def __init__(self, name: str, process: "subprocess.Popen[str]", log: Path) -> None:
        self.name = name
        self.process = process
        self.log = log
        self.events: list[dict[str, Any]] = []
        #: when it was killed, by the monotonic clock
        self.died = float("inf")
        self._asked = 0
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                self.events.append(json.loads(line))

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def heartbeat(self) -> int:
        """The pid of its heartbeat process."""
        children = children_of(self.pid)
        assert len(children) == 1, f"{self.name} has the child processes {children}"
        return children[0]

    def ask(self, do: str, **what: Any) -> int:
        """Tell it to do something, and do not wait for that."""
        assert self.process.stdin is not None
        with self._lock:
            self._asked += 1
            self.process.stdin.write(json.dumps({"do": do, "number": self._asked, **what}) + "\n")
            self.process.stdin.flush()
            return self._asked

    def answer(self, number: int) -> dict[str, Any]:
        """What came of it."""

        def look() -> dict[str, Any] | None:
            if self.process.poll() is not None and not self._reader.is_alive() and self.done(number) is None:
                pytest.fail(f"{self.name} has ended with {self.process.returncode}:\n{self.log.read_text()}")
            return self.done(number)

        found = until(f"{self.name} answers", look)
        assert isinstance(found, dict)
        return found

    def done(self, number: int) -> dict[str, Any] | None:
        return next((event for event in self.events if event.get("number") == number), None)

    def do(self, do: str, **what: Any) -> dict[str, Any]:
        """Tell it to do something; what came of it, which must be well."""
        answer = self.answer(self.ask(do, **what))
        assert "error" not in answer, answer
        return answer

    def fails(self, do: str, **what: Any) -> dict[str, Any]:
        """Tell it to do something; the error that came of it."""
        answer = self.answer(self.ask(do, **what))
        assert "error" in answer, answer
        return answer

    def stays(self) -> list[tuple[str, float, float]]:
        """When it held each GPU, by its own clock: from after the grant until before the release."""
        left = {event["slot"]: event["at"] for event in self.happened("leaving")}
        gone = {(event["slot"], gpu): event["at"] for event in self.happened("shrinking") for gpu in event["gone"]}
        return [
            (gpu, event["at"], min(gone.get((slot, gpu), self.died), left.get(slot, self.died)))
            for event in self.happened("granted")
            for slot in [event["slot"]]
            for gpu in event["gpus"]
        ]

    def happened(self, event: str) -> list[dict[str, Any]]:
        return [one for one in list(self.events) if one.get("event") == event]

    def kill(self, *, heartbeat_too: bool = True) -> float:
        """SIGKILL, and to its heartbeat too; wall time of it."""
        if heartbeat_too:
            # The heartbeat dies first, or it tells the daemon of the death; and a trainer that is awake starts another.
            self.freeze()
            for pid in children_of(self.pid):
                os.kill(pid, signal.SIGKILL)
        at = time.time()
        os.kill(self.pid, signal.SIGKILL)
        self.process.wait()
        self.died = time.monotonic()
        return at

    def freeze(self) -> None:
        """SIGSTOP to the trainer, not to its heartbeat."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def close(self) -> None:
        if self.process.poll() is None:
            for pid in (*children_of(self.pid), self.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        self.process.wait()
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
        self._reader.join(30)


def overlaps(*trainers: Trainer) -> list[str]:
    """Where two of them held a GPU at the same time, by their own clocks (which are one: the machine's)."""
    stays = sorted((gpu, begin, end, one.name) for one in trainers for gpu, begin, end in one.stays())
    found = []
    for (gpu, begin, end, name), (other_gpu, other_begin, other_end, other) in itertools.pairwise(stays):
        if gpu == other_gpu and other_begin < end:
            found.append(f"{gpu}: {name} {begin:.3f}-{end:.3f}, {other} {other_begin:.3f}-{other_end:.3f}")
    return found


def start(name: str, command: list[str], folder: Path, **environment: str) -> Trainer:
    """Start a program of ``workloads``."""
    log = folder / f"{name}-{time.monotonic_ns()}.log"
    with log.open("w") as stderr:
        process = forked.Popen(
            [sys.executable, str(WORKLOADS / command[0]), *command[1:]],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=clean_environment(folder, ROLLMUX_REQUIRED="1", **environment),
        )
    return Trainer(name, process, log)


class Spares:
    """Trainers that have been started and told nothing yet: they import while the tests before wait for something."""

    def __init__(self, folder: Path, number: int = 3) -> None:
        self._folder, self._number = folder, number
        self._there: list[Trainer] = []

    def take(self) -> Trainer:
        while len(self._there) <= self._number:
            self._there.append(start("trainer", ["trainer.py"], self._folder))
        return self._there.pop(0)

    def close(self) -> None:
        for trainer in self._there:
            trainer.close()


class Live:
    """What a live test has: everything that it started, and the means to wait."""

    until = staticmethod(until)
    overlaps = staticmethod(overlaps)
    doubles = staticmethod(doubles)
    children_of = staticmethod(children_of)
    lives = staticmethod(lives)
    names_below = staticmethod(names_below)
    end = staticmethod(end)
    lease_s, heartbeat_s, slack_s = LEASE_S, HEARTBEAT_S, SLACK_S
    one_and_one = (("0", "rollout"), ("1", "train"))

    def __init__(self, folder: Path, spares: "Spares") -> None:
        self.folder = folder
        self.daemons: list[LiveDaemon] = []
        self.trainers: list[Trainer] = []
        self._spares = spares

    def daemon(
        self,
        nodes: tuple[tuple[str, str], ...] = one_and_one,
        *,
        tables: str = "",
        **settings: float | str,
    ) -> LiveDaemon:
        """A daemon that runs. ``nodes``: GPUs and pool of each. ``tables``: more of its file."""
        made = LiveDaemon(self.folder, nodes=nodes, settings=settings, tables=tables)
        self.daemons.append(made)
        made.start()
        return made

    def trainer(self, name: str, url: str | None = None, *, bytes_: bool = True, **job: Any) -> Trainer:
        """A trainer that is told what to do. ``bytes_``: it has state, which the mock's driver moves."""
        state = {"gpu_gb": 2, "ram_gb": 2, "driver": "mock"} if bytes_ else {}
        told = {"rollout": state, "train": state, "init": False, **job}
        for pool in ("rollout", "train"):
            if told[pool] is not None:
                told[pool] = {**state, **told[pool]}
        trainer = self._spares.take()
        self.trainers.append(trainer)
        trainer.name = name
        trainer.ask("make", name=name, settings={"url": url or self.daemons[-1].url, **told})
        return trainer

    def script(self, path: str, *arguments: str, url: str | None = None) -> Trainer:
        """A whole program, which tells what it does as a trainer does."""
        name = arguments[0] if arguments else Path(path).stem
        program = start(name, [path, *arguments], self.folder, ROLLMUX_URL=url or self.daemons[-1].url)
        self.trainers.append(program)
        return program

    def holder(self, name: str, phase: str = "rollout", **job: Any) -> Trainer:
        """A trainer that holds a slot."""
        trainer = self.trainer(name, **job)
        trainer.do("enter", phase=phase)
        return trainer

    def waiter(self, name: str, phase: str = "rollout", **job: Any) -> tuple[Trainer, int]:
        """A trainer that waits for a slot, and the number of what it was asked."""
        trainer = self.trainer(name, **job)
        trainer.do("start")
        number = trainer.ask("enter", phase=phase)
        self.until(f"{name} waits", lambda: self.daemons[-1].waits(name))
        return trainer, number

    def run_on_ray(
        self, name: str, job: str, *program: str | Path, imported: tuple[str, ...] = (), **env: str
    ) -> "subprocess.Popen[bytes]":
        """``rollmuxd run`` of a Python program with a Ray of its own, all of which begin with these modules imported.

        ``job``: what its file says. What is said goes to NAME.out and NAME.err.
        """
        python, ray, file, out, err = (self.folder / f"{name}.{end}" for end in ("python", "ray", "toml", "out", "err"))
        words = shlex.join([str(python), str(Path(sys.executable).with_name("ray"))])
        ray.write_text(f'#!/bin/sh\nexec {words} "$@"\n')
        ray.chmod(0o700)
        file.write_text(f"{job}\n[ray]\nprogram = {json.dumps(str(ray))}\narguments = {json.dumps(LITTLE_RAY)}\n")
        theirs = {key: value for key, value in os.environ.items() if not key.startswith(("ROLLMUX_", "XDG_", "RAY_"))}
        # It would start a worker for each CPU, and none of them is the one needed. What it preloads, no copy has.
        theirs |= {"RAY_enable_worker_prestart": "0", "RAY_prestart_worker_first_driver": "0"}
        theirs |= {"RAY_JEMALLOC_LIB_PATH": "", "PYTHONWARNINGS": "", "HOME": str(self.folder)}
        with out.open("w") as stdout, err.open("w") as stderr:
            return forked.Popen(
                [sys.executable, "-m", "rollmuxd", "run", "--job", str(file), "--", str(python), *map(str, program)],
                env={**theirs, "ROLLMUX_URL": self.daemons[-1].url, **env},
                stdout=stdout,
                stderr=stderr,
                imported=(*IMPORTED_BY_RAY, *imported),
                stand_in=python,
            )

    def check(self) -> None:
        """What holds however a test has tried: by the clients' own clocks, the hardware, and the journal."""
        for daemon in self.daemons:
            daemon.check()
        assert overlaps(*self.trainers) == []

    def close(self) -> None:
        for trainer in self.trainers:
            trainer.close()
        for daemon in self.daemons:
            daemon.close()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem):
    """What must hold in every live test is part of the test: checked at its end, while its daemon still runs."""
    done = yield
    live = pyfuncitem.funcargs.get("live")
    if live is not None:
        live.check()
    return done


@pytest.fixture(scope="session")
def spares(tmp_path_factory):
    """For ``live`` only."""
    made = Spares(tmp_path_factory.mktemp("trainers"))
    yield made
    made.close()


@pytest.fixture
def live(tmp_path, spares):
    """The live things of one test."""
    made = Live(tmp_path, spares)
    try:
        yield made
    finally:
        made.close()
        for log in (*(daemon.log for daemon in made.daemons), *(trainer.log for trainer in made.trainers)):
            # Shown by pytest where the test has failed.
            print(f"--- {log.name}\n" + "\n".join(log.read_text(errors="replace").splitlines()[-60:]))
