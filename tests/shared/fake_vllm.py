"""A server that answers, sleeps, wakes and goes wrong as vLLM 0.33.0 does, without a GPU: for tests of this driver, and
of training loops that talk to an engine.

Written from vLLM's own sources (``entrypoints/serve/dev/sleep``, ``v1/engine/core.py``, ``v1/executor/abstract.py``,
``v1/engine/async_llm.py``). Its oddities are kept: an engine that sleeps already answers a second ``/sleep`` with 200,
does nothing, and says the new level from then on; a wake-up of a tag that is awake answers 200; ``/is_sleeping`` is
true of one that is merely paused; and what is mapped is known to the workers, what sleeps to the executor, which
believes it of all of them or of none.
"""

from collections.abc import Callable, Sequence
from typing import Any

from fake_engines import FakeEngine, Query, Reply


class FakeVllm(FakeEngine):
    """One engine on one GPU: weights, KV cache, and what stays for as long as its process lives."""

    def __init__(
        self,
        *,
        weights_mb: int = 6_000,
        kv_cache_mb: int = 10_000,
        context_mb: int = 1_500,
        dev_mode: bool = True,
        sleep_mode: bool = True,
        stats: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.weights_mb, self.kv_cache_mb, self.context_mb = weights_mb, kv_cache_mb, context_mb
        #: VLLM_SERVER_DEV_MODE=1, --enable-sleep-mode, without --disable-log-stats
        self.dev_mode, self.sleep_mode, self.stats = dev_mode, sleep_mode, stats
        self.born()

    def born(self) -> None:
        """Started: awake, with the weights of the model's files."""
        #: as the executor believes, and as the workers have it
        self.sleeping: set[str] = set()
        self.unmapped: set[str] = set()
        self.paused = False
        self.gauge = "awake"
        self.backup: str | None = None
        #: which weights it computes with: from the model's "file", "trained", or "garbage" that nobody has written
        self.weights = "file"

    def train(self) -> None:
        """The job sends weights."""
        if "weights" not in self.unmapped:
            self.weights = "trained"

    def generate(self) -> str:
        """What a request would be answered from. RuntimeError where it cannot run."""
        if self.paused or self.sleeping or not self.running:
            raise RuntimeError("it does not run")
        return self.weights

    def used_mb(self) -> int:
        """Of its process, on its GPU."""
        weights = 0 if "weights" in self.unmapped else self.weights_mb
        return self.context_mb + weights + (0 if "kv_cache" in self.unmapped else self.kv_cache_mb)

    def steps(self, call: str, query: Query, body: Any) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        """As the routes of vLLM."""
        if call == "GET /health":
            return (), lambda: (200, "")
        if call == "GET /metrics":
            return (), lambda: (200, self._metrics())
        if call == "POST /v1/completions":
            choice = {"text": self.weights, "finish_reason": "stop"}
            return (self.generate,), lambda: (200, {"choices": [choice]})
        if not self.dev_mode:
            raise LookupError
        match call:
            case "GET /is_sleeping":
                return (), lambda: (200, {"is_sleeping": self.paused or bool(self.sleeping)})
            case "GET /server_info":
                config = {"vllm_config": {"model_config": {"enable_sleep_mode": self.sleep_mode}}}
                return (), lambda: (200, config)
            case "POST /sleep":
                return self._sleep(int(query.get("level", ["1"])[0]), query.get("mode", ["abort"])[0])
            case "POST /wake_up":
                return self._wake_up(query.get("tags"))
            case "POST /collective_rpc":
                return self._collective_rpc(body)
        raise LookupError

    def _sleep(self, level: int, mode: str) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        if not 0 <= level <= 2 or mode not in {"abort", "wait", "keep"}:
            return (), lambda: (400, {"error": {"message": "1 validation error", "code": 400}})
        do = self.sleep_mode and level > 0 and "weights" not in self.sleeping

        def pause() -> None:
            self.paused = True

        def weights() -> None:
            if do and "weights" not in self.unmapped:
                self.backup = self.weights if level == 1 else None
                self.weights = "garbage"
                self.unmapped.add("weights")

        def kv_cache() -> None:
            if do:
                self.unmapped.add("kv_cache")

        def say() -> None:
            if do or not self.sleep_mode:
                self.sleeping = {"weights", "kv_cache"} if level else self.sleeping
            self.gauge = {0: "paused", 1: "weights_offloaded", 2: "discard_all"}[level]

        return (pause, weights, kv_cache, say), lambda: (200, {"status": "sleeping", "level": level})

    def _wake_up(self, tags: list[str] | None) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        wanted = ["weights", "kv_cache"] if tags is None else tags
        do = all(tag in self.sleeping for tag in wanted) if tags is not None else True

        def wake(tag: str) -> Callable[[], None]:
            def step() -> None:
                if do:
                    self.unmapped.discard(tag)
                    if tag == "weights" and self.backup is not None:
                        self.weights, self.backup = self.backup, None

            return step

        def resume() -> None:
            if do:
                self.sleeping.difference_update(wanted)
            if not self.sleeping:
                self.paused, self.gauge = False, "awake"

        status = lambda: (200, {"status": "sleeping" if self.sleeping else "awake", "tags": tags})
        return (*map(wake, wanted), resume), status

    def _collective_rpc(self, body: Any) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        if not isinstance(body, dict) or body.get("method") != "reload_weights":
            return (), lambda: (400, {"error": {"message": "Missing 'method' in request body", "code": 400}})

        def reload() -> None:
            if "weights" in self.unmapped:
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            self.weights = "file"

        return (reload,), lambda: (200, {"results": [None]})

    def _metrics(self) -> str:
        if not self.stats:
            return "# HELP python_gc_objects_collected_total Objects collected during gc\n"
        return "# TYPE vllm:engine_sleep_state gauge\n" + "".join(
            f'vllm:engine_sleep_state{{engine="0",model_name="m",sleep_state="{state}"}} {float(state == self.gauge)}\n'
            for state in ("awake", "weights_offloaded", "discard_all")
        )
