"""The workloads of the paper's tables, and others of the paper's jobs on the paper's two pools (H20 and H800)."""

from typing import Final

from rollmuxd.sim.workloads import Catalogue
from rollmuxd_evaluation.workloads.across_racks import AcrossRacks
from rollmuxd_evaluation.workloads.asynchronous import AsynchronousRuns
from rollmuxd_evaluation.workloads.classes import CLASSES, Classes
from rollmuxd_evaluation.workloads.generated import Generated
from rollmuxd_evaluation.workloads.micro import MULTIPLEXING, TAILS, Multiplexing, Tails
from rollmuxd_evaluation.workloads.production import Production
from rollmuxd_evaluation.workloads.real_logs import RealLogs

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
WORKLOADS: Final[Catalogue] = {
    "weave-production": (
        "the paper's production trace, 200 jobs over two weeks; 32B shares on 2+1 nodes (async=0.5: half asynchronous)",
        Production,
    ),
    "weave-production-honest": ("the same, where 32B has its two training nodes shared too", Production),
    "mixed": ("the paper's simulation study: 300 jobs over 580 h, one of the nine classes each", Classes),
    **{kind: (f"the same, {heavy} jobs only, of all three sizes", Classes) for kind, heavy in _HEAVY.items()},
    **{name: (_class_summary(name), Classes) for name in CLASSES},
    "real-logs": ("the production trace's jobs, every iteration a logged step of a public training run", RealLogs),
    "generated": ("the production trace's jobs with generated iterations (noise, spikes, drift) and tails", Generated),
    **{name: (_multiplexing_summary(name), Multiplexing) for name in MULTIPLEXING},
    "across-racks": (
        "made: two jobs of 72B and two of 235B-A22B, on 8 H20 and 16 H800 hosts each; for fidelity network",
        AcrossRacks,
    ),
    "async": (
        "made: equal asynchronous runs that share one train node (jobs, share, ahead, noise, switch)",
        AsynchronousRuns,
    ),
    **{
        name: (f"the paper's tail migration: {' and '.join(both)} on 8 H20 + 16 H800", Tails)
        for name, both in TAILS.items()
    },
}
