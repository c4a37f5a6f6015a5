"""One run with its history: every fact to a file, and a trace of it for Perfetto."""

import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from rollmuxd.core import facts as f
from rollmuxd.sim import history, perfetto
from rollmuxd.sim.compare import Task, perform
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.workload import Workload

if TYPE_CHECKING:
    from rollmuxd.fabric.network import Lit


def run(
    task: Task,
    drawn: Workload,
    *,
    facts: Path | None = None,
    trace: Path | None = None,
    progress: Callable[[int], None] | None = None,
) -> Outcome:
    """The outcome. Facts go to the file as they happen, so that a long run's history is never in memory."""
    if facts is None and trace is None:
        return perform(task, drawn, progress=progress)
    with tempfile.TemporaryDirectory() as folder:
        written = facts or Path(folder) / "facts.jsonl"
        with written.open("wb") as out:

            def hear(fact: f.Fact) -> None:
                out.write(f.encode(fact) + b"\n")

            lit: list[Lit] = []
            outcome = perform(task, drawn, hear=hear, progress=progress, lit=lit.extend)
        if trace is not None:
            perfetto.write(trace, chain(history.items(_read(written)), _circuits(lit)))
    return outcome


def _circuits(lit: Iterable["Lit"]) -> Iterator[perfetto.CircuitSpan]:
    """By their ends, as all spans come."""
    for (a, b), count, start, end in sorted(lit, key=lambda it: it[3]):
        yield perfetto.CircuitSpan(start=round(start * 1000), end=round(end * 1000), racks=(a, b), count=count)


def _read(path: Path) -> Iterator[f.Fact]:
    with path.open("rb") as lines:
        for line in lines:
            yield f.decode(line)
