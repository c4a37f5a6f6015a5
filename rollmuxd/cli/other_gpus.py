"""``rollmuxd plan --measured-on``: phase times of other GPUs than were measured, computed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from rollmuxd.cli.common import Call, Failed, needs_numpy


def computed(call: Call, body: Mapping[str, Any], path: Path, measured_on: Sequence[str], model_name: str) -> list[str]:
    """Change the seconds of a plan's jobs to what they take on the GPUs that there are. Says by how much, per pool.

    Raises Failed, naming the pool.
    """
    types = dict(_type_of(it) for it in measured_on)
    there = _types(call, body, path)
    for pool, name in types.items():
        if there.get(pool) == "":
            where = f"{path}, [pools.{pool}]" if body.get("pools") else f"the daemon's nodes of pool {pool}"
            raise Failed(f"{where}: gpu_type is missing, which --measured-on {pool}={name} needs")
    return _elsewhere(body["jobs"], types, there, model_name)


def _type_of(word: str) -> tuple[str, str]:
    pool, equals, name = word.partition("=")
    if not pool or not equals or not name:
        raise click.UsageError(f"--measured-on is {word!r}, and POOL=GPU is needed: rollout=H20")
    return pool, name


def _types(call: Call, body: Mapping[str, Any], path: Path) -> dict[str, str]:
    """The GPU type of each pool: of those in the file, or of the daemon's nodes. Raises Failed for a pool of two."""
    if body.get("pools"):
        of = [(name, str(pool.get("gpu_type", ""))) for name, pool in body["pools"].items() if isinstance(pool, dict)]
    else:
        of = [(pool, node["gpu_type"]) for node in call.items("/v1/nodes") for pool in node["pools"]]
    found: dict[str, str] = {}
    for pool, name in of:
        if found.setdefault(pool, name) != name:
            raise Failed(f"{path}: pool {pool} has GPUs of types {found[pool]} and {name}; --measured-on needs one")
    return found


def _elsewhere(
    jobs: Iterable[Mapping[str, Any]], measured_on: Mapping[str, str], there: Mapping[str, str], model_name: str
) -> list[str]:
    """The first phase generates; later ones over one pool train."""
    needs_numpy()
    from rollmuxd.rollout.elsewhere import generation, training
    from rollmuxd.rollout.hardware import gpu
    from rollmuxd.rollout.models import model

    factors: dict[tuple[str, bool], float] = {}
    for pool, name in measured_on.items():
        if pool not in there:
            raise Failed(f"--measured-on {pool}={name}: there is no pool {pool} (there are {', '.join(there)})")
        try:
            old, new = gpu(name), gpu(there[pool])
            factors[pool, True], factors[pool, False] = generation(old, new, model(model_name)), training(old, new)
        except ValueError as error:
            raise Failed(f"--measured-on {pool}={name}: {error}") from error
    used = {}
    for job in jobs:
        for at, phase in enumerate(job["phases"]):
            (pool, *others), seconds = phase["pools"], phase.get("seconds")
            if pool in measured_on and not others and seconds:
                phase["seconds"] = seconds * factors[pool, at == 0]
                used[pool, at == 0] = factors[pool, at == 0]
    return [
        f"{pool}: {'generating' if first else 'training'} takes {factor:.2f} times as long on {there[pool]} as on "
        f"{measured_on[pool]} (computed)"
        for (pool, first), factor in used.items()
    ]
