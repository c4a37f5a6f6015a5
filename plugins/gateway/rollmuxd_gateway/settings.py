"""``gateway.toml``: unknown keys are refused with the nearest name; ``ROLLMUX_GATEWAY_KEY`` overrides a key on top."""

import difflib
import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct, field

from rollmuxd_gateway.core.model import Config, Replica

PREFIX: Final = "ROLLMUX_GATEWAY_"
_Count = Annotated[int, Meta(ge=0, le=10**9)]
_Seconds = Annotated[float, Meta(ge=0.0, le=1e6)]


class Wrong(ValueError):
    """A setting that cannot be; the message names it and what would do."""


class Park(Struct, frozen=True, forbid_unknown_fields=True):
    """How a replica leaves its GPUs."""

    level: Annotated[int, Meta(ge=0, le=2)] = 1


class ReplicaSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """One engine. What it says of itself counts where a key is left out."""

    url: str
    engine: Literal["vllm", "sglang"] = "vllm"
    gpus: tuple[str, ...] = ()
    #: degree of tensor parallelism; 0: as many as it has GPUs
    tp: Annotated[int, Meta(ge=0, le=64)] = 0
    park: Park = Park()
    max_num_seqs: _Count = 0
    kv_tokens: _Count = 0


class Estimate(Struct, frozen=True, forbid_unknown_fields=True):
    """What plans reckon with: figures of this GPU and of the model that is nearest in size."""

    gpu: str = "h100"
    model: str = "qwen2.5-7b"


class RungSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """Engines of several degrees on the same GPUs. See :mod:`rollmuxd_gateway.core.rungs`."""

    planner: Literal["lengths", "preemptions"] = "lengths"
    #: whether the degree may change within a rollout; and what that takes, as long as none has been measured
    in_step: bool = False
    switch_s: _Seconds = 4.52


class Rebalance(Struct, frozen=True, forbid_unknown_fields=True):
    """Moves off slow replicas: how often. See :mod:`rollmuxd_gateway.core.balancing`."""

    per_s: Annotated[float, Meta(gt=0.0, le=1000.0)] = 2.0
    burst: Annotated[float, Meta(ge=1.0, le=1000.0)] = 4.0
    min_gain_s: _Seconds = 1.0


class Keys(Struct, frozen=True, forbid_unknown_fields=True):
    """Files with one key a line: for data, for registration, for control and our own calls."""

    data: str = ""
    registration: str = ""
    control: str = ""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """All of ``gateway.toml``."""

    listen: str = "127.0.0.1:8400"
    dialects: tuple[Literal["openai", "vllm", "sglang"], ...] = ("openai", "vllm", "sglang")
    link: Literal["loop", "own"] = "loop"
    stream_interval: Annotated[int, Meta(ge=1, le=4096)] = 16
    requests_per_rollout: _Count = 0
    tail: Literal["release", "keep"] = "release"
    attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    stall_s: _Seconds = 60.0
    no_replica_s: _Seconds = 600.0
    linger_s: _Seconds = 30.0
    poison_deaths: Annotated[int, Meta(ge=1, le=1000)] = 3
    on_version_change: Literal["refuse", "mix"] = "refuse"
    max_prefill_tokens: _Count = 16_384
    allow_hosts: tuple[str, ...] = ("127.0.0.0/8", "::1/128")
    max_body_mb: Annotated[int, Meta(ge=1, le=1024)] = 64
    keys: Keys = Keys()
    estimate: Estimate = Estimate()
    rebalance: Rebalance | None = None
    rungs: RungSettings | None = None
    idle_s: _Seconds = 5.0
    hold_s: _Seconds = 600.0
    job: dict[str, Any] = field(default_factory=dict)
    replica: tuple[ReplicaSettings, ...] = ()

    def rules(self) -> Config:
        """What the core has to know."""
        return Config(
            attempts=self.attempts,
            stall_ms=_ms(self.stall_s),
            poison_deaths=self.poison_deaths,
            clear_tokens=2 * self.stream_interval,
            no_replica_ms=_ms(self.no_replica_s),
            max_prefill_tokens=self.max_prefill_tokens,
            mix_versions=self.on_version_change == "mix",
            tail=self.tail,
            total=self.requests_per_rollout,
            in_step=self.rungs is not None and self.rungs.in_step,
            switch_ms=0 if self.rungs is None else _ms(self.rungs.switch_s),
        )

    def address(self) -> tuple[str, int]:
        """Host and port to listen at."""
        host, _, port = self.listen.rpartition(":")
        return host.strip("[]"), int(port)


def load(path: Path | None, environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of a file, over the defaults. Raises Wrong, with the file or the variable that is wrong."""
    try:
        told = {} if path is None else tomllib.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise Wrong(f"{path} cannot be read: {error}") from error
    given = _from(os.environ if environ is None else environ)
    try:
        return read({**told, **given})
    except Wrong as error:
        of_variable = (f"environment: {PREFIX}{key.upper()}" for key in given if str(error).startswith(key))
        source = next(of_variable, path)
        raise Wrong(f"{source}: {error}" if source else str(error)) from None


def read(told: Mapping[str, Any]) -> Settings:
    """Check settings. Raises Wrong."""
    _check_names(told, Settings, "")
    for place, kind in (("keys", Keys), ("estimate", Estimate), ("rebalance", Rebalance), ("rungs", RungSettings)):
        if isinstance(told.get(place), dict):
            _check_names(told[place], kind, f"{place}.")
    if isinstance(told.get("replica"), dict):
        raise Wrong("replica is one table, and it is a list of engines: write [[replica]], in two brackets")
    for one in told.get("replica") or ():
        if isinstance(one, dict):
            _check_names(one, ReplicaSettings, "replica.")
            if isinstance(one.get("park"), dict):
                _check_names(one["park"], Park, "replica.park.")
    try:
        settings = msgspec.convert(dict(told), Settings)
    except msgspec.ValidationError as error:
        raise Wrong(_plainly(str(error), told)) from None
    _check_address(settings)
    for network in settings.allow_hosts:
        _network(network)
    if settings.link == "own" and not settings.job.get("name"):
        raise Wrong('link = "own" makes the gateway a job of the daemon: name it in [job], such as name = "math"')
    rungs = settings.rungs
    if rungs is not None and rungs.in_step:
        _check_in_step(settings, rungs)
    for one in settings.replica:
        if [other.url for other in settings.replica].count(one.url) > 1:
            raise Wrong(f"two [[replica]] have the url {one.url}: name each engine once")
        check_url(one.url, settings.allow_hosts)
        if one.tp > len(one.gpus) > 0:
            raise Wrong(
                f"[[replica]] {one.url} has tp = {one.tp} and {len(one.gpus)} gpus ({', '.join(one.gpus)}): name each "
                "GPU of the engine, or lower tp"
            )
        if settings.rungs is not None and not one.gpus:
            raise Wrong(f"[rungs] needs the gpus of each [[replica]], and {one.url} has none: engines take turns there")
    return settings


def _plainly(message: str, told: Mapping[str, Any]) -> str:
    """What msgspec says of a value, with the key in front, the value itself, and which values there are."""
    what, _, path = message.partition(" - at `$.")
    key = path.rstrip("`")
    value: Any = told
    kind: Any = Settings
    for part in re.findall(r"\w+", key):
        if part.isdigit():
            value, kind = value[int(part)], get_args(kind)[0]
        else:
            kind = next((inner for inner in get_args(kind) if hasattr(inner, "__struct_fields__")), kind)  # or None
            value, kind = value[part], get_type_hints(kind, include_extras=True)[part]
    if get_origin(kind) is Literal:
        what = "it is " + " or ".join(f'"{choice}"' for choice in get_args(kind))
    shown = f" is {value!r}" if isinstance(value, str | int | float) else ""
    return f"{key}{shown}: {what[:1].lower()}{what[1:]}"


def _check_in_step(settings: Settings, rungs: RungSettings) -> None:
    """What a change within a rollout cannot be together with."""
    needed = {
        'tail = "keep"': settings.tail == "keep",
        'planner = "lengths"': rungs.planner == "lengths",
        'on_version_change = "refuse"': settings.on_version_change == "refuse",
    }
    for setting, is_so in needed.items():
        if not is_so:
            raise Wrong(f"rungs.in_step needs {setting}: write that, or leave in_step out")


def _check_address(settings: Settings) -> None:
    host, _, port = settings.listen.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise Wrong(f"listen is {settings.listen!r}: it needs HOST:PORT, such as 127.0.0.1:8400")
    try:
        loopback = ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        loopback = host == "localhost"
    keys = settings.keys
    if not loopback and not (keys.data and keys.registration and keys.control):
        raise Wrong(
            f"listen is {settings.listen!r}, which others reach: name files in [keys] for data, registration and "
            "control, or listen on 127.0.0.1"
        )


def check_url(url: str, allowed: tuple[str, ...]) -> str:
    """The address of an engine, without a slash at its end.

    Raises Wrong unless it is http(s)://HOST[:PORT] with a host of the list. A client that registers a replica chooses
    where this process sends requests.
    """
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise Wrong(f"{url!r} is no URL: {error}") from None
    host = parts.hostname or ""
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username:
        raise Wrong(f"{url!r} is no address of an engine: it needs http://HOST:PORT")
    if parts.path not in ("", "/"):
        raise Wrong(f"{url!r} has a path: an engine is named by http://HOST:PORT alone")
    if not _is_allowed(host, allowed):
        raise Wrong(f"host {host} is not in allow_hosts ({', '.join(allowed)}); add it there if engines run on it")
    shown = f"[{host}]" if ":" in host else host
    return f"{parts.scheme}://{shown}" + (f":{port}" if port is not None else "")


def _is_allowed(host: str, allowed: tuple[str, ...]) -> bool:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        # A name counts only as it is written: its owner decides where it leads.
        return host in allowed or (host == "localhost" and "127.0.0.0/8" in allowed)
    networks = (network for network in map(_network, allowed) if network is not None)
    return any(address in network for network in networks)


def _network(text: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network | None:
    try:
        return ipaddress.ip_network(text)
    except ValueError:
        if "/" in text or not text.strip("0123456789."):
            raise Wrong(f"allow_hosts has {text!r}: it needs networks such as 10.0.0.0/24, or names of hosts") from None
        return None


def _from(environ: Mapping[str, str]) -> dict[str, Any]:
    """Keys on top, from the environment: numbers and words as TOML has them."""
    found: dict[str, Any] = {}
    for name, value in environ.items():
        if name.startswith(PREFIX):
            try:
                found[name.removeprefix(PREFIX).lower()] = tomllib.loads(f"it = {value}")["it"]
            except tomllib.TOMLDecodeError:
                found[name.removeprefix(PREFIX).lower()] = value
    return found


def _check_names(told: Mapping[str, Any], kind: type[Struct], where: str) -> None:
    known = kind.__struct_fields__
    for name in told:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {where}{near[0]}?" if near else f"known are {', '.join(known)}"
            raise Wrong(f"{where}{name} is no setting of the gateway; {hint}")


def replica_of(name: str, it: ReplicaSettings, allowed: tuple[str, ...]) -> Replica:
    """A replica as it is configured; what the engine says of itself is added when it is asked."""
    return Replica(
        name,
        check_url(it.url, allowed),
        engine=it.engine,
        gpus=it.gpus,
        tp=it.tp or max(1, len(it.gpus)),
        park_level=it.park.level,
        max_num_seqs=it.max_num_seqs or 256,
        kv_tokens=it.kv_tokens,
    )


def _ms(seconds: float) -> int:
    return round(seconds * 1000)
