"""From the keywords of :func:`rollmuxd.job` to the body of a registration. Pure; a mistake is named with its key."""

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from rollmuxd.wire.requests import PhaseBody, RegisterBody, StateBody, WantBody

_WANT = {"nodes", "gpus", "named"}
_TIMES = {"seconds", "gap_s", "min_gpus"}
_STATE = {"gpu_gb", "leftover_gb", "ram_gb", "driver", "load_s", "park_s"}


def registration(
    name: str,
    *,
    pools: Mapping[str, Mapping[str, Any]],
    phases: Mapping[str, Any] | Iterable[str] | None = None,
    side: Mapping[str, Any] | None = None,
    init: bool | Mapping[str, Any] | None = True,
    hooked: Iterable[str] = (),
    **rest: Any,
) -> RegisterBody:
    """Return the body of ``POST /v1/jobs``.

    ``hooked`` are pools with a hook but perhaps no sizes: their state is declared too, or the hooks would never be
    called. ``rest`` is passed on as it is, less what is None. Raises TypeError for a key that there is not, and
    ValueError for a value that cannot be.
    """
    if not pools:
        raise ValueError(f"job {name!r} needs at least one pool: rollout=dict(nodes=1)")
    for pool, given in pools.items():
        _known(f"{pool}=", given, _WANT | _TIMES | _STATE)
    cycle = _cycle(pools, phases)
    sides = [_phase(phase, given, pools, "side=") for phase, given in (side or {}).items()]
    if init is not None and init is not False and not any(phase.name == "init" for phase in sides):
        told = init if isinstance(init, Mapping) else {}
        sides.insert(0, _phase("init", {"pools": list(pools), **told}, pools, "init="))
    body = RegisterBody(
        name=name,
        phases=cycle,
        wants={pool: WantBody(**_only(given, _WANT)) for pool, given in pools.items()},
        states={
            pool: StateBody(**_only(given, _STATE)) for pool, given in pools.items() if _has_state(pool, given, hooked)
        },
        side=sides,
        **{key: value for key, value in rest.items() if value is not None},
    )
    # Encoding and decoding applies the limits of the wire here, with the caller's line in the traceback.
    try:
        return msgspec.json.decode(msgspec.json.encode(body), type=RegisterBody)
    except msgspec.ValidationError as error:
        raise ValueError(f"job {name!r}: {error}") from error


def _cycle(pools: Mapping[str, Mapping[str, Any]], phases: Mapping[str, Any] | Iterable[str] | None) -> list[PhaseBody]:
    given: dict[str, Any] = dict(phases) if isinstance(phases, Mapping) else {name: name for name in phases or pools}
    for pool, options in pools.items():
        stray = sorted(_TIMES & options.keys())
        if stray and pool not in given:
            raise ValueError(f"{pool}=dict({stray[0]}=...): no phase is called {pool!r}; put it into phases=")
    cycle = []
    for phase, options in given.items():
        made = _phase(phase, options, pools, "phases=")
        # Said at the pool of the same name, as in rollout=dict(nodes=1, seconds=90): means the phase.
        cycle.append(msgspec.structs.replace(made, **_only(pools.get(phase, {}), _TIMES - _given(options))))
    return cycle


def _phase(phase: str, given: Any, pools: Mapping[str, Any], where: str) -> PhaseBody:
    options: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"pools": given}
    _known(f"{where}{phase}", options, {"pools"} | _TIMES)
    needs = options.pop("pools", None) or list(pools)
    needs = [needs] if isinstance(needs, str) else list(needs)
    for pool in needs:
        if pool not in pools:
            raise ValueError(f"{where}: phase {phase!r} needs pool {pool!r}, and the job has {', '.join(pools)}")
    return PhaseBody(name=phase, pools=needs, **options)


def _given(options: Any) -> set[str]:
    return set(options) if isinstance(options, Mapping) else set()


def _has_state(pool: str, given: Mapping[str, Any], hooked: Iterable[str]) -> bool:
    return bool(_STATE & given.keys()) or pool in set(hooked) or "*" in set(hooked)


def _only(given: Mapping[str, Any], keys: set[str]) -> dict[str, Any]:
    return {key: value for key, value in given.items() if key in keys and value is not None}


def _known(where: str, given: Mapping[str, Any], keys: set[str]) -> None:
    for key in given:
        if key not in keys:
            near = difflib.get_close_matches(key, keys, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(sorted(keys))}"
            raise TypeError(f"{where}: {key!r} is not a key; {hint}")
