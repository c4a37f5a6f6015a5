"""The hook for TRL: ``from rollmuxd_hook_trl import GRPOTrainer`` in place of ``from trl import GRPOTrainer``.

Read first ``contract`` (what must hold for the installed TRL, checked when the trainer is imported). Then
``rollmuxd_hook_kit.turns`` (one phase after the other) and ``trainer`` (where the phases of a GRPOTrainer begin and
end). For a trainer class of one's own: ``class Mine(Sharing, MyGRPOTrainer)``. ``asynchronous`` does the same for
TRL's ``AsyncGRPOTrainer``, with :class:`SharingAsync`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from rollmuxd_hook_kit.contract import UnknownFramework as UnknownTrl

if TYPE_CHECKING:
    from rollmuxd_hook_trl.asynchronous import AsyncGRPOTrainer, SharingAsync
    from rollmuxd_hook_trl.trainer import GRPOTrainer, Sharing

__all__ = ["AsyncGRPOTrainer", "GRPOTrainer", "Sharing", "SharingAsync", "UnknownTrl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        # torch and TRL come with these
        return getattr(importlib.import_module(f"{__name__}.{'asynchronous' if 'Async' in name else 'trainer'}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
