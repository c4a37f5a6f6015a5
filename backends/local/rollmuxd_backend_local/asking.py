"""A backend whose hosts answer questions themselves: what :mod:`rollmuxd_backend_local.onhost` can tell and do.

How a question gets there is the subclass's business: ``local`` asks this machine, ``ssh`` sends a payload.
"""

import base64
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Generic, Self

from rollmuxd.spi import (
    ContactLost,
    Finding,
    GpuInfo,
    GpuObservation,
    HostConfig,
    HostId,
    Inventory,
    JobId,
    LaunchId,
    NotDone,
    Observation,
    Output,
    Process,
    ProcessOrder,
)
from rollmuxd.spi.environment import patterns
from rollmuxd_backend_local import findings
from rollmuxd_backend_local.options import HostOptions, Options, read

#: a look takes no longer: the daemon itself waits for ten seconds
LOOK_S: Final = 8.0
#: nor the start or the end of a process
PROCESS_S: Final = 28.0


class JobProcesses(ABC, Generic[Options]):
    """Jobs' processes on hosts that are asked. ``owner`` seals the marks of those started, and never changes."""

    #: so that processes are known again after a restart of the daemon
    keeps_files: ClassVar[bool] = True

    def __init__(self, options: Mapping[HostId, Options], owner: str) -> None:
        self.options = options
        self._owner = owner

    @abstractmethod
    async def ask(self, host: HostId, question: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        """The host's answer. Raises ContactLost where there is none within the time."""

    async def kill(self, host: HostId, pid: int, started: str, job: JobId, owner: str) -> bool:
        """SIGKILL a process and its descendants: one started for this job, or (``owns_sessions``) of the owner's login.

        That is the login that ``users`` has for the owner; where it is empty, the one that has the owner's name.
        """
        options = self._of(host)
        login = options.users.get(owner, "") if options.users else owner
        question = {
            "ask": "kill",
            "pid": pid,
            "started": started,
            "job": job,
            "user": options.users.get(owner, ""),
            "login": login if options.owns_sessions else "",
        }
        return bool(await self._said(host, question, PROCESS_S))

    def starts_on(self, host: HostId) -> bool:
        """Where ``starts_processes`` is set."""
        return host in self.options and self.options[host].starts_processes

    async def start(self, host: HostId, order: ProcessOrder) -> Process:
        """A process in a session of its own, with its output in ``logs``."""
        options = self._of(host)
        if not options.starts_processes:
            raise NotDone(f"{host} is not configured to run processes; set options.starts_processes of this host")
        told = {
            "launch": order.launch,
            "job": order.job,
            "number": order.number,
            "argv": order.argv,
            "cwd": order.cwd,
            "env": dict(order.env),
            "log": self._log(host, order.launch),
            "user": self._user_of(host, order),
            "inherits": patterns(),
        }
        return Process(**await self._said(host, {"ask": "start", "order": told}, PROCESS_S))

    async def stop(self, host: HostId, launch: LaunchId) -> bool:
        """SIGTERM, and after two seconds SIGKILL, to the process and all that it started."""
        return bool(await self._said(host, {"ask": "stop", "launch": launch}, PROCESS_S))

    async def alive(self, host: HostId, launch: LaunchId) -> bool:
        """By the mark that each of them carries, or its session."""
        return bool(await self._said(host, {"ask": "alive", "launch": launch}, LOOK_S))

    async def output(self, host: HostId, launch: LaunchId, after: int, limit: int) -> Output:
        """Of the file that ``start`` has it written to."""
        log = self._log(host, launch)
        if not log:
            raise NotDone(f"{host} keeps no output; set options.logs of this host to a folder")
        piece = await self._said(host, {"ask": "output", "log": log, "after": after, "limit": limit}, LOOK_S)
        return Output(data=base64.b64decode(piece["data"]), next=piece["next"])

    # ---- how ---------------------------------------------------------------------------------------------------------

    def _of(self, host: HostId) -> Options:
        if host not in self.options:
            raise ContactLost(f"host {host!r} is none of this backend's ({', '.join(self.options) or 'it has none'})")
        return self.options[host]

    def _user_of(self, host: HostId, order: ProcessOrder) -> str:
        """The login for the order's owner; empty: that of the backend. Raises NotDone: there is none for it."""
        users = self._of(host).users
        if users and order.owner not in users:
            raise NotDone(f"{host}: options.users names no login for owner {order.owner!r}")
        return users.get(order.owner, "")

    def _log(self, host: HostId, launch: LaunchId) -> str:
        folder = self._of(host).logs
        return f"{folder}/{launch}.log" if folder else ""

    async def _said(self, host: HostId, question: Mapping[str, Any], limit_s: float) -> Any:
        made_up = self._of(host).made_up_gpus
        answer = await self.ask(host, {**question, "owner": self._owner, "made_up": made_up}, limit_s)
        if "refused" in answer:
            raise NotDone(f"{host}: {answer['refused']}")
        if "said" not in answer:
            raise ContactLost(f"{host}: {answer.get('unknown', 'it gave an answer that cannot be understood')}")
        return answer["said"]


class Asking(JobProcesses[Options]):
    """What is the same wherever hosts are asked."""

    #: what the configuration calls the backend, and the options of its hosts
    name: ClassVar[str]
    kind: ClassVar[type[HostOptions]]
    #: the user that all jobs' processes run as, where there is no choice
    runs_as: ClassVar[str] = ""

    @classmethod
    async def open(cls, hosts: Sequence[HostConfig], options: Mapping[str, Any]) -> Self:
        """Make the backend. Nothing is connected to before it is asked for.

        Raises:
            ValueError: an option that is not known or out of range; names host and key.
        """
        defaults = dict(options)
        state_dir = defaults.pop("state_dir", None)
        said: Any = {host.id: read(cls.kind, cls.name, host.id, {**defaults, **host.options}) for host in hosts}
        if cls.runs_as and (named := [host for host, its in said.items() if its.users]):
            raise ValueError(
                f"{named[0]}: options.users is not for backend {cls.name}: what it starts runs as {cls.runs_as}"
            )
        return cls({host.id: host for host in hosts}, said, read_owner(state_dir))

    def __init__(self, hosts: Mapping[HostId, HostConfig], options: Mapping[HostId, Options], owner: str) -> None:
        super().__init__(options, owner)
        self.hosts = hosts

    async def inventory(self, host: HostId) -> Inventory:
        """All GPUs of the host that can be used, whether the configuration names them or not, and its RAM."""
        looked = await self._look(host)
        return Inventory(
            gpus=tuple(
                GpuInfo(gpu=gpu, type=one["type"], memory_mb=one["memory_mb"], uuid=one["uuid"])
                for gpu, one in self._usable(host, looked)
            ),
            ram_mb=looked["ram_mb"],
        )

    async def observe(self, host: HostId) -> Observation:
        """What NVML says is used on each GPU now, and by which processes."""
        looked = await self._look(host)
        usable = self._usable(host, looked)
        return Observation(
            gpus=tuple(
                GpuObservation(gpu=gpu, used_mb=one["used_mb"], processes=tuple(one["processes"]))
                for gpu, one in usable
            ),
            boot_id=looked["boot_id"],
            uuids={gpu: one["uuid"] for gpu, one in usable},
            unread=self._unread(host, looked),
        )

    async def check(self, host: HostId) -> tuple[Finding, ...]:
        """The host as an operator would look at it."""
        asked = time.time()
        try:
            about = await self._said(host, {"ask": "about"}, LOOK_S)
        except (ContactLost, NotDone) as error:
            return (Finding("answer", "bad", str(error)),)
        return findings.of(about, self.hosts[host].gpus, host, (asked, time.time()))

    async def _look(self, host: HostId) -> dict[str, Any]:
        looked: dict[str, Any] = await self._said(host, {"ask": "look"}, LOOK_S)
        return looked

    def _usable(self, host: HostId, looked: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
        """The GPUs that can be read and are not split, with their names here."""
        named = [(f"{host}/gpu{one['index']}", one) for one in looked["gpus"]]
        return [(gpu, one) for gpu, one in named if not _trouble(one)]

    def _unread(self, host: HostId, looked: Mapping[str, Any]) -> dict[str, str]:
        """What keeps configured GPUs from being used. Those that are not configured do not matter."""
        there = {f"{host}/gpu{one['index']}": one for one in looked["gpus"]}
        have = f"its GPUs are {', '.join(there)}" if there else "it has none"
        found = {}
        for gpu in self.hosts[host].gpus:
            why = _trouble(there[gpu]) if gpu in there else f"it is in the configuration and not on {host}; {have}"
            if why:
                found[gpu] = why
        return found


def _trouble(gpu: Mapping[str, Any]) -> str:
    if gpu["mig"]:
        return (
            f"it is split into MIG instances, which are not shared; make it one again (nvidia-smi -i {gpu['index']} "
            "-mig 0), or take it out of the configuration"
        )
    return str(gpu["trouble"])


def read_owner(state_dir: str | None) -> str:
    """The secret that seals the marks of what this daemon starts: made once, and kept in its state directory."""
    if state_dir is None:
        return uuid.uuid4().hex
    file = Path(state_dir) / "owner"
    file.touch(mode=0o600)
    if not (owner := file.read_text(encoding="ascii").strip()):  # it is new, or a start was killed here
        owner = uuid.uuid4().hex
        file.write_text(owner, encoding="ascii")
    return owner
