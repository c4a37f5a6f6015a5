"""Suspending NCCL's communicators while a state is parked: what they keep on a GPU is freed, they themselves stay.

A communicator keeps hundreds of MB to several GB on each GPU. With torch 2.13 and NCCL 2.29.7 a process group can give
that back and take it again (``suspend``, ``resume``), in milliseconds. Every rank has to do it, and none may be in a
collective: parks are sent to all ranks of a job, between its phases. (Read from the sources of torch and tried with
stand-ins: on NCCL itself this was not run yet.)
"""

from collections.abc import Iterator
from typing import Any

import torch


def supported() -> bool:
    """Whether this torch knows how; whether its NCCL does is seen in the first park."""
    if not torch.distributed.is_available():
        return False
    from torch._C import _distributed_c10d

    return hasattr(_distributed_c10d.Backend, "suspend")


def suspend(device: torch.device) -> list[Any]:
    """Suspend all communicators on such devices; returns them, to be resumed. On a RuntimeError none is."""
    done: list[Any] = []
    try:
        for backend in _backends(device):
            backend.suspend()
            done.append(backend)
    except RuntimeError:
        resume(done)
        raise
    return done


def resume(suspended: list[Any]) -> None:
    """Have them as they were; those that were are taken off the list. Raises RuntimeError for one that cannot be."""
    while suspended:
        suspended[0].resume()
        del suspended[0]


def _backends(device: torch.device) -> Iterator[Any]:
    """What moves tensors of such devices in each process group of this process; gloo has nothing on a device."""
    if device.type == "cpu" or not torch.distributed.is_initialized():
        return
    seen: list[Any] = []
    for group in list(torch.distributed.distributed_c10d._world.pg_map):  # noqa: SLF001  (nothing public lists them)
        if device.type not in {kind.type for kind in group._device_types}:  # noqa: SLF001
            continue
        backend = group._get_backend(torch.device(device.type))  # noqa: SLF001
        if backend not in seen:
            seen.append(backend)
            yield backend
