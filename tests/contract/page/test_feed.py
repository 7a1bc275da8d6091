"""What the events hold: the figures of /metrics, the streams by their ids, the lanes, and no word of anybody's text."""

from __future__ import annotations

import asyncio
import itertools
import json
import time
import urllib.request
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from core.executor.interface import MAX_DEPTH
from core.lanes import RESULTS, SUBMIT, Recording
from core.models.bundled import bundled_model_dir
from service.client import SlipstreamClient
from service.config.server_config import ServerConfig
from service.frontends.group import FrontEndGroup
from service.page import feed, streams
from service.page.timeline import SCHEDULER_SLICES, SECONDS, STEPS, timeline
from tests.contract.page.watching import PATIENCE, STEP_SECONDS, asked, serve_emulated, timed_engine, watched
from tests.support.servers import loaded
from tests.support.until import until

TOKEN = "a" * 20


async def test_an_event_agrees_with_metrics_and_names_streams_but_no_text() -> None:
    async with serve_emulated(rows=4) as serving, serving.running(6), watched(serving.port) as reading:
        await until(lambda: serving.engine.stats.generation_tokens > 100)
        before = await serving.metrics()
        # The event after the next one is made after this.
        events = [await reading.event() for _ in range(3)]
        after = await serving.metrics()
        event = events[-1]
        assert event
        assert event["running"] == before["slipstream_requests_running"] == 4
        assert event["waiting"] == before["slipstream_requests_waiting"] == 2
        assert {pool["name"]: pool["capacity"] for pool in event["pools"]} == {
            "req": before['slipstream_pool_capacity{pool="req"}'],
            "kv_page": before['slipstream_pool_capacity{pool="kv_page"}'],
        }
        for name, metric in (("generation_tokens",) * 2, ("step", "steps"), ("prompt_tokens",) * 2):
            assert before[f"slipstream_{metric}_total"] <= event[name] <= after[f"slipstream_{metric}_total"], name
        assert event["served"]["model"] == serving.engine.model_info.name and event["state"] == "ready"
        rows = {row[0]: row[1:] for row in event["streams"]["rows"]}
        assert event["streams"]["total"] == 6 and [*rows] == [f"look-{n}" for n in range(6)], "oldest first"
        assert [state for state, *_ in rows.values()] == ["decode"] * 4 + ["waiting"] * 2
        assert all(prompt > 0 and (output > 0) is (state == "decode") for state, prompt, output, _, _ in rows.values())
        assert "secret" not in json.dumps(events)


async def test_streams_beyond_the_bound_are_counted_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "MAX_ROWS", 3)
    async with serve_emulated() as serving, serving.running(5), watched(serving.port) as reading:
        event = await reading.event()
        assert event and event["streams"]["total"] == 5
        assert [row[0] for row in event["streams"]["rows"]] == ["look-0", "look-1", "look-2"]


async def test_lanes_are_those_of_the_device() -> None:
    async with serve_emulated() as serving, serving.running(4), watched(serving.port) as reading:
        event = await reading.event()
        while event and len(event["timeline"]["device"]) < 4 * STEPS:
            event = await reading.event()
        assert event
        seen = event["timeline"]
    device, work, copies = (list(zip(*[iter(seen[lane])] * 4, strict=True)) for lane in ("device", "scheduler", "copy"))
    assert len(device) == STEPS
    # A step of the emulated device takes its time or, after a wait, that from its launch on.
    assert min(took for _, took, *_ in device) >= 0.99e6 * STEP_SECONDS
    assert [step for _, _, step, _ in device] == list(range(device[0][2], device[0][2] + STEPS))
    assert {tokens for *_, tokens in device} == {4}
    assert {kind for _, _, kind, _ in work} >= {RESULTS, SUBMIT}
    assert sum(took for _, took, *_ in work) < sum(took for _, took, *_ in device)
    assert all(begin >= 0 and begin + took <= seen["span"] for begin, took, *_ in (*device, *work, *copies))


def recorded(steps: int, step_seconds: float, slices_per_step: int = 6) -> Recording:
    """A recording of so many steps back to back, from second 0 on, each with scheduler slices of equal length."""
    recording = Recording()
    recording.device_offset = 0.0
    for step in range(steps):
        begin = step * step_seconds
        part = step_seconds / slices_per_step
        for each in range(slices_per_step):
            recording.scheduler.add(begin + each * part, begin + (each + 1) * part, step, each % 6)
        recording.forward.add(begin, begin + step_seconds, step, 0, 8)
        recording.copy.add(begin + step_seconds, begin + step_seconds * 1.01, step)
    return recording


def test_a_picture_is_bounded_in_steps_in_time_and_in_slices() -> None:
    quick = timeline(recorded(1000, 0.001))
    assert len(quick["device"]) == 4 * STEPS and quick["span"] == pytest.approx(1000 * STEPS, abs=1)
    assert len(quick["scheduler"]) == 4 * 6 * STEPS
    slow = timeline(recorded(100, 1.0))
    assert slow["span"] == 1e6 * SECONDS and len(slow["device"]) == 4 * SECONDS
    busy = timeline(recorded(100, 0.01, slices_per_step=100))
    assert len(busy["scheduler"]) <= 4 * SCHEDULER_SLICES
    assert busy["scheduler"][0] == 0 and len(busy["device"]) == 4 * (SCHEDULER_SLICES // 100), "no step is half known"
    assert timeline(None) == timeline(Recording()) == {"span": 0, "scheduler": [], "device": [], "copy": []}


async def test_a_trace_and_a_page_record_side_by_side() -> None:
    async with serve_emulated() as serving, serving.running(2), watched(serving.port) as reading:
        assert await reading.event()
        lanes, shared = serving.engine.lanes, serving.engine.lanes.recording
        seen = serving.engine.stats.step
        await until(lambda: serving.engine.stats.step > seen + 10)
        before = serving.engine.stats.step
        answer = await asked(serving.port, "/trace?seconds=0.3", "POST")
        after = serving.engine.stats.step + MAX_DEPTH
        trace = json.loads(answer.body)
        assert lanes.recording is shared is not None, "the page's recording goes on"
        steps = [each["args"]["step"] for each in trace["traceEvents"] if each.get("cat") == "forward"]
        assert before <= steps[0] and steps[-1] <= after, "none from before the trace, which the page has"
        assert steps == [*range(steps[0], steps[-1] + 1)], "and none is missing"
        while (event := await reading.event()) and event["timeline"]["span"] == 0:
            pass
    await until(lambda: lanes.recording is None)


async def test_all_watchers_together_cost_what_one_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 0.05)
    made = []
    real = feed.moment
    monkeypatch.setattr(feed, "moment", lambda *args: made.append(time.monotonic()) or real(*args))  # type: ignore[func-returns-value]
    async with serve_emulated() as serving, AsyncExitStack() as held:
        for _ in range(feed.MAX_WATCHERS):
            await held.enter_async_context(watched(serving.port))
        await until(lambda: len(made) >= 8)
    gaps = [after - before for before, after in itertools.pairwise(made)]
    assert min(gaps) > feed.PERIOD_SECONDS / 2, gaps
    before = len(made)
    await asyncio.sleep(2 * feed.PERIOD_SECONDS)
    assert len(made) <= before + 1, "nobody looks"


async def test_a_loop_that_is_busy_leaves_the_page_its_other_figures() -> None:
    async with serve_emulated() as serving, serving.running(1):
        port = serving.port
        seen = []

        def look() -> None:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/ui/events", timeout=20) as events:
                while len(seen) < 4:
                    if (line := events.readline()).startswith(b"data: "):
                        seen.append(json.loads(line[6:]))

        watching = asyncio.create_task(asyncio.to_thread(look))
        await until(lambda: seen)
        until_then = time.monotonic() + PATIENCE
        while len(seen) < 3 and time.monotonic() < until_then:
            time.sleep(0.01)  # noqa: ASYNC251 - the loop is held up on purpose
        assert len(seen) >= 3, "events came while the loop did nothing else"
        await watching
        assert seen[2]["streams"]["age"] > seen[0]["streams"]["age"] + feed.PERIOD_SECONDS / 2
        assert [event["streams"]["rows"][0][0] for event in seen] == ["look-0"] * 4


async def test_front_ends_leave_the_page_to_the_engines_process(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """With tokens: ids are shown as clients know them, and names of tenants are not."""
    (tmp_path / "tokens").write_text(f"alice:{TOKEN}\n")
    settings: dict[str, Any] = {"port": 0, "metrics_port": 0, "drain_linger": 0.0, "frontends": 1, "ui": True}
    settings["auth_token_file"] = str(tmp_path / "tokens")
    built = timed_engine()
    caplog.set_level("INFO", "service.metrics")
    config = ServerConfig.of(model=str(bundled_model_dir()), **settings)
    async with loaded(FrontEndGroup(config, lambda *_: built)) as server:
        assert f"http://127.0.0.1:{server.metrics_port}/ui" in caplog.text, "told where it is"
        target = f"127.0.0.1:{server.port}"
        async with watched(server.metrics_port) as reading, SlipstreamClient(target, token=TOKEN) as client:
            asking = asyncio.create_task(client.complete([5, 6, 7], max_tokens=8000, ignore_eos=True, request_id="far"))
            while (event := await reading.event()) and not event["streams"]["total"]:
                assert not asking.done(), asking
            assert event and event["streams"]["rows"][0][0] == "far" and "alice" not in json.dumps(event)
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
