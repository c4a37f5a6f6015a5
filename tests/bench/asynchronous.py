"""Asynchronous runs on one train node, under live daemons: each is as slow as it has to be, and as the daemon says.

Each asynchronous run makes a batch in 10 s, which goes on while it waits, and trains for 4 s. *three*: three of them,
so that the node has 12 s of work in 10 s: a slowdown of 1.2 is the best. *mixed*: two of them beside a synchronous run,
which rolls out for 6 s on a node of its own and trains for 4 s on the same train node: again 1.2 at best.
"""

import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import msgspec
from figures import Json, at_least, at_most, say, short
from live import Daemon
from sharing import Pairs, Phases, jobs, sharers, until

PACE_S: Final = 10.0
TRAIN_S: Final = 4.0
#: of each job, at least. The daemon counts from request to request, the truth from step to step; both meet with time
ITERATIONS: Final = 20
#: iterations of a job that are not judged: the node is not yet full
FIRST: Final = 2
NAMES: Final = ("one", "two", "three")


def run(budget_s: float, *, small: bool = False) -> Json:
    """Slowdowns by the clients' clocks, slowdowns that the daemon says, and the use of the node."""
    del budget_s
    times, iterations = (0.03, 4) if small else (1.0, ITERATIONS)
    with tempfile.TemporaryDirectory(prefix="rollmuxd-bench-") as folder, ThreadPoolExecutor(2) as both:
        cases = [
            both.submit(_share, Path(folder) / name, count, times, iterations)
            for name, count in (("three", 0), ("mixed", 1))
        ]
        three, mixed = (case.result() for case in cases)
    off = [abs(true - said) for true, said in zip(three["slowdowns_true"], three["slowdowns_said"], strict=True)]
    found: Json = {
        **three,
        "worst_true": max(three["slowdowns_true"]),
        "worst_said": max(three["slowdowns_said"]),
        "said_off": short(max(off)),
        "mixed": {**mixed, "worst_true": max(mixed["slowdowns_true"])},
    }
    found["targets"] = {
        "use": at_least(found["use"], 0.97),
        "worst_true": at_most(found["worst_true"], 1.26),
        "worst_said": at_most(found["worst_said"], 1.26),
        "said_off": at_most(found["said_off"], 0.05),
        "mixed.worst_true": at_most(found["mixed"]["worst_true"], 1.35),
    }
    return found


def _share(folder: Path, synchronous: int, times: float, iterations: int) -> Json:
    """Three runs, the first so many of which are synchronous."""
    train = ("train", TRAIN_S * times)
    rollout = ("rollout", (PACE_S - TRAIN_S) * times)
    told: list[tuple[Phases, dict[str, Any]]] = []
    for number, name in enumerate(NAMES):
        if number < synchronous:
            wants = {"rollout": {"seconds": rollout[1]}, "train": {"seconds": train[1]}}
            told.append(([rollout, train], {"name": name, **wants}))
        else:
            wants = {"train": {"nodes": 1, "seconds": train[1]}, "asynchronous": {"pace_s": PACE_S * times}}
            told.append(([train], {"name": name, **wants}))
    made = Pairs(folder, 1)
    try:
        made.start()
        with sharers(made, told) as three:
            say(f"async: {synchronous} synchronous of three, {iterations} iterations each")
            until(lambda: all(it["iterations"] >= iterations for it in jobs(made)), "all iterations are done")
            said = {it["name"]: it["slowdown"] for it in jobs(made)}
            ends = [one.end() for one in three]
        use = _use(made)
    finally:
        made.end()
    # (What a job prints first is the clock at its beginning.)
    spans = [(clock[1 + FIRST : 1 + iterations]) for clock in ends]
    true = [(span[-1] - span[0]) / (len(span) - 1) / (PACE_S * times) for span in spans]
    return {
        "use": short(use),
        "slowdowns_true": [short(one) for one in true],
        "slowdowns_said": [short(said[name]) for name in NAMES],
    }


def _use(made: Daemon) -> float:
    """In what share of the time a train slot ran, from each job's third slot on until the first job ends."""
    since: dict[str, int] = {}
    held: list[tuple[int, int]] = []
    grants: dict[str, list[int]] = {}
    slots: dict[str, str] = {}
    for _, at, kind, body in made.rows():
        fact = msgspec.json.decode(body)
        if kind == "slot_queued" and fact["phase"] == "train":
            slots[fact["slot"]] = fact["job"]
        elif kind == "slot_granted" and fact["slot"] in slots:
            since[fact["slot"]] = at
            grants.setdefault(slots[fact["slot"]], []).append(at)
        elif kind == "slot_released" and fact["slot"] in since:
            held.append((since.pop(fact["slot"]), at))
    first, last = max(at[FIRST] for at in grants.values()), min(at[-1] for at in grants.values())
    return sum(max(0, min(end, last) - max(begin, first)) for begin, end in held) / (last - first)
