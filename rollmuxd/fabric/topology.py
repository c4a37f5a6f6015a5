"""Fabrics between the hosts of two clusters, as links of a capacity and the path from one host to another.

Hosts of 8 GPUs with one 400G card each; racks of 32 GPUs under an electrical switch; pods of 8 racks. Cards, rack
uplinks and pod uplinks are links of their summed capacity: ideal spreading over equal cables, not hashing. Training
hosts come first, as many generation hosts after them, and no pod holds both. Sizes are bytes, rates bytes per second.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import ClassVar, Final, NamedTuple, TypeAlias

from msgspec.structs import replace

from rollmuxd.fabric.circuits import shared_out
from rollmuxd.fabric.flows import Flow, seconds

GPUS_PER_HOST: Final = 8
HOSTS_PER_RACK: Final = 4
RACKS_PER_POD: Final = 8
#: GPUs of a rack, and so its uplinks where it is not oversubscribed
PORTS: Final = GPUS_PER_HOST * HOSTS_PER_RACK
GPUS_PER_POD: Final = PORTS * RACKS_PER_POD
#: one 400G card
CARD: Final = 50e9

#: of RFabric's rack uplinks, those that reach the core's optical switches as well. It is chosen: with it the cost is
#: the published 0.52; with all of them it is 0.54
CORE_SHARE: Final = 0.8

#: bytes from one host to another, of all its GPUs together
Demand: TypeAlias = Mapping[tuple[int, int], float]
#: circuits from one place (a rack, or a host) to another
Circuits: TypeAlias = Mapping[tuple[int, int], int]
NONE: Final[Circuits] = MappingProxyType({})


def rack(host: int) -> int:
    """The rack of a host."""
    return host // HOSTS_PER_RACK


def pod(host: int) -> int:
    """The pod of a host."""
    return rack(host) // RACKS_PER_POD


class Bill(NamedTuple):
    """What has to be bought for one GPU. Copper from host to rack, and network cards, are left out: all need them."""

    electrical_ports: float = 0.0
    transceivers: float = 0.0
    optical_ports: float = 0.0
    patch_ports: float = 0.0

    def and_of(self, other: "Bill", times: float = 1.0) -> "Bill":
        """Both together."""
        return Bill(*(mine + times * its for mine, its in zip(self, other, strict=True)))


#: of one cable: what is at its ends. A circuit switch takes light as it is, so there the other end has no transceiver
COPPER: Final = Bill(electrical_ports=1)
FIBRE: Final = Bill(electrical_ports=2, transceivers=2)
RACK_TO_CIRCUITS: Final = Bill(electrical_ports=1, transceivers=1, optical_ports=1)
HOST_TO_CIRCUITS: Final = Bill(transceivers=1, optical_ports=1)
HOST_TO_PANEL: Final = Bill(transceivers=1, patch_ports=1)
CIRCUITS_TO_CORE: Final = Bill(optical_ports=2)


class Fabric:
    """One fabric: its links, and which of them lie between two hosts.

    Args:
        gpus: GPUs of the training cluster, and as many of the generation cluster; whole pods.

    Raises:
        ValueError: no whole pods.
    """

    name: ClassVar[str]
    #: over so many orders of racks the training's rings are spread: where few links lead from pod to pod
    rings: ClassVar[int] = 1
    #: whether circuits can be changed between two phases
    switched: ClassVar[bool] = False

    def __init__(self, gpus: int) -> None:
        if gpus < GPUS_PER_POD or gpus % GPUS_PER_POD:
            raise ValueError(f"{gpus} GPUs: a cluster is made of whole pods of {GPUS_PER_POD}")
        self.gpus = gpus
        self.hosts = 2 * gpus // GPUS_PER_HOST
        self.capacity: list[float] = []
        #: of each link, for reports
        self.names: list[str] = []

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """The links from host ``a`` to host ``b``; none within a host."""
        raise NotImplementedError

    def circuits_for(self, demand: Demand, kept: Circuits = NONE) -> dict[tuple[int, int], int]:
        """The circuits that this demand wants beside those that are kept; none on a fabric without circuits.

        A rack's uplinks belong to its hosts in equal parts: a demand gets at most what its hosts have.
        """
        return {}

    def light(self, circuits: Circuits) -> None:
        """These circuits are there now, and no others."""

    def set_for(self, demand: Demand) -> None:
        """Set the circuits for this demand alone; a fabric without circuits stays as it is."""
        self.light(self.circuits_for(demand))

    def bill(self) -> Bill:
        """What one GPU's share of it is made of, counted by its cables."""
        raise NotImplementedError

    def _each(self, links: Iterable[int], of: Bill) -> Bill:
        """These links as cables of a card's rate, each with such ends; per GPU of both clusters."""
        cables = sum(self.capacity[link] for link in links) / CARD
        return Bill().and_of(of, cables / (self.hosts * GPUS_PER_HOST))

    def flows(self, demand: Demand) -> list[Flow]:
        """The demand as flows: one GPU of a host sends to its like, so each pair of hosts is eight equal flows."""
        return [Flow(self.path(a, b), size / GPUS_PER_HOST, GPUS_PER_HOST) for (a, b), size in demand.items() if a != b]

    def seconds(self, demand: Demand) -> float:
        """How long the demand takes where all of it begins at once."""
        return seconds(self.capacity, self.flows(demand))

    def link(self, name: str, rate: float) -> int:
        """A further link; its number."""
        self.names.append(name)
        self.capacity.append(rate)
        return len(self.capacity) - 1

    def _pairs(self, what: str, count: int, rate: float) -> list[tuple[int, int]]:
        """A link up and a link down of each of ``count`` things."""
        return [(self.link(f"{what} {i} up", rate), self.link(f"{what} {i} down", rate)) for i in range(count)]


class FatTree(Fabric):
    """Three tiers of electrical switches; a rack has ``1 / oversubscribed`` of the uplinks that its GPUs could fill."""

    name = "fat-tree"

    def __init__(self, gpus: int, oversubscribed: float = 1.0, card: float = CARD) -> None:
        super().__init__(gpus)
        uplinks = PORTS * card / oversubscribed
        self._cards = self._pairs("cards of host", self.hosts, GPUS_PER_HOST * card)
        self._racks = self._pairs("rack", self.hosts // HOSTS_PER_RACK, uplinks)
        self._pods = self._pairs("pod", self.hosts // HOSTS_PER_RACK // RACKS_PER_POD, RACKS_PER_POD * uplinks)

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """Up as far as needed, and down."""
        if a == b:
            return ()
        ups, downs = [self._cards[a][0]], [self._cards[b][1]]
        if rack(a) != rack(b):
            ups.append(self._racks[rack(a)][0])
            downs.append(self._racks[rack(b)][1])
        if pod(a) != pod(b):
            ups.append(self._pods[pod(a)][0])
            downs.append(self._pods[pod(b)][1])
        return (*ups, *downs)

    def bill(self) -> Bill:
        """Copper to the rack; above it fibres, with a port and a transceiver at both ends."""
        above = [up for up, _ in (*self._racks, *self._pods)]
        return self._each((up for up, _ in self._cards), COPPER).and_of(self._each(above, FIBRE))


class Oversubscribed(FatTree):
    """A fat tree with a quarter of the uplinks at the rack."""

    name = "osub4"

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus, oversubscribed=4.0)


class MixNet(FatTree):
    """Half of each card in a fat tree, half in circuits between the racks of one pod (MixNet, arXiv 2501.03905).

    Two racks with a circuit use that alone.
    """

    name = "mixnet"
    switched = True

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus, card=CARD / 2)
        self._optical = self._pairs("optical cards of host", self.hosts, GPUS_PER_HOST * CARD / 2)
        self.lit = _Lit(self)

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """The circuit where there is one, else the fat tree."""
        circuit = self.lit.links.get((rack(a), rack(b)))
        if circuit is None:
            return super().path(a, b)
        return (self._optical[a][0], circuit, self._optical[b][1])

    def bill(self) -> Bill:
        """Half a fat tree, and half of each card at the pod's optical switch."""
        return super().bill().and_of(self._each((up for up, _ in self._optical), HOST_TO_CIRCUITS))

    def circuits_for(self, demand: Demand, kept: Circuits = NONE) -> dict[tuple[int, int], int]:
        """Within pods only."""
        within = {pair: size for pair, size in by_rack(demand).items() if _same_pod(*pair)}
        return shared_out(within, _of_hosts(demand, PORTS // 2, GPUS_PER_HOST // 2, kept), kept=kept)

    def light(self, circuits: Circuits) -> None:
        """Each is a link of its own."""
        self.lit.only(circuits)


class Striped(MixNet):
    """MixNet whose racks with a circuit send over both halves of their cards at once, in equal parts.

    It is no fabric of the published table, whose figure for MixNet fits one half alone.
    """

    name = "mixnet-striped"

    def flows(self, demand: Demand) -> list[Flow]:
        """As of any fabric; but half of what has a circuit goes through the fat tree."""
        found = super().flows(demand)
        for place, (a, b) in enumerate(pair for pair in demand if pair[0] != pair[1]):
            if (rack(a), rack(b)) in self.lit.links:
                found[place] = replace(found[place], size=found[place].size / 2)
                found.append(replace(found[place], links=FatTree.path(self, a, b)))
        return found


class RFabric(Fabric):
    """Electrical in the rack, optical switches above it (OrchestrRL, arXiv 2601.01209).

    One of a rack's 32 uplinks stays on a small electrical plane: the path that is always there. Of the others, a share
    reaches the core, and so racks of other pods.
    """

    name = "rfabric"
    rings = RACKS_PER_POD
    switched = True
    #: of a rack's uplinks, those on the electrical plane
    ELECTRICAL: Final = 1

    def __init__(self, gpus: int, core_share: float = CORE_SHARE) -> None:
        super().__init__(gpus)
        self._cards = self._pairs("cards of host", self.hosts, GPUS_PER_HOST * CARD)
        self._plane = self._pairs("electrical plane of rack", self.hosts // HOSTS_PER_RACK, self.ELECTRICAL * CARD)
        self._core_ports = int(core_share * (PORTS - self.ELECTRICAL))
        self.lit = _Lit(self)

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """Over circuits, relayed by racks where there is no direct one; else over the electrical plane."""
        if a == b:
            return ()
        over: tuple[int, ...] = ()
        if rack(a) != rack(b):
            hops = shortest(self.lit.links, rack(a), rack(b))
            over = hops or (self._plane[rack(a)][0], self._plane[rack(b)][1])
        return (self._cards[a][0], *over, self._cards[b][1])

    def bill(self) -> Bill:
        """Two ports of the rack; a transceiver and a port at the pod's switch; two more where it reaches the core."""
        of = self._each((up for up, _ in self._cards), COPPER)
        of = of.and_of(self._each((up for up, _ in self._plane), FIBRE))
        of = of.and_of(RACK_TO_CIRCUITS, (PORTS - self.ELECTRICAL) / PORTS)
        return of.and_of(CIRCUITS_TO_CORE, self._core_ports / PORTS)

    def circuits_for(self, demand: Demand, kept: Circuits = NONE) -> dict[tuple[int, int], int]:
        """From rack to rack, by the demand."""
        between = by_rack(demand)
        pods = {place: place // RACKS_PER_POD for pair in (*between, *kept) for place in pair}
        ports = _of_hosts(demand, PORTS - self.ELECTRICAL, GPUS_PER_HOST, kept)
        return shared_out(between, ports, pods, self._core_ports, kept)

    def light(self, circuits: Circuits) -> None:
        """Each is a link of its own."""
        self.lit.only(circuits)


class TopoOpt(Fabric):
    """Cables from host to host through a patch panel, laid for one training and never changed (TopoOpt, NSDI'23).

    Of eight ports a training host has three to each neighbour of its ring and two to the other cluster. A generation
    host has two to each host of its rack, and two to the other cluster. Whatever has no cable is relayed by hosts. Its
    bill is another machine's: it has an electrical plane, which no path uses.
    """

    name = "topoopt"

    def __init__(self, gpus: int) -> None:
        super().__init__(gpus)
        half, ring = self.hosts // 2, gpus // PORTS
        self._links: dict[tuple[int, int], int] = {}
        for host in range(half):
            place, stage = divmod(host, HOSTS_PER_RACK)
            for to in {(place + 1) % ring, (place - 1) % ring}:
                self._cable(host, to * HOSTS_PER_RACK + stage, 3)
            self._cable(host, host + half, 2)
        for host in range(half, self.hosts):
            for to in range(rack(host) * HOSTS_PER_RACK, (rack(host) + 1) * HOSTS_PER_RACK):
                self._cable(host, to, 2)
            self._cable(host, host - half, 2)

    def path(self, a: int, b: int) -> tuple[int, ...]:
        """The fewest cables."""
        return shortest(self._links, a, b)

    def cables(self) -> Bill:
        """All of its cables, and nothing beside: what is modelled."""
        return self._each(self._links.values(), HOST_TO_PANEL)

    def bill(self) -> Bill:
        """Half of its cables beside an electrical plane of 2:1: the bill that meets the reported cost."""
        return FatTree(self.gpus, oversubscribed=2.0).bill().and_of(self.cables(), 0.5)

    def _cable(self, a: int, b: int, ports: int) -> None:
        if a != b:
            self._links[a, b] = self.link(f"cables {a}-{b}", ports * CARD)


class _Lit:
    """The circuits of a fabric that are there, each a link. A pair of racks has the same link whenever it has one."""

    def __init__(self, of: Fabric) -> None:
        self._of = of
        self._known: dict[tuple[int, int], int] = {}
        self.links: dict[tuple[int, int], int] = {}

    def only(self, circuits: Circuits) -> None:
        self.links = {}
        for pair, count in circuits.items():
            if pair not in self._known:
                self._known[pair] = self._of.link(f"circuit {pair}", 0.0)
            self.links[pair] = self._known[pair]
            self._of.capacity[self.links[pair]] = count * CARD


def _of_hosts(demand: Demand, most: int, each: int, kept: Circuits) -> dict[int, int]:
    """Ports of each rack up to which a demand may get circuits: those that are kept, and ``each`` of its hosts'."""
    sends: Counter[int] = Counter()
    receives: Counter[int] = Counter()
    for (a, b), count in kept.items():
        sends[a] += count
        receives[b] += count
    hosts = Counter(rack(host) for host in {host for pair in demand for host in pair})
    return {place: min(most, max(sends[place], receives[place]) + each * here) for place, here in hosts.items()}


FABRICS: Final[dict[str, type[Fabric]]] = {
    kind.name: kind for kind in (FatTree, Oversubscribed, TopoOpt, MixNet, Striped, RFabric)
}


def fabric(name: str, gpus: int) -> Fabric:
    """The fabric of this name.

    Raises:
        ValueError: it is not known, or the GPUs are no whole pods.
    """
    if name not in FABRICS:
        raise ValueError(f"no fabric is called {name!r}; known are {', '.join(FABRICS)}")
    return FABRICS[name](gpus)


def by_rack(demand: Demand) -> dict[tuple[int, int], float]:
    """The demand from rack to rack; what stays within a rack is left out."""
    sums: dict[tuple[int, int], float] = {}
    for (a, b), size in demand.items():
        if rack(a) != rack(b):
            sums[rack(a), rack(b)] = sums.get((rack(a), rack(b)), 0.0) + size
    return sums


def shortest(links: Mapping[tuple[int, int], int], a: int, b: int) -> tuple[int, ...]:
    """The links of a path of fewest hops from ``a`` to ``b``; none where there is no path."""
    direct = links.get((a, b))
    if direct is not None:
        return (direct,)
    nexts: dict[int, list[int]] = {}
    for here, there in links:
        nexts.setdefault(here, []).append(there)
    came: dict[int, int] = {a: a}
    queue = deque([a])
    while queue and b not in came:
        here = queue.popleft()
        for there in nexts.get(here, ()):
            if there not in came:
                came[there] = here
                queue.append(there)
    if b not in came:
        return ()
    places = [b]
    while places[-1] != a:
        places.append(came[places[-1]])
    return tuple(links[there, here] for here, there in itertools.pairwise(places))[::-1]


def _same_pod(a: int, b: int) -> bool:
    return a // RACKS_PER_POD == b // RACKS_PER_POD
