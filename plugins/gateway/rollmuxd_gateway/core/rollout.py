"""How far a rollout is: what is reported to the daemon, and how many responses the next one is expected to have."""

from typing import Final

from rollmuxd_gateway.core.model import Config, Rollout

#: rollouts whose size is remembered
_REMEMBERED: Final = 5


def expected_total(config: Config, rollout: Rollout) -> int:
    """Responses that this rollout will have; 0: not known, so no progress is reported and no tail begins."""
    known = rollout.total or config.total or max(rollout.sizes, default=0)
    return max(known, rollout.arrived) if known else 0


def progress(config: Config, rollout: Rollout) -> tuple[int, int]:
    """Responses that are done, and expected; (0, 0) where nothing is known. It never falls within a rollout."""
    total = expected_total(config, rollout)
    return (min(rollout.done, total), total) if total else (0, 0)


def remember(rollout: Rollout) -> None:
    """Keep the size of a rollout that ends, for those that follow."""
    if rollout.arrived:
        rollout.sizes = [*rollout.sizes, rollout.arrived][-_REMEMBERED:]
