"""Into a ``torch.nn.Module``: each tensor is copied once, from the mapping to where the parameter is."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from rollmuxd_weights import safetensors
from rollmuxd_weights.store import mapped

_TORCH: Final = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
#: pinned memory that bytes pass on their way to a GPU. Small enough for a processor's cache; several, so that one fills
#: while others are sent
_STAGE: Final = 16 << 20
_STAGES: Final = 4
_STAGED: Final = ("cuda",)
#: a tensor of less is copied by every rank: a collective would take longer than the copy
_LEAST_GATHERED: Final = 1 << 20


def load_into(model: Any, path: str | os.PathLike[str], *, group: Any = None) -> None:
    """Copy a version into a module's parameters and buffers, by name, wherever they are.

    ``group``: a process group of ``torch.distributed``. Its ranks (one for each GPU of this host) load the same version
    into the same model together. Then each copies only its part from host memory, and the parts are gathered between
    the GPUs. None: this process copies everything.

    Raises ValueError if names or shapes differ, before anything is copied. Types may differ; torch converts.
    """
    import torch

    into = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers(remove_duplicate=False))}
    wanted = set(model.state_dict())
    found = dict(tensors(path))
    if wanted - found.keys() or found.keys() - into.keys():
        missing, stray = sorted(wanted - found.keys())[:3], sorted(found.keys() - into.keys())[:3]
        raise ValueError(
            f"{path} is of another model: it lacks {missing or 'nothing'}, and has {stray or 'nothing'} more"
        )
    for name, tensor in found.items():
        if tensor.shape != into[name].shape:
            raise ValueError(f"{path} has {name} as {tuple(tensor.shape)}, and the model as {tuple(into[name].shape)}")
    with torch.no_grad():
        stages: dict[Any, _Stages] = {}
        for name, tensor in found.items():
            target = into[name]
            if target.dtype != tensor.dtype or not target.is_contiguous():
                target.copy_(tensor)
                continue
            if target.device not in stages:
                stages[target.device] = _Stages(target.device)
            _copy(_bytes(target), _bytes(tensor), stages[target.device], group)
        for stage in stages.values():
            stage.finish()


def _copy(into: Any, source: Any, stage: "_Stages", group: Any) -> None:
    """Bytes of one tensor; of a group's rank only its part, and the rest from the other ranks."""
    if group is None or len(source) < _LEAST_GATHERED:
        stage.copy(into, source)
        return
    import torch.distributed as dist

    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    part = len(source) // ranks
    whole, mine = slice(part * ranks), slice(part * rank, part * (rank + 1))
    stage.copy(into[mine], source[mine])
    dist.all_gather_into_tensor(into[whole], into[mine], group=group)
    stage.copy(into[part * ranks :], source[part * ranks :])


class _Stages:
    """Copies flat bytes to one device: on a GPU through pinned memory, so that they travel as fast as it allows.

    The mapping itself is not pinned: to pin pages takes far longer than to send them, and each version has new ones.
    """

    def __init__(self, device: Any) -> None:
        import torch

        self._device, self._at, self._used = device, 0, 0
        self._parts = [
            torch.empty(_STAGE, dtype=torch.uint8, pin_memory=device.type == "cuda")
            for _ in range(_STAGES if device.type in _STAGED else 0)
        ]
        self._sent: list[Any] = [None] * len(self._parts)

    def copy(self, into: Any, source: Any) -> None:
        if not self._parts:
            into.copy_(source)
            return
        at = 0
        while at < len(source):
            if self._used == _STAGE:
                self._next()
            size = min(len(source) - at, _STAGE - self._used)
            staged = self._parts[self._at][self._used : self._used + size]
            staged.copy_(source[at : at + size])
            into[at : at + size].copy_(staged, non_blocking=True)
            at, self._used = at + size, self._used + size

    def _next(self) -> None:
        """Continue with the next part, once what it held was sent."""
        import torch

        if self._device.type == "cuda":
            self._sent[self._at] = torch.cuda.current_stream(self._device).record_event()
        self._at, self._used = (self._at + 1) % len(self._parts), 0
        if self._sent[self._at] is not None:
            self._sent[self._at].synchronize()

    def finish(self) -> None:
        """Return when all of it is there."""
        import torch

        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _bytes(tensor: Any) -> Any:
    """A contiguous tensor as flat bytes, without a copy."""
    import torch

    return tensor.detach().reshape(-1).view(torch.uint8)


def tensors(path: str | os.PathLike[str]) -> Iterator[tuple[str, Any]]:
    """Return names and tensors of a version. The tensors are views of the file: copy them, and do not write."""
    import warnings

    import torch

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        for name, one, body in safetensors.tensors(mapped(Path(path))):
            dtype = getattr(torch, _TORCH[one.dtype])
            flat = torch.frombuffer(body, dtype=dtype) if len(body) else torch.empty(0, dtype=dtype)
            yield name, flat.reshape(one.shape)
