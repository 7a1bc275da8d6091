"""Facts about a model that hears: what its encoder reads, and how a prompt of its decoder begins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class AudioSpec:
    """Measures of the encoder, and ids of the tokens that say what is to be done (Whisper)."""

    mels: int
    """Features of a frame."""
    frames: int
    """Frames that the encoder reads, of which shorter sounds have silence at the end."""
    positions: int
    """Encoder tokens that it makes of them."""
    languages: Mapping[str, int] = field(default_factory=dict)
    """Language, as `en`, -> its token; empty for a model of one language."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """Task, `transcribe` or `translate`, -> its token; empty for a model of one language."""
    no_timestamps: int | None = None
    """The token that asks for text without times."""
    not_first: tuple[int, ...] = ()
    """Tokens that no output begins with: `begin_suppress_tokens`."""
