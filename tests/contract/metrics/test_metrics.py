"""/metrics over HTTP: one snapshot, closed label sets, clean by promtool, and never in the way."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
import urllib.error
import urllib.request

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from core.errors import StartupError
from service.metrics import names
from service.metrics.http import MetricsServer
from service.metrics.rpc import GONE, REJECTION_REASONS, RpcMetrics
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.support.servers import Serve


async def test_every_documented_metric_is_exported_from_the_snapshot(serve: Serve) -> None:
    async with serve() as serving:
        await serving.client.complete("hi")
        text = await serving.metrics()
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert set(families) == {metric.name for metric in names.ALL}
    samples = {(s.name, *sorted(s.labels.values())): s.value for f in families.values() for s in f.samples}
    assert samples["slipstream_pool_capacity", "kv_page"] == 100
    assert samples["slipstream_pool_used", "kv_page"] == 25
    assert samples["slipstream_pool_cached", "kv_page"] == 50
    assert samples["slipstream_kv_cache_usage_ratio",] == 0.25
    assert samples["slipstream_steps_total",] == 41
    assert samples["slipstream_leased_pages",] == 6
    assert samples["slipstream_host_cache_bytes",] == 4096
    assert samples["slipstream_rejoined_requests_total",] == 3
    assert samples["slipstream_host_copies_dropped_total",] == 2
    assert samples["slipstream_host_fetched_tokens_total",] == 512
    assert samples["slipstream_host_kept_tokens_total",] == 768
    assert samples["slipstream_host_evicted_tokens_total",] == 256
    assert samples["slipstream_preemptions_total",] == 4
    assert samples["slipstream_priority_preemptions_total",] == 1
    assert samples["slipstream_share_preemptions_total",] == 2
    assert samples["slipstream_recomputed_tokens_total",] == 13
    assert samples["slipstream_requests_finished_total", "length"] == 4
    assert samples["slipstream_requests_finished_total", "cancelled"] == 0, "present before the first one"
    assert samples["slipstream_assert_failures_total", "relay_fresh"] == 0
    assert samples["slipstream_time_to_first_token_seconds_bucket", "0.1"] == 2
    assert samples["slipstream_time_to_first_token_seconds_bucket", "+Inf"] == 3
    assert samples["slipstream_time_to_first_token_seconds_count",] == 3
    assert samples["slipstream_time_to_first_token_seconds_sum",] == 0.5
    assert samples["slipstream_ready",] == 1
    drafts = {name.removeprefix("slipstream_spec_decode_"): samples[name, *rest] for name, *rest in samples}
    counted = ("steps", "num_drafts", "num_draft_tokens", "num_accepted_tokens", "num_dropped_tokens")
    assert [drafts[f"{name}_total"] for name in counted] == [2, 4, 19, 8, 8]
    assert [drafts[name] for name in ("most_drafts", "draft_seconds_total", "verify_seconds_total")] == [6, 0.25, 1.5]
    lengths = {bound: samples["slipstream_spec_decode_acceptance_length_bucket", bound] for bound in ("2", "4", "+Inf")}
    assert lengths == {"2": 1, "4": 4, "+Inf": 4} and drafts["acceptance_length_sum"] == 12
    per_pos = "slipstream_spec_decode_num_{}_tokens_per_pos_total"
    assert [samples[per_pos.format("draft"), str(i)] for i in range(6)] == [4, 4, 4, 3, 2, 2]
    assert [samples[per_pos.format("accepted"), str(i)] for i in range(6)] == [3, 3, 2, 0, 0, 0]
    generate = "slipstream.v1.InferenceService/Generate"
    assert samples["slipstream_rpc_started_total", generate] == 1
    assert samples["slipstream_rpc_handled_total", "OK", generate] == 1


def test_every_reason_is_there_at_zero_before_its_first_refusal() -> None:
    """Else `increase()` of an alert would not see the first one."""
    registry = CollectorRegistry()
    RpcMetrics(registry)
    for metric, label, values in (
        ("slipstream_requests_rejected_total", "reason", REJECTION_REASONS),
        ("slipstream_kept_streams_gone_total", "how", GONE),
    ):
        assert [registry.get_sample_value(metric, {label: each}) for each in values] == [0.0] * len(values)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
async def test_promtool_finds_nothing(serve: Serve) -> None:
    async with serve() as serving:
        await serving.client.complete("hi")
        text = await serving.metrics()
    checked = await asyncio.to_thread(
        subprocess.run, ["promtool", "check", "metrics"], input=text, capture_output=True, text=True, timeout=30
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


async def test_no_label_comes_from_a_request(serve: Serve) -> None:
    async with serve() as serving:
        await serving.client.complete("hi")
        before = len((await serving.metrics()).splitlines())
        for number in range(50):
            await serving.client.complete(f"prompt {number}", request_id=f"id-{number}", cache_salt=f"tenant-{number}")
        assert len((await serving.metrics()).splitlines()) == before


def get(port: int, path: str, accept: str = "") -> tuple[int, str, str]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Accept": accept})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, response.headers["Content-Type"], response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, "", error.read().decode()


def test_only_metrics_is_served_in_the_format_asked_for() -> None:
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    try:
        status, kind, _ = get(server.port, "/metrics")
        assert status == 200 and kind.startswith("text/plain")
        assert get(server.port, "/metrics?x=1")[0] == 200
        assert get(server.port, "/metrics", "application/openmetrics-text")[1].startswith(
            "application/openmetrics-text"
        )
        status, _, body = get(server.port, "/etc/passwd")
        assert status == 404 and "passwd" not in body
    finally:
        server.close()


def test_a_taken_port_is_a_startup_error() -> None:
    first = MetricsServer("127.0.0.1", 0, CollectorRegistry())
    try:
        with pytest.raises(StartupError, match="in use") as failed:
            MetricsServer("127.0.0.1", first.port, CollectorRegistry())
        assert failed.value.exit_code == 2
    finally:
        first.close()


async def test_a_draining_server_says_so(serve: Serve) -> None:
    async with serve() as serving:
        serving.server.refuse_readiness()
        assert await serving.metric("slipstream_ready") == 0
        assert await serving.metric("slipstream_draining") == 1
        info = await serving.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.state == pb.SERVER_STATE_DRAINING
