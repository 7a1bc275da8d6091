"""What the memory benchmark prints, and that it is what the project promises."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig

from core.types.stats import PoolStats
from service.bench import bench
from service.bench.memory import latent_by_shape
from service.bench.windows import NAME, _Peak


@pytest.fixture(scope="module")
def figures() -> dict[str, Any]:
    answer = CliRunner().invoke(bench, ["memory", "--json"])
    assert answer.exit_code == 0, answer.output
    found: dict[str, Any] = json.loads(answer.output.splitlines()[-1])
    return found


def test_latents_take_a_quarter_of_expanded_heads_or_less(figures: dict[str, Any]) -> None:
    assert len(figures["latent"]) == 2
    for name, each in figures["latent"].items():
        assert each["latent"] > 0 and each["expanded"] / each["latent"] >= 4, name


def test_a_window_pool_holds_two_fifths_of_the_plain_pools_pages_or_less(figures: dict[str, Any]) -> None:
    """Five of six layers have windows, and the context is eight of them."""
    assert len(figures["window"]) == 2
    for name, each in figures["window"].items():
        assert each["wrong"] == 0, name
        # Full layers alone take a seventh or so of the plain pool: less would mean that nothing was counted.
        assert 0.14 < each["share"] <= 0.40, name
        assert 0.14 < each["pools_share"] <= 0.40, name


def test_bytes_of_a_token_by_hand() -> None:
    """DeepSeek-V3: 61 layers, 128 heads of 128 + 64 and 128, a latent of 512 with 64 beside it."""
    found = latent_by_shape(AutoConfig.for_model("deepseek_v3"), torch.bfloat16)
    assert found.expanded == 61 * 128 * (128 + 64 + 128) * 2
    assert found.latent == 61 * (512 + 64) * 2


def test_pages_count_once_for_every_layer_that_they_are_stored_in() -> None:
    plain, windowed = _Peak((6, 5)), _Peak((6, 5))
    for used in (10, 30, 20):
        plain.see([PoolStats("row", 4, 4), PoolStats("kv_page", 40, used)])
        windowed.see([PoolStats("kv_page", 40, used), PoolStats(NAME, 8, 7)])
    assert (plain.held, plain.size) == (6 * 30, 6 * 40)
    assert (windowed.held, windowed.size) == (30 + 5 * 7, 40 + 5 * 8)
