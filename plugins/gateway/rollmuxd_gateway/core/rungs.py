"""Which degree of tensor parallelism the next rollout begins with, by the rollouts before it (OrchestrRL, RollPacker).

A *rung* is the replicas of one degree on a job's GPUs: four of one GPU each, or one of four. One rung is awake, the
others sleep. The degree changes between two rollouts, when engines are woken and get new weights anyway. Where that is
asked for (``in_step``), it changes within a rollout, too.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final, Literal, TypeAlias

import msgspec
import numpy as np
from msgspec import Struct

from rollmuxd.rollout import lengths, parallelism, plan
from rollmuxd.rollout.engine import Engine
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd_gateway.core.balancing import slower_of
from rollmuxd_gateway.core.model import Replica, Request

Planner: TypeAlias = Literal["lengths", "preemptions"]
#: tokens that a length is forecast to at most, where requests say nothing
LONGEST: Final = 131_072
#: responses that must have ended in a rollout before its lengths decide
ENOUGH: Final = 16
#: ways that the rest of a rollout may go, of which a change has to be good for the mean
SCENARIOS: Final = 16
#: a change within a rollout gains more than so many times what one costs
HYSTERESIS: Final = 3.0


class Rules(Struct, frozen=True):
    """What the engines are, and what decides: the lengths of responses, or preemptions."""

    gpu: str = "h100"
    model: str = "qwen2.5-7b"
    planner: Planner = "lengths"


class Rungs:
    """Remembers the lengths of the rollouts before, and the preemptions of those at the present degree."""

    def __init__(self, rules: Rules) -> None:
        """Raises ValueError for a GPU or a model that has no figures."""
        self.planner = rules.planner
        self._gpu, self._model = gpu(rules.gpu), model(rules.model)
        self._rng = np.random.default_rng(0)
        #: of the rollout under way, by prompt
        self._groups: dict[str, list[int]] = {}
        self._prompt_tokens = self._limit = 0
        self._prior: lengths.Prior | None = None
        #: of the rollouts at this degree, the newest last; and by degree, the engines' counters at the last look
        self._preemptions: list[int] = []
        self._counted: dict[int, int] = {}

    def ended(self, request: Request) -> None:
        """A response is over."""
        if request.ids and request.finish in ("stop", "length"):
            self._groups.setdefault(request.group, []).append(len(request.ids))
            self._prompt_tokens += request.prompt_tokens
            self._limit = max(self._limit, request.max_tokens or LONGEST)

    def choose(self, tp: int, replicas: Iterable[Replica], counted: int | None) -> int:
        """The degree of the next rollout, of those that ``replicas`` have; ``tp`` where nothing speaks for another.

        ``counted``: preemptions that the engines of this degree have counted since they began; None: not known.
        """
        engines, gpus = self._engines(replicas)
        groups, self._groups = self._groups, {}
        prompt_tokens, self._prompt_tokens = self._prompt_tokens, 0
        count = sum(map(len, groups.values()))
        if not count or tp not in engines:
            return tp
        if self.planner == "preemptions":
            return self._by_preemptions(tp, tuple(engines), counted)
        if count < ENOUGH:
            return tp
        samples = list(groups.values())
        self._prior = lengths.fit(samples, self._limit) if self._prior is None else self._prior.after(samples)
        assert self._prior is not None  # there are enough of them
        found = plan.start(
            self._prior, len(groups), max(1, round(count / len(groups))), prompt_tokens // count, 1, engines,
            self._rng, gpus,
        )  # fmt: skip
        return found.layout[0]

    def improve(
        self, tp: int, replicas: Sequence[Replica], live: Sequence[Request], since_s: float, changes: int, cost_s: float
    ) -> int:
        """The degree for the rest of a rollout; ``tp`` where a change is not worth it.

        ``live``: all requests, on replicas of ``tp``. ``since_s``: seconds since the last change in this rollout.
        """
        engines, gpus = self._engines(replicas)
        finished = [length for group in self._groups.values() for length in group]
        places = {replica.id: place for place, replica in enumerate(r for r in replicas if r.tp == tp)}
        slower = [slower_of(replica, engines[tp], live) for replica in replicas if replica.tp == tp and tp in engines]
        if len(finished) < ENOUGH or not live or not slower or not all(slower):
            return tp
        # Those that are live may become longer than all that have ended.
        limit = max(self._limit, *(one.max_tokens or LONGEST for one in live))
        prior = self._prior or lengths.fit(list(self._groups.values()), limit)
        assert prior is not None  # there are enough of them
        prior = msgspec.structs.replace(prior, limit=limit)
        names = {name: number for number, name in enumerate({**self._groups, **{one.group: [] for one in live}})}
        of_finished = [names[name] for name, group in self._groups.items() for _ in group]
        made = np.array([*finished, *(len(one.ids) for one in live)], dtype=np.int64)
        done = np.arange(len(made)) < len(finished)
        seen = lengths.Progress(np.array([*of_finished, *(names[one.group] for one in live)]), made, done)
        caps = np.array([one.max_tokens or LONGEST for one in live], dtype=np.float64)
        totals = np.minimum(lengths.sample(prior, seen, SCENARIOS, self._rng), caps)
        remaining = np.maximum(1.0, totals - made[len(finished) :])
        current = plan.Plan((tp,), np.array([places[one.replica] for one in live]), 0.0)
        context = np.array([one.context for one in live], dtype=np.float64)
        found = plan.improve(
            current, remaining, context, engines, plan.Gate(switch_s=cost_s, hysteresis=HYSTERESIS), gpus,
            (float(np.mean(slower)),), since_s=since_s, changes=changes,
        )  # fmt: skip
        return tp if found is None else found.layout[0]

    def _by_preemptions(self, tp: int, allowed: tuple[int, ...], counted: int | None) -> int:
        if counted is None:
            return tp
        before, self._counted[tp] = self._counted.get(tp, 0), counted
        # A counter that fell is one of engines that were started again.
        self._preemptions.append(counted if counted < before else counted - before)
        found = parallelism.next_degree(tp, self._preemptions, allowed)
        if found != tp:
            self._preemptions = []
        return found

    def _engines(self, replicas: Iterable[Replica]) -> tuple[Mapping[int, Engine], int]:
        """By degree, one replica's arithmetic; degrees that leave GPUs unused are not considered. And the GPUs."""
        by_degree: dict[int, list[Replica]] = {}
        for replica in replicas:
            by_degree.setdefault(replica.tp, []).append(replica)
        covered = {tp: sum(len(one.gpus) for one in of) for tp, of in by_degree.items()}
        gpus = max(covered.values(), default=0)
        engines: dict[int, Engine] = {}
        for tp in sorted(by_degree):
            one = by_degree[tp][0]
            if covered[tp] == gpus:
                try:
                    engines[tp] = Engine(self._gpu, self._model, tp, max_seqs=one.max_num_seqs, kv_tokens=one.kv_tokens)
                except ValueError:
                    continue  # by its figures the model does not fit there: nothing can be said of it
        return engines, gpus
