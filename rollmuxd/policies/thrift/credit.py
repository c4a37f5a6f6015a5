"""What credit buys: a job that is ahead of its promise may be slowed beyond it, until its credit is down to a reserve.

The promise is a mean over the job's life. So a job's **bound** is its limit, lifted by the credit that it can spare
over the time that it has run. What plans ask of a job's pace is this bound. Nothing else of a plan knows of credit. A
job with little credit earns it: its progress has a **price** beside that of the nodes. That holds for ``cost`` only;
the other objectives price all progress alike.
"""

from collections.abc import Mapping
from math import inf
from typing import Final

from msgspec import Struct

from rollmuxd.core.estimates import ahead_ms
from rollmuxd.core.ids import Millis
from rollmuxd.core.model import Job

#: what can be spared is spent over the time that the job has run, as it will probably run for so long again. That is so
#: much at least, and so much at most
NEW_MS: Final = 1_800_000
SPEND_MS: Final = 5 * 3_600_000
#: with so much to spare a job's further progress is worth nothing more
BANK_MS: Final = 6 * 3_600_000
#: by how much a bound is lifted: in few steps, so that plans stay the same for a while
FACTORS: Final = (4.0, 2.8, 2.1, 1.7, 1.45, 1.26, 1.12)
#: by objective: what progress is worth in units of the job's price alone, always, and beyond that without any credit
WORTH: Final[Mapping[str, tuple[float, float]]] = {"cost": (0.0, 0.5), "work": (0.6, 0.0), "throughput": (0.7, 0.0)}
#: what progress counts for where dollars are equal
TIE: Final = 1e-3


class Standing(Struct, frozen=True):
    """How a job stands towards its promise."""

    #: what an iteration may take by the promise
    limit_ms: Millis
    #: the credit beyond the reserve: below 0 the job has to run within its limit
    spare_ms: Millis
    #: over how long that is spent at the soonest
    spend_ms: Millis = SPEND_MS

    @property
    def factor(self) -> float:
        """By how much the limit may be exceeded now: the spare credit pays for it for so long."""
        if self.spare_ms <= 0:
            return 1.0
        most = inf if self.spare_ms >= self.spend_ms else 1 / (1 - self.spare_ms / self.spend_ms)
        return next((factor for factor in FACTORS if factor <= most), 1.0)

    def lasts_ms(self, pace_ms: Millis) -> Millis | None:
        """How long the spare credit lasts at a pace; None: for ever."""
        if pace_ms <= self.limit_ms:
            return None
        return max(0, int(self.spare_ms * pace_ms / (pace_ms - self.limit_ms)))


def standing(
    job: Job, limit_ms: Millis, moves_ms: Millis, now: Millis | None = None, *, lends: bool = True
) -> Standing:
    """The job's standing. Its reserve is the way out, by a move that takes so long, and a first turn there.

    ``lends``: its credit may be spent.
    """
    slo = job.spec.slo or 1.0
    spare = ahead_ms(job, slo, now) - int(slo * moves_ms) - limit_ms
    return Standing(limit_ms, spare if lends else min(0, spare), min(SPEND_MS, max(NEW_MS, job.progress.elapsed_ms)))


def progress_price(objective: str, alone: float, spare_ms: Millis | None) -> float:
    """What the job's progress is worth per hour at its solo pace. ``spare_ms``: None where no credit is spent."""
    always, short = WORTH[objective]
    wanted = 0.0 if spare_ms is None else min(1.0, max(0.0, 1 - spare_ms / BANK_MS))
    return alone * max(TIE, round(8 * (always + short * wanted)) / 8)
