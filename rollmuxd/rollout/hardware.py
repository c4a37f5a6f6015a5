"""GPUs: peak figures, each with its source. What an engine gets of a peak is in :class:`~.engine.Tuning`."""

from typing import Final

from msgspec import Struct

#: by number of GPUs: an all-reduce's constant seconds, and its GB/s per GPU on NVLink of 900 GB/s. Fitted to
#: aiconfigurator's tables for H100, in captured graphs
NVLINK_ALL_REDUCE_S: Final = 4.6e-6
NVLINK_ALL_REDUCE_GB_S: Final = {2: 137.0, 4: 80.0, 8: 72.0}
#: the same without NVLink. Assumed: no public table was found
PCIE_ALL_REDUCE_S: Final = 20e-6
PCIE_ALL_REDUCE_GB_S: Final = 25.0


class Gpu(Struct, frozen=True):
    """One type of GPU."""

    name: str
    #: GB (1e9 bytes), GB/s
    memory_gb: float
    memory_gb_s: float
    #: dense BF16
    tflops: float
    #: both directions together, GB/s; 0: PCIe only
    nvlink_gb_s: float
    source: str

    def all_reduce(self, tp: int) -> tuple[float, float]:
        """Of an all-reduce among ``tp`` GPUs of one node: latency in seconds, and bytes per second beyond it."""
        if not self.nvlink_gb_s:
            return PCIE_ALL_REDUCE_S, PCIE_ALL_REDUCE_GB_S * 1e9
        degree = next((known for known in NVLINK_ALL_REDUCE_GB_S if tp <= known), 8)
        return NVLINK_ALL_REDUCE_S, NVLINK_ALL_REDUCE_GB_S[degree] * self.nvlink_gb_s / 900 * 1e9


_KNOWN: Final = (
    Gpu("h20", 96, 4000, 148, 900, "memory and BF16: RollMux (arXiv 2512.11306) table 1; NVLink: vendor family"),
    Gpu("h800", 80, 3350, 989.5, 400, "memory and BF16: RollMux table 1; NVLink: commonly quoted, not verified"),
    Gpu("h100", 80, 3350, 989.5, 900, "NVIDIA H100 SXM data sheet"),
    Gpu("h200", 141, 4800, 989.5, 900, "NVIDIA H200 SXM data sheet"),
    Gpu("a800", 80, 2039, 312, 400, "NVIDIA A100 80GB SXM data sheet; NVLink: commonly quoted, not verified"),
    Gpu("a100", 80, 2039, 312, 600, "NVIDIA A100 80GB SXM data sheet"),
    Gpu("rtx-pro-6000", 96, 1597, 440, 0, "memory: LLMServingSim's configuration; BF16: assumed"),
    Gpu("rtx-4090", 24, 1008, 165, 0, "NVIDIA Ada white paper"),
)
GPUS: Final = {gpu.name: gpu for gpu in _KNOWN}


def gpu(name: str) -> Gpu:
    """The type of this name, in any case.

    Raises:
        ValueError: it is not known; the message lists what is.
    """
    found = GPUS.get(name.lower())
    if found is None:
        raise ValueError(f"no figures are known for GPU {name!r}; known are {', '.join(GPUS)}")
    return found
