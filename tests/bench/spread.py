"""Where jobs go that state an SLO and no times: five of them on two rollout nodes and two train nodes, live."""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Final

from figures import Json, at_most
from live import Daemon
from sharing import Pairs, jobs, sharers, until

PHASES: Final = (("rollout", 0.2), ("train", 0.15))
JOBS: Final = 5
#: each is measured by then, and its promise is judged
ITERATIONS: Final = 5


def run(budget_s: float, *, small: bool = False) -> Json:
    """How many jobs share each pair of nodes, the fullest first."""
    del budget_s, small
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder:
        made = Pairs(Path(folder) / "daemon", 2)
        try:
            made.start()
            with sharers(made, [(PHASES, {"name": f"job{number}", "slo": 1.5}) for number in range(JOBS)]):
                until(lambda: all(it["iterations"] >= ITERATIONS for it in jobs(made)), "all jobs are measured")
                pairs = Counter(tuple(node for nodes in it["pins"].values() for node in nodes) for it in jobs(made))
                unmet = {it["name"] for it in jobs(made) if it["unmet"]}
                # said at the next heartbeat; what was said is said once, though a promise may be dropped meanwhile
                until(lambda: unmet <= said(made), f"{', '.join(unmet)} have said that their promise is not kept")
                silent = {it["name"] for it in jobs(made) if it["unmet"]} - said(made)
        finally:
            made.end()
    shares = sorted(pairs.values(), reverse=True)
    return {
        "jobs": JOBS,
        "jobs_per_node_pair": shares,
        "most_on_a_pair": shares[0],
        "promises_dropped": len(unmet),
        "promises_dropped_in_silence": len(silent),
        "targets": {"most_on_a_pair": at_most(shares[0], 3), "promises_dropped_in_silence": at_most(len(silent), 0)},
    }


def said(daemon: Daemon) -> set[str]:
    """The jobs whose loops have printed, on stderr, that what they asked for is not kept."""
    logs = daemon.folder.glob("job*.log")
    return {log.stem for log in logs if f"{log.stem}: it asked for slo=1.5" in log.read_text()}
