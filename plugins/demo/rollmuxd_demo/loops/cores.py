"""Each fake GPU is a real CPU core: a process that holds a slot computes on the cores of its GPUs.

GPU number i is the i-th core this process was allowed at its start, counted round. So two jobs whose slots are on
different GPUs run side by side. Two jobs on one GPU would slow each other, as on a real one. Without GPUs (no
daemon), or where the system cannot pin, nothing happens.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

_CAN_PIN = hasattr(os, "sched_setaffinity")  # Linux
_ALLOWED = sorted(os.sched_getaffinity(0)) if _CAN_PIN else []


@contextmanager
def pinned(gpus: Sequence[str]) -> Iterator[None]:
    """Compute on the cores that stand for these GPUs (``mock/gpu0``) until the block is left."""
    if not gpus or not _CAN_PIN:
        yield
        return
    os.sched_setaffinity(0, {_core(gpu) for gpu in gpus})
    try:
        yield
    finally:
        os.sched_setaffinity(0, _ALLOWED)


def _core(gpu: str) -> int:
    number = re.search(r"\d+$", gpu)
    if number is None:
        raise ValueError(f"GPU id {gpu!r} does not end in a number, so it names no core")
    return _ALLOWED[int(number[0]) % len(_ALLOWED)]
