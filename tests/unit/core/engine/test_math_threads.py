"""All cores compute for an encoder, one is left to the loop of an engine of tokens, and a number asked for holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, ModelConfig
from core.engine import math_threads
from core.engine.math_threads import use_threads
from tests.support.checkpoints import make_checkpoint
from tests.support.encoders import make_encoder


@pytest.mark.parametrize(("kind", "asked", "used"), [("bert", None, 8), ("llama", None, 7), ("bert", 3, 3)])
def test_threads(kind: str, asked: int | None, used: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", told.append)
    for module in ("core.config", math_threads.__name__):
        monkeypatch.setattr(f"{module}.usable_cpus", lambda: 8)
    directory = make_encoder(kind, tmp_path) if kind == "bert" else make_checkpoint(kind, tmp_path)
    use_threads(EngineConfig(ModelConfig(str(directory)), executor=ExecutorConfig(device="cpu", cpu_threads=asked)))
    assert told == [used]
