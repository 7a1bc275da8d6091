"""Snapshots of several engines as one: sums where sums are meant, and no counter that falls."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from core.types.control import Activity
from core.types.stats import DraftStats, EngineStats, Exemplar, HistogramStats, PoolStats
from service.replicas.merged_stats import GAUGES, GREATEST, counted, merged

ONE = EngineStats(
    step=5,
    pools=(PoolStats("req", 4, 1), PoolStats("kv_page", 100, 7, 3)),
    running=2,
    page_size=16,
    chunked_prefill_size=512,
    device_idle_ratio=0.5,
    last_step_at=7.0,
    drafts=DraftStats(1, (0, 2), (1, 1), 3, 1, 0.5, 1.5),
    finished={"stop": 2, "length": 1},
    assert_failures={"a": 1},
    computed_tokens={"prefill": 3},
    phase_seconds={"plan": 0.5},
    weight_version="v1",
    histograms={"x": HistogramStats((1.0, 2.0), (2, 3), 3.0, (None, Exemplar("t", 1.5)))},
)
OTHER = replace(
    ONE,
    pools=(PoolStats("kv_page", 50, 1, 1), PoolStats("state", 9, 9)),
    device_idle_ratio=0.1,
    last_step_at=8.0,
    drafts=DraftStats(2, (1, 1, 1), (2,), 0, 3),
    finished={"cancelled": 4, "stop": 1},
    histograms={"x": HistogramStats((1.0, 2.0), (0, 5), 6.0), "y": HistogramStats((1.0,), (1,), 1.0)},
)


def test_counts_add_up_and_pools_of_one_name_are_one() -> None:
    both = merged([ONE, OTHER])
    assert (both.step, both.running) == (10, 4)
    assert both.pools == (PoolStats("req", 4, 1), PoolStats("kv_page", 150, 8, 4), PoolStats("state", 9, 9))
    assert (both.page_size, both.chunked_prefill_size, both.last_step_at) == (16, 512, 8.0)
    assert both.device_idle_ratio == 0.3
    assert both.finished == {"stop": 3, "length": 1, "cancelled": 4}
    assert (both.assert_failures, both.computed_tokens, both.phase_seconds) == ({"a": 2}, {"prefill": 6}, {"plan": 1.0})
    assert both.drafts == DraftStats(3, (1, 3, 1), (3, 1), 3, 3, 0.5, 1.5)
    joined = both.histograms["x"]
    assert (joined.bounds, joined.counts, joined.total) == ((1.0, 2.0), (2, 8), 9.0)
    assert joined.exemplars == (None, Exemplar("t", 1.5)) and both.histograms["y"] == OTHER.histograms["y"]
    assert merged([EngineStats(), EngineStats()]).drafts is None


def test_every_number_is_a_sum_but_for_those_that_are_named() -> None:
    for each in fields(EngineStats):
        default: Any = getattr(EngineStats(), each.name)
        if type(default) in (int, float) and each.name not in GREATEST | {"device_idle_ratio"}:
            one, more = (replace(EngineStats(), **{each.name: value}) for value in (3, 4))
            assert getattr(merged([one, more]), each.name) == 7, each.name


def test_what_has_ended_goes_on_counting_and_holds_nothing() -> None:
    past = counted(ONE)
    assert all(getattr(past, name) == getattr(EngineStats(), name) for name in GAUGES)
    total = merged([OTHER], past)
    assert (total.step, total.running, total.finished["length"]) == (10, 2, 1)
    assert total.pools == OTHER.pools and total.device_idle_ratio == 0.1
    assert merged([], past).finished == ONE.finished
    assert merged([EngineStats()], merged([past], past)).step == 10


def test_what_keeps_most_from_clients_is_what_all_do() -> None:
    def doing(*each: Activity) -> Activity:
        return merged([replace(ONE, activity=activity) for activity in each]).activity

    assert doing(Activity.SERVING, Activity.SERVING) is Activity.SERVING
    assert doing(Activity.PAUSED, Activity.SERVING) is Activity.PAUSED
    assert doing(Activity.PAUSED, Activity.REFUSING) is Activity.REFUSING
    assert doing(Activity.ASLEEP, Activity.SERVING) is Activity.ASLEEP
    assert doing() is Activity.REFUSING


def test_versions_are_told_apart_while_they_differ() -> None:
    assert merged([ONE, OTHER]).weight_version == "v1"
    assert merged([ONE, replace(ONE, weight_version="v2"), OTHER]).weight_version == "v1,v2"
