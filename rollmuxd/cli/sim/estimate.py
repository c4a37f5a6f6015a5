"""``rollmuxd estimate``: is sharing worth it for one's own jobs?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import msgspec

from rollmuxd.cli.common import Call, Failed, print_json, table, talks
from rollmuxd.cli.feed import Time, last_facts
from rollmuxd.sim.estimate import Estimate, Gpus, Range
from rollmuxd.sim.estimate import estimate as estimated
from rollmuxd.sim.observed import LEAST, Seen, as_registered
from rollmuxd.sim.observed import observed as seen_in
from rollmuxd.sim.training_logs import Step, read


@click.command(short_help="Is sharing worth it, from a training log?")
@click.option(
    "--log",
    "logs",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A training log; several for jobs that differ.",
)
@click.option("--observed", is_flag=True, help="Of the daemon's jobs, as it has seen them; in mode observe, say.")
@click.option("--job", "names", multiple=True, help="With --observed: of these jobs (default: the last five).")
@click.option("--since", type=Time(), help="With --observed: from this time on (default: the last 50,000 facts).")
@click.option("--jobs", type=click.IntRange(2, 5), help="So many jobs, in turn like each log (default: two or all).")
@click.option("--rollout-gpus", default=8, show_default=True, type=click.IntRange(1), help="GPUs of the rollout pool.")
@click.option("--train-gpus", default=8, show_default=True, type=click.IntRange(1), help="GPUs of the train pool.")
@click.option("--ran-on", default=0, type=click.IntRange(0), help="The logs' GPUs, where both phases ran on the same.")
@click.option("--switch-s", default=5.0, show_default=True, type=click.FloatRange(0), help="To load or park a state.")
@talks
def estimate(
    call: Call,
    logs: tuple[Path, ...],
    *,
    observed: bool,
    names: tuple[str, ...],
    since: str | None,
    jobs: int | None,
    rollout_gpus: int,
    train_gpus: int,
    ran_on: int,
    switch_s: float,
) -> None:
    """Wall time of jobs that share two pools, against the same jobs one after the other.

    \b
    rollmuxd estimate --log train.log --ran-on 8 --rollout-gpus 4 --train-gpus 4
    rollmuxd estimate --observed

    The log is verl's, EasyR1's, NeMo-RL's, OpenRLHF's or TRL's, or a CSV with gen_s and train_s. The simulator plays
    its steps with the daemon's own scheduler. Only --observed needs a daemon.
    """  # noqa: D301  # click's sign for lines that are not to be filled
    if observed == bool(logs):
        raise Failed("give either --log FILE (a training log), or --observed (what a daemon has seen)")
    for option, given in (("--job", names), ("--since", since)):
        if given and not observed:
            raise Failed(f"{option} is about what a daemon has seen: it goes with --observed")
    try:
        steps: dict[str, list[Step]] = {}
        if observed:
            seen = _seen(call, names, since)
            steps = {name: of.steps for name, of in seen.items()}
            # Both phases ran on the same GPUs: as many as both pools, unless it is said.
            ran_on = ran_on or (rollout_gpus + train_gpus if all(of.pool for of in seen.values()) else 0)
        else:
            steps = {str(path): read(path) for path in logs}
        mine = list(steps.values())
        count = jobs or max(2, len(mine))
        found = estimated(
            [mine[number % len(mine)] for number in range(count)],
            Gpus(rollout_gpus, train_gpus, ran_on),
            switch_s,
        )
    except (ValueError, OSError) as error:
        raise Failed(str(error)) from error
    if call.as_json:
        print_json(msgspec.to_builtins(found))
        return
    for name, its in steps.items():
        rollout, train = sum(s.rollout_s for s in its) / len(its), sum(s.train_s for s in its) / len(its)
        click.echo(f"{name}: {len(its)} steps, rollout {rollout:.1f} s, train {train:.1f} s on average")
    show(found, list(steps))


def sharing(call: Call, since: str | None) -> dict[str, Any]:
    """What sharing would have made of the jobs that a daemon has watched, on its own nodes; or why that is not known.

    A job that ran both phases on one node's GPUs is set against pools that have half of these each.
    """
    try:
        seen = _seen(call, (), since)
    except Failed as error:
        return {"jobs": [], "reason": error.message, "estimate": None}
    sizes = _sizes(call)
    pool = next(iter(seen.values())).pool
    if pool:
        whole = sizes.get(pool, 2)
        gpus = Gpus(max(1, whole // 2), max(1, whole - whole // 2), whole)
    else:
        gpus = Gpus(next((size for name, size in sizes.items() if name != "train"), 1), sizes.get("train", 1))
    mine = [of.steps for of in seen.values()]
    found = estimated([mine[number % len(mine)] for number in range(max(2, len(mine)))], gpus)
    return {
        "jobs": list(seen),
        "reason": "",
        "rollout_gpus": gpus.rollout,
        "train_gpus": gpus.train,
        "ran_on": gpus.ran_on,
        "estimate": msgspec.to_builtins(found),
    }


def show_sharing(told: Mapping[str, Any]) -> None:
    """For people."""
    if told["estimate"] is None:
        click.echo(f"what sharing would have saved is not known yet: {told['reason']}")
        return
    ran = f", where both phases ran on the same {told['ran_on']}" if told["ran_on"] else ""
    click.echo(
        f"what sharing would have saved, had {', '.join(told['jobs'])} shared pools of {told['rollout_gpus']} and "
        f"{told['train_gpus']} GPUs{ran}:"
    )
    show(msgspec.convert(told["estimate"], Estimate), told["jobs"])


def _sizes(call: Call) -> dict[str, int]:
    """GPUs of the largest node of each pool."""
    sizes: dict[str, int] = {}
    for node in call.items("/v1/nodes"):
        for pool in node["pools"]:
            sizes[pool] = max(sizes.get(pool, 0), len(node["gpus"]))
    return sizes


def _seen(call: Call, names: tuple[str, ...], since: str | None) -> dict[str, Seen]:
    """What a daemon has seen of its jobs, by job; of the last five that finished some iterations, unless named.

    Jobs that ran both phases on the same GPUs are not mixed with jobs that did not. Those that are like the last one
    are taken.
    """
    jobs = [(job["job"], job["name"], job["run"], job["cycle"]) for job in call.items("/v1/jobs")]
    found = seen_in(as_registered(last_facts(call, since), jobs))
    if missing := [name for name in names if name not in found]:
        there = ", ".join(found) or "none"
        raise Failed(f"job {missing[0]} has not finished {LEAST} iterations; jobs that have: {there}")
    if not found:
        raise Failed(f"no job has finished {LEAST} iterations yet; come again when one has")
    chosen = {name: found[name] for name in names or found}
    alike = {name: of for name, of in chosen.items() if of.pool == list(chosen.values())[-1].pool}
    if names and len(alike) < len(chosen):
        raise Failed("some of these jobs ran both phases on the same GPUs, and some did not: ask for them separately")
    return dict(list(alike.items())[-5:])


def show(found: Estimate, names: Sequence[str]) -> None:
    """For people. The names are those of the logs, in order."""
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
    click.echo(
        f"assumed: pools of {found.gpus.rollout} and {found.gpus.train} GPUs, and {found.switch_s:g} s to load or to "
        "park a state (rollmuxd estimate has options)"
    )
    click.echo("ranges: phases that lose nothing on more GPUs, to phases that speed up with GPUs to the power of 0.7")
    for it in found.drifts:
        if it.log < len(names):  # jobs like the same log drift alike
            click.echo(
                f"{names[it.log]} drifts: {it.phase} took {it.shortest_s:.1f} s on average in one fifth of it, and "
                f"{it.longest_s:.1f} s in another"
            )
    if found.drifts:
        click.echo("so the ranges also cover each fifth by itself, and as much drift again as in the second half")
    if not all(one.worth for one in found.against):
        which = " or ".join(one.baseline for one in found.against if not one.worth)
        click.echo(f"not worth it where you can run them {which}: below 1.15 the trouble is greater than the gain")
    else:
        click.echo("worth it")


def _written(it: Range, times: float = 1.0) -> str:
    low, high = f"{it.low * times:.2f}", f"{it.high * times:.2f}"
    return low if low == high else f"{low} to {high}"
