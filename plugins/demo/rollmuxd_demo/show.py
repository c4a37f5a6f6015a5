"""The demo's report for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import click

from rollmuxd.cli.common import Columns, console, fields, listing, table
from rollmuxd_demo.measure import RunRecord, gantt, window

#: How much of the runs the picture shows.
ITERATIONS_SHOWN = 4
COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")


def report(result: Mapping[str, Any], shared: RunRecord, in_turn: RunRecord | None) -> None:
    """Print what was found out."""
    letters = {job["name"]: chr(ord("A") + index) for index, job in enumerate(result["jobs"])}
    click.echo()
    _pictures(letters, shared, in_turn)
    click.echo()
    fields(_times(result))
    click.echo()
    _jobs(result, letters)
    click.echo()
    _pools(result)
    for sentence in remarks(result):
        click.echo(sentence)


def _pictures(letters: Mapping[str, str], shared: RunRecord, in_turn: RunRecord | None) -> None:
    from rich.table import Table
    from rich.text import Text

    out = console()
    width = max(40, min(100, out.width - 12))
    start, end = window(shared.jobs, ITERATIONS_SHOWN)
    pictures = [("at once", shared, start)]
    if in_turn is not None:
        pictures.append(("one after the other", in_turn, window(in_turn.jobs, 1)[0]))
    for title, run, begins in pictures:
        out.print(Text(f"{title}, the first {end - start:.0f} s", "bold"))
        shown = Table(box=None, show_header=False, pad_edge=False)
        for pool, cells in gantt(run.jobs, begins, begins + end - start, width).items():
            shown.add_row(pool, _bar(cells, letters))
        out.print(shown)


def _bar(cells: Sequence[str | None], letters: Mapping[str, str]) -> Any:
    """Cells of time as text: a job's letter on its colour, and a dot where no job was."""
    from rich.text import Text

    text = Text()
    for cell in cells:
        if cell is None:
            text.append("·", "dim")
        else:
            text.append(letters[cell], f"black on {COLOURS[(ord(letters[cell]) - ord('A')) % len(COLOURS)]}")
    return text


def _times(result: Mapping[str, Any]) -> dict[str, str]:
    by = "longest job" if result["bound_by"] == "longest" else f"{result['bound_by']} pool"
    least = f"{result['lower_bound_s']:.1f} s by the {by}; {result['ratio_to_bound']:.2f} times that was reached"
    times = {
        "all jobs at once": f"{result['wall_s']:.1f} s, {result['jobs'][0]['iterations']} iterations each",
        "least of any schedule": least,
    }
    if result["bound_by"] != "longest":
        when = "after the last rollout" if result["bound_by"] == "rollout" else "before the first training"
        times["no order avoids"] = f"{result['first_fill_s']:.1f} s {when}"
    if result["sequential_wall_s"] is not None:
        times["one after the other"] = f"{result['sequential_wall_s']:.1f} s on the same two pools"
        times["speed-up"] = f"{result['speedup']:.2f}; {_gain(result)}"
    return times


def _gain(result: Mapping[str, Any]) -> str:
    if result["cores"] < 2:
        return "one core only, which both pools share"
    if result["core_gain"] is None:
        return "the machine was too busy to measure what two cores do"
    return f"two cores here do {result['core_gain']:.2f} times the work of one"


def _jobs(result: Mapping[str, Any], letters: Mapping[str, str]) -> None:
    columns: Columns = {
        "": lambda job: letters[job["name"]],
        "JOB": "name",
        "#ROLLOUT s": "rollout_s",
        "#TRAIN s": "train_s",
        "#SLOWDOWN": "slowdown",
        "REWARD": lambda job: f"{job['reward_first']:.2f} → {job['reward_last']:.2f}",
        "WEIGHTS": _compared,
    }
    listing(result["jobs"], columns, "no jobs")


def _compared(job: Mapping[str, Any]) -> str:
    if job["sha256_alone"] is None:
        return "not compared"
    return "identical" if job["sha256"] == job["sha256_alone"] else "DIFFERENT"


def _pools(result: Mapping[str, Any]) -> None:
    runs = [("#AT ONCE", result["utilisation"], result["switches"])]
    if result["sequential_utilisation"]:
        runs.append(("#IN TURN", result["sequential_utilisation"], result["sequential_switches"]))
    rows = [[f"{pool} pool in use", *(f"{used[pool]:.0%}" for _, used, _ in runs)] for pool in result["utilisation"]]
    rows += [[f"states moved: {kind}", *(str(moved[kind]) for *_, moved in runs)] for kind in result["switches"]]
    table(["", *(head for head, *_ in runs)], rows, "")


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What else has to be said of the figures."""
    said = []
    if result["cores"] < 2:
        said.append("\nWith one core the two pools cannot work at the same time: there is nothing to be gained here.")
    if result["weights_identical"]:
        said.append("\nThe final weights are the same, bit for bit, as when each job runs alone.")
    return said
