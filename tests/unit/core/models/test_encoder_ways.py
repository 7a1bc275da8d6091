"""How texts of one step are kept apart: by attention where they are packed, by groups where they are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn
from transformers import PreTrainedModel

from core.models.encoder_only.encoder_proof import BothWays, EncoderProbe
from core.models.encoder_only.packed_encoder import EncoderContext, encoder_attention
from core.models.encoder_only.ways import GroupedTexts, groups
from core.models.hf.packed_attention import CONTEXT
from core.models.hf.probe import Unsupported

LENS = (3, 40, 1, 17)
HEADS, KV_HEADS, WIDTH = 4, 2, 8


@pytest.mark.parametrize("window", [None, 1, 2, 5, 60])
@pytest.mark.parametrize("kv_heads", [HEADS, KV_HEADS])
def test_a_token_sees_its_own_text_as_far_as_the_window_of_its_layer(window: int | None, kv_heads: int) -> None:
    torch.manual_seed(3)
    module, context = nn.Identity(), EncoderContext()
    setattr(module, CONTEXT, context)
    if window is not None:
        context.windows[module] = window
    context.begin(LENS)
    query = torch.randn(1, HEADS, sum(LENS), WIDTH)
    key, value = (torch.randn(1, kv_heads, sum(LENS), WIDTH) for _ in range(2))
    found, weights = encoder_attention(module, query, key, value, None, scaling=0.3)
    assert weights is None
    owner, place = torch.repeat_interleave(torch.arange(len(LENS)), torch.tensor(LENS)), torch.arange(sum(LENS))
    seen = (owner[:, None] == owner) & BothWays(window).allows(place[:, None], place)
    shared = HEADS // kv_heads
    scores = query @ key.repeat_interleave(shared, 1).transpose(2, 3) * 0.3
    wanted = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(shared, 1)
    torch.testing.assert_close(found, wanted.transpose(1, 2))


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_an_option_that_is_not_computed_is_refused(name: str) -> None:
    module = nn.Identity()
    setattr(module, CONTEXT, EncoderContext())
    one = torch.ones(1, 1, 1, 1)
    with pytest.raises(NotImplementedError, match=name):
        encoder_attention(module, one, one, one, None, **{name: 1.0})


def test_texts_of_one_length_are_computed_together_and_each_gets_its_own_states() -> None:
    calls: list[tuple[int, ...]] = []

    def base(input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor) -> Any:
        assert attention_mask.all()
        calls.append(tuple(input_ids.shape))
        return SimpleNamespace(last_hidden_state=torch.stack([input_ids, token_type_ids], -1).float())

    lens = (2, 3, 2, 1, 3)
    ids, types = torch.arange(11), torch.arange(11) % 2
    found = GroupedTexts(cast(PreTrainedModel, base), 0).states(ids, ids, types, lens)
    assert found.tolist() == torch.stack([ids, types], -1).float().tolist()
    assert calls == [(2, 3), (2, 2), (1, 1)]


@pytest.mark.parametrize(
    ("lens", "wanted"),
    [((5, 3, 5, 4), [[0, 2], [3], [1]]), ((1, 2), [[1], [0]]), ((), [])],
)
def test_texts_are_grouped_by_length_and_the_longest_come_first(lens: tuple[int, ...], wanted: list[list[int]]) -> None:
    assert groups(lens) == wanted


def test_how_far_a_layer_sees_is_read_from_its_own_rule() -> None:
    layer, wide, other = nn.Identity(), nn.Identity(), nn.Identity()
    probe = EncoderProbe(512, (128, 127, 64))
    probe.record(layer, lambda b, h, q, k: (q - k).abs() <= 64, torch.device("cpu"))
    probe.record(wide, lambda b, h, q, k: (q - k).abs() >= 0, torch.device("cpu"))
    probe.record(wide, None, torch.device("cpu"))
    assert (probe.windows, probe.calls) == ({layer: 64}, 3)
    for rule in (
        lambda b, h, q, k: k <= q,
        lambda b, h, q, k: (q - k).abs() <= 63,
        lambda b, h, q, k: (q - k).abs() < 64,
        lambda b, h, q, k: (k <= q) & (q - k <= 64),
    ):
        with pytest.raises(Unsupported, match="no window in both directions"):
            probe.record(other, rule, torch.device("cpu"))
    with pytest.raises(Unsupported):
        probe.record(layer, lambda b, h, q, k: (q - k).abs() <= 127, torch.device("cpu"))
