"""Heads that a checkpoint brings along to say the tokens after the next: multi-token prediction (DeepSeek-V3, 2024).

Each is one more layer of the model's own kind. The first takes at each place the model's last hidden state and the
token behind, and says what follows that; each further one takes what the one before made of the place, and the token
one further on. So each is a `core.models.eagle.head.Head`, and the first one's features are last hidden states. Behind
the last place that the model has computed, the last of them feeds on its own output. The modules are those of
`transformers`, which loads them from the layers that it leaves out of the model itself. Keys and values go through our
attention, which needs no mask.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.modeling_layers import MtpModel

from core.attention.base import AttentionBackend
from core.attention.span import AttentionSpan
from core.batch.forward_batch import ForwardBatch
from core.batch.schedule_batch import ForwardMode
from core.memory.kv_pool import KVLayerSpec, KVPool
from core.models.base import Model, ModelSpec
from core.models.eagle.head import HeadStep
from core.models.hf.backend import TransformersModel
from core.models.hf.head_layers import MTP_TYPES, head_layers
from core.models.hf.mla import absorb_latents, latent_of
from core.models.hf.module_tree import one_line
from core.models.hf.packed_attention import IMPLEMENTATION, PackedContext, bind_context
from core.models.hf.probe import IMPLEMENTATION as PROBE
from core.models.hf.probe import PROBE_TOKENS, ModelProbe, attention_implementation


class Unavailable(Exception):
    """Why a model has no heads that draft, as the end of a sentence."""


class MtpHeads:
    """All heads of a model, on its own device. They share embedding and output matrix with it."""

    def __init__(self, module: MtpModel, layers: tuple[KVLayerSpec, ...], spec: ModelSpec) -> None:
        self.module = module
        self.layers = layers
        """What each head keeps of a token."""
        self.spec = spec
        module.config._attn_implementation = IMPLEMENTATION
        self.context = PackedContext(dtype=spec.dtype, spans={layer.layer_id: AttentionSpan() for layer in layers})
        bind_context(module.layers, self.context)

    def bound(self, pool: KVPool, attention: AttentionBackend) -> tuple[MtpHead, ...]:
        """The heads, first to last, with their pool, and a backend that no other model plans with."""
        assert pool.layers == self.layers, "the pool was built for other heads"
        self.context.attention = attention
        return tuple(MtpHead(self, number, pool) for number in range(len(self.layers)))


class MtpHead:
    """A `Head`: one of several, which run one after the other on one thread."""

    def __init__(self, heads: MtpHeads, number: int, pool: KVPool) -> None:
        self._heads = heads
        self._number = number
        self._pool = pool

    @torch.inference_mode()
    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        module, context = self._heads.module, self._heads.context
        context.begin(_batch(step, self._pool))
        states = _forward(module, self._number, context.cache, step.ids, step.features, step.positions)
        said = module.shared_head(states.index_select(0, step.wanted))
        return said[:, : self._heads.spec.vocab_size].float().contiguous(), states


def load_mtp(model: Model, most: int) -> MtpHeads:
    """The first `most` heads of `model` or all, with weights from its own checkpoint. Raises Unavailable."""
    if not isinstance(model, TransformersModel):
        raise Unavailable(f"{model.spec.architecture} has no heads that transformers could load")
    module = model.module
    _refuse(module)
    try:
        with _named_heads(module):
            heads: Any = MtpModel.from_pretrained(module, device_map={"": module.device})
        heads = heads.eval().requires_grad_(False)
        heads.layers = heads.layers[:most]
        if any(latent_of(each) is not None for each in module.modules()):
            # Layers of this kind have passed the model's self-check as latents, which take a fraction of the memory.
            absorb_latents(heads)
        layers = _probed(heads, model.spec)
    except Exception as error:
        raise Unavailable(f"its heads cannot be loaded: {one_line(error)}") from error
    return MtpHeads(heads, layers, model.spec)


def _refuse(module: PreTrainedModel) -> None:
    config = module.config.get_text_config()
    kind, count = config.model_type, getattr(config, "num_mtp_layers", None)
    ignored = any("mtp" in pattern for pattern in module._keys_to_ignore_on_load_unexpected or ())
    if count is None and ignored:
        raise Unavailable(f"transformers ignores the mtp.* weights of model type {kind!r}, and has no modules for them")
    if not count:
        raise Unavailable(f"model type {kind!r} has no heads for multi-token prediction")
    if kind not in MTP_TYPES:
        raise Unavailable(f"heads of model type {kind!r} are not proved; these are: {', '.join(MTP_TYPES)}")


@contextmanager
def _named_heads(module: PreTrainedModel) -> Iterator[None]:
    """Tell `transformers` which layers of the checkpoint are heads; it knows the first one of published models only."""
    usual = module._keys_to_ignore_on_load_unexpected
    names: Any = [re.escape(layer) for layer in head_layers(module.config.get_text_config())]
    module._keys_to_ignore_on_load_unexpected = names
    try:
        yield
    finally:
        module._keys_to_ignore_on_load_unexpected = usual


def _probed(heads: MtpModel, spec: ModelSpec) -> tuple[KVLayerSpec, ...]:
    """What each head keeps of a token, from one run over a few."""
    device = heads.device
    probe = ModelProbe(device, spec.context_length, ())
    bind_context(heads.layers, probe)
    places = torch.arange(PROBE_TOKENS, device=device)
    probe.cache.begin(places)
    states = torch.zeros(PROBE_TOKENS, spec.hidden_size, dtype=spec.dtype, device=device)
    with attention_implementation(heads, PROBE), torch.inference_mode():
        for number in range(len(heads.layers)):
            states = _forward(heads, number, probe.cache, places, states, places)
    return tuple(probe.layers[number] for number in range(len(heads.layers)))


def _forward(
    heads: MtpModel, number: int, cache: Any, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[T, H]: what head `number` makes of tokens `ids` and of `states`, [T, H], at places `positions`; packed in a row.

    A head stands at the position of its token, as in `transformers`: one further than its place, and one for each head
    before it.
    """
    at = positions[None] + 1 + number
    made: torch.Tensor = heads.forward_layer(number, states[None], at, cache, input_ids=ids[None])
    return made[0]


def _batch(step: HeadStep, pool: KVPool) -> ForwardBatch:
    """The step as attention backends see it. Keys of a place have the place's own slot."""
    rows, decodes = len(step.prefixes), bool((step.extends == 1).all())
    return ForwardBatch(
        mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
        input_ids=step.ids,
        positions=step.positions,
        rows=step.rows,
        seq_lens=torch.from_numpy(step.prefixes + step.extends),
        out_cache_loc=step.slots,
        last_indices=step.wanted,
        req_to_token=step.table,
        kv_pool=pool,
        num_extend=0 if decodes else rows,
        prefix_lens_host=step.prefixes,
        extend_lens_host=step.extends,
    )
