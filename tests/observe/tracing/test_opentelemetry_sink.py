"""Spans that a collector receives are those of the run."""

from __future__ import annotations

import asyncio
import gzip
import itertools
import json
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ratchet.errors import ConfigError
from ratchet.observe.config import OpenTelemetryConfig
from ratchet.observe.tracing import opentelemetry_sink
from ratchet.observe.tracing.opentelemetry_sink import OpenTelemetrySink, get_traces_url
from ratchet.observe.trackers import TrackedRun
from ratchet.training.start import start_run
from ratchet.utils.tracer import TRACER, Span, Tracer

pytestmark = pytest.mark.needs("opentelemetry")

RUN = TrackedRun("quick", "id", Path(), {})
RECIPE = """
threads: 1
model: {preset: tiny, overrides: {hidden_size: 32, n_layers: 1}}
tokenizer: {kind: characters, alphabet: "0123456789="}
environment: {kind: sorting, digits: 2}
evaluation: {tasks: 2}
sampling: {max_new_tokens: 3}
algorithm: {kind: grpo, group_size: 2}
steps: 2
batch_size: 4
logging: {progress: "off", tensorboard: false}
"""


class Clock:
    now = 100.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def play(tracer: Tracer, sink: OpenTelemetrySink, attempts: int) -> None:
    async def attempt(number: int) -> None:
        with tracer.span("attempts", f"g#{number}") as span:
            with tracer.span("requests", "chat") as request:
                assert request is not None
                request.attributes = {"gen_ai.usage.output_tokens": 3}
            assert span is not None
            span.attributes = {"rl.task.tag": "\ud800"}
        with tracer.span("rewards", "Exact"):
            pass

    async def phase() -> None:
        tasks = [asyncio.create_task(attempt(number)) for number in range(attempts)]
        await asyncio.gather(*tasks)

    with tracer.span("steps", "step 7"):
        with tracer.phase("steps", "sample", 7):
            asyncio.run(phase())
        with tracer.phase("steps", "update", 7), tracer.span("critic", "update"):
            pass
        sink.write(7, {"rollout/reward": 0.5, "policy/loss": None, "time/step_s": 1.0})


@pytest.mark.parametrize("limit", [2, 0])
def test_parts_of_a_step_are_one_trace(limit: int) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exporter, tracer = InMemorySpanExporter(), Tracer(Clock())
    sink = OpenTelemetrySink(OpenTelemetryConfig(attempts=limit), RUN, exporter, tracer)
    play(tracer, sink, attempts=3)
    sink.close()
    with tracer.span("steps", "step 8") as unheard:
        assert unheard is None
    spans = exporter.get_finished_spans()
    names = {span.context.span_id: span.name for span in spans}
    tree = sorted((span.name, names[span.parent.span_id]) for span in spans if span.parent)
    assert tree == [
        *[("chat policy", "rl.attempt")] * limit,
        *[("rl.attempt", "rl.generate")] * limit,
        ("rl.critic.update", "rl.update"),
        ("rl.generate", "rl.step"),
        *[("rl.reward", "rl.attempt")] * limit,
        ("rl.update", "rl.step"),
    ]
    assert len({span.context.trace_id for span in spans}) == 1
    (step,) = [span for span in spans if span.parent is None]
    assert dict(step.attributes or {}) == {"rl.step.number": 7, "rl.reward.mean": 0.5}
    assert step.resource.attributes["rl.run.id"] == "id"
    assert all((span.start_time or 0) < (span.end_time or 0) for span in spans)
    starts = [span.start_time or 0 for span in spans]
    assert min(starts) == step.start_time
    for span in spans:
        if span.name == "chat policy":
            assert span.attributes is not None
            assert span.attributes["gen_ai.usage.output_tokens"] == 3
            assert span.attributes["gen_ai.operation.name"] == "chat"


def test_a_jumping_clock_changes_no_length_and_no_order(monkeypatch: pytest.MonkeyPatch) -> None:
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    jumps = itertools.cycle([0, 7 * 3600, -5 * 3600, 3 * 86400 * 365, -86400])

    def jump() -> float:
        return 1.7e9 + next(jumps)

    monkeypatch.setattr(time, "time", jump)
    monkeypatch.setattr(time, "time_ns", lambda: round(jump() * 1e9))
    exporter, tracer = InMemorySpanExporter(), Tracer(Clock())
    sink = OpenTelemetrySink(OpenTelemetryConfig(attempts=2), RUN, exporter, tracer)
    lengths: dict[str, float] = {}

    def note_length(span: Span) -> Callable[[], None]:
        return lambda: lengths.update({f"{span.track} {span.name}": span.seconds})

    tracer.subscribe(note_length)
    play(tracer, sink, attempts=1)
    sink.close()
    by_id = {span.context.span_id: span for span in exporter.get_finished_spans()}
    exported = [(span.start_time or 0, span.end_time or 0) for span in by_id.values()]
    assert sorted((end - start) / 1e9 for start, end in exported) == sorted(lengths.values())
    for span in by_id.values():
        # A reward is judged after its attempt has ended.
        if span.parent and span.name != "rl.reward":
            parent = by_id[span.parent.span_id]
            assert (parent.start_time or 0) < (span.start_time or 0)
            assert (span.end_time or 0) < (parent.end_time or 0)


class _Collector(BaseHTTPRequestHandler):
    spans: list[Any]
    paths: list[str]

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.paths.append(self.path)
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += scope.spans
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[tuple[str, type[_Collector]]]:
    handler = type("Collector", (_Collector,), {"spans": [], "paths": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()


@pytest.mark.slow
def test_a_collector_receives_what_the_metrics_say(
    repository: Path, tmp_path: Path, collector: tuple[str, type[_Collector]]
) -> None:
    """The run has the override of docs/integrations/opentelemetry.md."""
    address, received = collector
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)
    page = (repository / "docs" / "integrations" / "opentelemetry.md").read_text(encoding="utf-8")
    (override,) = re.findall(r"ratchet train recipe.yaml '(.+)'", page)
    override = override.replace("http://127.0.0.1:4318", address)
    assert start_run(recipe, [override], tmp_path / "run", command="train") == 0
    assert set(received.paths) == {"/v1/traces"}
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").open()]
    traces: dict[bytes, list[Any]] = {}
    for span in received.spans:
        traces.setdefault(span.trace_id, []).append(span)
    first, *steps = traces.values()
    assert next(span.name for span in first if not span.parent_span_id) == "rl.evaluate"
    assert len(steps) == 2
    for row, spans in zip(rows[1:], steps, strict=True):
        by_id = {span.span_id: span for span in spans}
        attributes = [
            {each.key: each.value for each in span.attributes}
            for span in spans
            if span.name == "chat policy"
            and by_id[by_id[span.parent_span_id].parent_span_id].name == "rl.generate"
        ]
        assert len(attributes) == 8
        generated = sum(each["gen_ai.usage.output_tokens"].int_value for each in attributes)
        assert generated == row["rollout/generated_tokens"]
        assert {each["gen_ai.usage.input_tokens"].int_value for each in attributes} == {3}
        names = {span.name for span in spans}
        phases = {"generate", "score", "update", "weight_sync", "after", "attempt", "reward"}
        assert {f"rl.{phase}" for phase in phases} <= names
        assert ("rl.evaluate" in names) == (row["step"] == 2)
    assert not TRACER._subscribers


def test_a_dead_collector_does_not_hold_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(opentelemetry_sink, "EXPORT_TIMEOUT_S", 0.1)
    tracer = Tracer()
    sink = OpenTelemetrySink(OpenTelemetryConfig(endpoint="http://127.0.0.1:9"), RUN, tracer=tracer)
    play(tracer, sink, attempts=1)
    sink.close()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"pip install 'ratchet-rl\[opentelemetry\]'"):
        OpenTelemetrySink(OpenTelemetryConfig(), RUN)


@pytest.mark.parametrize(
    ("endpoint", "url"),
    [
        ("http://a:4318", "http://a:4318/v1/traces"),
        ("http://a:4318/", "http://a:4318/v1/traces"),
        ("https://a/otlp/v1/traces", "https://a/otlp/v1/traces"),
    ],
)
def test_the_path_of_traces_is_added(endpoint: str, url: str) -> None:
    assert get_traces_url(endpoint) == url


@pytest.mark.slow
def test_a_run_without_it_imports_none_of_its_packages() -> None:
    code = (
        "import sys, ratchet.training.session, ratchet.experience.rollout.episode; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
