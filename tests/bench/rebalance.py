"""What moving responses off a slow engine gains: five engines, one of which takes 1.5 times as long for a token.

The gateway's own core before five ``hashlm`` engines, in virtual time: each engine has its own step, which grows with
its batch, and a response that moves costs its target the prefill of its context. So the figures are the same on every
machine. The same rollouts run with the balancer, without, and without even measuring how fast engines are, with one
slow engine and with none. Off is the last: speeds are what the reactive part estimates.

The oracle knows lengths and speeds, and places each response before the rollout so that the last engine ends as early
as a greedy choice can: what it gains is about what there is to gain. The bound is what nothing can pass: the longest
response has a fast engine for itself.

``rungs`` plays the same lengths on four GPUs whose engines have one degree of tensor parallelism (by the engine model
of a 14B model on H800), against the degree that the gateway chooses before each of four rollouts, the first of which
has 2. ``in_step`` is what changes within a rollout gain beside, at 4.52 s each. Fixed before it was played.

``files`` plays the published lengths of :mod:`rounds`: 30 prompts with 8 samples each, three seeds. A token of
``hashlm`` stands for 16 there, in lengths and in times. That workload was fixed before its figures were seen; the
first one, of lengths that ``hashlm`` makes up, was not.
"""

import heapq
import random
import sys
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))

from figures import Json, at_least, say, short
from gateway_world import World
from rounds import lengths_of

from rollmuxd.rollout.engine import Engine as Estimated
from rollmuxd.rollout.hardware import gpu
from rollmuxd.rollout.models import model
from rollmuxd.rollout.plan import Gate
from rollmuxd_gateway.core import inputs as i
from rollmuxd_gateway.core import rungs
from rollmuxd_gateway.core.balancing import Balancer, Rules
from rollmuxd_gateway.core.model import Config, Replica, ReplicaStatus, RolloutStatus
from rollmuxd_gateway.core.rungs import Rungs
from rollmuxd_gateway.fakes.hashlm import Engine, Job, Model

REPLICAS: Final = 5
SLOWER: Final = 1.5
REQUESTS: Final = 480
ROLLOUTS: Final = 2
STEP_MS: Final = 50.0
#: per live request and step
EACH_MS: Final = 0.3
#: tokens of context that an engine computes in a millisecond
PREFILL: Final = 8.0
CHUNK: Final = 8
PROMPT: Final = 16
SEEDS: Final = (1, 2, 3)
PROMPTS: Final = 30
SAMPLES: Final = 8
#: tokens of the files that one token stands for
COARSE: Final = 16
#: rungs: GPU and model, GPUs, degrees, and rollouts one after the other
LADDER: Final = ("h800", "qwen2.5-14b")
LADDER_GPUS: Final = 4
DEGREES: Final = (1, 2, 4)
STEPS: Final = 4


def run(budget_s: float, *, small: bool = False) -> Json:
    """Rollout times on against off."""
    del budget_s
    rollouts = 1 if small else ROLLOUTS
    found: Json = {}
    for name, slower in (("one_slower", SLOWER), ("equal", 1.0)):
        say(f"rebalance: {REPLICAS} engines, {name}")
        blind, _ = _play(None, slower, rollouts, blind=True)
        off, _ = _play(None, slower, rollouts)
        on, moves = _play(Balancer(Rules()), slower, rollouts)
        found[name] = {
            "off_s": short(blind),
            "speeds_known_s": short(off),
            "on_s": short(on),
            "gain": short(blind / on),
            "gain_of_moves": short(off / on),
            "moves": moves,
        }
    found["files"] = _of_files(1 if small else len(SEEDS))
    found["rungs"] = {} if small else _rungs()
    return {
        **found,
        "reactive": found["one_slower"]["gain"],
        "equal_gain": found["equal"]["gain"],
        "targets": {
            "one_slower": at_least(found["one_slower"]["gain"], 1.15),
            "equal": at_least(found["equal"]["gain"], 0.99),
        },
    }


def _of_files(seeds: int) -> Json:
    """Of each length file, the gain of each seed, with one slow engine and with none."""
    draws = lengths_of()
    if isinstance(draws, str):
        return {"skipped": draws}
    found: Json = {}
    for name, draw in draws.items():
        gains: dict[str, list[float]] = {"one_slower": [], "oracle": [], "bound": [], "equal": []}
        for seed in SEEDS[:seeds]:
            rng = random.Random(seed)
            lengths = [draw(rng, seed * PROMPTS + prompt, SAMPLES) for prompt in range(PROMPTS)]
            for kind, slower in (("one_slower", SLOWER), ("equal", 1.0)):
                off, on = (
                    Paced(balancer, slower, blind=balancer is None, coarse=COARSE).rollout_of(lengths)
                    for balancer in (None, Balancer(Rules()))
                )
                gains[kind].append(short(off / on))
                if kind == "one_slower":
                    best = Paced(None, slower, blind=True, coarse=COARSE).rollout_of(lengths, knows=True)
                    gains["oracle"].append(short(off / best))
                    gains["bound"].append(short(off / _least_s(lengths)))
        gains["of_what_there_is"] = [
            short((on - 1) / (best - 1)) if best > 1 else 1.0
            for on, best in zip(gains["one_slower"], gains["oracle"], strict=True)
        ]
        say(f"rebalance: {name} {gains}")
        found[name] = gains
    return found


def _least_s(lengths: list[list[int]]) -> float:
    """No placement and no move ends sooner: the longest response, alone on a fast engine. Its first token is at 0."""
    longest = max(max(1, length // COARSE) for samples in lengths for length in samples)
    return ((longest - 1) * (STEP_MS + EACH_MS) + PROMPT / PREFILL) * COARSE / 1000


class Sized(Engine):
    """An engine whose responses end at given lengths, which only it knows."""

    lengths: dict[str, int]

    def _look_for_the_end(self, job: Job, token: int) -> None:
        request = job.id.partition("-")[0]
        if len(job.prompt) - PROMPT + len(job.out) >= self.lengths[request]:
            self._end(job, "stop")


class Paced(World):
    """Each engine steps when its own time has come. A token stands for ``coarse``."""

    def __init__(
        self,
        balancer: Any,
        slower: float,
        *,
        blind: bool,
        coarse: int = 1,
        replicas: int = REPLICAS,
        config: Config | None = None,
    ) -> None:
        self.coarse, self.asked = coarse, 0
        super().__init__(replicas, model=Model(median=250.0, sigma=0.5), config=config)
        self.gateway.balancer = balancer
        self.at = 0.0
        #: take all engines for equally fast
        self.blind = blind
        self.slower = {name: slower if name == "r0" else 1.0 for name in self.engines}
        self.due = [(0.0, name) for name in self.engines]
        self.prefill: dict[str, float] = dict.fromkeys(self.engines, 0.0)

    def _open(self, it: Any) -> None:
        self.interval = max(1, CHUNK // self.coarse)
        self.prefill[it.replica] += len(it.prompt) / PREFILL
        super()._open(it)

    def step_ms(self, name: str) -> float:
        """What a step takes an engine, with its present batch and what it has to prefill."""
        return (STEP_MS + EACH_MS * len(self.engines[name].running) + self.prefill[name]) * self.slower[name]

    def rollout_of(self, lengths: list[list[int]], *, knows: bool = False) -> float:
        """As :meth:`rollout`, of samples with these lengths in tokens; ``knows``: placed by the oracle."""
        ends: dict[str, int] = {}
        for name in self.engines:
            self.engines[name] = Sized(self.model, seed=1)
            self.engines[name].lengths = ends
        prompts = [[1 + number] * PROMPT for number, samples in enumerate(lengths) for _ in samples]
        first = self.asked
        for number, length in enumerate(length for samples in lengths for length in samples):
            ends[f"q{first + number}"] = max(1, length // self.coarse)
        return self.rollout(prompts, self._placed(list(ends.values())) if knows else (), ignore_eos=True)

    def _placed(self, lengths: list[int]) -> list[str]:
        """Of each response its engine: longest first, each where the rollout's end is earliest."""
        held = dict.fromkeys(self.engines, (0, 0))  # the longest, and tokens together

        def end(name: str, length: int) -> float:
            longest, together = held[name]
            return self.slower[name] * (STEP_MS * max(longest, length) + EACH_MS * (together + length))

        found = [""] * len(lengths)
        for number in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
            length = lengths[number]
            found[number] = min(held, key=lambda name: end(name, length))
            longest, together = held[found[number]]
            held[found[number]] = max(longest, length), together + length
        return found

    def rollout(self, prompts: list[list[int]], targets: Sequence[str] = (), **params: Any) -> float:
        """Seconds from the first request to the last answer."""
        began = self.at
        self.tell(i.BeginRollout(total=len(prompts)))
        self.deliver()
        where = targets or [""] * len(prompts)
        self.asked += len(prompts)
        names = [
            self.ask(prompt, group=str(prompt), max_tokens=2_000, temperature=0, target=target, **params)
            for prompt, target in zip(prompts, where, strict=True)
        ]
        while not all(name in self.ended for name in names):
            self.at, name = heapq.heappop(self.due)
            self.now = round(self.at)
            engine = self.engines[name]
            engine.step()
            self.deliver()
            if self.blind:
                for replica in self.gateway.replicas.values():
                    replica.ms_per_token = 0.0
            due = self.gateway.deadline()
            if due is not None and due <= self.now:
                self.tell(i.Tick())
            took = self.step_ms(name) * self.coarse
            self.prefill[name] = 0.0
            heapq.heappush(self.due, (self.at + took, name))
        for name in names:
            self.gateway.forget(name)
        self.tell(i.CloseRollout())
        return (self.at - began) / 1000


class Ladder(Paced):
    """Engines of several degrees on four GPUs, of which one rung is awake; a step's time is the engine model's."""

    def __init__(self, degrees: Sequence[int], *, in_step: bool = False) -> None:
        switch_ms = round(1000 * Gate().switch_s)
        config = Config(tail="keep", in_step=in_step, switch_ms=switch_ms)
        super().__init__(None, 1.0, blind=False, coarse=COARSE, replicas=0, config=config)
        self.gateway.rungs = Rungs(rungs.Rules(*LADDER))
        self.degree: dict[str, int] = {}
        #: when each replica that is being woken is awake
        self.waking: dict[str, float] = {}
        self.estimated = {tp: Estimated(gpu(LADDER[0]), model(LADDER[1]), tp) for tp in degrees}
        for tp in degrees:
            for at in range(0, LADDER_GPUS, tp):
                name = f"tp{tp}-{at}"
                gpus = tuple(f"host1/gpu{number}" for number in range(at, at + tp))
                status = ReplicaStatus.PARKED
                self.degree[name], self.engines[name], self.prefill[name] = tp, Engine(self.model), 0.0
                self.tell(i.Register(Replica(name, f"http://{name}", gpus=gpus, tp=tp, status=status)))
                self.due.append((0.0, name))
                self.asleep.add(name)

    def step_ms(self, name: str) -> float:
        """By the engine model; a token of context stands for as many as one of a response."""
        running, used = len(self.engines[name].running), self.engines[name].kv_used
        estimated = self.estimated[self.degree[name]]
        prefill_s = estimated.prefill_s(self.prefill[name] * PREFILL * self.coarse) / self.coarse
        return 1000 * (float(estimated.step_s(running, used * self.coarse)) + prefill_s)

    def deliver(self) -> None:
        """What a wake-up takes within a rollout is a change's time."""
        held = []
        for kind, it in self.mail:
            if isinstance(it, i.Woken) and self.gateway.rollout.status is RolloutStatus.SWITCHING:
                if self.at < self.waking.setdefault(it.replica, self.at + self.gateway.config.switch_ms):
                    held.append((kind, it))
        self.mail = [one for one in self.mail if one not in held]
        super().deliver()
        self.mail = [*held, *self.mail]

    def steps(self, rollouts: Sequence[list[list[int]]]) -> float:
        """Seconds of rollouts, one after the other; between two the framework sleeps, wakes, and writes weights."""
        took = 0.0
        for lengths in rollouts:
            self.waking = {}
            self.tell(i.Boundary())
            for name, tp in self.degree.items():
                if tp == self.gateway.rung:
                    self.tell(i.Woken(name, ok=True))
                    self.asleep.discard(name)
            self.tell(i.Weights(tuple(name for name, tp in self.degree.items() if tp == self.gateway.rung), "0"))
            took += self.rollout_of(lengths)
            for name in self.degree:
                self.tell(i.Parked(name, ok=True))
                self.asleep.add(name)
        return took


def _rungs() -> Json:
    """Of each length file, rollouts with one degree against those whose degree the gateway chooses."""
    draws = lengths_of()
    if isinstance(draws, str):
        return {"skipped": draws}
    found: Json = {}
    for name, draw in draws.items():
        rng = random.Random(SEEDS[0])
        prompts = [[step * PROMPTS + prompt for prompt in range(PROMPTS)] for step in range(STEPS)]
        rollouts = [[draw(rng, prompt, SAMPLES) for prompt in step] for step in prompts]
        chosen, in_step = Ladder((2, 1, 4)).steps(rollouts), Ladder((2, 1, 4), in_step=True).steps(rollouts)
        found[name] = {f"over_tp{tp}": short(Ladder((tp,)).steps(rollouts) / chosen) for tp in DEGREES}
        found[name]["in_step"] = short(chosen / in_step)
        say(f"rebalance: rungs, {name} {found[name]}")
    return found


def _play(balancer: Any, slower: float, rollouts: int, *, blind: bool = False) -> tuple[float, int]:
    world, rng, total = Paced(balancer, slower, blind=blind), random.Random(5), 0.0
    for _ in range(rollouts):
        total += world.rollout([[rng.randrange(1, 200) for _ in range(PROMPT)] for _ in range(REQUESTS)])
    assert all(array("i") != request.ids for request in world.ended.values())
    return total, world.gateway.count.moves.get("rebalance", 0)
