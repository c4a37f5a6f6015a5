"""The hook for verl: ``VERL_USE_EXTERNAL_MODULES=rollmuxd_hook_verl`` in the environment of an ordinary run.

verl imports what that variable names in each of its processes. Here this costs nothing until a process imports one of
verl's trainers, which is the controller; workers never do, and never talk.

Read first ``contract`` (what must hold for the installed verl, checked when its trainer is imported). Then
``rollmuxd_hook_kit.turns`` (one phase after the other), ``trainer`` (where the phases begin and end), and ``residency``
(sleep and wake, by verl's own checkpoint engine manager).
"""

from types import ModuleType

from rollmuxd_hook_kit.contract import UnknownFramework as UnknownVerl
from rollmuxd_hook_kit.late import when_imported
from rollmuxd_hook_verl.contract import ONE_STEP, PPO_TRAINER, V1_TRAINER

__all__ = ["UnknownVerl"]


def _share(module: ModuleType) -> None:
    from rollmuxd_hook_verl import trainer

    trainer.share(module)


for _trainer in (PPO_TRAINER, V1_TRAINER, ONE_STEP):
    when_imported(_trainer.path.removesuffix(".py").replace("/", "."), _share)
