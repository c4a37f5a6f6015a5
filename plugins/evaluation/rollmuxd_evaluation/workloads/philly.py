"""Arrivals and durations of a shared GPU cluster (Microsoft's Philly), or of any CSV with the same columns.

The columns used are ``submit_s``, ``duration_s`` (seconds) and ``num_gpus``; others may be there. Philly's jobs are no
RL jobs, so what an arrival *is* has to be said:

- Jobs shorter than an hour are left out (``min_hours``): most of them are tries and failures. What remains has the mean
  nearest to the segment that the RollMux paper used, which nobody could find again. ``min_gpus`` leaves out narrow
  ones.
- Its width is ``num_gpus`` in nodes of eight, on each pool: up to 8 GPUs one rollout and one training node, up to 16
  two of each, and so on. (Of Philly's jobs of an hour and longer, 92 % asked for one GPU; a width of less than a node
  is not modelled.)
- What it runs is drawn for each job and seed (``types``): ``mixed`` is one of the paper's nine classes (table 6), as in
  its simulation study; ``BL``, ``RH``, ``TH`` or one class are those only; ``production`` is a type of the production
  trace, as often as there, with its measured profile.
- Time begins with the first job that is left. With fewer jobs than there are (``jobs``), they are thinned at random.
"""

import random
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rollmuxd.core.ids import Millis
from rollmuxd.sim.workload import Options, Workload
from rollmuxd_evaluation.workloads import classes, production
from rollmuxd_evaluation.workloads.shapes import GPUS, Shape, Terms
from rollmuxd_evaluation.workloads.tables import find, opened

FILE: Final = "arrivals/philly.csv"
ORIGIN: Final = (
    "make it from the job log of github.com/msr-fiddle/philly-traces (CC-BY-4.0), or from the copy in "
    "github.com/petuum/adaptdl, branch osdi21-artifact, simulator/traces/philly.csv: a CSV with the columns submit_s "
    "(seconds since the first job), duration_s and num_gpus. Then give its folder as --data or $ROLLMUX_DATA, or the "
    "file itself as csv=PATH"
)
COLUMNS: Final = ("submit_s", "duration_s", "num_gpus")
TYPES: Final = ("mixed", "production", *classes.KINDS, *classes.CLASSES)
MODEL_B: Final = 7.0


class Arrival(NamedTuple):
    """One job of the trace that is long and wide enough."""

    name: str
    submit_ms: Millis
    lasts_ms: Millis
    nodes: int


def arrivals(path: Path, min_hours: float, min_gpus: float) -> list[Arrival]:
    """The jobs of a file that last at least so long and asked for at least so many GPUs, by submission."""
    kept = []
    for number, row in enumerate(opened(path, COLUMNS)):
        seconds, gpus = row.number("duration_s"), row.count("num_gpus", 1)
        submit = row.number("submit_s")
        if seconds > 0 and seconds >= min_hours * 3600 and gpus >= min_gpus:
            kept.append(Arrival(f"job{number}", round(submit * 1000), round(seconds * 1000), -(-gpus // GPUS)))
    if not kept:
        raise ValueError(f"{path} has no job of {min_hours:g} hours and {min_gpus:g} GPUs or more")
    return sorted(kept, key=lambda it: it.submit_ms)


class Philly:
    """Philly, or ``csv=PATH``. A seed draws what the jobs run, their SLOs, and who stays."""

    def __init__(self, name: str, summary: str, options: Options) -> None:
        self.name, self.summary = name, summary
        self._terms = terms = Terms(options, ("csv", "min_hours", "min_gpus", "types"))
        self._types = terms.choice("types", TYPES)
        given = options.more.get("csv", "")
        path = Path(given).expanduser() if given else find(FILE, options.data, ORIGIN)
        if not path.is_file():
            raise FileNotFoundError(f"{path} is no file; expected a CSV with the columns {', '.join(COLUMNS)}")
        self._arrivals = arrivals(path, terms.amount("min_hours", 1.0), terms.amount("min_gpus", 1.0))
        self._source = f"arrivals, durations and widths of {path.name}; what they run is drawn from {self._types}"
        profiles = production.profiles(honest=True)
        self._mix = [profiles[it.kind] for it in production.arrivals(list(profiles))]

    def draw(self, seed: int) -> Workload:
        """The workload of one seed."""
        chosen = self._terms.thinned(self._arrivals, seed)
        draw = random.Random(f"types {seed}")
        begin = chosen[0].submit_ms
        jobs = tuple(
            self._terms.job(
                it.name,
                msgspec.structs.replace(self._shape(draw), nodes=(it.nodes, it.nodes), footprint=(it.nodes, it.nodes)),
                arrives_ms=it.submit_ms - begin,
                lasts_ms=it.lasts_ms,
                slo=slo,
            )
            for it, slo in zip(chosen, self._terms.slos(len(chosen), seed), strict=True)
        )
        return Workload(self.name, jobs, self._terms.pools(), self._source)

    def _shape(self, draw: random.Random) -> Shape:
        if self._types == "production":
            return draw.choice(self._mix)
        kind = draw.choice(classes.classes_of(self._types))
        return Shape(kind, MODEL_B, classes.times(kind, draw))
