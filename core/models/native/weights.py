"""What a dense decoder consists of, taken from a loaded transformers module tree, its matrices fused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel

from core.models.base import ModelSpec

DYNAMIC_ROPE = ("dynamic", "longrope")
"""Rotary embeddings that depend on the current length of a sequence, so that no table can hold them."""

PLAIN = (torch.Tensor, nn.Parameter)


class NotDense(Exception):
    """The model has something that the native code does not compute; the message names it."""


@dataclass(frozen=True, slots=True)
class DecoderShape:
    """Sizes of all layers; `scale` multiplies attention scores."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    scale: float


class Matrix(NamedTuple):
    """A weight [N, K], by which its outputs are scaled [N] if it is int8, and its bias [N]; the decoder packs it."""

    weight: torch.Tensor
    scale: torch.Tensor | None
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One layer; query, key and value projections are one matrix, and so are gate and up."""

    attention_norm: torch.Tensor
    mlp_norm: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    qkv: Matrix
    out: Matrix
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights outside the layers. `cos`, `sin`: float32[positions, head_dim / 2]."""

    shape: DecoderShape
    embedding: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    final_norm: torch.Tensor
    head: Matrix


def check_dense(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises NotDense for a model that the registry sends here by its type, but transformers must go on computing."""
    config: Any = model.config
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise NotDense(f"{model.dtype} on {model.device.type} has no native code")
    if config.hidden_act != "silu":
        raise NotDense(f"its activation is {config.hidden_act}")
    if any(layer.window is not None for layer in spec.kv_layers):
        raise NotDense("it has sliding windows")
    rope = str((config.rope_parameters or {}).get("rope_type", "default"))
    if rope in DYNAMIC_ROPE:
        raise NotDense(f"its rotary embedding is {rope}")
    for module in model.modules():
        if hasattr(module, "in_features") and not _is_dense(module, model.dtype):
            raise NotDense("its weights are quantised, other than to int8 per output, or adapted")


def _is_dense(module: Any, dtype: torch.dtype) -> bool:
    # compressed-tensors leaves the class alone, takes the weight away or keeps it as int8, and scales elsewhere.
    if type(module) is not nn.Linear or getattr(module, "quantization_scheme", None) is not None:
        return False
    weight = module.weight
    return is_scaled_int8(weight) or (type(weight) in PLAIN and weight.dtype == dtype)


def is_scaled_int8(weight: Any) -> bool:
    """Whether it is torchao's int8 of weights only, symmetric, with one scale per output."""
    if type(weight).__name__ != "Int8Tensor":
        return False
    if weight.qdata.dim() != 2 or weight.scale.numel() != weight.shape[0]:
        return False
    if weight.act_quant_kwargs is not None or weight.act_quant_scale is not None or weight.act_pre_scale is not None:
        return False
    return weight.zero_point is None or not bool(weight.zero_point.any())


def decoder_weights(model: PreTrainedModel, positions: int) -> DecoderWeights:
    """What surrounds the layers; `positions` is the longest sequence."""
    config: Any = model.config
    body, attention = _body(model), _body(model).layers[0].self_attn
    dim = int(attention.head_dim)
    places = torch.arange(positions)[None]
    cos, sin = body.rotary_emb(torch.zeros(1, 1, 1), places)
    if cos.shape[-1] != dim:
        raise NotDense("it turns only a part of each head")
    shape = DecoderShape(
        config.num_attention_heads, config.num_key_value_heads, dim, config.rms_norm_eps, attention.scaling
    )
    half = dim // 2
    return DecoderWeights(
        shape=shape,
        embedding=body.embed_tokens.weight.detach(),
        cos=cos[0, :, :half].float().contiguous(),
        sin=sin[0, :, :half].float().contiguous(),
        final_norm=body.norm.weight.detach(),
        head=_fused([model.get_output_embeddings()]),
    )


def decoder_layers(model: PreTrainedModel) -> Iterator[DecoderLayer]:
    """One layer after the other, each made when asked for, so that no more than one is held twice."""
    for layer in _body(model).layers:
        attention, mlp = layer.self_attn, layer.mlp
        yield DecoderLayer(
            attention_norm=layer.input_layernorm.weight.detach(),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            q_norm=_weight(getattr(attention, "q_norm", None)),
            k_norm=_weight(getattr(attention, "k_norm", None)),
            qkv=_fused([attention.q_proj, attention.k_proj, attention.v_proj]),
            out=_fused([attention.o_proj]),
            gate_up=_fused([mlp.gate_proj, mlp.up_proj]),
            down=_fused([mlp.down_proj]),
        )


def _body(model: PreTrainedModel) -> Any:
    return model.base_model


def _weight(module: nn.Module | None) -> torch.Tensor | None:
    weight: Any = getattr(module, "weight", None)
    return None if weight is None else weight.detach()


def _fused(linears: Sequence[Any]) -> Matrix:
    biases = [linear.bias for linear in linears]
    bias = None if biases[0] is None else torch.cat([found.detach() for found in biases])
    weights: list[Any] = [linear.weight.detach() for linear in linears]
    scaled = {type(weight) not in PLAIN for weight in weights}
    if scaled == {False}:
        return Matrix(torch.cat(weights), None, bias)
    if scaled != {True}:
        raise NotDense("some of the matrices that it would multiply as one are int8 and some are not")
    scale = torch.cat([weight.scale.reshape(-1).float() for weight in weights])
    return Matrix(torch.cat([weight.qdata for weight in weights]), scale, bias)
