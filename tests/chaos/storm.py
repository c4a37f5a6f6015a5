"""``make -s chaos BUDGET_S=60``: a storm over a live daemon and its clients, and an oracle's verdict as a JSON object.

A real daemon on mock hosts, and real client processes that loop. At moments that a seeded chance picks, the daemon is
killed (-9), again while it starts, stopped and continued, restarted in good order; clients and their heartbeats are
killed wherever they happen to be, stopped for less and for more than a lease, and registered again. All the while the
residency driver and the backend fail, lose contact, hang and lie, call by call; an operator reinstates the jobs that
are quarantined for it, and ends the processes that keep a node from becoming clean. Then the storm ends: every client
has to do some more iterations within a bound. What is judged, and by which records, is in ``oracle.py``. Progress goes
to stderr; the exit status is 1 where anything was lost or violated.
"""

import argparse
import collections
import contextlib
import json
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Final

import httpx
import oracle
import world
from faulty_mock import Do, Fault, Method, Script
from faulty_mock import write as write_faults
from patience import PATIENCE_S
from world import LEASE_S, Client, World

MORE_ITERATIONS: Final = 4
#: for those, once the storm is over: generous, since other people use this machine too
SETTLE_S: Final = 300.0
#: a daemon that takes longer than this to be ready hangs
START_S: Final = 120.0
#: descriptors that a daemon may have more of at the end than at its beginning, without any client
SPARE_DESCRIPTORS: Final = 6

WEIGHTS: Final = {
    "kill_daemon": 70,
    "restart_daemon": 5,
    "stop_daemon": 10,
    "kill_client": 20,
    "stop_client": 10,
    "stop_client_and_heartbeat": 8,
    "kill_heartbeat": 5,
}

#: what goes wrong of a driver's calls and of a look at a host. A driver that said no is told again twice: only the
#: third no in a row is known to the journal. Looks never lie here: what they show is all that anybody can go by.
DRIVER_FAULTS: Final[dict[Do, float]] = {"fail": 3, "lose": 3, "lose_after": 3, "hang": 1, "lie": 1, "delay": 1}
DRIVER_CALLS: Final[dict[Method, float]] = {"load": 4, "park": 4, "discard": 2, "probe": 1}
LOOK_FAULTS: Final[dict[Do, float]] = {"fail": 3, "hang": 1, "delay": 1}
#: set at the same time, at most; one that nobody meets makes room for the next
FAULTS_SET: Final = 4
#: the blows over, drivers and backends go on to fail until so many were met and the journal knows of one, for a while
FAULTS_WANTED: Final = 5
MET_WITHIN_S: Final = 60.0
#: before anything blows everybody has got somewhere, if it does not take longer: a machine that is busy with others
#: would else have a storm over processes that are still starting, which meet nothing
UNDER_WAY_S: Final = 45.0


def say(text: str) -> None:
    print(f"chaos: {text}", file=sys.stderr, flush=True)


class Follower:
    """Reads the feed all the time, as somebody would who believes it."""

    def __init__(self, daemon: world.Daemon) -> None:
        self.seen: dict[int, str] = {}
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="follower", daemon=True)
        self._thread.start()

    def _follow(self) -> None:
        last = 0
        while not self._stop.is_set():
            try:
                page = self._daemon.get("/v1/facts", after=last, wait_ms=500)
                page.raise_for_status()
            except (httpx.HTTPError, OSError):
                self._stop.wait(0.1)
                continue
            found = page.json()
            for fact in found["facts"]:
                self.seen[fact["seq"]] = world.render(fact)
            last = found["last"]

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


class Operator:
    """Reinstates the jobs that are quarantined, all the time, and knows which nodes are."""

    def __init__(self, daemon: world.Daemon) -> None:
        self.reinstated = 0
        self.not_clean: tuple[str, ...] = ()
        self._daemon = daemon
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._operate, name="operator", daemon=True)
        self._thread.start()

    def _operate(self) -> None:
        while not self._stop.wait(1.0):
            with contextlib.suppress(httpx.HTTPError, OSError, KeyError, ValueError):
                for job in self._daemon.get("/v1/jobs", status="quarantined").json()["items"]:
                    self.reinstated += self._daemon.post(f"/v1/jobs/{job['job']}/reinstate").is_success
                nodes = self._daemon.get("/v1/nodes").json()["items"]
                self.not_clean = tuple(node["node"] for node in nodes if node["status"] == "quarantined")

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(10)


class Storm:
    """One storm over one world."""

    def __init__(self, made: World, seed: str) -> None:
        self.world = made
        self.follower = Follower(made.daemon)
        self.operator = Operator(made.daemon)
        self.chance = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.violations: list[str] = []
        self._due: list[tuple[float, int, Any]] = []
        self._daemon_frozen = False
        self._stopping = False
        #: how late this loop itself was at worst: this machine may be busy
        self.late_s = 0.0
        self._calm = False
        self._starts: list[float] = []
        self._faults: list[Fault] = []
        self._next_end = 0.0

    # ---- what may happen ---------------------------------------------------------------------------------------------

    def kill_daemon(self, *, starting: bool = False) -> None:
        """``kills`` counts those of a daemon that serves; those of one that starts are counted beside."""
        daemon = self.world.daemon
        if daemon.process is None or (not daemon.ready and not starting):
            return
        self.counts["kills_while_starting" if not daemon.ready else "kills"] += 1
        daemon.kill()
        daemon.process, self._daemon_frozen, self._stopping = None, False, False
        self.later(self.chance.choice((0.0, 0.0, 0.0, 0.3, 1.0)), self._start_daemon)

    def restart_daemon(self) -> None:
        daemon = self.world.daemon
        if daemon.process is None or not daemon.ready or self._daemon_frozen or self._stopping:
            return  # a second SIGTERM would end it at once
        self.counts["clean_restarts"] += 1
        self._stopping = True
        daemon.process.terminate()

    def stop_daemon(self) -> None:
        daemon = self.world.daemon
        if daemon.process is None or self._daemon_frozen:
            return
        self.counts["daemon_stops"] += 1
        self._daemon_frozen = True
        process = daemon.process
        world.send(process.pid, signal.SIGSTOP)

        def thaw() -> None:
            if self.world.daemon.process is process:
                world.send(process.pid, signal.SIGCONT)
                self._daemon_frozen = False

        self.later(self.chance.choice((0.05, 0.3, 1.0, LEASE_S * 0.6, LEASE_S * 1.3)), thaw)

    def kill_client(self) -> None:
        client = self._some_client()
        if client is not None:
            last = self.world.lines(client)[-1:]
            self.counts["client_kills"] += 1
            self.counts[f"client_kills_after_{last[0]['event'] if last else 'start'}"] += 1
            self.world.kill(client)
            self._again(client, self.chance.choice(("same", "same", "replace", "plain")))

    def stop_client(self) -> None:
        """Its heartbeat goes on: nothing is to come of it."""
        client = self._some_client()
        if client is not None:
            self.counts["client_stops"] += 1
            self._freeze(client, [client.life.process.pid], self.chance.choice((0.3, 1.0, LEASE_S * 1.4)))

    def stop_client_and_heartbeat(self) -> None:
        client = self._some_client()
        if client is not None:
            seconds = self.chance.choice((0.3, LEASE_S * 0.4, LEASE_S * 1.6))
            self.counts["client_stops_beyond_a_lease" if seconds > LEASE_S else "client_stops_within_a_lease"] += 1
            client.life.provoked |= seconds > LEASE_S * 0.3
            pids = [*world.children_of(client.life.process.pid), client.life.process.pid]
            self._freeze(client, pids, seconds)

    def kill_heartbeat(self) -> None:
        client = self._some_client()
        if client is not None:
            self.counts["heartbeat_kills"] += 1
            client.life.provoked = True
            for pid in world.children_of(client.life.process.pid):
                world.send(pid, signal.SIGKILL)

    def break_something(self) -> None:
        """One more fault: of the driver or of the backend, for the next calls of a kind on one host."""
        looks = self.chance.random() < 0.2
        self.counts["faults_set"] += 1
        do = world.pick(self.chance, LOOK_FAULTS if looks else DRIVER_FAULTS)
        method = "observe" if looks else world.pick(self.chance, DRIVER_CALLS)
        host = f"h{self.chance.randrange(len(self.world.daemon.memories))}"
        times = self.chance.choice((1, 3, 6)) if do == "fail" else 1
        delay_s = self.chance.choice((0.0, 0.05, 1.0)) if do != "delay" else self.chance.choice((0.2, 2.0))
        name = f"f{self.counts['faults_set']}"
        self._faults.append(Fault(do, method, host, times=times, delay_s=delay_s, id=name))
        del self._faults[:-FAULTS_SET]
        write_faults(self.world.daemon.faults, Script(tuple(self._faults)))

    def free_what_is_not_clean(self) -> None:
        """As an operator would: end the processes whose bytes keep a node from becoming clean, at most one a second."""
        if not self.operator.not_clean or time.monotonic() < self._next_end:
            return
        self._next_end = time.monotonic() + 1.0
        kept = [state for memory in self.world.daemon.hardware() for one in memory["hosts"].values()
                for state in one["states"].values()]  # fmt: skip
        there = {
            state["name"] for state in kept if state["node"] in self.operator.not_clean and any(state["gpus"].values())
        }
        for client in world.alive(self.world.clients):
            if client.name in there and client.next_life is None:
                self.counts["ended_by_the_operator"] += 1
                self.world.kill(client)
                self._again(client, "same")
                return

    def _some_client(self) -> Client | None:
        # Mostly one that has got somewhere: else all would die while they start.
        there = [
            client
            for client in world.alive(self.world.clients)
            if client.life.began + 2.0 < time.monotonic() or self.chance.random() < 0.15
        ]
        return self.chance.choice(there) if there else None

    def _freeze(self, client: Client, pids: list[int], seconds: float) -> None:
        life = client.life
        life.frozen = time.monotonic()
        for pid in pids:
            world.send(pid, signal.SIGSTOP)

        def thaw() -> None:
            life.frozen = 0.0
            for pid in reversed(pids):
                if life.process.poll() is None:
                    world.send(pid, signal.SIGCONT)

        self.later(seconds, thaw)

    def _again(self, client: Client, way: str) -> None:
        client.next_life = time.monotonic() + self.chance.choice((0.0, 0.2, 1.0))
        client.next_way = way

    def _start_daemon(self) -> None:
        self.world.daemon.start()
        if not self._calm and self.chance.random() < 0.2:
            self.later(self.chance.uniform(0.1, 1.2), self._kill_if_starting)

    def _kill_if_starting(self) -> None:
        if not self._calm and self.world.daemon.process is not None and not self.world.daemon.ready:
            self.kill_daemon(starting=True)

    # ---- time --------------------------------------------------------------------------------------------------------

    def later(self, seconds: float, do: Any) -> None:
        self._due.append((time.monotonic() + seconds, len(self._due), do))

    def turn(self) -> None:
        """Do what is due, and look after everybody."""
        now = time.monotonic()
        due = sorted(entry for entry in self._due if entry[0] <= now)
        self._due = [entry for entry in self._due if entry[0] > now]
        for _, _, do in due:
            do()
        self._look_after_daemon()
        self.free_what_is_not_clean()
        for client in self.world.clients:
            self._look_after(client)

    def _look_after_daemon(self) -> None:
        daemon = self.world.daemon
        if daemon.process is None:
            return
        ended = daemon.process.poll()
        if ended is not None:
            if not self._stopping or ended != 0:
                self.violations.append(f"the daemon ended by itself, with {ended}")
            daemon.process, daemon.ready, self._stopping, self._daemon_frozen = None, False, False, False
            self.later(0.0, self._start_daemon)
        elif not daemon.ready and not self._daemon_frozen and not self._stopping:
            if daemon.look():
                self._starts.append(time.monotonic() - daemon.began)
            elif time.monotonic() - daemon.began > START_S:
                self.violations.append(f"the daemon was not ready within {START_S:g} s of its start")
                self.kill_daemon(starting=True)

    def _look_after(self, client: Client) -> None:
        if client.done:
            return
        if client.next_life is not None:
            if time.monotonic() >= client.next_life:
                self.world.start(client, client.next_way)
                self.counts["client_starts"] += 1
            return
        ended = client.life.process.poll()
        if ended is None:
            return
        client.life.died = min(client.life.died, time.monotonic())
        if ended == 0:
            client.done = True
        elif ended == 3:  # its job is over, and it has said why
            self.counts["ended_by_the_daemon"] += 1
            self._again(client, "plain")
        else:
            last = self.world.lines(client)[-1:]
            self.violations.append(f"client {client.name} ended with {ended}: {last}")
            self._again(client, "plain")

    def get_under_way(self) -> None:
        """Let every client have its first slot."""
        until = time.monotonic() + UNDER_WAY_S
        waiting = list(self.world.clients)
        while waiting and time.monotonic() < until:
            self.turn()
            waiting = [one for one in waiting if not any(line["event"] == "granted" for line in self.world.lines(one))]
            time.sleep(0.1)

    def has_met_enough(self) -> bool:
        """Whether enough calls have met a fault, and one has come as far as the journal."""
        met = oracle.faults_met(self.world.daemon.hardware())
        return met.total() >= FAULTS_WANTED and bool(
            oracle.faults_known(map(json.loads, list(self.follower.seen.values())))
        )

    def run(self, seconds: float) -> None:
        """Let it rage."""
        until = time.monotonic() + seconds
        next_blow = time.monotonic() + 1.0
        said = before = next_fault = time.monotonic()
        while (now := time.monotonic()) < until or (now < until + MET_WITHIN_S and not self.has_met_enough()):
            self.late_s = max(self.late_s, now - before - 0.02)
            before = now
            self.turn()
            if now >= next_blow and now < until:  # afterwards only drivers and backends fail
                getattr(self, world.pick(self.chance, WEIGHTS))()
                # Mostly blow upon blow, now and then time to breathe.
                next_blow = now + self.chance.expovariate(1 / self.chance.choice((0.3, 0.3, 0.3, 2.0)))
            if now >= next_fault:
                self.break_something()
                next_fault = now + self.chance.expovariate(1 / 0.4)
            if now - said > 10:
                said = now
                say(f"{until - now:.0f} s to go: {dict(self.counts)}")
            time.sleep(0.02)

    def settle(self) -> None:
        """No more blows: what is stopped goes on, and everybody finishes."""
        self._calm = True
        write_faults(self.world.daemon.faults, Script())
        finish = self.world.folder / "finish"
        finish.with_suffix(".new").write_text(str(MORE_ITERATIONS))
        finish.with_suffix(".new").replace(finish)
        for _, _, do in sorted(self._due):
            do()
        self._due.clear()
        until = time.monotonic() + SETTLE_S
        while not all(client.done for client in self.world.clients) and time.monotonic() < until:
            self.turn()
            time.sleep(0.02)
        for client in self.world.clients:
            if not client.done:
                self.violations.append(f"client {client.name} is wedged: {self._why(client)}")

    def _why(self, client: Client) -> str:
        try:
            told = self.world.daemon.get(f"/v1/jobs/{client.name}/explain").json()
        except httpx.HTTPError as error:
            told = {"sentences": [repr(error)]}
        return f"{self.world.lines(client)[-2:]} {told.get('sentences', told)}"


def facts_of(daemon: world.Daemon) -> list[dict[str, Any]]:
    """The whole journal, as the daemon shows it."""
    found: list[dict[str, Any]] = []
    last = 0
    while True:
        page = daemon.get("/v1/facts", within=60, after=last, limit=10_000).json()
        if not page["facts"]:
            return found
        found += page["facts"]
        last = page["last"]


def storm(folder: Path, *, seed: str, seconds: float, clients: int, hosts: int) -> dict[str, Any]:
    """One storm, and its verdict."""
    began = time.monotonic()
    made = World(folder, clients=clients, hosts=hosts, seed=seed)
    raging = Storm(made, seed)
    daemon = made.daemon
    try:
        daemon.start()
        while not daemon.look():
            if daemon.process is None or daemon.process.poll() is not None or time.monotonic() - began > START_S:
                raise RuntimeError(f"the daemon does not start:\n{daemon.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.02)
        descriptors = daemon.descriptors()
        for client in made.clients:
            made.start(client, "plain")
        raging.get_under_way()
        raging.run(seconds)
        say(f"the storm is over: {dict(raging.counts)}")
        raging.settle()
        raging.follower.stop()
        raging.operator.stop()
        return _verdict(made, raging, descriptors, began)
    finally:
        raging.follower.stop()
        raging.operator.stop()
        made.close()


def _verdict(made: World, raging: Storm, descriptors: int, began: float) -> dict[str, Any]:
    daemon = made.daemon
    facts = facts_of(daemon)
    left, nodes = _left(daemon, descriptors)
    if left > descriptors + SPARE_DESCRIPTORS:
        raging.violations.append(f"{left} descriptors are open with all clients gone, and {descriptors} were before")
    raging.violations += [f"node {node['node']} is {node['status']} at the end" for node in nodes]
    rss_mb, threads = daemon.rss_mb(), daemon.threads()
    assert daemon.process is not None
    daemon.process.terminate()
    ended = daemon.process.wait(PATIENCE_S)
    if ended != 0:
        raging.violations.append(f"told to stop, the daemon ended with {ended}")
    raging.violations += [f"the daemon's log: {line}" for line in daemon.faults_of_its_own()]
    lines = {client.name: made.lines(client) for client in made.clients}
    judged = oracle.judge(
        lines,
        [
            oracle.Process(client.name, life.process.pid, life.died, life.provoked)
            for client in made.clients
            for life in client.lives
        ],
        world.read_lines(daemon.record),
        facts,
        raging.follower.seen,
        world.render,
        time.time() - time.monotonic(),
    )
    met, known = oracle.faults_met(daemon.hardware()), oracle.faults_known(facts)
    if not (met and known):
        raging.violations.append(
            f"it was no storm: {met.total()} faults were met, and the journal knows of {known.total()}"
        )
    found = [*raging.violations, *judged.violations]
    told = collections.Counter(line["event"] for of_one in lines.values() for line in of_one)
    kinds = collections.Counter(fact["fact"] for fact in facts)
    return {
        "kills": raging.counts["kills"],
        "violations": len(found),
        "lost": len(judged.lost),
        "duration_s": round(time.monotonic() - began, 1),
        "acknowledged": {
            what: told[what] for what in ("registered", "granted", "released", "queued", "ended", "iteration")
        },
        "facts": len(facts),
        "facts_followed": len(raging.follower.seen),
        "witness_lines": sum(1 for _ in world.read_lines(daemon.record)),
        "faults": {"injected": met.total(), "known": known.total(), "of": dict(sorted((met + known).items()))},
        "reinstated": raging.operator.reinstated,
        "blows": dict(sorted(raging.counts.items())),
        "starts": kinds["daemon_started"],
        "stalls": kinds["loop_stalled"],
        "sessions_lost": kinds["session_lost"],
        "slots_taken_away": kinds["slot_taken_away"],
        "start_s_worst": round(max(raging._starts, default=0.0), 2),
        "storm_late_s": round(raging.late_s, 2),
        "daemon": {"descriptors": [descriptors, left], "threads": threads, "rss_mb": round(rss_mb, 1)},
        "what": [*found[:20], *judged.lost[:20]],
    }


def _left(daemon: world.Daemon, descriptors: int) -> tuple[int, list[dict[str, Any]]]:
    """With all clients gone: open descriptors, and nodes that are not up; once both are as they should be, or never."""
    until = time.monotonic() + 20
    while True:
        left = daemon.descriptors()
        nodes = [node for node in daemon.get("/v1/nodes").json()["items"] if node["status"] != "up"]
        if (left <= descriptors + SPARE_DESCRIPTORS and not nodes) or time.monotonic() > until:
            return left, nodes
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm over a live daemon; one JSON object on stdout.")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds, roughly (default: %(default)g)")
    parser.add_argument("--seed", default="", help="of the blows (default: another each time)")
    parser.add_argument("--clients", type=int, default=12, help="client processes (default: %(default)d)")
    parser.add_argument("--hosts", type=int, default=3, help="mock hosts of four GPUs (default: %(default)d)")
    parser.add_argument("--keep", type=Path, help="leave all records in this folder")
    asked = parser.parse_args()
    seed = asked.seed or str(time.time_ns())
    # What it takes to start, to settle and to judge is part of the budget.
    seconds = max(4.0, asked.budget * 0.85 - 6.0)
    say(f"seed {seed}, {asked.clients} clients, {seconds:.0f} s of storm")
    # Whoever gives up on it ends what it has started with it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    with tempfile.TemporaryDirectory(prefix="rollmuxd-chaos-") as temporary:
        folder = asked.keep or Path(temporary)
        found = storm(folder, seed=seed, seconds=seconds, clients=asked.clients, hosts=asked.hosts)
    print(json.dumps({**found, "seed": seed}, indent=1))
    return 1 if found["violations"] or found["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
