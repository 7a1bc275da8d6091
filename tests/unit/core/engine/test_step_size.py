"""Steps are sized by the device, unless a size was asked for."""

from __future__ import annotations

import pytest
import torch

from core.config import PROMPT_TOKENS, SchedulerConfig
from core.engine.step_size import device_bytes, sized

GIB = 1 << 30


@pytest.mark.parametrize(
    ("device", "gib", "tokens"),
    [("H200", 139, 8192), ("H100", 78, 8192), ("A100 of 40 GB", 39, 4096), ("L4", 22, 2048), ("tiny", 1, 2048)],
)
def test_a_larger_device_computes_more_of_a_prompt_at_once(device: str, gib: int, tokens: int) -> None:
    assert sized(SchedulerConfig(), gib * GIB).prompt_tokens == tokens


def test_what_was_asked_for_stays() -> None:
    assert sized(SchedulerConfig(chunked_prefill_size=48), 139 * GIB).prompt_tokens == 48


def test_steps_of_a_cpu_are_short() -> None:
    assert device_bytes(torch.device("cpu")) is None
    assert sized(SchedulerConfig(), None).prompt_tokens == PROMPT_TOKENS == 512
