"""What an RL iteration sends between hosts: gradients layer by layer, weights to the rollout cluster, decoded tokens.

A training rank is some hosts, by default those of a rack. It has tensor parallelism in a host, one pipeline stage per
host, and data parallelism from rank to rank. Sizes are bytes, times seconds.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Final, Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from rollmuxd.fabric.parallelism import Parallelism
from rollmuxd.fabric.topology import GPUS_PER_HOST, HOSTS_PER_RACK, Demand, pod, rack

#: FLOPs per parameter and trained token: forward and backward
FLOPS: Final = 6.0
#: of forward and backward, what the backward pass takes
BACKWARD: Final = 2 / 3
#: bytes per parameter of gradients (32 bit) and of weights (16 bit)
GRADIENT: Final = 4.0
WEIGHT: Final = 2.0
#: bytes per parameter while training: weights, gradients, and the optimizer's three copies of 32 bit
TRAINING_STATE: Final = 18.0
#: bytes on the GPUs of a training host: eight of 80 GB
HOST_MEMORY: Final = 640e9

Placement: TypeAlias = Literal["packed", "spread"]


class Training(Struct, frozen=True):
    """The training phase of one iteration, with ZeRO-1: gradients are reduce-scattered, then weights all-gathered."""

    parameters: float
    layers: int
    gpus: int
    #: of one iteration, over all GPUs
    tokens: float
    #: peak FLOP/s of one GPU
    peak: float
    #: parameters that one token passes through; 0: all
    active: float = 0.0
    mfu: float = 0.4
    #: mini-batches per iteration. The paper does not say; common settings have 8 to 16
    optimizer_steps: int = 10
    #: tokens of one micro-batch: one long sample
    micro_tokens: int = 8192
    #: hosts of one rank, which are its pipeline stages
    stages: int = HOSTS_PER_RACK

    @property
    def ranks(self) -> int:
        """Data-parallel ranks."""
        return self.gpus // (GPUS_PER_HOST * self.stages)

    @property
    def buckets(self) -> int:
        """Gradients travel in so many parts: one for each layer of a stage."""
        return max(1, round(self.layers / self.stages))

    @property
    def per_gpu(self) -> float:
        """Parameters on one GPU."""
        return self.parameters / (GPUS_PER_HOST * self.stages)

    @property
    def compute_s(self) -> float:
        """Seconds of an iteration without any communication."""
        return FLOPS * (self.active or self.parameters) * self.tokens / (self.gpus * self.peak * self.mfu)

    @property
    def backward_s(self) -> float:
        """The backward pass of the last micro-batch: gradients travel beside it."""
        of_rank = self.tokens / self.ranks
        return BACKWARD * self.compute_s * min(self.micro_tokens, of_rank / self.optimizer_steps) / of_rank

    def ring(self, size: float, orders: int = 1) -> Demand:
        """A reduce-scatter, or an all-gather, of ``size`` bytes per GPU among the ranks; half of it each way round.

        ``orders``: rings that enter each pod at another rack, so that not all of a pod's traffic leaves by one rack.
        """
        return rings(range(self.ranks * self.stages), self.stages, size, orders)

    def exposed_s(self, ring_s: float) -> float:
        """What one optimizer step waits for its collectives, where a ring takes ``ring_s`` for each byte per GPU.

        The reduce-scatter of a layer runs while earlier layers compute. What is left after the last layer is exposed,
        and the optimizer's all-gather, which begins when all gradients are there.
        """
        bucket = ring_s * GRADIENT * self.per_gpu / self.buckets
        ready = sent = 0.0
        for _ in range(self.buckets):
            ready += self.backward_s / self.buckets
            sent = max(sent, ready) + bucket
        return sent - ready + ring_s * WEIGHT * self.per_gpu

    def measured(self, took_s: float, ring_s: float) -> "Training":
        """The same at the MFU at which the phase takes ``took_s`` where a ring takes ``ring_s`` per byte and GPU.

        Where its collectives alone take longer than that nothing is left for computation.
        """
        of, computed = self, took_s
        for _ in range(60):  # what is exposed falls by less than computation rises: each round is nearer by a third
            of = replace(self, mfu=self.mfu * self.compute_s / max(computed, 1e-6))
            computed = took_s - self.optimizer_steps * of.exposed_s(ring_s)
        return of


def stages(parameters: float) -> int:
    """Hosts of one training rank: the fewest, a power of two, that hold its weights, gradients and optimizer state."""
    least = TRAINING_STATE * parameters / HOST_MEMORY
    return 1 << max(0, math.ceil(math.log2(least))) if least > 1 else 1


def rings(hosts: Sequence[int], stages: int, size: float, orders: int = 1) -> dict[tuple[int, int], float]:
    """A reduce-scatter, or an all-gather, of ``size`` bytes per GPU; half of it each way round.

    So many hosts in turn are one rank, and the like hosts of all ranks a ring. ``orders``: rings that enter each pod at
    another rank, so that not all of a pod's traffic leaves by one rack.
    """
    ranks = [hosts[at : at + stages] for at in range(0, len(hosts) - stages + 1, stages)]
    by_pod: dict[int, list[Sequence[int]]] = {}
    for its in ranks:
        by_pod.setdefault(pod(its[0]), []).append(its)
    part = size * (len(ranks) - 1) / len(ranks) * GPUS_PER_HOST / orders / 2
    demand: dict[tuple[int, int], float] = defaultdict(float)
    for order in range(orders):
        turned = [its[(order + at) % len(its)] for its in by_pod.values() for at in range(len(its))]
        for here, there in zip(turned, turned[1:] + turned[:1], strict=True):
            for a, b in zip(here, there, strict=True):
                demand[a, b] += part
                demand[b, a] += part
    return dict(demand)


def sync(parameters: float, gpus: int) -> Demand:
    """New weights to as many generation GPUs, each host from its like."""
    half = gpus // GPUS_PER_HOST
    return handed_on(parameters, range(half), range(half, 2 * half))


def handed_on(parameters: float, senders: Sequence[int], receivers: Sequence[int]) -> dict[tuple[int, int], float]:
    """New weights: one copy into each rack, an equal part to each of its hosts, which hands it on to the others there.

    Both stages at once: hosts exchange chunks while others still arrive (``rollmuxd.fabric.sync`` calls it ``rails``).
    """
    by_rack: dict[int, list[int]] = {}
    for host in receivers:
        by_rack.setdefault(rack(host), []).append(host)
    demand: dict[tuple[int, int], float] = {}
    for place, host in enumerate(receivers):
        here = by_rack[rack(host)]
        part = WEIGHT * parameters / len(here)
        demand[senders[place % len(senders)], host] = part
        demand |= {(host, other): part for other in here if other != host}
    return demand


class Decoding(Struct, frozen=True):
    """One layer of one decoding step, with as many sequences on each GPU."""

    hidden: int
    #: experts that a token is sent to
    experts_per_token: int
    #: sequences per GPU (for ``afd``: per GPU that holds sequences)
    sequences: int = 128

    def demands(self, how: Parallelism, placement: Placement, hosts: int) -> tuple[Demand, ...]:
        """What is sent, one exchange after the other; none where a model instance lies within a host.

        ``packed``: a group has hosts that lie beside each other; of ``afd`` the two are in racks beside each other.
        ``spread``: a group has one host in each of so many racks.
        """
        size = group_of(how)
        stride = HOSTS_PER_RACK if placement == "spread" or how == "afd" else 1
        groups = [
            [block + first + stride * place for place in range(size)]
            for block in range(0, hosts, size * stride)
            for first in range(stride)
            if block + first + stride * (size - 1) < hosts
        ]
        tokens = float(self.sequences * GPUS_PER_HOST)
        there, back = decoded(how, groups, self.hidden, self.experts_per_token, tokens)
        return (there, back) if there else ()


def group_of(how: Parallelism) -> int:
    """Hosts of one model instance."""
    return 2 if how == "afd" else int(how[2:]) // GPUS_PER_HOST


def decoded(
    how: Parallelism, groups: Sequence[Sequence[int]], hidden: int, experts_per_token: int, tokens: float
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """One layer of a decoding step, with so many tokens of each host: what goes there, and what comes back.

    ``tp16``: in each of the two all-reduces, half of what a host sends is its reduce-scatter, half its all-gather. What
    goes through a host's own links is left out. ``ep``: experts are taken as chosen evenly. ``afd``: the first host of
    a group has the sequences (so ``tokens`` are its own), the second the experts or the feed-forward layers.
    """
    there: dict[tuple[int, int], float] = {}
    for group in groups:
        count = len(group)
        if how == "afd":
            there[group[0], group[1]] = 2.0 * hidden * tokens
        elif how.startswith("ep"):
            part = 2.0 * hidden * experts_per_token * tokens / count
            there |= {(a, b): part for a in group for b in group if a != b}
        elif count > 1:
            # an all-reduce of the tokens of all hosts: (count - 1) / count of it twice, to the next host
            part = 2.0 * hidden * tokens * count * 2 * (count - 1) / count
            there |= dict.fromkeys(zip(group, [*group[1:], group[0]], strict=True), part)
    return there, {(b, a): size for (a, b), size in there.items()} if not how.startswith("tp") else dict(there)
