"""`first_key` and `allows` are two ways of saying the same thing."""

from __future__ import annotations

import pytest
import torch

from core.attention.span import AttentionSpan


@pytest.mark.parametrize("window", [None, 1, 5, 64])
@pytest.mark.parametrize("chunk", [None, 1, 8, 64])
def test_first_key_is_the_first_allowed(window: int | None, chunk: int | None) -> None:
    span = AttentionSpan(window, chunk)
    positions = torch.arange(40)
    allowed = span.allows(positions[:, None], positions[None, :])
    for query in range(40):
        seen = allowed[query].nonzero().flatten().tolist()
        assert seen == list(range(span.first_key(query), query + 1))


def test_is_plain_up_to_the_first_hidden_key() -> None:
    assert AttentionSpan().is_plain(10**6)
    assert AttentionSpan(window=4).is_plain(4)
    assert not AttentionSpan(window=4).is_plain(5)
    assert AttentionSpan(chunk=4).is_plain(4)
    assert not AttentionSpan(chunk=4).is_plain(5)
    assert AttentionSpan(window=1, chunk=1).is_plain(0)
