"""The daemon's settings: ``rollmux.toml``, overridden by ``ROLLMUX_*`` variables, checked before anything starts.

A file is looked for in ``./``, ``~/.config/rollmux/`` and ``/etc/rollmux/``; the first one found counts. Every key
can be set from the environment: ``lease.lease_s`` as ``ROLLMUX_LEASE__LEASE_S``; lists (``hosts``) as JSON.

Each key says below what it does, in which unit, and why its default is what it is. ``rollmux.toml`` in the repository
is the sample, and is loaded by a test. Errors name file, key and remedy, all of them at once::

    rollmux.toml: hosts[0].nodes[0].gpu is not a setting; did you mean gpus?

Pydantic stays in this module: :meth:`Settings.to_core_config` and :meth:`Settings.to_start` are the border.
"""

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    SettingsError,
)

from rollmuxd.core.config import Config, DriverTraits, Moves, OwnerLimits, PlanWith
from rollmuxd.core.ids import GpuId, NodeId
from rollmuxd.core.inputs import HostSpec, NodeSpec, Start
from rollmuxd.daemon.access.owner_limits import ByOwner
from rollmuxd.spi import HostConfig
from rollmuxd.wire import VARIABLES

PREFIX: Final = "ROLLMUX_"
#: where the state lies of a daemon that the system starts
SYSTEM_STATE_DIR: Final = Path("/var/lib/rollmux")
SYSTEM_SOCKET: Final = Path("/run/rollmux/rollmux.sock")
#: the kernel's limit for the path of a Unix socket
SOCKET_PATH_BYTES: Final = 107

_NAME: Final = r"^[A-Za-z0-9][A-Za-z0-9._-]*$"
Name = Annotated[str, Field(pattern=_NAME, max_length=100)]
Seconds = Annotated[float, Field(gt=0, le=30 * 86_400, allow_inf_nan=False)]


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
    """TCP address of the HTTP interface, ``host:port``; port 0 takes any free one, an empty string listens on none.
    Beyond loopback it is https, and asks for keys, unless ``access.insecure`` says that it need not."""

    socket: Path | None = None
    """Unix socket of the HTTP interface. Default: ``rollmux.sock`` in the state directory, or
    ``/run/rollmux/rollmux.sock`` where that is ``/var/lib/rollmux``: where clients look."""

    socket_mode: Annotated[str, Field(pattern=r"^0?[0-7]{3}$")] = "0600"
    """Users that may connect to the Unix socket, as a file mode. Default: the daemon's own user (and root). ``0666``
    lets every user of the machine in, each as itself. The directory must let them through, too; one in a home does not.
    Set ``socket`` to a path such as ``/run/rollmux/rollmux.sock``."""

    state_dir: Path = Field(default_factory=default_state_dir)
    """Where the journal lies. On a local disk: network file systems are refused. Default: ``/var/lib/rollmux`` for
    root, else ``~/.local/state/rollmux``."""

    mode: Literal["share", "observe"] = "share"
    """``share``: jobs share nodes. ``observe``: jobs only report when their phases begin and end. No job waits, nothing
    is held, moved or ended, and ``rollmuxd report`` says what sharing would have gained."""

    policy: Name = "thrift"
    """Which policy decides what shares which nodes, by the name of its entry point (``rollmuxd.policies``):
    ``thrift``, or ``rollmux``, the paper's rule."""

    inherit: list[Annotated[str, Field(pattern=r"^[A-Za-z_*][A-Za-z0-9_*]*$")]] = []
    """More variables of the daemon's environment that the processes have which it starts, such as ``["WANDB_*"]``.
    Default: none but those that ``docs/how-to/run-a-job.md`` lists, which hold no secrets."""

    shutdown_s: Seconds = 10.0
    """Seconds that calls may take to come to an end when the daemon stops; then they are cut off."""

    @field_validator("listen")
    @classmethod
    def _address(cls, listen: str) -> str:
        if listen:
            split_address(listen)
        return listen

    @field_validator("state_dir", "socket")
    @classmethod
    def _expanded(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

    @model_validator(mode="after")
    def _socket_fits(self) -> "DaemonTable":
        path = self.socket_path
        if len(os.fsencode(path.absolute())) > SOCKET_PATH_BYTES:
            raise ValueError(
                f"the path of the Unix socket, {path}, is longer than the {SOCKET_PATH_BYTES} bytes that the kernel "
                "takes; set daemon.socket to a shorter one"
            )
        return self

    @property
    def socket_path(self) -> Path:
        """The Unix socket, with its default."""
        if self.socket is not None:
            return self.socket
        return SYSTEM_SOCKET if self.state_dir == SYSTEM_STATE_DIR else self.state_dir / "rollmux.sock"


class RollMuxTable(_Table):
    max_group: Annotated[int, Field(ge=1, le=64)] = 5
    """Jobs in a group at most. Default: 5, beyond which the paper saw no gain."""

    promise: Literal["measured", "certified"] = "certified"
    """How promises are kept. ``certified``: by an order that is proven, as long as no phase takes longer than planned.
    ``measured``: the job with the least credit goes first. A job that runs short of credit is served first, or has
    nodes of its own until it has earned some."""


class ThriftTable(_Table):
    objective: Literal["throughput", "cost", "work"] = "throughput"
    """What is dear. ``throughput``: nodes that one owns cost nothing while enough of them idle, and their price when
    they run short. ``cost``: dollars per hour, for nodes that one rents: a job that is ahead of its promise may be
    slowed beyond it for a while. ``work``: the same, in dollars for the work that there is, since a slowed job stays
    longer."""

    steady: bool = False
    """Promises hold at every instant. Else they hold over a job's life. A job that is ahead of its promise may be
    slowed beyond it until that is spent (objectives ``cost`` and ``work``)."""

    max_group: Annotated[int, Field(ge=1, le=64)] = 5
    """Jobs in a group at most."""

    promise: Literal["measured", "certified"] = "measured"
    """As under ``[policy.rollmux]``. Default: ``measured``, because real phases take times that no plan knows.
    ``certified`` fits phases that never take longer than stated: then a job may go round up to four times while another
    goes round once."""


class PolicyTable(BaseModel):
    # Other policies' tables are theirs to check.
    model_config = ConfigDict(extra="allow", frozen=True)

    rollmux: RollMuxTable = RollMuxTable()
    """Options of the policy ``rollmux``, the paper's rule."""

    thrift: ThriftTable = ThriftTable()
    """Options of the policy ``thrift``. Other policies have tables of their own, ``[policy.NAME]``."""


class LeaseTable(_Table):
    lease_s: Seconds = 60.0
    """Seconds without a heartbeat after which a session is lost. Default: a minute, so that a save or a debugger does
    not cost a slot."""

    heartbeat_s: Seconds = 15.0
    """Seconds between heartbeats, told to clients. Default: a quarter of the lease, so that three may go missing."""

    reattach_s: Seconds = 120.0
    """Seconds that a waiting request keeps its place without a client that asks for it. The same holds for a registered
    run without a session (or for ``lease_s``, where that is longer). Default: two minutes, so that neither a restarted
    daemon nor a restarted proxy costs a place."""

    grace_s: Seconds = 5.0
    """Seconds beyond its planned gap that a job's turn is awaited before it is skipped."""

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
    """Seconds after which a lost job with ``on_loss = "relaunch"`` is started again. Each further loss within an hour
    doubles them. Default: a minute."""

    limit: Annotated[int, Field(ge=0, le=1000)] = 5
    """Relaunches within an hour at most; then the job is quarantined until you reinstate it."""


class MovesTable(_Table):
    enabled: Literal["auto", "on", "off"] = "auto"
    """Whether jobs that allow it (``movable``) are moved to other nodes while they live, where the policy finds them
    better placed. Default: where there is more than one host."""

    min_interval_h: Annotated[float, Field(ge=0, le=8760)] = 1.0
    """Hours after which a job may be moved again. Default: one."""

    move_cost_s: Annotated[float, Field(ge=0, le=86_400)] = 30.0
    """Seconds that a move takes from its job, as this cluster measures it. A move has to gain more, and credit has to
    pay for it."""


class EstimatesTable(_Table):
    drift: Annotated[float, Field(ge=0, le=10)] = 0.1
    """A group is planned again when a phase's recent mean is off its plan by more than this share, and by more than
    chance explains. 0: never; plans keep their times."""

    plan: Literal["mean", "p90", "worst"] = "mean"
    """What of the times that were seen plans reckon with. Promises are about the mean in any case. Default: the mean,
    since the guard keeps promises with it, and plans with more than that cost more (docs/results.md)."""

    window: Annotated[int, Field(ge=2, le=64)] = 20
    """Iterations that this mean is of, at most."""

    min_samples: Annotated[int, Field(ge=2, le=64)] = 8
    """And at least, counted from when plans were made with the phase's times last: till then what a job states holds.
    Default: eight, as the guard, which judges from there on too, should find them true."""

    replan_every_s: Annotated[float, Field(ge=0, le=604_800)] = 900.0
    """The least seconds between two plans that one job causes; a promise at risk is tried again as often. Default: a
    quarter of an hour."""

    @model_validator(mode="after")
    def _samples_in_window(self) -> "EstimatesTable":
        if self.min_samples > self.window:
            raise ValueError(
                f"min_samples is {self.min_samples}, and window {self.window}: make min_samples at most window"
            )
        return self


class OverrunTable(_Table):
    action: Literal["warn", "revoke"] = "warn"
    """What follows when a slot runs for more than ten minutes and three times the p95 of its phase. ``warn`` says so
    (log, metrics, ``slot list``, ``job explain``) and does nothing more. ``revoke`` ends the slot after a grace, if
    another job waits for its GPUs. Default: on one box the owner decides."""

    grace_s: Seconds = 300.0
    """Seconds between the warning and the end, where ``action`` is ``revoke``."""


class FillerTable(_Table):
    enabled: bool = True
    """Whether idle nodes are lent to fillers."""

    max_share: Annotated[float, Field(ge=0, le=1)] = 0.01
    """Share of its time alone by which loans may hold a job up, at most. A node is not lent where the longest wait that
    a loan may cause would exceed it. Default: one per cent."""

    margin_s: Seconds = 0.5
    """Seconds by which a node is back before a job is expected there."""


class LimitsTable(_Table):
    order_s: Seconds = 120.0
    """Seconds that a load or a park may take at least; three times what it took so far, where that is more. Default: a
    stuck engine is noticed, a slow one is not punished."""

    clean_timeout_s: Seconds = 120.0
    """Seconds that GPUs may take to become clean before their node is quarantined."""

    clean_tolerance_gb: Annotated[float, Field(ge=0, le=1000)] = 0.3
    """Gigabytes of used memory, beyond agreed residual memory, at which a GPU still counts as clean. Default: what a
    driver keeps on an idle GPU."""

    observe_s: Seconds = 15.0
    """Seconds between two looks at a host, where nothing else asks for one."""

    max_jobs: Annotated[int, Field(ge=1)] = 10_000
    """Live jobs at most; more are answered with 429."""

    max_requests_waiting: Annotated[int, Field(ge=1)] = 20_000
    """Waiting slot requests at most; more are answered with 429."""

    max_facts_waiting: Annotated[int, Field(ge=1)] = 100
    """At most so many calls of one owner wait for facts at the same time (each open dashboard is one, and each
    ``rollmuxd facts --follow``). More are answered with 429. Heartbeats that wait for directives take half of these
    places at most; more of them are answered at once. Default: more than a team looks at, and less than would cost
    others something."""

    max_body_mb: Annotated[float, Field(gt=0, le=100)] = 1.0
    """Megabytes that the body of a call may have; larger ones are answered with 413."""

    max_connections: Annotated[int, Field(ge=1)] = 20_000
    """Open TCP connections at most, TLS handshakes among them; more are answered with 503, or with TLS hung up on.
    Fewer where the process may have fewer files: some are left to the Unix socket, the journal and backends."""

    read_s: Seconds = 30.0
    """Seconds in which a call must have arrived, from its first byte to its last. A new connection must bring one as
    soon; a TLS handshake has 10 of them at most. Slower connections are closed, since open connections cost
    something."""

    calls_per_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 2_000.0
    """Calls a second that each API key, each user at the Unix socket and each address without a key may make. More are
    answered with 429. 0: any number. Default: what one client needs that stands for thousands of jobs."""

    calls_burst_s: Seconds = 5.0
    """Size of a burst, in seconds of ``calls_per_s``, for a caller that has been idle."""


class OwnerTable(_Table):
    share: Annotated[int, Field(ge=1, le=1_000_000)] = 1
    """Its part, against other owners' parts: among waiting jobs of equal priority, the owner that used least relative
    to its share goes first. Default: 1, the same for all."""

    max_jobs: Annotated[int, Field(ge=0)] = 1_000
    """Its live jobs at most; more are answered with 429. 0: no limit. Default: more than a team runs, and few enough
    that one owner's jobs do not slow the others' down."""

    max_nodes: Annotated[int, Field(ge=0)] = 0
    """Nodes on which it has placements, at most (a node that it shares with others counts as one); its jobs wait for
    more. Default: 0, no limit."""

    max_waiting: Annotated[int, Field(ge=0)] = 0
    """Its waiting slot requests at most; more are answered with 429. Default: 0, no limit."""

    max_priority: int | None = None
    """The highest priority that its jobs may ask for; more is refused. Default: any."""


class DefaultsTable(_Table):
    owner: OwnerTable = OwnerTable()
    """Share and limits where ``[owners.NAME]`` does not give them: for owners without a table, and for keys that a
    table leaves out. Default: one share, 1,000 live jobs, and no other limit. Set it where several share."""

    slo: Annotated[float, Field(ge=1, le=1000)] | None = None
    """Bound on a job's slowdown where its registration gives none. Default: none, best effort: the first hour must just
    work. Clusters set it."""

    on_loss: Literal["kill", "hold", "relaunch"] = "hold"
    """What follows if a job's session is lost and its registration does not say. ``hold`` waits until its GPUs are
    verified clean. ``kill`` ends its process, where the backend owns it. ``relaunch`` starts it again, where rollmuxd
    has started it (others: ``hold``)."""

    residual_gb: Annotated[float, Field(ge=0, le=1000)] = 0.0
    """Gigabytes that a parked state may leave on each GPU if its registration does not say (``residual_gb``). At most a
    quarter of its ``gpu_gb``, where that is known. Default: nothing. Real processes keep a CUDA context and what
    libraries take, half a gigabyte to one and a half: ``rollmuxd init`` writes 1."""


class JournalTable(_Table):
    keep_days: Annotated[int, Field(ge=1, le=36_500)] = 90
    """Days for which every fact is kept. State, daily usage and the audit trail are kept longer. Default: a quarter of
    a year, to look into what happened."""

    keep_gb: Annotated[float, Field(ge=0.001, le=100_000)] = 10.0
    """Gigabytes of journal above which the oldest days' facts go sooner; the last day's always stay. Default: what a
    normal disk can spare, and months of a busy cluster."""

    keep_audit_days: Annotated[int, Field(ge=1, le=36_500)] = 1_095
    """Days for which is kept what operators and owners did. Default: three years."""


class LogTable(_Table):
    level: Literal["debug", "info", "warning", "error"] = "info"
    """The least level that is written."""

    format: Literal["console", "json"] = "console"
    """``console`` for people, ``json`` for collectors: one object a line. Both go to stderr."""


class AccessTable(_Table):
    require_keys: bool = True
    """Ask for API keys over TCP. (Over the Unix socket the kernel names the caller, and no key is needed.) Without,
    every caller on the port is an operator."""

    insecure: bool = False
    """Allow to listen beyond loopback without TLS, or without keys. Then keys and answers can be read on the way, or
    every caller on the port is an operator. Use it behind a proxy, or in a network of your own."""


class TlsTable(_Table):
    mode: Literal["auto", "on", "off"] = "auto"
    """TLS at the TCP port. ``auto``: where other machines can reach it, unless ``access.insecure``; and where a
    certificate is named. The Unix socket needs none."""

    certificate: Path | None = None
    """PEM file with the certificate, and those between it and its authority. Default: one of the daemon's own, made at
    its first start and signed by itself: ``tls/certificate.pem`` in the state directory."""

    key: Path | None = None
    """PEM file with its private key, without a password."""

    names: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9.:*-]+$", max_length=253)], ...] = ()
    """Names and addresses under which clients reach the daemon, besides the machine's own: the certificate that it
    makes is for these too. Where no key is asked for, it is heard under no other name, so that no page of another site
    is."""

    @field_validator("certificate", "key")
    @classmethod
    def _expanded(cls, path: Path | None) -> Path | None:
        return None if path is None else path.expanduser()

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
    """GPUs of the host that are always shared as a unit: ``[0, 1, 2, 3]`` or ``"0-3"``."""

    pools: Annotated[tuple[Name, ...], Field(min_length=1)]
    """Pools that the node is in. Their names are free; ``rollout`` and ``train`` are those that a job wants which names
    none. Both in one homogeneous cluster."""

    gpu_type: str = ""
    """Type of the GPUs, for people to read. Default: as the backend sees it."""

    gpu_gb: Annotated[float, Field(ge=0, le=10_000)] = 0.0
    """Memory of each GPU in gigabytes. Default: as the backend sees it."""

    price_per_gpu_hour: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    """What a GPU costs in an hour, in any one currency: the policy takes the cheapest placement."""

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
    """The host's name here; its GPUs are printed ``host1/gpu0``, its nodes ``host1/gpu0-3``."""

    backend: Name
    """The backend that reaches it, by the name of its entry point (``rollmuxd.backends``)."""

    ram_gb: Annotated[float, Field(gt=0, le=1_000_000)] | None = None
    """Gigabytes of its RAM that parked states may take. Default: 70 % of what the backend sees."""

    options: dict[str, Any] = {}
    """What the backend needs to know of this host; its own documentation says what."""

    nodes: Annotated[tuple[NodeTable, ...], Field(min_length=1)]
    """Its nodes. GPUs that are in none are left alone."""

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
    name: Name
    """The switch's name here."""

    driver: Name
    """What sets it, by the name of its entry point (``rollmuxd.fabric``): ``polatis``, or ``mock`` without hardware."""

    options: dict[str, Any] = {}
    """What the driver needs to know of the switch; its own documentation says what."""

    ports: Annotated[dict[str, tuple[Annotated[int, Field(ge=1, le=100_000)], ...]], Field(min_length=1)]
    """Ports of the switch that the cables of a node end at: ``"host1/gpu0-7" = [1, 2]``."""

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
    """Shares and limits of owners: ``[owners.NAME]``. What a table leaves out, and all of an owner without one, is as
    ``defaults.owner`` says."""
    hosts: tuple[HostTable, ...] = ()
    """The machines: one ``[[hosts]]`` table each."""
    fabric: tuple[FabricTable, ...] = ()
    """Optical switches between nodes: one ``[[fabric]]`` table each."""
    backends: dict[Name, dict[str, Any]] = {}
    """Options of a backend for all its hosts: ``[backends.NAME]``; its own documentation says which."""
    residency: dict[Name, dict[str, Any]] = {}
    """Options of a residency driver: ``[residency.NAME]``; its own documentation says which."""

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
            owners=ByOwner({name: self.owner_limits(name) for name in self.owners}, self.owner_limits("")),
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


def misspelt_pools(hosts: Sequence[HostTable]) -> Mapping[str, str]:
    """Pools that look like ``rollout`` or ``train`` where there is no such pool, each with the one that was meant.

    Their names are free, but a job that names none would wait for that one for ever.
    """
    pools = dict.fromkeys(pool for host in hosts for node in host.nodes for pool in node.pools)
    missing = [name for name in ("rollout", "train") if name not in pools]
    near = {pool: difflib.get_close_matches(pool.lower(), missing, 1, 0.8) for pool in pools}
    return {pool: meant[0] for pool, meant in near.items() if meant}


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
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


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
        raise BadSettings([_line(dict(problem), file) for problem in _distinct(error)]) from None
    except SettingsError as error:
        raise BadSettings([f"environment: {error}; lists and tables are given as JSON"]) from None
    settings._file = file  # noqa: SLF001  # private to pydantic: it is no setting
    return settings


def search_path() -> tuple[Path, ...]:
    """Where a file is looked for, in this order."""
    name = "rollmux.toml"
    home = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(name), home / "rollmux" / name, Path("/etc/rollmux") / name


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
    """One line for each ``ROLLMUX_*`` variable that is no setting."""
    for variable in sorted(os.environ):
        if not variable.startswith(PREFIX) or variable in VARIABLES:
            continue
        path = variable[len(PREFIX) :].lower().split("__")
        if not _is_setting(path):
            known = [*VARIABLES, *_variables()]
            meant = difflib.get_close_matches(variable, known, 1, 0.75)
            hint = f"did you mean {meant[0]}?" if meant else "unset it, or see rollmux.toml for what there is"
            yield f"environment: {variable} is not a setting; {hint}"


def _is_setting(path: Sequence[str]) -> bool:
    fields: Any = Settings
    for part in path:
        if fields is None:  # inside a plugin's own options
            return True
        if part not in fields.model_fields and fields.model_config.get("extra") != "allow":
            return False
        field = fields.model_fields.get(part)
        annotation = None if field is None else _inner(field.annotation)
        if annotation is None and field is not None and get_origin(field.annotation) is not dict:
            return part == path[-1]
        fields = annotation
    return True


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


def _distinct(error: ValidationError) -> list[Any]:
    """What is wrong, less what only follows: a tuple whose one item is wrong is also said to have no items."""
    problems = error.errors()
    places = [problem["loc"] for problem in problems]
    return [
        problem
        for problem in problems
        if problem["type"] != "too_short"
        or not any(place != problem["loc"] and place[: len(problem["loc"])] == problem["loc"] for place in places)
    ]


def _given_by_environment(location: Sequence[str | int]) -> str | None:
    """The variable that the value came from: its own, or that of a table or list around it."""
    parts = [str(part) for part in location]
    names = (PREFIX + "__".join(parts[:count]).upper() for count in range(len(parts), 0, -1))
    given = {name.upper() for name in os.environ}
    return next((name for name in names if name in given), None)


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
    message = str(problem["msg"]).removeprefix("Value error, ")
    if not key:
        return f"{source}: {message}"
    given = problem["input"]
    shown = f" (it is {given!r})" if isinstance(given, str | int | float | bool) and repr(given) not in message else ""
    if message[1:2].islower():  # a word, not an abbreviation
        message = message[:1].lower() + message[1:]
    return f"{source}: {key}: {message}{shown}"


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
