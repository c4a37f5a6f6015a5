"""Everything but generation: calls of the framework to its engines, registration of replicas, and our own."""

import asyncio
from collections.abc import Collection
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from rollmuxd_gateway.app import App
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core.model import Replica, ReplicaStatus, RequestStatus
from rollmuxd_gateway.engines import Call
from rollmuxd_gateway.fronts import BadCall, number
from rollmuxd_gateway.net.upstream import CONTROL_S, Unreachable
from rollmuxd_gateway.settings import ReplicaSettings, Wrong

#: calls that go to every replica of the job
FANNED_OUT: Final = frozenset(
    (
        *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/reset_mm_cache", "/collective_rpc"),
        *("/init_weight_transfer_engine", "/start_weight_update", "/update_weights", "/finish_weight_update"),
        *("/update_weight_version", "/shutdown_weight_transfer_engine"),
        *("/abort_requests", "/inference/v1/abort_requests", "/abort_request"),
        *("/pause_generation", "/continue_generation", "/flush_cache"),
        *("/release_memory_occupation", "/resume_memory_occupation", "/init_weights_update_group"),
        *("/update_weights_from_disk", "/update_weights_from_tensor", "/update_weights_from_distributed"),
        *("/destroy_weights_update_group", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    )
)
#: after these a replica has other weights
_WEIGHTS: Final = frozenset(
    (
        *("/finish_weight_update", "/update_weights", "/update_weights_from_disk", "/update_weights_from_tensor"),
        *("/update_weights_from_distributed", "/update_weight_version"),
    )
)
#: these read weights from files: the same call brings the same weights to an engine that slept
_AGAIN: Final = frozenset(("/update_weights_from_disk", "/collective_rpc"))
#: these only prepare that
_BEFORE_WEIGHTS: Final = ("/init_weight_transfer_engine", "/start_weight_update", "/init_weights_update_group")
_ABORTS: Final = frozenset(("/abort_requests", "/inference/v1/abort_requests", "/abort_request"))
_PAUSES: Final = {"/pause": True, "/pause_generation": True, "/resume": False, "/continue_generation": False}
_WAKES: Final = ("/wake_up", "/resume_memory_occupation")
_SLEEPS: Final = ("/sleep", "/release_memory_occupation")
#: idempotent while we have the replica parked: the answer is 200, and nothing is sent
_OF_SLEEP: Final = frozenset((*_SLEEPS, "/pause", "/pause_generation", "/flush_cache"))
#: questions that one replica answers for all
_ASKED: Final = (
    "/v1/models",
    "/get_model_info",
    "/get_server_info",
    "/server_info",
    "/tokenize",
    "/detokenize",
    "/version",
)
_REGISTRATION: Final = ("/workers", "/add_worker", "/remove_worker", "/list_workers")


class Control:
    """Routes beside generation."""

    def __init__(self, app: App) -> None:
        self.app = app
        #: of each replica, how often weights without a version were written to it
        self._writes: dict[str, int] = {}

    @staticmethod
    def power(path: str) -> str:
        """Which key a call needs; empty: none."""
        if path in ("/healthz", "/health"):
            return ""
        if path.startswith(_REGISTRATION):
            return "registration"
        return "data" if path in _ASKED else "control"

    async def handle(
        self, method: str, path: str, query_text: str, query: dict[str, list[str]], body: bytes, hint: str
    ) -> tuple[int, Any]:
        """Status and body. Raises BadCall and Wrong for what cannot be meant."""
        match method, path:
            case "GET", "/healthz":
                return 200, {"status": "ok", "replicas": len(self.app.core.replicas)}
            case "GET", "/health":
                return self._health(hint)
            case "GET", "/rollmux/rollout":
                after = _whole(query, "after", -1)
                wait_ms = min(60_000, _whole(query, "wait_ms", 0))
                return 200, await self.app.follow(after, wait_ms / 1000)
            case "GET", "/rollmux/bars":
                return 200, {"bars": list(self.app.bars), "phases": getattr(self.app.own, "phases", {})}
            case "GET", "/rollmux/replicas":
                return 200, self.app.rollout()["replicas"]
            case "POST", _ if path.startswith("/rollmux/"):
                return await self._ours(path, _object(body))
            case _ if path.startswith(_REGISTRATION):
                return await self._workers(method, path, query, body)
            case _ if path in FANNED_OUT or path in ("/is_sleeping", "/is_paused", "/weight_info"):
                return await self._fan_out(method, path, query_text, body, hint)
            case _ if path in _ASKED:
                return await self._ask(method, path, query_text, body, hint)
        return 404, {"error": {"message": f"this gateway has no {method} {path[:100]}"}}

    def _health(self, hint: str) -> tuple[int, Any]:
        replica = self.app.core.replicas.get(hint)
        if hint and replica is None:
            return 404, {"error": {"message": f"there is no replica {hint[:100]}"}}
        dead = replica is not None and replica.status is ReplicaStatus.DEAD
        # One that we have parked is well: a monitor must not take it for dead.
        return (503, {"error": {"message": f"replica {hint} is dead"}}) if dead else (200, {})

    # ---- ours --------------------------------------------------------------------------------------------------------

    async def _ours(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        app, core = self.app, self.app.core
        match path:
            case "/rollmux/rollouts":
                if body.get("close"):
                    app.tell(i.CloseRollout())
                else:
                    gpus = None if body.get("gpus") is None else _names(body["gpus"], "gpus")
                    total = number(body, "total", 0, 0, 10**9)
                    if gpus is not None and not _has_replica(gpus, core.replicas.values()):
                        theirs = {one.id: list(one.gpus) for one in core.replicas.values()}
                        why = f"the slot's GPUs {list(gpus)} have no whole replica; replicas are on {theirs}"
                        return 409, {"error": {"message": why}}
                    app.tell(i.BeginRollout(total, gpus))
            case "/rollmux/shrink":
                app.tell(i.Shrink(_names(body.get("keep"), "keep")))
                verdict = core.last_verdict
                return 200, {} if verdict is None else msgspec.structs.asdict(verdict)
            case "/rollmux/grow":
                app.tell(i.Grow(_names(body.get("gpus"), "gpus")))
            case "/rollmux/stop":
                app.tell(i.Stop(str(body.get("reason") or "stopped")[:500]))
            case "/rollmux/moves":
                name, target = str(body.get("request") or ""), str(body.get("target") or "")
                known = core.requests.get(name)
                if known is None or known.status is not RequestStatus.RUNNING:
                    return 404, {"error": {"message": f"no request {name[:100]} is running"}}
                app.tell(i.Move(name, target))
            case "/rollmux/wake":
                gpus = None if body.get("gpus") is None else _names(body["gpus"], "gpus")
                return _moved(*await move_memory(app, gpus, asleep=False))
            case "/rollmux/park":
                return _moved(*await move_memory(app, None, asleep=True))
            case _:
                return 404, {"error": {"message": f"this gateway has no POST {path[:100]}"}}
        return 200, app.rollout()

    # ---- registration ------------------------------------------------------------------------------------------------

    async def _workers(self, method: str, path: str, query: dict[str, list[str]], body: bytes) -> tuple[int, Any]:
        replicas = self.app.core.replicas
        if path == "/list_workers":
            return 200, {"urls": [replica.url for replica in replicas.values()]}
        if path in ("/add_worker", "/remove_worker"):
            url = _first(query, "url", "")
            if path == "/add_worker":
                replica = await self.app.register(self.app.configured(url) or ReplicaSettings(url, "sglang"))
                return 200, {"status": "success", "id": replica.id}
            return self._remove(next((r.id for r in replicas.values() if r.url == url.rstrip("/")), ""))
        name = path.removeprefix("/workers").strip("/")
        match method:
            case "GET" if not name:
                found = [_worker(replica) for replica in replicas.values()]
                return 200, {"workers": found, "total": len(found)}
            case "GET" if name in replicas:
                return 200, _worker(replicas[name])
            case "POST" if not name:
                told = _object(body)
                url = str(told.get("url") or "")
                known = self.app.configured(url) or ReplicaSettings(url, "sglang")
                kind = told.get("engine") or told.get("runtime") or known.engine
                if kind not in ("vllm", "sglang"):
                    raise BadCall("engine has to be vllm or sglang")
                gpus = told.get("gpus")
                own = known.gpus if gpus is None else _names(gpus, "gpus")
                it = msgspec.structs.replace(known, engine=kind, gpus=own)
                replica = await self.app.register(it)
                return 202, {"worker_id": replica.id, **_worker(replica)}
            case "DELETE":
                return self._remove(name)
        return 404, {"error": {"message": f"there is no replica {name[:100]}"}}

    def _remove(self, name: str) -> tuple[int, Any]:
        if name not in self.app.core.replicas:
            return 404, {"error": {"message": f"there is no replica {name[:100]}"}}
        self.app.tell(i.Remove(name))
        return 202, {"status": "accepted", "worker_id": name}

    # ---- engines -----------------------------------------------------------------------------------------------------

    async def _ask(self, method: str, path: str, query: str, body: bytes, hint: str) -> tuple[int, Any]:
        replicas = self.app.core.replicas
        chosen = [replicas[hint]] if hint in replicas else list(replicas.values())
        awake = [r for r in chosen if r.status in (ReplicaStatus.OPEN, ReplicaStatus.DRAINING)] or chosen
        why = "there is no replica"
        for replica in awake:
            call = Call(method, path + (f"?{query}" if query else ""), msgspec.Raw(body) if body else None)
            try:
                return 200, await self.app.upstream.call(replica, call)
            except Unreachable as error:
                if 400 <= error.status < 500:
                    return error.status, error.body
                why = str(error)
        return 502, {"error": {"message": why}}

    async def _fan_out(self, method: str, path: str, query: str, body: bytes, hint: str) -> tuple[int, Any]:
        """To every replica that is used, or to the one that is named; 200 only if all said so."""
        app, replicas = self.app, self.app.core.replicas
        if hint and hint not in replicas:
            return 404, {"error": {"message": f"there is no replica {hint[:100]}"}}
        told = _object(body)
        names = _aborted(path, told) if path in _ABORTS else None
        if names is not None:  # engines know requests by our ids
            return 200, {"status": "aborted", "aborted": app.abort(names)}
        if not hint:
            await self._before(path, query, told)
        weights = _brings_weights(path, told)
        chosen = [replicas[hint]] if hint else self._used(asleep=not weights and path not in _BEFORE_WEIGHTS)
        if _PAUSES.get(path):  # before they are, so that silence is not taken for a stall
            app.tell(i.Paused(tuple(replica.id for replica in chosen), True))
        call = Call(method, path + (f"?{query}" if query else ""), msgspec.Raw(body) if body else None)

        async def ask(replica: Replica) -> tuple[Replica, int, bytes]:
            if path in _OF_SLEEP and _sleeps(replica):
                return replica, 200, b"{}"
            if weights and _sleeps(replica):
                return replica, 409, _said(f"replica {replica.id} is parked: it takes no weights before it is woken")
            try:
                return replica, 200, await app.upstream.call(replica, call, CONTROL_S)
            except Unreachable as error:
                return replica, error.status or 502, error.body or _said(str(error))

        answers = await asyncio.gather(*map(ask, chosen))
        done = tuple(replica.id for replica, status, _ in answers if status == 200)
        if path in _PAUSES and not _PAUSES[path]:
            app.tell(i.Paused(done, False))
        self._note_sleep(path, told.get("tags") or parse_qs(query).get("tags"), done)
        if weights and done:
            if path != "/update_weight_version":  # which is a name only
                app.written = call if path in _AGAIN and len(done) == len(answers) else None
            self._note_weights(told, done, "" if app.written else path)
        if len(answers) == 1:
            return answers[0][1:]
        if len(done) < len(answers) or not answers:
            wrong = ", ".join(f"{replica.id}: {status}" for replica, status, _ in answers if status != 200)
            why = f"{method} {path} was not done by all replicas: {wrong or 'there is none that is awake'}"
            return 502, {"error": {"message": why}}
        return 200, answers[0][2]

    async def _before(self, path: str, query: str, told: dict[str, Any]) -> None:
        """What a call to all engines means for what waits here, and for the rung."""
        core = self.app.core
        if path in _ABORTS:  # what waits here for an engine is aborted as engines do it with what waits there
            self.app.tell(i.Cancel((*core.again, *core.queue)))
        elif _PAUSES.get(path) and (told.get("mode") or _first(parse_qs(query), "mode", "abort")) == "abort":
            self.app.tell(i.Cancel(tuple(core.again)))
        elif path in _WAKES:
            await self.app.boundary()

    def _used(self, *, asleep: bool) -> list[Replica]:
        """The replicas of the rung that live, with those that sleep or without."""
        core = self.app.core
        found = [one for one in core.replicas.values() if one.status is not ReplicaStatus.DEAD and core.on_rung(one)]
        # Where all sleep, a call that needs one awake says so.
        return found if asleep else [one for one in found if not _sleeps(one)] or found

    def _note_weights(self, told: dict[str, Any], names: tuple[str, ...], once: str) -> None:
        """Replicas have new weights. Without a version it is counted, so that calls to each by itself end as equals."""
        version = str(told.get("weight_version") or told.get("version") or "")[:100]
        if not version:
            count = 1 + max(self._writes.get(name, 0) for name in names)
            asleep = [replica.id for replica in self.app.core.replicas.values() if _sleeps(replica)]
            for name in (*names, *asleep):  # what sleeps now ends as an equal of these once it is written to
                self._writes[name] = max(count, self._writes.get(name, 0))
            version = str(count)
        self.app.version = version
        self.app.tell(i.Weights(names, version, once))

    def _note_sleep(self, path: str, tags: Any, names: tuple[str, ...]) -> None:
        """The framework itself put engines to sleep, or woke them: the KV cache comes last."""
        for name in names:
            if path in _SLEEPS:
                self.app.tell(i.Parked(name, ok=True))
            elif path in _WAKES:
                self.app.tell(i.Woken(name, ok=True, whole=not tags or "kv_cache" in tags))


def _said(why: str) -> bytes:
    return msgspec.json.encode({"error": {"message": why}})


def _sleeps(replica: Replica) -> bool:
    """Whether it has no room for weights."""
    return replica.status is ReplicaStatus.PARKED and not replica.half_awake


async def move_memory(app: App, gpus: tuple[str, ...] | None, *, asleep: bool) -> tuple[list[str], list[str]]:
    """Wake the engines within these GPUs, or put all to sleep; returns what failed, and the replicas."""
    if not asleep:
        await app.boundary(gpus)
    chosen = [
        replica
        for replica in app.core.replicas.values()
        # what is thought to be dead may hold its GPU
        if (asleep or (replica.status is not ReplicaStatus.DEAD and app.core.on_rung(replica)))
        and (gpus is None or set(gpus).issuperset(replica.gpus))
    ]
    move = app.upstream.park if asleep else app.upstream.wake
    failed = [why for why in await asyncio.gather(*map(move, chosen)) if why]
    return failed, [replica.id for replica in chosen]


def _has_replica(gpus: tuple[str, ...], replicas: Collection[Replica]) -> bool:
    return not replicas or any(set(gpus).issuperset(replica.gpus) for replica in replicas)


def _moved(failed: list[str], names: list[str]) -> tuple[int, Any]:
    return (502, {"error": {"message": "; ".join(failed)}}) if failed else (200, {"replicas": names})


def _aborted(path: str, told: dict[str, Any]) -> tuple[str, ...] | None:
    """The requests that an abort names; None: all. Raises BadCall."""
    if path == "/abort_request":  # SGLang aborts nothing where it is given no name
        return None if told.get("abort_all") else (str(told.get("rid") or ""),)
    if told.get("request_ids") is not None:
        return _names(told["request_ids"], "request_ids")
    if path.startswith("/inference/"):
        raise BadCall("request_ids is missing: /abort_requests without ids aborts all")
    return None


def _brings_weights(path: str, told: dict[str, Any]) -> bool:
    """Whether engines have other weights after it. Of vLLM's remote calls one brings them, by default from its file."""
    return path in _WEIGHTS or (path == "/collective_rpc" and told.get("method") == "reload_weights")


def _worker(replica: Replica) -> dict[str, Any]:
    return {
        "id": replica.id,
        "url": replica.url,
        "worker_type": "regular",
        "runtime": replica.engine,
        "is_healthy": replica.status is not ReplicaStatus.DEAD,
        "load": len(replica.live),
        "status": replica.status.value,
        "gpus": list(replica.gpus),
    }


def _object(body: bytes) -> dict[str, Any]:
    try:
        told = msgspec.json.decode(body) if body.strip() else {}
    except (msgspec.DecodeError, RecursionError):
        raise BadCall("the body is no JSON") from None
    if not isinstance(told, dict):
        raise BadCall("the body has to be a JSON object")
    return told


def _names(value: Any, name: str) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > 10_000 or not all(isinstance(one, str) for one in value):
        raise BadCall(f"{name} has to be a list of names, such as host1/gpu0")
    return tuple(value)


def _first(query: dict[str, list[str]], name: str, default: str) -> str:
    return query.get(name, [default])[0]


def _whole(query: dict[str, list[str]], name: str, default: int) -> int:
    try:
        return int(_first(query, name, str(default)))
    except ValueError:
        raise BadCall(f"{name} has to be a whole number") from None


__all__ = ["Control", "Wrong"]
