"""Several RL post-training jobs share a rollout pool and a train pool, phase by phase: the client.

    with rollmuxd.job("math-7b", rollout=dict(nodes=1), train=dict(nodes=1)) as job:
        with job.phase("rollout") as slot:
            ...

Names are imported when they are first used: ``import rollmuxd`` alone costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rollmuxd import testing as testing
    from rollmuxd.client.errors import (
        BadAnswer,
        Conflict,
        GaveUp,
        JobAlive,
        JobEnded,
        NoDaemon,
        NotFound,
        Refused,
        RollmuxError,
        SlotFaulted,
        SlotLost,
        TooManyRequests,
        Unauthorised,
        Unavailable,
        Unprocessable,
        Unreachable,
    )
    from rollmuxd.client.job import AsyncJob, AsyncSlot, Job, Slot, ajob, job

__all__ = [
    "AsyncJob",
    "AsyncSlot",
    "BadAnswer",
    "Conflict",
    "GaveUp",
    "Job",
    "JobAlive",
    "JobEnded",
    "NoDaemon",
    "NotFound",
    "Refused",
    "RollmuxError",
    "Slot",
    "SlotFaulted",
    "SlotLost",
    "TooManyRequests",
    "Unauthorised",
    "Unavailable",
    "Unprocessable",
    "Unreachable",
    "__version__",
    "ajob",
    "job",
]

_PHASES = {"AsyncJob", "AsyncSlot", "Job", "Slot", "ajob", "job"}


def __getattr__(name: str) -> Any:
    if name == "testing":
        return importlib.import_module("rollmuxd.testing")
    if name not in __all__:
        raise AttributeError(f"module 'rollmuxd' has no attribute {name!r}")
    module = importlib.import_module("rollmuxd.client.job" if name in _PHASES else "rollmuxd.client.errors")
    value = globals()[name] = getattr(module, name)
    return value


def __dir__() -> list[str]:
    return [*__all__, "testing"]
