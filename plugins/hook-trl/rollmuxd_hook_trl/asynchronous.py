"""Where the one phase of ``trl.experimental.async_grpo.AsyncGRPOTrainer`` begins and ends.

    from rollmuxd_hook_trl import AsyncGRPOTrainer     # was: from trl.experimental.async_grpo import AsyncGRPOTrainer

Its vLLM server generates all the time, on GPUs of the run's own. The job is asynchronous, with the phase ``train``
only. It begins when all that a step trains on is in this process's memory, and ends with the step. Its gradients are
applied by then, the weights are at the server where they are due, and what is to be saved is saved. TRL's data loader
asks for the batch after a step's last one before it hands that one out. So this one is waited for, too.
"""

from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from trl.experimental.async_grpo import AsyncGRPOTrainer as Theirs

from rollmuxd_hook_kit.contract import check_class, look_at
from rollmuxd_hook_trl.contract import ASYNC
from rollmuxd_hook_trl.trainer import Sharing

look_at(ASYNC)


class Ahead(torch.utils.data.IterableDataset[Any]):  # type: ignore[misc]
    """The batches of a planner, of which some can be fetched before they are asked for."""

    def __init__(self, planner: Any) -> None:
        self._planner = planner
        self._batches: Iterator[Any] | None = None
        self._fetched: deque[Any] = deque()
        #: how many were asked for
        self._taken = 0

    def fetch(self, many: int) -> None:
        """Return once that many can be asked for, of all there ever are, with no wait."""
        while self._taken + len(self._fetched) < many:
            self._batches = self._batches if self._batches is not None else iter(self._planner)
            self._fetched.append(next(self._batches))

    def __iter__(self) -> Iterator[Any]:
        while True:
            self.fetch(self._taken + 1)
            self._taken += 1
            yield self._fetched.popleft()


class SharingAsync(Sharing):
    """Mixin for an ``AsyncGRPOTrainer``, to come first; see :class:`Sharing`."""

    _asynchronous = True
    #: on the rank that batches come from
    _ahead: Ahead | None = None
    #: how many batches the loop has asked for
    _asked = 0

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        if issubclass(cls, Theirs):
            check_class(ASYNC, cls, SharingAsync, Theirs)

    def get_train_dataloader(self) -> Any:
        """TRL's, whose batches are fetched before a slot is asked for."""
        prepare = self.accelerator.prepare

        def ahead(loader: Any) -> Any:
            if self.accelerator.is_main_process:
                self._ahead, self._asked = Ahead(loader.dataset), 0
                loader = torch.utils.data.DataLoader(self._ahead, batch_size=1, collate_fn=loader.collate_fn)
            return prepare(loader)

        self.accelerator.prepare = ahead
        try:
            return super().get_train_dataloader()
        finally:
            del self.accelerator.prepare

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """All that the next step trains on, in a slot for it; the step before is over."""
        self._turns.leave()
        self._asked += num_batches
        if self._ahead is not None and self._turns.on:
            self._ahead.fetch(self._asked + 1)
        self._turns.go("train")
        return super().get_batch_samples(epoch_iterator, num_batches, device)


class AsyncGRPOTrainer(SharingAsync, Theirs):  # type: ignore[misc]
    """TRL's, taking part in rollmuxd: see :class:`SharingAsync`."""
