"""A TRL run under FSDP, by TRL itself and then shared: ``accelerate launch --use_fsdp ... trl_fsdp.py JOB``.

Accelerate has FSDP for accelerators only, and makes DDP of it on CPUs without a word. So it is told here that CPUs do;
torch, which does the work, shards over gloo.
"""

import atexit
import hashlib
import os
import sys
from typing import Any

import torch
import trl
import trl_grpo
from accelerate import state
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

made = state.AcceleratorState.__init__


def on_cpus_too(self: Any, *args: Any, **more: Any) -> None:
    made(self, *args, **more)
    if more.get("fsdp_plugin") is not None:
        self.distributed_type = state.PartialState._shared_state["distributed_type"] = DistributedType.FSDP
        self.fsdp_plugin = more["fsdp_plugin"]


def trained(name: str, **more: Any) -> None:
    run = trl_grpo.trainer("high", name, max_steps=8, ddp_backend="gloo", **more)
    run.train()
    weights = run.model.state_dict()
    assert all(isinstance(one, DTensor) for one in weights.values())
    assert all(one.to_local().numel() < one.numel() for one in weights.values())
    told = hashlib.sha256()
    for one in weights.values():  # by all ranks at once: each has its shards
        told.update(one.full_tensor().numpy().tobytes())
    os.write(1, f"{name}: weights {told.hexdigest()}\n".encode())  # at once: another rank writes there, too


if __name__ == "__main__":
    torch.set_num_threads(1)
    state.AcceleratorState.__init__ = on_cpus_too
    trained("alone", kind=trl.GRPOTrainer)
    trained("shared", rollmux=dict(name=sys.argv[1], parking=True))
    torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()  # a fork that multiprocessing has started ends without
