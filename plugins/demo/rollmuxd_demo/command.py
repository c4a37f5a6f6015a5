"""``rollmuxd demo``: from the options to the report.

``rollmuxd --help`` imports this module for its first line. So the module imports the rest only when the command runs.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rollmuxd_demo.run import Plan

#: what reaches the demo's host
BACKENDS = ("mock", "ssh", "ray", "slurm")


@click.command(short_help="See it work: real RL loops share two pools.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
@click.option("--jobs", default=3, type=click.IntRange(3, 26), show_default=True, help="Three shapes, in turn.")
@click.option("--iterations", default=15, type=click.IntRange(min=1), show_default=True, help="Of each job.")
@click.option(
    "--scale", type=click.FloatRange(min=0, min_open=True), help="Work per phase (default: as fits this machine)."
)
@click.option(
    "--keep", type=click.Path(path_type=Path, file_okay=False), help="Leave everything here: logs, weights, journals."
)
@click.option("--no-sequential", is_flag=True, help="Leave out the run of one job after the other.")
@click.option(
    "--backend", type=click.Choice(BACKENDS), default="mock", show_default=True, help="What reaches the demo's host."
)
def demo(
    as_json: bool,
    jobs: int,
    iterations: int,
    scale: float | None,
    keep: Path | None,
    no_sequential: bool,
    backend: str,
) -> None:
    """Real RL loops share two pools, then run one after the other; what did sharing save?

    Starts a daemon of its own, with a host whose two made-up GPUs stand for two CPU cores, and numpy jobs that learn by
    GRPO. Takes under two minutes on two cores, needs no GPU, and leaves nothing behind.
    """
    from rollmuxd.cli.common import Failed, needs_numpy, print_json
    from rollmuxd_demo import measure, reached, run, show
    from rollmuxd_demo.children import Children

    needs_numpy("the demo's RL loops need", "demo")
    planned = run.plan_jobs(jobs)

    def say(text: str) -> None:
        click.echo(text, err=as_json)

    with _folder(keep) as folder, Children() as children:
        try:
            host = reached.reach(backend, folder, children)
            if host.where:
                say(host.where)
            gain = run.measure_core_gain()
            if scale is None:
                say("measuring how fast this machine is ...")
                shapes = run.measure_shapes(planned, folder, children)
                work = [shapes[job.shape] for job in planned]
                scale = measure.choose_scale(work, iterations=iterations, longer=host.longer)
            plan = run.Plan(planned, iterations, scale)
            with _watcher(plan, f"{jobs} jobs at once", as_json=as_json) as watcher:
                shared = run.Run(plan, folder / "at-once", children, watcher, host).at_once()
            in_turn = None
            if not no_sequential:
                with _watcher(plan, "the same jobs, one after the other", as_json=as_json) as watcher:
                    in_turn = run.Run(plan, folder / "in-turn", children, watcher, host).in_turn()
        except run.JobFailed as failed:
            if failed.stderr:
                click.echo(f"---- the end of what {failed.name} said on stderr:\n{failed.stderr}\n----", err=True)
            where = f"; see {folder}" if keep else "; run it again with --keep DIR to have all logs"
            raise Failed(f"{failed}{where}") from failed
        result = measure.result(shared, in_turn, scale=scale, gain=gain, cores=len(run.cores()))
        result["violations"] = [
            seen for name in ("at-once", "in-turn") for seen in run.violations(folder / name / "witness.jsonl")
        ]
        result["backend"] = backend
        if keep:
            (folder / "result.json").write_text(json.dumps(result, indent=1) + "\n")

    if as_json:
        print_json(result)
    else:
        show.report(result, shared, in_turn)
    wrong = problems(result)
    if wrong:
        raise Failed("; ".join(wrong))


def problems(result: dict[str, Any]) -> list[str]:
    """What must not be, and makes the demo fail."""
    found = []
    alone = {job["name"]: job["sha256_alone"] for job in result["jobs"] if job["sha256_alone"] is not None}
    different = [job["name"] for job in result["jobs"] if job["sha256"] != alone.get(job["name"], job["sha256"])]
    if different:
        found.append(f"the weights of {', '.join(different)} differ between the two runs")
    if result["violations"]:
        first = result["violations"][0]
        count = len(result["violations"])
        found.append(f"the mock backend saw what must never happen, {count} times, first: {first.get('why', first)}")
    return found


def _watcher(plan: Plan, title: str, *, as_json: bool) -> Any:
    from rollmuxd_demo.live import Lines, Screen

    if as_json or not sys.stdout.isatty():
        return Lines(title, err=as_json)
    return Screen(title)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    from rollmuxd.cli.common import Failed

    if keep is None:
        with tempfile.TemporaryDirectory(prefix="rollmuxd-demo-", ignore_cleanup_errors=True) as name:
            yield Path(name)
        return
    if keep.exists() and any(keep.iterdir()):
        raise Failed(f"{keep} is not empty; name a new folder, or empty it")
    keep.mkdir(parents=True, exist_ok=True)
    yield keep.resolve()
