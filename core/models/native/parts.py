"""What a decoder is made of, as `parts.h` takes it: named tuples of the same order."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Matrix(NamedTuple):
    """A weight [N, K], by which its outputs are scaled [N] if it is int8, and its bias [N]; the decoder packs it."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None


class Norm(NamedTuple):
    """Norms groups of `width` elements. The weight has 1 added where a family does that; `centred`: a layer norm."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    centred: bool
    width: int


class Rotary(NamedTuple):
    """`cos`, `sin`: float32[positions, R / 2], for the first R elements of a head. A pair is two neighbours, or two
    elements R / 2 apart."""

    cos: torch.Tensor
    sin: torch.Tensor
    neighbours: bool


class Attention(NamedTuple):
    """`scale` multiplies scores; `cap`, unless 0, is what they stay below; `window`, unless 0, is how many keys a query
    sees, its own included; `sinks` [H] are scores of a key without a value."""

    qkv: Matrix
    out: Matrix
    q_norm: Norm | None
    k_norm: Norm | None
    rotary: Rotary | None
    scale: float
    cap: float
    window: int
    sinks: torch.Tensor | None


class Mlp(NamedTuple):
    """`into` has the rows of gate and up one behind the other if it is `gated`. `activation`: a name of ACTIVATIONS."""

    into: Matrix
    down: Matrix
    gated: bool
    activation: str


class Layer(NamedTuple):
    """Norms where there are any. In a `parallel` one the MLP reads what attention reads, or its own norm of that."""

    before_attention: Norm | None
    after_attention: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    attention: Attention
    mlp: Mlp
    parallel: bool
    multiplier: float
    """Of what attention and the MLP add to the states."""


class Outside(NamedTuple):
    """What surrounds the layers: multipliers of embeddings and of logits, and what logits stay below unless it is 0."""

    embedding_multiplier: float
    logit_multiplier: float
    logit_cap: float
