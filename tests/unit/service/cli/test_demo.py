"""The demo: each stream has its own line, and the figures that it shows are there."""

from __future__ import annotations

import asyncio

import pytest

from service.cli.demo import MAX_TOKENS, Screen, scrape, stream_one
from tests.support.servers import Serve


def test_each_stream_is_shown_in_a_line_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    screen = Screen(("one:", "two:"))
    for at, text in ((0, "a"), (1, "b\nc"), (0, "d"), (1, "")):
        screen.add(at, text)
    screen.close()
    assert capsys.readouterr().out == "1 | a\n2 | b c\n1 | d\n1 = one: ad\n2 = two: b c\n"


async def test_a_stream_is_shown_to_its_end_and_then_the_pools(
    serve: Serve, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve() as serving:
        end = await stream_one(serving.client, 0, "hi", Screen(("hi",)))
        shown = await asyncio.to_thread(scrape, f"http://127.0.0.1:{serving.server.metrics_port}/metrics")
    assert (end.reason, end.completion_tokens) == ("length", MAX_TOKENS)
    assert capsys.readouterr().out.split() == [word for at in range(MAX_TOKENS) for word in ("1", "|", str(at))]
    for beginning in ("slipstream_pool_capacity{", "slipstream_requests_running ", "slipstream_steps_total "):
        assert any(line.startswith(beginning) for line in shown), beginning
    assert all(line.startswith("slipstream_") and "assert" not in line for line in shown)
