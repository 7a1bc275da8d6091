"""How many prompt tokens a step may have, by which pools of windows are sized."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from core.config import EngineConfig, ModelConfig, SchedulerConfig
from core.engine.build_pools import _prompt_tokens
from core.types.vision_spec import VisionSpec


@pytest.mark.parametrize(
    ("vision", "tokens"),
    [
        (None, 64),
        (VisionSpec(7, 8, length=256), 63 + 256),
        (VisionSpec(7, 7, places=True), 63 + 900),
    ],
    ids=["none", "one size", "any size"],
)
def test_an_image_may_follow_a_whole_budget(vision: VisionSpec | None, tokens: int) -> None:
    config = EngineConfig(
        model=ModelConfig("x", max_image_tokens=900), scheduler=SchedulerConfig(chunked_prefill_size=64)
    )
    spec: Any = SimpleNamespace(vision=vision, context_length=4_096)
    assert _prompt_tokens(config, spec) == tokens
