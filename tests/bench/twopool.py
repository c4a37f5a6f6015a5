"""What a sync over both pools costs: two jobs on one rollout node and one train node, under a live daemon.

Each rolls out for 4 s, trains for 3 s and hands its weights on for 0.5 s over both pools. Its states take 0.2 s to
load, and as long to park. Alone an iteration takes 7.5 s; taking turns would be a slowdown of 2.
"""

import tempfile
from pathlib import Path
from typing import Final

from figures import Json, at_most, say, short
from sharing import Pairs, jobs, sharers, until

PHASES: Final = (("rollout", 4.0), ("train", 3.0), ("sync", 0.5))
STATE_GB: Final = 40
MOVES_S: Final = 0.2
#: of each job
ITERATIONS: Final = 12


def run(budget_s: float, *, small: bool = False) -> Json:
    """Both slowdowns, by the clients' clocks, over the time in which both are there."""
    del budget_s
    shorter = 0.02 if small else 1.0
    phases = [(name, seconds * shorter) for name, seconds in PHASES]
    state = {"gpu_gb": STATE_GB, "ram_gb": 8 * STATE_GB / 4, "driver": "mock"}
    cycle = {"rollout": "rollout", "train": "train", "sync": ["rollout", "train"]}
    told = {"rollout": state, "train": state, "phases": cycle}
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder:
        made = Pairs(Path(folder) / "daemon", 1, copy_gbps=8 * STATE_GB / (MOVES_S * shorter))
        try:
            made.start()
            with sharers(made, [(phases, {"name": name, **told}) for name in ("first", "second")]) as both:
                say(f"twopool: both have begun, {ITERATIONS} iterations each")
                until(lambda: all(it["iterations"] >= ITERATIONS for it in jobs(made)), "all iterations are done")
                ends = [one.end() for one in both]
        finally:
            made.end()
    over = min(times[-1] for times in ends)
    alone_s = sum(seconds for _, seconds in phases)
    slowdowns = []
    for times in ends:
        inside = [at for at in times if at <= over]
        slowdowns.append(short((inside[-1] - inside[0]) / (len(inside) - 1) / alone_s))
    return {
        "iterations": ITERATIONS,
        "slowdowns": slowdowns,
        "worst_slowdown": max(slowdowns),
        "targets": {"worst_slowdown": at_most(max(slowdowns), 1.5)},
    }
