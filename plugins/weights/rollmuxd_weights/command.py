"""``rollmuxd weights``: serve, pull, look at, and measure the moving of weights.

``rollmuxd --help`` imports this module for its first line. So the module imports the rest only when a command runs.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

import click


@click.group(short_help="Move new weights over slow lines: serve, pull, status, bench.")
def weights() -> None:
    """New weights go from trainer hosts to rollout hosts over plain HTTP, from memory to memory.

    The key of a run is in ROLLMUX_WEIGHTS_KEY: the same random word on every host.
    """


def _moves(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of serve and pull, and how they fail: in one line."""

    @click.argument("job")
    @click.option("--hosts", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The hosts file.")
    @click.option("--host", "me", help="Which of its hosts this is (default: this machine's name).")
    @click.option(
        "--dir", "folder", type=click.Path(path_type=Path), help="Where the weights are (default: in /dev/shm)."
    )
    @wraps(command)
    def wrapped(**given: Any) -> None:
        _plainly(lambda: command(**given))

    return wrapped


def _plainly(call: Callable[[], Any]) -> Any:
    from rollmuxd.cli.common import Failed
    from rollmuxd_weights.pull import Incomplete
    from rollmuxd_weights.store import Busy

    try:
        return call()
    except (OSError, ValueError, Busy, Incomplete, RuntimeError) as error:
        raise Failed(str(error)) from error


@weights.command()
@_moves
def serve(*, job: str, hosts: Path, me: str | None, folder: Path | None) -> None:
    """Serve what a publisher on this host writes, until it is interrupted.

    For a Publisher without hosts: then the training process serves nothing itself.
    """
    from rollmuxd_weights import publish
    from rollmuxd_weights.store import Store, default_folder

    server = publish.serve(job, Store(folder or default_folder(job)), publish.read_hosts(hosts), me, None)
    click.echo(f"serving {server.store.folder} at {', '.join(map(str, server.addresses))}")
    try:
        _until_interrupted().wait()
    finally:
        server.close()


@weights.command()
@_moves
@click.option(
    "--streams", default=1, show_default=True, type=click.IntRange(1, 64), help="Connections for each slow line."
)
@click.option("--once", is_flag=True, help="Pull what is newest now, and end.")
def pull(*, job: str, hosts: Path, me: str | None, folder: Path | None, streams: int, once: bool) -> None:
    """Pull every new version to this host as soon as there is one, until it is interrupted. It needs no GPU."""
    from rollmuxd.cli.common import Failed
    from rollmuxd_weights.pull import Incomplete, Pulled, Puller, Superseded, told_wrong

    def shown(found: Pulled) -> None:
        wrong = f"; wrong or late chunks: {told_wrong(found.wrong)}" if found.wrong else ""
        click.echo(
            f"{found.identity}: {found.slow_bytes} bytes over slow lines and {found.fabric_bytes} from peers in "
            f"{found.seconds:.2f} s: {found.path}{wrong}"
        )

    puller = Puller(job, hosts, me=me, dir=folder, streams=streams)
    try:
        click.echo(f"pulling to {puller.store.folder}, serving peers at {', '.join(map(str, puller.server.addresses))}")
        if once:
            try:
                found = puller.pull(wait_s=1.0)
            except Superseded as error:
                raise Failed(str(error)) from error
            if found is None:
                why = f": {puller.failure}" if puller.failure is not None else ""
                raise Failed(f"the trainers have nothing newer than {puller.store.current() or 'nothing'}{why}")
            shown(found)
            return
        over = _until_interrupted(puller.closing)
        said = ""
        while not over.is_set():
            try:
                found = puller.pull(wait_s=5.0)
            except Superseded as error:
                puller.failure = error
            except Incomplete as error:
                puller.failure = error
                over.wait(1.0)
            else:
                if found is not None:
                    puller.failure = None
                    shown(found)
            if (why := str(puller.failure or "")) != said:
                said = why
                if why:
                    click.echo(f"rollmuxd: {why}", err=True)
    finally:
        puller.close()


@weights.command()
@click.argument("job")
@click.option("--hosts", required=True, type=click.Path(path_type=Path, dir_okay=False), help="The hosts file.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def status(*, job: str, hosts: Path, as_json: bool) -> None:
    """Which version every host has, which it pulls, and what is wrong with it. Exit status 1: no host answers."""
    from rollmuxd.cli.common import Failed, print_json, table
    from rollmuxd_weights.ask import status as looked
    from rollmuxd_weights.publish import read_hosts

    found = _plainly(lambda: looked(job, read_hosts(hosts)))
    answers = [told["answers"] for told in found.values()]
    if as_json:
        print_json(found)
    else:
        rows = [[host, told["side"], told["id"] or "-", ", ".join(told["pulling"]) or "-", told["error"] or "-"]
                for host, told in found.items()]  # fmt: skip
        table(["HOST", "SIDE", "HAS", "PULLS", "ERROR"], rows, "none")
    if not any(answers):
        raise Failed(f"none of the {len(found)} hosts in {hosts} answers: start their publishers and pullers")


@weights.command()
@click.option("--namespaces", is_flag=True, help="In network namespaces with lines of these rates (needs root).")
@click.option("--train", default=8, show_default=True, type=click.IntRange(1, 64), help="Trainer hosts.")
@click.option("--rollout", default=8, show_default=True, type=click.IntRange(1, 64), help="Rollout hosts.")
@click.option(
    "--slow", default=10.0, show_default=True, type=click.FloatRange(1, 10_000), help="Mbit/s of each slow line."
)
@click.option(
    "--fast", default=200.0, show_default=True, type=click.FloatRange(1, 10_000), help="Mbit/s within a cluster."
)
@click.option(
    "--mb", default=64.0, show_default=True, type=click.FloatRange(1, 65_536), help="Size of the weights, MiB."
)
@click.option("--cut", type=click.FloatRange(min=0), metavar="SECONDS", help="Cut one slow line after so long.")
@click.option("--html", type=click.Path(path_type=Path, dir_okay=False), help="Draw the chunks as they come.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object.")
def bench(
    *, namespaces: bool, train: int, rollout: int, slow: float, fast: float, mb: float, cut: float | None,
    html: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Move random weights between hosts that are processes of this machine, and say how long it took."""
    from rollmuxd.cli.common import Failed, needs_numpy, print_json
    from rollmuxd_weights import bench as runs
    from rollmuxd_weights.namespaces import Clusters, removed_on_signals, unavailable

    needs_numpy("random weights need", "weights")
    if cut is not None and not namespaces:
        raise click.UsageError("--cut needs --namespaces: there are no lines to cut otherwise")
    if namespaces and (why := unavailable()):
        raise Failed(f"{why}; without --namespaces the transfer runs over the loopback, as fast as it goes")

    def measured() -> dict[str, Any]:
        if not namespaces:
            with runs.Run(runs.loopback(train, rollout)) as run:
                return run.transfer(1, mb)
        with removed_on_signals(), Clusters(train, rollout, slow=slow, fast=fast) as clusters:

            def during() -> None:
                if cut is not None:  # the line of a host in the middle, while its shard crosses
                    time.sleep(cut)
                    clusters.cut(clusters.rollouts[rollout // 2])

            with runs.in_namespaces(clusters) as run:
                return run.transfer(1, mb, during=during)

    if html is not None:
        _plainly(lambda: html.open("a").close())  # it can be written: seen before a run that may take minutes
    found = _plainly(measured)
    if html is not None:
        lines = f", {slow:g} Mbit/s between the clusters and {fast:g} within" if namespaces else ""
        html.write_text(runs.picture(found, f"{train} + {rollout} hosts{lines}", cut), encoding="utf-8")
    shown = {key: value for key, value in found.items() if key != "hosts"}
    if namespaces:
        shown["share_of_slow"] = found["bytes"] / found["seconds"] / (min(train, rollout) * slow * 125_000)
    if as_json:
        print_json(shown)
    else:
        for key, value in shown.items():
            click.echo(f"{key}: {value:.3f}" if isinstance(value, float) else f"{key}: {value}")
    if not found["identical"]:
        raise Failed("not every host has the bytes that were published")


def _until_interrupted(over: threading.Event | None = None) -> threading.Event:
    over = over or threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: over.set())
    return over


if __name__ == "__main__":
    sys.exit(weights())
