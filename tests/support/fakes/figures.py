"""A snapshot in which every figure can be told from the others."""

from __future__ import annotations

from core.types.stats import DraftStats, EngineStats, HistogramStats, PoolStats

FIGURES = EngineStats(
    step=41,
    pools=(PoolStats("kv_page", 100, 25, 50),),
    waiting=0,
    chunked_prefill_size=96,
    prompt_tokens=7,
    cached_tokens=5,
    generation_tokens=11,
    leased_pages=6,
    host_cache_bytes=4096,
    rejoined_requests=3,
    host_copies_dropped=2,
    host_fetched_tokens=512,
    host_kept_tokens=768,
    host_evicted_tokens=256,
    preemptions=4,
    priority_preemptions=1,
    share_preemptions=2,
    restart_preemptions=1,
    recomputed_tokens=13,
    weight_updates=9,
    weight_update_failures=12,
    stale_results=1,
    split_steps=1,
    drafts=DraftStats(
        steps=2,
        proposed=(0, 0, 0, 1, 1, 0, 2),
        right=(1, 0, 1, 2),
        dropped=8,
        most=6,
        draft_seconds=0.25,
        verify_seconds=1.5,
    ),
    device_idle_ratio=0.125,
    finished={"stop": 3, "length": 4},
    assert_failures={"relay_fresh": 0, "page_double_free": 0},
    histograms={"time_to_first_token_seconds": HistogramStats((0.01, 0.1, float("inf")), (1, 2, 3), 0.5)},
)
