"""A worker of verl's as an actor of a Ray, with the model and the engine of ``verl_tiny_parts``, and who calls it.

It is made, placed and called by verl's own ``RayWorkerGroup``; it writes down when it was on its GPU.
"""

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ray
import torch
import verl_tiny_parts as parts
from tensordict import TensorDict
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils import tensordict_utils as tu

ACTOR = make_nd_compute_dataproto_dispatch_fn(mesh_name="actor")


class TinyWorker(Worker):
    """In place of ``ActorRolloutRefWorker``, with the engine beside it."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()
        torch.set_num_threads(1)
        self.tiny = parts.Workers(config.tiny.seed)
        self.record = Path(config.tiny.out) / "record.jsonl"
        self._register_dispatch_collect_info("actor", dp_rank=self.rank, is_collect=True)

    @contextlib.contextmanager
    def _on_gpu(self, what: str) -> Iterator[None]:
        (gpu,) = ray.get_gpu_ids()
        begun = time.monotonic_ns()
        yield
        told = {"job": os.environ.get("ROLLMUX_JOB"), "what": what, "gpu": str(gpu), "pid": os.getpid(), "begun": begun}
        with self.record.open("a") as file:
            file.write(json.dumps({**told, "left": time.monotonic_ns()}) + "\n")

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        with self._on_gpu("init"):
            self.tiny.init_model()

    @register(dispatch_mode=ACTOR)
    def compute_log_prob(self, data: TensorDict) -> TensorDict:
        with self._on_gpu("log_prob"):
            return self.tiny.compute_log_prob(data)

    @register(dispatch_mode=ACTOR)
    def update_actor(self, data: TensorDict) -> TensorDict:
        with self._on_gpu("update_actor"):
            return tu.get_tensordict({}, non_tensor_dict=self.tiny.update_from_nested(data))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def update_weights(self, global_steps: int | None = None, mode: str = "naive") -> None:
        with self._on_gpu("update_weights"):
            self.tiny.update_weights(global_steps, mode)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generate(self, prompts: torch.Tensor, seed: int) -> torch.Tensor:
        with self._on_gpu("generate"):
            return self.tiny.engine.generate(prompts, seed)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    async def sleep(self) -> None:
        with self._on_gpu("sleep"):
            await self.tiny.engine.sleep()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def told(self) -> dict[str, Any]:
        """Its weights, and whether it has loaded more than a worker needs."""
        return {"weights": parts.digest(self.tiny.model), "trainers": "verl.trainer.ppo.ray_trainer" in sys.modules}


class Engine:
    """The engine in the group's only worker, as a replica and as a client."""

    def __init__(self, group: Any) -> None:
        self.group = group

    async def sleep(self) -> None:
        self.group.sleep()

    def generate(self, prompts: torch.Tensor, seed: int) -> torch.Tensor:
        (answers,) = self.group.generate(prompts, seed)
        assert isinstance(answers, torch.Tensor)
        return answers


class Servers:
    """In place of ``LLMServerManager``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @classmethod
    def create(cls, config: Any, worker_group: Any, **_: Any) -> "Servers":
        return cls(Engine(worker_group))

    def get_client(self) -> Engine:
        return self.engine

    def get_replicas(self) -> list[Engine]:
        return [self.engine]
