"""Send the spans of a run to an OpenTelemetry collector.

A step is a trace. Its root is `rl.step`, its children are the phases of the step: `rl.generate`,
`rl.score`, `rl.update`, `rl.weight_sync`, `rl.evaluate` and so on. Attempts, requests to the
generator and rewards lie below the phase in which they began. Requests have the attributes of the
semantic conventions for generative AI (`gen_ai.*`). There are no conventions for training yet, so
`rl.*` follows the proposal open-telemetry/semantic-conventions-genai#88.

This module is imported only for a run that has this sink. OpenTelemetry's packages are imported
when the sink is built.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import Any
from urllib.parse import urlsplit

from ratchet.observe.config import OpenTelemetryConfig
from ratchet.observe.sinks import Metrics
from ratchet.observe.summary import get_installed_versions
from ratchet.observe.trackers import TrackedRun, as_os_error, import_package
from ratchet.utils.terminal_text import escape_surrogates
from ratchet.utils.tracer import (
    ATTEMPT_TRACK,
    REQUEST_TRACK,
    REWARD_TRACK,
    TRACER,
    AttributeValue,
    Span,
    Tracer,
)

EXTRA = "opentelemetry"
TRACES_PATH = "/v1/traces"
EXPORT_TIMEOUT_S = 10.0  # for a batch of spans, retries included
STEPS = "steps"  # the track of steps and their phases
STEP = "step "  # the beginning of a step's name, before its number
PHASES = {"sample": "generate", "sync": "weight_sync", "save": "checkpoint"}
# Metric of a step -> attribute of its span
STEP_METRICS = {
    "rollout/reward": "rl.reward.mean",
    "rollout/failed_share": "rl.attempt.failed_share",
    "rollout/generated_tokens": "gen_ai.usage.output_tokens",
    "policy/loss": "rl.loss",
    "eval/accuracy": "rl.evaluation.accuracy",
}
MODEL_NAME = "policy"
MODEL = {"gen_ai.provider.name": "ratchet", "gen_ai.request.model": MODEL_NAME}


class OpenTelemetrySink:
    """A sink that subscribes to the tracer and adds a step's main metrics to its span.

    Args:
        config: The recipe's section.
        run: The run; its name and id are resource attributes.
        exporter: Receives the spans; None: OTLP over HTTP to the section's endpoint.
        tracer: The source of spans.

    Raises:
        ConfigError: The packages are not installed.
    """

    def __init__(
        self,
        config: OpenTelemetryConfig,
        run: TrackedRun,
        exporter: Any = None,
        tracer: Tracer = TRACER,
    ) -> None:
        self._api = import_package("opentelemetry.trace", EXTRA)
        self._empty_context = import_package("opentelemetry.context", EXTRA).Context()
        sdk = import_package("opentelemetry.sdk.trace", EXTRA)
        export = import_package("opentelemetry.sdk.trace.export", EXTRA)
        resources = import_package("opentelemetry.sdk.resources", EXTRA)
        otlp = import_package("opentelemetry.exporter.otlp.proto.http.trace_exporter", EXTRA)
        version = get_installed_versions()["ratchet"] or ""
        attributes = {
            "service.name": "ratchet",
            "service.version": version,
            "rl.run.name": escape_surrogates(run.name),
            "rl.run.id": run.id,
        }
        with as_os_error("opentelemetry"):
            if exporter is None:
                url = None if config.endpoint is None else get_traces_url(config.endpoint)
                exporter = otlp.OTLPSpanExporter(endpoint=url, timeout=EXPORT_TIMEOUT_S)
            self._provider = sdk.TracerProvider(resource=resources.Resource.create(attributes))
            self._provider.add_span_processor(export.BatchSpanProcessor(exporter))
        self._spans = self._provider.get_tracer("ratchet", version)
        # The span of the attempt whose asyncio task runs; False: the attempt is not traced.
        self._attempt: ContextVar[Any] = ContextVar("attempt", default=None)
        self._max_attempts = self._attempts_left = config.attempts
        self._phases: list[Any] = []  # the spans of the current step and phase, the outermost first
        self._tracer = tracer
        self._offset_s = time.time() - tracer.clock()
        tracer.subscribe(self.follow)

    def follow(self, span: Span) -> Callable[[], None] | None:
        """Begin an OpenTelemetry span for a span of the tracer. This is a `Subscriber`."""
        phase = self._phases[-1] if self._phases else None
        if span.track == STEPS:
            self._attempts_left = self._max_attempts
            return self._follow_phase(span, phase)
        if span.track == ATTEMPT_TRACK:
            return self._follow_attempt(span, phase)
        if span.track in (REQUEST_TRACK, REWARD_TRACK):
            return self._follow_part_of_attempt(span, phase)
        work = self._begin(span, f"rl.{span.track}.{span.name}", phase, {})
        return lambda: self._end(span, work)

    def _follow_phase(self, span: Span, parent: Any) -> Callable[[], None]:
        if span.name.startswith(STEP):
            number = int(span.name.removeprefix(STEP))
            phase = self._begin(span, "rl.step", parent, {"rl.step.number": number})
        else:
            phase = self._begin(span, f"rl.{PHASES.get(span.name, span.name)}", parent, {})
        self._phases.append(phase)

        def end() -> None:
            self._phases.remove(phase)
            self._end(span, phase)

        return end

    def _follow_attempt(self, span: Span, phase: Any) -> Callable[[], None] | None:
        # The variable stays set, because an attempt is judged by its own task after it has ended.
        if not self._attempts_left:
            self._attempt.set(False)
            return None
        self._attempts_left -= 1
        attributes = {**MODEL, "gen_ai.operation.name": "invoke_agent", "rl.attempt.id": span.name}
        attempt = self._begin(span, "rl.attempt", phase, attributes)
        self._attempt.set(attempt)
        return lambda: self._end(span, attempt)

    def _follow_part_of_attempt(self, span: Span, phase: Any) -> Callable[[], None] | None:
        attempt = self._attempt.get()
        if attempt is False:
            return None
        parent = phase if attempt is None else attempt
        if span.track == REQUEST_TRACK:
            attributes = {**MODEL, "gen_ai.operation.name": span.name}
            part = self._begin(span, f"{span.name} {MODEL_NAME}", parent, attributes)
        else:
            part = self._begin(span, "rl.reward", parent, {"rl.reward.name": span.name})
        return lambda: self._end(span, part)

    def _begin(
        self, span: Span, name: str, parent: Any, attributes: Mapping[str, AttributeValue]
    ) -> Any:
        context = self._empty_context
        if parent is not None:
            context = self._api.set_span_in_context(parent, context)
        return self._spans.start_span(
            escape_surrogates(name),
            context=context,
            attributes={key: _clean(value) for key, value in attributes.items()},
            start_time=self._to_nanoseconds(span.start_s),
        )

    def _end(self, span: Span, part: Any) -> None:
        part.set_attributes({key: _clean(value) for key, value in span.attributes.items()})
        part.end(end_time=self._to_nanoseconds(span.end_s))

    def _to_nanoseconds(self, moment: float) -> int:
        return round((moment + self._offset_s) * 1e9)

    def write(self, step: int, metrics: Metrics) -> None:
        """Add the main metrics of a step to its span, which has not ended yet."""
        if not self._phases:  # the metrics before the first step
            return
        for metric, attribute in STEP_METRICS.items():
            if (value := metrics.get(metric)) is not None:
                self._phases[0].set_attribute(attribute, value)

    def close(self) -> None:
        """Send the remaining spans; those that an unreachable collector can't take are dropped."""
        self._tracer.unsubscribe(self.follow)
        with as_os_error("opentelemetry"):
            self._provider.shutdown()


def get_traces_url(endpoint: str) -> str:
    """Return the address that receives a collector's traces; an endpoint with a path is kept."""
    return endpoint if urlsplit(endpoint).path.strip("/") else endpoint.rstrip("/") + TRACES_PATH


def _clean(value: AttributeValue) -> AttributeValue:
    """Return the value with text that can be encoded: tags can come from data."""
    return escape_surrogates(value) if isinstance(value, str) else value
