"""How far the models of rollouts can be believed: against public logs and published tables, V1 to V10.

Each figure stands beside its bar. Constants that are fitted on what they are judged by say so. A predicted log of other
hardware or of another model is called *held out*. Sources and licences: ``rollmuxd/sim/data/README.md``.
"""

import copy
import csv
import io
import math
import random
from collections.abc import Iterator, Sequence
from fractions import Fraction
from importlib import resources
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import Struct

from rollmuxd.fabric import flows
from rollmuxd.fabric.sync import Links, Way, seconds
from rollmuxd.fabric.topology import CARD, GPUS_PER_HOST, HOSTS_PER_RACK, fabric
from rollmuxd.rollout.calibrate import Case, Fit, compare, fit, parse
from rollmuxd.rollout.engine import Engine, Replica, Request, step_by_step
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.lengths import Progress, exceeds, quantile
from rollmuxd.rollout.lengths import fit as fit_lengths
from rollmuxd.rollout.models import model
from rollmuxd.sim.inside import hard_math
from rollmuxd.sim.rollouts.batches import AIME, Lengths, read
from rollmuxd.sim.rollouts.study import Check, check, passed

#: RLSim's own claim, by a summary of its paper: 5 % for throughput, 7 % for networks
CLAIM: Final = 0.07


class Log(NamedTuple):
    """A public vLLM log, and the engine that wrote it."""

    file: str
    model: str
    gpu: str
    tp: int
    max_seqs: int
    #: as the engine reported it; 0: it did not
    kv_tokens: int
    #: the model may be off by so much, calibrated; and uncalibrated (None: reported only)
    calibrated: float
    uncalibrated: float | None


LOGS: Final = (
    Log("vllm_llama-3.1-8b_rtx-pro-6000.jsonl", "llama-3.1-8b", "rtx-pro-6000", 1, 128, 0, 0.05, 0.15),
    Log("vllm_qwen3-32b_rtx-pro-6000.jsonl", "qwen3-32b", "rtx-pro-6000", 2, 128, 0, 0.05, 0.15),
    # its KV cache is full most of the time: 200 preemptions
    Log("vllm_llama-3.1-8b_rtx-4090.jsonl", "llama-3.1-8b", "rtx-4090", 1, 256, 41_408, 0.12, None),
)
#: the same requests to the same model are in two logs, of different GPUs
SAME_MODEL: Final = "llama-3.1-8b"
#: Qwen3-32B on 2 H100, vLLM 0.12, 32 requests at a time, 1,024 tokens in and out: ms per token (aiconfigurator)
H100_MS: Final = 20.06
#: RollMux's measured rollouts, seconds, and GPUs (``weave_profiles.csv``): single-turn models from 7B on
PROFILES: Final = {
    ("qwen2.5-7b", 4): (80.5, 8), ("qwen2.5-7b", 8): (133.8, 8), ("qwen2.5-14b", 4): (145.0, 8),
    ("qwen2.5-14b", 8): (238.6, 8), ("qwen2.5-32b", 4): (165.33, 16), ("qwen2.5-32b", 8): (267.6, 16),
}  # fmt: skip
#: RollMux's figure 12, seconds: by way and hosts, of 7B, 14B and 32B
SYNCS: Final[dict[tuple[Way, int], tuple[float, float, float]]] = {
    ("flat", 1): (7.5, 13.8, 30.7), ("two", 1): (0.9, 1.7, 3.9),
    ("flat", 2): (8.2, 15.2, 33.8), ("two", 2): (3.1, 5.8, 12.3),
}  # fmt: skip
#: the paper's links; what flat reaches of them, and the broadcast, are fitted to the table
LINKS: Final = {
    1: Links(slow=(2.5e9,) * 8, hosts=1, fabric=4e11, broadcast=1.9e11, flat_share=0.82, start_s=0.05),
    2: Links(slow=(2.5e9,) * 16, hosts=2, fabric=4e11, broadcast=5.9e9, flat_share=0.75, start_s=0.05),
}

#: of so many runs, so many at least are known one step ahead (V5). It was set for 23 runs; 19 of them may be shipped
AHEAD: Final = (15, 23)


class Validation(Struct):
    """Every check, and figures that are reported without a bar."""

    checks: list[Check]
    reported: dict[str, Any]

    @property
    def ok(self) -> bool:
        """Whether every check that was made passed."""
        return passed(self.checks)


def validate(data: str = "") -> Validation:
    """Run them all: half a minute. ``data``: the folder with the lengths that V8 needs; "": ``$ROLLMUX_DATA``.

    Raises:
        Malformed: these lengths cannot be read; says line and column.
    """
    lengths = _aime(data)  # a bad file is better refused before the work than after it
    found = Validation([], {})
    errors = [*_v1(found), _v2(found)]
    _v3(found)
    _v4_v5_v10(found)
    errors += _v6(found)
    _v7(found)
    _v8(found, lengths)
    _v9(found)
    note = "calibrated V1, V2, and V6 with its fixed cost: the mean over their ten points"
    found.checks.append(check("S1: mean error", fmean(errors), None, CLAIM, note))
    return found


def _body(file: str) -> bytes:
    return (resources.files("rollmuxd.sim") / "data" / file).read_bytes()


# ---- engines ---------------------------------------------------------------------------------------------------------


def case(log: Log) -> Case:
    """A log with its engine, uncalibrated."""
    engine = Engine(gpu(log.gpu), model(log.model), log.tp, max_seqs=log.max_seqs, kv_tokens=log.kv_tokens)
    return Case(engine, parse(_body(log.file).splitlines(), log.file))


def _v1(found: Validation) -> list[float]:
    cases = {log: case(log) for log in LOGS}
    tunings = {log: fit([one]) for log, one in cases.items()}
    errors = []
    for log, one in cases.items():
        name = log.file.removeprefix("vllm_").removesuffix(".jsonl")
        plain, own = compare(one), compare(one, tuning := tunings[log])
        others = compare(one, fit([it for other, it in cases.items() if other is not log]))
        worst = max(abs(own.makespan), abs(own.per_token), own.latency)
        fitted = f"weights {tuning.weights:.2f}, prefill {tuning.prefill:.2f}, step {tuning.step_s * 1e3:.1f} ms"
        what = f"V1 {name}: calibrated, worst of makespan, time per token, latency"
        found.checks.append(check(what, worst, None, log.calibrated, f"fitted on this log: {fitted}"))
        if log.uncalibrated is not None:
            found.checks.append(check(f"V1 {name}: uncalibrated makespan", abs(plain.makespan), None, log.uncalibrated))
        shown = {"uncalibrated": plain, "calibrated": own, "held out": others}
        found.reported[f"V1 {name}"] = {how: _shares(it) for how, it in shown.items()}
        errors.append(abs(own.makespan))
    pair = [log for log in LOGS if log.model == SAME_MODEL]
    there, back = (compare(cases[to], tunings[of]).makespan for of, to in (pair, pair[::-1]))
    note = f"constants of the one GPU, peaks of the other: {there:+.1%} and {back:+.1%}"
    what = f"V1 {SAME_MODEL}: makespan from one GPU type to the other, and back"
    found.checks.append(check(what, max(abs(there), abs(back)), None, 0.12, note))
    return errors


def _shares(of: Fit) -> dict[str, float]:
    names = ("makespan", "per_token", "p99", "latency")
    return {**{name: round(getattr(of, name), 4) for name in names}, "preemptions": of.preemptions}


def _v2(found: Validation) -> float:
    replica = Replica(Engine(gpu("h100"), model("qwen3-32b"), 2))
    replica.submit(Request(i, 1024, 1024) for i in range(32))
    replica.advance()
    # a closed loop: for each 1,024 tokens of a request the replica also prefills 32 prompts
    error = abs(replica.now / 1024 * 1000 / H100_MS - 1)
    found.checks.append(check("V2 Qwen3-32B on 2 H100: time per token, uncalibrated", error, None, 0.10))
    return error


def _v3(found: Validation) -> None:
    worst = 0.0
    for seed in range(50):
        chance = random.Random(f"v3 {seed}")
        engine = Engine(
            gpu("h800"), model("qwen2.5-7b"), chance.choice((1, 2, 4)), max_seqs=chance.choice((16, 256)),
            kv_tokens=chance.choice((0, 20_000, 40_000)),
        )  # fmt: skip
        requests = [
            Request(i, chance.randint(20, 2000), chance.randint(1, 3000), chance.choice((0.0, chance.uniform(0, 20))))
            for i in range(chance.randint(5, 60))
        ]
        reference = step_by_step(engine, copy.deepcopy(requests))
        replica = Replica(engine)
        replica.submit(requests)
        worst = max(worst, *(abs(when / reference[name] - 1) for when, name in replica.advance()))
    found.checks.append(check("V3 jumps against single steps: worst of 50 batches", worst, None, 0.015))


def _v6(found: Validation) -> list[float]:
    took = {key: _profile(*key) for key in PROFILES}
    plain = [took[key] / PROFILES[key][0] - 1 for key in PROFILES]
    fixed = median(PROFILES[key][0] - took[key] for key in PROFILES)
    cost = min(np.arange(0, 2 * abs(fixed) + 20, 0.5), key=lambda it: _off(took, float(it)))
    with_cost = [abs((took[key] + float(cost)) / PROFILES[key][0] - 1) for key in PROFILES]
    note = "1,024 responses, Weibull lengths, TP2: none of them is published"
    found.checks.append(check("V6 RollMux profiles: mean error", fmean(map(abs, plain)), None, 0.15, note))
    note = f"{cost:g} s a rollout, fitted on these profiles"
    found.checks.append(check("V6 the same with one fixed cost", fmean(with_cost), None, 0.10, note))
    found.reported["V6"] = {f"{name} {k}k": round(off, 3) for (name, k), off in zip(PROFILES, plain, strict=True)}
    return with_cost


def _off(took: dict[tuple[str, int], float], cost: float) -> float:
    return sum(abs((took[key] + cost) / PROFILES[key][0] - 1) for key in PROFILES)


def _profile(name: str, thousands: int) -> float:
    """Seconds of a rollout of 1,024 responses on the profile's H20: the mean of three draws of lengths."""
    engine = Engine(gpu("h20"), model(name), 2)
    count = PROFILES[name, thousands][1] // 2
    took = []
    for seed in range(3):
        replicas = [Replica(engine) for _ in range(count)]
        for i, length in enumerate(hard_math(1024 * thousands, 1024, f"v6 {seed}")):
            replicas[i % count].submit([Request(i, 200, length)])
        took.append(max(when for replica in replicas for when, _ in replica.advance()))
    return fmean(took)


# ---- steps -----------------------------------------------------------------------------------------------------------


def _v4_v5_v10(found: Validation) -> None:
    runs: dict[str, list[dict[str, float]]] = {}
    for row in csv.DictReader(io.StringIO(_body("steps.csv").decode())):
        name = row.pop("run")
        runs.setdefault(name, []).append({key: float(value) for key, value in row.items() if value})
    train = {name: off for name, of in runs.items() if (off := _halves(of, ("tokens",), "train_s")) is not None}
    found.checks.append(
        check("V4 train time by tokens: median over runs", median(train.values()), None, 0.02, f"{len(train)} runs")
    )
    worst = max(train, key=lambda name: train[name])
    found.checks.append(check("V4 train time by tokens: worst run", train[worst], None, 0.10, worst))
    ahead = {name: _one_ahead([step["gen_s"] for step in of if "gen_s" in step]) for name, of in runs.items()}
    good = sum(off <= 0.10 for off in ahead.values())
    least = math.ceil(len(ahead) * Fraction(*AHEAD))
    note = f"of {len(ahead)}; {least} is {AHEAD[0]} of {AHEAD[1]}, rounded up"
    found.checks.append(check("V5 rollout one step ahead: runs with a median error of 10 %", good, least, None, note))
    gen = {name: off for name, of in runs.items() if (off := _halves(of, ("longest", "mean"), "gen_s")) is not None}
    found.reported["V4"] = {name: round(off, 4) for name, off in train.items()}
    found.reported["V5"] = {name: round(off, 4) for name, off in ahead.items()}
    found.reported["V10 gen = c + a longest + b mean"] = {name: round(off, 4) for name, off in gen.items()}


def _halves(steps: Sequence[dict[str, float]], by: tuple[str, ...], what: str) -> float | None:
    """Mean error of the second half of a run, by a linear fit on its first half; None: too little is known."""
    rows = [[1.0, *(step[key] for key in by), step[what]] for step in steps if {*by, what} <= step.keys()]
    if len(rows) < 20:
        return None
    first, second = np.array(rows[: len(rows) // 2]), np.array(rows[len(rows) // 2 :])
    line = np.linalg.lstsq(first[:, :-1], first[:, -1], rcond=None)[0]
    return float(np.mean(np.abs(second[:, :-1] @ line / second[:, -1] - 1)))


def _one_ahead(gen: Sequence[float]) -> float:
    """Median error of the median of the last eight."""
    return median(abs(median(gen[i - 8 : i]) / gen[i] - 1) for i in range(8, len(gen)))


def _v7(found: Validation) -> None:
    cells = {
        f"{way} {hosts}x8 {name}": seconds(way, model(name).weights, _from(LINKS[hosts], way)) / measured - 1
        for (way, hosts), row in SYNCS.items()
        for name, measured in zip(("qwen2.5-7b", "qwen2.5-14b", "qwen2.5-32b"), row, strict=True)
    }
    worst = max(cells, key=lambda name: abs(cells[name]))
    note = f"{worst}; four constants are fitted to the twelve cells"
    found.checks.append(check("V7 RollMux sync table: worst of 12 cells", abs(cells[worst]), None, 0.08, note))
    found.reported["V7"] = {name: round(off, 4) for name, off in cells.items()}


def _from(links: Links, way: Way) -> Links:
    """A flat all-gather was measured from start to end: there is nothing to add."""
    if way != "flat":
        return links
    return Links(slow=links.slow, hosts=links.hosts, fabric=links.fabric, flat_share=links.flat_share)


# ---- lengths ---------------------------------------------------------------------------------------------------------


def _aime(data: str) -> Lengths | None:
    try:
        return read("aime", data)
    except FileNotFoundError:
        if data:  # a folder that was named has to have it
            raise
        return None


def _v8(found: Validation, lengths: Lengths | None) -> None:
    """Fitted on half of the prompts, judged on the others, both ways round. Skipped where there are no lengths."""
    if lengths is None:
        note = f"neither --data nor $ROLLMUX_DATA names a folder with {AIME}"
        found.checks.append(Check("V8 AIME: covered by the 90 % quantile", None, (None, None), None, note))
        return
    halves = lengths.sources[0][::2], lengths.sources[0][1::2]
    for share in (0.3, 0.5, 0.7, 0.8):
        both = [_forecast(mine, others, lengths.limit, share) for mine, others in (halves, halves[::-1])]
        covered, ranked, off = (fmean(its) for its in zip(*both, strict=True))
        what = f"V8 AIME, {share:.0%} done"
        note = "in whole percent, as the bar is"
        found.checks.append(check(f"{what}: covered by the 90 % quantile", round(covered, 2), 0.87, 0.93, note))
        if share == 0.3:
            found.checks.append(check(f"{what}: rank correlation", ranked, 0.3, None))
        found.reported[what] = {
            "covered": round(covered, 4),
            "rank": round(ranked, 3),
            "mean error, tokens": round(off),
        }


def _forecast(mine: Any, others: Any, limit: int, share: float) -> tuple[float, float, float]:
    prior = fit_lengths(mine, limit)
    assert prior is not None
    real = np.array([length for prompt in others for length in prompt])
    group = np.repeat(np.arange(len(others)), [len(prompt) for prompt in others])
    tokens = int(np.quantile(real, share))
    seen = Progress(group, np.minimum(real, tokens), real <= tokens)
    rest = seen.unfinished
    # The limit has a probability of its own. A response that reaches it is covered in so far as the forecast's 90 %
    # reach into that (a randomised probability transform, by its mean).
    beyond = exceeds(prior, seen)(real[rest].astype(float))
    at_limit = np.clip(1 - 0.1 / np.maximum(beyond, 1e-12), 0.0, 1.0)
    covered = float(np.where(real[rest] >= limit, at_limit, beyond >= 0.1).mean())
    middle = quantile(prior, seen, 0.5)
    return covered, _rank_correlation(middle, real[rest]), float(np.abs(middle - real[rest]).mean())


def _rank_correlation(a: Any, b: Any) -> float:
    return float(np.corrcoef(_ranks(a), _ranks(b))[0, 1])


def _ranks(values: Any) -> Any:
    """Ranks; equal values share the mean of theirs."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]


# ---- networks --------------------------------------------------------------------------------------------------------


def _v9(found: Validation) -> None:
    worst = max(_closed_forms())
    found.checks.append(check("V9 flows: ring, incast, 4:1, random sharing", worst, None, 1e-9))


def _closed_forms() -> Iterator[float]:
    tree, thin = fabric("fat-tree", 256), fabric("osub4", 256)
    # a byte of each GPU: to the like host of the next rack, over both pods; and of seven hosts to one
    ring = {(host, (host + HOSTS_PER_RACK) % tree.hosts): float(GPUS_PER_HOST) for host in range(tree.hosts)}
    incast = {(host, 0): float(GPUS_PER_HOST) for host in range(1, 8)}
    for net, demand, expected in ((tree, ring, 1 / CARD), (thin, ring, 4 / CARD), (tree, incast, 7 / CARD)):
        yield abs(net.seconds(demand) / expected - 1)
    chance = random.Random("v9")
    for _ in range(50):
        links = [chance.uniform(1, 100) for _ in range(8)]
        some = [flows.Flow(tuple(chance.sample(range(8), chance.randint(1, 4)))) for _ in range(20)]
        rates = flows.rates(links, some)
        used = np.zeros(8)
        for flow, its in zip(some, rates, strict=True):
            used[list(flow.links)] += its
        full = np.asarray(used) / np.asarray(links)
        yield max(0.0, float(full.max()) - 1)
        # each flow crosses a link that is full
        yield max(1 - float(max(full[list(flow.links)])) for flow in some)
