"""The benchmark of host memory: what is timed is what it says, and all its ways are served."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from click.testing import CliRunner

from service.bench import bench, host_cache


class Asked:
    """Prompts in their order; each takes a second longer than the one before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[tuple[int, ...]] = []
        monkeypatch.setattr(host_cache, "_ask", self.ask)

    async def ask(self, _: Any, prompt: Sequence[int], most: int) -> tuple[float, list[int]]:
        self.prompts.append(tuple(prompt))
        return float(len(self.prompts)), [7] * most


async def test_each_way_is_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """First tokens of prefixes that were asked for before, with others between; second turns behind answers."""
    asked = Asked(monkeypatch)
    nothing: Any = SimpleNamespace(turn=AsyncMock())
    assert await host_cache._first_tokens(nothing, random.Random(1)) == 8.0, "the median of 7, 8 and 9"
    prefixes = [prompt[: host_cache.PREFIX] for prompt in asked.prompts]
    assert prefixes[:3] == prefixes[3:6] == prefixes[6:] and len(set(prefixes)) == 3 and len(set(asked.prompts)) == 9
    asked.prompts.clear()
    assert await host_cache._second_turns(nothing, random.Random(1)) >= 0
    first, second = asked.prompts[: host_cache.TALKS], asked.prompts[host_cache.TALKS :]
    assert len(second) == host_cache.TALKS
    for before, after in zip(first, second, strict=True):
        assert after[: len(before) + host_cache.ANSWER] == (*before, *[7] * host_cache.ANSWER)


def test_all_ways_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"PREFIX": 300, "CONTEXT": 512, "TALKS": 3, "HELD": 2, "SAID": 40, "ANSWER": 4, "HOST_BYTES": 1 << 24}
    for name, value in small.items():
        monkeypatch.setattr(host_cache, name, value)
    monkeypatch.setattr(host_cache, "WAYS", {"computed again": (False, 0, False), "from files": (False, 1 << 24, True)})
    shape = {"vocab_size": 4096, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    monkeypatch.setattr(host_cache, "FAMILY_SHAPES", {"llama": shape | heads})
    answer = CliRunner().invoke(bench, ["host-cache", "--rounds", "1", "--threads", "1", "--json"])
    assert answer.exit_code == 0, answer.output
    found = json.loads(answer.output.splitlines()[-1])
    assert set(found["ttft"]) == set(found["turns"]) == {"computed again", "from files"}
    assert all(seconds > 0 for each in found.values() for seconds in each.values())
    assert "first token behind 300 tokens that were given up" in answer.output
