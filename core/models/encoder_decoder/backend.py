"""Encoder-decoders of transformers as a model family: loaded, proved against their own plain forward, refused by name.

Tokens of an output that are fixed before the model runs (its first, sometimes its second and its last) come from the
checkpoint's generation configuration, as in `transformers.generate`.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForSeq2SeqLM, AutoModelForSpeechSeq2Seq

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.errors import ModelLoadError
from core.memory.companion import DeviceCompanion
from core.memory.cross.cross_pages import CROSS
from core.memory.cross.cross_pool import CrossPool
from core.memory.kv_pool import KVPool
from core.models.base import NO_COMPANIONS, ModelSpec, Progress
from core.models.config import CheckpointConfig, own_ids
from core.models.encoder_decoder.cross_attention import CrossAttention
from core.models.encoder_decoder.encoder_spec import EncoderSpec
from core.models.encoder_decoder.model import EncoderDecoder
from core.models.encoder_decoder.self_check import EncoderReference, check_encoder_decoder, plain_reference
from core.models.hf.module_tree import load_module, one_line
from core.models.mapped import own
from core.models.quantized.registry import method_name
from core.models.registry import SPEECH_TYPES
from core.types.audio_spec import AudioSpec

log = logging.getLogger(__name__)

_GREEDY: Mapping[str, float | int] = {"temperature": 0.0}
UNUSED_OPTIONS = (
    "begin_suppress_tokens",
    "encoder_no_repeat_ngram_size",
    "encoder_repetition_penalty",
    "length_penalty",
    "min_length",
    "min_new_tokens",
    "no_repeat_ngram_size",
    "num_beams",
)
"""Options in generation configurations of such models that `generate` obeys and this server ignores."""


class EncoderDecoderModel:
    """A `core.models.base.Model` around an `EncoderDecoder`."""

    def __init__(self, packed: EncoderDecoder, spec: ModelSpec) -> None:
        self._packed = packed
        self._spec = spec
        self._never: torch.Tensor | None = None
        self.reference: EncoderReference | None = None
        """The logits that it was proved against at load."""

    @property
    def spec(self) -> ModelSpec:
        """Measures of the decoder, and of the encoder's side in `spec.encoder`."""
        return self._spec

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Bind the decoder's pool and the cross pages, which get a sibling of the backend: their plans are others."""
        encoder, cross = self._spec.encoder, companions[CROSS]
        assert encoder is not None and isinstance(cross, CrossPool), type(cross)
        assert kv_pool.layers == self._spec.kv_layers, "the pool was built for another model"
        assert cross.pool.layers == encoder.cross_layers, "the cross pages were built for another model"
        assert kv_pool.dtype == cross.pool.dtype == self._spec.dtype, (kv_pool.dtype, cross.pool.dtype)
        self._packed.bind(attention, CrossAttention(cross, attention.sibling()))

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits at `batch.last_indices`. Encoder inputs of the step are encoded first."""
        logits = self.logits(batch)
        return logits if self._never is None else logits.index_fill_(1, self._never, -torch.inf)

    def logits(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size] as `forward` gives, before ids are forbidden."""
        return self._packed.forward(batch)

    def silence(self, ids: tuple[int, ...], device: torch.device) -> None:
        """Forbid `ids` in all outputs, for instance Marian's padding token, which no other rule forbids."""
        self._never = torch.tensor(ids, device=device) if ids else None


def load_encoder_decoder(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress
) -> EncoderDecoderModel:
    """Load and check. Raises ModelLoadError, which names the model type and what is wrong, in one line."""
    kind = checkpoint.model_type
    if checkpoint.quantization is not None:
        name = method_name(checkpoint.quantization)
        raise ModelLoadError(f"model type {kind!r} with {name} weights is not supported: it is an encoder-decoder")
    auto = AutoModelForSpeechSeq2Seq if kind in SPEECH_TYPES else AutoModelForSeq2SeqLM
    model = load_module(checkpoint, config, device, progress, auto)
    progress("self-check", 0.0)
    try:
        reference = plain_reference(model, _start_ids(model, checkpoint), audio_spec(model))
        never = _never(model)
        loaded = _assemble(model, checkpoint, config, reference.vocab_size)
        _refuse_foreign_ids(loaded, never, model)
        result = check_encoder_decoder(loaded, reference)
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"model type {kind!r} is not supported: {one_line(error)}") from error
    if not result.passed:
        raise ModelLoadError(f"model type {kind!r} is not supported: {result.told}")
    # Not before the check: the plain model has logits for these ids.
    loaded.silence(never, device)
    own(model, checkpoint.path)
    loaded.reference = reference
    progress("self-check", 1.0)
    return loaded


def _refuse_foreign_ids(loaded: EncoderDecoderModel, never: tuple[int, ...], model: PreTrainedModel) -> None:
    """Raise ModelLoadError for fixed ids outside the vocabulary: in a batch they would end the engine."""
    spec, table = loaded.spec, cast(torch.nn.Embedding, model.get_input_embeddings())
    assert spec.encoder is not None
    size = min(spec.vocab_size, table.weight.shape[0])
    named = {
        "decoder_start_token_id": spec.encoder.start_ids,
        "forced_bos_token_id": spec.encoder.forced_first,
        "forced_eos_token_id": spec.encoder.forced_last,
        "bad_words_ids or suppress_tokens": never,
    }
    for name, ids in named.items():
        for token in ids:
            if not 0 <= token < size:
                raise ModelLoadError(f"{spec.name}: {name} has token {token}, outside the vocabulary of {size}")


def _never(model: PreTrainedModel) -> tuple[int, ...]:
    """Single tokens that `generate` suppresses in every step, except forced ones, which it emits nevertheless."""
    generation: Any = model.generation_config
    single = [word[0] for word in generation.bad_words_ids or () if len(word) == 1]
    forced = {*_ids(generation.forced_bos_token_id), *_ids(generation.forced_eos_token_id)}
    return tuple(sorted({*single, *_ids(generation.suppress_tokens)} - forced))


def _assemble(
    model: PreTrainedModel, checkpoint: CheckpointConfig, config: ModelConfig, vocab_size: int
) -> EncoderDecoderModel:
    length = checkpoint.context_length or config.context_length
    if length is None:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'} gives no context length; configure context_length")
    _warn_of_unused(model, checkpoint)
    generation: Any = model.generation_config
    packed, audio = EncoderDecoder(model), audio_spec(model)
    spec = ModelSpec(
        name=checkpoint.path.resolve().name,
        architecture=checkpoint.architecture,
        vocab_size=vocab_size,
        context_length=length,
        dtype=model.dtype,
        kv_layers=packed.kv_layers,
        **own_ids(checkpoint, vocab_size),
        # What is heard is not made up: greedy, unless the checkpoint or the request says otherwise.
        sampling_defaults={**(_GREEDY if audio is not None else {}), **checkpoint.sampling_defaults},
        encoder=EncoderSpec(
            max_tokens=length if audio is None else audio.positions,
            cross_layers=packed.kv_layers,
            start_ids=_start_ids(model, checkpoint),
            forced_first=_ids(generation.forced_bos_token_id),
            forced_last=_ids(generation.forced_eos_token_id),
            audio=audio,
        ),
        capturable=True,
    )
    return EncoderDecoderModel(packed, spec)


def audio_spec(model: PreTrainedModel) -> AudioSpec | None:
    """What its encoder hears; None for one that reads ids."""
    config: Any = model.config
    if config.model_type not in SPEECH_TYPES:
        return None
    generation: Any = model.generation_config
    named = {} if not getattr(generation, "is_multilingual", False) else dict(getattr(generation, "lang_to_id", {}))
    return AudioSpec(
        mels=config.num_mel_bins,
        frames=2 * config.max_source_positions,
        positions=config.max_source_positions,
        languages={name.strip("<|>"): token for name, token in named.items()},
        tasks=dict(getattr(generation, "task_to_id", {})) if named else {},
        no_timestamps=getattr(generation, "no_timestamps_token_id", None),
        not_first=_ids(getattr(generation, "begin_suppress_tokens", None)),
    )


def _start_ids(model: PreTrainedModel, checkpoint: CheckpointConfig) -> tuple[int, ...]:
    generation: Any = model.generation_config
    start = generation.decoder_start_token_id
    found = _ids(generation.bos_token_id if start is None else start)[:1]
    if not found:
        raise ModelLoadError(f"{checkpoint.path} names no decoder_start_token_id, so outputs start from nothing")
    return found


def _ids(value: Any) -> tuple[int, ...]:
    """Token ids given as one number, a list, or not at all."""
    if value is None:
        return ()
    return tuple(int(item) for item in value) if isinstance(value, list | tuple) else (int(value),)


def _warn_of_unused(model: PreTrainedModel, checkpoint: CheckpointConfig) -> None:
    """Log which recommended options are ignored, often beam search: with them `generate` gives other outputs."""
    asked = model.generation_config.to_diff_dict()
    if audio_spec(model) is not None:
        asked.pop("begin_suppress_tokens", None)
    found = [f"{name}={asked[name]!r}" for name in UNUSED_OPTIONS if asked.get(name) is not None]
    found += [f"bad_words_ids={word!r}" for word in asked.get("bad_words_ids") or () if len(word) > 1]
    if found:
        log.warning("%s: generation options that are not used here: %s", checkpoint.path.name, ", ".join(found))
