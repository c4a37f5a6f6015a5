"""The first ``rollmux.toml``, from what there is: ``rollmuxd init``."""

import json
import re
import socket
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

import anyio
from msgspec import Struct

from rollmuxd.core.ids import HostId
from rollmuxd.daemon.settings import node_id
from rollmuxd.spi import Backend, FindsHosts, FoundHost, GpuInfo, HostConfig, Inventory, PluginError, discovery

LOOK_S: Final = 15.0
_ID: Final = r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}"


class Found(Struct, frozen=True):
    """A host, and what it has; nothing where that cannot be told, and why."""

    host: HostId
    backend: str
    gpus: tuple[GpuInfo, ...] = ()
    ram_mb: int = 0
    why: str = ""
    options: dict[str, Any] = {}
    #: of hosts that the backend has found: which are alike
    kind: int = 0


class Node(Struct, frozen=True):
    """GPUs of a host that are alike, in their pools."""

    gpus: tuple[GpuInfo, ...]
    pools: tuple[str, ...]


class CannotLook(Exception):
    """It cannot be found out what there is; says why, and what to do."""


async def look(ssh: Sequence[str], slurm: str | None = None) -> tuple[Found, ...]:
    """This machine, or the hosts that are named, which are reached by SSH, or the nodes of a Slurm allocation.

    ``slurm``: its number; empty: the one that this process is in.

    Raises:
        CannotLook: there is no backend for it, or a name cannot be a host's.
    """
    for host in ssh:
        if not re.fullmatch(_ID, host):
            raise CannotLook(f"{host!r} cannot be a host's id; name it, with its user and port, in ~/.ssh/config")
    name = "ssh" if ssh else "local" if slurm is None else "slurm"
    try:
        kind: type[Backend] = discovery.find("backend", name)
        wanted = [FoundHost(id=host) for host in dict.fromkeys(ssh)] or [FoundHost(id=this_host())]
        if slurm is not None and issubclass(kind, FindsHosts):
            wanted = list(await kind.find(slurm))
    except (PluginError, ValueError) as error:
        raise CannotLook(str(error)) from error
    found: dict[str, Found] = {}

    async def ask(host: FoundHost) -> None:
        found[host.id] = await _look(kind, name, host)

    async with anyio.create_task_group() as tasks:
        for one in wanted:
            tasks.start_soon(ask, one)
    return tuple(found[one.id] for one in wanted)


def made_up() -> tuple[Found, ...]:
    """Eight GPUs of the mock backend, to try rollmuxd where there are none."""
    gpus = [GpuInfo(f"mock/gpu{number}", type="mock", memory_mb=80_000) for number in range(8)]
    return (Found(HostId("mock"), "mock", tuple(gpus), ram_mb=256_000),)


def this_host() -> HostId:
    """The name of this machine, as far as it makes a host's id."""
    name = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname().partition(".")[0]).strip("-._")
    return name or "box"


async def _look(kind: type[Backend], name: str, host: FoundHost) -> Found:
    backend: Backend | None = None
    there, why = Inventory((), 0), ""
    try:
        backend = await kind.open([HostConfig(id=host.id, options=host.options)], {})
        with anyio.fail_after(LOOK_S):
            there = await backend.inventory(host.id)
    except TimeoutError:
        why = f"no answer within {LOOK_S:g} s"
    except (PluginError, ValueError) as error:
        why = str(error).removeprefix(f"{host.id}: ")
    finally:
        if backend is not None:
            await backend.close()
    return Found(host.id, name, there.gpus, there.ram_mb, why, host.options, host.kind)


def nodes(found: Sequence[Found], *, shared: bool) -> dict[HostId, tuple[Node, ...]]:
    """GPUs into nodes, of one type each: all in both pools (``shared``), else half of them in each.

    Of several kinds of hosts the first is for rollouts. Of several hosts of one kind it is the first half. Of several
    types of GPUs on one host it is the first. Where there is one GPU, it is in both.
    """
    usable = [one for one in found if one.gpus]
    several_kinds = len({one.kind for one in usable}) > 1
    made: dict[HostId, tuple[Node, ...]] = {}
    for place, one in enumerate(usable):
        alike = _alike(one.gpus)
        if shared or (len(usable) == 1 and len(one.gpus) == 1):
            split = [Node(gpus, ("rollout", "train")) for gpus in alike]
        elif len(usable) > 1:
            first = one.kind == usable[0].kind if several_kinds else place < (len(usable) + 1) // 2
            pool = "rollout" if first else "train"
            split = [Node(gpus, (pool,)) for gpus in alike]
        elif len(alike) > 1:
            split = [Node(gpus, ("rollout" if number == 0 else "train",)) for number, gpus in enumerate(alike)]
        else:
            half = (len(alike[0]) + 1) // 2
            split = [Node(alike[0][:half], ("rollout",)), Node(alike[0][half:], ("train",))]
        made[one.host] = tuple(split)
    return made


def _alike(gpus: Sequence[GpuInfo]) -> list[tuple[GpuInfo, ...]]:
    by_kind = sorted(gpus, key=lambda info: (info.type, info.memory_mb))
    groups = [tuple(sorted(group, key=_number)) for _, group in groupby(by_kind, lambda one: (one.type, one.memory_mb))]
    return sorted(groups, key=lambda group: _number(group[0]))


def _number(info: GpuInfo) -> int:
    return int(info.gpu.rpartition("/gpu")[2])


def text(found: Sequence[Found], *, shared: bool) -> str:
    """The file."""
    return "\n".join([*_HEAD, *_hosts(found, shared=shared)]) + "\n"


_HEAD: Final = (
    "# The settings of the rollmuxd daemon, as `rollmuxd init` found this place. Everything that is not said here has",
    "# its default; the sample rollmux.toml of the project says all there is.",
    "",
    "[defaults]",
    "# Of jobs that do not say it: what a parked state may leave on a GPU. A CUDA context alone is half a gigabyte.",
    "residual_gb = 1.0",
)


def _hosts(found: Sequence[Found], *, shared: bool) -> Iterator[str]:
    made = nodes(found, shared=shared)
    for one in found:
        yield ""
        if one.host not in made:
            yield f"# {one.host}: no GPUs were seen here."
            if one.why:
                yield f"# {' '.join(one.why.split())}"
            blank: list[tuple[str, str, tuple[str, ...]]] = [("0-3", "", ("rollout",)), ("4-7", "", ("train",))]
            if shared:
                blank = [("0-7", "", ("rollout", "train"))]
            elif any(other.kind != found[0].kind for other in found):
                blank = [("0-7", "", ("rollout" if one.kind == found[0].kind else "train",))]
            yield from (f"# {line}".rstrip() for line in _host(one, blank))
            continue
        ram_gb = one.ram_mb / 1000
        yield from _host(
            one,
            [
                (
                    node_id("", [_number(info) for info in node.gpus]).removeprefix("/gpu"),
                    f"{len(node.gpus)} x {node.gpus[0].type}, {node.gpus[0].memory_mb / 1000:.1f} GB",
                    node.pools,
                )
                for node in made[one.host]
            ],
            f"# Of its {ram_gb:.0f} GB of RAM parked states may take 70 %, unless this says otherwise.\n"
            f"# ram_gb = {ram_gb * 0.7:.0f}",
        )


def _host(one: Found, its_nodes: Sequence[tuple[str, str, tuple[str, ...]]], ram: str = "") -> Iterator[str]:
    yield "[[hosts]]"
    yield f'id = "{one.host}"'
    yield f'backend = "{one.backend}"'
    if one.options:
        yield f"options = {{{', '.join(f'{key} = {json.dumps(value)}' for key, value in one.options.items())}}}"
    yield from ram.splitlines()
    for gpus, about, pools in its_nodes:
        yield ""
        yield "[[hosts.nodes]]"
        if about:
            yield f"# {about}"
        yield f'gpus = "{gpus}"'
        named = ", ".join(f'"{pool}"' for pool in pools)
        yield f"pools = [{named}]"
