"""Language models: what of their shape decides how long generation takes. From each model's ``config.json``."""

from typing import Any, Final

from msgspec import Struct


class Model(Struct, frozen=True):
    """One model, in 16-bit weights and KV cache."""

    name: str
    #: billions
    parameters_b: float
    layers: int
    hidden: int
    kv_heads: int
    head: int = 128
    #: billions of parameters that one token passes through; 0: all
    active_b: float = 0.0
    #: experts per layer, and how many a token is sent to; 0: dense
    experts: int = 0
    per_token: int = 0

    @property
    def weights(self) -> float:
        """Bytes."""
        return 2e9 * self.parameters_b

    @property
    def active(self) -> float:
        """Parameters that one token passes through."""
        return 1e9 * (self.active_b or self.parameters_b)

    @property
    def kv(self) -> float:
        """Bytes of KV cache per token."""
        return 4.0 * self.layers * self.kv_heads * self.head

    def touched(self, tokens: Any) -> Any:
        """Bytes of weights that a step over so many tokens reads: of the experts, those that a token is sent to.

        An array of token counts gives an array.
        """
        if not self.experts:
            return self.weights
        share = self.per_token / self.experts
        # all = rest + experts, and active = rest + share * experts
        experts = (self.weights - 2 * self.active) / (1 - share)
        return self.weights - experts * (1 - share) ** tokens


_KNOWN: Final = (
    Model("qwen2.5-0.5b", 0.49, 24, 896, 2, 64),
    Model("qwen2.5-1.5b", 1.54, 28, 1536, 2),
    Model("qwen2.5-3b", 3.09, 36, 2048, 2),
    Model("qwen2.5-7b", 7.62, 28, 3584, 4),
    Model("qwen2.5-14b", 14.77, 48, 5120, 8),
    Model("qwen2.5-32b", 32.76, 64, 5120, 8),
    Model("qwen2.5-72b", 72.71, 80, 8192, 8),
    Model("qwen3-1.7b", 2.03, 28, 2048, 8),
    Model("qwen3-4b", 4.02, 36, 2560, 8),
    Model("qwen3-8b", 8.19, 36, 4096, 8),
    Model("qwen3-14b", 14.77, 40, 5120, 8),
    Model("qwen3-32b", 32.76, 64, 5120, 8),
    Model("qwen3-30b-a3b", 30.53, 48, 2048, 4, active_b=3.35, experts=128, per_token=8),
    Model("qwen3-235b-a22b", 235.1, 94, 4096, 4, active_b=22.1, experts=128, per_token=8),
    Model("llama-3.1-8b", 8.03, 32, 4096, 8),
    Model("llama-3.1-70b", 70.55, 80, 8192, 8),
)
MODELS: Final = {model.name: model for model in _KNOWN}


def model(name: str) -> Model:
    """The model of this name, in any case.

    Raises:
        ValueError: it is not known; the message lists what is.
    """
    found = MODELS.get(name.lower())
    if found is None:
        raise ValueError(f"no figures are known for model {name!r}; known are {', '.join(MODELS)}")
    return found
