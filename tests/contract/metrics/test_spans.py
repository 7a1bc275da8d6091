"""Spans of requests as a collector gets them: joined to the caller's trace, each with what happened when."""

from __future__ import annotations

import asyncio
import logging
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import TracerProvider

from core.errors import ConfigError
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.client import CallFailed, SlipstreamClient
from service.server.server import Server
from service.tracing import endpoint, otlp
from service.tracing.endpoint import otlp_endpoint
from service.tracing.trace_context import sampled_trace
from tests.chaos.device import Faults
from tests.chaos.process import ServerProcess
from tests.contract.metrics.collector import Collector, attributes
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.servers import serve_checkpoint

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, UNSAMPLED = (("traceparent", f"00-{TRACE}-{PARENT}-{flags}") for flags in ("01", "00"))
STEP_SECONDS = 0.003
GREEDY: dict[str, Any] = {"max_tokens": 5, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    running = Collector()
    yield running
    running.close()


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    tokenizer = Tokenizer.load(str(bundled_model_dir()))
    built = emulated_engine(tokenizer, step_seconds=STEP_SECONDS, rows=4)
    async with serve_checkpoint(bundled_model_dir(), lambda *_: built, **settings) as both:
        yield both


async def test_calls_without_an_output_are_spans_with_the_names_of_their_operations(collector: Collector) -> None:
    async with serving(otlp_endpoint=collector.endpoint) as (_, client):
        for call in (client.classify("a"), client.score("a", ["b"])):
            with pytest.raises(CallFailed):
                await call
        spans = await asyncio.to_thread(collector.wait, 2)
    told = {span.name.rpartition("/")[2]: attributes(span.attributes)["gen_ai.operation.name"] for span in spans}
    assert told == {"Classify": "classify", "Score": "rerank"}


async def test_a_span_joins_the_callers_trace_and_tells_what_happened_when(collector: Collector) -> None:
    before = time.time_ns()
    async with serving(otlp_endpoint=collector.endpoint) as (_, client):
        client.metadata = (SAMPLED,)
        await client.complete([5, 6, 7], request_id="mine", **GREEDY)
        (span,) = await asyncio.to_thread(collector.wait, 1)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == "slipstream.v1.InferenceService/Generate" and span.kind == span.SPAN_KIND_SERVER
    assert [event.name for event in span.events] == ["queue", "prefill", "decode", "finish"]
    times = [event.time_unix_nano for event in span.events]
    assert before <= span.start_time_unix_nano <= times[0] and times == sorted(times)
    assert times[-1] <= span.end_time_unix_nano
    told = attributes(span.attributes)
    first = told["gen_ai.server.time_to_first_token"]
    assert first >= STEP_SECONDS and times[2] == times[0] + int(first * 1e9), "the engine's own measure"
    assert (
        told
        | {
            "rpc.system": "grpc",
            "rpc.method": "Generate",
            "rpc.grpc.status_code": 0,
            "gen_ai.request.model": "emulated",
            "gen_ai.response.id": "mine",
            "gen_ai.request.max_tokens": 5,
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 5,
            "gen_ai.response.finish_reasons": ["length"],
        }
        == told
    )
    assert attributes(span.events[-1].attributes) == {"index": 0, "reason": "length", "tokens": 5}
    assert collector.resources[0]["service.name"] == "slipstream" and collector.resources[0]["service.version"]


async def test_a_tenants_span_has_the_id_that_its_client_gave(collector: Collector, tmp_path: Path) -> None:
    """Within the engine the id has the tenant's name before it."""
    (tmp_path / "tokens").write_text(f"alice:{'a' * 20}\n")
    async with serving(otlp_endpoint=collector.endpoint, auth_token_file=str(tmp_path / "tokens")) as (_, client):
        client.metadata = (SAMPLED, ("authorization", f"Bearer {'a' * 20}"))
        for resumable in (False, True):
            await client.complete([5, 6, 7], request_id=f"mine-{resumable}", resumable=resumable, **GREEDY)
        spans = await asyncio.to_thread(collector.wait, 2)
    assert {attributes(each.attributes)["gen_ai.response.id"] for each in spans} == {"mine-False", "mine-True"}
    assert all([event.name for event in each.events][-1] == "finish" for each in spans)
    assert not any(b"alice" in each.SerializeToString() for each in spans)


async def test_calls_without_a_trace_begin_one_and_unsampled_ones_stay_out(collector: Collector) -> None:
    async with serving(otlp_endpoint=collector.endpoint) as (_, client):
        client.metadata = (UNSAMPLED,)
        await client.complete([5, 6, 7], **GREEDY)
        client.metadata = ()
        await client.complete([5, 6, 7], n=2, **GREEDY)
        await client.tokenize("not a request")
        with pytest.raises(CallFailed):
            await client.complete([5], max_tokens=4, temperature=-1.0)
        stream = client.generate([5, 6, 7], **{**GREEDY, "max_tokens": 200})
        await anext(stream)
        await stream.aclose()
        both, refused, cut = await asyncio.to_thread(collector.wait, 3)
    assert both.parent_span_id == b"" and both.trace_id.hex() != TRACE
    finished = [attributes(event.attributes)["index"] for event in both.events if event.name == "finish"]
    assert sorted(finished) == [0, 1]
    assert attributes(refused.attributes)["error.type"] == "INVALID_ARGUMENT"
    assert refused.status.code == 0, "the caller's mistake is not the server's error"
    assert attributes(cut.attributes)["error.type"] == "CANCELLED" and cut.events[0].name == "queue"


async def test_front_ends_make_the_spans_and_the_engine_the_exemplars(collector: Collector) -> None:
    server = ServerProcess(Faults(step_seconds=0.002), frontends=2, otlp_endpoint=collector.endpoint)
    try:
        async with server.wait_ready().client() as client:
            client.metadata = (SAMPLED,)
            await client.complete([5, 6, 7], **GREEDY)
            (span,) = await asyncio.to_thread(collector.wait, 1)
        assert span.trace_id.hex() == TRACE
        assert [event.name for event in span.events] == ["queue", "prefill", "decode", "finish"]
        text = await open_metrics(server.metrics_address)
    finally:
        server.close()
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "queue_time_seconds"):
        (line,) = (each for each in text.splitlines() if each.startswith(f"slipstream_{name}_bucket") and "#" in each)
        assert f'# {{trace_id="{TRACE}"}} ' in line


async def open_metrics(address: str) -> str:
    """As Prometheus asks for them: the classic format has no exemplars."""
    import urllib.request

    request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text; version=1.0.0"})

    def fetch() -> str:
        with urllib.request.urlopen(request, timeout=20) as response:
            return str(response.read().decode())

    return await asyncio.to_thread(fetch)


async def test_exemplars_need_no_opentelemetry() -> None:
    async with serving() as (server, client):
        address = f"http://127.0.0.1:{server.metrics_port}/metrics"
        client.metadata = (UNSAMPLED,)
        await client.complete([5, 6, 7], **GREEDY)
        assert "trace_id" not in await open_metrics(address)
        client.metadata = (SAMPLED,)
        await client.complete([5, 6, 7], **GREEDY)
        assert f'trace_id="{TRACE}"' in await open_metrics(address)


async def test_a_collector_that_takes_nothing_does_not_hold_up_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last spans are never sent, so an end that waited for them would not come."""
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.05)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.1")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    flushing, let_go = threading.Event(), threading.Event()
    shut_down = TracerProvider.shutdown
    monkeypatch.setattr(TracerProvider, "shutdown", lambda self: (flushing.set(), let_go.wait(), shut_down(self)))
    async with serving(otlp_endpoint="http://127.0.0.1:9") as (server, client):
        for _ in range(20):
            await client.complete([5, 6, 7], **GREEDY)
        async with asyncio.timeout(60):
            await server.close(grace=0)
        assert flushing.is_set()
    # Or it would go on to say in the logs of later tests that it cannot export.
    let_go.set()
    for thread in threading.enumerate():
        if thread.name == "slipstream-otlp":
            thread.join(60)


def test_nothing_is_imported_where_nobody_asked() -> None:
    script = """
import asyncio, sys
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.support.fakes.fake_engine import FakeEngine
async def main():
    server = Server(ServerConfig.of(port=0, metrics_port=0), lambda *_: FakeEngine())
    await server.listen()
    await server.load()
    assert server._tracer is None
    await server.close(grace=0)
asyncio.run(main())
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert ran.stdout == "[]\n", ran.stderr


ENDPOINT = "http://collector:4317"


@pytest.mark.parametrize(
    ("flag", "env", "expected"),
    [
        (None, {}, None),
        (ENDPOINT, {}, ENDPOINT),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, ENDPOINT),
        (None, {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ENDPOINT, "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}, ENDPOINT),
        ("http://y", {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}, "http://y"),
        (ENDPOINT, {"OTEL_SDK_DISABLED": "true"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, None),
        (None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT, "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}, None),
    ],
)
def test_where_spans_go(flag: str | None, env: dict[str, str], expected: str | None) -> None:
    assert otlp_endpoint(flag, env) == expected


def test_a_flag_without_the_packages_is_refused_and_a_variable_is_only_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(endpoint, "EXPORTER", "opentelemetry_is.not_here")
    with pytest.raises(ConfigError, match=r"slipstream\[otel\]"):
        otlp_endpoint(ENDPOINT, {})
    with caplog.at_level(logging.WARNING):
        assert otlp_endpoint(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": ENDPOINT}) is None
    assert "slipstream[otel]" in caplog.text
    with pytest.raises(ConfigError, match="http://"):
        otlp_endpoint("collector:4317", {})


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (f"00-{TRACE}-{PARENT}-01", TRACE),
        (f"00-{TRACE}-{PARENT}-03", TRACE),
        (f"cc-{TRACE}-{PARENT}-01-what-comes-later", TRACE),
        (f"00-{TRACE}-{PARENT}-00", ""),
        (f"ff-{TRACE}-{PARENT}-01", ""),
        (f"00-{'0' * 32}-{PARENT}-01", ""),
        (f"00-{TRACE}-{'0' * 16}-01", ""),
        (f"00-{TRACE.upper()}-{PARENT}-01", ""),
        (f'00-{TRACE[:-1]}"-{PARENT}-01', ""),
        ("", ""),
        (b"00", ""),
    ],
)
def test_only_a_whole_trace_context_counts(value: Any, expected: str) -> None:
    assert sampled_trace((("a", "b"), ("traceparent", value))) == expected
    assert sampled_trace(None) == sampled_trace(()) == ""
