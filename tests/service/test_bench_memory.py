"""What the memory benchmark prints, and that it is what the project promises."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from service.bench import bench


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
