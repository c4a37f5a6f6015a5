"""``rollmux_gateway_*``: read off the core when they are asked for, so that a token costs nothing more."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector as Base

from rollmuxd_gateway.app import App
from rollmuxd_gateway.core import splice


class Collector(Base):
    """All metrics of one gateway."""

    def __init__(self, app: App) -> None:
        self.app = app

    def collect(self) -> Iterator[Metric]:
        """What there is now."""
        core = self.app.core
        count, rollout = core.count, core.rollout
        yield _counter("requests", "Responses that ended, by how", "finish", count.requests)
        yield _counter("segments", "Stretches of responses, by why they began", "why", count.segments)
        yield _counter("moves", "Requests moved, by why", "why", count.moves)
        yield _counter("faults", "Segments that broke off, by how", "kind", count.faults)
        yield _counter("shrink_refused", "Requests to shrink that were refused", "reason", count.refused_shrinks)
        tokens = {"in": count.tokens_in, "out": count.tokens_out}
        yield _counter("tokens", "Tokens of prompts and of responses", "dir", tokens)
        yield _counter("recomputed_tokens", "Tokens that a move had to prefill again", "", {"": count.recomputed})
        wasted = {"rewind": count.wasted_rewind, "in_flight": count.wasted_in_flight}
        yield _counter("wasted_tokens", "Tokens that were generated and thrown away", "why", wasted)
        running = [request for request in core.requests.values() if not request.over]
        yield GaugeMetricFamily(
            "rollmux_gateway_live", "Requests at an engine", len(running) - len(core.queue) - len(core.again)
        )
        yield GaugeMetricFamily("rollmux_gateway_queued", "Requests that wait here", len(core.queue) + len(core.again))
        pinned = sum(bool(splice.pin(request)) for request in running)
        yield GaugeMetricFamily("rollmux_gateway_pinned", "Requests that cannot be moved", pinned)
        yield GaugeMetricFamily("rollmux_gateway_rollout_done", "Responses done in this rollout", rollout.done)
        yield _last("drain_seconds", "What the last drain of a replica took", rollout.drains_ms)
        yield _last("shrink_seconds", "What it took to drain and park the last replica", rollout.shrinks_ms)
        yield GaugeMetricFamily(
            "rollmux_gateway_chunk_lag_seconds",
            "How late the event loop is, and so each chunk: at most, of the last 10 s",
            self.app.lag_s,
        )
        tail_s = (core.now - rollout.tail_began) / 1000 if rollout.tail_began else 0.0
        yield GaugeMetricFamily("rollmux_gateway_tail_seconds", "How long the tail has lasted", tail_s)
        state = GaugeMetricFamily(
            "rollmux_gateway_replica_state", "1 for the state it is in", labels=["replica", "state"]
        )
        for replica in core.replicas.values():
            state.add_metric([replica.id, replica.status.value], 1)
        yield state


def _last(name: str, text: str, values_ms: list[int]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(f"rollmux_gateway_{name}", text)
    if values_ms:
        family.add_metric([], values_ms[-1] / 1000)
    return family


def _counter(name: str, text: str, label: str, values: Mapping[str, float]) -> CounterMetricFamily:
    family = CounterMetricFamily(f"rollmux_gateway_{name}", text, labels=[label] if label else [])
    for key, value in values.items():
        family.add_metric([key] if label else [], value)
    return family
