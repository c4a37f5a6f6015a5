"""What would sharing have saved on jobs that have run? From Slurm's accounting, played by the scheduler.

``sacct`` knows when a job ran, for how long and on how many GPUs. It does not know phases: these are from training
logs, or a range of shares that the rollout may take. Each case is played in cost fidelity by itself, so an answer is a
range over the cases. As in :mod:`.estimate` the order is the paper's (``rollmux``). The default policy also moves jobs:
it saved more, and took a hundred times as long to play.

A job holds its rollout's GPUs and its trainer's for as long as it runs. Of a heterogeneous job the first component
generates and the second trains; any other job is taken to be split at ``split``. Jobs share with those of the same
partitions that have the same numbers of GPUs, and from when they really began.
"""

import re
from collections.abc import Iterator, Sequence
from datetime import datetime
from math import ceil, inf
from pathlib import Path
from statistics import fmean, quantiles
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.sim.estimate import played_job
from rollmuxd.sim.fluid import Fluid
from rollmuxd.sim.outcome import WORK, JobOutcome
from rollmuxd.sim.policies import ROLLMUX
from rollmuxd.sim.training_logs import Step
from rollmuxd.sim.workload import Malformed, Pool, SimJob, Workload

#: what makes the file. The name comes last: it may have a ``|`` in it, which ``sacct -P`` does not quote
COMMAND: Final = (
    "sacct -a -X -P -D -S now-30days -E now -o JobID,Partition,Submit,Start,End,ElapsedRaw,AllocTRES,JobName "
    "> month.txt"
)
NEEDED: Final = ("JobID", "Start", "End", "ElapsedRaw", "AllocTRES")
#: an iteration, where no log tells: the paper's jobs take 100 s to 900 s
ITERATION_S: Final = 300.0
#: between the shares of the rollout that are played: what is saved dips where one more job would break the SLO
APART: Final = 0.05
#: a job with fewer iterations has failed at its start, or is no training
LEAST: Final = 8
_GPUS: Final = re.compile(r"(?:^|,)gres/gpu(:[^=,]+)?=(\d+)")


class Ran(Struct, frozen=True):
    """A job that has run. Of a requeued one, each run is a job."""

    name: str
    partitions: tuple[str, ...]
    began: datetime
    elapsed_s: int
    queued_s: float | None
    #: of each component that has some
    gpus: tuple[int, ...]


class Read(Struct):
    """What a file says."""

    rows: int = 0
    jobs: list[Ran] = []
    #: rows that are no jobs to share, by reason
    left_out: dict[str, int] = {}

    def leave(self, why: str, rows: int = 1) -> None:
        """Count rows that are left out."""
        self.left_out[why] = self.left_out.get(why, 0) + rows


class Saving(Struct, frozen=True):
    """What sharing would have saved: ranges over the cases that were played."""

    rows: int
    jobs: int
    #: the first start, and the last; of the cluster's clock
    since: str
    until: str
    #: rows by reason: ``step``, ``name``, ``not_started``, ``unfinished``, ``no_gpu``, ``components`` (more than two),
    #: ``one_gpu`` (which cannot be split) and ``short`` (less than eight iterations)
    left_out: dict[str, int]
    #: ``log``, or ``range`` where the share of the rollout is one
    phases: str
    #: of the rollout in an iteration
    rollout_share: tuple[float, float]
    slo: float
    gpu_hours_was: float
    gpu_hours_shared: tuple[float, float]
    #: share of the GPU-hours
    saved: tuple[float, float]
    #: iteration over iteration alone: the median, the 95th percentile, and the longest
    slowdown_p50: float
    slowdown_p95: float
    slowdown_max: float
    #: hours from submission to start, as they were: no saving is made of them. None: the file has no Submit
    queue_h_p50: float | None
    assumes: tuple[str, ...]


# ---- reading ---------------------------------------------------------------------------------------------------------


def read(path: Path, name: str = "") -> Read:
    """The jobs of a file of ``sacct -P`` or ``-p``. ``name``: a regular expression that is found in their names.

    Raises:
        Malformed: it is no such file, or a line cannot be read.
        ValueError: the regular expression cannot be read, or no row has GPUs.
        OSError: the file cannot be read.
    """
    try:
        wanted = re.compile(name)
    except re.error as error:
        raise ValueError(f"--name {name!r} is no regular expression: {error}") from error
    found, components = Read(), _Components()
    tracked = False
    with path.open(encoding="utf-8", errors="replace") as file:
        head = file.readline().rstrip("\n")
        end = "|" if head.endswith("|") else ""  # of each line, as ``-p`` writes it
        columns = _columns(str(path), head.removesuffix(end), need_name=bool(name))
        for line, text in enumerate(file, 2):
            found.rows += 1
            row = dict(zip(columns, text.rstrip("\n").removesuffix(end).split("|", len(columns) - 1), strict=False))
            if len(row) < len(columns):
                raise Malformed(str(path), line, columns[len(row)], f"it is missing; make the file with: {COMMAND}")
            gpus = _gpus(row["AllocTRES"])
            tracked = tracked or bool(gpus)
            if why := _no_job(row, wanted):
                found.leave(why)
            else:
                components.add(row["JobID"], _ran(str(path), line, row, gpus))
    if not tracked:
        raise ValueError(
            f"{path}: no row has gres/gpu in AllocTRES. Either none used GPUs, or the site does not count them: "
            "it needs AccountingStorageTRES=gres/gpu in its slurm.conf"
        )
    for parts in components.jobs():
        _join(found, parts)
    found.jobs.sort(key=lambda job: job.began)
    return found


def _columns(path: str, head: str, *, need_name: bool) -> list[str]:
    columns = head.split("|")
    needed = (*NEEDED, "JobName") if need_name else NEEDED
    if missing := [column for column in needed if column not in columns]:
        raise Malformed(path, 1, missing[0], f"there is no such column; make the file with: {COMMAND}")
    if "JobName" in columns[:-1]:
        raise Malformed(path, 1, "JobName", f"a name may have a | in it, so it must come last: {COMMAND}")
    return columns


def _no_job(row: dict[str, str], wanted: re.Pattern[str]) -> str:
    """Why a row is no job to share; empty: it is one."""
    if "." in row["JobID"]:
        return "step"
    if not wanted.search(row.get("JobName", "")):
        return "name"
    if row["Start"] in ("Unknown", "None", ""):
        return "not_started"
    return "unfinished" if row["End"] in ("Unknown", "None", "") else ""


def _gpus(tres: str) -> int:
    """``gres/gpu=8``; a typed ``gres/gpu:h100=8`` beside it counts the same GPUs, and stands alone at some sites."""
    found = _GPUS.findall(tres)
    return sum(int(count) for kind, count in found if not kind) or sum(int(count) for _, count in found)


def _ran(path: str, line: int, row: dict[str, str], gpus: int) -> Ran:
    began = _time(path, line, "Start", row["Start"])
    submitted = row.get("Submit", "Unknown")
    queued = None if submitted in ("Unknown", "None", "") else began - _time(path, line, "Submit", submitted)
    if not row["ElapsedRaw"].isdecimal():
        raise Malformed(path, line, "ElapsedRaw", f"{row['ElapsedRaw']!r} is no number of seconds")
    return Ran(
        name=row.get("JobName", ""),
        partitions=(row.get("Partition", ""),),
        began=began,
        elapsed_s=int(row["ElapsedRaw"]),
        queued_s=None if queued is None else queued.total_seconds(),
        gpus=(gpus,) if gpus else (),
    )


def _time(path: str, line: int, column: str, said: str) -> datetime:
    try:
        return datetime.strptime(said, "%Y-%m-%dT%H:%M:%S")  # noqa: DTZ007  # sacct tells no zone
    except ValueError:
        raise Malformed(
            path, line, column, f"{said!r} is no time like 2026-10-24T18:05:00; unset SLURM_TIME_FORMAT"
        ) from None


class _Components:
    """Rows of one job: ``7+0`` and ``7+1``. Of a requeued job the first rows of both are one run, then the second."""

    def __init__(self) -> None:
        self._runs: dict[tuple[str, int], list[Ran]] = {}
        self._seen: dict[str, int] = {}

    def add(self, job: str, ran: Ran) -> None:
        run = self._seen[job] = self._seen.get(job, 0) + 1
        self._runs.setdefault((job.partition("+")[0], run), []).append(ran)

    def jobs(self) -> Iterator[list[Ran]]:
        yield from self._runs.values()


def _join(found: Read, parts: list[Ran]) -> None:
    with_gpus = [part for part in parts if part.gpus]
    gpus = tuple(count for part in with_gpus for count in part.gpus)
    if len(gpus) in (1, 2) and gpus != (1,):
        found.jobs.append(
            replace(with_gpus[0], gpus=gpus, partitions=tuple(name for part in with_gpus for name in part.partitions))
        )
    else:
        found.leave("no_gpu" if not gpus else "one_gpu" if gpus == (1,) else "components", len(parts))


# ---- playing ---------------------------------------------------------------------------------------------------------


def saving(
    read: Read,
    *,
    logs: Sequence[Sequence[Step]] = (),
    share: tuple[float, float] | None = None,
    split: float = 0.5,
    slo: float = 1.5,
    switch_s: float = 5.0,
) -> Saving:
    """What sharing would have saved on these jobs, with phases as in ``logs``, or a rollout that takes a ``share``.

    Several logs: all jobs are like the first, like the second and so on, and the logs in turn. A share is played at
    both ends and between them, at most :data:`APART` apart.

    Raises:
        ValueError: neither or both are given, a number is out of its range, or there are no jobs.
    """
    if logs and share is not None:
        raise ValueError("a training log says what the rollout takes; give either logs or a range for its share")
    if not logs and share is None:
        raise ValueError(
            "accounting does not know what rollout and training take: give a training log of these jobs (--log FILE), "
            "or the share of an iteration that the rollout may take (--rollout-share 0.4:0.8)"
        )
    if share is not None and not 0 < share[0] <= share[1] < 1:
        raise ValueError(f"the rollout's share is {share[0]:g}:{share[1]:g}: LO:HI, above 0 and below 1")
    if not 0 < split < 1:
        raise ValueError(f"split is {split:g}: the share of a job's GPUs that generate, above 0 and below 1")
    if not (1 <= slo < inf and 0 <= switch_s < inf):
        raise ValueError(f"an SLO is at least 1 and a switch at least 0 s, not {slo:g} and {switch_s:g}")
    cases = _cases(logs, share)
    longest_s = max(step.total_s for case in cases for step in case)
    jobs = [job for job in read.jobs if job.elapsed_s >= LEAST * longest_s]
    left_out = dict(read.left_out)
    if len(jobs) < len(read.jobs):
        left_out["short"] = len(read.jobs) - len(jobs)
    if not jobs:
        why = ", ".join(f"{reason} {count}" for reason, count in left_out.items())
        raise ValueError(
            f"no job of the file has run on two GPUs or more for {LEAST} iterations of {longest_s:.0f} s; its rows "
            f"were left out: {why}"
        )
    was = sum(job.elapsed_s * sum(job.gpus) for job in jobs) / 3600
    shared, slowdowns = [], []
    for case in cases:
        hours, fared = _play(jobs, case, split, slo, switch_s)
        shared.append(hours)
        slowdowns += [job.slowdown or 1.0 for job in fared]
    slow = sorted(slowdowns)
    shares = [step.rollout_s / step.total_s for case in cases for step in case]
    queued = sorted(job.queued_s for job in jobs if job.queued_s is not None)
    return Saving(
        rows=read.rows,
        jobs=len(jobs),
        since=jobs[0].began.isoformat(),
        until=jobs[-1].began.isoformat(),
        left_out=left_out,
        phases="log" if logs else "range",
        rollout_share=(min(shares), max(shares)),
        slo=slo,
        gpu_hours_was=was,
        gpu_hours_shared=(min(shared), max(shared)),
        saved=(1 - max(shared) / was, 1 - min(shared) / was),
        slowdown_p50=_quantile(slow, 50),
        slowdown_p95=_quantile(slow, 95),
        slowdown_max=slow[-1],
        queue_h_p50=_quantile(queued, 50) / 3600 if queued else None,
        assumes=_assumes(jobs, split, switch_s, logged=bool(logs)),
    )


def _quantile(ordered: Sequence[float], percent: int) -> float:
    return quantiles(ordered, n=100, method="inclusive")[percent - 1] if len(ordered) > 1 else ordered[0]


def _assumes(jobs: Sequence[Ran], split: float, switch_s: float, *, logged: bool) -> tuple[str, ...]:
    one = sum(len(job.gpus) == 1 for job in jobs)
    said = [
        f"loading or parking a job's state takes {switch_s:g} s",
        "hosts have RAM for five parked jobs",
        "a job stays where it is placed; the daemon's default policy also moves jobs",
    ]
    if logged:
        said.append("each job's iterations take what the mean step of the log takes")
    else:
        said.append(f"an iteration takes {ITERATION_S:g} s, and is rollout and training only")
    if one:
        said.append(
            f"{one} jobs of one component generate on {split:.0%} of their GPUs and train on the others; "
            "a job that runs both phases on all of its GPUs would save nothing: leave such jobs out with --name"
        )
    return tuple(said)


def _cases(logs: Sequence[Sequence[Step]], share: tuple[float, float] | None) -> list[list[Step]]:
    """What an iteration of the first job, the second and so on takes, in turn; for each case."""
    if share is None:
        means = [_mean(log) for log in logs]
        return [[mean] for mean in means] + ([means] if len(means) > 1 else [])
    low, high = share
    pieces = max(1, ceil((high - low) / APART - 1e-9))
    points = dict.fromkeys(low + (high - low) * piece / pieces for piece in range(pieces + 1))
    return [[Step(ITERATION_S * point, ITERATION_S * (1 - point))] for point in points]


def _mean(log: Sequence[Step]) -> Step:
    return Step(
        fmean(step.rollout_s for step in log),
        fmean(step.train_s for step in log),
        fmean(step.sync_s for step in log),
        fmean(step.gap_s for step in log),
    )


def _play(
    jobs: Sequence[Ran], case: Sequence[Step], split: float, slo: float, switch_s: float
) -> tuple[float, list[JobOutcome]]:
    """GPU-hours, and how the jobs fared. Jobs of different shapes have nothing to do with each other."""
    shapes: dict[tuple[tuple[str, ...], int, int], list[SimJob]] = {}
    for number, job in enumerate(jobs):
        step = case[number % len(case)]
        mine = played_job(f"job{number}", [step], switch_s)
        rollout, train = job.gpus if len(job.gpus) == 2 else _split(job.gpus[0], split)
        arrives_ms = round(1000 * (job.began - jobs[0].began).total_seconds())
        shapes.setdefault((job.partitions, rollout, train), []).append(
            replace(
                mine,
                arrives_ms=arrives_ms,
                lasts_ms=1000 * job.elapsed_s,
                iterations=round(job.elapsed_s / step.total_s),
                spec=replace(mine.spec, slo=slo),
            )
        )
    hours, fared = 0.0, []
    for (_, rollout, train), alike in shapes.items():
        # A dollar for a GPU's hour: the bill is in GPU-hours.
        pools = (
            Pool("rollout", "GPU", 1.0, gpus_per_node=rollout, ram_mb=10**9),
            Pool("train", "GPU", 1.0, gpus_per_node=train, ram_mb=10**9),
        )
        outcome = Fluid(Workload("sacct", tuple(alike), pools), ROLLMUX, seed=0, accounting=WORK).run()
        hours += outcome.cost
        fared += outcome.jobs
    return hours, fared


def _split(gpus: int, split: float) -> tuple[int, int]:
    rollout = min(max(1, round(gpus * split)), gpus - 1)
    return rollout, gpus - rollout
