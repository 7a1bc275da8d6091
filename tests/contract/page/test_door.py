"""What the metrics port answers below /ui, over real sockets: off, on, full, stalled, closing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from core.models.bundled import bundled_model_dir
from service.config.server_config import ServerConfig
from service.metrics import http
from service.page import feed
from service.page.door import FULL, OFF
from service.server.server import Server
from tests.contract.page.watching import PATIENCE, asked, serve_emulated, watched
from tests.support.servers import listening
from tests.support.until import until
from tests.support.within import within

PARTS = {"/ui": "text/html", "/ui/page.css": "text/css", "/ui/page.js": "text/javascript"}


async def test_off_by_default_and_says_which_flag_is_missing() -> None:
    assert ServerConfig().ui is False
    async with serve_emulated(ui=False) as serving:
        for path in (*PARTS, "/ui/events", "/ui/"):
            answer = await asked(serving.port, path)
            assert (answer.status, answer.body) == (404, OFF + "\n"), path
            head = await asked(serving.port, path, "HEAD")
            assert (head.status, head.body) == (404, ""), path
        assert "--ui" in OFF
        assert (await asked(serving.port, "/metrics")).status == 200


async def test_three_files_that_may_load_nothing_from_elsewhere() -> None:
    async with serve_emulated() as serving:
        for path, kind in PARTS.items():
            answer, head = await asked(serving.port, path), await asked(serving.port, path, "HEAD")
            body = answer.body
            assert answer.status == head.status == 200 and answer.headers["content-type"].startswith(kind)
            assert answer.headers == head.headers | {"date": answer.headers["date"]}
            assert int(head.headers["content-length"]) == len(body.encode()) and head.body == ""
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy and "unsafe" not in policy and "*" not in policy
            assert "frame-ancestors 'none'" in policy and answer.headers["x-content-type-options"] == "nosniff"
            assert "://" not in body.replace("http://www.w3.org/2000/svg", "")
        for path, status in (("/ui/nothing", 404), ("/ui/../config.py", 404), ("/uix", 404), ("/", 404)):
            assert (await asked(serving.port, path)).status == status, path


async def test_methods_other_than_reading_are_refused() -> None:
    async with serve_emulated() as serving:
        for path in ("/ui", "/ui/events", "/metrics"):
            answer = await asked(serving.port, path, "POST")
            assert (answer.status, answer.headers["allow"]) == (405, "GET, HEAD"), path
        assert (await asked(serving.port, "/elsewhere", "POST")).status == 404
        assert (await asked(serving.port, "/ui", "DELETE")).status == 501
        head = await asked(serving.port, "/ui/events", "HEAD")
        assert head.headers["content-type"] == "text/event-stream" and head.body == ""
        metrics = await asked(serving.port, "/metrics", "HEAD")
        assert metrics.status == 200 and metrics.body == ""
        await until(lambda: serving.watchers == 0)


async def test_watchers_are_bounded_and_scrapes_go_on_beside_them() -> None:
    async with serve_emulated() as serving, AsyncExitStack() as held:
        watching = [await held.enter_async_context(watched(serving.port)) for _ in range(feed.MAX_WATCHERS)]
        refused = await asked(serving.port, "/ui/events")
        assert (refused.status, refused.body) == (503, FULL + "\n")
        assert all([await each.event() for each in watching])
        for _ in range(2 * http.MAX_CONNECTIONS):
            assert (await asked(serving.port, "/metrics")).status == 200
        await watching[0].close()
        await until(lambda: serving.watchers < feed.MAX_WATCHERS)
        async with watched(serving.port) as late:
            assert await late.event()


async def test_a_reader_that_stalls_is_cut_and_holds_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "EVENTS_BUFFER_BYTES", 4096)
    monkeypatch.setattr(http._Handler, "timeout", 0.3)
    monkeypatch.setattr(feed, "PERIOD_SECONDS", 0.01)
    async with (
        serve_emulated() as serving,
        serving.running(4),
        watched(serving.port) as reading,
        AsyncExitStack() as held,
    ):
        stalled = await held.enter_async_context(watched(serving.port, receive_buffer=2048))
        stalled.writer.transport.pause_reading()  # type: ignore[attr-defined]
        await until(lambda: serving.watchers == 2)
        before = await reading.event()
        async with within(PATIENCE, "the stalled one is cut"):
            while serving.watchers == 2:
                now = await reading.event()
        assert before and now and now["generation_tokens"] > before["generation_tokens"]
        assert (await asked(serving.port, "/metrics")).status == 200
        assert await reading.event(), "whoever reads goes on"


async def test_closing_ends_the_events_and_recording_ends_with_the_last_watcher() -> None:
    async with serve_emulated() as serving, AsyncExitStack() as held:
        lanes = serving.engine.lanes
        assert lanes.recording is None
        one = await held.enter_async_context(watched(serving.port))
        other = await held.enter_async_context(watched(serving.port))
        assert await one.event() and await other.event() and lanes.recording is not None
        await one.close()
        await until(lambda: serving.watchers == 1)
        assert lanes.recording is not None
        serving.server.refuse_readiness()
        while (event := await other.event()) is not None and event["state"] != "draining":
            pass
        assert event, "a drain is shown"
        await serving.server.close(grace=0)
        while await other.event() is not None:
            pass
        await until(lambda: lanes.recording is None)


async def test_a_server_that_loads_shows_a_page_already() -> None:
    server = Server(ServerConfig.of(port=0, metrics_port=0, model=str(bundled_model_dir()), ui=True), lambda *_: None)  # type: ignore[arg-type,return-value]
    async with listening(server):
        async with watched(server.metrics_port) as reading:
            event = await reading.event()
        await asyncio.wait_for(server.close(grace=0), 10)
    assert event and event["state"] == "starting" and event["pools"] == [] and event["timeline"]["span"] == 0
