"""Heads are read as they are published, refused where they do not fit, and computed alike by torch and natively."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.errors import ModelLoadError
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.models.bundled import bundled_model_dir
from core.models.bundled.eagle import bundled_head_dir
from core.models.bundled.eagle.evaluate import load_bundled_head, mean_accepted_lengths
from core.models.bundled.eagle.head import Past
from core.models.bundled.evaluate import load
from core.models.eagle.head import Head, HeadStep
from core.models.eagle.plain_head import PlainHead
from core.models.eagle.weights import HeadWeights, Target, load_head
from core.models.native.extension import load_extension
from core.models.native.head import NativeHead
from core.native.kept_library import ExtensionUnavailable
from tests.support.tiles import has_tiles

CPU = torch.device("cpu")
V, H, T = 704, 192, 37


def target(dtype: torch.dtype = torch.float32, **changes: Any) -> Target:
    return Target(
        **{
            "path": bundled_model_dir(),
            "vocab_size": V,
            "hidden_size": H,
            "layers": 4,
            "positions": 64,
            "dtype": dtype,
            **changes,
        }
    )


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The bundled head in a folder that a test may change."""
    for file in ("config.json", "model.safetensors"):
        (tmp_path / file).write_bytes((bundled_head_dir() / file).read_bytes())
    return tmp_path


def change(folder: Path, change: Any) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def run(head: Head, weights: HeadWeights, cuts: tuple[int, ...], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(logits, own features) of T places, in pieces that end at `cuts`, in shuffled slots."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (T,), generator=generator)
    features = torch.randn(T, len(weights.layers) * H, generator=generator).to(weights.fc.dtype)
    table = (torch.randperm(T, generator=generator) + 4).to(torch.int32)[None]
    found, first, rows = [], 0, torch.zeros(1, dtype=torch.int64)
    for end in cuts:
        places = torch.arange(first, end)
        slots = table[0, first:end].long()
        lens = np.array([first]), np.array([end - first])
        wanted = torch.arange(end - first)
        found.append(head.run(HeadStep(ids[first:end], features[first:end], places, slots, rows, *lens, wanted, table)))
        first = end
    logits, own = zip(*found, strict=True)
    return torch.cat(logits), torch.cat(own)


def pool(weights: HeadWeights) -> KVPool:
    layer = KVLayerSpec(0, weights.kv_heads, weights.head_dim, weights.head_dim)
    return KVPool((layer,), 12, 4, weights.fc.dtype, CPU)


@torch.inference_mode()
def test_pieces_give_what_the_trained_network_gives(seed: int) -> None:
    weights = load_head(bundled_head_dir(), target())
    model, _ = load(bundled_model_dir(), torch.float32)
    head = load_bundled_head(bundled_head_dir(), model)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, V, (T,), generator=generator)
    features = torch.randn(T, 3 * H, generator=generator)
    past = Past(torch.ones(T, T, dtype=torch.bool).tril()[None, None])
    own = head.midlayer(model.model.embed_tokens(ids)[None], head.fc(features)[None], torch.arange(T), past)[0]
    logits, found = run(PlainHead(weights, pool(weights)), weights, (10, 11, T), seed)
    torch.testing.assert_close(logits, head.logits(own), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(found, own, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 0.05)])
def test_native_code_gives_what_torch_gives(dtype: torch.dtype, near: float, seed: int) -> None:
    try:
        extension = load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
    weights = load_head(bundled_head_dir(), target(dtype))
    native = NativeHead(extension, weights, pool(weights), 1)
    logits, own = run(PlainHead(weights, pool(weights)), weights, (10, 11, T), seed)
    found, features = run(native, weights, (10, 11, T), seed)
    assert float((logits - found).abs().max()) < near * float(logits.abs().max())
    assert float((own - features).abs().max()) < near * float(own.abs().max())
    # Many rows at once, where tiles add them in another order.
    apart = near * float(found.abs().max()) if dtype is torch.bfloat16 and has_tiles() else 0
    torch.testing.assert_close(run(native, weights, tuple(range(1, T + 1)), seed)[0], found, atol=apart, rtol=0)


def test_a_reduced_vocabulary_leads_to_ids_of_the_target(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "draft_vocab_size": 3}))

    def reduce(weights: dict[str, torch.Tensor]) -> None:
        weights["lm_head.weight"] = weights["lm_head.weight"][[5, 9, 700]].contiguous()
        weights["d2t"], weights["t2d"] = torch.tensor([5, 8, 698]), torch.zeros(V, dtype=torch.bool)

    change(copy, reduce)
    found = load_head(copy, target()).target_ids
    assert found is not None and found.tolist() == [5, 9, 700]
    change(copy, lambda weights: weights.update(d2t=torch.tensor([5, 8, 702])))
    with pytest.raises(ModelLoadError, match="d2t"):
        load_head(copy, target())


def test_names_of_other_tools_are_read_too(copy: Path) -> None:
    plain = load_head(copy, target())

    def rename(weights: dict[str, torch.Tensor]) -> None:
        for name in list(weights):
            weights[f"model.{name}".replace("midlayer.", "layers.0.")] = weights.pop(name)

    change(copy, rename)
    assert torch.equal(load_head(copy, target()).qkv, plain.qkv)


def test_layers_that_are_not_named_are_the_published_ones(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    del config["eagle_config"]
    (copy / "config.json").write_text(json.dumps(config))
    assert load_head(copy, target(layers=32)).layers == (2, 16, 29)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda w: w.pop("fc.weight"), "no fc.weight"),
        (lambda w: w.update({"fc.bias": torch.zeros(H)}), "fc.bias"),
        (lambda w: w.update({"norm.weight": torch.zeros(3)}), "norm.weight"),
        (lambda w: w.update({"embed_tokens.weight": torch.zeros(5, H)}), "embedding"),
        (lambda w: w.update({"d2t": torch.zeros(5, dtype=torch.int64)}), "d2t"),
    ],
)
def test_what_does_not_fit_is_refused(copy: Path, damage: Any, message: str) -> None:
    change(copy, damage)
    with pytest.raises(ModelLoadError, match=message):
        load_head(copy, target())


def test_other_targets_are_refused(copy: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="reads layers"):
        load_head(copy, target(layers=3))
    with pytest.raises(ModelLoadError, match="embedding"):
        load_head(copy, target(vocab_size=V + 1))
    with pytest.raises(ModelLoadError, match=r"fc\.weight"):
        load_head(copy, target(hidden_size=H + 1))
    with pytest.raises(ModelLoadError, match="no draft head"):
        load_head(tmp_path / "nothing", target())


def test_the_bundled_head_drafts_stories_that_it_has_never_seen() -> None:
    assert sum(file.stat().st_size for file in bundled_head_dir().iterdir()) < 2_000_000
    model, tokenizer = load(bundled_model_dir(), torch.float32)
    head = load_bundled_head(bundled_head_dir(), model)
    for temperature in (0.0, 0.8):
        assert min(mean_accepted_lengths(model, tokenizer, head, temperature, [4, 6], 2)) > 2.0
