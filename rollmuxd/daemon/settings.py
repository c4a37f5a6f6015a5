"""The daemon's settings: ``rollmux.toml``, overridden by ``ROLLMUX_*`` variables, checked before anything starts.

A file is looked for in ``./``, ``~/.config/rollmux/`` and ``/etc/rollmux/``; the first one found counts. Every key
can be set from the environment: ``lease.lease_s`` as ``ROLLMUX_LEASE__LEASE_S``; lists (``hosts``) as JSON.

What each key does, and in which unit, says ``rollmux.toml`` in the repository: the sample, which is loaded by a test.
``docs/reference/configuration.md`` is made of it. Errors name file, key and remedy, all of them at once::

    rollmux.toml: hosts[0].nodes[0].gpu is not a setting; did you mean gpus?

Pydantic stays in this module: :meth:`Settings.to_core_config` and :meth:`Settings.to_start` are the border.
"""

import difflib
import ipaddress
import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rollmuxd.core.config import Config, DriverTraits, Moves, OwnerLimits, PlanWith
from rollmuxd.core.ids import GpuId, NodeId
from rollmuxd.core.inputs import Start
from rollmuxd.core.model import HostSpec, NodeSpec
from rollmuxd.spi import HostConfig
from rollmuxd.wire import VARIABLES

T = TypeVar("T")

PREFIX: Final = "ROLLMUX_"
#: where the state lies of a daemon that the system starts
SYSTEM_STATE_DIR: Final = Path("/var/lib/rollmux")
SYSTEM_SOCKET: Final = Path("/run/rollmux/rollmux.sock")
#: the kernel's limit for the path of a Unix socket, 107, less the ".new" with which it is bound
SOCKET_PATH_BYTES: Final = 103

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=100)]
#: ``~`` is the home of the daemon's user
Place = Annotated[Path, AfterValidator(Path.expanduser)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]


def some(given: T) -> T:
    """What must not be empty. A field's own limit would be told of, too, where only what is in it is wrong."""
    if not given:
        raise ValueError("at least one is needed")
    return given


class BadSettings(Exception):
    """The settings cannot be used. One line for each thing that is wrong, each with its remedy."""

    def __init__(self, lines: Sequence[str]) -> None:
        super().__init__("\n".join(lines))
        self.lines = tuple(lines)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def default_state_dir() -> Path:
    """``/var/lib/rollmux`` for root, else ``~/.local/state/rollmux``."""
    if os.geteuid() == 0:
        return SYSTEM_STATE_DIR
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "rollmux"


class DaemonTable(_Table):
    listen: str = "127.0.0.1:7878"
    socket: Place | None = None
    socket_mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0600"
    state_dir: Place = Field(default_factory=default_state_dir)
    mode: Literal["share", "observe"] = "share"
    policy: Name = "thrift"
    # beside those that docs/how-to/run-a-job.md lists, which hold no secrets
    inherit: list[Annotated[str, Field(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*$")]] = []
    shutdown_s: Seconds = 10.0

    @field_validator("listen")
    @classmethod
    def _address(cls, listen: str) -> str:
        if listen:
            split_address(listen)
        return listen

    @model_validator(mode="after")
    def _socket_fits(self) -> "DaemonTable":
        path = self.socket_path
        if len(os.fsencode(path.absolute())) > SOCKET_PATH_BYTES:
            raise ValueError(
                f"the path of the Unix socket, {path}, is longer than the {SOCKET_PATH_BYTES} bytes that there "
                "are for it; set daemon.socket to a shorter one"
            )
        return self

    @property
    def socket_path(self) -> Path:
        """The Unix socket, with its default."""
        if self.socket is not None:
            return self.socket
        return SYSTEM_SOCKET if self.state_dir == SYSTEM_STATE_DIR else self.state_dir / "rollmux.sock"


class RollMuxTable(_Table):
    max_group: Annotated[int, Field(ge=1, le=64)] = 5  # beyond which the paper saw no gain
    promise: Literal["measured", "certified"] = "certified"


class ThriftTable(_Table):
    objective: Literal["throughput", "cost", "work"] = "throughput"
    steady: bool = False
    max_group: Annotated[int, Field(ge=1, le=64)] = 5
    promise: Literal["measured", "certified"] = "measured"  # real phases take times that no plan knows


class PolicyTable(BaseModel):
    # Other policies' tables are theirs to check.
    model_config = ConfigDict(extra="allow", frozen=True)

    rollmux: RollMuxTable = RollMuxTable()
    thrift: ThriftTable = ThriftTable()


class LeaseTable(_Table):
    lease_s: Seconds = 60.0  # a save or a debugger must not cost a slot.
    heartbeat_s: Seconds = 15.0  # three may go missing.
    reattach_s: Seconds = 120.0  # neither a restarted daemon nor a restarted proxy may cost a place.
    grace_s: Seconds = 5.0

    @model_validator(mode="after")
    def _heartbeats_fit(self) -> "LeaseTable":
        if self.lease_s < 2 * self.heartbeat_s:
            raise ValueError(
                f"lease_s ({self.lease_s:g}) must be at least twice heartbeat_s ({self.heartbeat_s:g}), "
                "or one lost heartbeat costs a slot"
            )
        return self


class RelaunchTable(_Table):
    after_s: Seconds = 60.0
    limit: Annotated[int, Field(ge=0, le=1000)] = 5


class MovesTable(_Table):
    enabled: Literal["auto", "on", "off"] = "auto"
    min_interval_h: Annotated[float, Field(ge=0, le=8760)] = 1.0
    move_cost_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0


class EstimatesTable(_Table):
    drift: Annotated[float, Field(ge=0, le=10)] = 0.1
    # the guard keeps promises with it; plans with more cost more (docs/results.md)
    plan: Literal["mean", "p90", "worst"] = "mean"
    window: Annotated[int, Field(ge=2, le=64)] = 20
    min_samples: Annotated[int, Field(ge=2, le=64)] = 8  # as the guard, which judges from there on too
    replan_every_s: Annotated[float, Field(ge=0, le=604_800)] = 900.0

    @model_validator(mode="after")
    def _samples_in_window(self) -> "EstimatesTable":
        if self.min_samples > self.window:
            raise ValueError(
                f"min_samples is {self.min_samples}, and window {self.window}: make min_samples at most window"
            )
        return self


class OverrunTable(_Table):
    action: Literal["warn", "revoke"] = "warn"  # on one box the owner decides
    grace_s: Seconds = 300.0


class FillerTable(_Table):
    enabled: bool = True
    max_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    margin_s: Seconds = 0.5


class LimitsTable(_Table):
    order_s: Seconds = 120.0  # a stuck engine is noticed, a slow one is not punished
    clean_timeout_s: Seconds = 120.0
    clean_tolerance_gb: Annotated[float, Field(ge=0, le=1000)] = 0.3  # what a driver keeps on an idle GPU
    observe_s: Seconds = 15.0
    max_jobs: Annotated[int, Field(ge=1)] = 10_000
    max_requests_waiting: Annotated[int, Field(ge=1)] = 20_000
    max_facts_waiting: Annotated[int, Field(ge=1)] = 100  # more than a team looks at
    max_body_mb: Annotated[float, Field(gt=0, le=100)] = 1.0
    max_connections: Annotated[int, Field(ge=1)] = 20_000
    read_s: Seconds = 30.0
    calls_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2_000.0  # for a client of thousands of jobs
    calls_burst_s: Seconds = 5.0


class OwnerTable(_Table):
    share: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    max_jobs: Annotated[int, Field(ge=0)] = 1_000  # more than a team runs; more would slow others' jobs down
    max_nodes: Annotated[int, Field(ge=0)] = 0
    max_waiting: Annotated[int, Field(ge=0)] = 0
    max_priority: int | None = None


class DefaultsTable(_Table):
    owner: OwnerTable = OwnerTable()
    slo: Annotated[float, Field(ge=1, le=1000)] | None = None  # best effort: the first hour must just work
    on_loss: Literal["kill", "hold", "relaunch"] = "hold"
    residual_gb: Annotated[float, Field(ge=0, le=1000)] = 0.0


class JournalTable(_Table):
    keep_days: Annotated[int, Field(ge=1, le=36_500)] = 90  # to look into what happened


class LogTable(_Table):
    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"


class AccessTable(_Table):
    require_keys: bool = True
    insecure: bool = False


class TlsTable(_Table):
    mode: Literal["auto", "on", "off"] = "auto"
    certificate: Place | None = None
    key: Place | None = None
    names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.:*-]+$", max_length=253)], ...] = ()

    @model_validator(mode="after")
    def _go_together(self) -> "TlsTable":
        if (self.certificate is None) != (self.key is None):
            missing = "key" if self.key is None else "certificate"
            raise ValueError(f"{missing} is missing: certificate and key go together")
        if self.certificate is not None and self.mode == "off":
            raise ValueError('a certificate is named, and mode is "off"; leave one of them out')
        return self


class NodeTable(_Table):
    gpus: tuple[int, ...]
    pools: Annotated[tuple[Name, ...], AfterValidator(some)]
    gpu_type: str = ""
    gpu_gb: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    price_per_gpu_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0

    @field_validator("gpus", mode="before")
    @classmethod
    def _range(cls, given: Any) -> Any:
        return parse_gpus(given) if isinstance(given, str | int) and not isinstance(given, bool) else given

    @field_validator("gpus")
    @classmethod
    def _some(cls, gpus: tuple[int, ...]) -> tuple[int, ...]:
        if not gpus:
            raise ValueError("a node has at least one GPU")
        if min(gpus) < 0:
            raise ValueError("GPUs are counted from 0")
        if len(set(gpus)) < len(gpus):
            raise ValueError("a GPU is named twice")
        return tuple(sorted(gpus))


class HostTable(_Table):
    id: Name
    backend: Name
    ram_gb: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    options: dict[str, Any] = {}
    nodes: Annotated[tuple[NodeTable, ...], AfterValidator(some)]

    @model_validator(mode="after")
    def _gpus_are_in_one_node(self) -> "HostTable":
        seen: dict[int, int] = {}
        for number, node in enumerate(self.nodes):
            for gpu in node.gpus:
                if gpu in seen:
                    raise ValueError(f"GPU {gpu} is in nodes[{seen[gpu]}] and in nodes[{number}]; a GPU is in one node")
                seen[gpu] = number
        return self


class FabricTable(_Table):
    """An optical switch, and which of its ports the cables of a node end at (``docs/how-to/optical-switch.md``)."""

    name: Name
    driver: Name
    options: dict[str, Any] = {}
    ports: Annotated[dict[str, tuple[Annotated[int, Field(ge=1, le=100_000)], ...]], AfterValidator(some)]

    @model_validator(mode="after")
    def _a_cable_is_of_one_node(self) -> "FabricTable":
        seen: dict[int, str] = {}
        for node, ports in self.ports.items():
            for port in ports:
                if port in seen:
                    raise ValueError(f"port {port} is of {seen[port]} and of {node}; a port is of one node")
                seen[port] = node
        return self


class Settings(BaseSettings):
    """All settings. Make them with :func:`load_settings`, which says in words what is wrong."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter="__", extra="forbid", frozen=True)

    daemon: DaemonTable = Field(default_factory=DaemonTable)
    policy: PolicyTable = PolicyTable()
    lease: LeaseTable = LeaseTable()
    relaunch: RelaunchTable = RelaunchTable()
    moves: MovesTable = MovesTable()
    estimates: EstimatesTable = EstimatesTable()
    overrun: OverrunTable = OverrunTable()
    filler: FillerTable = FillerTable()
    limits: LimitsTable = LimitsTable()
    defaults: DefaultsTable = DefaultsTable()
    journal: JournalTable = JournalTable()
    log: LogTable = LogTable()
    access: AccessTable = AccessTable()
    tls: TlsTable = TlsTable()
    owners: dict[Name, OwnerTable] = {}
    hosts: tuple[HostTable, ...] = ()
    fabric: tuple[FabricTable, ...] = ()
    backends: dict[Name, dict[str, Any]] = {}
    residency: dict[Name, dict[str, Any]] = {}

    _file: Path | None = PrivateAttr(default=None)

    @property
    def file(self) -> Path | None:
        """The file that they were read from; None: there was none."""
        return self._file

    @property
    def source(self) -> str:
        """What errors name as the place to look at."""
        return "settings" if self._file is None else str(self._file)

    @property
    def uses_tls(self) -> bool:
        """Whether the TCP port is https."""
        if not self.daemon.listen or self.tls.mode == "off":
            return False
        beyond = not is_loopback(self.daemon.listen) and not self.access.insecure
        return self.tls.mode == "on" or self.tls.certificate is not None or beyond

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment goes over the file, whose content comes as keyword arguments.

        ``ROLLMUX_LOG`` is the client's, and no table.
        """
        if isinstance(env_settings, EnvSettingsSource):
            env_settings.env_vars = {k: v for k, v in env_settings.env_vars.items() if k.lower() != "rollmux_log"}
        return env_settings, init_settings

    @field_validator("owners", mode="before")
    @classmethod
    def _names_owners(cls, given: Any) -> Any:
        if isinstance(given, dict) and "*" in given:
            raise ValueError('"*" is no owner; [defaults.owner] has what holds for all others')
        return given

    @model_validator(mode="after")
    def _hang_together(self) -> "Settings":
        ids = [host.id for host in self.hosts]
        if twice := sorted({id_ for id_ in ids if ids.count(id_) > 1}):
            raise ValueError(f"hosts: {', '.join(twice)} is there twice; each host needs an id of its own")
        switches = [switch.name for switch in self.fabric]
        if twice := sorted({name for name in switches if switches.count(name) > 1}):
            raise ValueError(f"fabric: {twice[0]} is there twice; each switch needs a name of its own")
        nodes = [node_id(host.id, node.gpus) for host in self.hosts for node in host.nodes]
        for switch in self.fabric:
            for node in switch.ports:
                if node not in nodes:
                    meant = difflib.get_close_matches(node, nodes, 1)
                    hint = f"did you mean {meant[0]}?" if meant else f"nodes are {', '.join(nodes) or 'none'}"
                    raise ValueError(f"fabric {switch.name}: ports.{node} is not a node; {hint}")
        if self.daemon.listen and not self.access.insecure and not is_loopback(self.daemon.listen):
            open_to_all = f"daemon.listen: {self.daemon.listen} can be reached from other machines"
            if self.tls.mode == "off":
                raise ValueError(
                    f'{open_to_all}, and tls.mode is "off"; leave it at "auto", listen on 127.0.0.1 (and use an SSH '
                    "tunnel), or set access.insecure = true"
                )
            if not self.access.require_keys:
                raise ValueError(
                    f"{open_to_all}, and access.require_keys is false: everybody there would be an operator; leave it "
                    "at true, listen on 127.0.0.1, or set access.insecure = true"
                )
        strange = [name for name in self.policy.model_extra or {} if name != self.daemon.policy]
        if strange:
            meant = difflib.get_close_matches(strange[0], ["rollmux", "thrift", self.daemon.policy], 1)
            hint = f"did you mean policy.{meant[0]}?" if meant else f"daemon.policy is {self.daemon.policy!r}"
            raise ValueError(f"policy.{strange[0]} is not a setting; {hint}")
        return self

    def to_core_config(
        self, drivers: Mapping[str, DriverTraits] | None = None, launch_hosts: Sequence[str] = ()
    ) -> Config:
        """The numbers that the core needs."""
        return Config(
            lease_ms=ms(self.lease.lease_s),
            reattach_ms=ms(self.lease.reattach_s),
            grace_ms=ms(self.lease.grace_s),
            overrun_revoke=self.overrun.action == "revoke",
            overrun_grace_ms=ms(self.overrun.grace_s),
            clean_timeout_ms=ms(self.limits.clean_timeout_s),
            clean_tolerance_mb=mb(self.limits.clean_tolerance_gb),
            max_jobs=self.limits.max_jobs,
            max_requests_waiting=self.limits.max_requests_waiting,
            launch_hosts=tuple(launch_hosts),
            relaunch_after_ms=ms(self.relaunch.after_s),
            relaunch_limit=self.relaunch.limit,
            drift=self.estimates.drift,
            plan=PlanWith(self.estimates.plan),
            drift_window=self.estimates.window,
            min_samples=self.estimates.min_samples,
            replan_every_ms=ms(self.estimates.replan_every_s),
            moves=Moves(self.moves.enabled),
            move_interval_ms=ms(self.moves.min_interval_h * 3600),
            move_cost_ms=ms(self.moves.move_cost_s),
            owners={name: self.owner_limits(name) for name in self.owners},
            others=self.owner_limits(""),
            drivers=dict(drivers or {}),
            fillers=self.filler.enabled and self.daemon.mode != "observe",
            fillers_max_share=self.filler.max_share,
            fillers_margin_ms=ms(self.filler.margin_s),
        )

    def owner_limits(self, name: str) -> OwnerLimits:
        """What an owner may have."""
        own = self.owners.get(name, OwnerTable()).model_dump(exclude_unset=True)
        return OwnerLimits(**{**self.defaults.owner.model_dump(), **own})

    def to_start(self) -> Start:
        """The hosts and nodes, as the core takes them; sizes that are not configured are 0."""
        return Start(
            hosts=tuple(HostSpec(host.id, host.backend, mb(host.ram_gb or 0)) for host in self.hosts),
            nodes=tuple(
                NodeSpec(
                    id=node_id(host.id, node.gpus),
                    host=host.id,
                    gpus=tuple(gpu_id(host.id, gpu) for gpu in node.gpus),
                    pools=node.pools,
                    gpu_type=node.gpu_type,
                    gpu_mb=mb(node.gpu_gb),
                    price_per_gpu_hour=node.price_per_gpu_hour,
                )
                for host in self.hosts
                for node in host.nodes
            ),
        )

    def host_configs(self, backend: str) -> tuple[HostConfig, ...]:
        """The hosts of one backend, as it takes them."""
        return tuple(
            HostConfig(
                id=host.id,
                options=host.options,
                gpus=tuple(gpu_id(host.id, gpu) for node in host.nodes for gpu in node.gpus),
                gpu_mb=mb(max(node.gpu_gb for node in host.nodes)),
                ram_mb=mb(host.ram_gb or 0),
            )
            for host in self.hosts
            if host.backend == backend
        )

    def policy_options(self) -> dict[str, Any]:
        """Keyword arguments for the policy that is chosen."""
        table = getattr(self.policy, self.daemon.policy, {})
        options = table.model_dump() if isinstance(table, BaseModel) else dict(table)
        if isinstance(table, ThriftTable):
            # plans of more rounds leave nothing for phases that take longer
            options["rounds"] = 1 if table.promise == "measured" else 4
            options["warm_move_s"] = self.moves.move_cost_s
        return options


# ---- names ---------------------------------------------------------------------------------------------------------


def gpu_id(host: str, gpu: int) -> GpuId:
    """``host1/gpu0``."""
    return f"{host}/gpu{gpu}"


def node_id(host: str, gpus: Sequence[int]) -> NodeId:
    """``host1/gpu0-3``; ``host1/gpu0`` of a single one, ``host1/gpu0-1,3`` of ones that are not in a row."""
    runs: list[list[int]] = []
    for gpu in sorted(gpus):
        if runs and gpu == runs[-1][-1] + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return f"{host}/gpu{','.join(str(run[0]) if len(run) == 1 else f'{run[0]}-{run[-1]}' for run in runs)}"


def parse_gpus(given: str | int) -> tuple[int, ...]:
    """``"0-3"``, ``"0-1,3"`` or ``2`` as numbers. Raises ValueError."""
    gpus: list[int] = []
    for part in str(given).split(","):
        found = re.fullmatch(r"\s*(\d{1,4})(?:-(\d{1,4}))?\s*", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f'{given!r} names no GPUs; write [0, 1, 2, 3] or "0-3"')
        gpus.extend(range(int(found[1]), int(found[2] or found[1]) + 1))
    return tuple(gpus)


def split_address(listen: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:7878``, ``[::1]:7878`` or ``localhost:7878``. Raises ValueError."""
    found = re.fullmatch(r"(?:\[([0-9a-fA-F:.%]+)\]|([^\[\]:]+)):(\d{1,5})", listen)
    if found is None or int(found[3]) > 65_535:
        raise ValueError(f'{listen!r} is no address; write "127.0.0.1:7878"')
    return found[1] or found[2], int(found[3])


def is_address(host: str) -> bool:
    """Whether it is an IP address, and no name."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def is_loopback(listen: str) -> bool:
    """Whether only this machine can reach the address. A name counts as loopback only if it is ``localhost``."""
    host, _ = split_address(listen)
    return ipaddress.ip_address(host).is_loopback if is_address(host) else host == "localhost"


def ms(seconds: float) -> int:
    """Seconds in milliseconds."""
    return round(seconds * 1000)


def mb(gigabytes: float) -> int:
    """Gigabytes in megabytes."""
    return round(gigabytes * 1000)


# ---- loading -------------------------------------------------------------------------------------------------------


def load_settings(config: Path | None = None) -> Settings:
    """Settings from the environment and a file: the one named by ``config`` or ``ROLLMUX_CONFIG``, else the one found.

    Raises:
        BadSettings: everything that is wrong, in words. A file that is named and missing is wrong; that none is found
            is not: the defaults make a daemon without hosts.
    """
    file = _file(config)
    if file is not None and not file.is_file():
        raise BadSettings([f"{file}: there is no such file; name another one with --config, or leave it out"])
    given = _read(file) if file is not None else {}
    # Looked for by ourselves: pydantic-settings says nothing of a variable that sets nothing.
    if unknown := list(_unknown_variables()):
        raise BadSettings(unknown)
    try:
        settings = Settings(**given)
    except ValidationError as error:
        raise BadSettings([_line(dict(problem), file) for problem in error.errors()]) from None
    except SettingsError as error:
        raise BadSettings([f"environment: {error}; lists and tables are given as JSON"]) from None
    settings._file = file  # noqa: SLF001  # private to pydantic: it is no setting
    return settings


def search_path() -> tuple[Path, ...]:
    """Where a file is looked for, in this order."""
    name = "rollmux.toml"
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(name), home / "rollmux" / name, Path("/etc/rollmux") / name


def without_hosts(settings: Settings) -> str:
    """Why there are no hosts."""
    if settings.file is not None:
        return f"{settings.file} names no hosts"
    return f"no rollmux.toml found (looked at {', '.join(map(str, search_path()))})"


def _file(config: Path | None) -> Path | None:
    """The file that counts: one that is named, there or not, else the first that is found."""
    if config is None and os.environ.get("ROLLMUX_CONFIG"):
        config = Path(os.environ["ROLLMUX_CONFIG"]).expanduser()
    return config if config is not None else next((path for path in search_path() if path.is_file()), None)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise BadSettings([f"{file}: this is not TOML: {error}"]) from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadSettings([f"{file}: cannot be read: {error}"]) from None


def _unknown_variables() -> Iterator[str]:
    """One line for each ``ROLLMUX_*`` variable that names no table; what is wrong within one is found as in a file."""
    for variable in sorted(os.environ):
        if not variable.startswith(PREFIX) or variable in VARIABLES:
            continue
        if variable[len(PREFIX) :].lower().partition("__")[0] not in Settings.model_fields:
            known = [*VARIABLES, *_variables()]
            meant = difflib.get_close_matches(variable, known, 1, 0.75)
            hint = f"did you mean {meant[0]}?" if meant else "unset it, or see rollmux.toml for what there is"
            yield f"environment: {variable} is not a setting; {hint}"


def _variables() -> Iterator[str]:
    for table, field in Settings.model_fields.items():
        yield f"{PREFIX}{table.upper()}"
        inner = _inner(field.annotation)
        if inner is not None and table != "hosts":
            yield from (f"{PREFIX}{table}__{key}".upper() for key in inner.model_fields)


def _inner(annotation: Any) -> type[BaseModel] | None:
    """The table within an annotation: of ``tuple[HostTable, ...]``, HostTable."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((inner for arg in get_args(annotation) if (inner := _inner(arg)) is not None), None)


def _given_by_environment(location: Sequence[str | int]) -> str | None:
    """The variable that the value came from: its own, that of a table or list around it, or one that goes deeper."""
    parts = [str(part) for part in location]
    names = (PREFIX + "__".join(parts[:count]).upper() for count in range(len(parts), 0, -1))
    given = {name.upper() for name in os.environ}
    within = f"{PREFIX}{'__'.join(parts)}__".upper()
    deeper = next((name for name in sorted(given) if len(parts) > 1 and name.startswith(within)), None)
    return next((name for name in names if name in given), deeper)


def _line(problem: Mapping[str, Any], file: Path | None) -> str:
    """What is wrong with one key, and what to do."""
    location: tuple[str | int, ...] = problem["loc"]
    key = _printed(location)
    variable = _given_by_environment(location)
    exact = PREFIX + "__".join(str(part) for part in location).upper()
    source = "environment" if variable == exact else f"environment: {variable}" if variable else str(file or "settings")
    if problem["type"] == "extra_forbidden":
        known = _known_at(location[:-1])
        meant = difflib.get_close_matches(str(location[-1]), known, 1)
        hint = f"did you mean {meant[0]}?" if meant else f"known here: {', '.join(known)}"
        return f"{source}: {key} is not a setting; {hint}"
    if problem["type"] == "missing":
        return f"{source}: {key} is missing"
    message, given = str(problem["msg"]).removeprefix("Value error, "), problem["input"]
    if problem["type"] == "string_pattern_mismatch" and problem["ctx"]["pattern"] == _NAME:
        message = "letters, digits, . _ - are needed (first a letter or digit)"
    if problem["type"] == "tuple_type":
        message = _list_needed(location, given)
    if not key:
        return f"{source}: {message}"
    shown = f" (it is {given!r})" if isinstance(given, str | int | float | bool) and repr(given) not in message else ""
    if message[1:2].islower():  # a word, not an abbreviation
        message = message[:1].lower() + message[1:]
    return f"{source}: {key}: {message}{shown}"


def _list_needed(location: Sequence[str | int], given: Any) -> str:
    """How a list is written, where one thing is given."""
    if isinstance(given, Mapping):
        header = ".".join(part for part in location if isinstance(part, str))
        return f"it is one table, and a list of tables is needed; write [[{header}]]"
    return f"a list is needed; write {json.dumps([given], default=str)}"


def _printed(location: Sequence[str | int]) -> str:
    """``hosts[0].nodes[0].gpu``."""
    printed = ""
    for part in location:
        printed += f"[{part}]" if isinstance(part, int) else f".{part}" if printed else part
    return printed


def _known_at(location: Sequence[str | int]) -> list[str]:
    """The keys that a table knows."""
    fields: Any = Settings
    for part in location:
        if isinstance(part, str) and part in fields.model_fields:  # else a name, as in [owners.NAME]
            fields = _inner(fields.model_fields[part].annotation) or fields
    return list(fields.model_fields)
