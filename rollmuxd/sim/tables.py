"""The numbers of a comparison: outcomes in, rows out. The terminal and ``--json`` show these.

Pure functions. What one reads in a row:

- A **spread** is over seeds: mean, sample standard deviation (0 for one seed), least, most.
- Slowdowns are of jobs, all seeds together; so is the latency of decisions. Counts (admissions, switches) are means
  over seeds. Peaks are the largest over the seeds.
- What cannot be judged is None, never 0: the attainment where no job has an SLO, the use of a pool that was not bought.
- Policies are compared **paired**: seed by seed on the same workload, then averaged. The spread of a difference is that
  of the per-seed differences, which is far smaller than the spreads of both sides let one think. ``ci95`` is half of
  the 95 % confidence interval of the mean difference, by Student's t; None for one seed.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any, Final, TypeAlias

from rollmuxd.sim.outcome import Harvest, Outcome

#: one row, as ``--json`` has it
Row: TypeAlias = dict[str, Any]
#: heads, of which those of numbers begin with ``#``, and rows: for the terminal and HTML reports
Table: TypeAlias = tuple[Sequence[str], list[list[Any]]]

ACCOUNTINGS: Final = ("paper", "work")
#: the policy that costs are relative to, where it ran
BASELINE: Final = "solo"
#: what the two accountings mean, one sentence each
MEANING: Final = {
    "paper": "A job ends when its trace says, however slow it was: fixed time, so what differs is dollars per hour.",
    "work": "A job ends when it has done its iterations, so a slowed job stays, and pays, longer: compare the total.",
}
#: of :func:`_student`, from 1 on
_FEW: Final = (12.7062, 4.30265, 3.18245, 2.77645, 2.57058, 2.44691, 2.36462, 2.306, 2.26216)
UTILISATION: Final = (
    "Utilisation of a pool is the share of the node-time in groups (what is paid for) in which a phase was running; "
    "loading and parking is not running. The bubble is the rest: 1 - utilisation."
)
#: of :func:`sent`
SENT: Final = (
    "Phases that sent between hosts, and those of them that sent from rack to rack: only these differ by the network. "
    "Not changed for: phases that wanted other circuits, and would have gained less than changing them takes."
)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Mean, sample standard deviation (0 for one value), least and most."""
    least, most = min(values), max(values)
    if least == most:  # a mean is rounded, and would differ from what it is the mean of
        return {"mean": least, "sd": 0.0, "min": least, "max": most}
    mean = fmean(values)
    sd = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return {"mean": mean, "sd": sd, "min": least, "max": most}


def confidence(values: Sequence[float]) -> float | None:
    """Half of the 95 % confidence interval of the mean; None for fewer than two values."""
    if len(values) < 2:
        return None
    return _student(len(values) - 1) * spread(values)["sd"] / math.sqrt(len(values))


def _student(freedom: int) -> float:
    """What Student's t with so many degrees of freedom stays within 95 times of 100."""
    if freedom <= len(_FEW):
        return _FEW[freedom - 1]
    z, v = 1.959964, freedom  # Fisher's expansion about the normal's
    more = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * v**3)
    return z + (z**3 + z) / (4 * v) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * v**2) + more


def quantile(values: Sequence[float], share: float) -> float:
    """The value below which this share lies, between neighbours in proportion."""
    ordered = sorted(values)
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def policies(outcomes: Sequence[Outcome]) -> list[str]:
    """The policies that ran, in the order in which they were asked for."""
    return list(dict.fromkeys(outcome.policy_under_test for outcome in outcomes))


def runs(outcomes: Sequence[Outcome], policy: str, accounting: str) -> list[Outcome]:
    """One policy's outcomes in one accounting, by seed.

    Raises:
        ValueError: two of them have one seed: they are of different workloads or settings, and have no common mean.
    """
    found = [o for o in outcomes if o.policy_under_test == policy and o.accounting == accounting]
    found.sort(key=lambda outcome: outcome.seed)
    for one, next_ in itertools.pairwise(found):
        if one.seed == next_.seed:
            raise ValueError(
                f"{policy} has two outcomes of seed {one.seed} in accounting {accounting} "
                f"(workloads {one.workload} and {next_.workload}): one table compares runs of one workload and setting"
            )
    return found


def summary(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row per policy, with its figures in both accountings (None for one that did not run)."""
    rows = []
    for policy in policies(outcomes):
        proofs = [o.exact for o in outcomes if o.policy_under_test == policy and o.exact is not None]
        row: Row = {"policy": policy, "exact": all(proofs) if proofs else None}
        for accounting in ACCOUNTINGS:
            mine = runs(outcomes, policy, accounting)
            row[accounting] = _figures(mine, runs(outcomes, BASELINE, accounting)) if mine else None
        rows.append(row)
    return rows


def harvest(found: Harvest) -> Row:
    """What fillers had: node-hours by pool, in the idle time of groups and on free nodes, and what jobs waited."""
    waits = sorted(found.held_up_ms)
    return {
        "in_groups_node_h": {pool: took / 3_600_000 for pool, took in sorted(found.in_groups_ms.items())},
        "free_node_h": {pool: took / 3_600_000 for pool, took in sorted(found.free_ms.items())},
        "loans": found.loans,
        "yields": found.yields,
        "waits": len(waits),
        "waited_s": sum(waits) / 1000,
        "waited_p95_s": waits[int(0.95 * len(waits))] / 1000 if waits else 0.0,
    }


def harvest_line(found: Harvest) -> str:
    """The same in one line, for people."""
    row = harvest(found)
    groups, free = sum(row["in_groups_node_h"].values()), sum(row["free_node_h"].values())
    return (
        f"Fillers had {groups:,.1f} node-hours within groups and {free:,.1f} on free nodes, in {row['loans']:,} loans; "
        f"jobs waited for them {row['waits']:,} times, {row['waited_s']:,.0f} s in all."
    )


def each(outcomes: Sequence[Outcome]) -> list[Row]:
    """One row per run: the digest of its facts, which the same seed gives again, and how long it took."""
    return [
        {
            "policy": it.policy_under_test,
            "accounting": it.accounting,
            "seed": it.seed,
            "facts_digest": it.facts_digest,
            "wall_s": it.wall_s,
            **({} if it.network is None else {"network": it.network}),
        }
        for it in outcomes
    ]


def paired(outcomes: Sequence[Outcome], against: str) -> list[Row]:
    """How each other policy differs from ``against``: a row per policy and accounting, over the seeds that both ran.

    Each figure is a spread of differences: theirs minus that of ``against`` on the same seed. It is None where one of
    the two has no such figure.
    """
    rows: list[Row] = []
    for accounting in ACCOUNTINGS:
        theirs = {outcome.seed: outcome for outcome in runs(outcomes, against, accounting)}
        for policy in policies(outcomes):
            pairs = [(o, theirs[o.seed]) for o in runs(outcomes, policy, accounting) if o.seed in theirs]
            if policy == against or not pairs:
                continue
            row: Row = {"policy": policy, "against": against, "accounting": accounting, "seeds": len(pairs)}
            for name, figure in _COMPARED.items():
                row[name] = _differences(pairs, figure)
            rows.append(row)
    return rows


def slowdowns(outcomes: Sequence[Outcome]) -> list[float]:
    """Of every job that finished an iteration, least first."""
    return sorted(slow for outcome in outcomes for job in outcome.jobs if (slow := job.slowdown) is not None)


def _mean_slowdown(outcome: Outcome) -> float | None:
    found = slowdowns([outcome])
    return fmean(found) if found else None


_COMPARED: Final[dict[str, Callable[[Outcome], float | None]]] = {
    "cost_per_hour": lambda outcome: outcome.cost_per_hour,
    "total_cost": lambda outcome: outcome.cost,
    "slo_attainment": lambda outcome: outcome.attainment,
    "mean_slowdown": _mean_slowdown,
    "mean_completion_s": lambda outcome: outcome.mean_completion_s,
    "mean_wait_s": lambda outcome: outcome.mean_wait_s,
}


def _differences(
    pairs: Sequence[tuple[Outcome, Outcome]], figure: Callable[[Outcome], float | None]
) -> dict[str, float | None] | None:
    both = [(figure(mine), figure(theirs)) for mine, theirs in pairs]
    found = [mine - theirs for mine, theirs in both if mine is not None and theirs is not None]
    return {**spread(found), "ci95": confidence(found)} if found else None


def _figures(mine: Sequence[Outcome], solo: Sequence[Outcome]) -> Row:
    attained = [outcome.attainment for outcome in mine]
    judged = [share for share in attained if share is not None]
    slow = slowdowns(mine)
    decided = [took / 1000 for outcome in mine for took in outcome.decision_us]
    alone = {outcome.seed: outcome.cost for outcome in solo}
    ratios = [outcome.cost / alone[outcome.seed] for outcome in mine if alone.get(outcome.seed)]
    return {
        "seeds": [outcome.seed for outcome in mine],
        "cost_per_hour": spread([outcome.cost_per_hour for outcome in mine]),
        "total_cost": fmean([outcome.cost for outcome in mine]),
        "total_cost_spread": spread([outcome.cost for outcome in mine]),
        "relative_to_solo": spread(ratios) if ratios else None,
        "peak_gpus": _peaks(mine),
        "admissions": _mean_counts([outcome.admissions for outcome in mine]),
        "pools": _pools(mine),
        "slowdown": None
        if not slow
        else {
            "mean": fmean(slow),
            "p50": quantile(slow, 0.5),
            "p95": quantile(slow, 0.95),
            "max": slow[-1],
        },
        "slo_attainment": spread(judged) if judged else None,
        "switches": _mean_counts(
            [
                {name: sum(getattr(job, name) for job in outcome.jobs) for name in ("warm", "cold", "parks")}
                for outcome in mine
            ]
        ),
        "mean_completion_s": fmean([outcome.mean_completion_s for outcome in mine]),
        "mean_wait_s": fmean([outcome.mean_wait_s for outcome in mine]),
        "jobs": fmean([len(outcome.jobs) for outcome in mine]),
        "never_placed": fmean([sum(job.placed_ms is None for job in outcome.jobs) for outcome in mine]),
        "decision_ms": {"p50": quantile(decided, 0.5), "p99": quantile(decided, 0.99)} if decided else None,
        "mean_iteration_s": _iteration_s(mine),
        "network": _mean_counts([outcome.network for outcome in mine if outcome.network is not None]) or None,
    }


def _iteration_s(mine: Sequence[Outcome]) -> float | None:
    """Of all finished iterations of all jobs."""
    jobs = [job for outcome in mine for job in outcome.jobs]
    count = math.fsum(job.iterations for job in jobs)
    return math.fsum(job.elapsed_ms for job in jobs) / count / 1000 if count else None


def _mean_counts(counts: Sequence[dict[str, int]]) -> dict[str, float]:
    names = dict.fromkeys(name for of in counts for name in of)
    return {name: fmean([of.get(name, 0) for of in counts]) for name in names}


def _peaks(mine: Sequence[Outcome]) -> dict[str, int]:
    """Per GPU type. Of several pools of one type the peaks are added, which their common peak may be below."""
    peaks: dict[str, int] = {}
    for outcome in mine:
        here: dict[str, int] = {}
        for pool in outcome.pools:
            here[pool.gpu_type] = here.get(pool.gpu_type, 0) + pool.peak_gpus
        for gpu_type, gpus in here.items():
            peaks[gpu_type] = max(gpus, peaks.get(gpu_type, 0))
    return peaks


def _pools(mine: Sequence[Outcome]) -> dict[str, dict[str, float | None]]:
    shares: dict[str, list[float]] = {}
    for outcome in mine:
        for pool in outcome.pools:
            of = shares.setdefault(pool.name, [])
            if pool.bought_node_ms:
                of.append(pool.utilisation)
    return {
        name: {
            "utilisation": fmean(of) if of else None,
            "bubble": 1 - fmean(of) if of else None,
        }
        for name, of in shares.items()
    }


# ---- for people ------------------------------------------------------------------------------------------------------

#: fewer digits after the point the larger the number is
_DIGITS: Final = ((1000.0, 0), (100.0, 1), (1.0, 2))


def number(value: float | None, *, signed: bool = False, like: float | None = None) -> str:
    """Three or four digits that say something; ``-`` for None. ``like``: as exact as this number."""
    if value is None:
        return "-"
    size = abs(value if like is None else like)
    digits = next((digits for least, digits in _DIGITS if size >= least), 3)
    shown = f"{value:{'+' if signed else ''},.{digits}f}"
    shown = shown.rstrip("0").rstrip(".") if "." in shown else shown
    return "0" if shown in ("-0", "+0") else shown


def plus_minus(of: dict[str, float] | None, *, signed: bool = False, scale: float = 1.0, unit: str = "") -> str:
    """A spread as ``523 +- 14``; the mean alone where nothing spreads; ``-`` for None."""
    if of is None:
        return "-"
    larger = max(abs(of["mean"]), of["sd"]) * scale
    mean, sd = (number(of[name] * scale, signed=signed and name == "mean", like=larger) for name in ("mean", "sd"))
    return f"{mean}{unit}" if sd == "0" else f"{mean} +- {sd}{unit}"


def interval(of: dict[str, Any] | None) -> str:
    """Where the mean of a difference lies, 95 times of 100: ``+378 to +388``; ``-`` for None or one seed."""
    if of is None or of["ci95"] is None:
        return "-"
    return " to ".join(number(of["mean"] + side * of["ci95"], signed=True, like=of["mean"]) for side in (-1, 1))


def share(value: float | None) -> str:
    """``97.5%``; ``-`` for None. Only what is whole reads 100%."""
    if value is None:
        return "-"
    shown = f"{min(value * 100, 99.99) if value < 1 else value * 100:.2f}"
    return f"{shown.rstrip('0').rstrip('.')}%"


def called(row: Row) -> str:
    """A policy's name. An optimum that was not proved must not look like one."""
    return f"{row['policy']} (best found)" if row["exact"] is False else str(row["policy"])


def figures(shown: Sequence[tuple[str, Row]]) -> Table:
    """What it cost, and how the jobs fared: a row for each policy, by its name."""
    return _each(
        shown,
        lambda of: {
            "#$/h": plus_minus(of["cost_per_hour"]),
            "#TOTAL $": plus_minus(of["total_cost_spread"]),
            "#x SOLO": plus_minus(of["relative_to_solo"]),
            "#PEAK GPUS": ", ".join(f"{gpus} {gpu_type}" for gpu_type, gpus in of["peak_gpus"].items()),
            "#SLOWDOWN": number(of["slowdown"] and of["slowdown"]["mean"]),
            "#p95": number(of["slowdown"] and of["slowdown"]["p95"]),
            "#SLO kept": share(of["slo_attainment"] and of["slo_attainment"]["mean"]),
            "#JOB h": number(of["mean_completion_s"] / 3600),
            "#WAIT h": number(of["mean_wait_s"] / 3600),
        },
    )


def never_placed(shown: Sequence[tuple[str, Row]]) -> list[str]:
    """Of which policies the figures leave jobs out, a sentence each."""
    return [
        f"{name}: {number(of['never_placed'])} of {number(of['jobs'])} jobs were never placed; only JOB h and WAIT h "
        "count them."
        for name, of in shown
        if of["never_placed"]
    ]


def how(shown: Sequence[tuple[str, Row]]) -> Table:
    """How it came about: use of the pools, admissions, switches, decisions."""
    pools = dict.fromkeys(pool for _, of in shown for pool in of["pools"])
    return _each(
        shown,
        lambda of: {
            **{f"#USED {pool}": share(of["pools"].get(pool, {}).get("utilisation")) for pool in pools},
            "ADMITTED": ", ".join(f"{number(count)} {kind}" for kind, count in of["admissions"].items()),
            "WARM/COLD/PARKED": "/".join(number(of["switches"].get(kind, 0)) for kind in ("warm", "cold", "parks")),
            "#DECISION ms p50": number(of["decision_ms"] and of["decision_ms"]["p50"]),
            "#p99": number(of["decision_ms"] and of["decision_ms"]["p99"]),
        },
    )


def sent(shown: Sequence[tuple[str, Row]]) -> Table:
    """Fidelity ``network``: what went over it. No rows in another fidelity."""
    return _each(
        [(name, of) for name, of in shown if of["network"]],
        lambda of: {
            "#PHASES THAT SENT": number(of["network"]["phases"]),
            "#BETWEEN RACKS": number(of["network"]["between_racks"]),
            "#CIRCUITS CHANGED FOR": number(of["network"]["circuits_changed"]),
            "#NOT CHANGED FOR": number(of["network"]["circuits_kept"]),
            "#ITERATION s": number(of["mean_iteration_s"]),
        },
    )


def _each(shown: Sequence[tuple[str, Row]], cells: Callable[[Row], dict[str, str]]) -> Table:
    rows = [{"POLICY": name, **cells(of)} for name, of in shown]
    return [*rows[0]] if rows else [], [[*row.values()] for row in rows]


def differences(rows: Sequence[Row]) -> Table:
    """The paired differences."""
    heads = ["POLICY", "ACCOUNTING", "#$/h", "#95 %", "#TOTAL $", "#95 %", "#SLOWDOWN", "#SLO kept", "#JOB h"]
    return heads, [
        [
            row["policy"],
            row["accounting"],
            plus_minus(row["cost_per_hour"], signed=True),
            interval(row["cost_per_hour"]),
            plus_minus(row["total_cost"], signed=True),
            interval(row["total_cost"]),
            plus_minus(row["mean_slowdown"], signed=True),
            plus_minus(row["slo_attainment"], signed=True, scale=100, unit=" pp"),
            plus_minus(row["mean_completion_s"], signed=True, scale=1 / 3600),
        ]
        for row in rows
    ]
