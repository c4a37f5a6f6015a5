"""New weights from trainer hosts to rollout hosts, over slow lines, in two stages, while no GPU is held.

publisher = Publisher("math-7b", "hosts.toml")                 # trainer: rank 0 of each host
with job.phase("train") as slot:
    update(...)
    copied = publisher.copy(model.state_dict(), version=step, fence=slot.fence)
publisher.offer(copied)                                        # sums and shows them: no slot is held

path = Puller("math-7b").ready(step, fence=fence)              # rollout host: `rollmuxd weights pull` pulls, no slot
with job.phase("rollout"):
    load_into(model, path)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rollmuxd_weights.apply.torch_module import load_into
    from rollmuxd_weights.publish import Copied, NoRoom, Older, Published, Publisher, take_part
    from rollmuxd_weights.pull import Incomplete, Pulled, Puller, Stale, Superseded
    from rollmuxd_weights.store import Busy

__all__ = [
    "Busy", "Copied", "Incomplete", "NoRoom", "Older", "Published", "Publisher", "Pulled", "Puller", "Stale",
    "Superseded", "load_into", "take_part",
]  # fmt: skip

# `rollmuxd --help` imports this package for the first line of its command: the rest comes when it is asked for.
_MODULES = {
    "apply.torch_module": ("load_into",),
    "publish": ("Copied", "NoRoom", "Older", "Published", "Publisher", "take_part"),
    "pull": ("Incomplete", "Pulled", "Puller", "Stale", "Superseded"),
    "store": ("Busy",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
