"""What shows a process its GPUs, and no others."""

from collections.abc import Sequence

from rollmuxd.core.ids import GpuId


def visible(gpus: Sequence[GpuId]) -> dict[str, str]:
    """The environment of a process that is to see these GPUs of its host (``host1/gpu0``)."""
    return {
        # By default CUDA counts the fastest first; the driver's tools, and so our ids, count by PCI bus.
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.rpartition("/gpu")[2] for gpu in gpus),
        "ROLLMUX_GPUS": ",".join(gpus),
    }
