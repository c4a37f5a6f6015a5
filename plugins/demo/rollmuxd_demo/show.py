"""The demo's report for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rollmuxd_demo.live import bar, letter
from rollmuxd_demo.measure import RunRecord, gantt, window

#: How much of the runs the picture shows.
ITERATIONS_SHOWN = 4


def report(result: Mapping[str, Any], shared: RunRecord, in_turn: RunRecord | None) -> None:
    """Print what was found out."""
    from rollmuxd.cli.common import console

    out = console()
    letters = {job["name"]: letter(index) for index, job in enumerate(result["jobs"])}
    out.print()
    _pictures(out, letters, shared, in_turn)
    out.print()
    _times(out, result)
    out.print()
    _jobs(out, result, letters)
    out.print()
    _pools(out, result)
    for sentence in remarks(result):
        out.print(sentence)


def _pictures(out: Any, letters: Mapping[str, str], shared: RunRecord, in_turn: RunRecord | None) -> None:
    from rich.table import Table
    from rich.text import Text

    width = max(40, min(100, out.width - 12))
    start, end = window(shared.jobs, ITERATIONS_SHOWN)
    pictures = [("at once", shared, start)]
    if in_turn is not None:
        pictures.append(("one after the other", in_turn, window(in_turn.jobs, 1)[0]))
    for title, run, begins in pictures:
        out.print(Text(f"{title}, the first {end - start:.0f} s", "bold"))
        shown = Table(box=None, show_header=False, pad_edge=False)
        for pool, cells in gantt(run.jobs, begins, begins + end - start, width).items():
            shown.add_row(pool, bar(cells, letters))
        out.print(shown)


def _times(out: Any, result: Mapping[str, Any]) -> None:
    from rich.table import Table

    shown = Table(box=None, show_header=False, pad_edge=False)
    shown.add_column()
    shown.add_column(justify="right", style="bold")
    shown.add_column()
    by = "longest job" if result["bound_by"] == "longest" else f"{result['bound_by']} pool"
    shown.add_row("all jobs at once", f"{result['wall_s']:.1f} s", f"{result['jobs'][0]['iterations']} iterations each")
    shown.add_row(
        "least of any schedule",
        f"{result['lower_bound_s']:.1f} s",
        f"by the {by}; {result['ratio_to_bound']:.2f} times that was reached",
    )
    if result["bound_by"] != "longest":
        when = "after the last rollout" if result["bound_by"] == "rollout" else "before the first training"
        shown.add_row("no order avoids", f"{result['first_fill_s']:.1f} s", when)
    if result["sequential_wall_s"] is not None:
        shown.add_row("one after the other", f"{result['sequential_wall_s']:.1f} s", "on the same two pools")
        shown.add_row("speed-up", f"{result['speedup']:.2f}", _gain(result))
    out.print(shown)


def _gain(result: Mapping[str, Any]) -> str:
    if result["cores"] < 2:
        return "one core only, which both pools share"
    if result["core_gain"] is None:
        return "the machine was too busy to measure what two cores do"
    return f"two cores here do {result['core_gain']:.2f} times the work of one"


def _jobs(out: Any, result: Mapping[str, Any], letters: Mapping[str, str]) -> None:
    from rich.table import Table

    shown = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("", "job"):
        shown.add_column(column, no_wrap=True)
    for column in ("rollout s", "train s", "slowdown"):
        shown.add_column(column, justify="right", no_wrap=True)
    for column in ("reward", "weights"):
        shown.add_column(column, no_wrap=True)
    for job in result["jobs"]:
        same = {None: "not compared", True: "identical", False: "DIFFERENT"}[
            None if job["sha256_alone"] is None else job["sha256"] == job["sha256_alone"]
        ]
        shown.add_row(
            bar([job["name"]], letters),
            job["name"],
            f"{job['rollout_s']:.1f}",
            f"{job['train_s']:.1f}",
            "-" if job["slowdown"] is None else f"{job['slowdown']:.2f}",
            f"{job['reward_first']:.2f} → {job['reward_last']:.2f}",
            same,
        )
    out.print(shown)


def _pools(out: Any, result: Mapping[str, Any]) -> None:
    from rich.table import Table

    alone, moved, moved_alone = result["sequential_utilisation"], result["switches"], result["sequential_switches"]
    shown = Table(box=None, pad_edge=False, header_style="bold")
    shown.add_column("")
    shown.add_column("at once", justify="right")
    if alone:
        shown.add_column("in turn", justify="right")
    for pool in result["utilisation"]:
        in_use = [f"{result['utilisation'][pool]:.0%}", *([f"{alone[pool]:.0%}"] if alone else [])]
        shown.add_row(f"{pool} pool in use", *in_use)
    for kind in moved:
        shown.add_row(f"states moved: {kind}", str(moved[kind]), *([str(moved_alone[kind])] if moved_alone else []))
    out.print(shown)


def remarks(result: Mapping[str, Any]) -> list[str]:
    """What else has to be said of the figures."""
    said = []
    if result["cores"] < 2:
        said.append("\nWith one core the two pools cannot work at the same time: there is nothing to be gained here.")
    if result["weights_identical"]:
        said.append("\nThe final weights are the same, bit for bit, as when each job runs alone.")
    return said
