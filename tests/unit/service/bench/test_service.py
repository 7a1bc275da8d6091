"""`slipstream bench service` measures what it says: every kind of run delivers, with front ends and without."""

from __future__ import annotations

import pytest

from service.bench.service import measure
from service.bench.stream_rate import measure_rate


@pytest.mark.parametrize("frontends", [0, 1])
async def test_every_figure_is_there_and_paced_runs_keep_their_pace(frontends: int) -> None:
    figures = await measure([2], 300, rounds=1, step_ms=4.0, latency_step_ms=1.0, frontends=frontends)
    both = figures["streams"]["2"]
    assert both["raw_tokens_per_second"] > both["paced_tokens_per_second"]
    assert both["tokens_per_message"] >= 1
    for name in ("paced_in_process_tokens_per_second", "paced_tokens_per_second"):
        assert 0 < both[name] <= 2 / 0.004 * 1.1, "two tokens a step of 4 ms"
    share = both["tokens_per_second"] / both["raw_tokens_per_second"]
    assert both["share_of_raw"] == pytest.approx(share, abs=0.001), "printed to a thousandth"
    for way in ("in_process", "grpc"):
        seen = figures["one_at_a_time"][way]
        assert seen["itl_p50_ms"] >= 0.5 and seen["ttft_p50_ms"] <= seen["ttft_p99_ms"]


async def test_a_stream_that_lacks_tokens_is_no_measurement() -> None:
    async def short():  # type: ignore[no-untyped-def]
        for _ in range(9):
            yield 1

    with pytest.raises(ValueError, match="9 of 10"):
        await measure_rate(short, 1, 10)
