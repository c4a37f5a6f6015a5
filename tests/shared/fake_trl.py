"""For tests of loops with ``vllm_mode="server"`` where there is no vLLM: ``FakeGeneration`` in place of TRL's.

    monkeypatch.setattr(trl.trainer.grpo_trainer, "VLLMGeneration", FakeGeneration)

A copy of the model stands for the server: it generates with the weights that it was sent last. Prompts of one call have
one length.
"""

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch


class FakeGeneration:
    """What TRL's trainer needs of ``VLLMGeneration``; ``asked`` has each call, with what ``watch`` said at it."""

    def __init__(self, *, model: Any, max_completion_length: int, **_: Any) -> None:
        self._source, self._limit = model, max_completion_length
        self._engine = copy.deepcopy(model)
        self.asked: list[tuple[str, Any]] = []
        self.watch: Callable[[], Any] = lambda: None
        self.vllm_client = SimpleNamespace(
            get_server_info=lambda: {"model_config": {"logprobs_mode": "processed_logprobs"}}
        )

    def sync_weights(self) -> None:
        """The server has the trainer's weights."""
        self.asked.append(("sync", self.watch()))
        self._engine.load_state_dict(self._source.state_dict())

    def generate(self, prompts: list[list[int]], **_: Any) -> tuple[None, list[list[int]], list[Any], None]:
        """One completion a prompt, with the log-probability of each token."""
        self.asked.append(("generate", self.watch()))
        ids = torch.tensor(prompts)
        with torch.no_grad():
            made = self._engine.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=True, max_new_tokens=self._limit
            )
            logprobs = self._engine(made).logits[:, ids.shape[1] - 1 : -1].log_softmax(-1)
        tokens = made[:, ids.shape[1] :]
        return None, tokens.tolist(), logprobs.gather(2, tokens[:, :, None]).tolist(), None
