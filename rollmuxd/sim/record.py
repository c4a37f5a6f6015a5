"""One run with its history: every fact to a file, and a trace of it for Perfetto."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from rollmuxd.core import facts as f
from rollmuxd.sim import history, perfetto
from rollmuxd.sim.compare import Task, perform
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.workload import Workload


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

            outcome = perform(task, drawn, hear=hear, progress=progress)
        if trace is not None:
            perfetto.write(trace, history.items(_read(written)))
    return outcome


def _read(path: Path) -> Iterator[f.AnyFact]:
    with path.open("rb") as lines:
        for line in lines:
            yield f.decode(line)
