"""What the metrics say of an engine: the fullest pool, phases, exemplars, settings, drains; and what they cost."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import numpy as np
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as open_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed

from core.histogram import REQUEST_SECONDS, Histogram
from core.lanes import EMIT, PHASES, PLAN, RESULTS, LaneRecorder, Slice
from core.scheduler.phases import PhaseClock
from core.scheduler.scheduler import Scheduler
from core.scheduler.tally import HISTOGRAMS as KEPT
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats, Exemplar, PoolStats
from service.bench.scheduler_cost import new_scheduler
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.metrics import names
from service.metrics.collector import EngineCollector, engine_view, kv_usage
from service.metrics.histograms import HISTOGRAMS
from tests.support.fakes.fake_engine import FakeEngine
from tests.unit.core.scheduler.counting import least_peak_bytes, opcodes

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"


def samples(handle: EngineHandle, **settings: Any) -> dict[tuple[str, ...], float]:
    """Values by name and sorted label values, as scraped in OpenMetrics."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(lambda: engine_view(handle, ServerConfig.of(**settings), "1.2.3")))
    text = open_latest(registry).decode()
    assert generate_latest(registry)
    return {(s.name, *sorted(s.labels.values())): s.value for family in parsed(text) for s in family.samples}


@pytest.mark.parametrize(
    ("pools", "usage"),
    [
        ((), 0.0),
        ((PoolStats("req", 10, 10),), 0.0),
        ((PoolStats("req", 10, 10), PoolStats("kv_page", 100, 25, 70)), 0.25),
        ((PoolStats("kv_page", 100, 25), PoolStats("swa_page", 10, 9)), 0.9),
        ((PoolStats("kv_page", 100, 95), PoolStats("mamba", 10, 9), PoolStats("cross_page", 0, 0)), 0.95),
    ],
)
def test_the_fullest_memory_pool_is_the_utilisation(pools: tuple[PoolStats, ...], usage: float) -> None:
    assert kv_usage(EngineStats(pools=pools)) == usage


def test_settings_and_state_are_told() -> None:
    handle = EngineHandle()
    found = samples(handle, max_queued_requests=77, drain_linger=2, drain_grace=20)
    assert found["slipstream_requests_waiting_limit",] == 77
    assert found["slipstream_drain_limit_seconds",] == 32
    assert found["slipstream_drain_seconds",] == found["slipstream_startup_seconds",] == found["slipstream_ready",] == 0
    handle.engine = FakeEngine()
    handle.draining = True
    found = samples(handle, overlap=False, schedule_policy="lpm")
    assert found["slipstream_drain_seconds",] > 0 and found["slipstream_startup_seconds",] > 0
    assert ("slipstream_cache_config_info", "1", "100") in found, "page size and pages, as gateways ask for them"
    assert names.CACHE_CONFIG_INFO.labels == ("block_size", "num_gpu_blocks")
    (config,) = (key for key in found if key[0] == "slipstream_config_info")
    assert "false" in config and "lpm" in config and "96" in config, "sized by the device where none is set"
    found = samples(handle, chunked_prefill_size=48)
    (config,) = (key for key in found if key[0] == "slipstream_config_info")
    assert "48" in config and "96" not in config
    (build,) = (key for key in found if key[0] == "slipstream_build_info")
    assert {"1.2.3", "fake", "float32", "FakeForCausalLM"} <= set(build)
    assert {key[1] for key in found if key[0] == "slipstream_scheduler_phase_seconds_total"} == set(PHASES)


def test_every_histogram_is_described_and_every_description_measured() -> None:
    elsewhere = {"adapter_load_seconds", "grammar_compile_seconds"}
    assert set(KEPT) | elsewhere == set(HISTOGRAMS)
    assert all(list(bounds) == sorted(set(bounds)) for bounds in KEPT.values())


def test_one_value_or_an_array_count_alike() -> None:
    one, many = Histogram((1, 2, 4)), Histogram((1, 2, 4))
    values = [0.0, 1.0, 1.5, 2.0, 3.9, 4.0, 4.1, 1e9]
    for value in values:
        one.observe_one(value)
    many.observe(np.array(values))
    assert one.stats() == many.stats()
    assert one.stats().counts == (2, 4, 6, 8) and one.stats().exemplars == ()
    assert one.stats() is one.stats(), "nothing new, nothing rendered"
    one.observe_one(1.5, TRACE)
    assert one.stats().exemplars == (None, Exemplar(TRACE, 1.5), None, None)
    assert one.stats().counts == (2, 5, 7, 9)


def test_a_trace_id_is_an_exemplar_of_its_bucket_and_no_label() -> None:
    histogram = Histogram(REQUEST_SECONDS)
    histogram.observe_one(0.05)
    histogram.observe_one(3.0, TRACE)
    engine = FakeEngine()
    shown = dataclasses.replace(engine.stats, histograms={"e2e_request_latency_seconds": histogram.stats()})
    handle, registry = EngineHandle(), CollectorRegistry()
    handle.engine = type("Shown", (FakeEngine,), {"stats": shown})()
    registry.register(EngineCollector(lambda: engine_view(handle, ServerConfig(), "")))
    (line,) = (each for each in open_latest(registry).decode().splitlines() if TRACE in each)
    assert line.startswith('slipstream_e2e_request_latency_seconds_bucket{le="5.12"} 2.0 # {trace_id="')
    assert TRACE not in generate_latest(registry).decode(), "the classic format has none"


def test_a_request_leaves_its_figures() -> None:
    scheduler = new_scheduler(2, 64)
    req = Req("a", 0, np.arange(3, 23), SamplingParams(temperature=0.0, ignore_eos=True), 0, 5, trace_id=TRACE)
    scheduler.intake.add(req)
    for now in range(1, 12):
        scheduler.step(float(now))
    stats = scheduler.stats
    count = {name: histogram.counts[-1] for name, histogram in stats.histograms.items()}
    assert count["request_prompt_tokens"] == count["request_generation_tokens"] == 1
    assert count["inter_token_latency_seconds"] == 4 and count["request_time_per_output_token_seconds"] == 1
    assert stats.histograms["request_generation_tokens"].total == 5
    assert stats.histograms["request_prompt_tokens"].total == 20
    queue, prefill, decode, whole = (
        stats.histograms[name].total
        for name in (
            *("queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            "e2e_request_latency_seconds",
        )
    )
    assert queue + prefill + decode == whole, "the parts of a request's time are all of it"
    assert stats.computed_tokens == {"prefill": 20, "decode": stats.computed_tokens["decode"]}
    assert stats.computed_tokens["decode"] >= 4
    assert count["step_tokens"] == count["step_requests"] >= 5
    traced = [name for name, histogram in stats.histograms.items() if any(histogram.exemplars)]
    assert {"queue_time_seconds", "time_to_first_token_seconds", "e2e_request_latency_seconds"} <= set(traced)
    assert all(seconds > 0 for seconds in stats.phase_seconds.values())


def test_phases_add_up_and_are_slices_while_somebody_records() -> None:
    instants = iter((10.0, 11.0, 13.0, 20.0, 24.0, 25.0))
    lanes = LaneRecorder()
    clock = PhaseClock(lanes, lambda: next(instants))
    clock.begin()
    clock.done(RESULTS, 1)
    clock.done(PLAN, 2)
    recording = lanes.start()
    clock.begin()
    clock.done(PLAN, 3)
    clock.done(EMIT, 2, 7)
    assert clock.by_name() == {**dict.fromkeys(PHASES, 0.0), "results": 1.0, "plan": 6.0, "emit": 1.0}
    assert recording.scheduler.slices() == [Slice(20.0, 24.0, 3, PLAN, 0), Slice(24.0, 25.0, 2, EMIT, 7)]


def decoding(lanes: LaneRecorder) -> Scheduler:
    scheduler = new_scheduler(64, 128)
    scheduler._phases._lanes = lanes
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    for index in range(64):
        scheduler.intake.add(Req(str(index), 0, np.full(8, index + 3), params, 0, 100))
    for now in range(4):
        scheduler.step(float(now))
    return scheduler


def one_more_step(lanes: LaneRecorder) -> partial[object]:
    return partial(decoding(lanes).step, 5.0)


def test_what_a_recording_costs_a_step() -> None:
    """Bytecodes of the scheduler's step with 64 requests: some per phase, none per request, no memory that stays."""
    off, on = LaneRecorder(), LaneRecorder()
    quiet, recorded = one_more_step(off), one_more_step(on)
    on.start()
    plain, traced = opcodes(quiet), opcodes(recorded)
    print(f"{plain} bytecodes, {traced} while somebody records ({traced / plain - 1:.1%} more)")
    assert plain < traced < 1.1 * plain
    less, more = (least_peak_bytes(partial(one_more_step, lanes)) for lanes in (off, on))
    assert abs(more - less) < 2048


def test_the_clocks_of_a_step_cost_little_of_it() -> None:
    scheduler = decoding(LaneRecorder())
    whole = opcodes(lambda: scheduler.step(5.0))

    def phases() -> None:
        scheduler._phases.begin()
        for phase in range(len(PHASES)):
            scheduler._phases.done(phase, 1)

    print(f"{opcodes(phases)} of {whole} bytecodes of a step are readings of the clock")
    assert opcodes(phases) < 0.08 * whole
