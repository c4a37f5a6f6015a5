"""A server that answers, releases, resumes and dies as SGLang 0.5.23 does, without a GPU: for tests.

Written from SGLang's own sources (``srt/entrypoints/http_server.py``, ``srt/managers/scheduler_components/
weight_updater.py``). Its oddities are kept: without the memory saver release and resume answer 200 and do nothing; to
release an engine that computes, or to resume a tag that was not released, ends its process.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from fake_engines import FakeEngine, Query, Reply

_ALL = ("kv_cache", "weights", "cuda_graph")


class FakeSglang(FakeEngine):
    """One engine on one GPU."""

    _starts: ClassVar = itertools.count(1)

    def __init__(
        self,
        *,
        weights_mb: int = 6_000,
        kv_cache_mb: int = 10_000,
        cuda_graph_mb: int = 500,
        context_mb: int = 1_500,
        memory_saver: bool = True,
        cpu_backup: bool = True,
        **more: Any,
    ) -> None:
        super().__init__(**more)
        self.sizes = {"weights": weights_mb, "kv_cache": kv_cache_mb, "cuda_graph": cuda_graph_mb}
        self.context_mb = context_mb
        #: --enable-memory-saver, --enable-weights-cpu-backup
        self.memory_saver, self.cpu_backup = memory_saver, cpu_backup
        self.missing_reply = {"detail": "Not Found"}
        self.born()

    def born(self) -> None:
        """Started: awake, idle, with the weights of the model's files."""
        self.start_number = next(self._starts)
        self.offload_tags: set[str] = set()
        self.unmapped: set[str] = set()
        self.paused = False
        #: requests that are computed, and that wait
        self.running_requests = 0
        self.waiting_requests = 0
        self.weights = "file"
        self.backup: str | None = None

    def train(self) -> None:
        """The job sends weights."""
        if "weights" not in self.unmapped:
            self.weights = "trained"

    def generate(self) -> str:
        """What a request would be answered from. RuntimeError where it cannot run."""
        if self.paused or self.unmapped or not self.running:
            raise RuntimeError("it does not run")
        return self.weights

    def used_mb(self) -> int:
        """Of its process, on its GPU."""
        return self.context_mb + sum(mb for tag, mb in self.sizes.items() if tag not in self.unmapped)

    def steps(self, call: str, query: Query, body: Any) -> tuple[Sequence[Callable[[], None]], Callable[[], Reply]]:
        """As the routes of SGLang."""
        match call:
            case "GET /health":
                return (), lambda: (503 if self.paused else 200, "")
            case "GET /model_info":
                return (), lambda: (200, {"model_path": "/models/m", "is_generation": True})
            case "GET /server_info":
                return (), lambda: (200, self._info())
            case "POST /pause_generation":
                return (lambda: self._pause(body["mode"]),), lambda: (
                    200,
                    {"message": "Generation paused", "status": "ok"},
                )
            case "POST /continue_generation":
                return (self._continue,), lambda: (200, {"message": "Generation continued", "status": "ok"})
            case "POST /release_memory_occupation":
                return self._release(body.get("tags") or _ALL), lambda: (200, None)
            case "POST /resume_memory_occupation":
                return self._resume(body.get("tags") or _ALL), lambda: (200, None)
            case "POST /update_weights_from_disk":
                return (lambda: self._update(body["model_path"]),), lambda: (200, {"success": True, "message": "ok"})
        raise LookupError

    def _info(self) -> dict[str, Any]:
        return {
            "model_path": "/models/m",
            "enable_memory_saver": self.memory_saver,
            "enable_weights_cpu_backup": self.cpu_backup,
            "startup_time": {"total": float(self.start_number)},
            "launch_command": ["sglang", "serve"],
            "version": "0.5.23",
        }

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "retract":
            self.waiting_requests += self.running_requests
        if mode != "in_place":
            self.running_requests = 0

    def _continue(self) -> None:
        self.paused = False
        self.running_requests, self.waiting_requests = self.waiting_requests, 0

    def _release(self, tags: Sequence[str]) -> list[Callable[[], None]]:
        def idle() -> None:
            if self.running_requests or (self.waiting_requests and not self.paused):
                raise SystemExit  # "release_memory_occupation should be called only when server is idle."
            self.offload_tags.update(tags)

        def pause(tag: str) -> Callable[[], None]:
            def step() -> None:
                if not self.memory_saver:
                    return
                if tag == "weights" and tag not in self.unmapped:
                    self.backup = self.weights if self.cpu_backup else None
                    self.weights = "garbage"
                self.unmapped.add(tag)

            return step

        return [idle, *(pause(tag) for tag in _ALL if tag in tags)]

    def _resume(self, tags: Sequence[str]) -> list[Callable[[], None]]:
        def known() -> None:
            for tag in tags:
                if tag not in self.offload_tags:
                    raise SystemExit  # KeyError in the scheduler, which takes the server with it
                self.offload_tags.remove(tag)

        def resume(tag: str) -> Callable[[], None]:
            def step() -> None:
                self.unmapped.discard(tag)
                if tag == "weights" and self.backup is not None:
                    self.weights, self.backup = self.backup, None

            return step

        return [known, *(resume(tag) for tag in reversed(_ALL) if tag in tags)]

    def _update(self, path: str) -> None:
        if "weights" in self.unmapped:
            raise SystemExit
        self.weights = "file" if path == "/models/m" else "other"
