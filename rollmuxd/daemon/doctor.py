"""``rollmuxd doctor``: looks at each configured host as an operator would, through the backend that reaches it.

It needs no daemon and disturbs none: it opens backends of its own and asks them; nothing is started, ended or written
on a host. What a backend finds by itself (:class:`rollmuxd.spi.ChecksHosts`) comes first, then what is true of any
host.
"""

import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import anyio
from msgspec import Struct

from rollmuxd.core.ids import HostId
from rollmuxd.daemon.hosts.circuits import Misconfigured, ports_of
from rollmuxd.daemon.hosts.plugin_calls import ask, said
from rollmuxd.daemon.settings import FabricTable, HostTable, Settings, gpu_id
from rollmuxd.spi import Backend, ChecksHosts, FabricController, Finding, Inventory, Observation, PluginError, discovery

#: a host takes no longer
HOST_S: Final = 20.0
#: an answer that takes longer makes every release wait
SLOW_MS: Final = 2_000


class Seen(Struct, frozen=True):
    """What a host had to show, for what concerns several of them."""

    inventory: Inventory
    observation: Observation


class Examined(Struct, frozen=True):
    """A host, or ``fabric NAME`` for an optical switch, and what was found. Its backend, or driver."""

    host: HostId
    backend: str
    findings: tuple[Finding, ...]
    #: nothing keeps it from being used
    good: bool


async def examine(settings: Settings, only: Sequence[HostId] = ()) -> tuple[Examined, ...]:
    """All hosts and then switches, or the hosts that are named, at the same time; in the order of the configuration."""
    wanted = [host for host in settings.hosts if not only or host.id in only]
    found: dict[HostId, list[Finding]] = {host.id: [] for host in wanted}
    seen: dict[HostId, Seen] = {}
    with tempfile.TemporaryDirectory(prefix="rollmuxd-doctor-") as folder:
        backends: dict[str, Backend] = {}
        for name in dict.fromkeys(host.backend for host in wanted):
            opened = await _opened(settings, name, folder)
            if isinstance(opened, Finding):
                first, *others = (host.id for host in wanted if host.backend == name)
                found[first].append(opened)
                of_it = f"as for {first}: no host of backend {name} can be looked at"
                for other in others:
                    found[other].append(Finding(opened.what, opened.level, of_it))
            else:
                backends[name] = opened

        async def look(host: HostTable) -> None:
            findings, shown = await _host(backends[host.backend], host)
            found[host.id].extend(findings)
            if shown is not None:
                seen[host.id] = shown

        async with anyio.create_task_group() as tasks:
            for host in wanted:
                if host.backend in backends:
                    tasks.start_soon(look, host)
        for backend in backends.values():
            await backend.close()
    for about, finding in _between(seen, wanted):
        found[about].append(finding)
    switches = () if only else [await _switch(settings, number, one) for number, one in enumerate(settings.fabric)]
    return (*(_examined(host.id, host.backend, found[host.id]) for host in wanted), *switches)


def _examined(host: str, backend: str, findings: Sequence[Finding]) -> Examined:
    return Examined(host, backend, tuple(findings), all(finding.level != "bad" for finding in findings))


async def _opened(settings: Settings, name: str, folder: str) -> Backend | Finding:
    try:
        kind: type[Backend] = discovery.find("backend", name)
        options = dict(settings.backends.get(name, {}))
        if getattr(kind, "keeps_files", False):
            options.setdefault("state_dir", folder)
        return await kind.open(settings.host_configs(name), options)
    except PluginError as error:
        return Finding(what="backend", level="bad", said=str(error), remedy=f"install what has the backend {name}")
    except ValueError as error:
        return Finding(what="configuration", level="bad", said=str(error), remedy=f"mend it in {settings.source}")


async def _host(backend: Backend, host: HostTable) -> tuple[list[Finding], Seen | None]:
    """What is found on one host. Whatever goes wrong there is a finding."""
    findings: list[Finding] = []
    try:
        with anyio.fail_after(HOST_S):
            if isinstance(backend, ChecksHosts):
                findings.extend(await backend.check(host.id))
            inventory = await backend.inventory(host.id)
            began = anyio.current_time()
            observation = await backend.observe(host.id)
            took_ms = (anyio.current_time() - began) * 1000
    except Exception as error:
        why = str(error) or f"no answer within {HOST_S:g} s" if isinstance(error, TimeoutError | PluginError) else ""
        # Said by the backend itself already, in more words.
        if all(finding.level != "bad" for finding in findings):
            findings.append(Finding(what="look", level="bad", said=why or f"{type(error).__name__}: {error}"))
        return findings, None
    findings.append(_took(took_ms))
    known = {finding.what for finding in findings if finding.level == "bad"}
    findings.extend(finding for finding in _configured(host, inventory) if finding.what not in known)
    return findings, Seen(inventory, observation)


async def _switch(settings: Settings, number: int, table: FabricTable) -> Examined:
    """What is found on an optical switch."""

    async def look() -> Finding:
        mend = f"mend it in {settings.source}"
        try:
            kind: type[FabricController] = discovery.find("fabric", table.driver)
            controller = await kind.open(table.options)
        except (PluginError, ValueError) as error:
            return Finding("configuration", "bad", f"fabric[{number}]: {error}", mend)
        try:
            await ports_of(f"fabric[{number}]", controller, table.ports, HOST_S)
            seen = await ask(HOST_S, controller.seen())
        except Misconfigured as error:
            return Finding("ports", "bad", str(error), mend)
        except Exception as error:
            return Finding("circuits", "warning", said(error), "jobs run over the electrical network until it answers")
        finally:
            await controller.close()
        return Finding("circuits", "good", f"{len(seen)} circuits are there")

    return _examined(f"fabric {table.name}", table.driver, [await look()])


def _took(took_ms: float) -> Finding:
    said = f"looked at in {took_ms:.0f} ms"
    if took_ms < SLOW_MS:
        return Finding(what="look", level="good", said=said)
    remedy = (
        "each hand-over waits for a look; is the driver's persistence mode off (nvidia-smi -pm 1), the line slow, or "
        "the login shell's start-up file long?"
    )
    return Finding(what="look", level="warning", said=said, remedy=remedy)


def _configured(host: HostTable, inventory: Inventory) -> Iterator[Finding]:
    there = {info.gpu: info for info in inventory.gpus}
    for node in host.nodes:
        for gpu in (gpu_id(host.id, number) for number in node.gpus):
            info = there.get(gpu)
            if info is None:
                yield Finding(gpu, "bad", "it is in the configuration and not on the host", "take it out of its node")
            elif node.gpu_gb and node.gpu_gb * 1000 > info.memory_mb * 1.01:
                yield Finding(
                    gpu,
                    "bad",
                    f"gpu_gb is {node.gpu_gb:g}, and it has {info.memory_mb / 1000:.1f} GB",
                    "leave gpu_gb out: then what the GPU has counts",
                )
    if host.ram_gb and host.ram_gb * 1000 > inventory.ram_mb:
        yield Finding(
            "RAM",
            "bad",
            f"ram_gb is {host.ram_gb:g}, and the host has {inventory.ram_mb / 1000:.0f} GB",
            "parked states would be swapped out, or killed; leave ram_gb out for 70 % of what there is",
        )


def _between(seen: Mapping[HostId, Seen], hosts: Sequence[HostTable]) -> Iterator[tuple[HostId, Finding]]:
    """What is only wrong with several hosts together."""
    configured = {host.id: {gpu_id(host.id, gpu) for node in host.nodes for gpu in node.gpus} for host in hosts}
    first: dict[str, str] = {}
    machines: dict[str, list[HostId]] = defaultdict(list)
    for host, shown in seen.items():
        machines[shown.observation.boot_id].append(host)
        for gpu, name in shown.observation.uuids.items():
            if gpu in configured[host] and first.setdefault(name, gpu) != gpu:
                said = f"it is the same GPU as {first[name]} ({name})"
                yield host, Finding(gpu, "bad", said, "name a GPU once: take one of the two out of its node")
    for same in machines.values():
        for host in same[1:]:
            said = f"{host} and {same[0]} are the same machine"
            remedy = "its RAM would be counted twice: make one [[hosts]] table of both, or set ram_gb of each"
            yield host, Finding("machine", "warning", said, remedy)
