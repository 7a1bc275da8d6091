"""An engine around a recurrent model has slots for the states behind drafts, and drafts are timed as they are run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, ExecutorConfig, MemoryConfig, ModelConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine.build import assemble
from core.engine.build_pools import DRAFTING_ROWS, build_pools
from core.engine.built_engine import BuiltEngine
from core.memory.recurrent.row_to_slot import HybridReqToTokenPool
from core.memory.recurrent.state_slots import NAME, StateSlots
from core.models.base import Model
from core.models.hf.recurrent import PackedMixer
from core.models.loader import load_model
from core.scheduler.draft_depth import AdaptiveDepth
from core.text.tokenizer import Tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(checkpoint_of: Callable[[str], Path]) -> Model:
    return load_model(ModelConfig(str(checkpoint_of("mamba2")), native="off"), CPU)


def config(method: str, rows: int = 8, overlap: bool = True) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig("given", context_length=64),
        memory=MemoryConfig(4, rows, 256),
        executor=ExecutorConfig(device="cpu", overlap=overlap),
        speculation=SpeculationConfig(method),
    )


def built(model: Model, tokenizer: Tokenizer, method: str, rows: int) -> BuiltEngine:
    return assemble(config(method, rows), model, tokenizer, DeviceStreams(CPU))


@pytest.mark.parametrize(("rows", "drafts", "room"), [(8, 6, 6 * DRAFTING_ROWS), (2, 6, 12), (1, 1, 1), (8, 0, 0)])
def test_host_and_device_agree_on_the_room(model: Model, rows: int, drafts: int, room: int) -> None:
    pools = build_pools(config("off", rows), model, DeviceStreams(CPU), drafts)
    device = pools.companions[NAME]
    (host,) = [each for each in pools.memory.companions if isinstance(each, StateSlots)]
    assert isinstance(device, HybridReqToTokenPool)
    assert (host.draft_room, pools.memory.draft_room, device.states.drafts) == (room, room, room)
    assert host.size == device.states.size == 2 * rows, "drafts take no slot of a request"


@pytest.mark.parametrize(("overlap", "drafts", "buffers"), [(True, 0, 2), (True, 3, 2), (False, 0, 1), (False, 3, 2)])
def test_a_snapshot_is_left_while_a_newer_one_is_in_doubt(
    model: Model, overlap: bool, drafts: int, buffers: int
) -> None:
    pools = build_pools(config("off", overlap=overlap), model, DeviceStreams(CPU), drafts)
    (host,) = [each for each in pools.memory.companions if isinstance(each, StateSlots)]
    assert host._tracking is not None and host._tracking.buffers == buffers


def test_steps_are_timed_as_they_verify_drafts(
    model: Model, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Token by token, and no more of them than there is room for."""
    verified, plain = list[int](), PackedMixer._verify

    def verify(self: PackedMixer, hidden: torch.Tensor, trial: Any) -> torch.Tensor:
        verified.append(hidden.shape[1])
        return plain(self, hidden, trial)

    monkeypatch.setattr(PackedMixer, "_verify", verify)
    engine = built(model, tokenizer, "ngram", rows=2)
    depth = engine.new_scheduler(engine.new_executor(lambda: None), lambda outputs, now: None)._depth
    assert isinstance(depth, AdaptiveDepth)
    assert depth._times.tokens == (1, 2, 4, 6, 8, 12)[: len(depth._times.tokens)]
    assert set(verified) == set(depth._times.tokens) - {1}
