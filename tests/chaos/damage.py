"""``make -s damage DAMAGES=200``: damages a killed daemon's journal, and sees that no GPU gets two holders.

One JSON object on stdout. A real daemon on a mock host, and client processes that loop. Again and again the daemon is
killed (-9) under their load, one file of its journal is damaged (a bit turned, a byte cut out, the file cut off or
removed), and the daemon is started again. Both clients want the same GPUs, and start again as new jobs where the
daemon has told them that their run is over. What is judged:

- ``two_holders``: two clients in a phase on one GPU, by their own records; a load onto the bytes of another job, by the
  mock's witness; and a fence that two clients were given. A run that the daemon has declared lost holds a GPU until the
  driver has taken its bytes off: it may hear of its loss only later, at its next call.
- ``stuck``: a client does not get a slot again.
- ``unsaid``: facts are missing or others than before, and the daemon started without a word of it; or ``journal check``
  said before that the journal is good.

Where the daemon refuses to start, which is a word, the files of before are put back.
"""

import argparse
import collections
import json
import random
import shutil
import signal
import sqlite3
import sys
import tempfile
import time
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import oracle
import world
from world import Client, World

from rollmuxd.daemon.journal import backup
from rollmuxd.daemon.journal.file import JournalError, read_mark

#: damages in one state directory; the next one gets a journal of its own
IN_ONE_JOURNAL: Final = 10
#: facts that a daemon writes before it is killed
FACTS: Final = 12
#: a phase takes up to so long: some are in one from before the kill until after the start
HOLD_S: Final = 3.0
#: for whatever has to happen: generous, since other people use this machine too
WITHIN_S: Final = 300.0
FILES: Final = {"journal.sqlite3-wal": 10, "journal.sqlite3": 6, "mark": 3, "journal.sqlite3-shm": 1}
WAYS: Final = {"bit": 5, "byte": 3, "cut": 3, "gone": 1}


def say(text: str) -> None:
    print(f"damage: {text}", file=sys.stderr, flush=True)


class Stuck(Exception):
    """What has to happen does not; the damages that were to come in this journal are left out."""


class Damages:
    """So many damages of one journal."""

    def __init__(self, folder: Path, seed: str) -> None:
        self.world = World(folder, clients=2, hosts=1, seed=seed, HOLD_S=str(HOLD_S))
        self.chance = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.unsaid: list[str] = []

    @property
    def state(self) -> Path:
        return self.world.daemon.state

    def run(self, number: int) -> None:
        self.start()
        self.turn()
        self.both_go_on()
        for _ in range(number):
            self.work()
            self.world.daemon.kill()
            self.counts["held_when_killed"] += self.held_now()
            before = self.folder("before")
            facts = facts_that_left(self.folder("read"))
            what = self.damage()
            good = self.checked()
            self.world.daemon.start()
            self.until(f"the daemon is ready or ends after {what}", self.is_ready_or_ended)
            ended = self.world.daemon.process.poll()
            if ended is not None:
                self.counts["refused"] += 1
                self.put_back(before)
                self.start()
            else:
                self.judge(what, facts, good)
            self.counts["damages"] += 1
            self.counts[what] += 1
            self.both_go_on()
            say(f"{what}: {'refused' if ended is not None else 'started'}; {dict(self.counts)}")

    def start(self) -> None:
        """Start the daemon on a good journal."""
        self.world.daemon.start()
        self.until("the daemon is ready", self.is_ready_or_ended)
        if not self.world.daemon.ready:
            raise Stuck("the daemon does not start on a good journal: see its log")

    # ---- load --------------------------------------------------------------------------------------------------------

    def work(self) -> None:
        """Let the clients have some slots, and be in the middle of things."""
        enough = self.last_seq() + FACTS
        self.until("the clients have worked", lambda: self.turn() or self.last_seq() >= enough)

    def turn(self) -> None:
        """Start the clients that have ended: the daemon has told them that their job is over."""
        for client in self.world.clients:
            if not client.lives_now:
                if client.lives:
                    client.life.died = min(client.life.died, time.monotonic())
                    if client.life.process.returncode not in (0, 3):
                        raise Stuck(f"{client.name} ended by a fault: {self.world.lines(client)[-1:]}")
                self.world.start(client, "plain")

    def both_go_on(self) -> None:
        """Each client has a slot again: as the job that it was, or as a new one after it heard that its run is over."""
        since = {client.name: self.grants(client) for client in self.world.clients}
        self.until(
            "both clients have a slot",
            lambda: self.turn() or all(self.grants(client) > since[client.name] for client in self.world.clients),
        )

    def grants(self, client: Client) -> int:
        return sum(line["event"] == "granted" for line in self.world.lines(client))

    def held_now(self) -> int:
        """How many clients are in a phase."""
        last = [line["event"] for client in world.alive(self.world.clients) for line in self.world.lines(client)[-1:]]
        return last.count("granted")

    def until(self, what: str, there: Any) -> None:
        until = time.monotonic() + WITHIN_S
        while not there():
            if time.monotonic() > until:
                raise Stuck(f"not within {WITHIN_S:g} s: {what}")
            time.sleep(0.05)

    def is_ready_or_ended(self) -> bool:
        return self.world.daemon.process.poll() is not None or self.world.daemon.look()

    def last_seq(self) -> int:
        return int(self.world.daemon.get("/v1/me", within=60).json()["last"])

    # ---- damage ------------------------------------------------------------------------------------------------------

    def folder(self, name: str) -> Path:
        """A copy of the journal's files as they are."""
        to = self.world.folder / name
        shutil.rmtree(to, ignore_errors=True)
        to.mkdir()
        for file in FILES:
            if (self.state / file).exists():
                shutil.copyfile(self.state / file, to / file)
        return to

    def put_back(self, before: Path) -> None:
        for file in FILES:
            (self.state / file).unlink(missing_ok=True)
            if (before / file).exists():
                shutil.copyfile(before / file, self.state / file)

    def damage(self) -> str:
        """One file, in one way; what was done."""
        there = {file: weight for file, weight in FILES.items() if (self.state / file).exists()}
        file, way = world.pick(self.chance, there), world.pick(self.chance, WAYS)
        path = self.state / file
        content = bytearray(path.read_bytes())
        place = self.chance.randrange(max(1, len(content)))
        if way == "gone" or not content:
            path.unlink()
        else:
            if way == "bit":
                content[place] ^= 1 << self.chance.randrange(8)
            elif way == "byte":
                del content[place]
            else:
                del content[place:]
            path.write_bytes(content)
        return f"{file} {way}"

    # ---- judgement ---------------------------------------------------------------------------------------------------

    def checked(self) -> bool:
        """Whether ``journal check`` finds nothing to say."""
        try:
            found = backup.check(self.folder("checked") / "journal.sqlite3")
        except JournalError:
            return False
        return found.good and not any("declares every run lost" in note for note in found.notes)

    def judge(self, what: str, before: dict[int, str], good: bool) -> None:
        """The daemon has started: all facts are there, or it has said that they are not."""
        now = facts_of(self.folder("read"))
        missing = [seq for seq, body in before.items() if now.get(seq) != body]
        started = [json.loads(body) for body in now.values() if '"fact":"daemon_started"' in body]
        said = bool(started[-1].get("lost"))
        self.counts["said"] += said
        self.counts["facts_missing"] += bool(missing)
        if missing and not said:
            self.unsaid.append(f"{what}: facts from {missing[0]} on are not there, and the daemon does not say so")
        if missing and good:
            self.unsaid.append(f"{what}: facts from {missing[0]} on are not there, and `journal check` said good")

    def two_holders(self) -> list[str]:
        """By the records of the clients, and of the hardware."""
        lines = {client.name: self.world.lines(client) for client in self.world.clients}
        witness = world.read_lines(self.world.daemon.record)
        taken = [line for line in witness if line["event"] in ("park", "discard")]
        died = {life.process.pid: life.died for client in self.world.clients for life in client.lives}
        held = []
        fences: dict[str, str] = {}
        found = []
        for name, told in lines.items():
            heard = {line["pid"] for line in told if line["event"] == "over"}
            left = {(line["pid"], line["slot"]): line["at"] for line in told if line["event"] == "leaving"}
            for line in told:
                if line["event"] == "granted":
                    until = min(left.get((line["pid"], line["slot"]), float("inf")), died[line["pid"]])
                    for gpu in line["gpus"]:
                        off = [
                            it["mono"]
                            for it in taken
                            if (it["pid"], it["gpu"]) == (line["pid"], gpu) and it["pid"] in heard
                        ]
                        ends = min((at for at in off if at > line["at"]), default=until)
                        held.append((gpu, line["at"], min(until, ends), name))
                    other = fences.setdefault(line["fence"], f"{name} {line['slot']}")
                    if other != f"{name} {line['slot']}":
                        found.append(f"{name} and {other} were given the fence {line['fence']}")
        self.counts["grants"] += len(fences)
        return [*found, *oracle.overlaps(held), *oracle.two_on_a_gpu(witness, died)]


def facts_that_left(folder: Path) -> dict[int, str]:
    """Those that the mark covers: a killed daemon had answered nothing that rests on a later one, if there is any."""
    mark = read_mark(folder / "journal.sqlite3")
    assert mark is not None, "a killed daemon left no mark"
    return {seq: body for seq, body in facts_of(folder).items() if seq <= mark.seq}


def facts_of(folder: Path) -> dict[int, str]:
    with closing(sqlite3.connect(folder / "journal.sqlite3")) as connection:
        return dict(connection.execute("SELECT seq, body FROM facts ORDER BY seq").fetchall())


def main() -> int:
    parser = argparse.ArgumentParser(description="Damages of a killed daemon's journal; one JSON object on stdout.")
    parser.add_argument("--damages", type=int, default=12, help="how many (default: %(default)d)")
    parser.add_argument("--seed", default="", help="of the damages (default: another each time)")
    parser.add_argument("--keep", type=Path, help="leave all records in this folder")
    asked = parser.parse_args()
    seed = asked.seed or str(time.time_ns())
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    total: collections.Counter[str] = collections.Counter()
    unsaid: list[str] = []
    two: list[str] = []
    stuck_at: list[str] = []
    with tempfile.TemporaryDirectory(prefix="rollmuxd-damage-") as temporary:
        for part, done in enumerate(range(0, asked.damages, IN_ONE_JOURNAL)):
            damages = Damages((asked.keep or Path(temporary)) / str(part), f"{seed} {part}")
            try:
                damages.run(min(IN_ONE_JOURNAL, asked.damages - done))
            except Stuck as stuck:
                stuck_at.append(str(stuck))
            finally:
                damages.world.close()
            if stuck_at and asked.keep is None:  # it may not come again
                asked.keep = Path(tempfile.mkdtemp(prefix="rollmuxd-stuck-"))
                shutil.copytree(temporary, asked.keep, ignore=shutil.ignore_patterns("*.sock"), dirs_exist_ok=True)
                say(f"the records are in {asked.keep}")
            unsaid += damages.unsaid
            two += damages.two_holders()
            total += damages.counts
            if asked.keep is None:
                damages.world.clean()
    counts = {
        name: total.pop(name, 0)
        for name in ("damages", "refused", "said", "facts_missing", "grants", "held_when_killed")
    }
    found = {
        **counts,
        "two_holders": two,
        "unsaid": unsaid,
        "stuck": stuck_at,
        "of": dict(sorted(total.items())),
        "seed": seed,
    }
    print(json.dumps(found, indent=1))
    return 1 if two or unsaid or stuck_at else 0


if __name__ == "__main__":
    sys.exit(main())
