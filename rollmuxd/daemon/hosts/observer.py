"""Keeps asking what is, of each host again and again. At a start the core asks all of them at once.

It decides nothing: it orders looks, and the core makes of them what it does.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import anyio
import structlog
from msgspec.structs import replace

from rollmuxd.core.effects import Effect, Observe
from rollmuxd.core.ids import HostId
from rollmuxd.core.inputs import Start
from rollmuxd.core.model import HostSpec
from rollmuxd.daemon.hosts.plugin_calls import ask, checked, said
from rollmuxd.spi import Backend, Inventory

log = structlog.get_logger("rollmuxd.observer")

#: of a host's RAM, what parked states may take where nothing is configured
RAM_SHARE: Final = 0.7
INVENTORY_S: Final = 10.0


async def watch(hosts: Sequence[HostId], every_s: float, perform: Callable[[Sequence[Effect]], None]) -> None:
    """Order a look at every host every ``every_s`` seconds, not all at once, for ever."""

    async def look(host: HostId) -> None:
        await anyio.sleep(every_s * random.random())
        while True:
            perform((Observe(host),))
            # A tenth more or less each time, so that hosts do not fall into step again.
            await anyio.sleep(every_s * random.uniform(0.9, 1.1))

    async with anyio.create_task_group() as tasks:
        for host in hosts:
            tasks.start_soon(look, host)


async def fill_in(start: Start, backends: Mapping[str, Backend]) -> Start:
    """The start, with what the configuration leaves out (RAM, GPU type and memory) as the hosts' inventories have it.

    A host that cannot be reached keeps its gaps, and has what it had at the last start. Nothing can be parked where no
    RAM is known.
    """
    inventories: dict[HostId, Inventory] = {}

    async def take_stock(host: HostSpec) -> None:
        try:
            answer = await ask(INVENTORY_S, backends[host.backend].inventory(host.id))
            inventories[host.id] = checked(answer, Inventory, "the inventory")
        except Exception as error:
            remedy = (
                "it has what it had at the last start; at its first, nothing can be placed there before a restart, "
                "unless ram_gb, gpu_type and gpu_gb are configured"
            )
            log.warning("no_inventory", host=host.id, reason=said(error), remedy=remedy)

    lacking = {node.host for node in start.nodes if not node.gpu_mb or not node.gpu_type}
    async with anyio.create_task_group() as tasks:
        for host in start.hosts:
            if not host.ram_mb or host.id in lacking:
                tasks.start_soon(take_stock, host)

    none = Inventory((), 0)
    hosts, nodes = [], []
    for host in start.hosts:
        ram_mb = int(inventories.get(host.id, none).ram_mb * RAM_SHARE)
        hosts.append(replace(host, ram_mb=host.ram_mb or ram_mb))
    for node in start.nodes:
        infos = [info for info in inventories.get(node.host, none).gpus if info.gpu in node.gpus]
        gpu_mb = min((info.memory_mb for info in infos), default=0)
        gpu_type = infos[0].type if infos else ""
        nodes.append(replace(node, gpu_type=node.gpu_type or gpu_type, gpu_mb=node.gpu_mb or gpu_mb))
    return replace(start, hosts=tuple(hosts), nodes=tuple(nodes))
