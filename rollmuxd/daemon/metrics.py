"""What Prometheus scrapes: counters that follow the facts, gauges that are read off the state at each scrape.

Labels are pools, owners and statuses, whose numbers are bounded by the installation. Jobs are a label of two
gauges only, and only the :data:`JOBS_SHOWN` jobs whose bound is nearest to being broken. A new job comes every hour,
and each would stay in the database for ever; ``/v1/jobs`` and ``/v1/report`` have them all. Their names are shown to
callers that may see the jobs, and an owner's users see no other owner's series. Counters start at zero with the daemon,
as Prometheus expects; a replayed journal does not count.
"""

import os
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from rollmuxd.core import facts as f
from rollmuxd.core.estimates import credit_ms
from rollmuxd.core.ids import Millis, SlotId
from rollmuxd.core.model import Job, JobStatus, NodeStatus, Order, OrderKind, OrderStatus, Slot, SlotStatus
from rollmuxd.core.state import State
from rollmuxd.daemon.entries import Entry
from rollmuxd.daemon.usage.ledger import JUDGED_FROM
from rollmuxd.explain.forecast import slowdown

# Counters are made when the daemon starts: a second series for each would say nothing new.
disable_created_metrics()  # type: ignore[no-untyped-call]

_SWITCH_SECONDS = (0.5, 1, 2, 5, 10, 20, 30, 60, 120, 300)
_WAIT_SECONDS = (0.1, 1, 5, 15, 30, 60, 120, 300, 600, 1800, 3600)
_RUNNING = (SlotStatus.RUNNING, SlotStatus.TAIL)
#: jobs that have series of their own, at most
JOBS_SHOWN: Final = 100


class Metrics:
    """One daemon's figures, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        counter = partial(Counter, registry=self.registry)
        histogram = partial(Histogram, registry=self.registry)
        self._facts = counter("rollmux_facts", "Facts that became durable.", ["fact"])
        self._ended = counter("rollmux_slots_ended", "Slots that ended, by how.", ["owner", "how"])
        self._gpu_seconds = counter("rollmux_gpu_seconds_used", "GPU-seconds that released slots ran for.", ["owner"])
        self._wait = histogram(
            "rollmux_slot_wait_seconds",
            "From a slot's request to its grant, less the time without a daemon.",
            ["owner"],
            buckets=_WAIT_SECONDS,
        )
        self._switch = histogram(
            "rollmux_switch_seconds",
            "Time that moving a state took, by what was done.",
            ["kind"],
            buckets=_SWITCH_SECONDS,
        )
        self._switch_failed = counter("rollmux_switches_failed", "Moves of state that failed.", ["kind"])
        for kind in OrderKind:  # zeros too: Prometheus sees no rise in a series that begins with a one
            self._switch_failed.labels(kind)
        self._harvested = counter("rollmux_filler_gpu_seconds", "GPU time of loans to fillers.", ["owner"])
        self._yields = counter("rollmux_filler_yields", "Loans that were asked back.", ["reason"])
        self._requests = counter("rollmux_http_requests", "Answered calls.", ["route", "method", "status"])
        #: slots that run: how many GPUs they have, and since when
        self._running: dict[SlotId, tuple[int, Millis]] = {}

    # ---- fed by ----------------------------------------------------------------------------------------------------

    def answered(self, route: str, method: str, status: int) -> None:
        """A call was answered."""
        # Bounded: by the routes, their methods, and the statuses that we answer with.
        self._requests.labels(route or "none", method, status).inc()

    def begin(self, state: State) -> None:
        """Take what runs from a replayed state, so that its GPU time is counted right."""
        running = [slot for slot in state.slots.values() if slot.status in _RUNNING and slot.granted_at is not None]
        self._running = {slot.id: (len(slot.gpus), slot.granted_at or 0) for slot in running}
        for owner in state.owners:
            self._know(owner)

    def sink(self, facts: Sequence[Entry]) -> None:
        """Facts became durable: to be one of the writer's sinks."""
        for entry in facts:
            self._facts.labels(f.name(entry.fact)).inc()
            if entry.order is not None:
                self._see_order(entry.fact, entry.order)
            elif entry.slot is not None and entry.job is not None:
                self._see_slot(entry.fact, entry.slot, entry.job.owner)

    def _see_order(self, fact: f.Fact, order: Order) -> None:
        match fact:  # one that was late has counted as failed
            case f.OrderEnded() if order.status is OrderStatus.ISSUED:
                self._switch.labels(order.kind).observe((fact.at - order.issued_at) / 1000)
            case f.OrderFaulted() if order.status is OrderStatus.ISSUED:
                self._switch_failed.labels(order.kind).inc()
            case f.OrderContactLost():
                self._switch_failed.labels(order.kind).inc()
            case _:
                pass

    def _see_slot(self, fact: f.Fact, slot: Slot, owner: str) -> None:
        match fact:
            case f.SlotQueued():
                self._know(owner)
            case f.LoanEnded():
                self._harvested.labels(owner).inc(fact.gpus * fact.used_ms / 1000)
            case f.YieldAsked():
                self._yields.labels(fact.reason.code).inc()
            case f.SlotGranted():
                self._wait.labels(owner).observe((fact.at - slot.queued_at) / 1000)
                self._running[slot.id] = len(slot.gpus), fact.at
            case f.SlotResized():
                self._ran(slot.id, owner, fact.at)
                self._running[slot.id] = len(fact.gpus), fact.at
            case f.SlotReleased() | f.SlotWithdrawn() | f.SlotTakenAway():
                self._ran(slot.id, owner, fact.at)
                self._ended.labels(owner, str(slot.ended)).inc()
            case _:
                pass

    def _know(self, owner: str) -> None:
        for how in (SlotStatus.LOST, SlotStatus.FAULTED):  # zeros too, as above: there is an alert on a rise
            self._ended.labels(owner, how)

    def _ran(self, slot: SlotId, owner: str, at: Millis) -> None:
        gpus, since = self._running.pop(slot, (0, at))
        self._gpu_seconds.labels(owner).inc(gpus * (at - since) / 1000)

    # ---- read by ---------------------------------------------------------------------------------------------------

    def expose(self, gauges: Iterable[Metric], accept: str, owner: str | None = None) -> tuple[bytes, str]:
        """All counters and these gauges, in the text format that the scraper wants; and its media type.

        ``owner``: whose series alone are shown (None: all).
        """
        encode, media_type = choose_encoder(accept)
        body: bytes = encode(_Exposed([*self.registry.collect(), *gauges], owner))
        return body, media_type


class _Exposed(NamedTuple):
    """What is shown of these; to one owner, without the series of other owners."""

    families: Sequence[Metric]
    owner: str | None

    def collect(self) -> Iterator[Metric]:
        for family in self.families:
            if self.owner is not None:
                family.samples = [it for it in family.samples if it.labels.get("owner", self.owner) == self.owner]
            yield family


def gauges(
    state: State, now: Millis, may_read: Callable[[Job], bool], journal: Path | None, *, retention_failed: bool = False
) -> Iterator[Metric]:
    """What is read off the state, and off the journal's file, if it has one. ``may_read``: which jobs may be named."""
    yield from _node_gauges(state)
    yield from _work_gauges(state)
    yield from _wait_gauges(state, now)
    yield from _promise_gauges(state, may_read)
    yield from _journal_gauges(journal, retention_failed)


def _gauge(name: str, about: str, labels: Sequence[str], values: Mapping[Any, float]) -> Metric:
    """A gauge with these values, by their label; by a tuple of labels, where there are several."""
    family = GaugeMetricFamily(name, about, labels=labels)
    for of, value in values.items():
        family.add_metric([of] if isinstance(of, str) else list(of), value)
    return family


def _node_gauges(state: State) -> Iterator[Metric]:
    statuses: Tally[tuple[str, NodeStatus]] = Tally()
    gpus, held, running = Tally[str](), Tally[str](), Tally[str]()
    for node in state.nodes.values():
        holders = [gpu.holder for gpu in node.gpus.values() if gpu.holder is not None]
        for pool in node.pools:
            for status in NodeStatus:  # zeros too: an alert must tell "none is lost" from "unknown"
                statuses[pool, status] += status is node.status
            gpus[pool] += len(node.gpus)
            held[pool] += len(holders)
            running[pool] += sum(state.slots[slot].status in _RUNNING for slot in holders if slot in state.slots)
    reserved = {host.id: host.reserved_mb * 1_000_000 for host in state.hosts.values()}
    budget = {host.id: host.ram_mb * 1_000_000 for host in state.hosts.values()}
    yield _gauge("rollmux_nodes", "Nodes, by pool and status.", ["pool", "status"], statuses)
    yield _gauge("rollmux_gpus", "GPUs, by pool.", ["pool"], gpus)
    yield _gauge("rollmux_gpus_held", "GPUs that slots hold, by pool.", ["pool"], held)
    yield _gauge("rollmux_gpus_running", "GPUs on which slots run, by pool.", ["pool"], running)
    yield _gauge("rollmux_host_ram_reserved_bytes", "Host memory reserved for parked states.", ["host"], reserved)
    yield _gauge("rollmux_host_ram_budget_bytes", "Host memory for parked states.", ["host"], budget)


def _work_gauges(state: State) -> Iterator[Metric]:
    jobs = Tally((job.owner, job.status) for job in state.jobs.values() if job.status is not JobStatus.ENDED)
    statuses = Tally(slot.status for slot in state.slots.values())
    closed = (SlotStatus.OVER, SlotStatus.WITHDRAWN)
    slots = {status: statuses[status] for status in SlotStatus if status not in closed}
    yield _gauge("rollmux_jobs", "Jobs that have not ended.", ["owner", "status"], jobs)
    yield _gauge("rollmux_slots", "Open slots, by status.", ["status"], slots)
    yield GaugeMetricFamily(
        "rollmux_slots_overrunning",
        "Slots that run for far longer than their phases take.",
        value=sum(slot.overrun_at is not None and slot.ended is None for slot in state.slots.values()),
    )


def _wait_gauges(state: State, now: Millis) -> Iterator[Metric]:
    # Zeros too: an owner whose wait is over must not be seen waiting until its series goes stale.
    jobs, slots = dict.fromkeys(state.owners, 0.0), dict.fromkeys(state.owners, 0.0)
    for job in state.jobs.values():
        if job.status is JobStatus.WAITING:
            jobs[job.owner] = max(jobs.get(job.owner, 0), (now - job.registered_at) / 1000)
        elif job.queued is not None and job.live and job.status is not JobStatus.PAUSED:
            slots[job.owner] = max(slots.get(job.owner, 0), (now - state.slots[job.queued].queued_at) / 1000)
    yield _gauge(
        "rollmux_placement_wait_longest_seconds", "The longest that a job waits for a placement.", ["owner"], jobs
    )
    yield _gauge(
        "rollmux_slot_wait_longest_seconds", "The longest that a request of a placed job waits.", ["owner"], slots
    )


def _promise_gauges(state: State, may_read: Callable[[Job], bool]) -> Iterator[Metric]:
    at_risk = Tally(state.jobs[name].owner for name in state.at_risk)
    behind = Tally(dict.fromkeys(state.owners, 0))
    promised = [(credit_ms(job), job) for job in state.jobs.values() if job.promised and job.live]
    judged = [(ahead, job) for ahead, job in promised if ahead is not None and job.progress.finished >= JUDGED_FROM]
    for ahead, job in judged:
        behind[job.owner] += ahead < 0
    shown = sorted(((ahead, job) for ahead, job in judged if may_read(job)), key=lambda it: (it[0], it[1].id))
    slower = {(job.owner, job.spec.name): slowdown(job) or 0.0 for _, job in shown[:JOBS_SHOWN]}
    credit = {(job.owner, job.spec.name): ahead / 1000 for ahead, job in shown[:JOBS_SHOWN]}
    yield _gauge(
        "rollmux_jobs_at_risk",
        "Jobs for whose promise the plan of their group has no room.",
        ["owner"],
        {owner: at_risk[owner] for owner in state.owners},
    )
    yield _gauge(
        "rollmux_jobs_behind_bound",
        "Jobs with a promise whose mean iteration is beyond their bound.",
        ["owner"],
        behind,
    )
    yield _gauge(
        "rollmux_job_slowdown_ratio",
        f"Mean iteration over solo iteration, of the {JOBS_SHOWN} jobs with a promise that have least credit.",
        ["owner", "job"],
        slower,
    )
    yield _gauge(
        "rollmux_job_credit_seconds",
        f"Seconds that a job is ahead of its bound, for the same {JOBS_SHOWN} jobs as `rollmux_job_slowdown_ratio`.",
        ["owner", "job"],
        credit,
    )


def _journal_gauges(path: Path | None, retention_failed: bool) -> Iterator[Metric]:
    if path is None:
        return
    yield GaugeMetricFamily(
        "rollmux_journal_retention_failed",
        "1 since the journal could not be looked after, until it can: part of it may be damaged.",
        value=retention_failed,
    )
    try:
        disk = os.statvfs(path.parent)
        size = sum(file.stat().st_size for file in path.parent.glob(f"{path.name}*"))
    except OSError:  # a failing disk: readyz and the log tell, and the other figures are wanted all the more
        return
    yield GaugeMetricFamily("rollmux_journal_bytes", "Size of the journal's files.", value=size)
    yield GaugeMetricFamily(
        "rollmux_journal_disk_free_bytes", "What is free on the journal's disk.", value=disk.f_bavail * disk.f_frsize
    )
    yield GaugeMetricFamily(
        "rollmux_journal_disk_size_bytes", "Size of the journal's disk.", value=disk.f_blocks * disk.f_frsize
    )
