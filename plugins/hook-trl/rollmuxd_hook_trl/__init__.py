"""The hook for TRL: ``from rollmuxd_hook_trl import GRPOTrainer`` in place of ``from trl import GRPOTrainer``.

Read first ``contract`` (what must hold for the installed TRL, checked when the trainer is imported). Then
``rollmuxd_hook_kit.turns`` (one phase after the other) and ``trainer`` (where the phases of a GRPOTrainer begin and
end). For a trainer class of one's own: ``class Mine(Sharing, MyGRPOTrainer)``.
"""

from typing import TYPE_CHECKING, Any

from rollmuxd_hook_trl.contract import UnknownTrl

if TYPE_CHECKING:
    from rollmuxd_hook_trl.trainer import GRPOTrainer, Sharing

__all__ = ["GRPOTrainer", "Sharing", "UnknownTrl"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from rollmuxd_hook_trl import trainer  # torch and TRL come with it

        return getattr(trainer, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
