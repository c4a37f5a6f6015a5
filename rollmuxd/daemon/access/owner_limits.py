"""Limits of owners: those that the settings name, and all others.

The core looks limits up by owner in a dict; here it is one that knows an answer for everybody.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from rollmuxd.core.config import Config
from rollmuxd.core.policy import HeedsOwners, Policy
from rollmuxd.core.scheduler import Scheduler
from rollmuxd.core.state import State

T = TypeVar("T")


class ByOwner(dict[str, T]):
    """By owner's name; for a name that is not in it, ``get`` gives what holds for all others."""

    def __init__(self, own: Mapping[str, T], others: T) -> None:
        super().__init__(own)
        self.others = others

    def get(self, name: str, default: Any = None) -> Any:
        return super().get(name, self.others)


class MostNodes(ByOwner[int]):
    """How many nodes each owner may hold. A lookup adds the owner: policies go through all owners that they know."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.setdefault(name, self.others)


def scheduler_of(config: Config, policy: Policy, state: State) -> Scheduler:
    """A scheduler whose policy plans around how many nodes *any* owner may hold, not only those that are named."""
    core = Scheduler(config, policy, state)
    limits = config.owners
    if isinstance(policy, HeedsOwners) and isinstance(limits, ByOwner) and limits.others.max_nodes:
        own = {name: owner.max_nodes for name, owner in limits.items()}
        policy.max_nodes = MostNodes(own, limits.others.max_nodes)
    return core
