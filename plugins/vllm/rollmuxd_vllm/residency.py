"""``VllmResidency``: parks by ``POST /sleep``, loads by ``POST /wake_up``, tag by tag.

Sleep level 1 keeps the weights in host RAM. Level 2 drops them, so it needs a declared source of weights. Woken without
one, an engine computes with whatever is in its memory, and says nothing (vllm#29341, #21336). The level decides how an
engine is woken, also after a restart of the daemon. So the engine is asked (its gauge ``vllm:engine_sleep_state``). If
it does not tell, and its job has parks at both levels, it is not woken.
"""

from typing import Any, ClassVar, Final

from rollmuxd.spi import ContactLost, DriverTraits, HostId, NotDone, OrderKind, Probed, StateOrder, StateSpec
from rollmuxd.spi.engines import ASK_S, Engine, EngineDriver, from_json
from rollmuxd.spi.options import Options

NO_SLEEP_MODE: Final = (
    "vLLM has it only when started with --enable-sleep-mode and VLLM_SERVER_DEV_MODE=1 in its environment (these are "
    "unauthenticated: keep its port on the loopback)"
)
#: an engine has so long to tell how it was started; one that does not is put to sleep all the same
FLAGS_S: Final = 30.0
#: how a line of /metrics begins that says whether an engine is in a state of sleep, and the label that names the state
_GAUGE: Final = b"vllm:engine_sleep_state{"
_STATE: Final = b'sleep_state="'
#: what a wake-up begins with, and what comes last: the largest part, which must not be there while weights are loaded
_WEIGHTS, _KV_CACHE = "weights", "kv_cache"


class VllmResidency(EngineDriver):
    """Moves vLLM servers. Options of a job's state, besides those of :class:`~rollmuxd.spi.engines.EngineDriver`:

    level           1 (default): weights to host RAM; 2: dropped
    level.PHASE     another level for a park after that phase (``level.init = 1``)
    weights         where they come from after level 2: "reload" (from the model's files), or "job" (the job sends them
                    when its phase has begun)
    mode            what becomes of requests that run: "abort" (default), "wait" or "keep"
    """

    name = "vllm"
    #: an engine that sleeps is not put to sleep again, one that is awake is not woken: it is asked before
    traits = DriverTraits(idempotent=True, probes=True)
    own_options: ClassVar[tuple[str, ...]] = ("level", "weights", "mode")
    default_url = "http://127.0.0.1:8000"

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        #: engines whose flags were looked at
        self._looked_at: dict[tuple[HostId, str], None] = {}

    def more_options(self, state: StateSpec) -> tuple[str, ...]:
        """A level for each phase that is named."""
        return tuple(key for key, _ in state.options if key.startswith("level."))

    def check_own(self, options: Options) -> None:
        """Level 2 needs a source of weights."""
        weights = options.one_of("weights", "", ("", "reload", "job"))
        options.one_of("mode", "abort", ("abort", "wait", "keep"))
        if 2 in _levels(options) and not weights:
            raise ValueError(
                "level 2 of driver vllm drops the weights, and nothing is said of where they come from again: say "
                'weights="job" (the job sends them at the beginning of its phase) or weights="reload" (from the '
                "model's files), or level 1"
            )

    # ---- the verbs --------------------------------------------------------------------------------------------------

    async def sleep(self, engine: Engine) -> None:
        """``POST /sleep``, and see that it sleeps."""
        options = self.options(engine.order.state)
        level = _level_for(options, engine.order)
        await self._check_flags(engine)
        mode = options.one_of("mode", "abort", ("abort", "wait", "keep"))
        asleep_at = await self._state_of(engine) if await self._is_sleeping(engine) else None
        # Told another level in its sleep it would stay as it is, and say the other one from then on.
        if asleep_at in (None, level):
            await engine.call("POST", "/sleep", params={"level": level, "mode": mode}, missing=NO_SLEEP_MODE)
            if not await self._is_sleeping(engine):
                raise NotDone(f"{engine} answered /sleep, and does not sleep")

    async def wake(self, engine: Engine) -> None:
        """Weights, their contents where they were dropped, then the KV cache: and see that it is awake."""
        if not await self._is_sleeping(engine):
            return
        dropped = await self._level_slept(engine) == 2
        await self._wake_up(engine, _WEIGHTS)
        if dropped and self.options(engine.order.state).one_of("weights", "", ("", "reload", "job")) == "reload":
            await engine.call("POST", "/collective_rpc", json={"method": "reload_weights"}, missing=NO_SLEEP_MODE)
        await self._wake_up(engine, _KV_CACHE)
        if await self._is_sleeping(engine):
            raise NotDone(f"{engine} was woken with tags {_WEIGHTS} and {_KV_CACHE}, and still sleeps")

    async def drop(self, engine: Engine) -> None:
        """Level 2: these weights are not wanted any more."""
        await self._is_sleeping(engine, limit_s=ASK_S)  # only an engine gets an order
        await engine.call("POST", "/sleep", params={"level": 2, "mode": "abort"}, limit_s=60)

    async def look(self, engine: Engine, kind: OrderKind) -> Probed:
        """Awake or not is certain. Asleep is certain only where the engine says at which level, since it also calls a
        mere pause (of a sleep that failed half-way) sleeping.
        """
        asleep = await self._is_sleeping(engine, limit_s=ASK_S)
        if kind is OrderKind.LOAD:
            return Probed(known=True, done=not asleep, error=f"{engine} still sleeps" if asleep else "")
        if not asleep:
            return Probed(known=True, error=f"{engine} is awake")
        done = await self._state_of(engine) is not None
        return Probed(known=done, done=done)

    def started(self, engine: Engine) -> None:
        """Its flags were not seen."""
        self._looked_at.pop(_key(engine), None)

    # ---- how it is talked to ----------------------------------------------------------------------------------------

    async def _is_sleeping(self, engine: Engine, *, limit_s: float | None = None) -> bool:
        answer = await engine.call("GET", "/is_sleeping", limit_s=limit_s, missing=NO_SLEEP_MODE)
        told = from_json(answer)
        if not isinstance(told, dict) or not isinstance(told.get("is_sleeping"), bool):
            raise ContactLost(f"{engine} answered /is_sleeping as no vLLM does, which is not understood")
        engine.vouched = True
        return bool(told["is_sleeping"])

    @staticmethod
    async def _wake_up(engine: Engine, tag: str) -> None:
        try:
            await engine.call("POST", "/wake_up", params={"tags": tag}, missing=NO_SLEEP_MODE)
        except NotDone as error:
            # What it has mapped by now it may keep for ever (vllm#34600): no second try makes that better.
            raise NotDone(f"{error}; a wake-up that failed is not to be trusted: start this engine again") from error

    @staticmethod
    async def _state_of(engine: Engine) -> int | None:
        """The level at which the engine says that it sleeps; None: it is awake, or does not say."""
        try:
            answer = await engine.call("GET", "/metrics", limit_s=ASK_S)
        except (NotDone, ContactLost):
            return None
        # Of several engines behind one server all have to say the same.
        return {frozenset({b"weights_offloaded"}): 1, frozenset({b"discard_all"}): 2}.get(_states_in(answer.content))

    async def _level_slept(self, engine: Engine) -> int:
        level = await self._state_of(engine)
        if level is None:
            possible = _levels(self.options(engine.order.state))
            if len(possible) > 1:
                raise NotDone(
                    f"{engine} sleeps, and does not tell at which level: whether it has weights is not known; start it "
                    "again without --disable-log-stats, so that it can tell"
                )
            (level,) = possible
        if level == 2 and not self.options(engine.order.state).one_of("weights", "", ("", "reload", "job")):
            raise NotDone(f"{engine} sleeps at level 2, and the job names no source of weights: start it again")
        return level

    async def _check_flags(self, engine: Engine) -> None:
        """Refuse an engine that would answer 200 and free nothing; where it does not tell, the GPUs will."""
        if _key(engine) in self._looked_at:
            return
        await self._is_sleeping(engine, limit_s=ASK_S)  # has it these calls at all
        try:
            # The first time it collects much about its machine, which takes it seconds where that is busy.
            answer = await engine.call("GET", "/server_info", params={"config_format": "json"}, limit_s=FLAGS_S)
            enabled = from_json(answer)["vllm_config"]["model_config"]["enable_sleep_mode"]
        except (NotDone, ContactLost, LookupError, TypeError):
            return
        if enabled is False:
            raise NotDone(f"{engine} was started without --enable-sleep-mode: it would answer, and free nothing")
        self._looked_at[_key(engine)] = None


def _states_in(metrics: bytes) -> frozenset[bytes]:
    """The states of sleep that the gauge has at 1. Linear in the text: a job chooses what answers at its URL."""
    on = set()
    for line in metrics.split(b"\n"):
        if line.startswith(_GAUGE):
            labels, _, value = line.rpartition(b"}")
            _, named, rest = labels.rpartition(_STATE)
            if named and value.strip() in (b"1", b"1.0"):
                on.add(rest.partition(b'"')[0])
    return frozenset(on)


def _key(engine: Engine) -> tuple[HostId, str]:
    return (engine.order.host, engine.url)


def _levels(options: Options) -> set[int]:
    """All levels at which an engine may have been put to sleep."""
    named = [key for key in options if key.startswith("level.")]
    return {_level(options, key) for key in ("level", *named)} | ({1} if named else set())


def _level_for(options: Options, order: StateOrder) -> int:
    """The level for a park after the order's phase; where that is not known and it matters, one that loses nothing."""
    if f"level.{order.phase}" in options:
        return _level(options, f"level.{order.phase}")
    if not order.phase and len(_levels(options)) > 1:
        return 1
    return _level(options, "level")


def _level(options: Options, key: str) -> int:
    return options.one_of(key, 1, (1, 2))
