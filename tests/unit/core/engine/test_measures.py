"""What benchmarks count bytes by is measured of the checkpoint as it would be served."""

from __future__ import annotations

from pathlib import Path

import torch

from core.engine.measures import measure
from core.memory.kv_pool import KVPool
from tests.support.checkpoints import make_checkpoint


def test_a_checkpoint_is_measured_in_the_type_that_is_asked_for(tmp_path: Path) -> None:
    name = str(make_checkpoint("llama", tmp_path, seed=0))
    full, half = measure(name), measure(name, "bfloat16")
    assert (full.dtype, half.dtype) == (torch.float32, torch.bfloat16)
    full_bytes, half_bytes = (KVPool.bytes_per_token_for(each.kv_layers, each.dtype) for each in (full, half))
    assert full_bytes == 2 * half_bytes > 0
