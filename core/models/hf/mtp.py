"""A head that a checkpoint brings along to say the token after the next: multi-token prediction (DeepSeek-V3, 2024).

It is one more layer of the model's own kind. At each place it takes the model's last hidden state and the token behind,
and says what follows that. So it is a `core.models.eagle.head.Head`, whose features are last hidden states, and behind
the last place that the model has computed it feeds on its own output. The modules are those of `transformers`, which
loads them from the layers that it leaves out of the model itself. Keys and values go through our attention, which needs
no mask.
"""

from __future__ import annotations

from typing import Any, Final

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
from core.models.hf.backend import TransformersModel, one_line
from core.models.hf.mla import absorb_latents, latent_of
from core.models.hf.packed_attention import IMPLEMENTATION, PackedContext, bind_context
from core.models.hf.probe import IMPLEMENTATION as PROBE
from core.models.hf.probe import PROBE_TOKENS, ModelProbe, attention_implementation

MTP_TYPES: Final = ("deepseek_v3", "glm4_moe")
"""Model types whose heads are proved here."""
ONLY: Final = 0
"""The one head, and its layer."""


class Unavailable(Exception):
    """Why a model has no head that drafts, as the end of a sentence."""


class MtpHead:
    """A `Head` on the model's own device. Shares embedding and output matrix with the model."""

    def __init__(self, module: MtpModel, layer: KVLayerSpec, spec: ModelSpec) -> None:
        self._module = module
        self.layer = layer
        """What it keeps of each token."""
        self._spec = spec
        module.config._attn_implementation = IMPLEMENTATION
        self._context = PackedContext(dtype=spec.dtype, spans={ONLY: AttentionSpan()})
        bind_context(module.layers, self._context)
        self._pool: KVPool | None = None

    def bind(self, pool: KVPool, attention: AttentionBackend) -> None:
        """Give it its pool, and a backend that no other model plans with. Called before the first `run`."""
        assert pool.layers == (self.layer,), "the pool was built for another head"
        self._pool, self._context.attention = pool, attention

    @torch.inference_mode()
    def run(self, step: HeadStep) -> tuple[torch.Tensor, torch.Tensor]:
        """See `Head`."""
        assert self._pool is not None, "bind() comes first"
        self._context.begin(_batch(step, self._pool))
        states = _forward(self._module, self._context.cache, step.ids, step.features, step.positions)
        said = self._module.shared_head(states.index_select(0, step.wanted))
        return said[:, : self._spec.vocab_size].float().contiguous(), states


def load_mtp(model: Model) -> MtpHead:
    """The head of `model`, with weights from the model's own checkpoint. Raises Unavailable."""
    if not isinstance(model, TransformersModel):
        raise Unavailable(f"{model.spec.architecture} has no heads that transformers could load")
    module = model.module
    _refuse(module)
    try:
        heads: Any = MtpModel.from_pretrained(module, device_map={"": module.device})
        heads = heads.eval().requires_grad_(False)
        if any(latent_of(each) is not None for each in module.modules()):
            # Layers of this kind have passed the model's self-check as latents, which take a fraction of the memory.
            absorb_latents(heads)
        layer = _probed(heads, model.spec)
    except Exception as error:
        raise Unavailable(f"its head cannot be loaded: {one_line(error)}") from error
    return MtpHead(heads, layer, model.spec)


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
    if count > 1:
        raise Unavailable(f"the model has {count} heads, and one is served")


def _probed(heads: MtpModel, spec: ModelSpec) -> KVLayerSpec:
    """What the head keeps of a token, from one run over a few."""
    device = heads.device
    probe = ModelProbe(device, spec.context_length, ())
    bind_context(heads.layers, probe)
    places = torch.arange(PROBE_TOKENS, device=device)
    probe.cache.begin(places)
    states = torch.zeros(PROBE_TOKENS, spec.hidden_size, dtype=spec.dtype, device=device)
    with attention_implementation(heads, PROBE), torch.inference_mode():
        _forward(heads, probe.cache, places, states, places)
    return probe.layers[ONLY]


def _forward(
    heads: MtpModel, cache: Any, ids: torch.Tensor, states: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """[T, H]: what the head makes of the tokens `ids` behind places with hidden `states`, [T, H], packed in a row."""
    # The token stands one position further than the place whose state goes with it.
    made: torch.Tensor = heads.forward_layer(ONLY, states[None], positions[None] + 1, cache, input_ids=ids[None])
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
