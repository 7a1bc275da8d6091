"""Encoders whose attention is declared: packed, they give every text what transformers gives it alone."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModel

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.encoder_only import own_attention
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.encoder_only.declared import DECLARED
from core.models.encoder_only.packed_encoder import IMPLEMENTATION
from core.models.encoder_only.ways import GroupedTexts, PackedTexts
from core.models.loader import load_model
from tests.support.encoders import LONGEST, make_encoder

APART: dict[str, Any] = {"share_att_key": False, "position_buckets": -1, "norm_rel_ebd": "none"}
"""What the second DeBERTa began with: matrices of distances of their own, and no groups of distances."""

SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    **{kind: (kind, {}) for kind in DECLARED},
    "small convolutions": ("convbert", {"conv_kernel_size": 3, "head_ratio": 4}),
    "far from zero": ("ibert", {"layer_norm_eps": 0.1}),
    "one type": ("convbert", {"type_vocab_size": 1}),
    "no trigrams": ("mobilebert", {"trigram_input": False}),
    "rotated values": ("roformer", {"rotary_value": True}),
    "few distances": ("deberta", {"max_relative_positions": 20}),
    "no distances": ("deberta", {"relative_attention": False}),
    "queries' first": ("deberta", {"pos_att_type": ["c2p"]}),
    "no distances 2": ("deberta-v2", {"relative_attention": False, "pos_att_type": None}),
    "queries alone": ("deberta-v2", {**APART, "pos_att_type": ["c2p"], "max_relative_positions": 16}),
    "keys alone": ("deberta-v2", {**APART, "pos_att_type": ["p2c"]}),
    "positions too": ("deberta-v2", {"position_biased_input": True, "type_vocab_size": 2}),
    "a convolution": ("deberta-v2", {"conv_kernel_size": 3, "conv_act": "gelu"}),
}


def loaded(directory: Path, dtype: str = "float32") -> EncoderOnlyModel:
    """The model as it is served, without compiled products."""
    model = load_model(ModelConfig(str(directory), dtype=dtype, native="off"), torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel)
    return model


@torch.inference_mode()
def states_of(model: EncoderOnlyModel, texts: list[torch.Tensor]) -> torch.Tensor:
    """[T, H] of all `texts` in one step."""
    places = torch.cat([torch.arange(len(each)) for each in texts])
    try:
        return model.way.states(torch.cat(texts), places, None, [len(each) for each in texts])
    except RuntimeError as error:
        raise AssertionError("a step takes more tokens than one text may have") from error


@torch.inference_mode()
def each_alone(directory: Path, texts: list[torch.Tensor]) -> torch.Tensor:
    """The same by transformers, one text at a time."""
    plain = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    return torch.cat([plain(input_ids=each[None]).last_hidden_state[0] for each in texts])


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_texts_of_any_lengths_have_the_states_of_each_alone(shape: str, tmp_path: Path, seed: int) -> None:
    kind, fields = SHAPES[shape]
    directory = make_encoder(kind, tmp_path, **fields)
    model = loaded(directory)
    assert isinstance(model.way, PackedTexts)
    draw = torch.Generator().manual_seed(seed)
    for lens in ((LONGEST, 1, 2), (3,), torch.randint(1, LONGEST, (7,), generator=draw).tolist()):
        texts = [torch.randint(5, 320, (length,), generator=draw) for length in lens]
        expected = each_alone(directory, texts)
        found = states_of(model, texts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("kind", sorted({*DECLARED} - {"deberta", "mobilebert"}))
def test_bfloat16_is_packed_too(kind: str, tmp_path: Path) -> None:
    """The first DeBERTa has parameters of float32 among the others, and is not for bfloat16 by transformers either;
    MobileBERT norms nothing, and what rounding makes of this one's states is more than is let pass.
    """
    model = loaded(make_encoder(kind, tmp_path), "bfloat16")
    assert isinstance(model.way, PackedTexts)
    assert states_of(model, [torch.arange(5, 25), torch.arange(5, 9)]).dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("deberta", {"talking_head": True}, "see each other's scores"),
        ("ibert", {"quant_mode": True}, "computes in integers"),
    ],
)
def test_what_is_not_declared_is_grouped_and_the_log_says_why(
    kind: str, fields: dict[str, Any], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_encoder(kind, tmp_path, **fields)
    with caplog.at_level(logging.INFO):
        try:
            model = loaded(directory)
        except ModelLoadError as error:
            raise AssertionError("it can be served in groups") from error
    assert isinstance(model.way, GroupedTexts)
    assert said in caplog.text
    texts = [torch.arange(5, 25), torch.arange(5, 9)]
    torch.testing.assert_close(states_of(model, texts), each_alone(directory, texts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["deberta-v2", "mpnet", "roformer"])
def test_a_distance_that_no_short_text_has_is_compared_and_the_model_left_as_it_came(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_encoder(kind, tmp_path)
    attend = own_attention.attend_within

    def forgets(context: Any, *parts: torch.Tensor, **named: Any) -> torch.Tensor:
        found = attend(context, *parts, **named)
        found[:, 60:] = 0
        return found

    monkeypatch.setattr(own_attention, "attend_within", forgets)
    with caplog.at_level(logging.INFO):
        model = loaded(directory)
    assert "gives a long text other hidden states" in caplog.text
    assert isinstance(model.way, GroupedTexts)
    assert not any("forward" in vars(module) for module in model.module.modules())
    assert not [name for name, _ in model.module.named_buffers() if "slipstream" in name]
    assert model.module.config._attn_implementation != IMPLEMENTATION
    texts = [torch.arange(5, 85), torch.arange(5, 9)]
    torch.testing.assert_close(states_of(model, texts), each_alone(directory, texts), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "count"), [("deberta-v2", 6), ("mpnet", 1)])
def test_what_distances_have_is_shared_by_copies(kind: str, count: int, tmp_path: Path) -> None:
    model = loaded(make_encoder(kind, tmp_path))
    kept = {name: each.data_ptr() for name, each in model.module.named_buffers() if "slipstream" in name}
    copied = {name: each.data_ptr() for name, each in model.twin().module.named_buffers() if "slipstream" in name}
    assert len(kept) == count
    assert copied == kept
    assert not set(kept) & set(model.module.state_dict())


@pytest.mark.parametrize(("kind", "norms"), [("ibert", "IntLayerNorm"), ("mobilebert", "NoNorm")])
def test_norms_that_are_written_out_take_one_pass(kind: str, norms: str, tmp_path: Path) -> None:
    model = loaded(make_encoder(kind, tmp_path))
    found = [module for module in model.module.modules() if type(module).__name__ == norms]
    assert len(found) > 4, "of the embeddings and of all layers"
    assert all("forward" in vars(module) for module in found)
