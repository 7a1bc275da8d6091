"""Facts about an encoder-decoder beyond its decoder: which inputs it takes, and how outputs begin and end."""

from __future__ import annotations

from dataclasses import dataclass

from core.memory.kv_pool import KVLayerSpec
from core.types.audio_spec import AudioSpec


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """Measures of the encoder's side, and the ids that `transformers.generate` puts around an output by itself."""

    max_tokens: int
    """The longest input that the encoder has positions for."""
    cross_layers: tuple[KVLayerSpec, ...]
    """Keys and values that the decoder's layers keep of each encoder token; layer ids are the decoder's."""
    start_ids: tuple[int, ...]
    """The decoder's prompt: `decoder_start_token_id`."""
    forced_first: tuple[int, ...] = ()
    """The first output is one of these, if there are any: `forced_bos_token_id`, a target language for instance."""
    forced_last: tuple[int, ...] = ()
    """The output that reaches max_tokens is one of these, if there are any: `forced_eos_token_id`."""
    audio: AudioSpec | None = None
    """Set where the encoder reads sound and no ids: every input then has `audio.positions` tokens."""

    def __post_init__(self) -> None:
        assert self.max_tokens >= 1, self.max_tokens
        assert self.cross_layers and self.start_ids, "a decoder that reads no encoder, or starts from nothing"
