"""What Prometheus scrapes: counters that follow the facts, gauges that are read off the state at each scrape.

Labels are pools, nodes, owners and statuses, whose numbers are bounded by the installation. Jobs are no label: there
is a new one every hour, and each would stay in the database for ever; ``/v1/jobs`` and ``/v1/report`` have them.
Counters start at zero with the daemon, as Prometheus expects; a replayed journal does not count.
"""

from collections import Counter as Tally
from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from rollmuxd.core import facts as f
from rollmuxd.core.model import JobStatus, Millis, NodeStatus, OrderKind, Slot, SlotStatus
from rollmuxd.core.state import State

# When a counter was made is when the daemon was started: a second series for each would tell nobody more.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SWITCH_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
_WAIT_SECONDS = (0.1, 1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
_RUNNING = (SlotStatus.RUNNING, SlotStatus.TAIL)


class Metrics:
    """One daemon's figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        into = self.registry
        self._facts = Counter("rollmux_facts", "Facts that became durable.", ["fact"], registry=into)
        self._granted = Counter("rollmux_slots_granted", "Slots that were granted.", ["owner"], registry=into)
        self._ended = Counter("rollmux_slots_ended", "Slots that ended, by how.", ["owner", "how"], registry=into)
        self._gpu_seconds = Counter(
            "rollmux_gpu_seconds_used", "GPU-seconds that released slots ran for.", ["owner"], registry=into
        )
        self._wait = Histogram(
            "rollmux_slot_wait_seconds",
            "From a slot's request to its grant.",
            ["owner"],
            buckets=_WAIT_SECONDS,
            registry=into,
        )
        self._switch = Histogram(
            "rollmux_switch_seconds",
            "Time that moving a state took, by what was done.",
            ["kind"],
            buckets=_SWITCH_SECONDS,
            registry=into,
        )
        self._switch_failed = Counter("rollmux_switches_failed", "Moves of state that failed.", ["kind"], registry=into)
        self._requests = Counter(
            "rollmux_http_requests", "Answered calls.", ["route", "method", "status"], registry=into
        )
        #: looking a child up costs several times what counting does
        self._answered: dict[tuple[str, str, int], Counter] = {}
        self._state = _StateCollector()
        self.registry.register(self._state)
        #: open orders: what they are, and since when
        self._orders: dict[str, tuple[OrderKind, Millis]] = {}
        #: open slots: owner, and since when they were asked for, and granted; GPUs
        self._slots: dict[str, _OpenSlot] = {}
        self._owners: dict[str, str] = {}

    # ---- fed by ----------------------------------------------------------------------------------------------------

    def answered(self, route: str, method: str, status: int) -> None:
        """A call was answered."""
        key = (route or "none", method, status)
        count = self._answered.get(key)
        if count is None:
            # Bounded: by the routes, their methods, and the statuses that we answer with.
            count = self._answered[key] = self._requests.labels(key[0], key[1], str(status))
        count.inc()

    def begin(self, state: State) -> None:
        """Take what is open from a replayed state, so that its ends are counted right."""
        self._owners = {job.id: job.owner for job in state.jobs.values()}
        self._orders = {order.id: (order.kind, order.issued_at) for order in state.orders.values()}
        self._slots = {
            slot.id: _OpenSlot(self._owners.get(slot.job, ""), slot) for slot in state.slots.values() if _open(slot)
        }

    def sink(self, facts: Sequence[tuple[int, f.Fact]]) -> None:
        """Facts became durable: to be one of the driver's sinks."""
        for _, fact in facts:
            self.see(fact)

    def see(self, fact: f.Fact) -> None:
        """A fact became durable."""
        self._facts.labels(f.name(fact)).inc()
        match fact:
            case f.JobRegistered():
                self._owners[fact.job] = fact.owner
            case f.SlotQueued():
                self._slots[fact.slot] = _OpenSlot(self._owners.get(fact.job, ""), queued_at=fact.at)
            case f.SlotClaimed() if slot := self._slots.get(fact.slot):
                slot.gpus = len(fact.gpus)
            case f.SlotGranted() if slot := self._slots.get(fact.slot):
                slot.since = fact.at
                self._granted.labels(slot.owner).inc()
                self._wait.labels(slot.owner).observe((fact.at - slot.queued_at) / 1000)
            case f.SlotShrunk() if slot := self._slots.get(fact.slot):
                self._ran(slot, fact.at)
                slot.gpus = len(fact.kept)
            case f.SlotGrown() if slot := self._slots.get(fact.slot):
                self._ran(slot, fact.at)
                slot.gpus = len(fact.gpus)
            case f.SlotReleased() | f.SlotWithdrawn() | f.SlotFaulted() | f.SlotLost() | f.SlotRevoked():
                self._slot_ended(fact.slot, fact)
            case f.OrderIssued():
                self._orders[fact.order] = fact.kind, fact.at
            case f.OrderEnded() if order := self._orders.pop(fact.order, None):
                self._switch.labels(order[0]).observe((fact.at - order[1]) / 1000)
            case f.OrderFaulted() | f.OrderContactLost() if order := self._orders.pop(fact.order, None):
                self._switch_failed.labels(order[0]).inc()
            case _:
                pass

    def _slot_ended(self, name: str, fact: f.Fact) -> None:
        slot = self._slots.pop(name, None)
        if slot is not None:
            self._ran(slot, fact.at)
            self._ended.labels(slot.owner, f.name(fact).removeprefix("slot_")).inc()

    def _ran(self, slot: "_OpenSlot", at: Millis) -> None:
        if slot.since is not None:
            self._gpu_seconds.labels(slot.owner).inc(slot.gpus * (at - slot.since) / 1000)
            slot.since = at

    # ---- read by ---------------------------------------------------------------------------------------------------

    def expose(self, state: State, accept: str) -> tuple[bytes, str]:
        """All figures, in the text format that the scraper wants; and its media type."""
        self._state.state = state
        try:
            encode, media_type = choose_encoder(accept)
            body: bytes = encode(self.registry)
        finally:
            self._state.state = None
        return body, media_type


class _OpenSlot:
    __slots__ = ("gpus", "owner", "queued_at", "since")

    def __init__(self, owner: str, slot: Slot | None = None, *, queued_at: Millis = 0) -> None:
        self.owner = owner
        self.queued_at = slot.queued_at if slot else queued_at
        self.since = slot.granted_at if slot else None
        self.gpus = len(slot.gpus) if slot else 0


def _open(slot: Slot) -> bool:
    return slot.status in (SlotStatus.QUEUED, SlotStatus.LOADING, *_RUNNING)


class _StateCollector(Collector):
    """Gauges, read off the state while it is set."""

    state: State | None = None

    def describe(self) -> list[Metric]:
        return []  # asked at registration, when there is no state yet

    def collect(self) -> Iterator[Metric]:
        if self.state is not None:
            yield from _node_gauges(self.state)
            yield from _work_gauges(self.state)


def _node_gauges(state: State) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("rollmux_nodes", "Nodes, by pool and status.", labels=["pool", "status"])
    gpus = GaugeMetricFamily("rollmux_gpus", "GPUs, by pool.", labels=["pool"])
    held = GaugeMetricFamily("rollmux_gpus_held", "GPUs that slots hold, by pool.", labels=["pool"])
    running = GaugeMetricFamily("rollmux_gpus_running", "GPUs on which slots run, by pool.", labels=["pool"])
    node_held = GaugeMetricFamily("rollmux_node_gpus_held", "GPUs that slots hold, by node.", labels=["node"])
    reserved = GaugeMetricFamily(
        "rollmux_host_ram_reserved_bytes", "Host memory reserved for parked states.", labels=["host"]
    )
    budget = GaugeMetricFamily("rollmux_host_ram_budget_bytes", "Host memory for parked states.", labels=["host"])
    statuses: Tally[tuple[str, NodeStatus]] = Tally()
    of_pool: dict[str, list[int]] = {}
    for node in state.nodes.values():
        holders = [gpu.holder for gpu in node.gpus.values() if gpu.holder is not None]
        runs = sum(state.slots[slot].status in _RUNNING for slot in holders if slot in state.slots)
        node_held.add_metric([node.id], len(holders))
        for pool in node.pools:
            statuses[pool, node.status] += 1
            sums = of_pool.setdefault(pool, [0, 0, 0])
            sums[0], sums[1], sums[2] = sums[0] + len(node.gpus), sums[1] + len(holders), sums[2] + runs
    for pool, sums in of_pool.items():
        gpus.add_metric([pool], sums[0])
        held.add_metric([pool], sums[1])
        running.add_metric([pool], sums[2])
        for status in NodeStatus:  # zeros too: an alert must tell "none is lost" from "nobody says"
            nodes.add_metric([pool, status], statuses[pool, status])
    for host in state.hosts.values():
        reserved.add_metric([host.id], host.reserved_mb * 1_000_000)
        budget.add_metric([host.id], host.ram_mb * 1_000_000)
    yield from (nodes, gpus, held, running, node_held, reserved, budget)


def _work_gauges(state: State) -> Iterator[Metric]:
    jobs = GaugeMetricFamily("rollmux_jobs", "Jobs that have not ended.", labels=["owner", "status"])
    slots = GaugeMetricFamily("rollmux_slots", "Open slots, by status.", labels=["status"])
    late = GaugeMetricFamily(
        "rollmux_slots_overstaying",
        "Slots that run for far longer than their phases take.",
        value=sum(slot.overstays_at is not None and slot.ended is None for slot in state.slots.values()),
    )
    groups = GaugeMetricFamily("rollmux_groups", "Co-execution groups.", value=len(state.groups))
    orders = GaugeMetricFamily("rollmux_orders_open", "Moves of state under way.", labels=["kind"])
    by_job = Tally((job.owner, job.status) for job in state.jobs.values() if job.status is not JobStatus.ENDED)
    for (owner, status), count in by_job.items():
        jobs.add_metric([owner, status], count)
    by_slot = Tally(slot.status for slot in state.slots.values())
    for slot_status in SlotStatus:
        if slot_status not in (SlotStatus.OVER, SlotStatus.WITHDRAWN):
            slots.add_metric([slot_status], by_slot[slot_status])
    by_order = Tally(order.kind for order in state.orders.values())
    for kind in OrderKind:
        orders.add_metric([kind], by_order[kind])
    yield from (jobs, slots, late, groups, orders)
