"""How a family's module tree is declared: what it calls things, and how they go together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

Of = Callable[[Any], Any]
"""Something of a configuration or of a module."""


def part_of(module: Any, path: str) -> Any:
    """What `module` calls `path`, names with dots between them; None if there is nothing, or no path."""
    for name in path.split("."):
        module = getattr(module, name, None) if name else None
    return module


@dataclass(frozen=True, slots=True)
class BesideNames:
    """Names of the norms of a layer whose MLP has experts beside it."""

    behind_mlp: str = "post_feedforward_layernorm_1"
    before_experts: str = "pre_feedforward_layernorm_2"
    behind_experts: str = "post_feedforward_layernorm_2"


@dataclass(frozen=True, slots=True)
class Mixture:
    """Names in a layer's MLP, which is a mixture where it has these experts; what it lacks is not computed."""

    router: str = "gate"
    experts: str = "experts"
    shared: str = ""
    """The expert that all tokens go to, in the MLP or beside it: an MLP as that of a dense layer of the family.
    Where it is beside an MLP that a layer has not, it is that layer's MLP."""
    shared_gate: str = ""
    correction: str = "e_score_correction_bias"
    """What is added to scores for the choice alone, where the router does not have it itself."""
    factor: str = ""
    """What all that experts give is multiplied by, where the router does not do it."""
    means: Of = lambda mixture: False
    """Whether a mixture gives the mean of what its experts and the one of all tokens give, not the sum."""
    weighs_inputs: bool = False
    """Whether what experts read is multiplied by a token's weight, not what they give."""
    beside: BesideNames | None = None
    """Whether router and experts are beside the MLP, in the layer, with norms of their own."""


@dataclass(frozen=True, slots=True)
class Family:
    """Names are attributes of the module one level up; what a layer lacks, or has as None, is not computed."""

    body: str = ""
    """What of the base model has the layers, where that is not the base model itself."""
    layers: str = "layers"
    final_norm: str = "norm"
    before_attention: str | tuple[str, ...] = "input_layernorm"
    """The first of several names that a layer has."""
    after_attention: str = ""
    before_mlp: str | tuple[str, ...] = "post_attention_layernorm"
    after_mlp: str = ""
    parallel: Of = lambda config: False
    """Whether attention and the MLP read the same states, by the configuration."""
    attention: str = "self_attn"
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    """A fourth gives the gates of what attention gives, one for each of its elements or for each head."""
    softplus_gates: bool = False
    """Whether gates go through a softplus, not a sigmoid."""
    by_head: bool = False
    """Whether the only projection has, by head of keys, the queries that share it, the key and the value."""
    shards: int = 0
    """In so many parts the only projection has queries, values and keys, of as many heads each; 0: it has no parts."""
    recurrence: str = ""
    """A recurrent mixer, beside attention or in its place; which kind it is shows in what it has."""
    out: str = "o_proj"
    q_norm: str = "q_norm"
    k_norm: str = "k_norm"
    v_norm: str = ""
    shares: Of = lambda attention: False
    """Whether an attention module reads the keys of the last layer of its type that has any."""
    turns: Of = lambda attention: True
    """Whether an attention module has rotary embeddings."""
    turns_first: bool = False
    """Whether queries and keys are turned before they are normed."""
    rotary: str = "rotary_emb"
    """Beside the layers: what makes angles of positions."""
    places: str = ""
    """Beside the layers: an embedding of positions, which is added to that of tokens."""
    first_norm: str = ""
    """Beside the layers: the norm of embeddings."""
    neighbours: bool = False
    """Whether two neighbours are turned together."""
    backwards: bool = False
    """Whether queries and keys are turned the other way round."""
    temperature: Callable[[Any, torch.Tensor], torch.Tensor | None] = lambda attention, positions: None
    """What an attention module multiplies queries by, from positions, int64[n] to float32[n]."""
    mlp: str = "mlp"
    """Empty where the layer itself has its products."""
    into: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down: str = "down_proj"
    activation: str = "act_fn"
    """An attribute of the MLP, or what it is if it has none: a name of ACTIVATIONS."""
    attention_input: Of = lambda config: 1.0
    """What attention multiplies its input by."""
    factors: Mapping[str, Of] = field(default_factory=dict)
    """By the name of a linear layer, what its outputs are multiplied by."""
    mixture: Mixture = Mixture()
    scale: str = ""
    """What a layer multiplies the states by at last."""
    embedding_multiplier: Of = lambda config: 1.0
    multiplier: Of = lambda config: 1.0
    logit_multiplier: Of = lambda config: 1.0
    logit_cap: Of = lambda config: None
    lacks: Of = lambda config: None
    """What this configuration has that native code does not compute, if there is anything."""
