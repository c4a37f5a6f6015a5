"""``rollmuxd estimate``: is sharing worth it for one's own jobs?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from rollmuxd.cli.calls import Failed, print_json, table

if TYPE_CHECKING:
    from rollmuxd.sim.estimate import Estimate, Range


@click.command(short_help="Is sharing worth it, from a training log?")
@click.option(
    "--log", "logs", multiple=True, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--jobs", type=click.IntRange(2, 5), help="So many jobs, in turn like each log (default: two or all).")
@click.option("--rollout-gpus", default=8, show_default=True, type=click.IntRange(1), help="GPUs of the rollout pool.")
@click.option("--train-gpus", default=8, show_default=True, type=click.IntRange(1), help="GPUs of the train pool.")
@click.option("--ran-on", default=0, type=click.IntRange(0), help="The logs' GPUs, where both phases ran on the same.")
@click.option("--switch-s", default=5.0, show_default=True, type=click.FloatRange(0), help="To load or park a state.")
@click.option("--ram-gb", default=0.0, type=click.FloatRange(0), help="RAM that a parked job needs on each host.")
@click.option("--host-ram-gb", default=2000.0, show_default=True, type=click.FloatRange(0), help="RAM of a host.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def estimate(
    logs: tuple[Path, ...],
    *,
    jobs: int | None,
    rollout_gpus: int,
    train_gpus: int,
    ran_on: int,
    switch_s: float,
    ram_gb: float,
    host_ram_gb: float,
    as_json: bool,
) -> None:
    """Wall time of jobs that share two pools, against the same jobs one after the other. No daemon is needed.

    \b
    rollmuxd estimate --log train.log --ran-on 8 --rollout-gpus 4 --train-gpus 4

    The log is verl's, EasyR1's, NeMo-RL's, OpenRLHF's or TRL's, or a CSV with gen_s and train_s. The simulator plays
    its steps with the daemon's own scheduler.
    """  # noqa: D301  # click's sign for lines that are not to be filled
    import msgspec

    from rollmuxd.sim.estimate import Costs, Gpus
    from rollmuxd.sim.estimate import estimate as estimated
    from rollmuxd.sim.training_logs import NoSteps, read

    try:
        steps = [read(path) for path in logs]
        count = jobs or max(2, len(logs))
        found = estimated(
            [steps[number % len(steps)] for number in range(count)],
            Gpus(rollout_gpus, train_gpus, ran_on),
            Costs(switch_s, ram_gb, host_ram_gb),
        )
    except (NoSteps, ValueError, OSError) as error:
        raise Failed(str(error)) from error
    if as_json:
        print_json(msgspec.to_builtins(found))
        return
    for path, mine in zip(logs, steps, strict=True):
        rollout, train = (sum(times) / len(mine) for times in ([s.rollout_s for s in mine], [s.train_s for s in mine]))
        click.echo(f"{path}: {len(mine)} steps, rollout {rollout:.1f} s, train {train:.1f} s on average")
    _show(found)


def _show(found: Estimate) -> None:
    click.echo(f"\n{found.jobs} jobs, {found.iterations} iterations each, played by the scheduler:\n")
    table(
        ["", "#WALL min", "#GAIN OF SHARING", ""],
        [
            ["sharing both pools", _written(found.shared_s, 1 / 60), None, ""],
            *(
                [one.baseline, _written(one.wall_s, 1 / 60), _written(one.gain), "" if one.worth else "not worth it"]
                for one in found.against
            ),
        ],
        "",
    )
    click.echo(f"\neach job's iteration takes {_written(found.slowdown)} times what it takes alone on these pools")
    click.echo("ranges: phases that lose nothing on more GPUs, to phases that speed up with GPUs to the power of 0.7")
    if found.hindrance:
        click.echo(f"but: {found.hindrance}")
    elif not all(one.worth for one in found.against):
        which = " or ".join(one.baseline for one in found.against if not one.worth)
        click.echo(f"not worth it where you can run them {which}: below 1.15 the trouble is greater than the gain")
    else:
        click.echo("worth it")


def _written(it: Range, times: float = 1.0) -> str:
    low, high = f"{it.low * times:.2f}", f"{it.high * times:.2f}"
    return low if low == high else f"{low} to {high}"
