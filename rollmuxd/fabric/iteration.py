"""How long an RL iteration takes on a fabric, where generation hides behind training: training, then new weights.

Circuits follow the phases where a change gains more than the next phase waits for light. No window is assumed, so every
change is exposed in full.
"""

import re

from msgspec import Struct

from rollmuxd.fabric.circuits import Gate
from rollmuxd.fabric.parallelism import Parallelism
from rollmuxd.fabric.topology import Demand, Fabric
from rollmuxd.fabric.traffic import Decoding, Placement, Training, sync


class Iteration(Struct, frozen=True):
    """What an iteration spends, in seconds."""

    compute_s: float
    #: collectives that no computation hides, of all optimizer steps
    exposed_s: float
    sync_s: float
    #: waiting for light
    switching_s: float
    #: circuits were changed so often
    changed: int = 0

    @property
    def seconds(self) -> float:
        """All of it."""
        return self.compute_s + self.exposed_s + self.sync_s + self.switching_s


class Speeds(Struct, frozen=True):
    """What the two exchanges take on a fabric with the circuits set for them, and with those set for the other."""

    #: seconds per byte and GPU of a ring collective
    ring_s: float
    sync_s: float
    ring_kept_s: float
    sync_kept_s: float


def speeds(fabric: Fabric, training: Training) -> Speeds:
    """Measure both exchanges; a fabric without circuits takes the same either way."""
    ring, weights = training.ring(1.0, fabric.rings), sync(training.parameters, training.gpus)
    fabric.set_for(ring)
    ring_s, sync_kept_s = fabric.seconds(ring), fabric.seconds(weights)
    fabric.set_for(weights)
    return Speeds(ring_s, fabric.seconds(weights), fabric.seconds(ring), sync_kept_s)


def iteration(of: Speeds, training: Training, t_ocs_s: float) -> Iteration:
    """Return what an iteration spends that begins with the circuits of the one before."""
    gate, steps = Gate(t_ocs_s), training.optimizer_steps
    own = (steps * training.exposed_s(of.ring_s), of.sync_s)
    kept = (steps * training.exposed_s(of.ring_kept_s), of.sync_kept_s)
    spent, set_for, changed = list(own), 0, 0
    for at in (1, 0, 1, 0):  # the second pass is one like all later ones
        changed = 0 if at == 1 else changed
        opens = set_for != at and gate.opens(0.0, kept[at] - own[at])
        set_for, changed = (at, changed + 1) if opens else (set_for, changed)
        spent[at] = own[at] if set_for == at else kept[at]
    return Iteration(training.compute_s, spent[0], spent[1], changed * gate.exposed_s(0.0), changed)


def busy(fabric: Fabric, demand: Demand) -> dict[str, tuple[float, float]]:
    """How busy each kind of link is while this is sent at a common pace: the mean, and the most; 1 is all of it.

    Links that nothing is sent over count, too; what is 1 decides how long the demand takes.
    """
    bytes_on = [0.0] * len(fabric.capacity)
    for flow in fabric.flows(demand):
        for link in flow.links:
            bytes_on[link] += flow.size * flow.count
    shares: dict[str, list[float]] = {}
    for name, size, rate in zip(fabric.names, bytes_on, fabric.capacity, strict=True):
        kind = "circuits" if name.startswith("circuit") else re.sub(r" \d+(-\d+)?( up| down)?", "", name)
        shares.setdefault(kind, []).append(size / rate if rate else 0.0)
    whole = max(map(max, shares.values())) or 1.0
    return {kind: (sum(its) / len(its) / whole, max(its) / whole) for kind, its in shares.items()}


class Step(Struct, frozen=True):
    """What one decoding step sends, in seconds over all layers: with circuits of its own, and with the training's."""

    own_s: float
    trained_s: float

    @property
    def gated_s(self) -> float:
        """With the circuits that a gate lets stay: a phase has thousands of steps, so any gain is worth one change."""
        return min(self.own_s, self.trained_s)


def decoding(
    fabric: Fabric, training: Training, layer: Decoding, layers: int, how: Parallelism, placement: Placement
) -> Step:
    """Return what a decoding step waits for the network where the training hosts generate, too."""

    def takes() -> float:
        return layers * sum(fabric.seconds(demand) for demand in demands)

    demands = layer.demands(how, placement, training.gpus // 8)
    fabric.set_for(training.ring(1.0, fabric.rings))
    trained = takes()
    if demands:
        both = {pair: demands[0].get(pair, 0.0) + demands[1].get(pair, 0.0) for pair in {*demands[0], *demands[1]}}
        fabric.set_for(both)
    return Step(own_s=takes(), trained_s=trained)
