"""How many prompt tokens a step may compute: as configured, else by the memory of the device.

A large device is idle for part of a step of few tokens, and a small one has no memory for the activations of many. The
sizes are SGLang's for such devices, and were not measured here. A step of a CPU is short, so that rows which decode
beside it wait less. Beside texts that are whole no row decodes, and what lies between the products of a small encoder
takes long in many steps: ELECTRA embeds and judges 1.13 to 1.16 times as fast with 2,048 tokens as with 512,
MobileBERT 1.05 to 1.42, MiniLM 1.03 to 1.15 (two cores of a Zen 3). So its steps have more tokens, as long as they
take no longer than those of BERT's base size.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from core.config import PROMPT_TOKENS, SchedulerConfig
from core.models.base import ModelSpec

BY_MEMORY = ((70 << 30, 8192), (35 << 30, 4096), (0, 2048))
"""(least bytes of a device, prompt tokens in one step on it), by falling size."""
MOST_WHOLE: Final = 2048
"""Tokens of texts that are whole in one step of a CPU; more are not faster."""
WHOLE_ELEMENTS: Final = PROMPT_TOKENS * 85_000_000
"""Elements of matrices that tokens of such a step are multiplied by."""


def device_bytes(device: torch.device) -> int | None:
    """Bytes of memory of `device`; None for a CPU, whose memory is not what limits a step."""
    return int(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else None


def sized(config: SchedulerConfig, memory: int | None, spec: ModelSpec) -> SchedulerConfig:
    """`config` with a `chunked_prefill_size` for a device of `memory` bytes (see `device_bytes`), unless it has one.

    Of a CPU's models only small ones that take whole prompts get another than the usual.
    """
    if config.chunked_prefill_size is not None:
        return config
    if memory is None:
        fits = WHOLE_ELEMENTS // spec.multiplied if spec.multiplied else 0
        return replace(config, chunked_prefill_size=min(fits, MOST_WHOLE)) if fits > PROMPT_TOKENS else config
    return replace(config, chunked_prefill_size=next(tokens for least, tokens in BY_MEMORY if memory >= least))
