"""For hooks of which each rank runs one, next to torch: the ranks' store, and when a rank's GPUs rest."""

import os

import torch


def store() -> torch.distributed.TCPStore:
    """The store over which this process group was made: one more line to it, which no collective is waiting on.

    Raises ValueError where the environment does not name one.
    """
    try:
        host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except KeyError as missing:
        raise ValueError(
            f"{missing} is not in the environment: start the ranks with torchrun or accelerate launch, or give "
            "rollmux=dict(store=...), a torch.distributed store that all of them reach"
        ) from missing
    return torch.distributed.TCPStore(host, port, is_master=False)


def settle() -> None:
    """Return when what was launched on this process's GPUs is through: on all of them that it has memory on.

    (On any other one, to wait would make a context there, which keeps half a GB.)
    """
    for index in range(torch.cuda.device_count() if torch.cuda.is_initialized() else 0):
        if torch.cuda.memory_reserved(index):
            torch.cuda.synchronize(index)
