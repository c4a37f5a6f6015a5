"""How long a daemon takes from ``exec`` to its first answer that it is ready, with 100,000 facts in its journal.

The journal is made by a scheduler whose hundred jobs go round their cycle, and is the same for each start: a daemon
is killed, and its successor gets a fresh copy. Measured with all facts to replay, and with a snapshot that is 5,000
facts old (a daemon makes one every 10,000). The floor: the same Python, importing what the daemon imports.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from figures import Json, Rounds, at_most, quantile, say, short
from live import Daemon, start
from world import World, inventory, job_spec

from rollmuxd.core.facts import Fact
from rollmuxd.daemon.journal.store import Journal

GROUPS: Final = 20
JOBS_A_GROUP: Final = 5
FACTS: Final = 100_000
BEHIND: Final = 5_000
IMPORTS: Final = "import rollmuxd.cli.main, rollmuxd.cli.daemon, rollmuxd.daemon.app"


def run(budget_s: float, *, small: bool = False) -> Json:
    """Starts on copies of one journal, in turn."""
    facts, behind = (5_000, 1_000) if small else (FACTS, BEHIND)
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as name:
        folder = Path(name)
        began = time.monotonic()
        asyncio.run(_write(folder, facts, behind))
        size = (folder / "facts" / "journal.sqlite3").stat().st_size
        say(f"restart: journals of {facts} facts are written ({time.monotonic() - began:.1f} s)")
        took: dict[str, list[float]] = {"facts": [], "snapshot": [], "imports": []}
        for _ in Rounds(0.7 * budget_s, least=1 if small else 3, most=9):
            for kind in ("facts", "snapshot"):
                took[kind].append(_start_on(folder, kind))
            took["imports"].append(_imports(folder))
            say("restart: " + ", ".join(f"{kind} {times[-1]:.2f} s" for kind, times in took.items()))
    found: Json = {"facts": facts, "snapshot_is_behind": behind, "journal_mb": short(size / 1e6)}
    for kind, label in (("facts", "ready_s"), ("snapshot", "ready_with_snapshot_s"), ("imports", "floor_s")):
        found[label] = short(quantile(took[kind], 0.5))
    found["times_the_floor"] = short(found["ready_s"] / found["floor_s"])
    found["samples"] = len(took["facts"])
    found["targets"] = {label: at_most(found[label], 2.0) for label in ("ready_s", "ready_with_snapshot_s")}
    return found


async def _write(folder: Path, facts: int, behind: int) -> None:
    """Two state directories: one with all facts, one with a snapshot besides."""
    hosts = inventory(GROUPS, GROUPS)
    heard: list[Fact] = []
    world = World(hosts, heard.extend)
    for number in range(GROUPS * JOBS_A_GROUP):
        world.register(job_spec(f"job{number}", (80_500, 77_000)))
    world.begin()
    journal = Journal.open(folder / "facts")
    seq, snapshot = 0, (0, b"")
    while seq < facts:
        for given in world.batch(12, 0):
            world.take(given, world.core.handle(given, world.now))
        world.tick(10)
        if len(heard) >= 500 or seq + len(heard) >= facts:
            await journal.append(_numbered(heard, seq))
            seq += len(heard)
            heard.clear()
            if not snapshot[0] and seq >= facts - behind:
                snapshot = seq, msgspec.json.encode(world.core.state)
    await journal.close()
    shutil.copytree(folder / "facts", folder / "snapshot")
    journal = Journal.open(folder / "snapshot")
    await journal.snapshot(*snapshot)
    await journal.close()


def _numbered(facts: Sequence[Fact], seq: int) -> list[tuple[int, Fact]]:
    return [(seq + number, fact) for number, fact in enumerate(facts, 1)]


def _start_on(folder: Path, kind: str) -> float:
    hosts = [(node.host, node.pools[0], node.price_per_gpu_hour) for node in inventory(GROUPS, GROUPS).nodes]
    with tempfile.TemporaryDirectory(dir=folder, ignore_cleanup_errors=True) as name:
        made = Daemon(Path(name), hosts)
        shutil.copytree(folder / kind, made.state)
        before = made.last_seq()
        try:
            took = made.start()
            assert made.last_seq() > before, "the daemon is not on this journal"
        finally:
            made.end()
    return took


def _imports(folder: Path) -> float:
    began = time.perf_counter()
    process = start(["-c", IMPORTS], folder)
    assert process.wait() == 0
    return time.perf_counter() - began
