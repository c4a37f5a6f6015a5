"""Fidelity ``network``: as ``engine``, and what jobs send between hosts shares the links of one fabric.

*Input*: the fabric by name, and the time to change circuits. For each job: its inside (model and lengths), its
durations and the hosts of its slot. *Facts and effects*: none of its own. A phase's end is when its program on
:class:`rollmuxd.fabric.network.Network` is over, and the world takes it from there as with every fidelity.

- A **training phase** over several ranks computes, and sends gradients layer by layer and new weights per optimizer
  step. The job's duration is taken as the phase's time alone on a full fat tree. So computation is that duration less
  what is exposed there.
- A **sync phase** (one over the pools of the rollout and of the training) sends new weights to the rollout's hosts,
  and takes nothing else.
- A **rollout** whose model instances lie over several hosts (:attr:`Inside.parallelism`) decodes as with ``engine``,
  and waits for what its layers send, token by token. Its steps are taken together in :data:`SLICES`. Replicas are
  those of a host, so weights and caches are as if each host had the whole model. It gives no GPUs back for a tail.
- All other phases are those of ``engine``: rollouts within hosts, phases within one rank, and jobs whose model is not
  known.

Training hosts and rollout hosts fill whole pods of the fabric, each in the order of the inventory. What a phase takes
alone is what it takes on the same hosts where nothing else is sent. A job that ends within a phase sends what is left.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final

from rollmuxd.core.ids import GpuId, Millis
from rollmuxd.fabric.circuits import Gate
from rollmuxd.fabric.network import Exchange, Network, Program, at_once, generation, sent_of, training
from rollmuxd.fabric.topology import CARD, GPUS_PER_HOST, GPUS_PER_POD, Demand, Fabric, fabric
from rollmuxd.fabric.traffic import Training, decoded, group_of, handed_on, rings, stages
from rollmuxd.rollout.models import model
from rollmuxd.sim.execution import NEVER, Begun, Execution
from rollmuxd.sim.executions.engines import Engines, decoding
from rollmuxd.sim.inside import Inside
from rollmuxd.sim.inventory import Inventory
from rollmuxd.sim.kernel import Kernel
from rollmuxd.sim.workload import Impossible, SimJob

#: a rollout waits for the network in so many parts: each has some hundred steps or more
SLICES: Final = 64
#: FLOP/s of a GPU: any, as the MFU is that at which a phase takes its duration
_PEAK: Final = 1e15


class Networks(Engines):
    """Rollouts by their inside, training and sync by what they send, all else by durations."""

    def __init__(self, topology: str, t_ocs_ms: float) -> None:
        self._topology, self._gate = topology, Gate(t_ocs_ms / 1000)
        #: seconds of a phase alone
        self._alone: dict[tuple[object, ...], float] = {}
        self._planned: Millis = NEVER

    def attach(self, kernel: Kernel, inventory: Inventory, jobs: Sequence[SimJob]) -> None:
        """The clock, and where each GPU is in the fabric.

        Raises:
            Impossible: a host is not one of eight GPUs.
        """
        super().attach(kernel, inventory, jobs)
        self.host_of, gpus = placed(inventory, jobs)
        self._gpus = gpus
        self.network = Network(self._fabric(), self._gate)

    def begin(self, begun: Begun, changed: Callable[[], None]) -> Execution:
        """A phase, as the module's head says."""
        execution = super().begin(begun, changed)
        inside = begun.job.inside
        if inside is None or begun.at < 0 or not begun.gpus:
            return execution
        at = {gpu: self.host_of[gpu] for gpu in begun.gpus}
        if begun.at == 0:
            return self._generate(begun, inside, tuple(sorted({*at.values()})), changed) or execution
        if len(begun.phase.pools) == 1:
            took = (execution.ends_ms - self._clock.now) / 1000
            return self._train(begun, inside, tuple(sorted({*at.values()})), took, changed) or execution
        receives = {host for gpu, host in at.items() if self._pool[gpu] in begun.job.spec.phases[0].pools}
        sends = tuple(sorted({*at.values()} - receives))
        if not sends:
            return execution
        size, receivers = 1e9 * model(inside.model).parameters_b, tuple(sorted(receives))
        demand = handed_on(size, sends, receivers)
        return self._run((size, sends, receivers), demand, 1.0, 0.0, at_once, changed)

    def _train(
        self, begun: Begun, inside: Inside, hosts: tuple[int, ...], took: float, changed: Callable[[], None]
    ) -> Execution | None:
        """None: it is within one rank, whose hosts' pipeline is not modelled."""
        of, batch = model(inside.model), inside.batches[begun.step % len(inside.batches)]
        per_rank = stages(1e9 * of.parameters_b)
        ranks = len(hosts) // per_rank
        if ranks < 2 or of.experts:
            return None
        trains = Training(
            1e9 * of.parameters_b, of.layers, ranks * per_rank * GPUS_PER_HOST,
            float(sum(batch) + len(batch) * inside.prompt_tokens), _PEAK, stages=per_rank,
        ).measured(took, (ranks - 1) / ranks / CARD)  # fmt: skip
        demand = rings(hosts, per_rank, 1.0, self.network.fabric.rings)
        window = trains.compute_s / trains.optimizer_steps - trains.backward_s
        return self._run((hosts, trains), demand, sent_of(trains), window, training(trains), changed)

    def _generate(
        self, begun: Begun, inside: Inside, hosts: tuple[int, ...], changed: Callable[[], None]
    ) -> Execution | None:
        """None: no model instance lies over several hosts."""
        size = group_of(inside.parallelism)
        count = len(hosts) // size
        if size < 2 or not count:
            return None
        # attention in the first half of the hosts, and feed-forward in the second; all else beside each other
        step = count if inside.parallelism == "afd" else 1
        first = range(count) if inside.parallelism == "afd" else range(0, count * size, size)
        groups = [[hosts[at + step * place] for place in range(size)] for at in first]
        of, batch = model(inside.model), begun.step % len(inside.batches)
        # of each token that is decoded, the part of each host that has sequences
        part = 1.0 / count if inside.parallelism == "afd" else 1.0 / (count * size)
        ways = decoded(inside.parallelism, groups, of.hidden, max(1, of.per_token), part)
        demand = dict(sum((Counter(way) for way in ways), Counter()))
        slices = [
            (seconds, float(tokens * of.layers)) for seconds, tokens in decoding(inside, batch, len(begun.gpus), SLICES)
        ]
        slices[0] = (slices[0][0] + inside.fixed_ms / 1000, slices[0][1])
        units = math.fsum(sends for _, sends in slices)
        return self._run((inside, batch, hosts), demand, units, 0.0, generation(slices), changed)

    def _run(
        self,
        key: tuple[object, ...],
        demand: Demand,
        units: float,
        window_s: float,
        program: Callable[[Exchange], Program],
        changed: Callable[[], None],
    ) -> Execution:
        if key not in self._alone:
            ends: list[float] = []
            apart = Network(self._fabric(), self._gate)
            apart.begin(demand, units, window_s, program, lambda: ends.append(apart.now))
            apart.advance(math.inf)
            self._alone[key] = ends[0]
        phase = Execution(math.ceil(self._alone[key] * 1000), NEVER)

        def over() -> None:
            phase.ends_ms = self._clock.now
            changed()

        self.network.advance(self._clock.now / 1000)
        self.network.begin(demand, units, window_s, program, over)
        self._plan()
        return phase

    def _fabric(self) -> Fabric:
        return fabric(self._topology, self._gpus)

    def _plan(self) -> None:
        """The heap wakes the network when something happens there next."""
        when = self.network.next_s()
        if when < math.inf:
            at = math.ceil(when * 1000)
            at += at / 1000 < when  # floats: it must not be woken before
            if not self._clock.now < self._planned <= at:
                self._planned = at
                self._clock.at(at, self._wake)

    def _wake(self) -> None:
        self.network.advance(self._clock.now / 1000)
        self._plan()


def placed(inventory: Inventory, jobs: Sequence[SimJob]) -> tuple[dict[GpuId, int], int]:
    """The host of each GPU, and the GPUs of each of the fabric's two clusters.

    Raises:
        Impossible: a host is not one of eight GPUs.
    """
    trains = {pool for job in jobs for phase in job.spec.phases[1:] if len(phase.pools) == 1 for pool in phase.pools}
    clusters: tuple[list[tuple[GpuId, ...]], list[tuple[GpuId, ...]]] = ([], [])
    for host, gpus in inventory.gpus_of.items():
        if len(gpus) != GPUS_PER_HOST:
            raise Impossible(
                f"fidelity network knows hosts of {GPUS_PER_HOST} GPUs, and host {host} has {len(gpus)}; use engine"
            )
        clusters[inventory.share_of[gpus[0]][0] not in trains].append(gpus)
    size = max(1, *(math.ceil(len(its) * GPUS_PER_HOST / GPUS_PER_POD) for its in clusters)) * GPUS_PER_POD
    half = size // GPUS_PER_HOST
    hosts = [(half * number + place, gpus) for number, its in enumerate(clusters) for place, gpus in enumerate(its)]
    return {gpu: host for host, gpus in hosts for gpu in gpus}, size
