"""``rollmuxd sim validate`` and ``calibrate``: how far models can be believed, and constants for your own engine."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from rollmuxd.cli.common import Failed, answer, needs_numpy, print_json, table
from rollmuxd.cli.sim.rollout import judge, show_checks


@click.command()
@click.option("--data", default="", metavar="DIR", help="Where large traces lie (default: $ROLLMUX_DATA).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; exit status 1 where a check fails.")
def validate(*, data: str, as_json: bool) -> None:
    """The models of rollouts, training and networks, against public logs and published tables.

    Where no data folder is named the check of forecasts (V8) is skipped, and fails nothing.
    """
    needs_numpy()
    from rollmuxd.sim import validate as validation

    try:
        found = validation.validate(data)
    except (ValueError, OSError) as error:
        raise Failed(str(error)) from error
    answer({**msgspec.to_builtins(found), "ok": found.ok}, lambda _: show_checks(found.checks), as_json=as_json)
    judge(found.checks)


@click.command()
@click.option(
    "--log", "path", required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Requests, one JSON object a line.",
)  # fmt: skip
@click.option("--model", required=True, help="Such as qwen2.5-14b.")
@click.option("--hardware", required=True, help="Such as h800.")
@click.option(
    "--tp", default="1", show_default=True, type=click.Choice(["1", "2", "4", "8"]), help="GPUs of the engine."
)
@click.option("--max-seqs", default=256, show_default=True, type=click.IntRange(1), help="As the engine was started.")
@click.option("--kv-tokens", default=0, type=click.IntRange(0), help="Capacity that the engine reported (0: computed).")
@click.option("--json", "as_json", is_flag=True, help="One JSON object; exit status 1 where a constant is at a bound.")
def calibrate(*, path: Path, model: str, hardware: str, tp: str, max_seqs: int, kv_tokens: int, as_json: bool) -> None:
    """Fit three constants of an engine to a log of it: bandwidth, arithmetic, and what a step costs beside.

    Each line has input_toks, output_toks, queued_ts and last_token_ts (seconds).
    """
    needs_numpy()
    from rollmuxd.rollout import calibrate as calibration
    from rollmuxd.rollout.engine import Engine
    from rollmuxd.rollout.hardware import gpu
    from rollmuxd.rollout.models import model as known

    try:
        with path.open("rb") as lines:
            served = calibration.parse(lines, str(path))
        engine = Engine(gpu(hardware), known(model), int(tp), max_seqs=max_seqs, kv_tokens=kv_tokens)
    except (ValueError, OSError) as error:
        raise Failed(str(error)) from error
    case = calibration.Case(engine, served)
    tuning = calibration.fit([case])
    at_bounds = calibration.at_bounds(tuning)
    for name, bound in at_bounds.items():
        click.echo(
            f"warning: {name} = {bound:g} is as far as it may go: the log does not say it, or its engine is another "
            "one (--model, --hardware, --tp, --max-seqs, --kv-tokens). Do not use this tuning.",
            err=True,
        )
    before, after = calibration.compare(case), calibration.compare(case, tuning)
    if as_json:
        fits = {"before": before, "after": after, "requests": len(served)}
        print_json({"tuning": tuning, **fits, "at_bounds": at_bounds, "ok": not at_bounds})
    else:
        click.echo(f"{len(served)} requests; in the model's words:")
        click.echo(f"weights = {tuning.weights:.3f}, prefill = {tuning.prefill:.3f}, step_s = {tuning.step_s:.5f}\n")
        rows = [
            [name, *(f"{it:+.1%}" for it in (of.makespan, of.per_token, of.p99)), f"{of.latency:.1%}", of.preemptions]
            for name, of in (("defaults", before), ("fitted", after))
        ]
        table(["", "#MAKESPAN", "#PER TOKEN", "#P99", "#LATENCY (mean error)", "#PREEMPTED"], rows, "")
    if at_bounds:
        raise click.exceptions.Exit(1)
