"""What a decoder consists of, taken from a loaded transformers module tree by its family's declaration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from core.memory.kv_pool import KVLayerSpec
from core.models.base import ModelSpec
from core.models.native.declaration import Family
from core.models.native.families import FAMILIES
from core.models.native.images import text_body
from core.models.native.latents import is_latent, latent_values, read_latents
from core.models.native.matrices import (
    DecoderShape,
    Reader,
    as_linear,
    fused_product,
    is_dense,
    linear_of,
    one_behind_the_other,
    sorted_by_kind,
    vector,
)
from core.models.native.mixtures import read_gating, read_router, router_product, stacked
from core.models.native.parts import Attention, Experts, Layer, Matrix, Mixer, Mlp, Norm, Outside, Rotary
from core.models.native.reading import ACTIVATIONS, NotDense, RotaryTables, activation_name
from core.models.native.recurrences import Fuse, read_recurrence
from core.models.vision.families import VISION_FAMILIES

NATIVE = Reader()


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights outside the layers."""

    shape: DecoderShape
    embedding: torch.Tensor
    final_norm: Norm
    head: Matrix
    outside: Outside


def family_of(model: PreTrainedModel) -> Family:
    """The declaration for the type of `model`. Raises NotDense."""
    kind = str(getattr(model.config, "model_type", ""))
    kind = VISION_FAMILIES[kind].text if kind in VISION_FAMILIES else kind
    if kind not in FAMILIES:
        raise NotDense(f"no native family is declared for {kind!r}")
    return FAMILIES[kind]


def check_dense(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises NotDense for a model that the registry sends here by its type, but transformers must go on computing."""
    if model.device.type != "cpu" or model.dtype not in (torch.float32, torch.bfloat16):
        raise NotDense(f"{model.dtype} on {model.device.type} has no native code")
    check_declared(model, spec)


def check_declared(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises NotDense for a model that is not what its family declares, wherever it is computed."""
    config: Any = model.config.get_text_config()
    family = family_of(model)
    if (lacking := family.lacks(config)) is not None:
        raise NotDense(f"it has {lacking}")
    for rope in _rope_types(config):
        static = rope == "longrope" and spec.context_length <= _original_length(config)
        if rope == "dynamic" or (rope == "longrope" and not static):
            raise NotDense(f"its rotary embedding is {rope}")
    _shape(model, family, spec)
    routers = {part for layer in _layers(model, family) for part in _router_parts(layer, family)}
    for module in (*text_body(model).modules(), model.get_output_embeddings()):
        linear = as_linear(module)
        if hasattr(linear, "in_features") and module not in routers and not is_dense(linear, model.dtype):
            raise NotDense("its weights are quantised, other than to int8 per output or to int4, or adapted")
    _check_layers(model, family, spec)


def check_alone(model: PreTrainedModel) -> None:
    """Raises NotDense unless every layer is attention over keys and values of all heads, and one dense MLP, and nothing
    else tells positions than that attention, and nothing is seen.
    """
    family = family_of(model)
    if getattr(model.config, "vision_config", None) is not None:
        raise NotDense("it sees images")
    if family.places:
        raise NotDense("it embeds positions")
    for layer in _layers(model, family):
        attention, mlp = _attention_of(layer, family), _mlp_of(layer, family)
        if attention is None or is_latent(attention) or _recurrence_of(layer, family) is not None:
            raise NotDense("its mixers are not all attention over keys and values of their own")
        if mlp is None or hasattr(mlp, family.mixture.experts):
            raise NotDense("its layers are mixtures of experts")


def _check_layers(model: PreTrainedModel, family: Family, spec: ModelSpec) -> None:
    states = {state.layer_id: state for state in spec.state_layers}
    fuse, recurrent = partial(fused_product, NATIVE, family, model.config.get_text_config()), []
    for number, layer in enumerate(_layers(model, family)):
        parts = (_attention_of(layer, family), _recurrence_of(layer, family), _mlp_of(layer, family))
        for name in (family.attention, family.recurrence, family.mlp):
            module = getattr(layer, name, None) if name else None
            if module is not None and all(module is not part for part in parts):
                raise NotDense(f"its {type(module).__name__} is a part of another kind")
        _, recurrence, mlp = parts
        if hasattr(mlp, family.mixture.experts):
            read_gating(getattr(mlp, family.mixture.experts))
        elif mlp is not None:
            _activation(mlp, family)
        if recurrence is not None and number in states:
            read_recurrence(recurrence, states[number], fuse)
            recurrent.append(number)
    if recurrent != list(states):
        raise NotDense("its layers have states besides those of their recurrent mixers")


def _rope_types(config: Any) -> set[str]:
    given = getattr(config, "rope_parameters", None) or {}
    by_layer = [each for each in given.values() if isinstance(each, dict)] or [given]
    return {str(each.get("rope_type", "default")) for each in by_layer}


def _original_length(config: Any) -> int:
    """Up to there a longrope table is the short one."""
    given = (config.rope_parameters or {}).get("original_max_position_embeddings")
    return int(given or getattr(config, "original_max_position_embeddings", 0) or 0)


def decoder_weights(model: PreTrainedModel, spec: ModelSpec, reader: Reader = NATIVE) -> DecoderWeights:
    """What surrounds the layers, as `reader` takes it."""
    config, family = model.config.get_text_config(), family_of(model)
    embedding: Any = model.get_input_embeddings()
    scale = getattr(embedding, "embed_scale", 1.0)
    if isinstance(scale, torch.Tensor):
        scale = float(scale.to(model.dtype))
    return DecoderWeights(
        shape=_shape(model, family, spec),
        embedding=embedding.weight.detach(),
        final_norm=reader.norm(getattr(_body(model, family), family.final_norm), None),
        head=reader.matrix([model.get_output_embeddings()]),
        outside=Outside(
            embedding_multiplier=scale * family.embedding_multiplier(config),
            logit_multiplier=family.logit_multiplier(config),
            logit_cap=family.logit_cap(config) or 0.0,
            places=_places(model, family, spec),
        ),
    )


def _places(model: PreTrainedModel, family: Family, spec: ModelSpec) -> torch.Tensor | None:
    if not family.places:
        return None
    module = getattr(_body(model, family), family.places)
    # OPT's first two rows are for what is no position.
    table: torch.Tensor = module.weight.detach()[getattr(module, "offset", 0) :]
    assert len(table) >= spec.context_length, (table.shape, spec.context_length)
    return table


def decoder_layers(model: PreTrainedModel, spec: ModelSpec, reader: Reader = NATIVE) -> Iterator[Layer]:
    """One layer after the other, each made when asked for, so that no more than one is held twice."""
    config, family = model.config.get_text_config(), family_of(model)
    shape = _shape(model, family, spec)
    rotary_module = getattr(_body(model, family), family.rotary, None)
    tables = RotaryTables(rotary_module, spec.context_length, family.neighbours, reader.tables)
    types = getattr(config, "layer_types", None) or [""] * len(_layers(model, family))
    kept, length = {layer.layer_id: layer for layer in spec.kv_layers}, spec.context_length
    states = {state.layer_id: state for state in spec.state_layers}
    fuse, norm = partial(fused_product, reader, family, config), partial(_norm, reader)
    for number, layer in enumerate(_layers(model, family)):
        mixers = list[Mixer]()
        if (attention := _attention_of(layer, family)) is not None:
            rotary = tables.of(types[number]) if family.turns(attention) else None
            if is_latent(attention):
                mixers.append(read_latents(attention, fuse, family.out, rotary))
            else:
                given = fuse(attention, family.qkv, family.attention_input(config))
                qkv = sorted_by_kind(given, family, shape) if reader.sorts else given
                norms = [norm(attention, name, kept[number].k_dim) for name in (family.q_norm, family.k_norm)]
                out = fuse(attention, [family.out])
                mixers.append(_attention(attention, qkv, out, norms, family, rotary, kept[number], length))
        if (recurrence := _recurrence_of(layer, family)) is not None:
            mixers.append(read_recurrence(recurrence, states[number], fuse))
        yield Layer(
            before_mixers=norm(layer, family.before_attention) if mixers else None,
            after_mixers=norm(layer, family.after_attention),
            before_mlp=norm(layer, family.before_mlp),
            after_mlp=norm(layer, family.after_mlp),
            mixers=tuple(mixers),
            mlp=_feed_forward(layer, family, fuse, model.dtype),
            parallel=bool(family.parallel(config)),
            multiplier=float(family.multiplier(config)),
        )


def _attention(
    attention: Any,
    qkv: Matrix,
    out: Matrix,
    norms: Sequence[Norm | None],
    family: Family,
    rotary: Rotary | None,
    kept: KVLayerSpec,
    length: int,
) -> Attention:
    q_norm, k_norm = norms
    return Attention(
        qkv=qkv,
        out=out,
        q_norm=q_norm,
        k_norm=k_norm,
        rotary=rotary,
        turns_first=family.turns_first,
        scale=float(getattr(attention, "scaling", kept.k_dim**-0.5)),
        cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        window=kept.window or 0,
        chunk=kept.chunk or 0,
        sinks=getattr(attention, "sinks", None),
        temperature=family.temperature(attention, torch.arange(length)),
    )


def _shape(model: PreTrainedModel, family: Family, spec: ModelSpec) -> DecoderShape:
    found = [_attention_of(layer, family) for layer in _layers(model, family)]
    attentions = {number: attention for number, attention in enumerate(found) if attention is not None}
    if [each.layer_id for each in spec.kv_layers] != list(attentions):
        raise NotDense("its layers that attend do not have one set of keys each")
    if not attentions:
        return DecoderShape(0, 0, 0)
    if any(each.window for each in spec.kv_layers) and any(each.chunk for each in spec.kv_layers):
        raise NotDense("some of its layers have windows and some have chunks")
    kept = {(each.num_kv_heads, each.k_dim, each.v_dim) for each in spec.kv_layers}
    values = latent_values(list(attentions.values()), spec.kv_layers)
    if len(kept) > 1 or (not values and any(k_dim != v_dim for _, k_dim, v_dim in kept)):
        raise NotDense("its heads have more than one size")
    kv_heads, dim, _ = kept.pop()
    inputs = {linear_of(attention, family.out).in_features for attention in attentions.values()}
    if len(inputs) > 1:
        raise NotDense("its layers have different numbers of heads")
    return DecoderShape(inputs.pop() // (values or dim), kv_heads, dim)


def _body(model: PreTrainedModel, family: Family) -> Any:
    base = text_body(model)
    return getattr(base, family.body) if family.body else base


def _layers(model: PreTrainedModel, family: Family) -> list[Any]:
    return list(getattr(_body(model, family), family.layers))


def _attention_of(layer: Any, family: Family) -> Any:
    """The attention of `layer`; None if it has none."""
    module = getattr(layer, family.attention, None)
    return module if hasattr(module, family.qkv[0]) or is_latent(module) else None


def _recurrence_of(layer: Any, family: Family) -> Any:
    """The recurrent mixer of `layer`; None if it has none."""
    module = getattr(layer, family.recurrence, None) if family.recurrence else None
    return module if hasattr(module, "conv") or hasattr(module, "conv1d") else None


def _mlp_of(layer: Any, family: Family) -> Any:
    """The MLP of `layer`; None if it has none."""
    if not family.mlp:
        return layer
    module = getattr(layer, family.mlp, None) or getattr(layer, family.mixture.shared, None)
    return module if any(hasattr(module, name) for name in (family.into[0], family.mixture.experts)) else None


def _router_parts(layer: Any, family: Family) -> list[nn.Module]:
    """Modules that choose experts in `layer`: some are linear layers of another dtype than the model's."""
    mlp = getattr(layer, family.mlp, None)
    return list(getattr(mlp, family.mixture.router).modules()) if hasattr(mlp, family.mixture.experts) else []


def _norm(reader: Reader, module: nn.Module, name: str, width: int | None = None) -> Norm | None:
    found = getattr(module, name, None) if name else None
    return None if found is None or isinstance(found, nn.Identity) else reader.norm(found, width)


def _feed_forward(layer: Any, family: Family, fuse: Fuse, dtype: torch.dtype) -> Mlp | Experts | None:
    if (mlp := _mlp_of(layer, family)) is None:
        return None
    experts = getattr(mlp, family.mixture.experts, None)
    return _mlp(mlp, family, fuse) if experts is None else _experts(layer, mlp, experts, family, fuse, dtype)


def _experts(layer: Any, mlp: Any, experts: Any, family: Family, fuse: Fuse, dtype: torch.dtype) -> Experts:
    names, gating = family.mixture, read_gating(experts)
    gated = getattr(experts, "has_gate", True)
    into, into_bias = stacked(experts, "gate_up_proj" if gated else "up_proj", gating.parted)
    down, down_bias = stacked(experts, "down_proj", True)
    router = getattr(mlp, names.router)
    matrix = one_behind_the_other([router_product(router, down.shape[1])])
    shared = getattr(mlp, names.shared, None) or getattr(layer, names.shared, None) if names.shared else None
    return Experts(
        router=read_router(router, matrix, dtype, getattr(mlp, names.correction, None)),
        into=into,
        into_bias=into_bias,
        down=down,
        down_bias=down_bias,
        gated=gated,
        activation=gating.activation,
        clamp=gating.clamp,
        shared=None if shared is None else _mlp(shared, family, fuse),
        shared_gate=vector(getattr(mlp, names.shared_gate), dtype) if names.shared_gate else None,
        weighs_inputs=names.weighs_inputs,
    )


def _mlp(mlp: Any, family: Family, fuse: Fuse) -> Mlp:
    return Mlp(fuse(mlp, family.into), fuse(mlp, [family.down]), family.gated, _activation(mlp, family))


def _activation(mlp: Any, family: Family) -> str:
    known = family.activation in ACTIVATIONS
    return family.activation if known else activation_name(getattr(mlp, family.activation))
