"""Finding and copying the memory of torch tensors, storage by storage.

A *storage* is the memory under one or many tensors. Taking it away and giving it back (``resize_``) touches no tensor,
so that whatever shared it still shares it, also what we do not know.
"""

import contextlib
import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from typing import Any, Final

import torch

#: Host memory is taken in pieces of this size. torch rounds pinned memory up to a power of two: one piece of 40 GB
#: would waste 24 GB.
PIECE: Final = 256 * 2**20
#: Storages begin at multiples of this in host memory: copies between aligned addresses are faster.
_ALIGNED: Final = 512


class TorchStateError(RuntimeError):
    """A state cannot be moved. Says which part of it, and what to do."""


@dataclass
class Kept:
    """A storage: of which part it is, how large, whether its bytes are kept, and where they lie in host memory."""

    part: str
    storage: torch.UntypedStorage
    nbytes: int
    keep: bool
    host: list[torch.Tensor] = field(default_factory=list)

    @property
    def device(self) -> torch.device:
        return self.storage.device


def default_device() -> torch.device:
    """The accelerator, where there is one; else the CPU."""
    if hasattr(torch, "accelerator") and torch.accelerator.is_available():
        accelerator = torch.accelerator.current_accelerator()
        assert accelerator is not None
        return torch.device(accelerator.type)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


# ---- finding ---------------------------------------------------------------------------------------------------------


def survey(parts: Iterable[tuple[str, Any, bool]], device: torch.device) -> list[Kept]:
    """Every storage on the device under the parts (name, what, whether it is kept), once, in the order of the parts.

    A storage of several parts is kept if one of them is.
    """
    found: dict[tuple[torch.device, int], Kept] = {}
    for name, part, keep in parts:
        for tensor in tensors(name, part):
            if tensor.device.type != device.type or device.index not in (None, tensor.device.index):
                continue
            storage = tensor.untyped_storage()
            if not storage.nbytes():  # other code has freed it (FSDP does, between its uses)
                continue
            key = (tensor.device, storage.data_ptr())
            if key not in found:
                _check_movable(name, storage)
                found[key] = Kept(name, storage, storage.nbytes(), keep)
            found[key].keep = found[key].keep or keep
    return list(found.values())


def reshard(what: Any) -> None:
    """Have FSDP modules give up what they have gathered, so that their shards are what they consist of.

    After a forward without a backward (generation, log-probabilities) the outermost ones keep all of their parameters,
    for a backward that does not come. Their shards would stay behind, and the gathered parameters would be moved in
    their place.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")  # (a program with such a module has imported it)
    if fsdp is None or not isinstance(what, torch.nn.Module):
        return
    for module in what.modules():
        if hasattr(fsdp, "FSDPModule") and isinstance(module, fsdp.FSDPModule):
            module.reshard()
        elif isinstance(module, fsdp.FullyShardedDataParallel):
            handle = module._handle  # noqa: SLF001  (nothing public does this)
            if handle is not None and handle.uses_sharded_strategy:
                fsdp._runtime_utils._reshard(module, handle, True)  # noqa: SLF001


def tensors(name: str, what: Any) -> Iterator[torch.Tensor]:
    """All tensors of a part, those inside tensor subclasses (a DTensor's local one) instead of these themselves."""
    if isinstance(what, torch.Tensor):
        yield from _plain(name, what)
    elif isinstance(what, torch.nn.Module):
        for tensor in (*what.parameters(), *what.buffers()):
            yield from _plain(name, tensor)
            if tensor.grad is not None:
                yield from _plain(name, tensor.grad)
    elif isinstance(what, torch.optim.Optimizer):
        yield from tensors(name, what.state)
        yield from tensors(name, [{k: v for k, v in group.items() if k != "params"} for group in what.param_groups])
    elif isinstance(what, Mapping):
        for value in what.values():
            yield from tensors(name, value)
    elif isinstance(what, (Sequence, AbstractSet)) and not isinstance(what, (str, bytes)):
        for value in what:
            yield from tensors(name, value)


def _plain(name: str, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    if torch.nn.parameter.is_lazy(tensor):
        return
    if hasattr(tensor, "__tensor_flatten__"):
        inside = [getattr(tensor, attribute) for attribute in tensor.__tensor_flatten__()[0]]
        for inner in inside:
            if isinstance(inner, torch.Tensor):  # (a DTensor has its mesh among them)
                yield from _plain(name, inner)
    elif tensor.layout == torch.strided:
        yield tensor
    elif tensor.layout == torch.sparse_coo:
        yield from (tensor._indices(), tensor._values())  # noqa: SLF001  (the public ones refuse what is not coalesced)
    else:
        raise TorchStateError(
            f"{name} has a tensor of layout {tensor.layout}, which cannot be moved; keep it out of it"
        )


def _check_movable(name: str, storage: torch.UntypedStorage) -> None:
    """Refuse memory that others have a hand on: it cannot be taken away under them."""
    shared = storage.device.type == "cpu" and storage.is_shared()  # (of CUDA storages torch says so of every one)
    if shared or not storage.resizable():
        raise TorchStateError(
            f"{name} has a tensor of {storage.nbytes()} bytes in memory that is not torch's own (from numpy, dlpack or "
            "another process); clone() it, or keep it out of the state"
        )


# ---- copying ---------------------------------------------------------------------------------------------------------


class HostMemory:
    """Host memory for parking: pieces that are pinned where that can be had, and kept for the next time."""

    def __init__(self, *, pin: bool, warn: Callable[[str], None]) -> None:
        self._pin = pin
        self._warn = warn
        self._pieces: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """Bytes taken."""
        return sum(piece.numel() for piece in self._pieces)

    def laid_out(self, kept: Sequence[Kept]) -> Iterator[Kept]:
        """Give each storage that is kept its place, one by one, taking memory as it goes. Pinning may then overlap with
        earlier copies. Raises RuntimeError when there is not enough of it.
        """
        total = sum(_aligned(one.nbytes) for one in kept if one.keep)
        del self._pieces[-(-total // PIECE) :]
        begin = 0
        for one in kept:
            if not one.keep:
                continue
            one.host = []
            at, end = begin, begin + one.nbytes
            while at < end:
                number, inside = divmod(at, PIECE)
                until = min(end, (number + 1) * PIECE)
                piece = self._piece(number, min(PIECE, total - number * PIECE))
                one.host.append(piece[inside : inside + until - at])
                at = until
            begin += _aligned(one.nbytes)
            yield one

    def free(self) -> None:
        """Give it all back."""
        self._pieces.clear()
        empty = getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)  # (newer than the oldest torch)
        if self._pin and empty is not None:
            empty()  # torch keeps pinned memory for itself until it is asked

    def _piece(self, number: int, nbytes: int) -> torch.Tensor:
        if number < len(self._pieces) and self._pieces[number].numel() >= nbytes:
            return self._pieces[number]
        piece = self._take(1 << (nbytes - 1).bit_length())
        self._pieces[number : number + 1] = [piece]
        return piece

    def _take(self, nbytes: int) -> torch.Tensor:
        if self._pin:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pin = False
                self._warn(first_line(error))
        return torch.empty(nbytes, dtype=torch.uint8)


def copy_out(kept: Sequence[Kept], host: HostMemory) -> None:
    """Copy what is kept to host memory, all devices at once, and wait until it is there. Frees nothing."""
    with _streams(devices(kept)) as on:
        for one in host.laid_out(kept):
            with on(one.device):
                for there, here in zip(one.host, _split(one), strict=True):
                    there.copy_(here, non_blocking=True)
        collect(devices(kept))  # while the copies run


def copy_in(kept: Sequence[Kept]) -> None:
    """Give all storages their memory again and copy their bytes back; what was not kept is zeros.

    Raises RuntimeError when there is no room, and has then taken none.
    """
    try:
        with _streams(devices(kept)) as on:
            for one in kept:
                one.storage.resize_(one.nbytes)
                with on(one.device):
                    if not one.keep:
                        _bytes_of(one.storage).zero_()
                    for there, here in zip(one.host, _split(one) if one.keep else (), strict=True):
                        here.copy_(there, non_blocking=True)
    except RuntimeError:
        free(kept)
        raise


def free(kept: Sequence[Kept]) -> None:
    """Take their memory from the storages, and from torch's cache back to the device."""
    on = devices(kept)
    synchronize(on)
    for one in kept:
        one.storage.resize_(0)
    for device in on:
        if device.type != "cpu":
            with torch.get_device_module(device).device(device):
                torch.get_device_module(device).empty_cache()


def collect(on: Sequence[torch.device]) -> None:
    """Free tensors in reference cycles, which hold memory too. Takes a tenth of a second beside torch."""
    if any(device.type != "cpu" for device in on):
        gc.collect()


def devices(kept: Sequence[Kept]) -> tuple[torch.device, ...]:
    """The devices of the storages, each once."""
    return tuple(dict.fromkeys(one.device for one in kept))


def synchronize(on: Sequence[torch.device]) -> None:
    """Wait for all work on these devices."""
    for device in on:
        if device.type != "cpu":
            torch.get_device_module(device).synchronize(device)


def first_line(error: BaseException) -> str:
    """What torch has to say, without its pages of advice."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _streams(on: Sequence[torch.device]) -> Iterator[Callable[[torch.device], contextlib.AbstractContextManager[Any]]]:
    """A stream of its own for each device, idle at the beginning and at the end; what it gives makes one current.

    Memory is taken outside of it, on the stream that the workload computes on: torch gives memory back to the stream
    that took it only.
    """
    synchronize(on)
    streams = {device: torch.get_device_module(device).Stream(device) for device in on if device.type != "cpu"}

    def current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
        if device not in streams:
            return contextlib.nullcontext()
        module = torch.get_device_module(device)
        streams[device].wait_stream(module.current_stream(device))
        return module.stream(streams[device])  # type: ignore[no-any-return]

    try:
        yield current
    finally:
        synchronize(on)


def _split(one: Kept) -> Iterator[torch.Tensor]:
    """The storage's bytes in parts, as they lie in host memory."""
    return iter(_bytes_of(one.storage).split([there.numel() for there in one.host]))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED
