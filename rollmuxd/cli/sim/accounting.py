"""``rollmuxd plan --from FILE``: what would sharing have saved on jobs that have run?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
import msgspec

from rollmuxd.cli.common import Failed, cell, fields

_FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class Bounds(click.ParamType[Any]):
    """``LO:HI``, ``1.5``, or ``none``."""

    name = "LO:HI"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Two numbers, or None."""
        if not isinstance(value, str):
            return value
        if value == "none":
            return None
        low, _, high = value.partition(":")
        try:
            return (float(low), float(high or low))
        except ValueError:
            self.fail(f"{value!r} is not LO:HI (1.1:2), one number (1.5), or none", param, ctx)


@dataclass(frozen=True)
class Accounting:
    """What was asked: the file, and the options that go with it."""

    file: Path
    name: str
    logs: tuple[Path, ...]
    rollout_share: tuple[float, float] | None
    split: float
    slo: float
    switch_s: float

    def saving(self) -> dict[str, Any]:
        """The answer. Raises Failed."""
        from rollmuxd.sim import sacct, training_logs

        try:
            found = sacct.saving(
                sacct.read(self.file, self.name),
                logs=[training_logs.read(log) for log in self.logs],
                share=self.rollout_share,
                split=self.split,
                slo=self.slo,
                switch_s=self.switch_s,
            )
        except (ValueError, OSError) as error:
            raise Failed(str(error)) from error
        return {"file": str(self.file), **msgspec.to_builtins(found)}


def from_accounting(command: Callable[..., Any]) -> Callable[..., Any]:
    """Give a command ``--from`` and the options about it, as one argument: ``accounting``, or None."""

    @click.option("--from", "file", type=_FILE, help="Jobs that have run: what `sacct` has written.")
    @click.option("--name", default="", metavar="REGEX", help="With --from: of jobs with such a name only.")
    @click.option("--log", "logs", multiple=True, type=_FILE, help="With --from: a training log, for the phases.")
    @click.option("--rollout-share", type=Bounds(), help="With --from, without a log: the rollout's share of the time.")
    @click.option("--split", default=0.5, show_default=True, help="With --from: share of a job's GPUs that generate.")
    @click.option("--slo", default=1.5, show_default=True, help="With --from: how much longer an iteration may take.")
    @click.option("--switch-s", default=5.0, show_default=True, help="With --from: to load or park a job's state.")
    @wraps(command)
    def run(*args: Any, file: Path | None, **options: Any) -> None:
        about = {name: options.pop(name) for name in ("name", "logs", "rollout_share", "split", "slo", "switch_s")}
        context = click.get_current_context()
        given = [name for name in about if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
        if file is None and given:
            raise click.UsageError(f"--{given[0].replace('_', '-').replace('logs', 'log')} goes with --from")
        command(*args, accounting=None if file is None else Accounting(file, **about), **options)

    return run


def show_saving(view: Mapping[str, Any]) -> None:
    """For people."""
    low, high = view["saved"]
    shared_low, shared_high = view["gpu_hours_shared"]
    less = f"{_percent(low, high)} less" if high > 0 else f"{_percent(-high, -low)} more"
    click.echo(
        f"{view['jobs']} jobs of {view['file']} used {cell(view['gpu_hours_was'])} GPU-hours; sharing would have used "
        f"{_range(shared_low, shared_high)}: {less}\n"
    )
    fields(
        {
            "started": f"{view['since']} to {view['until']}",
            "rollout's share": f"{_percent(*view['rollout_share'])} of an iteration, from "
            + ("the log" if view["phases"] == "log" else "--rollout-share"),
            "slowdown": f"median {cell(view['slowdown_p50'])}, p95 {cell(view['slowdown_p95'])}, most "
            f"{cell(view['slowdown_max'])}; promised were {cell(view['slo'])}",
            "in the queue": None
            if view["queue_h_p50"] is None
            else f"{cell(view['queue_h_p50'])} h in the median, which is not part of the saving",
            "rows left out": ", ".join(f"{why} {count}" for why, count in view["left_out"].items()),
        }
    )
    click.echo("\nassumed:")
    for line in view["assumes"]:
        click.echo(f"  {line}")


def _range(low: float, high: float) -> str:
    return cell(low) if cell(low) == cell(high) else f"{cell(low)} to {cell(high)}"


def _percent(low: float, high: float) -> str:
    return f"{low:.0%}" if f"{low:.0%}" == f"{high:.0%}" else f"{low:.0%} to {high:.0%}"
