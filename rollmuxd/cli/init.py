"""``rollmuxd init``: the first rollmux.toml, from what is seen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from rollmuxd.cli.common import Failed, print_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rollmuxd.daemon.init_config import Found


@click.command()
@click.option("--shared", is_flag=True, help="One pool: every GPU is for rollouts and for training.")
@click.option(
    "--ssh", "hosts", multiple=True, metavar="HOST", help="A host that `ssh HOST` reaches; can be given again."
)
@click.option("--mock", is_flag=True, help="Eight made-up GPUs, to try rollmuxd without any.")
@click.option(
    "--slurm",
    is_flag=False,
    flag_value="",
    metavar="[ALLOCATION]",
    help="The nodes of a Slurm allocation; without a number, of the one that this is run in.",
)
@click.option(
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default=Path("rollmux.toml"),
    show_default=True,
    help="The file to write.",
)
@click.option("--json", "as_json", is_flag=True, help="Print what was seen as JSON.")
def init(  # one argument for each option
    shared: bool, hosts: tuple[str, ...], slurm: str | None, mock: bool, output: Path, as_json: bool
) -> None:
    """Write a rollmux.toml with the GPUs of this machine, of the hosts that --ssh names, or of a Slurm allocation.

    Without --shared half of the GPUs are for rollouts, the others for training. Of a heterogeneous allocation it is the
    first component that is for rollouts. A file that is there is left alone.
    """
    import anyio

    from rollmuxd.daemon import init_config

    if hosts and slurm is not None:
        raise Failed("--ssh and --slurm are two files: run it twice, each with an --output of its own")
    if output.exists():
        raise Failed(f"{output} is there already, and is not written over; move it away, or name another with --output")
    try:
        found = init_config.made_up() if mock else anyio.run(init_config.look, hosts, slurm)
    except init_config.CannotLook as error:
        raise Failed(str(error)) from error
    if (hosts or slurm is not None) and not any(one.gpus for one in found):
        # a batch script would hold the allocation with a daemon that has no hosts
        why = "; ".join(f"{one.host}: {' '.join(one.why.split()) or 'there is none'}" for one in found)
        where, then = "these hosts", "mend that, and run it again; no file was written"
        if slurm is not None:
            where, then = "the nodes of the allocation", "ask Slurm for some: --gres=gpu:8"
        raise Failed(f"no GPU was seen on {where} ({why}); {then}")
    try:
        with output.open("x", encoding="utf-8") as file:
            file.write(init_config.text(found, shared=shared))
    except OSError as error:
        raise Failed(f"{output} cannot be written: {error.strerror}; name another file with --output") from error
    if as_json:
        seen = ("host", "backend", "gpus", "ram_mb", "why")
        told = [{name: msgspec.to_builtins(getattr(one, name)) for name in seen} for one in found]
        print_json({"file": str(output), "hosts": told})
    else:
        _tell(output, found)


def _tell(output: Path, found: Sequence[Found]) -> None:
    without = [one for one in found if not one.gpus]
    for one in found:
        if one.gpus:
            kinds = ", ".join(dict.fromkeys(gpu.type for gpu in one.gpus))
            click.echo(f"{one.host}: {len(one.gpus)} GPUs ({kinds}), {one.ram_mb / 1000:.0f} GB RAM")
    for one in without:
        click.echo(f"{one.host}: no GPU was seen: {' '.join(one.why.split()) or 'there is none'}", err=True)
    if len(without) == len(found):
        click.echo(
            f"{output} was written without hosts, with a table to be filled in. To see rollmuxd work without a GPU: "
            "rollmuxd demo. To try it with made-up GPUs: rollmuxd init --mock --output OTHER.toml. "
            "For GPUs of other machines: rollmuxd init --ssh HOST --output OTHER.toml"
        )
    else:
        named = "" if output.name == "rollmux.toml" and output.parent == Path() else f" --config {output}"
        click.echo(f"{output} was written; look at it, then: rollmuxd doctor{named}, rollmuxd daemon start{named}")
