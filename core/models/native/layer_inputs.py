"""Inputs of each layer (per-layer embeddings: Gemma 3n, Gemma 4), found by what a model's modules have."""

from __future__ import annotations

from typing import Any

from core.models.native.parts import LayerInput, LayerInputs
from core.models.native.reading import activation_name, read_norm
from core.models.native.recurrences import Fuse


def has_inputs(part: Any) -> bool:
    """Whether `part`, what has the layers or one of these, has inputs of each layer."""
    return hasattr(part, "embed_tokens_per_layer") or hasattr(part, "per_layer_input_gate")


def read_layer_inputs(body: Any, fuse: Fuse) -> LayerInputs | None:
    """What `body` makes inputs of all layers of; None if they have none."""
    if not has_inputs(body):
        return None
    table = body.embed_tokens_per_layer
    return LayerInputs(
        table=table.weight.detach(),
        multiplier=float(table.embed_scale.to(table.weight.dtype)),
        matrix=fuse(body, ["per_layer_model_projection"]),
        factor=float(body.per_layer_model_projection_scale),
        norm=read_norm(body.per_layer_projection_norm),
        both=float(body.per_layer_input_scale),
    )


def read_layer_input(layer: Any, fuse: Fuse) -> LayerInput | None:
    """What `layer` does with its own; None if it has none. Raises NotDense."""
    if not has_inputs(layer):
        return None
    return LayerInput(
        gate=fuse(layer, ["per_layer_input_gate"]),
        out=fuse(layer, ["per_layer_projection"]),
        behind=read_norm(layer.post_per_layer_input_norm),
        activation=activation_name(layer.act_fn),
    )
