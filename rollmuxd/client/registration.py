"""From the keywords of :func:`rollmuxd.job` to the body of a registration. Pure; a mistake is named with its key."""

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from rollmuxd.wire.plan import PlanPool
from rollmuxd.wire.requests import AsynchronousBody, FillerBody, PhaseBody, RegisterBody, StateBody, WantBody

T = TypeVar("T", bound=msgspec.Struct)

_WANT = {"nodes", "gpus", "named"}
_TIMES = {"seconds", "gap_s", "min_gpus", "traffic"}
_SIDE = {*_TIMES, "every"}
_STATE = {"gpu_gb", "residual_gb", "ram_gb", "driver", "load_s", "park_s", "engine_gpus", "options"}
#: what is said of a pool
POOL_KEYS = _WANT | _TIMES | _STATE

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def registration(
    name: str,
    *,
    pools: Mapping[str, Any],
    phases: Mapping[str, Any] | Iterable[str] | None = None,
    side: Any = None,
    init: bool | str | Iterable[str] | Mapping[str, Any] | None = True,
    hooked: Iterable[str] = (),
    asynchronous: bool | Mapping[str, Any] | None = None,
    filler: bool | Mapping[str, Any] | None = None,
    **rest: Any,
) -> RegisterBody:
    """Return the body of ``POST /v1/jobs``.

    ``hooked`` are pools with a hook but perhaps no sizes: their state is declared too, or the hooks would never be
    called. ``rest`` is passed on as it is, less what is None. Raises TypeError for a key that there is not, and
    ValueError for a value that cannot be.
    """
    _named("the job's name", name)
    pools = pools or {"rollout": {"nodes": 1}, "train": {"nodes": 1}}
    for pool, given in pools.items():
        _named("a pool's name", pool)
        if not isinstance(given, Mapping):
            hint = f"; say {pool}=dict(nodes={given})" if isinstance(given, int) and not isinstance(given, bool) else ""
            raise TypeError(
                f"{pool}={given!r}: what is wanted of a pool is a dict{hint or f', as {pool}=dict(nodes=1)'}"
            )
        _known(f"{pool}=", given, POOL_KEYS)
    works_in_idle_time = _kind(
        "filler", filler, FillerBody, "how fast it gives way, filler=dict(yield_s=2), or filler=True"
    )
    if works_in_idle_time is not None:
        if phases is not None or len(pools) > 1:
            raise ValueError(f"filler {name!r}: name the one pool that it works on, and leave phases= out")
        phases, init = {"filler": list(pools)}, None
    cycle = _cycle(pools, phases)
    batches = _kind(
        "asynchronous",
        asynchronous,
        AsynchronousBody,
        "True, or in what time the rollouts make one batch: asynchronous=dict(pace_s=220)",
    )
    if batches is not None and len(cycle) > 1:
        raise ValueError(
            f"asynchronous=: the job has the phases {', '.join(phase.name for phase in cycle)}, and an asynchronous "
            "job has the one phase train; its rollouts are its own: leave their pool and phase out"
        )
    if side is not None and not isinstance(side, Mapping):
        raise TypeError(f"side={side!r}: side phases are given as a dict, by name")
    sides = [_phase(phase, given, pools, "side=") for phase, given in (side or {}).items()]
    if init is not None and init is not False and not any(phase.name == "init" for phase in sides):
        sides.insert(0, _phase("init", {} if init is True else init, pools, "init="))
    hooks = set(hooked)
    body = RegisterBody(
        name=name,
        phases=cycle,
        wants={pool: _made(WantBody, f"{pool}=", _only(given, _WANT)) for pool, given in pools.items()},
        states={
            pool: _made(StateBody, f"{pool}=", _only(given, _STATE))
            for pool, given in pools.items()
            if _STATE & given.keys() or {pool, "*"} & hooks
        },
        side=sides,
        asynchronous=batches,
        filler=works_in_idle_time,
        **{key: value for key, value in rest.items() if value is not None},
    )
    # Encoding and decoding applies the limits of the wire here, with the caller's line in the traceback.
    try:
        return msgspec.json.decode(msgspec.json.encode(body, enc_hook=_plain), type=RegisterBody)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        if key in rest:
            raise ValueError(
                f"job {name!r}: {key}={rest[key]!r}: {_choices(RegisterBody, key) or _lower(what)}"
            ) from error
        raise ValueError(f"job {name!r}: {error}") from error


def check_planned_pool(where: str, given: Any) -> None:
    """Raise TypeError or ValueError, naming the key, for what cannot be the nodes of a pool that a plan makes up."""
    if not isinstance(given, Mapping):
        raise TypeError(f"{where}: a table is needed, such as nodes = {given!r}")
    _known(where, given, set(PlanPool.__struct_fields__))
    if "nodes" not in given:
        raise ValueError(f"{where}: nodes is missing; say how many, such as nodes = 4")
    _made(PlanPool, where, given)


def _cycle(pools: Mapping[str, Mapping[str, Any]], phases: Mapping[str, Any] | Iterable[str] | None) -> list[PhaseBody]:
    if phases is not None and not isinstance(phases, Mapping | list | tuple):
        raise TypeError(f"phases={phases!r}: say each phase with its pools, as phases=dict(rollout='rollout')")
    given: dict[str, Any] = dict(phases) if isinstance(phases, Mapping) else {}
    for name in given or phases or pools:
        _named("a phase's name", name)
        given.setdefault(name, name)
    for pool, options in pools.items():
        stray = sorted(_TIMES & options.keys())
        if stray and pool not in given:
            raise ValueError(f"{pool}=dict({stray[0]}=...): no phase is called {pool!r}; put it into phases=")
    # Said at the pool of the same name, as in rollout=dict(nodes=1, seconds=90): means the phase.
    return [_phase(it, how, pools, "phases=", _only(pools.get(it, {}), _TIMES)) for it, how in given.items()]


def _phase(
    phase: str, given: Any, pools: Mapping[str, Any], where: str, times: Mapping[str, Any] | None = None
) -> PhaseBody:
    """A phase as it is given: its pools, or a dict. ``times`` count where that says nothing else."""
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"pools": given}
    _known(f"{where}{phase}", options, {"pools"} | (_SIDE if where == "side=" else _TIMES))
    needs = options.pop("pools", None) or ([phase] if phase in pools else list(pools))
    needs = [needs] if isinstance(needs, str) else needs
    if not isinstance(needs, list | tuple):
        raise TypeError(
            f"{where}{phase}: {needs!r} is no pool; say {phase}='train', or {phase}=dict(pools=..., seconds=...)"
        )
    for pool in needs:
        if pool not in pools:
            raise ValueError(f"{where}: phase {phase!r} needs pool {pool!r}, and the job has {', '.join(pools)}")
    called = f"{where}{phase}" if options else phase
    return _made(PhaseBody, called, {"name": phase, "pools": needs, **(times or {}), **options})


def _kind(key: str, given: Any, made: type[T], say: str) -> T | None:
    """What kind of job it is: not that (None), that with its defaults (True), or with these figures."""
    if given is None or given is False:
        return None
    if given is not True and not isinstance(given, Mapping):
        raise TypeError(f"{key}={given!r}: say {say}")
    options = {} if given is True else dict(given)
    _known(f"{key}=", options, {field.name for field in msgspec.structs.fields(made)})
    return _made(made, f"{key}=", options)


def _only(given: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in keys and value is not None}


def _known(where: str, given: Mapping[str, Any], keys: set[str]) -> None:
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(str(key), keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(keys))}"
            raise TypeError(f"{where}: {key!r} is not a key; {hint}")


def _named(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise TypeError(f"{what} is {name!r}, and must be a string")
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} is {name!r}: a name has letters, digits, . _ - (first a letter or digit); at most 100 of them"
        )


def _choices(body: type[msgspec.Struct], key: str) -> str:
    """What this part of the body may say there, where that is one of a few words."""
    kind = body.__annotations__.get(key)
    words = next((get_args(it) for it in (kind, *get_args(kind)) if get_origin(it) is Literal), ())
    return f"it is {' or '.join(map(repr, words))}" if words else ""


def _made(kind: type[T], where: str, given: Mapping[str, Any]) -> T:
    """Make a part of the body; what the wire's limits forbid is named by pool or phase, and by key."""
    try:
        # By way of JSON, as it will go: what cannot go there is found here too.
        return msgspec.json.decode(msgspec.json.encode(given, enc_hook=_plain), type=kind)
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$.")
        key = re.split(r"[.\[`]", path)[0]
        raise ValueError(
            f"{where.rstrip('=')}: {key}={given.get(key)!r}: {_choices(kind, key) or _lower(what)}"
        ) from error


def _plain(value: Any) -> Any:
    """A number of numpy or torch (a mean of measured seconds) as one of Python."""
    if callable(number := getattr(value, "item", None)):
        return number()
    raise TypeError(f"{value!r} cannot be sent to the daemon; say it as a number, a string, a list or a dict")


def _lower(text: str) -> str:
    return text[:1].lower() + text[1:]


def call_with_known(keywords: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise TypeError for a keyword of :func:`rollmuxd.job` that there is not, with the nearest that there is."""
    known = set(allowed)
    for key in keywords:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1)
            hint = f"did you mean {near[0]}=?" if near else f"a pool of that name is pools=dict({key}=dict(nodes=1))"
            if key in POOL_KEYS:
                hint = f"it is said of a pool: train=dict({key}=...)"
            raise TypeError(f"job(): {key}= is not a keyword; {hint}")
