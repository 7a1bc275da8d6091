"""Which head an engine drafts by, and what computes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from core.config import EngineConfig, MemoryConfig, ModelConfig, SpeculationConfig
from core.device.streams import DeviceStreams
from core.engine import eagle
from core.engine.eagle import UpgradingHead, eagle_source
from core.errors import ConfigError, ModelLoadError, StartupError
from core.memory.kv_pool import KVPool
from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.eagle.head import HeadStep
from core.models.loader import load_model
from core.native.kept_library import ExtensionUnavailable

CPU, BUNDLED = torch.device("cpu"), bundled_model_dir()


def config(method: str, path: Path = BUNDLED) -> EngineConfig:
    return EngineConfig(model=ModelConfig(str(path), native="off"), speculation=SpeculationConfig(method, 3))


@pytest.mark.parametrize("method", ["eagle", f"eagle:{bundled_head_dir()}"])
def test_the_bundled_model_has_a_head(method: str) -> None:
    asked = config(method)
    source = eagle_source(asked, load_model(asked.model, CPU), DeviceStreams(CPU))
    (layer,) = source.keeps.layers
    assert (layer.num_kv_heads, layer.k_dim, layer.v_dim) == (2, 32, 32)
    assert source.keeps.spare == 3
    assert source.weights.layers == (1, 2, 4)


def test_a_head_has_positions_for_drafts_behind_the_end_of_the_context() -> None:
    """The newest token of the longest row has the last position of the model, and stands before all its drafts."""
    asked = config("eagle")
    asked = replace(asked, memory=MemoryConfig(page_size=1), model=replace(asked.model, context_length=64))
    source = eagle_source(asked, load_model(asked.model, CPU), DeviceStreams(CPU))
    assert len(source.weights.cos) >= 64 + source.most


def test_another_model_needs_one_by_name(tmp_path: Path) -> None:
    for file in bundled_model_dir().iterdir():
        (tmp_path / file.name).symlink_to(file)
    asked = config("eagle", tmp_path)
    model = load_model(asked.model, CPU)
    with pytest.raises(StartupError, match="eagle:DIR"):
        eagle_source(asked, model, DeviceStreams(CPU))
    named = eagle_source(config(f"eagle:{bundled_head_dir()}", tmp_path), model, DeviceStreams(CPU))
    assert named.weights.embedding.shape == (704, 192)
    with pytest.raises(ModelLoadError, match="no draft head"):
        eagle_source(config(f"eagle:{tmp_path / 'nothing'}", tmp_path), model, DeviceStreams(CPU))


def test_a_model_that_gives_no_states_is_refused_by_name(checkpoint_of: Callable[[str], Path]) -> None:
    asked = config(f"eagle:{bundled_head_dir()}", checkpoint_of("gpt2"))
    with pytest.raises(StartupError, match="GPT2LMHeadModel does not give the states of its layers"):
        eagle_source(asked, load_model(asked.model, CPU), DeviceStreams(CPU))


@pytest.mark.parametrize("method", ["eagle:", "head", "ngram:somewhere"])
def test_other_names_are_refused(method: str) -> None:
    with pytest.raises(ConfigError, match="eagle:DIR"):
        SpeculationConfig(method)


def test_torch_goes_on_where_there_is_no_native_code(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = config("eagle")
    source = eagle_source(asked, load_model(asked.model, CPU), DeviceStreams(CPU))
    pool = KVPool(source.keeps.layers, 4, 4, source.keeps.dtype, CPU)
    one, features = torch.zeros(1, dtype=torch.int64), torch.zeros(1, 576, dtype=source.keeps.dtype)
    host = one.numpy()
    step = HeadStep(one, features, one, one + 4, one, host, host + 1, one, torch.full((1, 4), 4, dtype=torch.int32))

    def unavailable() -> None:
        raise ExtensionUnavailable("no compiler")

    monkeypatch.setattr(eagle, "load_extension", unavailable)
    ready = False
    head = UpgradingHead(source.weights, pool, lambda: ready)
    before, _ = head.run(step)
    ready = True
    after, _ = head.run(step)
    assert torch.equal(before, after)
