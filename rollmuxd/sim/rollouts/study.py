"""Policies on the same batches of lengths, over seeds; with both baselines, and what was to be reached.

The *published* baseline is one degree for ever with the samples of a prompt on one replica (``static-tp2``,
contiguous). Frameworks do that if they repeat each prompt in place and cut the batch in equal parts. The *tuned* one is
the best degree in hindsight over all batches, with the samples spread: what a user gets by trying four settings once.
The gain over the first is what a paper may report. The gain over the second is what planning brings.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from msgspec import Struct, field
from msgspec.structs import replace

from rollmuxd.rollout.engine import DEGREES
from rollmuxd.rollout.lengths import Prior, fit
from rollmuxd.sim.rollouts.batches import SOURCES, Lengths
from rollmuxd.sim.rollouts.run import Policy, Result, Setting, play
from rollmuxd.sim.rollouts.tail_batching import Rounds
from rollmuxd.sim.workloads.options import nearest

BASELINE: Final = "static-tp2"
ORACLE: Final = "oracle-tp"
ROLLPACKER: Final = "rollpacker"
CONTIGUOUS: Final = "contiguous"
SPREAD: Final = "spread"
#: responses of one step at most: more take minutes and gigabytes
MOST_RESPONSES: Final = 200_000
#: measured steps of each seed, after one from which the lengths are known
STEPS: Final = 2
#: generation takes so many times as long as training (OrchestrRL, by a summary)
GENERATION_TO_TRAINING: Final = 1.49

_KNOWN: Final = (
    *(Policy(f"static-tp{degree}", f"{degree} GPUs per replica, always", degree) for degree in DEGREES),
    Policy("start", "the degree by the lengths of the steps before; samples spread"),
    Policy("proactive", "static-tp2, and the degree may change within the step", 2, changes=True),
    Policy("reactive", "start, and requests move off the last replica", moves=True),
    Policy("full", "reactive, and the degree may change within the step", moves=True, changes=True),
    Policy("clairvoyant", "full with lengths and speeds known: the fastest of ten plays, and no upper bound",
           moves=True, changes=True, clairvoyant=True),
)  # fmt: skip
POLICIES: Final[Mapping[str, str]] = {
    **{policy.name: policy.summary for policy in _KNOWN},
    ORACLE: "the static degree that is best for each batch, in hindsight; samples spread",
    ROLLPACKER: "start, with RollPacker's tail batching: short rounds with over-sampling, long ones without",
}
#: which dispatch a policy has by itself; static ones have the one that is asked for
_PLAIN: Final = {policy.name: policy for policy in _KNOWN}


class Row(Struct):
    """One policy on one source of lengths."""

    lengths: str
    c_step_ms: float
    policy: str
    dispatch: str
    #: seconds of a rollout, mean and each
    seconds: float = 0.0
    each: list[float] = field(default_factory=list)
    #: times faster than the published baseline, and than the tuned one; None: that one was not run
    over_static_tp2: float | None = None
    over_best_static: float | None = None
    #: of an iteration: rollout and training, one after the other or beside each other
    iteration_s: float = 0.0
    #: times faster than an iteration of the published baseline, with training after its rollout; and what of that comes
    #: from the training beside the rollout
    end_to_end: float | None = None
    over_synchronous: float = 1.0
    degrees: list[int] = field(default_factory=list)
    moves: int = 0
    switches: int = 0
    preemptions: int = 0
    #: seconds that switches were to win, and how often one was made
    predicted_gain_s: float = 0.0


class Check(Struct, frozen=True):
    """One figure that was to be reached: within the bar, both ends included; None: no bound there."""

    check: str
    value: float | None
    bar: tuple[float | None, float | None]
    #: None: the check was skipped, and fails nothing
    ok: bool | None
    #: why there is no figure, or what it means
    note: str = ""


class Study(Struct):
    """All rows, and what became of the checks."""

    setting: Setting
    asynchrony: int
    rows: list[Row]
    checks: list[Check]
    #: seconds of a training that were given; 0: none were
    train_s: float = 0.0

    @property
    def training(self) -> str:
        """What a training takes."""
        return f"{self.train_s:g} s" if self.train_s else f"that rollout / {GENERATION_TO_TRAINING}"

    @property
    def ok(self) -> bool:
        """Whether every check passed."""
        return passed(self.checks)


def check(name: str, value: float | None, low: float | None, high: float | None, note: str = "") -> Check:
    """A figure against its bar. No figure, no pass."""
    ok = (
        value is not None and math.isfinite(value) and (low is None or value >= low) and (high is None or value <= high)
    )
    return Check(name, None if value is None else round(value, 4), (low, high), ok, note)


def passed(checks: Iterable[Check]) -> bool:
    """Whether none of them missed its bar."""
    return all(it.ok is not False for it in checks)


class Asked(Struct, frozen=True):
    """What a user wants compared."""

    lengths: tuple[Lengths, ...]
    policies: tuple[str, ...]
    dispatch: tuple[str, ...] = (CONTIGUOUS,)
    c_step_ms: tuple[float, ...] = (2.0,)
    seeds: int = 1
    setting: Setting = Setting()
    #: 1: rollout k + 1 beside training k
    asynchrony: int = 0
    #: seconds of a training; 0: the published baseline's rollout over :data:`GENERATION_TO_TRAINING`
    train_s: float = 0.0
    #: the first node's engines are so many times slower; 1: they are alike
    slow_replica: float = 1.0


def verify(asked: Asked) -> None:
    """Raise ``ValueError`` for what cannot be run, before anything is."""
    responses = asked.setting.prompts * asked.setting.samples
    if not 2 <= responses <= MOST_RESPONSES:
        raise ValueError(
            f"a step of {responses} responses: 2 to {MOST_RESPONSES:,} are needed; change --prompts or --samples"
        )
    for name in asked.policies:
        if name not in POLICIES:
            raise ValueError(f"there is no policy {name!r}{nearest(name, tuple(POLICIES))} ({', '.join(POLICIES)})")
    for word in asked.dispatch:
        if word not in (CONTIGUOUS, SPREAD):
            raise ValueError(f"dispatch is {word!r}: {CONTIGUOUS} or {SPREAD}")
    for source in asked.lengths:
        engines = asked.setting.engines(source.limit)
        for name in asked.policies:
            policy = _PLAIN.get(name)
            if policy is not None and policy.degree and policy.degree not in engines:
                raise ValueError(
                    f"{name}: {asked.setting.model} with responses of {source.limit} tokens fits on "
                    f"{', '.join(map(str, engines))} GPUs of type {asked.setting.gpu}; leave it out"
                )


def compare(asked: Asked, progress: Callable[[int], None] | None = None) -> Study:
    """Run everything. ``progress`` gets the number of finished rows.

    Raises:
        ValueError: something of it cannot be run.
    """
    verify(asked)
    rows: list[Row] = []
    for source in asked.lengths:
        for c_step in asked.c_step_ms:
            setting = replace(
                asked.setting,
                tuning=replace(asked.setting.tuning, step_s=c_step / 1000),
                slower=_slower(asked),
            )
            rows += _case(asked, source, setting, partial(_finished, progress, len(rows)))
    return Study(asked.setting, asked.asynchrony, rows, list(_checks(asked, rows)), asked.train_s)


def _finished(progress: Callable[[int], None] | None, before: int, done: int) -> None:
    if progress is not None:
        progress(before + done)


def rows_of(asked: Asked) -> int:
    """How many rows there will be at most."""
    engines = max(len(asked.setting.engines(source.limit)) for source in asked.lengths)
    return len(asked.lengths) * len(asked.c_step_ms) * (2 * engines + (len(asked.policies) + 1) * len(asked.dispatch))


def _slower(asked: Asked) -> tuple[float, ...]:
    if asked.slow_replica == 1:
        return ()
    return (asked.slow_replica, *(1.0 for _ in range(asked.setting.nodes - 1)))


def _case(asked: Asked, source: Lengths, setting: Setting, progress: Callable[[int], None]) -> list[Row]:
    """All policies on one source of lengths with one engine."""
    drawn = [
        [source.draw(setting.prompts, setting.samples, f"{seed} {step}") for step in range(STEPS + 1)]
        for seed in range(asked.seeds)
    ]
    engines = setting.engines(source.limit)
    statics = [f"static-tp{degree}" for degree in engines]
    wanted = [(BASELINE, CONTIGUOUS)] if BASELINE in statics else []
    wanted += [(name, SPREAD) for name in statics]
    # the paper's ablation: what a part of `full` brings is shown beside it
    parts = ("proactive",) if "full" in asked.policies else ()
    for name in (*asked.policies, *parts):
        own = asked.dispatch if name in statics or name == "proactive" else (SPREAD,)
        wanted += [(name, word) for word in own if name not in (ORACLE, ROLLPACKER)]
    rows: dict[tuple[str, str], Row] = {}
    for name, word in dict.fromkeys(wanted):
        row = rows[name, word] = Row(source.name, setting.tuning.step_s * 1000, name, word)
        policy = _dealt(_PLAIN[name], word)
        for seed, batches in enumerate(drawn):
            for result in _steps(setting, policy, batches, source.limit, seed):
                _count(row, result)
        progress(len(rows))
    if ROLLPACKER in asked.policies:
        rows[ROLLPACKER, SPREAD] = _rollpacker(source, setting, asked.seeds, drawn)
    best = min((rows[name, SPREAD] for name in statics), key=lambda row: sum(row.each))
    if ORACLE in asked.policies:
        each = [min(its) for its in zip(*(rows[name, SPREAD].each for name in statics), strict=True)]
        rows[ORACLE, SPREAD] = Row(source.name, best.c_step_ms, ORACLE, SPREAD, each=each)
    published = rows.get((BASELINE, CONTIGUOUS))
    _relate(list(rows.values()), published, best, asked)
    return list(rows.values())


def _steps(
    setting: Setting, policy: Policy, batches: Sequence[Sequence[Sequence[int]]], limit: int, seed: int
) -> Iterator[Result]:
    """The measured steps of one seed: the first batch is what is known of the lengths before them."""
    prior = _known(batches[0], limit)
    for batch in batches[1:]:
        yield play(setting, policy, batch, prior, seed)
        prior = prior.after(batch)


def one_step(asked: Asked) -> dict[str, Result]:
    """The first measured step of each policy that was asked for, on the first lengths: to be drawn."""
    source, policies = asked.lengths[0], [_PLAIN[name] for name in asked.policies if name in _PLAIN]
    tuning = replace(asked.setting.tuning, step_s=asked.c_step_ms[0] / 1000)
    setting = replace(asked.setting, tuning=tuning, slower=_slower(asked))
    batches = [source.draw(setting.prompts, setting.samples, f"0 {step}") for step in (0, 1)]
    found = {}
    for it in policies:
        policy = _dealt(it, asked.dispatch[0])
        found[it.name] = result = next(_steps(setting, policy, batches, source.limit, 0))
        if result.switches:  # what they were to win, and what they have won
            without = replace(policy, changes=False)
            result.unchanged_s = next(_steps(setting, without, batches, source.limit, 0)).seconds
    return found


def _dealt(policy: Policy, dispatch: str) -> Policy:
    return replace(policy, contiguous=dispatch == CONTIGUOUS) if policy.degree else policy


def _known(batch: Sequence[Sequence[int]], limit: int) -> Prior:
    found = fit(batch, limit)
    assert found is not None  # a batch has two responses at least
    return found


def _count(row: Row, result: Result) -> None:
    row.each.append(result.seconds)
    row.moves += result.moves
    row.switches += len(result.switches)
    row.preemptions += result.preemptions
    row.predicted_gain_s += sum(it.gain_s - it.cost_s for it in result.switches)
    row.degrees = sorted({*row.degrees, *result.layout, *(d for it in result.switches for d in it.layout)})


def _rollpacker(source: Lengths, setting: Setting, seeds: int, drawn: Sequence[Sequence[list[list[int]]]]) -> Row:
    row = Row(source.name, setting.tuning.step_s * 1000, ROLLPACKER, SPREAD)
    for seed in range(seeds):
        rounds = Rounds(setting, source, _known(drawn[seed][0], source.limit), seed)
        row.each.append(rounds.run())
        row.preemptions += rounds.preemptions
        row.degrees = sorted({*row.degrees, *rounds.degrees})
    return row


def _relate(rows: Sequence[Row], published: Row | None, best: Row, asked: Asked) -> None:
    for row in rows:
        row.seconds = sum(row.each) / len(row.each)
    train = asked.train_s or (published or best).seconds / GENERATION_TO_TRAINING
    for row in rows:
        one_by_one = row.seconds + train
        row.iteration_s = max(row.seconds, train) if asked.asynchrony else one_by_one
        row.over_synchronous = one_by_one / row.iteration_s
        row.over_best_static = best.seconds / row.seconds
        if published is not None:
            row.over_static_tp2 = published.seconds / row.seconds
            row.end_to_end = (published.seconds + train) / row.iteration_s


# ---- what was to be reached ------------------------------------------------------------------------------------------

#: gain over the published baseline, by lengths and policy: the least and the most. For aime and skythought with
#: engines of 2 ms a step only: what hosts that prepare each step make of them is not known
_GAINS: Final = {
    ("mix", "full"): (1.22, 1.52, (2.0, 8.0)),
    ("mix", "proactive"): (1.18, 1.45, (2.0, 8.0)),
    ("mix", "start"): (1.25, 1.50, (2.0, 8.0)),
    ("aime", "start"): (1.20, 1.32, (2.0,)),
    ("skythought", "start"): (1.75, 2.0, (2.0,)),
}
#: moves must win so much where one node is 1.5 times slower, which they have to find out
_MOVES_WIN: Final = 1.15


#: planning was not expected to win more over the best static degree
_WONDER: Final = 1.05

#: the bars are for means over so many seeds, of the job that :class:`Setting` is by default
_SEEDS: Final = 4


def _checks(asked: Asked, rows: Sequence[Row]) -> Iterator[Check]:
    if asked.seeds < _SEEDS or asked.setting != Setting():
        return
    by: dict[tuple[str, float], dict[str, Row]] = {}
    for row in rows:
        of = by.setdefault((row.lengths, row.c_step_ms), {})
        if row.policy not in of or row.dispatch == CONTIGUOUS:
            of[row.policy] = row
    for (lengths, c_step), of in by.items():
        where = f"{lengths}, {c_step:g} ms a step"
        if asked.slow_replica != 1:
            if asked.slow_replica >= 1.5 and {"reactive", "start"} <= of.keys():
                yield check(
                    f"{where}: reactive over start, a node {asked.slow_replica:g} times slower",
                    of["start"].seconds / of["reactive"].seconds, _MOVES_WIN, None,
                    "its speed is not known, but seen by its tokens per second",
                )  # fmt: skip
            continue
        for name, row in of.items():
            low, high, at = _GAINS.get((lengths, name), (0.0, 0.0, ()))
            if c_step in at:
                yield check(f"{where}: {name} over static-tp2 contiguous", row.over_static_tp2, low, high)
        if {"full", "clairvoyant"} <= of.keys():
            yield check(f"{where}: clairvoyant over full", of["full"].seconds / of["clairvoyant"].seconds, 1.0, None)
    for name in ("start", "full") if asked.slow_replica == 1 else ():
        for (lengths, c_step), of in by.items():
            if name in of and lengths in SOURCES:
                gain, known = of[name].over_best_static or 0.0, of.get("clairvoyant")
                # more would be a wonder: it is what planning can bring beside the two simple rules
                what = f"{lengths}, {c_step:g} ms a step: {name} over the best static, spread"
                note = "judged in whole percent, as the bar is"
                if (
                    known and known.over_best_static
                ):  # with the lengths known: whether a high figure is a wonder, or room
                    note += f"; clairvoyant: {known.over_best_static:.3f}"
                yield replace(check(what, round(gain, 2), 0.98, _WONDER, note), value=round(gain, 4))
