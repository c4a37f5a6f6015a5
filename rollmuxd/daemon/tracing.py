"""OpenTelemetry spans of what jobs do, beside the traces that their own code makes.

A trace is one iteration of a job. In it is a span for each phase, from its request to its end. Its parts are ``wait``
until the GPUs are claimed, ``load`` until the slot is granted, and ``run`` until it is given back. What was open when
the daemon started is left out.

Configured as every OpenTelemetry program is, by its environment: ``OTEL_EXPORTER_OTLP_ENDPOINT`` turns it on,
``OTEL_SERVICE_NAME``, ``OTEL_EXPORTER_OTLP_HEADERS``, ``OTEL_TRACES_SAMPLER`` and the like mean what they mean
everywhere. Spans are sent by a thread of the exporter's; a collector that is away costs spans, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog

from rollmuxd.core import facts as f
from rollmuxd.core.ids import JobId, Millis, SlotId
from rollmuxd.core.model import Job, Slot, SlotStatus
from rollmuxd.daemon.entries import Entry
from rollmuxd.explain.causes import sentence

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

log = structlog.get_logger("rollmuxd.spans")

#: what turns it on
ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
#: how long the last spans may take to be sent when the daemon stops
FLUSH_MS: Final = 5_000


def from_environment(environment: Mapping[str, str] = os.environ) -> Spans | None:
    """Spans, if the environment asks for it; a line in the log where it asks and cannot have it."""
    if not any(environment.get(name) for name in ENDPOINTS) or environment.get("OTEL_SDK_DISABLED", "") == "true":
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ModuleNotFoundError as error:
        log.warning("no_spans", reason=f"{error.name} is not installed; it comes with: pip install 'rollmuxd[otel]'")
        return None
    named = {} if environment.get("OTEL_SERVICE_NAME") else {"service.name": "rollmuxd"}
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return Spans(provider)


class Spans:
    """Makes spans of facts. ``sink`` is to be one of the writer's sinks."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("rollmuxd", version("rollmuxd"))
        #: of the jobs that have begun an iteration since the daemon started
        self._iterations: dict[JobId, Span] = {}
        #: of the slots that are open
        self._phases: dict[SlotId, Span] = {}

    def close(self) -> None:
        """Send what is left, and stop. Waits for a few seconds at most."""
        with suppress(Exception):
            self._provider.force_flush(FLUSH_MS)
            self._provider.shutdown()

    def sink(self, facts: Sequence[Entry]) -> None:
        """Facts became durable."""
        for _, fact, job, slot, _ in facts:
            match fact:
                case f.JobRegistered() | f.JobEnded() | f.JobLost():
                    self._over(fact.job, fact.at)
                case f.SlotQueued() if job is not None:
                    self._queued(job, fact)
                case f.SlotReleased() | f.SlotWithdrawn() | f.SlotTakenAway() if slot is not None:
                    self._ended(slot, fact.at)
                case _:
                    pass

    def _over(self, job: JobId, at: Millis) -> None:
        """The job's run, or its iteration, is over."""
        iteration = self._iterations.pop(job, None)
        if iteration is not None:
            iteration.end(_ns(at))

    def _queued(self, job: Job, fact: f.SlotQueued) -> None:
        named = {"job": job.spec.name, "owner": job.owner}
        if fact.iteration or job.id not in self._iterations:
            self._over(job.id, fact.at)
            self._iterations[job.id] = self._span("iteration", None, fact.at, **named, run=fact.run)
        self._phases[fact.slot] = self._span(fact.phase, self._iterations[job.id], fact.at, **named, slot=fact.slot)

    def _ended(self, slot: Slot, at: Millis) -> None:
        from opentelemetry.trace import Status, StatusCode

        span = self._phases.pop(slot.id, None)
        if span is None:
            return
        begun = {"wait": slot.queued_at, "load": slot.claimed_at, "run": slot.granted_at}
        times = [(name, since) for name, since in begun.items() if since is not None]
        for (name, since), until in zip(times, [*(since for _, since in times[1:]), at], strict=True):
            self._span(name, span, since).end(_ns(until))
        if gpus := slot.claimed or slot.gpus:
            span.set_attribute("rollmux.gpus", list(gpus))
        span.set_attribute("rollmux.ended", str(slot.ended))
        if slot.ended not in (SlotStatus.RELEASED, SlotStatus.WITHDRAWN):
            span.set_status(Status(StatusCode.ERROR, f"{slot.ended}: {sentence(slot.reason)}"))
        span.end(_ns(at))

    def _span(self, name: str, parent: Span | None, at: Millis, **attributes: str | int) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # An empty context: whatever else in this process traces is no parent of ours.
        context = Context() if parent is None else set_span_in_context(parent, Context())
        named = {f"rollmux.{key}": value for key, value in attributes.items()}
        return self._tracer.start_span(name, context, attributes=named, start_time=_ns(at))


def _ns(at: Millis) -> int:
    return at * 1_000_000
