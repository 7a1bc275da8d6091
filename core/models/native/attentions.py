"""Attention of a layer, taken off its module by its family's declaration, and whose keys it reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from core.memory.kv_pool import KVLayerSpec
from core.models.hf.routed_attention import slopes_of
from core.models.native.declaration import Family, part_of
from core.models.native.latents import is_latent, latent_values, read_latents
from core.models.native.matrices import Reader, linear_of, sorted_by_kind
from core.models.native.parts import Attention, HeadShape, Latents, Matrix, Rotary
from core.models.native.reading import NotDense


@dataclass(frozen=True, slots=True)
class Keys:
    """Which keys a layer reads."""

    kept: KVLayerSpec
    of: int | None
    """Their place among all layers that have keys, if they are another's."""


def attention_of(layer: Any, family: Family) -> Any:
    """The attention of `layer`; None if it has none."""
    module = part_of(layer, family.attention)
    return module if hasattr(module, family.qkv[0]) or is_latent(module) else None


def heads_of(attention: Any, family: Family, kept: KVLayerSpec) -> int:
    """Heads of queries of an attention module whose keys are `kept`."""
    return int(linear_of(attention, family.out).in_features) // kept.k_dim


def keys_by_layer(
    layers: Sequence[Any], family: Family, types: Sequence[str], kept: Sequence[KVLayerSpec]
) -> dict[int, Keys]:
    """By number of a layer that attends, of which `types` are types; `kept` are all keys there are. Raises NotDense."""
    attentions = {n: found for n, layer in enumerate(layers) if (found := attention_of(layer, family)) is not None}
    own = [number for number, attention in attentions.items() if not family.shares(attention)]
    if [each.layer_id for each in kept] != own:
        raise NotDense("its layers that attend do not have one set of keys each")
    _check_kept(list(attentions.values()), kept)
    last, found = dict[str, int](), dict[int, Keys]()
    for number, attention in attentions.items():
        kind = types[number]
        if not family.shares(attention):
            last[kind] = own.index(number)
            found[number] = Keys(kept[last[kind]], None)
        elif kind in last:
            found[number] = Keys(kept[last[kind]], last[kind])
        else:
            raise NotDense("one of its layers reads keys that no layer before it has")
    return found


def _check_kept(attentions: Sequence[Any], kept: Sequence[KVLayerSpec]) -> None:
    if any(each.window for each in kept) and any(each.chunk for each in kept):
        raise NotDense("some of its layers have windows and some have chunks")
    if not latent_values(attentions, kept) and any(each.k_dim != each.v_dim for each in kept):
        raise NotDense("its values are of another size than its keys")


def read_attention(
    attention: Any,
    family: Family,
    config: Any,
    fuse: Callable[..., Matrix],
    reader: Reader,
    rotary: Rotary | None,
    keys: Keys,
    length: int,
) -> Attention | Latents:
    """What `attention` computes for positions below `length`, its matrices made by `fuse`. Raises NotDense."""
    if is_latent(attention):
        return read_latents(attention, fuse, family.out, rotary)
    kept = keys.kept
    shape = HeadShape(heads_of(attention, family, kept), kept.num_kv_heads, kept.k_dim)
    there = [name for name in family.qkv if getattr(attention, name, None) is not None]
    given = fuse(attention, there, family.attention_input(config))
    norms = [reader.norm_of(attention, name, kept.k_dim) for name in (family.q_norm, family.k_norm, family.v_norm)]
    q_norm, k_norm, v_norm = norms
    return Attention(
        shape=shape,
        qkv=sorted_by_kind(given, family, shape) if reader.sorts else given,
        out=fuse(attention, [family.out]),
        q_norm=q_norm,
        k_norm=k_norm,
        v_norm=v_norm,
        rotary=rotary,
        turns_first=family.turns_first,
        scale=float(getattr(attention, "scaling", kept.k_dim**-0.5)),
        cap=getattr(attention, "attn_logit_softcapping", None) or 0.0,
        window=kept.window or 0,
        chunk=kept.chunk or 0,
        sinks=getattr(attention, "sinks", None),
        temperature=family.temperature(attention, torch.arange(length)),
        keys_of=keys.of,
        slopes=slopes_of(attention),
        softplus_gates=family.softplus_gates,
    )
