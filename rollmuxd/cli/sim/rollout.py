"""``rollmuxd sim rollout``: what happens inside the rollouts of one job."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from rollmuxd.cli.common import Failed, answer, needs_numpy, table
from rollmuxd.cli.progress import bar

if TYPE_CHECKING:
    from rollmuxd.rollout.engine import Tuning
    from rollmuxd.sim.rollouts.study import Check, Study


def _names(text: str, option: str) -> tuple[str, ...]:
    found = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not found:
        raise click.UsageError(f"{option} names none")
    return found


def _numbers(text: str, option: str) -> tuple[float, ...]:
    try:
        found = tuple(float(part) for part in _names(text, option))
    except ValueError:
        raise click.UsageError(f"{option} is {text!r}: numbers, with commas between them, are needed") from None
    if not all(0 <= it < 1000 for it in found):
        raise click.UsageError(f"{option} is {text!r}: each number is at least 0 and below 1000")
    return found


@click.command()
@click.option(
    "--lengths",
    default="skythought",
    show_default=True,
    help="skythought, CSV files (prompt,tokens), or aime and mix, which need --data.",
)
@click.option("--data", default="", metavar="DIR", help="Where large traces lie (default: $ROLLMUX_DATA).")
@click.option(
    "--policies", default="static-tp2,start,reactive,full,clairvoyant", show_default=True, help="See the how-to page."
)
@click.option("--dispatch", default="contiguous", show_default=True, help="Of static policies: contiguous, spread.")
@click.option("--c-step", help="What a step of the engine costs beside, milliseconds. Default: 2, or the tuning's.")
@click.option(
    "--tuning", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="What calibrate --json said."
)
@click.option("--seeds", default=1, show_default=True, type=click.IntRange(1, 100), help="So many draws of batches.")
@click.option("--model", default="qwen2.5-14b", show_default=True)
@click.option("--gpu", default="h800", show_default=True)
@click.option("--nodes", default=5, show_default=True, type=click.IntRange(1, 1024), help="Of eight GPUs.")
@click.option("--prompts", default=64, show_default=True, type=click.IntRange(1, 65536))
@click.option(
    "--samples", default=16, show_default=True, type=click.IntRange(1, 1024), help="Responses to each prompt."
)
@click.option("--slow-replica", default=1.0, show_default=True, type=click.FloatRange(1, 100), help="Of one node.")
@click.option("--asynchrony", default=0, type=click.IntRange(0, 1), help="1: a rollout beside the training before.")
@click.option(
    "--train-s", type=click.FloatRange(0.001, 1e6), help="Of a training. Default: static-tp2's rollout / 1.49."
)
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a report with pictures.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for Perfetto.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; exit status 1 where a check fails.")
def rollout(
    *,
    lengths: str,
    data: str,
    policies: str,
    dispatch: str,
    c_step: str | None,
    tuning: Path | None,
    seeds: int,
    model: str,
    gpu: str,
    nodes: int,
    prompts: int,
    samples: int,
    slow_replica: float,
    asynchrony: int,
    train_s: float | None,
    html: Path | None,
    trace: Path | None,
    as_json: bool,
) -> None:
    """Inside one job: which parallelism, which dispatch, which moves, and what each of them brings.

    Every table has two baselines. One has a fixed degree, with the samples of a prompt on one replica. The other has
    the best degree in hindsight, with the samples spread.
    """
    needs_numpy()
    from rollmuxd.cli.sim.command import writable
    from rollmuxd.sim import report
    from rollmuxd.sim.rollouts import study
    from rollmuxd.sim.rollouts import trace as traces
    from rollmuxd.sim.rollouts.batches import read
    from rollmuxd.sim.rollouts.run import Setting

    try:
        constants = _tuning(tuning)
        step = (constants.step_s * 1000,) if c_step is None else _numbers(c_step, "--c-step")
        asked = study.Asked(
            tuple(read(name, data) for name in _names(lengths, "--lengths")),
            _names(policies, "--policies"),
            _names(dispatch, "--dispatch"),
            step,
            seeds,
            Setting(model=model, gpu=gpu, nodes=nodes, prompts=prompts, samples=samples, tuning=constants),
            asynchrony,
            train_s or 0.0,
            slow_replica,
        )
        study.verify(asked)
        if html is not None:
            report.check()
        for path in (html, trace):
            if path is not None:  # better before minutes of runs than after them
                writable(path)
        with bar("rows", study.rows_of(asked)) as advance:
            found = study.compare(asked, advance)
        if trace is not None:
            trace.write_bytes(traces.encode(study.one_step(asked)))
        if html is not None:
            from rollmuxd.sim.report import rollouts

            command = shlex.join(["rollmuxd", *sys.argv[1:]])
            rollouts.write(html, found, study.one_step(asked), title=f"Rollouts: {lengths}", command=command)
            click.echo(f"wrote {html}", err=True)
    except (ValueError, OSError) as error:
        raise Failed(str(error)) from error
    answer({**msgspec.to_builtins(found), "ok": found.ok}, lambda _: _show(found), as_json=as_json)
    judge(found.checks)


def _tuning(path: Path | None) -> Tuning:
    """The constants of an engine; the defaults where no file is named."""
    from rollmuxd.rollout.engine import Tuning

    if path is None:
        return Tuning()
    if path.stat().st_size > 1_000_000:
        raise ValueError(f"{path}: it is larger than 1 MB; pass what rollmuxd sim calibrate --json printed")
    body = path.read_bytes()

    def no(key: str, problem: str) -> ValueError:
        line = body[: max(0, body.find(f'"{key.rpartition(".")[2]}"'.encode()))].count(b"\n") + 1
        return ValueError(
            f"{path}, line {line}, key '{key}': {problem}; pass what rollmuxd sim calibrate --json printed"
        )

    try:
        told = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        given = msgspec.json.decode(told["tuning"], type=dict[str, Any])
    except KeyError:
        raise no("tuning", "it is missing") from None
    except msgspec.DecodeError as error:
        raise no("tuning", str(error)) from error
    if bytes(told.get("ok", b"")) == b"false":
        raise no("ok", "it is false: a constant ended at a bound of the fit")
    costs = ("layer_s", "step_s", "sequence_s", "activations_gb")
    for key, value in given.items():
        if key not in Tuning.__struct_fields__:
            raise no(f"tuning.{key}", f"there is no such key ({', '.join(Tuning.__struct_fields__)})")
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
        if key in costs and not 0 <= number < 100:
            raise no(f"tuning.{key}", f"{value!r} is there, and a number of at least 0, below 100, is needed")
        if key not in costs and not 0 < number <= 1:
            raise no(f"tuning.{key}", f"{value!r} is there, and a share above 0, of at most 1, is needed")
    return Tuning(**given)


def _show(found: Study) -> None:
    for lengths, c_step in dict.fromkeys((row.lengths, row.c_step_ms) for row in found.rows):
        click.echo(f"\n{lengths}, {c_step:g} ms a step\n")
        rows = [row for row in found.rows if (row.lengths, row.c_step_ms) == (lengths, c_step)]
        table(
            ["POLICY", "DISPATCH", "TP", "#ROLLOUT s", "#OVER static-tp2", "#OVER best static", "#ITERATION", "#MOVES",
             "#SWITCHES", "#PREEMPTED"],
            [
                [
                    row.policy, row.dispatch, ",".join(map(str, row.degrees)), f"{row.seconds:.1f}",
                    _times(row.over_static_tp2), _times(row.over_best_static), _times(row.end_to_end), row.moves,
                    row.switches, row.preemptions,
                ]
                for row in rows
            ],
            "",
        )  # fmt: skip
    click.echo("\nOVER static-tp2: against the contiguous one, which is what frameworks do by default.")
    click.echo("OVER best static: against the best degree in hindsight, samples spread. Values above 1 are faster.")
    both = "the longer of rollout and training" if found.asynchrony else "rollout and training"
    click.echo(f"ITERATION: {both}, over rollout and training of static-tp2; training takes {found.training}.")
    if found.asynchrony:
        gains = [row.over_synchronous for row in found.rows]
        click.echo(f"Of that, training beside the next rollout brings {min(gains):.2f} to {max(gains):.2f}x.")
    show_checks(found.checks)


def _times(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}x"


def show_checks(checks: list[Check]) -> None:
    """A table of figures beside their bars."""
    if checks:
        click.echo()
        table(["CHECK", "#VALUE", "BAR", "", "NOTE"], [_line(it) for it in checks], "")


def _line(it: Check) -> list[str]:
    low, high = ("" if bound is None else f"{bound:g}" for bound in it.bar)
    value = "" if it.value is None else f"{it.value:.3f}"
    verdict = "skipped" if it.ok is None else "ok" if it.ok else "MISSED"
    return [it.check, value, "" if it.ok is None else f"{low} to {high}".strip(), verdict, it.note]


def judge(checks: list[Check]) -> None:
    """End with status 1 where a figure misses its bar."""
    from rollmuxd.sim.rollouts.study import passed

    if not passed(checks):
        raise click.exceptions.Exit(1)
