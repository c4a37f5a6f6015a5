"""vLLM's side of :mod:`rollmuxd_weights.apply.vllm`: it runs in each worker, and imports vLLM."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from rollmuxd_weights.apply.torch_module import tensors
from rollmuxd_weights.core.fence import parse
from rollmuxd_weights.store import Store


@dataclass
class Folder(WeightTransferInitInfo):  # type: ignore[misc]
    """Where versions are on this host."""

    folder: str


@dataclass
class Version(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Which one to load: an identity, never a path."""

    id: str


class RollmuxEngine(WeightTransferEngine[Folder, Version]):  # type: ignore[misc]
    """Loads a version from this host's memory, in checkpoint format, layer by layer."""

    init_info_cls = Folder
    update_info_cls = Version

    def init_transfer_engine(self, init_info: Folder) -> None:
        """Raise ValueError or PermissionError for a folder that is not a store of this user's."""
        folder = Path(init_info.folder)
        if not folder.is_dir():
            raise ValueError(f"there are no weights in {folder} on this host")
        self._store = Store(folder)

    def start_weight_update(self) -> None:
        """Let each layer wait until its weights are complete."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load; the base class's would ask for an accelerator, which a CPU has not."""
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: Version) -> None:
        """Copy the tensors from the mapping into the model."""
        self.model.load_weights(tensors(self._store.path(parse(update_info.id))))

    def finish_weight_update(self) -> None:
        """Put the layers together again."""
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        """Keep nothing."""
