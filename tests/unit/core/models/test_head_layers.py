"""Which layers of a checkpoint are heads."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from core.models.hf.head_layers import MTP_TYPES, head_layers


@pytest.mark.parametrize("kind", MTP_TYPES)
def test_heads_are_the_layers_behind_those_of_the_model(kind: str) -> None:
    """The dot behind the number tells layer 4 from layer 46."""
    config = SimpleNamespace(model_type=kind, num_hidden_layers=4, num_mtp_layers=2)
    assert head_layers(config) == ("model.layers.4.", "model.layers.5.")


def test_models_of_other_types_have_none() -> None:
    """Whatever their configuration says: a weight without a place is then refused."""
    assert head_layers(SimpleNamespace(model_type="mellum", num_hidden_layers=4, num_mtp_layers=2)) == ()
