"""How an engine stores keys and values: as configured, if its model and its attention backend can.

Carried as it is: prefix reuse and chunks, sliding windows (both pools store alike), latents (MLA), recurrent layers
beside attention (states stay as they are), drafts (what drafts keeps its own keys as it computes them), adapters and
embeddings. The proof at load runs over a pool of numbers as they are computed: its question is whether a model finds
every key, its bar is a thousandth, and rounded keys would hide a wrong page. That the attention that serves writes and
reads codes as they are defined is proved beside it, without such a bar (`core.models.checked_codes`). What codes cost
is measured apart (decision 51).
"""

from __future__ import annotations

import logging

from core.attention.base import AttentionBackend
from core.config import EngineConfig
from core.errors import ConfigError
from core.memory.kv_format import KVFormat
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVPool
from core.models.base import ModelSpec

logger = logging.getLogger(__name__)


def check_kv_format(config: EngineConfig, spec: ModelSpec, attention: type[AttentionBackend]) -> KVFormat:
    """The format that `config` names, told in the log. Raises ConfigError, in one line, where it cannot be had."""
    format = KV_FORMATS[config.model.kv_cache_dtype]
    reason = _why_not(format, spec, attention)
    if reason is not None:
        raise ConfigError(f"kv_cache_dtype={format.name} is not possible: {reason}")
    if format.codes is not None:
        plain, coded = (
            KVPool.bytes_per_token_for(spec.kv_layers, spec.dtype, each) for each in (KV_FORMATS["auto"], format)
        )
        logger.info("keys and values are cached as %s: %d bytes a token instead of %d", format.name, coded, plain)
    return format


def _why_not(format: KVFormat, spec: ModelSpec, attention: type[AttentionBackend]) -> str | None:
    if format.codes is None:
        return None
    if spec.whole_prompts:
        return f"{spec.architecture} is an encoder, which caches nothing"
    if spec.encoder is not None:
        return f"{spec.architecture} is an encoder-decoder, whose cross pages are cached as they are computed"
    reason = attention.why_not_stored(format, spec.dtype)
    return None if reason is None else f"of the attention backend {attention.__name__}, {reason}"
