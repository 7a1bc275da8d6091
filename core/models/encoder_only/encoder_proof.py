"""Proves at load that an encoder gives texts of one step what it gives each alone, and finds how it wants to be asked.

What a layer may see is read from the rule that the model itself gives to transformers for building masks, as
`core.models.hf.probe` does it for decoders: a handful of tokens cannot show a window of 64.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from core.models.encoder_only.declared import DECLARED, declare
from core.models.encoder_only.encoder_head import EncoderHead
from core.models.encoder_only.packed_encoder import IMPLEMENTATION, EncoderContext
from core.models.encoder_only.reference import EncoderReference
from core.models.encoder_only.ways import GroupedTexts, PackedTexts, Way
from core.models.hf.packed_attention import bind_context
from core.models.hf.probe import RULE, Rule, Unsupported, agrees, attention_implementation, recorded_mask
from core.models.hf.self_check import HALF_TOLERANCE, TOLERANCE, CheckResult

logger = logging.getLogger(__name__)

PROBE: Final = "slipstream-encoder-probe"
PROBE_TOKENS: Final = 8
LONG_TEXT: Final = 1024
"""Tokens of the text that declared attention is compared over, if the model takes as many."""


@dataclass(frozen=True, slots=True)
class BothWays:
    """Every token sees those at most `window` before and behind it; None: all of its text."""

    window: int | None = None
    chunk: None = None

    def allows(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """bool, broadcast over positions: whether the query sees the key."""
        if self.window is None:
            return torch.ones_like(queries - keys, dtype=torch.bool)
        return (queries - keys).abs() <= self.window


@dataclass(slots=True)
class EncoderProbe:
    """Bound to every module while the model runs once: how far each attention module sees."""

    reach: int
    """Positions to compare rules over: the longest text."""
    hints: tuple[int, ...]
    windows: dict[torch.nn.Module, int] = field(default_factory=dict)
    calls: int = 0

    def record(self, module: torch.nn.Module, rule: Rule | None, device: torch.device) -> None:
        """Note one attention call. Raises Unsupported for a rule that is no window."""
        self.calls += 1
        if rule is None or agrees(rule, BothWays(), self.reach, device):
            return
        found = next((size for size in self.hints if agrees(rule, BothWays(size), self.reach, device)), None)
        if found is None or self.windows.setdefault(module, found) != found:
            raise Unsupported("hides tokens by a rule that is no window in both directions")


def proved_head(whole: PreTrainedModel, reference: EncoderReference) -> EncoderHead | None:
    """The head of `whole`, over hidden states that are there already; None if the reference has no labels.

    Raises Unsupported where it makes something else of them than the model itself.
    """
    if not reference.labels:
        return None
    head = EncoderHead(whole)
    lens = [len(row) for row in reference.ids]
    ends = [sum(lens[: place + 1]) for place in range(len(lens))]
    states = torch.cat(reference.states).to(whole.dtype)
    found = head.label(states, [end - length for end, length in zip(ends, lens, strict=True)], ends)
    error = _relative(found, torch.stack(reference.labels))
    if error > _tolerance(whole.dtype):
        raise Unsupported(f"makes other labels of hidden states than its head alone, by {error:.2g} of the largest")
    return head


def proved_way(base: PreTrainedModel, reference: EncoderReference, reach: int) -> Way:
    """How `base` runs over the texts of a step: packed where that is right, else in groups; the log says why.

    `reach`: positions that it knows. Raises Unsupported where neither gives the hidden states of each text alone.
    """
    try:
        return _packed(base, reference, reach)
    except (Unsupported, NotImplementedError, TypeError, RuntimeError) as error:
        logger.info("texts are computed side by side, not packed: the model %s", str(error).partition("\n")[0])
    way = GroupedTexts(base, first_position(base))
    apart = _difference(way, reference)
    if apart > _tolerance(base.dtype):
        raise Unsupported(f"gives texts of one step other hidden states than each alone, by {apart:.2g} of the largest")
    return way


def _packed(base: PreTrainedModel, reference: EncoderReference, reach: int) -> PackedTexts:
    before = base.config._attn_implementation
    try:
        if base.config.model_type in DECLARED:
            return _declared(base, reference, reach)
        if "position_ids" not in inspect.signature(base.forward).parameters:
            raise Unsupported("takes no positions")
        context = EncoderContext(find_windows(base, reach))
        return _tried(base, context, reference, _offsets(base))
    except BaseException:
        base.config._attn_implementation = before
        raise


def _declared(base: PreTrainedModel, reference: EncoderReference, reach: int) -> PackedTexts:
    """Over a long text as well: distances may have rules that no short one shows. Raises Unsupported."""
    offset = first_position(base)
    ids = torch.cat(reference.ids)
    length = min(reach - offset, LONG_TEXT)
    ids = ids.repeat(-(-length // len(ids)))[:length]
    with _first_layer(base), torch.inference_mode():
        expected = base(input_ids=ids[None]).last_hidden_state[0].float()
    context = EncoderContext()
    take_away = declare(base, context)
    try:
        way = _tried(base, context, reference, (offset,))
        with _first_layer(base), torch.inference_mode():
            found = way.states(ids, torch.arange(length, device=ids.device), None, [length])
        error = _relative(found.float(), expected)
        if error > _tolerance(base.dtype):
            raise Unsupported(f"gives a long text other hidden states, by {error:.2g} of the largest")
        return way
    except BaseException:
        take_away()
        raise


def _tried(
    base: PreTrainedModel, context: EncoderContext, reference: EncoderReference, offsets: tuple[int, ...]
) -> PackedTexts:
    """Raises Unsupported where positions from none of `offsets` on give the states of each text alone."""
    bind_context(base, context)
    base.config._attn_implementation = IMPLEMENTATION
    for offset in offsets:
        way = PackedTexts(base, context, offset)
        if (error := _difference(way, reference)) <= _tolerance(base.dtype):
            return way
    raise Unsupported(f"gives packed texts other hidden states, by {error:.2g} of the largest")


@contextmanager
def _first_layer(base: Any) -> Iterator[None]:
    """The model as if it had one layer."""
    layers = base.encoder.layer
    base.encoder.layer = layers[:1]
    try:
        yield
    finally:
        base.encoder.layer = layers


def find_windows(base: PreTrainedModel, reach: int) -> dict[torch.nn.Module, int]:
    """How far each attention module of `base` sees; those that see everything are left out. Raises Unsupported."""
    probe = EncoderProbe(reach, tuple(dict.fromkeys(_hints(base))))
    bind_context(base, probe)
    ids = torch.arange(PROBE_TOKENS, device=base.device)[None]
    with attention_implementation(base, PROBE), torch.inference_mode():
        base(input_ids=ids, position_ids=ids)
    if not probe.calls:
        raise Unsupported("does not route its attention through transformers' attention interface")
    return probe.windows


def _hints(base: PreTrainedModel) -> Iterator[int]:
    config = base.config.get_text_config()
    for name in ("sliding_window", "local_attention"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > 0:
            yield from (size, size - 1, size // 2)


def _offsets(base: PreTrainedModel) -> tuple[int, ...]:
    pad = _pad_of(base)
    return (0,) if pad is None else (0, pad + 1)


def _pad_of(base: PreTrainedModel) -> int | None:
    pad = getattr(base.config.get_text_config(), "pad_token_id", None)
    return pad if isinstance(pad, int) else None


@torch.inference_mode()
def first_position(base: PreTrainedModel) -> int:
    """The position that `base` gives to the first token of a text: 0, or the one behind its padding.

    Seen and not tried: a position too far ends the process on a GPU.
    """
    seen: list[int] = []
    steps = torch.arange(PROBE_TOKENS, device=base.device)

    def look(module: torch.nn.Module, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        for each in (*given, *named.values()):
            if isinstance(each, torch.Tensor) and each.dtype is torch.int64 and each.shape[-1:] == steps.shape:
                row = each.reshape(-1, PROBE_TOKENS)[0]
                if torch.equal(row - row[0], steps):
                    seen.append(int(row[0]))

    hooks = [
        module.register_forward_pre_hook(look, with_kwargs=True) for module in base.modules() if module is not base
    ]
    try:
        # Token 0 or 1 is padding in most vocabularies, whatever a configuration says.
        base(input_ids=torch.full((1, PROBE_TOKENS), 3 if _pad_of(base) == 2 else 2, device=base.device))
    finally:
        for hook in hooks:
            hook.remove()
    return max(seen, default=0)


def compared(way: Way, reference: EncoderReference, dtype: torch.dtype) -> CheckResult:
    """Hidden states by `way`, of a model that computes in `dtype`, beside those of each text alone."""
    error, tolerance = _difference(way, reference), _tolerance(dtype)
    return CheckResult(error <= tolerance, error, tolerance)


def _tolerance(dtype: torch.dtype) -> float:
    return HALF_TOLERANCE if dtype.itemsize < 4 else TOLERANCE[dtype]


@torch.inference_mode()
def _difference(way: Way, reference: EncoderReference) -> float:
    """The largest difference of hidden states of one step from those of each text alone, of the largest state."""
    types = torch.cat(reference.types) if reference.token_types > 1 else None
    try:
        places = torch.cat([torch.arange(len(row), device=row.device) for row in reference.ids])
        found = way.states(torch.cat(reference.ids), places, types, [len(row) for row in reference.ids])
    except (IndexError, RuntimeError):  # positions that the model has no embeddings for
        return float("inf")
    return _relative(found.float(), torch.cat(reference.states))


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float(((found - expected).abs().max() / expected.abs().max()).nan_to_num(nan=torch.inf))


def _probe_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Stands in for attention: records the call, answers zeros [1, T, H, Dv]."""
    probe: EncoderProbe = module.slipstream_context  # type: ignore[assignment]
    probe.record(module, getattr(attention_mask, RULE, None), query.device)
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


AttentionInterface.register(PROBE, _probe_attention)
AttentionMaskInterface.register(PROBE, recorded_mask)
