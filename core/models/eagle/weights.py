"""A head's checkpoint: `config.json` and `model.safetensors`, laid out as published EAGLE-3 heads are.

==========================================  ==================================================================
name                                        shape and meaning
==========================================  ==================================================================
``fc.weight``                               [H, layers * target's H]: fuses what the target's layers read
``midlayer.input_layernorm.weight``         [H]: norm of the embedding
``midlayer.hidden_norm.weight``             [H]: norm of the feature
``midlayer.self_attn.{q,k,v}_proj.weight``  [heads * D, 2 H]: over embedding and feature side by side
``midlayer.self_attn.o_proj.weight``        [H, heads * D]
``midlayer.post_attention_layernorm.weight``  [H]
``midlayer.mlp.{gate,up,down}_proj.weight``   SwiGLU
``norm.weight``, ``lm_head.weight``         [H]; [Vd, H]
``embed_tokens.weight``                     [V, H]; the target's where it is missing
``d2t``                                     int[Vd]: draft id + d2t[draft id] is the target's id; none: ids are equal
``t2d``                                     bool[V]: which ids have a draft id; not read
==========================================  ==================================================================

``layers.0.`` may stand for ``midlayer.``. `config.json` is that of a Llama of one layer; which of the target's layers
are read stands in ``eagle_config.eagle_aux_hidden_state_layer_ids``, and is 2, the middle one and the third from the
end where nothing is said. Number i is what layer i reads.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from core.errors import ModelLoadError

WEIGHTS_FILE, INDEX_FILE = "model.safetensors", "model.safetensors.index.json"
EMBEDDINGS: Final = ("model.embed_tokens.weight", "embed_tokens.weight", "language_model.model.embed_tokens.weight")
UNREAD: Final = ("t2d", "midlayer.self_attn.rotary_emb.inv_freq")
DYNAMIC_ROPE: Final = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """All of a head, in one dtype."""

    heads: int
    kv_heads: int
    head_dim: int
    eps: float
    layers: tuple[int, ...]
    """Of the target: what these read is fused."""
    embedding: torch.Tensor
    """[V, H]."""
    cos: torch.Tensor
    """float32[positions, D / 2], and `sin`."""
    sin: torch.Tensor
    fc: torch.Tensor
    embedding_norm: torch.Tensor
    feature_norm: torch.Tensor
    mlp_norm: torch.Tensor
    final_norm: torch.Tensor
    qkv: torch.Tensor
    """[(heads + 2 kv_heads) * D, 2 H]."""
    out: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    lm_head: torch.Tensor
    target_ids: torch.Tensor | None
    """int64[Vd]: the target's id of each draft id; None where both are the same."""

    @property
    def scale(self) -> float:
        """Multiplies attention scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Target:
    """What a head must fit."""

    path: Path
    """Of its checkpoint, whose embedding the head may share."""
    vocab_size: int
    hidden_size: int
    layers: int
    positions: int
    """The longest sequence, with room for drafts."""
    dtype: torch.dtype


def load_head(folder: Path, target: Target) -> HeadWeights:
    """The head of `folder` for `target`. Raises ModelLoadError where it is none, or does not fit."""
    try:
        config = json.loads((folder / "config.json").read_text())
        weights = _read(folder / WEIGHTS_FILE)
    except (OSError, ValueError, SafetensorError) as error:
        raise ModelLoadError(f"{folder}: no draft head can be read: {error}") from error
    if not isinstance(config, dict):
        raise ModelLoadError(f"{folder}: config.json is no object")
    try:
        return _made(folder, config, weights, target)
    except KeyError as missing:
        raise ModelLoadError(f"{folder}: the draft head has no {missing.args[0]}") from missing


def _read(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    with safe_open(path, framework="pt") as file:
        for name in list(file.keys()):
            short = name.removeprefix("model.")
            found[short.replace("layers.0.", "midlayer.", 1)] = file.get_tensor(name)
    return found


def _made(folder: Path, config: Mapping[str, Any], weights: dict[str, torch.Tensor], target: Target) -> HeadWeights:
    llama: Any = LlamaConfig.from_dict({key: value for key, value in config.items() if key != "architectures"})
    layers = _layers(config, target)
    for name in UNREAD:
        weights.pop(name, None)
    offsets = weights.pop("d2t", None)
    embedding = weights.pop("embed_tokens.weight", None)
    taken = {name: weights.pop(name).to(target.dtype).contiguous() for name in _shapes(llama, layers, target)}
    if weights:
        raise ModelLoadError(f"{folder}: the draft head has a {min(weights)}, which is not computed")
    for name, shape in _shapes(llama, layers, target).items():
        if tuple(taken[name].shape) != shape:
            raise ModelLoadError(f"{folder}: {name} of the draft head is {tuple(taken[name].shape)} and not {shape}")
    if embedding is None:
        embedding = target_embedding(target)
    if tuple(embedding.shape) != (target.vocab_size, llama.hidden_size):
        raise ModelLoadError(f"{folder}: the draft head does not fit an embedding of {tuple(embedding.shape)}")
    attention, mlp = "midlayer.self_attn.", "midlayer.mlp."
    cos, sin = _turns(llama, target.positions, folder)
    return HeadWeights(
        *(llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim, llama.rms_norm_eps, layers),
        embedding=embedding.to(target.dtype).contiguous(),
        cos=cos,
        sin=sin,
        fc=taken["fc.weight"],
        embedding_norm=taken["midlayer.input_layernorm.weight"],
        feature_norm=taken["midlayer.hidden_norm.weight"],
        mlp_norm=taken["midlayer.post_attention_layernorm.weight"],
        final_norm=taken["norm.weight"],
        qkv=torch.cat([taken[f"{attention}{part}_proj.weight"] for part in "qkv"]),
        out=taken[f"{attention}o_proj.weight"],
        gate_up=torch.cat([taken[f"{mlp}{part}_proj.weight"] for part in ("gate", "up")]),
        down=taken[f"{mlp}down_proj.weight"],
        lm_head=taken["lm_head.weight"],
        target_ids=_target_ids(offsets, taken["lm_head.weight"].shape[0], target, folder),
    )


def _layers(config: Mapping[str, Any], target: Target) -> tuple[int, ...]:
    named = config.get("eagle_config") or {}
    found = named.get("eagle_aux_hidden_state_layer_ids") or (2, target.layers // 2, target.layers - 3)
    layers = tuple(map(int, found))
    if not all(0 <= layer <= target.layers for layer in layers):
        raise ModelLoadError(f"the draft head reads layers {layers} of a model that has {target.layers}")
    return layers


def _shapes(config: Any, layers: tuple[int, ...], target: Target) -> dict[str, tuple[int, ...]]:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q, kv = config.num_attention_heads * dim, config.num_key_value_heads * dim
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    vocabulary = getattr(config, "draft_vocab_size", None) or config.vocab_size
    return {
        "fc.weight": (hidden, len(layers) * target.hidden_size),
        **{f"midlayer.{norm}.weight": (hidden,) for norm in norms},
        "midlayer.self_attn.q_proj.weight": (q, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, q),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (int(vocabulary), hidden),
    }


def _turns(config: Any, positions: int, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    rope = str((config.rope_parameters or {}).get("rope_type", "default"))
    if rope in DYNAMIC_ROPE:
        raise ModelLoadError(f"{folder}: the rotary embedding of the draft head is {rope}, which is not computed")
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, 1, 1), torch.arange(positions)[None])
    half = config.head_dim // 2
    return cos[0, :, :half].float().contiguous(), sin[0, :, :half].float().contiguous()


def _target_ids(offsets: torch.Tensor | None, count: int, target: Target, folder: Path) -> torch.Tensor | None:
    if offsets is None:
        if count != target.vocab_size:
            raise ModelLoadError(
                f"{folder}: the draft head knows {count} of {target.vocab_size} tokens, and has no d2t"
            )
        return None
    ids = offsets.to(torch.int64) + torch.arange(len(offsets))
    if len(ids) != count or int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
        raise ModelLoadError(f"{folder}: d2t of the draft head does not lead to tokens of the model")
    return ids


def target_embedding(target: Target) -> torch.Tensor:
    """[V, H]: the embedding of the target's checkpoint. Raises ModelLoadError where it has none of a usual name."""
    try:
        index = target.path / INDEX_FILE
        files: dict[str, str] = json.loads(index.read_text())["weight_map"] if index.exists() else {}
        for name in EMBEDDINGS:
            path = target.path / files.get(name, WEIGHTS_FILE)
            if not path.exists():
                continue
            with safe_open(path, framework="pt") as file:
                if name in list(file.keys()):
                    found: torch.Tensor = file.get_tensor(name)
                    return found
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ModelLoadError(f"{target.path}: its embedding cannot be read for the draft head: {error}") from error
    raise ModelLoadError(f"{target.path}: it has no embedding under a known name, and the draft head brings none")
