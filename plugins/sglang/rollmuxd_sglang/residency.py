"""``SglangResidency``: parks by ``/pause_generation`` and ``/release_memory_occupation``, loads by
``/resume_memory_occupation`` and ``/continue_generation``, tag by tag.

SGLang does not report what it has released, and dies if it has to resume something else (its set of tags raises). So
the driver remembers its calls to each start of an engine. After a restart of the daemon, or a broken line, it uses what
the daemon knows of the state, else what is on the GPUs.
"""

import json
from collections.abc import Sequence
from typing import Any, ClassVar, Final

from msgspec import Struct

from rollmuxd.spi import ContactLost, DriverTraits, HostId, NotDone, OrderKind, Probed
from rollmuxd.spi.engines import ASK_S, Engine, EngineDriver, from_json
from rollmuxd.spi.options import Options

_KV_CACHE: Final = "kv_cache"
_ALL_TAGS: Final = ("weights", _KV_CACHE, "cuda_graph")
_WEIGHTS_FROM: Final = ("keep", "reload", "job")


class Told(Struct):
    """What an engine, of one start, got last; ``tags``: released; None: not known, or it failed half-way."""

    start: str
    tags: frozenset[str] | None = frozenset()


class SglangResidency(EngineDriver):
    """Moves SGLang servers. Options of a job's state, besides those of :class:`~rollmuxd.spi.engines.EngineDriver`:

    weights         "keep" (default; in host RAM). Or dropped, and loaded again from the model's files ("reload")
                    or from the job, when its phase has begun ("job")
    tags            what is released; default: weights, kv_cache, cuda_graph
    """

    name = "sglang"
    #: not idempotent: whether an engine was resumed before is not to be learnt from it
    traits = DriverTraits(idempotent=False, probes=True)
    own_options: ClassVar[tuple[str, ...]] = ("weights", "tags")
    default_url = "http://127.0.0.1:30000"
    #: (its /health generates a token, which a paused engine never does)
    presence = "/model_info"

    def __init__(self, **more: Any) -> None:
        super().__init__(**more)
        self._engines: dict[tuple[HostId, str], Told] = {}

    def check_own(self, options: Options) -> None:
        """Which values there are."""
        options.one_of("weights", "keep", _WEIGHTS_FROM)
        tags = options.texts("tags", _ALL_TAGS)
        if unknown := [tag for tag in tags if tag not in _ALL_TAGS]:
            raise ValueError(f"tags of driver sglang has {unknown[0]!r}; there are {', '.join(_ALL_TAGS)}")
        if not tags:
            raise ValueError("tags of driver sglang is empty: nothing would be released")

    # ---- the verbs --------------------------------------------------------------------------------------------------

    async def sleep(self, engine: Engine) -> None:
        """Pause with requests retracted (an engine that computes dies of being released), then release."""
        options = self.options(engine.order.state)
        info = await self._info(engine)
        _check_flags(engine, info, options.one_of("weights", "keep", _WEIGHTS_FROM))
        told = self._told_to(engine, info)
        there = [tag for tag in options.texts("tags", _ALL_TAGS) if tag not in (told.tags or ())]
        if not there:
            return
        await engine.call("POST", "/pause_generation", json={"mode": "retract"})
        released, told.tags = told.tags or frozenset(), None
        await engine.call("POST", "/release_memory_occupation", json={"tags": there})
        told.tags = released.union(there)

    async def wake(self, engine: Engine) -> None:
        """CUDA graphs and weights, their contents where they were dropped, the KV cache; then let it generate."""
        options = self.options(engine.order.state)
        weights = options.one_of("weights", "keep", _WEIGHTS_FROM)
        info = await self._info(engine)
        told = self._told_to(engine, info)
        released = await self._released(engine, told)
        for tags in (("cuda_graph", "weights"), (_KV_CACHE,)):
            away = [tag for tag in tags if tag in released]
            if away:
                await self._resume(engine, told, released, away)
                released -= set(away)
            if "weights" in away and weights == "reload":
                body = {"model_path": info["model_path"], "keep_pause": True}
                await engine.call("POST", "/update_weights_from_disk", json=body)
        await engine.call("POST", "/continue_generation", json={})
        told.tags = frozenset()

    async def drop(self, engine: Engine) -> None:
        """Release all: these weights are not wanted any more."""
        told = self._told_to(engine, await self._info(engine))
        there = [tag for tag in _ALL_TAGS if tag not in (told.tags or ())]
        if there:
            await engine.call("POST", "/pause_generation", json={"mode": "retract"}, limit_s=60)
            told.tags = None
            await engine.call("POST", "/release_memory_occupation", json={"tags": there}, limit_s=60)
            told.tags = frozenset(_ALL_TAGS)

    async def look(self, engine: Engine, kind: OrderKind) -> Probed:
        """Of a park: GPUs that have little on them have no engine's weights on them. Nothing else is certain."""
        await engine.call("GET", self.presence, limit_s=ASK_S)
        if kind is OrderKind.PARK and await self._is_off_its_gpus(engine):
            return Probed(known=True, done=True)
        return Probed(known=False)

    def started(self, engine: Engine) -> None:
        """A new one has released nothing."""
        self._engines.pop((engine.order.host, engine.url), None)

    # ---- what is known of an engine ---------------------------------------------------------------------------------

    def _told_to(self, engine: Engine, info: dict[str, Any]) -> Told:
        """What this start of the engine got; nothing, as far as is known, of one that was not met before."""
        start = json.dumps([info.get("startup_time"), info.get("launch_command")], sort_keys=True)
        key = (engine.order.host, engine.url)
        told = self._engines.get(key)
        if told is not None and told.start != start and told.tags and engine.order.kind is OrderKind.LOAD:
            del self._engines[key]
            raise NotDone(f"{engine} was started again while it was parked, and its state is lost: start the job again")
        if told is None or told.start != start:
            told = self._engines[key] = Told(start, None if engine.order.kind is OrderKind.LOAD else frozenset())
        return told

    async def _released(self, engine: Engine, told: Told) -> set[str]:
        """The tags that have to be resumed."""
        if told.tags is not None:
            return set(told.tags)
        tags = self.options(engine.order.state).texts("tags", _ALL_TAGS)
        # The daemon says "warm" of a state that it has seen parked and had not moved since.
        if engine.order.warm or await self._is_off_its_gpus(engine):
            return set(tags)
        return set()

    async def _resume(self, engine: Engine, told: Told, released: set[str], tags: Sequence[str]) -> None:
        told.tags = None
        try:
            await engine.call("POST", "/resume_memory_occupation", json={"tags": list(tags)})
        except NotDone as error:
            raise NotDone(f"{error}; what it has of its memory is not known now: start this engine again") from error
        told.tags = frozenset(released.difference(tags))

    async def _is_off_its_gpus(self, engine: Engine) -> bool:
        """Whether the GPUs have less on them than half of what lies between loaded and parked. Raises NotDone where
        the job does not say what it has there.
        """
        state = engine.order.state
        if state.gpu_mb <= state.residual_mb:
            raise NotDone(
                f"whether {engine} has released its memory is not known, and cannot be seen, since the job does not "
                "say how much it has (gpu_gb, residual_gb): start this engine again"
            )
        observation = await engine.order.backend.observe(engine.order.host)
        used = [seen.used_mb for seen in observation.gpus if seen.gpu in engine.order.gpus]
        return all(mb < (state.gpu_mb + state.residual_mb) / 2 for mb in used)

    @staticmethod
    async def _info(engine: Engine) -> dict[str, Any]:
        answer = await engine.call("GET", "/server_info", limit_s=None, missing="SGLang has it from 0.4.10 on")
        info = from_json(answer)
        if not isinstance(info, dict) or not {"enable_memory_saver", "model_path"} <= info.keys():
            raise ContactLost(f"{engine} answered /server_info as no SGLang does, which is not understood")
        engine.vouched = True
        return info


def _check_flags(engine: Engine, info: dict[str, Any], weights: str) -> None:
    """Refuse an engine that would answer 200 and free nothing, or lose its weights."""
    if info.get("enable_memory_saver") is not True:
        raise NotDone(f"{engine} was started without --enable-memory-saver: it would answer, and free nothing")
    if weights == "keep" and info.get("enable_weights_cpu_backup") is not True:
        raise NotDone(
            f"{engine} was started without --enable-weights-cpu-backup: its weights would be lost. Start it with that, "
            'or say weights="job" or weights="reload"'
        )
