"""Which hidden states a step wants."""

from __future__ import annotations

import pytest

from core.batch.hidden import NO_HIDDEN, HiddenRequest


def test_a_request_is_true_where_anything_is_wanted() -> None:
    assert not NO_HIDDEN and not HiddenRequest()
    assert HiddenRequest((0,)) and HiddenRequest(final=True)


def test_layers_are_counted_from_the_embedding() -> None:
    with pytest.raises(AssertionError):
        HiddenRequest((2, -1))
