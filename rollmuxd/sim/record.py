"""One run with its history: every fact to a file, and a trace of it for Perfetto."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rollmuxd.core import facts as f
from rollmuxd.sim import perfetto
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
            with written.open("rb") as lines:
                perfetto.write(trace, map(f.decode, lines), lit=lit)
    return outcome
