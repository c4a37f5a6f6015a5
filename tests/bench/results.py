"""``make results``: run what docs/results.md shows, and write its tables anew.

Each section has a name, and one command makes it: ``make results RESULTS=production``. Text between the tables is
written by hand; what stands between a section's two marks is made here. Everything is drawn from seeds, so the same
version of the simulator gives the same tables, on any machine.
"""

import argparse
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import combinations
from operator import mul
from pathlib import Path
from typing import Any, Final

from rollmuxd.cli.sim.processes import run_all
from rollmuxd.sim import tables
from rollmuxd.sim.compare import Task, in_order, tasks
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.workload import Options

sys.path.insert(0, str(Path(__file__).parents[1]))
from simkit import checked

from rollmuxd_evaluation.workloads.micro import MULTIPLEXING, types

PAGE: Final = Path(__file__).parents[2] / "docs" / "results.md"
#: the public step logs, for ``noise``
DATA: Final = Path(os.environ.get("ROLLMUX_DATA") or Path(__file__).parents[3] / "shared" / "data")
CORES: Final = len(os.sched_getaffinity(0))


def most(case: str, prices: tuple[float, float] = (1 / 3, 1.0)) -> float:
    """Throughput for the same money against dedicated pools that no schedule of a case of multiplexing exceeds.

    No node works for more than all of the time, and no job is faster than alone on all training nodes. That is a linear
    programme in how often each type iterates. Who waits for whom, and on which node a job sits, is left out, so real
    schedules do less. Prices are those of a node of each pool, and only their ratio counts.
    """
    letters, nodes = MULTIPLEXING[case]
    shapes, counts = types(), Counter(letters)
    # a type's rate is in units of one job's pace alone; limits are (what a unit takes of each type, what there is)
    worth: list[float] = []
    fastest: list[float] = []
    used: list[list[float]] = []
    for letter, count in counts.items():
        shape = shapes[letter]
        alone, (rollout, train) = sum(shape.planned), shape.planned
        worth.append(sum(map(mul, prices, shape.footprint)))
        fastest.append(count * alone / (rollout + train * shape.nodes[1] / nodes[1]))
        used.append([rollout * shape.nodes[0] / alone, train * shape.nodes[1] / alone])
    unit = [[float(it == at) for it in range(len(worth))] for at in range(len(worth))]
    limits = [*zip(zip(*used, strict=True), nodes, strict=True), *zip(unit, fastest, strict=True)]
    limits += [([-part for part in line], 0.0) for line in unit]
    best = max(
        sum(map(mul, worth, rates))
        for corner in combinations(limits, len(worth))
        for rates in _solved(corner)
        if all(sum(map(mul, line, rates)) <= most + 1e-9 for line, most in limits)
    )
    return float(best / sum(map(mul, prices, nodes)))


def _solved(corner: Sequence[tuple[Sequence[float], float]]) -> list[tuple[float, ...]]:
    """Where one or two limits hold exactly; none where they never meet."""
    if len(corner) == 1:
        ((line, end),) = corner
        return [(end / line[0],)]
    (a, first), (b, second) = corner
    crosses = a[0] * b[1] - a[1] * b[0]
    if abs(crosses) < 1e-12:
        return []
    return [((first * b[1] - second * a[1]) / crosses, (a[0] * second - b[0] * first) / crosses)]


def ran(some: Sequence[Task]) -> list[Outcome]:
    """All runs, on all cores, in order."""
    return in_order(some, list(run_all(some, CORES, checked.perform)))


def compared(
    workload: str,
    policies: str,
    *,
    seeds: int,
    slo: tuple[float, float] | None = (1.0, 2.0),
    fidelity: str = "cost",
    max_group: int = 5,
    move_s: float | None = None,
    **options: Any,
) -> list[Outcome]:
    """As ``rollmuxd sim compare`` would."""
    print(f"results: {workload}, {policies}, slo {slo}, {options or ''}", file=sys.stderr, flush=True)
    asked = Options(slo=slo, **options)
    return ran(tasks(workload, asked, policies.split(","), fidelity, range(seeds), max_group, move_s))


def grid(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table in Markdown."""
    first, *others = [f"| {' | '.join(str(cell) for cell in line)} |" for line in (head, *rows)]
    return "\n".join([first, "|" + "---|" * len(head), *others])


def spread(of: dict[str, float] | None, digits: int = 0) -> str:
    """Mean and standard deviation."""
    if of is None:
        return "-"
    return f"{of['mean']:.{digits}f}" + (f" ± {of['sd']:.{digits}f}" if of["sd"] else "")


def percent(of: dict[str, float] | None, digits: int = 1) -> str:
    """A share's mean."""
    return "-" if of is None else f"{100 * of['mean']:.{digits}f} %".replace("100.0 %", "100 %")


def by_policy(outcomes: Sequence[Outcome]) -> dict[str, dict[str, Any]]:
    """Rows of the summary, by name."""
    return {row["policy"]: row for row in tables.summary(outcomes)}


# ---- sections --------------------------------------------------------------------------------------------------------


def production() -> str:
    """The paper's trace: cost, peaks, attainment; both accountings."""
    names = "solo,colocated,rollmux,rollmux-artifact,gavel,random,most-idle"
    rows = by_policy(compared("weave-production", names, seeds=20))
    told = []
    for name, row in rows.items():
        paper, work = row["paper"], row["work"]
        told.append([
            f"`{name}`", spread(paper["cost_per_hour"]),
            f"{rows['solo']['paper']['cost_per_hour']['mean'] / paper['cost_per_hour']['mean']:.2f} x",
            " / ".join(str(gpus) for gpus in paper["peak_gpus"].values()),
            percent(paper["slo_attainment"]), f"{paper['slowdown']['mean']:.2f}",
            f"{work['total_cost'] / 1000:.1f}", f"{rows['solo']['work']['total_cost'] / work['total_cost']:.2f} x",
            f"{work['mean_completion_s'] / 3600:.1f}", percent(work["slo_attainment"]),
        ])  # fmt: skip
    head = ["policy", "$/h", "Solo-D / it", "peak H20 / H800", "SLO kept", "slowdown",
            "work: k$", "work: Solo-D / it", "work: mean job h", "work: SLO kept"]  # fmt: skip
    return grid(head, told)


def targets() -> str:
    """Rows 4 to 7 of the acceptance figures: 40 draws of SLO ~ U(1.1, 2)."""
    outcomes = compared("weave-production", "solo,colocated,rollmux-artifact,rollmux", seeds=40, slo=(1.1, 2))
    rows = by_policy(outcomes)
    dearer = next(
        row for row in tables.paired(outcomes, "rollmux-artifact")
        if row["policy"] == "rollmux" and row["accounting"] == "paper"
    )["cost_per_hour"]  # fmt: skip
    base = rows["rollmux-artifact"]["paper"]["cost_per_hour"]["mean"]
    told = []
    wanted = {"solo": "945, 328/328", "colocated": "709, 0/328", "rollmux-artifact": "490 to 545 (mean 520), 210/150",
              "rollmux": "1 to 10 % dearer"}  # fmt: skip
    for name, row in rows.items():
        paper = row["paper"]
        cost, admitted = paper["cost_per_hour"], sum(paper["admissions"].values())
        shares = [
            f"{100 * paper['admissions'].get(kind, 0) / admitted:.0f}" for kind in ("packing", "scaling", "isolated")
        ]
        told.append([
            f"`{name}`", f"{cost['mean']:.0f} ({cost['min']:.0f} to {cost['max']:.0f})",
            " / ".join(str(gpus) for gpus in paper["peak_gpus"].values()), " / ".join(shares),
            percent(paper["slo_attainment"]), wanted[name],
        ])  # fmt: skip
    told[-1][-1] += f": {100 * dearer['mean'] / base:+.1f} % ± {100 * dearer['sd'] / base:.1f}"
    head = ["policy", "$/h mean (range)", "largest peak", "packing / scaling / new %", "SLO kept", "target"]
    return grid(head, told)


def sweeps() -> str:
    """The paper's simulation study (1.16b): cost relative to the optimum, and attainment."""
    names, seeds = "optimal,rollmux,random,most-idle", 4
    cases: list[tuple[str, str, dict[str, Any], str, str, str]] = [
        ("type BL", "BL", {}, "1.12", "2.00", "1.75"),
        ("type RH", "RH", {}, "1.10", "1.92", "1.89"),
        ("type TH", "TH", {}, "1.01", "1.72", "1.38"),
        ("type Mixed", "mixed", {}, "1.06", "1.97", "1.66"),
        ("SLO 1.2", "mixed", {"slo": (1.2, 1.2)}, "1.07", "2.09", "1.73"),
        ("SLO 1.5", "mixed", {"slo": (1.5, 1.5)}, "1.07", "1.95", "1.75"),
        ("SLO 2.0", "mixed", {"slo": (2.0, 2.0)}, "1.07", "1.89", "1.59"),
        ("group of 2", "mixed", {"max_group": 2}, "1.10", "2.01", "1.68"),
        ("group of 3", "mixed", {"max_group": 3}, "1.07", "1.91", "1.59"),
        ("group of 4", "mixed", {"max_group": 4}, "1.06", "2.15", "1.71"),
    ]
    told = []
    for case, workload, options, *paper in cases:
        outcomes = [o for o in compared(workload, names, seeds=seeds, **options) if o.accounting == "paper"]
        best = {o.seed: o.cost for o in outcomes if o.policy_under_test == "optimal"}
        row = [case, "optimum" if all(o.exact for o in outcomes if o.policy_under_test == "optimal") else "best found"]
        for name, theirs in zip(names.split(",")[1:], paper, strict=True):
            mine = [o for o in outcomes if o.policy_under_test == name]
            bill = statistics.mean(o.cost / best[o.seed] for o in mine)
            fined = statistics.mean((o.cost + o.fines) / best[o.seed] for o in mine)
            kept = 100 * statistics.mean(o.attainment or 0 for o in mine)
            if name == "rollmux":
                row.append(f"**{bill:.2f}** / {theirs}")
            else:
                row += [f"{bill:.2f} ({kept:.0f} %)", f"**{fined:.2f}** / {theirs}"]
        told.append(row)
    head = ["case", "against", "`rollmux` / paper", "random: bill (SLO kept)", "fined / paper",
            "most-idle: bill (SLO kept)", "fined / paper"]  # fmt: skip
    return grid(head, told)


def micro() -> str:
    """Throughput for the same money, three small cases, every phase executed."""
    told = []
    paper = {"micro-temporal": ("1.82", "1.82"), "micro-train": ("2.04", "1.90"), "micro-spatial": ("2.11", "1.99")}
    names = ("default", "rollmux", "rollmux-artifact", "gavel", "colocated")
    for case, (first, second) in paper.items():
        told.append([case])
        for switch in ("none", "table"):
            rows = by_policy(
                compared(case, f"solo,{','.join(names)}", seeds=1, slo=None, fidelity="phase", switch=switch)
            )
            told[-1] += [
                f"{1 / rows[name]['work']['relative_to_solo']['mean']:.2f}"
                for name in names[: 3 if switch == "table" else 5]
            ]
        told[-1] += [f"{most(case):.2f}", f"{first} / {second}"]
    head = ["case", "`default`", "`rollmux`", "`rollmux-artifact`", "gavel", "co-located", "switches paid: `default`",
            "`rollmux`", "`rollmux-artifact`", "at most", "paper: arXiv / OSDI"]  # fmt: skip
    return grid(head, told)


def sensitivity() -> str:
    """What switching and RAM cost: mean of 8 draws, against free switches and 2 TB."""
    base = [outcome.cost_per_hour for outcome in _paper(compared("weave-production", "rollmux", seeds=8))]
    cases: list[tuple[str, dict[str, Any], str]] = [
        ("switches by model size (warm), a cold start each", {"switch": "table"}, "-"),
        ("5 s a switch", {"switch": 5_000}, "+3.1 %"),
        ("80 s a switch (as if always cold)", {"switch": 80_000}, "+37 %"),
        ("weights handed on in a phase on both pools, as the paper does", {"sync": "table"}, "-"),
        ("the same by a flat all-gather", {"sync": "flat"}, "-"),
        ("1 TB of RAM per node", {"ram_gb": 1000}, "+3.0 %"),
        ("2 TB", {"ram_gb": 2000}, "0"),
        ("4 TB", {"ram_gb": 4000}, "0"),
    ]
    told = []
    for case, options, theirs in cases:
        costs = [o.cost_per_hour for o in _paper(compared("weave-production", "rollmux", seeds=8, **options))]
        change = [100 * (cost / free - 1) for cost, free in zip(costs, base, strict=True)]
        told.append([case, f"{statistics.mean(costs):.0f}", f"{statistics.mean(change):+.1f} %", theirs])
    honest = [o.cost_per_hour for o in _paper(compared("weave-production-honest", "rollmux", seeds=8))]
    change = [100 * (cost / free - 1) for cost, free in zip(honest, base, strict=True)]
    told.append(
        ["32B owns two training nodes", f"{statistics.mean(honest):.0f}", f"{statistics.mean(change):+.1f} %", "+10 %"]
    )
    return grid(["case", "$/h", "change", "research replay"], told)


def tails() -> str:
    """Tail migration in the paper's setting: wall time of five iterations without it over that with it."""
    told = []
    paper = {"tail-7B4k": "1.12", "tail-7B8k": "1.19", "tail-7B8k-14B8k": "1.06", "tail-14B8k": "1.28"}
    for case, theirs in paper.items():
        row = [case]
        for switch in ("table", "none"):
            wall = {}
            for tail in ("off", "on"):
                found = compared(
                    case, "rollmux", seeds=1, slo=None, fidelity="phase", switch=switch, more={"tail": tail}
                )
                work = next(outcome for outcome in found if outcome.accounting == "work")
                wall[tail] = max(job.elapsed_ms for job in work.jobs) / 1000
            if switch == "table":
                row += [f"{wall['off']:.0f} s", f"{wall['on']:.0f} s"]
            row.append(f"{wall['off'] / wall['on']:.2f}")
        told.append([*row, theirs])
    return grid(["case", "kept", "released", "gain", "gain, switches free", "paper"], told)


def noise() -> str:
    """What becomes of the promise when iterations take what real ones took."""
    told = []
    for case, options in (
        ("real step logs, planned on means", {"data": str(DATA), "more": {"plan": "mean"}}),
        ("real step logs, planned on the worst", {"data": str(DATA), "more": {"plan": "max"}}),
        ("generated iterations, planned on means", {}),
    ):
        workload = "real-logs" if "data" in options else "generated"
        names = ("rollmux", "rollmux-artifact", *(() if told else ("default",)))
        asked = ",".join(("solo", *names))
        rows = by_policy(compared(workload, asked, seeds=1, fidelity="phase", jobs=100, **options))
        for name in names:
            work = rows[name]["work"]
            told.append([case, f"`{name}`", percent(work["slo_attainment"]), f"{work['slowdown']['mean']:.2f}",
                         f"{1 / work['relative_to_solo']['mean']:.2f} x"])  # fmt: skip
    return grid(["iterations", "policy", "SLO kept", "slowdown", "Solo-D / it (work)"], told)


def quantile() -> str:
    """Planned on the mean of what was seen, on its 90th percentile, and on the worst of it."""
    told = []
    for plan in ("mean", "p90", "worst"):
        options = {"data": str(DATA), "more": {"plan": plan}}
        outcomes = compared("real-logs", "solo,default", seeds=2, fidelity="phase", jobs=40, **options)
        row = by_policy(outcomes)["default"]
        told.append([f"`{plan}`"])
        for accounting in ("paper", "work"):
            found = row[accounting]
            told[-1] += [percent(found["slo_attainment"]), f"{found['relative_to_solo']['mean']:.3f}"]
        told[-1] += [f"{row['work']['slowdown']['mean']:.2f}", f"{_moves(outcomes, 'default'):.0f}"]
    return grid(["plan", "paper: SLO kept", "of Solo-D", "work: SLO kept", "of Solo-D", "slowdown", "moves"], told)


def drift() -> str:
    """Planned on the first ten steps of real logs, which is what a daemon knows."""
    asked = "solo,rollmux,default"
    options = {"data": str(DATA), "more": {"plan": "first10"}}
    outcomes = compared("real-logs", asked, seeds=2, fidelity="phase", jobs=40, **options)
    rows = by_policy(outcomes)
    told = []
    for name in asked.split(",")[1:]:
        paper, work = rows[name]["paper"], rows[name]["work"]
        told.append([
            f"`{name}`", percent(paper["slo_attainment"]), f"{paper['relative_to_solo']['mean']:.3f}",
            percent(work["slo_attainment"]), f"{work['relative_to_solo']['mean']:.3f}",
            f"{work['slowdown']['mean']:.2f}", f"{_moves(outcomes, name):.0f}",
        ])  # fmt: skip
    head = ["policy", "paper: SLO kept", "of Solo-D", "work: SLO kept", "of Solo-D", "slowdown", "moves"]
    return grid(head, told)


def executed() -> str:
    """What was planned, and what came of it when every phase was executed."""
    names = ("rollmux", "rollmux-artifact")
    planned, done = (
        by_policy(compared("weave-production", ",".join(names), seeds=2, fidelity=how)) for how in ("cost", "phase")
    )
    told = []
    for name in names:
        row = [f"`{name}`"]
        for accounting, figure in (("paper", "cost_per_hour"), ("work", "total_cost_spread")):
            plan, done_ = planned[name][accounting], done[name][accounting]
            change = 100 * (done_[figure]["mean"] / plan[figure]["mean"] - 1)
            row += [f"{plan[figure]['mean']:,.0f} / {done_[figure]['mean']:,.0f} ({change:+.1f} %)"]
            row += [percent(done_["slo_attainment"]), f"{done_['slowdown']['mean']:.2f}"]
        told.append([*row, f"{done[name]['work']['switches']['warm']:,.0f}"])
    head = ["policy", "paper: $/h planned / executed", "SLO kept", "slowdown",
            "work: $ planned / executed", "SLO kept", "slowdown", "warm starts"]  # fmt: skip
    return grid(head, told)


def _paper(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return [outcome for outcome in outcomes if outcome.accounting == "paper"]


def _moves(outcomes: Sequence[Outcome], name: str) -> float:
    mine = [outcome for outcome in _paper(outcomes) if outcome.policy_under_test == name]
    return statistics.mean(sum(job.moves for job in outcome.jobs) for outcome in mine)


def rented() -> str:
    """The production trace on nodes that are bought on demand: what spending credit is worth, by what a move takes."""
    told = []
    solo: dict[str, Any] = {}
    for names, move_s in (("solo,rollmux-artifact,default", 30), ("default", 300)):
        for name, row in by_policy(compared("weave-production", names, seeds=4, move_s=move_s)).items():
            paper, work = row["paper"], row["work"]
            solo = solo or row
            told.append([
                f"`{name}`" + (f", {move_s} s a move" if name == "default" else ""), spread(paper["cost_per_hour"]),
                f"{paper['cost_per_hour']['mean'] / solo['paper']['cost_per_hour']['mean']:.3f}",
                percent(paper["slo_attainment"]), f"{paper['slowdown']['mean']:.2f}",
                f"{work['total_cost'] / 1000:.1f}", percent(work["slo_attainment"]),
            ])  # fmt: skip
    head = ["policy", "$/h", "of Solo-D", "SLO kept", "slowdown", "work: k$", "work: SLO kept"]
    return grid(head, told)


def owned() -> str:
    """Nineteen nodes of each pool, and jobs that wait: how long they take."""
    told = []
    for nodes in (19, 12):
        outcomes = compared(
            "weave-production", "solo,rollmux,default", seeds=2,
            nodes={"rollout": nodes, "train": nodes},
        )  # fmt: skip
        for name, row in by_policy(outcomes).items():
            work = row["work"]
            told.append([
                f"{nodes} + {nodes}", f"`{name}`", f"{work['mean_completion_s'] / 3600:.1f}",
                f"{work['mean_wait_s'] / 3600:.1f}", f"{work['slowdown']['mean']:.2f}",
                f"{work['total_cost'] / 1000:.1f}", percent(work["slo_attainment"]),
            ])  # fmt: skip
    return grid(["nodes", "policy", "mean job h", "mean wait h", "slowdown", "k$ of nodes in use", "SLO kept"], told)


def asynchronous() -> str:
    """What runs gain that share a trainer, by how many they are and for what share of the time each trains."""
    shares = ("0.2", "0.3", "0.4", "0.5")
    told = []
    for switch, ahead, counts in ((0, 1, (2, 3)), (5, 1, (2, 3)), (5, 0, (2,))):
        for jobs in counts:
            told.append([f"{switch} %", str(ahead), str(jobs)])
            for share in shares:
                more = {"jobs": str(jobs), "share": share, "switch": str(switch), "ahead": str(ahead), "hours": "6"}
                made = compared("async", "default", seeds=3, slo=None, fidelity="phase", more=more)
                work = [one for one in made if one.accounting == "work"]
                used = [pool.utilisation for one in work for pool in one.pools if pool.name == "train"]
                slow = [job.slowdown or 0.0 for one in work for job in one.jobs]
                told[-1].append(f"{statistics.mean(used):.2f} / {statistics.mean(slow):.2f}")
    return grid(["hand-over", "ahead", "runs", *(f"f = {share}" for share in shares)], told)


SECTIONS: Final[dict[str, Callable[[], str]]] = {
    "targets": targets,
    "production": production,
    "executed": executed,
    "sweeps": sweeps,
    "micro": micro,
    "tails": tails,
    "sensitivity": sensitivity,
    "noise": noise,
    "drift": drift,
    "quantile": quantile,
    "rented": rented,
    "owned": owned,
    "asynchronous": asynchronous,
}


def main() -> None:
    """Write the sections that are asked for into the page."""
    parser = argparse.ArgumentParser(description="Make the tables of docs/results.md.")
    parser.add_argument("--only", default=",".join(SECTIONS), help=f"of {', '.join(SECTIONS)}")
    names = parser.parse_args().only.split(",")
    for name in names:
        if name not in SECTIONS:
            parser.error(f"there is no section {name!r} ({', '.join(SECTIONS)})")
    for name in names:
        began = time.monotonic()
        try:
            made = SECTIONS[name]()
        except FileNotFoundError as no:
            print(f"results: {name} stays as it was: {no}", file=sys.stderr, flush=True)
            continue
        page = PAGE.read_text(encoding="utf-8")
        head, mark, rest = page.partition(f"<!-- made: {name} -->\n")
        _, end, tail = rest.partition("<!-- end -->")
        if not mark or not end:
            sys.exit(f"{PAGE} has no place for {name}: <!-- made: {name} --> and <!-- end -->")
        PAGE.write_text(f"{head}{mark}{made}\n{end}{tail}", encoding="utf-8")
        print(f"results: {name} in {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
