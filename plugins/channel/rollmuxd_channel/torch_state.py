"""``TorchState``: moves what a torch workload keeps on its GPUs to host memory and back, for the channel's hooks.

    state = TorchState(actor=model, adam=optimizer, reference=Dropped(ref, refill=lambda: load_into(ref)))
    state.attach(job, pool="train")

What may be relied on:

- After a load every bit is as it was at the park, in the same tensors. What shared memory before (tied parameters,
  views, slices of a flat buffer) shares it afterwards: whole storages are moved, and no tensor is replaced.
- A park or a load is done whole or not at all. A park that fails has freed nothing. A load that fails (no room) gives
  back what it had taken, and can be ordered again.
- Ordered twice, it is done once.

What would surprise:

- A parked tensor still has its shape, and no memory: touching it between park and load ends the process, or gives
  garbage. The phases are what keeps a loop from doing so.
- Addresses differ after a load. What remembers addresses has to be made again, or must not be parked. Examples: a
  captured CUDA graph, memory registered with NCCL or RDMA, a tensor sent to another process.

Host memory is pinned where torch can pin it, and kept for the next park. Where torch knows no accelerator, tensors on
the CPU go the same way through ordinary memory.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import torch

from rollmuxd_channel import communicators as nccl
from rollmuxd_channel import storages
from rollmuxd_channel.storages import HostMemory, Kept, TorchStateError

__all__ = ["Dropped", "TorchState", "TorchStateError"]

log = logging.getLogger("rollmuxd.torch")

Place: TypeAlias = Literal["loaded", "parked", "gone"]


@dataclass(frozen=True)
class Dropped:
    """A part that is not kept: its memory is freed at a park, comes back as zeros, and is then filled by ``refill``.

    A module or an optimizer needs one: weights that are zeros compute nonsense without saying so.
    """

    what: Any
    refill: Callable[[], object] | None = None


class TorchState:
    """What one process keeps on its GPUs for a pool, by names of the user's choice.

    A part is a module (its parameters, buffers and gradients), an optimizer (its state), a tensor, or a mapping or
    sequence of those. It may also be a function that returns any of these and is called at each park. Wrapped in
    :class:`Dropped` it is freed and not kept. ``device``: "cuda" (all GPUs of this process), or one of them as
    "cuda:1"; left out: the accelerator, where there is one, else "cpu". Tensors elsewhere stay as they are.
    ``gradients="drop"`` sets gradients to None at a park. ``rebuild`` makes the state again when it is loaded after a
    discard. ``pin=False``: ordinary host memory. ``communicators="suspend"``: what NCCL keeps for this process's groups
    is given back at a park too, and taken again at a load. "keep": it stays, and belongs into ``residual_gb``.

    Raises TypeError for a part that is none of these. Raises ValueError for a dropped module or optimizer without a
    refill, and for communicators that this torch cannot suspend.
    """

    def __init__(
        self,
        *,
        device: str | None = None,
        gradients: Literal["park", "drop"] = "park",
        rebuild: Callable[[], object] | None = None,
        pin: bool = True,
        communicators: Literal["keep", "suspend"] = "keep",
        **parts: Any,
    ) -> None:
        if not parts:
            raise TypeError("TorchState needs at least one part: TorchState(model=model, optimizer=optimizer)")
        if gradients not in ("park", "drop"):
            raise ValueError(f'gradients={gradients!r}: it is "park" or "drop"')
        if communicators not in ("keep", "suspend"):
            raise ValueError(f'communicators={communicators!r}: it is "keep" or "suspend"')
        if communicators == "suspend" and not nccl.supported():
            raise ValueError(
                f'communicators="suspend": torch {torch.__version__} cannot suspend them (2.13 with NCCL 2.29.7 can); '
                "keep them, and count what they hold into residual_gb"
            )
        for name, part in parts.items():
            _check(name, part)
        self.place: Place = "loaded"
        self._parts = parts
        self._device = torch.device(device) if device is not None else storages.default_device()
        self._gradients = gradients
        self._rebuild = rebuild
        self._host = HostMemory(pin=pin and self._device.type != "cpu", warn=_warn_not_pinned)
        self._suspends = communicators == "suspend"
        #: while it is not loaded
        self._kept: list[Kept] = []
        self._suspended: list[Any] = []

    def attach(self, job: Any, *, pool: str | None = None) -> "TorchState":
        """Register load, park and discard as hooks of a :func:`rollmuxd.job`; best before it starts."""
        job.on_load(lambda order: self.load(), pool=pool)
        job.on_park(lambda order: self.park(), pool=pool)
        job.on_discard(lambda order: self.discard(), pool=pool)
        return self

    # ---- what the hooks do ------------------------------------------------------------------------------------------

    def park(self) -> int:
        """Copy everything to host memory, then free it on the device; returns how many bytes.

        On a TorchStateError nothing was freed.
        """
        if self.place != "loaded":
            return 0
        if self._gradients == "drop":
            self._drop_gradients()
        kept = self._survey()
        self._suspend(kept)
        try:
            storages.copy_out(kept, self._host)
        except (RuntimeError, MemoryError) as error:
            nccl.resume(self._suspended)
            need = sum(one.nbytes for one in kept if one.keep) / 1e9
            raise TorchStateError(
                f"not parked: its {need:.3g} GB do not go to host memory: {storages.first_line(error)}"
            ) from error
        storages.free(kept)
        self._kept, self.place = kept, "parked"
        return _size(kept)

    def load(self) -> int:
        """Bring everything back; returns how many bytes.

        Raises TorchStateError: not enough room, and then nothing was taken.
        """
        if self.place == "loaded":
            return 0
        was, kept = self.place, self._kept
        if was == "gone" and self._rebuild is None:
            raise TorchStateError(
                "the state was discarded, and nothing makes it again: start the process again from its checkpoint, "
                "or give TorchState(rebuild=...)"
            )
        try:
            storages.copy_in(kept)
        except RuntimeError as error:
            need = _size(kept) / 1e9
            where = ", ".join(map(str, storages.devices(kept)))
            raise TorchStateError(
                f"not loaded: no room for its {need:.3g} GB on {where}: {storages.first_line(error)}"
            ) from error
        try:
            nccl.resume(self._suspended)
            if was == "gone" and self._rebuild is not None:
                self._rebuild()
            for part in self._parts.values():
                if isinstance(part, Dropped) and part.refill is not None:
                    part.refill()
        except BaseException:
            storages.free(kept)  # what was not filled must not be computed with; what was parked still is
            raise
        self._kept, self.place = [], "loaded"
        return _size(kept)

    def discard(self) -> None:
        """Drop everything, on the device and in host memory. Of a state that is gone: done."""
        if self.place == "loaded":
            self._drop_gradients()
            self._kept = self._survey()
            storages.collect(storages.devices(self._kept))
            storages.free(self._kept)
        # Sizes are remembered: `rebuild` finds its tensors with memory.
        self._kept = [replace(one, keep=False, host=[]) for one in self._kept]
        self.place = "gone"
        self._host.free()

    # ---- for the user -----------------------------------------------------------------------------------------------

    def reserve(self) -> None:
        """Take the host memory of a park now, and not in the first park: pinning costs about half a second a GB."""
        if self.place == "loaded":
            for one in self._host.laid_out(self._survey()):
                one.host = []

    def host_bytes(self) -> int:
        """Bytes of host memory that are taken for parking: what ``ram_gb`` of the registration has to cover."""
        return self._host.nbytes

    def device_bytes(self) -> int:
        """Bytes on the device while loaded: ``gpu_gb``, without what torch and the driver take for themselves."""
        return _size(self._survey() if self.place == "loaded" else self._kept)

    # ---- inside -----------------------------------------------------------------------------------------------------

    def _suspend(self, kept: list[Kept]) -> None:
        """Before anything is moved: all ranks have to, and one that cannot has lost nothing."""
        if not self._suspends:
            return
        storages.synchronize(storages.devices(kept))
        try:
            self._suspended = nccl.suspend(self._device)
        except RuntimeError as error:
            raise TorchStateError(
                f"not parked: its communicators cannot be suspended: {storages.first_line(error)}; where NCCL is older "
                'than 2.29.7 say communicators="keep"'
            ) from error

    def _survey(self) -> list[Kept]:
        return storages.survey(
            ((name, part, not isinstance(self._parts[name], Dropped)) for name, part in self._asked()), self._device
        )

    def _asked(self) -> Iterator[tuple[str, Any]]:
        """The parts, those that are functions as they answer now."""
        for name, part in self._parts.items():
            what = part.what if isinstance(part, Dropped) else part
            if _is_function(what):
                what = what()
                if what is not None:
                    _check(name, replace(part, what=what) if isinstance(part, Dropped) else what)
            storages.reshard(what)
            yield name, what

    def _drop_gradients(self) -> None:
        for _, what in self._asked():
            if isinstance(what, torch.nn.Module):
                what.zero_grad(set_to_none=True)


def _check(name: str, part: Any) -> None:
    what = part.what if isinstance(part, Dropped) else part
    if isinstance(what, (torch.nn.Module, torch.optim.Optimizer)):
        if isinstance(part, Dropped) and part.refill is None:
            raise ValueError(
                f"{name} is dropped at a park and would come back as zeros: say Dropped(..., refill=) with what fills "
                "it, or keep it"
            )
    elif not isinstance(what, (torch.Tensor, dict, list, tuple)) and not _is_function(what):
        raise TypeError(
            f"{name} is a {type(what).__name__}: a part is a module, an optimizer, a tensor, a dict, list or tuple of "
            "those, or a function that returns one"
        )


def _is_function(what: Any) -> bool:
    return callable(what) and not isinstance(what, torch.nn.Module)


def _size(kept: list[Kept]) -> int:
    return sum(one.nbytes for one in kept)


def _warn_not_pinned(why: str) -> None:
    log.warning(
        "host memory cannot be pinned (%s): parking and loading go through ordinary memory, which is slower; see "
        "`ulimit -l`, and the memory limit of the container",
        why,
    )
