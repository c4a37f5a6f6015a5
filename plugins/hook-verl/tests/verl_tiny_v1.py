"""The same run by verl's newer trainer, ``trainer.use_v1=True``, over the workers of ``verl_tiny``.

Real are the trainer (``PPOTrainerSync``) and its replay buffer. ``TransferQueue``, over which it and its workers
exchange what was generated, stands in too, as a dict of this process: the real one is a Ray service.
"""

import copy
import dataclasses
import importlib
import itertools
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import verl_tiny as tiny
from tensordict import NonTensorStack, TensorDict
from verl.utils import tensordict_utils as tu


@dataclasses.dataclass
class Batch:
    """In place of ``KVBatchMeta``: which rows."""

    keys: list[str] = dataclasses.field(default_factory=list)
    tags: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    partition_id: str | None = None
    fields: list[str] | None = None
    extra_info: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.keys)

    def reorder(self, order: list[int]) -> None:
        self.keys = [self.keys[place] for place in order]
        self.tags = [self.tags[place] for place in order]


class Queue(ModuleType):
    """In place of the module ``transfer_queue``."""

    KVBatchMeta = Batch

    def __init__(self) -> None:
        super().__init__("transfer_queue")
        self.rows: dict[str, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {}

    def kv_batch_put(self, keys: list[str], partition_id: str, tags: Any = None, fields: Any = None) -> Batch:
        part = self.rows.setdefault(partition_id, {})
        for number, key in enumerate(keys):
            tag, row = part.setdefault(key, ({}, {}))
            tag.update(tags[number] if tags else {})
            for name in fields.keys() if fields is not None else ():
                row[name] = fields[name][number]
        return Batch(list(keys), [copy.deepcopy(part[key][0]) for key in keys], partition_id)

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        rows = [self.rows[partition_id][key][1] for key in keys]
        found: dict[str, Any] = {}
        for name in select_fields:
            if name not in rows[0]:
                continue
            column = [row[name] for row in rows]
            if isinstance(column[0], torch.Tensor):
                found[name] = torch.nested.as_nested_tensor(column, layout=torch.jagged)
            else:
                found[name] = NonTensorStack(*[getattr(value, "data", value) for value in column])
        return TensorDict(found, batch_size=len(keys))

    def kv_list(self, partition_id: str | None = None) -> dict[str, dict[str, dict[str, Any]]]:
        return {part: {key: tag for key, (tag, _) in rows.items()} for part, rows in self.rows.items()}

    def kv_clear(self, keys: list[str], partition_id: str) -> None:
        for key in keys:
            self.rows[partition_id].pop(key, None)


class Workers(tiny.Workers):
    """Those of ``verl_tiny``, which find their work in the queue."""

    queue: Queue

    def _rows(self, batch: Batch, *fields: str) -> TensorDict:
        assert batch.partition_id is not None
        return self.queue.kv_batch_get(batch.keys, batch.partition_id, ["input_ids", *fields])

    def compute_log_prob(self, batch: Batch) -> Batch:
        assert batch.partition_id is not None
        self.asked.append(("log_prob", self.watch()))
        told = self._told(self._rows(batch))
        return self.queue.kv_batch_put(batch.keys, batch.partition_id, fields=told.select("log_probs", "entropy"))

    def save_model_to_cpu(self, key: int) -> None:
        self.asked.append(("copy", self.watch()))

    def update_actor(self, batch: Batch) -> dict[str, Any]:
        return self.update_from_nested(self._rows(batch, "old_log_probs", "advantages", "response_mask"))


class Group(tiny.Group):
    """In place of ``RayWorkerGroup``."""

    def spawn(self, prefix_set: Any) -> dict[str, tiny.Workers]:
        return dict.fromkeys(prefix_set, Workers(self.seed))


class Agents:
    """In place of ``AgentLoopManagerTQ``: has the engine generate, and puts it into the queue."""

    def __init__(self, queue: Any, engine: Any, n: int) -> None:
        self.queue, self.engine, self.n = queue, engine, n

    def generate_sequences(self, batch: TensorDict) -> None:
        validate = batch.get("validate", None) is not None
        part, many = ("val", 1) if validate else ("train", self.n)
        step = int(batch["global_steps"])
        prompts = torch.tensor([list(prompt) for prompt in batch["raw_prompt"]])
        for session in range(many):
            answers = self.engine.generate(prompts, seed=100 * step + session)
            fields = {
                "prompts": prompts,
                "responses": answers,
                "input_ids": torch.cat([prompts, answers], dim=1),
                "response_mask": torch.ones_like(answers),
                "rm_scores": tiny.reward(prompts, answers),
                "uid": list(batch["uid"]),
                "num_turns": [2] * len(prompts),
                "data_source": ["tiny"] * len(prompts),
            }
            tag = {"seq_len": 8, "min_global_steps": step, "max_global_steps": step, "status": "finished"}
            keys = [f"{uid}_{session}_0" for uid in batch["uid"]]
            self.queue.kv_batch_put(keys, part, tags=[tag] * len(keys), fields=tu.get_tensordict(fields))
        done = {"is_prompt": True, "status": "finished", "global_steps": step}
        self.queue.kv_batch_put(list(batch["uid"]), part, tags=[done] * len(prompts))


class Nothing:
    """In place of the ``LLMServerManager`` of a trainer without engines on its GPUs."""

    rollout_replicas: tuple[Any, ...] = ()
    server_addresses: tuple[str, ...] = ()

    def get_replicas(self) -> list[Any]:
        return []


class Apart:
    """In place of ``CheckpointEngineManager`` and ``LLMServerManager`` of engines on GPUs of their own."""

    server_addresses: tuple[str, ...] = ()

    def __init__(self, workers: Workers) -> None:
        self.workers = workers

    def get_replicas(self) -> list[Any]:
        return [self.workers.engine]

    def update_weights(self, step: int) -> dict[str, float]:
        self.workers.engine.take(self.workers.model.state_dict())
        return {}


def _apart(*, alone: bool) -> Any:
    """The trainer whose engines are on GPUs of their own, and these put out of the way, too."""
    from verl.trainer.ppo.v1 import trainer_base
    from verl.trainer.ppo.v1 import trainer_separate_async as theirs

    kind = trainer_base.TRAINER_REGISTRY["separate_async"]
    if alone:  # made once more, of verl's own base
        hooked = trainer_base.PPOTrainer
        del trainer_base.TRAINER_REGISTRY["separate_async"]
        trainer_base.PPOTrainer = hooked.theirs
        importlib.reload(theirs)
        trainer_base.PPOTrainer, trainer_base.TRAINER_REGISTRY["separate_async"] = hooked, kind
    theirs.logger.setLevel("WARNING")  # one message of 0.9.1 has an argument that logging does not know
    trainer_base.LLMServerManager = SimpleNamespace(create_empty=lambda **_: Nothing())
    theirs.LLMServerManager = SimpleNamespace(
        create=lambda **_: SimpleNamespace(get_replicas=list, server_addresses=())
    )
    theirs.CheckpointEngineManager = lambda actor_wg, **_: Apart(actor_wg)
    return theirs.PPOTrainerSeparateAsync if alone else kind


def trainer(out: str, *more: str, alone: bool = False) -> tuple[Any, Agents]:
    """A trainer, and who generates for it; ``alone`` without the hook."""
    tiny.stand_in()
    queue = Queue()
    sys.modules["transfer_queue"] = Workers.queue = queue
    from verl.trainer.ppo import v1
    from verl.trainer.ppo.v1 import replay_buffer, trainer_base

    trainer_base.tq = replay_buffer.tq = queue
    names = itertools.count()
    trainer_base.uuid = SimpleNamespace(uuid4=lambda: f"{next(names):08x}")  # which rows come first follows from these
    pool = object()
    trainer_base.ResourcePoolManager = lambda **_: SimpleNamespace(
        create_resource_pool=lambda: None,
        resource_pool_dict={"global_pool": pool},
        get_resource_pool=lambda _: pool,
        get_n_gpus=lambda: 1,
    )
    trainer_base.RayWorkerGroup = Group
    trainer_base.RewardLoopManager = lambda **_: SimpleNamespace(reward_loop_worker_handles=[])
    trainer_base.LLMServerManager = tiny.Servers
    trainer_base.create_rl_dataset = lambda *_, is_train, **__: tiny.Questions(24 if is_train else 6)
    settings = tiny.config(out, "actor_rollout_ref.rollout.calculate_log_probs=False", *more)
    kind = v1.get_trainer_cls(settings.trainer.v1.trainer_mode)
    if settings.trainer.v1.trainer_mode == "separate_async":
        kind = _apart(alone=alone)
    elif alone:
        kind = type("Alone", (kind.theirs,), {name: vars(kind)[name] for name in vars(kind) if name.startswith("on_")})
    made = kind(config=settings)
    made._init_tokenizer = lambda: vars(made).update(tokenizer=tiny.TOKENIZER, processor=None)
    made.init()
    return made, Agents(queue, made.actor_rollout_wg.engine, settings.actor_rollout_ref.rollout.n)
