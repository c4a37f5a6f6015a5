"""What the steps of a training run took, from the log that its framework writes.

These formats are known. verl and EasyR1: ``timing_s/gen:12.3 - ...`` on the console, or one JSON object a step.
NeMo-RL: ``Total step time: 44.7s`` and the lines below it, or JSON. OpenRLHF: a dict a step with ``timing/...``. TRL:
``step_time`` in a dict, with ``profiling/Time taken: ...`` in JSON lines that wandb, trackio or mlflow export. Any: a
CSV with ``gen_s`` and ``train_s``. Keys may have ``_`` for ``/`` (``timing_s_gen``). What a line says of anything else
is passed over. The log of an asynchronous run is refused: its times do not add up to a turn.
"""

import ast
import csv
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import Struct

from rollmuxd.sim.workload import Malformed


class Step(Struct, frozen=True):
    """One iteration, in seconds."""

    rollout_s: float
    train_s: float
    #: handing the weights to the inference engine
    sync_s: float = 0.0
    #: what needs no GPU of the pools: scoring, data
    gap_s: float = 0.0

    @property
    def total_s(self) -> float:
        """All of it, one after the other."""
        return self.rollout_s + self.train_s + self.sync_s + self.gap_s


#: the last word of a key, and what it is part of
ROLLOUT: Final = frozenset(("gen", "gen_s", "generation", "vLLM.generate", "transformers.generate"))
ROLLOUT_TOO: Final = frozenset(("transformers.generate_batch",))
TRAIN: Final = frozenset(
    ("update_actor", "update_critic", "old_log_prob", "old", "ref", "ref_log_prob", "values", "adv", "train_s")
    + ("old_logprob_s", "ref_s", "values_s", "critic_update_s", "adv_s", "policy_training", "training_prep")
    + ("policy_and_reference_logprobs", "logprob_inference_prep", "make_experience", "ppo_train")
)
SYNC: Final = frozenset(
    ("update_weights", "sync_weights", "broadcast", "weight_sync", "reshard", "sync_s")
    + ("prepare_for_generation", "prepare_for_generation/total", "prepare_for_generation_total")
)
GAP: Final = frozenset(("reward", "reward_s", "reward_calculation", "data_processing", "_calculate_rewards"))
#: the whole step; what is not told of it is training (TRL tells only the rest)
WHOLE: Final = frozenset(("step", "step_s", "step_time", "step_total", "total_step_time"))

#: the time inside the inference engine: longer than the rollout that the trainer sees if the two overlap
ENGINE: Final = frozenset(("gen_engine_s", "generate_sequences"))
#: what only asynchronous trainers log: two of verl, and that of NeMo-RL
ASYNCHRONOUS: Final = frozenset(("wait_prev_gen", "fully_async", "exposed_generation"))
#: phases overlap if a step takes less than this share of its rollout and training
OVERLAP: Final = 0.9

#: columns of a CSV, and what TRL calls a step
_BARE: Final = frozenset(
    ("gen_s", "train_s", "sync_s", "reward_s", "old_logprob_s", "ref_s", "values_s", "critic_update_s", "adv_s")
    + ("gen_engine_s", "step_s", "step_time")
)
_PREFIX: Final = re.compile(
    r"^(?:timing_s[/_]|timing[/_]train[/_]|timing[/_]|train[/_]timing[/_]|profiling/Time taken: (?:\w+Trainer\.)?)"
)
_PAIR: Final = re.compile(r"((?:timing_s|timing|fully_async)/[\w/]+):(?:np\.float\d+\()?([0-9.]+(?:e[+-]?\d+)?)")
_BLOCK: Final = re.compile(r"Total step time: ([0-9.]+) ?s")
_LINE: Final = re.compile(r"^[^\w]*([\w/]+): ([0-9.]+) ?s \([0-9.]+ ?%\)")
#: the first steps build engines and compile kernels
WARM_UP: Final = 1


def read(path: Path) -> list[Step]:
    """The steps of a log, its first left out if there are others.

    Raises:
        ValueError: there are none in it, or its rollout and training overlap (``Malformed``: it cannot be read).
        OSError: it cannot be read.
    """
    records = list(_records(path))
    if overlap := _overlap(records):
        raise ValueError(
            f"{path}: this is the log of an asynchronous run: {overlap}. An estimate needs what each phase takes by "
            "itself. Log about 30 steps of the same job with its synchronous trainer, or write these times as a CSV "
            "with the columns gen_s and train_s (without step_s)"
        )
    found = [step for record in records if (step := _step(record)) is not None]
    if not found:
        raise ValueError(
            f"{path}: no step in it tells what rollout and training took. Known are the logs of verl, EasyR1, NeMo-RL "
            "and OpenRLHF, TRL's where it reports profiling (wandb, trackio or mlflow, exported as JSON lines), and a "
            "CSV with the columns gen_s and train_s"
        )
    return found[WARM_UP:] or found


def _overlap(records: Sequence[Mapping[str, float]]) -> str:
    """By what the phases are known to overlap; empty: they do not, as far as the log tells."""
    for record in records:
        if names := sorted(ASYNCHRONOUS & record.keys()):
            return f"only such a trainer logs {names[0]}"
    told = [it for it in records if WHOLE & it.keys() and _rollout(it) and _sum(it, TRAIN)]
    if not told:
        return ""
    told = told[WARM_UP:] or told
    whole, rollout = fmean(_most(it, WHOLE) for it in told), fmean(_rollout(it) for it in told)
    train = fmean(_sum(it, TRAIN) for it in told)
    if whole >= OVERLAP * (rollout + train):
        return ""
    columns = ", ".join(sorted((ROLLOUT | ROLLOUT_TOO | ENGINE | TRAIN) & told[-1].keys()))
    return (
        f"a step takes {whole:.1f} s ({', '.join(sorted(WHOLE & told[-1].keys()))}), clearly less than its rollout of "
        f"{rollout:.1f} s and its training of {train:.1f} s together ({columns})"
    )


def _rollout(times: Mapping[str, float]) -> float:
    """The rollout, or the time inside the engine where that is longer."""
    return max(_sum(times, ROLLOUT) or _sum(times, ROLLOUT_TOO), _most(times, ENGINE))


def _records(path: Path) -> Iterator[dict[str, float]]:
    """What each step reports, by the last words of the keys."""
    with path.open(encoding="utf-8", errors="replace", newline="") as file:
        if path.suffix == ".csv":
            rows = csv.DictReader(file)
            for row in rows:
                _check_seconds(path, rows.line_num, row)
                yield _times(row)
            return
        text = file.read()
    whole = _whole(text)
    if whole is not None:
        yield from _gathered(_times(row) for row in whole)
    else:
        yield from _gathered(_from_lines(text.splitlines()))


def _check_seconds(path: Path, line: int, row: Mapping[str, Any]) -> None:
    """Refuse what our own two columns have in the place of seconds. An empty field is none, as in exports."""
    for column in ("gen_s", "train_s"):
        text = row.get(column) or "0"
        try:
            wrong = float(text) < 0
        except ValueError:
            wrong = True
        if wrong:
            raise Malformed(str(path), line, column, f"{text!r} is there, and seconds are needed")


def _whole(text: str) -> list[Mapping[str, Any]] | None:
    """The rows of a file that is one JSON value: a list, or TRL's ``trainer_state.json``."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    rows = value.get("log_history") if isinstance(value, dict) else value
    return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else None


def _from_lines(lines: Iterable[str]) -> Iterator[dict[str, float]]:
    block: dict[str, float] | None = None
    for line in lines:
        began = _BLOCK.search(line)
        if began is not None:
            if block:
                yield block
            block = {"total_step_time": float(began[1])}
            continue
        told = _LINE.match(line) if block is not None else None
        if told is not None and block is not None:
            block[told[1]] = float(told[2])
            continue
        if pairs := _PAIR.findall(line):
            yield _times({key: float(value) for key, value in pairs})
        elif (row := _row(line)) is not None:
            yield _times(row)
    if block:
        yield block


def _row(line: str) -> Mapping[str, Any] | None:
    """The JSON object, or Python's dict, that a line has."""
    start, end = line.find("{"), line.rfind("}")
    if start < 0 or end < start:
        return None
    for parse in (json.loads, ast.literal_eval):
        try:
            value = parse(line[start : end + 1])
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            continue
        return value if isinstance(value, dict) else None
    return None


def _times(row: Mapping[str, Any]) -> dict[str, float]:
    """The row's times by the last words of their keys; nested rows (``{"timing_s": {"gen": 1.2}}``) as well."""
    found: dict[str, float] = {}
    for key, value in _flat(row):
        prefix = _PREFIX.match(key)
        name = key[prefix.end() if prefix else 0 :]
        if name.startswith("fully_async/"):
            found["fully_async"] = value
        elif prefix is not None or key in _BARE:
            found[name] = value
    return found


def _flat(row: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, "" if key == "data" else f"{name}/")
            continue
        try:
            yield name, float(value)
        except (TypeError, ValueError):
            continue


def _gathered(records: Iterable[dict[str, float]]) -> Iterator[dict[str, float]]:
    """One record a step: TRL reports each time by itself, and the step's own last."""
    waiting: dict[str, float] = {}
    for record in records:
        if not record:
            continue
        for key, value in record.items():
            waiting[key] = waiting.get(key, 0.0) + value
        if WHOLE & record.keys() or (ROLLOUT & record.keys() and TRAIN & record.keys()):
            yield waiting
            waiting = {}


def _step(times: Mapping[str, float]) -> Step | None:
    """A step, if its rollout and its training are reported, or follow from the rest."""
    rollout = _sum(times, ROLLOUT) or _sum(times, ROLLOUT_TOO)
    sync, gap, train = _sum(times, SYNC), _sum(times, GAP), _sum(times, TRAIN)
    whole = _most(times, WHOLE)
    if not train and whole > rollout + sync + gap:
        train = whole - rollout - sync - gap
    return Step(rollout, train, sync, gap) if rollout > 0 and train > 0 else None


def _sum(times: Mapping[str, float], keys: frozenset[str]) -> float:
    return sum(value for key, value in times.items() if key in keys)


def _most(times: Mapping[str, float], keys: frozenset[str]) -> float:
    return max((times[key] for key in keys & times.keys()), default=0.0)
