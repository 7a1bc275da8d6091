"""Finds out what a transformers model caches, and which keys each layer may see, by running eight tokens through it.

The visible keys are read from the rule that the model itself gives to transformers for building masks. A rule can be
asked about any two positions, so a window of 4096 is found, and proved, without a forward pass of 4096 tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from core.attention.span import AttentionSpan
from core.memory.kv_pool import KVLayerSpec
from core.models.hf.mla import latent_of
from core.models.hf.packed_attention import PackedCall, bind_context
from core.models.hf.recurrent_probe import RecordingFacade

IMPLEMENTATION = "slipstream-probe"
RULE = "slipstream_rule"
"""Attribute of a recorded mask: the model's rule from which it was made."""

TURNS = "slipstream_turns"
"""Attribute of a module of a probed model: `turns_of`."""

PROBE_TOKENS = 8
DEFAULT_REACH = 1 << 17
"""Positions over which rules are compared, for a model that states no context length."""


class Visibility(Protocol):
    """A guess at what a rule shows; `window` and `chunk` are where it may change."""

    @property
    def window(self) -> int | None: ...

    @property
    def chunk(self) -> int | None: ...

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor: ...


Rule = Callable[[int, int, torch.Tensor, torch.Tensor], Any]


class Unsupported(Exception):
    """Why a model cannot be served packed, as the end of a sentence that begins with its name."""


@dataclass(slots=True)
class ModelProbe:
    """What the probe found: `layers` in ascending order of id, `spans` for each of them."""

    device: torch.device
    reach: int
    """Positions to compare rules over: the model's context length."""
    hints: tuple[AttentionSpan, ...]
    """Spans that the model's configuration makes possible."""
    layers: dict[int, KVLayerSpec] = field(default_factory=dict)
    spans: dict[int, AttentionSpan] = field(default_factory=dict)
    cache: RecordingFacade = field(default_factory=RecordingFacade)

    def record(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        window: int | None,
        rule: Rule | None,
        *,
        v_in_k: bool = False,
        span: AttentionSpan | None = None,
    ) -> None:
        """Note one attention call. `v_in_k`: whether the values are the first elements of the keys. `span`: what is
        visible, of a call that says so.
        """
        layer_id = self.cache.layer_of(key)
        span = self._span(layer_id, window, rule) if span is None else span
        spec = KVLayerSpec(layer_id, key.shape[1], key.shape[3], value.shape[3], v_in_k, span.window, span.chunk)
        if self.layers.setdefault(layer_id, spec) != spec or self.spans.setdefault(layer_id, span) != span:
            raise Unsupported(f"attends to layer {layer_id} in two different ways")

    def _span(self, layer_id: int, window: int | None, rule: Rule | None) -> AttentionSpan:
        candidates = dict.fromkeys((AttentionSpan(window or None), AttentionSpan(), *self.hints))
        if rule is None:
            # The model made its own mask or none. Plain causality is what the self-check can prove; more it cannot.
            if len(candidates) > 1:
                raise Unsupported("has a window or chunk size, but not by way of transformers' masks")
            return AttentionSpan()
        for span in candidates:
            if agrees(rule, span, self.reach, self.device):
                return span
        raise Unsupported(f"hides keys in layer {layer_id} by a rule that is neither a window nor a chunk")


def probe_model(model: PreTrainedModel, context_length: int | None) -> ModelProbe:
    """Run the probe. Raises Unsupported, or any error of a model that cannot work with the stand-in for its cache.

    Leaves the model's attention implementation as it was, and its modules bound to the probe.
    """
    device = model.device
    probe = ModelProbe(device, context_length or DEFAULT_REACH, tuple(_hints(model)))
    bind_context(model, probe)
    positions = torch.arange(PROBE_TOKENS, device=device)
    probe.cache.begin(positions)
    with (
        attention_implementation(model, IMPLEMENTATION),
        probe.cache.watching(model),
        _noting_turns(model),
        torch.inference_mode(),
    ):
        PackedCall(model).logits(probe.cache, positions, positions, positions)
    if not probe.layers and not probe.cache.recurrent_layers:
        raise Unsupported("does not route its attention through transformers' attention interface")
    probe.layers = dict(sorted(probe.layers.items()))
    return probe


def turns_of(module: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Cosines and sines, [PROBE_TOKENS, R], that a module of a probed model got for the first positions; None for one
    that got none.
    """
    return getattr(module, TURNS, None)


@contextmanager
def _noting_turns(model: PreTrainedModel) -> Iterator[None]:
    hooks = [each.register_forward_pre_hook(_note_turns, with_kwargs=True) for each in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _note_turns(module: torch.nn.Module, _: Any, given: dict[str, Any]) -> None:
    found = given.get("position_embeddings")
    if isinstance(found, tuple) and len(found) == 2 and all(each.dim() == 3 for each in found):
        setattr(module, TURNS, tuple(each[0].clone() for each in found))


@contextmanager
def attention_implementation(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Switch how `model` attends, inside the `with` block; models look the name up in their configuration each time."""
    before = model.config._attn_implementation
    # The setter reaches nested configurations too; `set_attn_implementation` would skip classes that do not declare
    # support, although most of those work, and what does not is caught by the probe or by the self-check.
    model.config._attn_implementation = name
    try:
        yield
    finally:
        model.config._attn_implementation = before


def agrees(rule: Rule, span: Visibility, reach: int, device: torch.device) -> bool:
    """Whether `rule` and `span` show the same keys, for queries and distances all over `reach` positions.

    Compared where windows and chunks can differ: at their edges, at powers of two and their neighbours, at both ends.
    """
    marks = {0, 1, 2, reach // 3, reach - 1}
    edges = [e for e in (span.window, span.chunk) if e is not None]
    for size in (*edges, *(2**n for n in range(1, reach.bit_length()))):
        marks.update(m for multiple in (size, 2 * size) for m in (multiple - 1, multiple, multiple + 1))
    places = torch.tensor(sorted(m for m in marks if 0 <= m < reach), device=device)
    # Keys at every mark, and at every marked distance before and after the query.
    queries = places[:, None]
    keys = torch.cat([places.expand(len(places), -1), queries - places, queries + places], dim=1).clamp(0, reach - 1)
    queries = queries.expand_as(keys)
    try:
        allowed = torch.as_tensor(rule(0, 0, queries, keys))
    except (IndexError, RuntimeError, TypeError) as error:
        raise Unsupported("hides keys by a rule that depends on more than their positions") from error
    return bool(torch.equal(allowed.expand_as(keys).bool(), span.allows(queries, keys)))


def _hints(model: PreTrainedModel) -> Iterator[AttentionSpan]:
    config = model.config.get_text_config()
    window = getattr(config, "sliding_window", None)
    chunk = getattr(config, "attention_chunk_size", None)
    if isinstance(window, int) and window > 0 and getattr(config, "use_sliding_window", True):
        yield AttentionSpan(window=window)
    if isinstance(chunk, int) and chunk > 0:
        yield AttentionSpan(chunk=chunk)


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    sliding_window: int | None = None,
    span: AttentionSpan | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for attention: records the call, answers zeros [1, T, H, Dv]."""
    probe: ModelProbe = module.slipstream_context  # type: ignore[assignment]
    latent = latent_of(module)
    rule = getattr(attention_mask, RULE, None)
    probe.record(key, value, sliding_window, rule, v_in_k=latent is not None, span=span)
    width = value.shape[3] if latent is None else latent.v_dim
    return query.new_zeros(1, query.shape[2], query.shape[1], width), None


def recorded_mask(*, mask_function: Rule, q_length: int, kv_length: int, **_: Any) -> torch.Tensor:
    """Stands in for a mask: carries the rule that a real one would be made from."""
    mask = torch.ones(1, 1, q_length, kv_length, dtype=torch.bool)
    setattr(mask, RULE, mask_function)
    return mask


AttentionInterface.register(IMPLEMENTATION, _probe_attention)
AttentionMaskInterface.register(IMPLEMENTATION, recorded_mask)
