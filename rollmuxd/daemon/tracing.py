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
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

import structlog

from rollmuxd.core import facts as f
from rollmuxd.core.ids import JobId, Millis, SlotId
from rollmuxd.core.state import State
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


@dataclass(slots=True)
class _Who:
    """A job, as its spans name it."""

    name: str
    owner: str
    #: the span of its iteration; None: it has not begun one since the daemon started
    iteration: Span | None = None


@dataclass(slots=True)
class _Phase:
    """An open slot: its span, and the part of it that is going on."""

    span: Span
    part: Span


class Spans:
    """Makes spans of facts. ``sink`` is to be one of the driver's sinks, ``begin`` told of a replayed state."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("rollmuxd", version("rollmuxd"))
        self._jobs: dict[JobId, _Who] = {}
        self._phases: dict[SlotId, _Phase] = {}

    def close(self) -> None:
        """Send what is left, and stop. Waits for a few seconds at most."""
        with suppress(Exception):
            self._provider.force_flush(FLUSH_MS)
            self._provider.shutdown()

    def begin(self, state: State) -> None:
        """Know the jobs that there are; what is open of them is left out."""
        self._jobs = {job.id: _Who(job.spec.name, job.owner) for job in state.jobs.values() if job.live}
        self._phases.clear()

    def sink(self, facts: Sequence[tuple[int, f.Fact]]) -> None:
        """Facts became durable."""
        for _, fact in facts:
            self._see(fact)

    def _see(self, fact: f.Fact) -> None:
        match fact:
            case f.JobRegistered():
                self._over(fact.job, fact.at)
                self._jobs[fact.job] = _Who(fact.spec.name, fact.owner)
            case f.JobEnded() | f.JobLost():
                self._over(fact.job, fact.at)
            case f.SlotQueued() if who := self._jobs.get(fact.job):
                self._queued(who, fact)
            case f.SlotClaimed() if phase := self._phases.get(fact.slot):
                phase.span.set_attribute("rollmux.gpus", list(fact.gpus))
                self._next_part(phase, "load", fact.at)
            case f.SlotGranted() if phase := self._phases.get(fact.slot):
                self._next_part(phase, "run", fact.at)
            case f.SlotReleased() | f.SlotWithdrawn() | f.SlotTakenAway():
                self._ended(fact)
            case _:
                pass

    def _over(self, job: JobId, at: Millis) -> None:
        """The job's run is over, and its iteration with it."""
        who = self._jobs.pop(job, None)
        if who is not None and who.iteration is not None:
            who.iteration.end(_ns(at))

    def _queued(self, who: _Who, fact: f.SlotQueued) -> None:
        if fact.iteration or who.iteration is None:
            if who.iteration is not None:
                who.iteration.end(_ns(fact.at))
            who.iteration = self._span("iteration", None, fact.at, job=who.name, owner=who.owner, run=fact.run)
        span = self._span(fact.phase, who.iteration, fact.at, job=who.name, owner=who.owner, slot=fact.slot)
        self._phases[fact.slot] = _Phase(span, self._span("wait", span, fact.at))

    def _next_part(self, phase: _Phase, name: str, at: Millis) -> None:
        phase.part.end(_ns(at))
        phase.part = self._span(name, phase.span, at)

    def _ended(self, fact: f.SlotReleased | f.SlotWithdrawn | f.SlotTakenAway) -> None:
        from opentelemetry.trace import Status, StatusCode

        phase = self._phases.pop(fact.slot, None)
        if phase is None:
            return
        how = str(fact.how) if isinstance(fact, f.SlotTakenAway) else f.name(fact).removeprefix("slot_")
        phase.span.set_attribute("rollmux.ended", how)
        if isinstance(fact, f.SlotTakenAway):
            phase.span.set_status(Status(StatusCode.ERROR, f"{how}: {sentence(fact.reason)}"))
        phase.part.end(_ns(fact.at))
        phase.span.end(_ns(fact.at))

    def _span(self, name: str, parent: Span | None, at: Millis, **attributes: str | int) -> Span:
        from opentelemetry.context import Context
        from opentelemetry.trace import set_span_in_context

        # An empty context: whatever else in this process traces is no parent of ours.
        context = Context() if parent is None else set_span_in_context(parent, Context())
        named = {f"rollmux.{key}": value for key, value in attributes.items()}
        return self._tracer.start_span(name, context, attributes=named, start_time=_ns(at))


def _ns(at: Millis) -> int:
    return at * 1_000_000
