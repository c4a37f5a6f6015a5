"""``make golden``: what the scheduler does on fixed workloads, as digests and figures; one JSON object on stdout.

It is the proof of a change that must change nothing. Keep the output of the version before, then compare::

    make -s golden > before.json
    make golden ARGS="--against before.json"

- ``digests`` has two entries for each run. ``bytes/...`` is the SHA-256 of all facts as the journal keeps them.
  ``structure/...`` is the same without the fields that hold sentences, so a better sentence does not change it. Names
  of Python classes, fields and modules are in neither, as long as the stored names stay.
- ``outcomes`` has cost, SLOs kept, mean slowdown, moves and loads for each policy and workload, with the spread over
  the draws.

Every run is made twice, in two processes with two orders of hashes; both must give the same. Nothing depends on time.
"""

import argparse
import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rollmuxd.core import facts
from rollmuxd.sim.compare import Task
from rollmuxd.sim.outcome import Outcome
from rollmuxd.sim.workload import Options

sys.path.insert(0, str(Path(__file__).parents[1]))
from simkit import checked
from simkit.faults import PRESETS

#: `default` is what the daemon runs
POLICIES: Final = ("rollmux", "default")
#: the fields of facts that hold sentences
PROSE: Final = frozenset({"error", "reason", "refused", "why"})
#: two orders of Python's hashes
HASH_SEEDS: Final = ("0", "4242")

_SLO: Final = (1.0, 2.0)
_MOVING: Final = Options(slo=_SLO, switch="table", sync="table")


class Case(NamedTuple):
    """A workload, and how it is played."""

    name: str
    workload: str
    fidelity: str
    options: Options
    faults: str = "none"
    #: how often it is drawn, and how often with ``--full``
    draws: int = 2
    all_draws: int = 5


CASES: Final = (
    # nothing in the first three is drawn
    Case("micro-temporal", "micro-temporal", "phase", _MOVING, draws=1, all_draws=1),
    Case("micro-train", "micro-train", "phase", _MOVING, draws=1, all_draws=1),
    Case("micro-spatial", "micro-spatial", "phase", _MOVING, draws=1, all_draws=1),
    Case("micro-spatial-faults", "micro-spatial", "phase", _MOVING, faults="all", draws=1),
    # few nodes, bounds, and phases that take another time in each iteration
    Case(
        "generated", "generated", "phase", msgspec.structs.replace(_MOVING, jobs=12, nodes={"rollout": 3, "train": 3})
    ),
    Case("weave-production", "weave-production", "cost", msgspec.structs.replace(_MOVING, jobs=60)),
)


# ---- one run ---------------------------------------------------------------------------------------------------------


def without_prose(value: Any) -> Any:
    """The same, without the fields that hold sentences, at any depth."""
    if isinstance(value, dict):
        return {key: without_prose(inner) for key, inner in value.items() if key not in PROSE}
    if isinstance(value, list):
        return [without_prose(inner) for inner in value]
    return value


class Digests:
    """Two digests of all facts of a run."""

    def __init__(self, keep: Path | None = None) -> None:
        self.bytes, self.structure = hashlib.sha256(), hashlib.sha256()
        self._kept = keep.open("wb") if keep is not None else None

    def hear(self, fact: facts.Fact) -> None:
        """The next fact."""
        body = facts.encode(fact)
        self.bytes.update(body + b"\n")
        self.structure.update(msgspec.json.encode(without_prose(msgspec.json.decode(body))) + b"\n")
        if self._kept is not None:
            self._kept.write(body + b"\n")

    def close(self) -> None:
        """No more facts come."""
        if self._kept is not None:
            self._kept.close()


def play(case: Case, policy: str, seed: int, keep: Path | None, jobs: int | None) -> tuple[Outcome, Digests]:
    """One run, of so many jobs at most."""
    digests = Digests(keep / f"{policy}-{case.name}-{seed}.jsonl" if keep is not None else None)
    options = case.options if jobs is None else msgspec.structs.replace(case.options, jobs=jobs)
    task = Task(case.workload, options, policy, case.fidelity, "work", seed)
    try:
        return checked.perform(task, faults=PRESETS[case.faults], hear=digests.hear), digests
    finally:
        digests.close()


# ---- all runs --------------------------------------------------------------------------------------------------------

_FIGURES: Final[dict[str, Callable[[Outcome], float | None]]] = {
    "cost": lambda outcome: outcome.cost,
    "slo_kept": lambda outcome: outcome.attainment,
    "mean_slowdown": lambda outcome: _mean([job.slowdown for job in outcome.jobs]),
    "moves": lambda outcome: sum(job.moves for job in outcome.jobs),
    "loads": lambda outcome: sum(job.warm + job.cold for job in outcome.jobs),
}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """Mean, standard deviation, least and most; None: there was nothing to judge."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    sd = statistics.stdev(known) if len(known) > 1 else 0.0
    return {"mean": math.fsum(known) / len(known), "sd": sd, "min": min(known), "max": max(known)}


def golden(
    names: Sequence[str], *, full: bool = False, keep: Path | None = None, jobs: int | None = None
) -> dict[str, Any]:
    """All digests and outcomes of these cases."""
    digests: dict[str, str] = {}
    outcomes: dict[str, dict[str, Any]] = {policy: {} for policy in POLICIES}
    for policy in POLICIES:
        for case in [case for case in CASES if case.name in names]:
            found = []
            for seed in range(case.all_draws if full else case.draws):
                outcome, told = play(case, policy, seed, keep, jobs)
                digests[f"bytes/{policy}/{case.name}/{seed}"] = told.bytes.hexdigest()
                digests[f"structure/{policy}/{case.name}/{seed}"] = told.structure.hexdigest()
                found.append(outcome)
            outcomes[policy][case.name] = {
                name: spread([figure(outcome) for outcome in found]) for name, figure in _FIGURES.items()
            }
    return {"digests": digests, "outcomes": outcomes}


# ---- comparing -------------------------------------------------------------------------------------------------------


def differences(before: Any, now: Any, at: str = "") -> Iterator[str]:
    """Every place where two outputs differ, in order, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for key in list(dict.fromkeys([*before, *now])):
            where = f"{at} > {key}" if at else key
            if key not in before or key not in now:
                yield f"{where} is in one of the two only"
            else:
                yield from differences(before[key], now[key], where)
    elif before != now:
        yield f"{at}: {before} before, {now} now"


def compared(before: dict[str, Any], now: dict[str, Any], proof: str) -> list[str]:
    """Where two outputs differ: everywhere, or without the digests of bytes."""

    def kept(output: dict[str, Any]) -> dict[str, Any]:
        digests = output["digests"].items()
        wanted = {key: value for key, value in digests if proof == "bytes" or not key.startswith("bytes/")}
        return {**output, "digests": wanted}

    return list(differences(kept(before), kept(now)))


# ---- the command -----------------------------------------------------------------------------------------------------


def in_child(words: Sequence[str], hash_seed: str) -> dict[str, Any]:
    """The output of a process with this order of hashes."""
    env = {**os.environ, "PYTHONHASHSEED": hash_seed}
    command = [sys.executable, __file__, "--child", *words]
    ran = subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True)
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def main() -> int:
    """Run, print, compare."""
    names = [case.name for case in CASES]
    parser = argparse.ArgumentParser(description="Digests and outcomes of fixed runs; one JSON object on stdout.")
    parser.add_argument("--full", action="store_true", help="every draw of each workload")
    parser.add_argument("--jobs", type=int, help="so many jobs of each workload, instead of its own number")
    parser.add_argument("--only", default=",".join(names), help="some of the workloads, with commas")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with a former output; 1 if it differs")
    parser.add_argument(
        "--proof", choices=["bytes", "structure"], default="bytes",
        help="what --against compares: everything, or all but the digests of bytes",
    )  # fmt: skip
    parser.add_argument("--keep", type=Path, metavar="DIR", help="write the facts of each run there, to look at")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    only = asked.only.split(",")
    if strange := [name for name in only if name not in names]:
        parser.error(f"{strange[0]} is none of {', '.join(names)}")
    if asked.child:
        print(json.dumps(golden(only, full=asked.full, keep=asked.keep, jobs=asked.jobs)))
        return 0

    before = json.loads(asked.against.read_text()) if asked.against is not None else None
    words = ["--only", asked.only, *(["--full"] if asked.full else [])]
    words += [] if asked.jobs is None else ["--jobs", str(asked.jobs)]
    kept = []
    if asked.keep is not None:
        asked.keep.mkdir(parents=True, exist_ok=True)
        kept = ["--keep", str(asked.keep)]
    found = in_child([*words, *kept], HASH_SEEDS[0])
    print(json.dumps(found, indent=1))
    if unequal := list(differences(found, in_child(words, HASH_SEEDS[1]))):
        print(f"golden: two runs of this version differ, first: {unequal[0]}", file=sys.stderr)
        return 1
    if before is not None and (changed := compared(before, found, asked.proof)):
        print(f"golden: {len(changed)} differences from {asked.against}, first: {changed[0]}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
