"""Long prefills go through the explicit softmax in blocks; the seams must not show."""

from __future__ import annotations

import pytest
import torch

import core.attention.explicit as explicit


@pytest.mark.parametrize("sinks", [False, True])
def test_blocks_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, sinks: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, heads, 19, 8, generator=generator) for heads in (3, 1, 1))
    mask = torch.zeros(19, 19).masked_fill_(torch.ones(19, 19).tril() == 0, -torch.inf)
    sink = torch.randn(2, 3, 1, 1, generator=generator) if sinks else None

    def run() -> torch.Tensor:
        return explicit.explicit_attention(q, k, v, mask=mask, scale=0.3, softcap=4.0, sinks=sink)

    whole = run()
    monkeypatch.setattr(explicit, "MAX_SCORES", 500)
    assert torch.allclose(whole, run(), atol=1e-6)


def test_a_sink_far_above_all_scores_takes_everything() -> None:
    q = k = v = torch.ones(1, 1, 2, 4)
    sinks = torch.tensor([[[[200.0]]]])
    out = explicit.explicit_attention(q, k, v, mask=None, scale=1.0, softcap=None, sinks=sinks)
    assert torch.equal(out, torch.zeros_like(out))
