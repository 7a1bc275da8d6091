"""Steps are sized by the device, unless a size was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from core.config import PROMPT_TOKENS, SchedulerConfig
from core.engine.step_size import device_bytes, sized
from core.models.base import ModelSpec

GIB = 1 << 30
SPEC = ModelSpec("tiny", "Tiny", 10, 10, torch.float32, (), whole_prompts=True)
MILLION = 1_000_000


@pytest.mark.parametrize(
    ("device", "gib", "tokens"),
    [
        ("H200", 139, 8192),
        ("H100", 78, 8192),
        ("A100 of 40 GB", 39, 4096),
        ("L4", 22, 2048),
        ("tiny", 1, 2048),
        ("least", 70, 8192),
        ("less", 35, 4096),
    ],
)
def test_a_larger_device_computes_more_of_a_prompt_at_once(device: str, gib: int, tokens: int) -> None:
    assert sized(SchedulerConfig(), gib * GIB, SPEC).prompt_tokens == tokens


def test_what_was_asked_for_stays() -> None:
    assert sized(SchedulerConfig(chunked_prefill_size=48), 139 * GIB, SPEC).prompt_tokens == 48


def test_steps_of_a_cpu_are_short() -> None:
    assert device_bytes(torch.device("cpu")) is None
    assert sized(SchedulerConfig(), None, SPEC).prompt_tokens == PROMPT_TOKENS == 512


@pytest.mark.parametrize(
    ("elements", "tokens"),
    [
        (0, 512),
        (9 * MILLION, 2048),
        (20 * MILLION, 2048),
        (40 * MILLION, 1088),
        (85 * MILLION, 512),
        (300 * MILLION, 512),
    ],
)
def test_steps_of_small_encoders_have_more_tokens_and_take_no_longer(elements: int, tokens: int) -> None:
    spec = replace(SPEC, multiplied=elements)
    assert sized(SchedulerConfig(), None, spec).prompt_tokens == tokens
    assert sized(SchedulerConfig(chunked_prefill_size=48), None, spec).prompt_tokens == 48
    assert sized(SchedulerConfig(), 22 * GIB, spec).prompt_tokens == 2048
