"""The workloads that ``rollmuxd sim`` knows, by name.

A recipe is read once, from data and options, and drawn anew for each seed: equal seeds give equal workloads, in every
process. Randomness is one ``random.Random`` per purpose and seed, seeded with a string of both.

What cannot be read says so: ``Malformed`` names file, line and column; ``FileNotFoundError`` says which data set is
missing and how to get it; ``ValueError`` says which option makes no sense.
"""

from collections.abc import Callable
from typing import Final

from rollmuxd.sim.workload import Options, Recipe
from rollmuxd.sim.workloads.classes import CLASSES, Classes
from rollmuxd.sim.workloads.generated import Generated
from rollmuxd.sim.workloads.journal import Journal
from rollmuxd.sim.workloads.micro import MULTIPLEXING, TAILS, Multiplexing, Tails
from rollmuxd.sim.workloads.philly import Philly
from rollmuxd.sim.workloads.production import Production
from rollmuxd.sim.workloads.real_logs import RealLogs
from rollmuxd.sim.workloads.shapes import nearest

__all__ = ["names", "read"]

_HEAVY: Final = {"BL": "balanced", "RH": "rollout-heavy", "TH": "train-heavy"}


def _class_summary(name: str) -> str:
    (low_r, high_r), (low_t, high_t) = CLASSES[name]
    return f"{_HEAVY[name[:2]]}: rollout {low_r} to {high_r} s, train {low_t} to {high_t} s; 300 jobs over 580 h"


def _multiplexing_summary(name: str) -> str:
    letters, (rollout, train) = MULTIPLEXING[name]
    return (
        f"the paper's micro-benchmark: jobs {', '.join(letters)} of its table 3 on {8 * rollout} H20 + {8 * train} H800"
    )


#: name: (one line, what makes it)
_CATALOGUE: Final[dict[str, tuple[str, Callable[[str, str, Options], Recipe]]]] = {
    "weave-production": (
        "the paper's production trace, 200 jobs over two weeks with measured profiles; 32B shares on 2+1 nodes",
        Production,
    ),
    "weave-production-honest": ("the same, where 32B has its two training nodes shared too", Production),
    "mixed": ("the paper's simulation study: 300 jobs over 580 h, one of the nine classes each", Classes),
    **{kind: (f"the same, {heavy} jobs only, of all three sizes", Classes) for kind, heavy in _HEAVY.items()},
    **{name: (_class_summary(name), Classes) for name in CLASSES},
    "philly": (
        "Philly's jobs of 1 h and more (or csv=FILE), running the nine classes; each 8 GPUs are a node of each pool",
        Philly,
    ),
    "real-logs": ("the production trace's jobs, every iteration a logged step of a public training run", RealLogs),
    "generated": ("the production trace's jobs with generated iterations (noise, spikes, drift) and tails", Generated),
    **{name: (_multiplexing_summary(name), Multiplexing) for name in MULTIPLEXING},
    **{
        name: (f"the paper's tail migration: {' and '.join(both)} on 8 H20 + 8 H800", Tails)
        for name, both in TAILS.items()
    },
    "journal": ("a daemon's own journal (file=PATH): its jobs, each step as it was recorded, on its nodes", Journal),
}


def names() -> list[tuple[str, str]]:
    """Every workload with its line."""
    return [(name, summary) for name, (summary, _) in _CATALOGUE.items()]


def read(name: str, options: Options | None = None) -> Recipe:
    """The workload of this name.

    Raises:
        ValueError: there is none of this name, or an option makes no sense (``Malformed``: a file cannot be read).
        FileNotFoundError: its data is not there.
    """
    if name not in _CATALOGUE:
        known = list(_CATALOGUE)
        raise ValueError(f"there is no workload {name!r}{nearest(name, known)} ({', '.join(known)})")
    summary, make = _CATALOGUE[name]
    return make(name, summary, options or Options())
