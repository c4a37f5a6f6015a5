"""What runs of verl on a CPU are made of: a configuration, a data set, and what stands in for workers on GPUs.

A tiny torch model learns, and an engine generates with it. The engine has weights of its own and drops them when it
sleeps, as vLLM does at level 2: who generates asleep, or with weights that are not the trainer's, is an error here. No
trainer of verl's is imported: its workers never do that, either.
"""

import copy
import functools
import hashlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.nn.functional import log_softmax
from verl.utils import tensordict_utils as tu

WORDS, ANSWER = 16, 6


class Model(torch.nn.Module):
    """The next word from the one before it."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = torch.nn.Embedding(WORDS, 24)
        self.out = torch.nn.Linear(24, WORDS)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return log_softmax(self.out(torch.tanh(self.words(ids))), dim=-1)


class Engine:
    """Stands in for the replicas of an inference engine."""

    def __init__(self) -> None:
        self.weights: dict[str, torch.Tensor] | None = None
        self.model = Model(0)
        #: what was asked of it, with what ``watch`` said at it
        self.asked: list[tuple[str, Any]] = []
        self.watch: Callable[[], Any] = lambda: None

    def take(self, weights: dict[str, torch.Tensor]) -> None:
        """Weights from the trainer, which also wake it."""
        self.asked.append(("update", self.watch()))
        self.weights = {name: tensor.clone() for name, tensor in weights.items()}

    async def sleep(self) -> None:
        self.asked.append(("sleep", self.watch()))
        self.weights = None

    def generate(self, prompts: torch.Tensor, seed: int) -> torch.Tensor:
        self.asked.append(("generate", self.watch()))
        assert self.weights is not None, "the engine was asked to generate in its sleep"
        self.model.load_state_dict(self.weights)
        chance = torch.Generator().manual_seed(seed)
        made = prompts
        with torch.no_grad():
            for _ in range(ANSWER):
                next_word = torch.multinomial(self.model(made[:, -1]).exp(), 1, generator=chance)
                made = torch.cat([made, next_word], dim=1)
        return made[:, prompts.shape[1] :]


class Workers:
    """Stands in for a group of workers: actor, its optimizer, and the engine beside it."""

    def __init__(self, seed: int) -> None:
        self.model = Model(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)
        self.engine = Engine()
        self.asked: list[tuple[str, Any]] = []
        self.watch: Callable[[], Any] = lambda: None
        self._dispatch_info = {"actor": [0]}

    def init_model(self) -> None:
        self.asked.append(("init", self.watch()))

    def start_profile(self, **_: Any) -> None:
        raise AssertionError("nobody asked for a profile")

    def _logprobs(self, data: Any) -> torch.Tensor:
        """Of each next word, in the order of the words."""
        ids = data["input_ids"].values()
        return self.model(ids).gather(1, ids.roll(-1)[:, None]).squeeze(1)

    def compute_log_prob(self, data: Any) -> Any:
        self.asked.append(("log_prob", self.watch()))
        return self._told(data)

    def compute_ref_log_prob(self, data: Any) -> Any:
        self.asked.append(("ref", self.watch()))
        return self._told(data)

    def _told(self, data: Any) -> Any:
        with torch.no_grad():
            entropy = -(self.model(data["input_ids"].values()).exp() * self.model(data["input_ids"].values())).sum(-1)
            found = {"log_probs": self._logprobs(data), "entropy": entropy}
        return tu.get_tensordict(
            {
                name: torch.nested.nested_tensor_from_jagged(one, data["input_ids"].offsets())
                for name, one in found.items()
            },
            non_tensor_dict={"metrics": {"mfu": 0.0}},
        )

    def update_actor(self, data: Any) -> Any:
        from verl.workers.utils.padding import no_padding_2_padding

        self.asked.append(("update_actor", self.watch()))
        logprobs = no_padding_2_padding(self._logprobs(data), data)
        ratio = (logprobs - data["old_log_probs"]).exp()
        loss = -(ratio * data["advantages"] * data["response_mask"]).sum() / data["response_mask"].sum()
        self._learn(loss)
        return tu.get_tensordict({}, non_tensor_dict={"metrics": {"mfu": 0.0, "loss": float(loss.detach())}})

    def update_from_nested(self, data: Any) -> dict[str, Any]:
        """The same for the newer trainer, which pads nothing."""
        from verl.workers.utils.padding import response_from_nested

        self.asked.append(("update_actor", self.watch()))
        logprobs = torch.nested.nested_tensor_from_jagged(self._logprobs(data), data["input_ids"].offsets())
        ratio = (response_from_nested(logprobs, data["response_mask"]).values() - data["old_log_probs"].values()).exp()
        self._learn(-(ratio * data["advantages"].values()).mean())
        return {"metrics": {"mfu": [0.0]}}

    def _learn(self, loss: torch.Tensor) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def update_weights(self, global_steps: int | None = None, mode: str = "naive") -> list[None]:
        assert self.engine.weights is None, "verl: the rollout must be in sleep mode before weights are updated"
        self.engine.take(self.model.state_dict())
        return [None]

    def save_checkpoint(self, path: str, *_: Any, **__: Any) -> None:
        self.asked.append(("save", self.watch()))
        Path(path).mkdir(parents=True)
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, Path(path) / "all.pt")

    def load_checkpoint(self, path: str, **_: Any) -> None:
        self.asked.append(("load", self.watch()))
        saved = torch.load(Path(path) / "all.pt", weights_only=True)
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Questions(torch.utils.data.Dataset):
    """Which word is to be said; as verl's datasets give it."""

    def __init__(self, many: int) -> None:
        self.many = many

    def __len__(self) -> int:
        return self.many

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {
            "raw_prompt": (0, 1 + number % (WORDS - 1)),
            "dummy_tensor": torch.tensor([0]),
            "data_source": "tiny",
            "reward_model": {"ground_truth": ""},
            "extra_info": {"index": number},
        }


TOKENIZER = SimpleNamespace(eos_token_id=0, pad_token_id=0, decode=lambda ids, **_: " ".join(map(str, ids.tolist())))


@functools.cache
def composed(*more: str) -> Any:
    """verl's own configuration, with what a run on a CPU has different; ``more`` as on its command line."""
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose(
            "ppo_trainer",
            [
                "algorithm.adv_estimator=grpo",
                "data.train_batch_size=6",
                "data.val_batch_size=6",
                "data.dataloader_num_workers=0",
                "data.seed=1",
                # (At the end of an epoch verl resumes with the order of the first.)
                "data.shuffle=False",
                "actor_rollout_ref.rollout.n=4",
                "actor_rollout_ref.rollout.name=vllm",
                "actor_rollout_ref.rollout.agent.num_workers=1",
                "+actor_rollout_ref.rollout.agent.agent_loop_manager_class=verl_tiny.Agents",
                "actor_rollout_ref.actor.ppo_mini_batch_size=6",
                "actor_rollout_ref.actor.use_kl_loss=False",
                "trainer.device=cpu",
                "trainer.nnodes=1",
                "trainer.n_gpus_per_node=1",
                "trainer.logger=[]",
                "trainer.val_before_train=False",
                "trainer.test_freq=-1",
                "trainer.save_freq=-1",
                "trainer.total_epochs=1000",
                *more,
            ],
        )


def config(out: str, *more: str) -> Any:
    """The same with a folder for checkpoints; ``more`` is merged into it: to compose takes a third of a second."""
    made = copy.deepcopy(composed())
    OmegaConf.set_struct(made, False)
    made.merge_with_dotlist([f"trainer.default_local_dir={out}", *(one.removeprefix("+") for one in more)])
    OmegaConf.set_struct(made, True)
    return made


def reward(prompts: torch.Tensor, answers: torch.Tensor) -> torch.Tensor:
    """How much of an answer is the word that was asked for, at its end."""
    given = torch.zeros(answers.shape)
    given[:, -1] = (answers == prompts[:, -1:]).float().mean(1)
    return given


def digest(of: torch.nn.Module) -> str:
    """A checksum of the weights."""
    told = hashlib.sha256()
    for tensor in of.state_dict().values():
        told.update(tensor.cpu().contiguous().numpy().tobytes())
    return told.hexdigest()[:16]
