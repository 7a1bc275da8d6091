"""What a decoder consists of, taken from a loaded transformers module tree by its family's declaration."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from core.models.base import ModelSpec
from core.models.hf.probe import turns_of
from core.models.hf.routed_attention import slopes_of
from core.models.native.attentions import Keys, attention_of, heads_of, keys_by_layer, read_attention
from core.models.native.declaration import Family, part_of
from core.models.native.families import FAMILIES
from core.models.native.feed_forward import (
    check_feed_forward,
    curve_of,
    mixture_of,
    mlp_of,
    read_feed_forward,
    router_parts,
)
from core.models.native.images import text_body
from core.models.native.latents import is_latent
from core.models.native.layer_inputs import has_inputs, read_layer_input, read_layer_inputs
from core.models.native.matrices import Reader, as_linear, fused_product, is_dense
from core.models.native.parts import Layer, Matrix, Mixer, Norm, Outside
from core.models.native.reading import NotDense, RotaryTables, check_turns
from core.models.native.recurrences import read_recurrence
from core.models.vision.families import VISION_FAMILIES

NATIVE = Reader()


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All weights outside the layers."""

    embedding: torch.Tensor
    final_norm: Norm
    head: Matrix
    outside: Outside


def family_of(model: PreTrainedModel) -> Family:
    """The declaration for the type of `model`. Raises NotDense."""
    kind = str(getattr(model.config, "model_type", ""))
    if kind in VISION_FAMILIES:
        kind = VISION_FAMILIES[kind].text
    if kind not in FAMILIES:
        kind = str(model.config.get_text_config().model_type)
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
    _keys(model, family, spec)
    routers = {part for layer in _layers(model, family) for part in router_parts(layer, family)}
    for module in (*text_body(model).modules(), model.get_output_embeddings()):
        linear = as_linear(module)
        if hasattr(linear, "in_features") and module not in routers and not is_dense(linear, model.dtype):
            raise NotDense("its weights are quantised, other than to int8 per output or to int4, or adapted")
    _check_layers(model, family, spec)


def check_alone(model: PreTrainedModel, spec: ModelSpec) -> None:
    """Raises NotDense unless every layer is attention over keys and values of all heads, and one dense MLP, and nothing
    else tells positions than that attention, and nothing is seen.
    """
    family = family_of(model)
    if spec.vision is not None:
        raise NotDense("it sees images")
    if family.places:
        raise NotDense("it embeds positions")
    if family.v_norm:
        raise NotDense("its values are normed")
    if family.first_norm:
        raise NotDense("its embeddings are normed")
    if family.shards:
        raise NotDense("its queries, keys and values come in parts")
    keys = _keys(model, family, spec)
    for number, layer in enumerate(_layers(model, family)):
        attention = attention_of(layer, family)
        if attention is None or is_latent(attention) or _recurrence_of(layer, family) is not None:
            raise NotDense("its mixers are not all attention over keys and values of their own")
        if slopes_of(attention) is not None:
            raise NotDense("its scores depend on distance")
        kept = keys[number].kept
        if family.by_head and kept.num_kv_heads < heads_of(attention, family, kept):
            raise NotDense("queries that share a key stand between keys")
        if (mlp := mlp_of(layer, family)) is None or mixture_of(layer, family) is not None:
            raise NotDense("its layers are mixtures of experts")
        if curve_of(mlp, family) is not None:
            raise NotDense("its activation has numbers of its own")


def _check_layers(model: PreTrainedModel, family: Family, spec: ModelSpec) -> None:
    states = {state.layer_id: state for state in spec.state_layers}
    fuse, recurrent = partial(fused_product, NATIVE, family, model.config.get_text_config()), []
    for number, layer in enumerate(_layers(model, family)):
        parts = (attention_of(layer, family), _recurrence_of(layer, family), mlp_of(layer, family))
        for name in (family.attention, family.recurrence, family.mlp):
            module = part_of(layer, name)
            if module is not None and all(module is not part for part in parts):
                raise NotDense(f"its {type(module).__name__} is a part of another kind")
        check_feed_forward(layer, family)
        recurrence = parts[1]
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
    width, scale = embedding.weight.shape[1], getattr(embedding, "embed_scale", 1.0)
    if isinstance(scale, torch.Tensor):
        scale = float(scale.to(model.dtype))
    return DecoderWeights(
        embedding=embedding.weight.detach(),
        final_norm=reader.norm(getattr(_body(model, family), family.final_norm), width),
        head=reader.matrix([model.get_output_embeddings()]),
        outside=Outside(
            embedding_multiplier=scale * family.embedding_multiplier(config),
            logit_multiplier=family.logit_multiplier(config),
            logit_cap=family.logit_cap(config) or 0.0,
            places=_places(model, family, spec),
            norm=reader.norm_of(_body(model, family), family.first_norm, width),
            inputs=read_layer_inputs(_body(model, family), partial(fused_product, reader, family, config)),
        ),
    )


def tables_of(model: PreTrainedModel) -> list[nn.Module]:
    """What is read as it is: all other large matrices of the text side are packed."""
    family = family_of(model)
    body = _body(model, family)
    tables = [model.get_input_embeddings()]
    if family.places:
        tables.append(getattr(body, family.places))
    if has_inputs(body):
        tables.append(body.embed_tokens_per_layer)
    return tables


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
    turned = family.neighbours, reader.tables, family.backwards
    rotaries = _rotaries(model, family)
    tables = {module: RotaryTables(module, spec.context_length, *turned) for module in set(rotaries)}
    types, keys = _types(model, family), _keys(model, family, spec)
    states = {state.layer_id: state for state in spec.state_layers}
    embedding: Any = model.get_input_embeddings()
    width = embedding.weight.shape[1]
    fuse, norm = partial(fused_product, reader, family, config), partial(reader.norm_of, width=width)
    for number, layer in enumerate(_layers(model, family)):
        mixers = list[Mixer]()
        if (attention := attention_of(layer, family)) is not None:
            turns = rotaries[number] is not None and family.turns(attention)
            rotary = tables[rotaries[number]].of(types[number]) if turns else None
            check_turns(turns_of(attention), rotary)
            length = spec.context_length
            mixers.append(read_attention(attention, family, config, fuse, reader, rotary, keys[number], length))
        if (recurrence := _recurrence_of(layer, family)) is not None:
            mixers.append(read_recurrence(recurrence, states[number], fuse))
        yield Layer(
            before_mixers=norm(layer, family.before_attention) if mixers else None,
            after_mixers=norm(layer, family.after_attention),
            before_mlp=norm(layer, family.before_mlp),
            after_mlp=norm(layer, family.after_mlp),
            mixers=tuple(mixers),
            mlp=read_feed_forward(layer, family, fuse, model.dtype),
            parallel=bool(family.parallel(config)),
            multiplier=float(family.multiplier(config)),
            input=read_layer_input(layer, fuse),
            scale=float(getattr(layer, family.scale)) if family.scale else 1.0,
        )


def _rotaries(model: PreTrainedModel, family: Family) -> list[Any]:
    """By layer, what makes angles of positions for it; None where nothing turns its queries and keys."""
    body, count = _body(model, family), len(_layers(model, family))
    thetas = getattr(model.config.get_text_config(), "layer_rope_theta", None)
    if thetas is None or not hasattr(body, "rotary_embs"):
        return [getattr(body, family.rotary, None)] * count
    made = {each.config.rope_parameters["rope_theta"]: each for each in body.rotary_embs}
    return [made[theta] if theta else None for theta in thetas[:count]]


def _keys(model: PreTrainedModel, family: Family, spec: ModelSpec) -> dict[int, Keys]:
    return keys_by_layer(_layers(model, family), family, _types(model, family), spec.kv_layers)


def _types(model: PreTrainedModel, family: Family) -> list[str]:
    types = getattr(model.config.get_text_config(), "layer_types", None)
    return types or [""] * len(_layers(model, family))


def _body(model: PreTrainedModel, family: Family) -> Any:
    base = text_body(model)
    return getattr(base, family.body) if family.body else base


def _layers(model: PreTrainedModel, family: Family) -> list[Any]:
    found = getattr(_body(model, family), family.layers, None)
    if found is None:
        raise NotDense("its layers are not where its type has them")
    return list(found)


def _recurrence_of(layer: Any, family: Family) -> Any:
    """The recurrent mixer of `layer`; None if it has none."""
    module = getattr(layer, family.recurrence, None) if family.recurrence else None
    return module if hasattr(module, "conv") or hasattr(module, "conv1d") else None
