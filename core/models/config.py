"""A checkpoint's configuration, read from its JSON files alone: no weights, no code, no network."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from core.errors import ModelLoadError
from core.models.labels import read_labels
from core.types.labels import Labels

log = logging.getLogger(__name__)

MAX_JSON_BYTES = 64 << 20
"""The largest JSON file worth reading; a weight index of a thousand shards stays below."""

CONTEXT_KEYS = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "max_seq_len", "n_ctx"),
    "max_target_positions",
)
SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
QUANTIZATION_KEY = "quantization_config"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """The parts of config.json and generation_config.json that the engine itself needs."""

    path: Path
    model_type: str
    text_type: str
    """The type of what reads tokens in it: mostly the same, unless it also sees or hears."""
    architecture: str
    """The first of `architectures`, else the model type."""
    vocab_size: int
    context_length: int | None
    """Tokens of the longest sequence; None where the files name no limit (models without position embeddings)."""
    dtype: str | None
    """Dtype that the weights were saved in, if the configuration says so."""
    eos_token_ids: tuple[int, ...]
    """All ids that end an output, unchecked, from config.json and generation_config.json, which often differ. `own_ids`
    returns the ones that the model can sample."""
    bos_token_id: int | None
    is_encoder_decoder: bool
    sampling_defaults: Mapping[str, float | int] = field(default_factory=dict)
    """Recommended values of `SAMPLING_KEYS`; `do_sample: false` becomes temperature 0."""
    quantization: Mapping[str, Any] | None = None
    """`quantization_config`, unchanged; None for plain weights."""
    labels: Labels | None = None
    """What its classification head gives numbers for; None for a checkpoint without such a head."""
    pad_token_id: int | None = None
    is_decoder: bool = False
    """Whether the configuration of a model type that can be either asks for a decoder."""
    sees_both_ways: bool = False
    """Whether a model type of decoders is configured to see what comes behind a token too."""


def own_ids(checkpoint: CheckpointConfig, vocab_size: int) -> dict[str, Any]:
    """Arguments `eos_token_ids` and `bos_token_id` of a `ModelSpec` with `vocab_size` logits.

    An id without a logit can never be sampled, so it is left out. Forbidding it for `min_tokens` would index outside
    the logits, which on CUDA ends the process.
    """
    foreign = [token for token in checkpoint.eos_token_ids if not 0 <= token < vocab_size]
    if foreign:
        log.warning("%s: eos_token_id %s is outside the %d logits", checkpoint.path.name, foreign, vocab_size)
    bos = checkpoint.bos_token_id
    return {
        "eos_token_ids": tuple(token for token in checkpoint.eos_token_ids if 0 <= token < vocab_size),
        "bos_token_id": None if bos is None or bos >= vocab_size else bos,
    }


def read_checkpoint_config(directory: str | Path) -> CheckpointConfig:
    """Read `directory`. Raises ModelLoadError, which names the file and the cause in one line.

    A multi-modal configuration keeps its language model in `text_config`. Vocabulary and context come from that part,
    the model type and, where present, the token ids from the outer one.
    """
    path = Path(directory)
    if not path.is_dir():
        raise ModelLoadError(
            f"model directory {path} does not exist" if not path.exists() else f"{path} is no directory"
        )
    if not (path / "config.json").is_file():
        raise ModelLoadError(f"{path} has no config.json, so it is no transformers checkpoint")
    outer = read_json(path / "config.json")
    nested = outer.get("text_config")
    text = {**outer, **nested} if isinstance(nested, dict) else outer
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    sources = (generation, outer, text)
    model_type = outer.get("model_type")
    if not isinstance(model_type, str) or not model_type:
        raise ModelLoadError(f"{path / 'config.json'} names no model_type")
    named = outer.get("architectures")
    architecture = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else model_type
    return CheckpointConfig(
        path=path,
        model_type=model_type,
        text_type=str(text.get("model_type")),
        architecture=architecture,
        vocab_size=_vocab_size(path, text),
        context_length=_context_length(text),
        dtype=_dtype(outer, text),
        eos_token_ids=_eos_ids(sources),
        bos_token_id=next((i for s in sources for i in _numbers(s.get("bos_token_id")) if i >= 0), None),
        is_encoder_decoder=outer.get("is_encoder_decoder") is True,
        sampling_defaults=_sampling_defaults(generation_file, generation),
        quantization=_quantization(path, outer, text),
        labels=read_labels(path / "config.json", outer, architecture),
        pad_token_id=next((i for s in (outer, text) for i in _numbers(s.get("pad_token_id")) if i >= 0), None),
        is_decoder=text.get("is_decoder") is True,
        sees_both_ways=text.get("use_bidirectional_attention") is True,
    )


def read_json(file: Path) -> dict[str, Any]:
    """The object in `file`. Raises ModelLoadError if it is unreadable, too large, not JSON, or not an object."""
    content = _json(file)
    if not isinstance(content, dict):
        raise ModelLoadError(f"{file} must hold a JSON object, not {type(content).__name__}")
    return content


def read_json_list(file: Path) -> list[Any]:
    """As `read_json`, of a file that holds a list."""
    content = _json(file)
    if not isinstance(content, list):
        raise ModelLoadError(f"{file} must hold a JSON list, not {type(content).__name__}")
    return content


def _json(file: Path) -> Any:
    try:
        if file.stat().st_size > MAX_JSON_BYTES:
            raise ModelLoadError(f"{file} is larger than {MAX_JSON_BYTES >> 20} MiB")
        return json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelLoadError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{file} is not valid JSON: {error}") from error


def _vocab_size(path: Path, text: dict[str, Any]) -> int:
    size = _positive(text.get("vocab_size"))
    if size is None:
        raise ModelLoadError(f"{path / 'config.json'} gives no usable vocab_size (got {text.get('vocab_size')!r})")
    return size


def _context_length(text: dict[str, Any]) -> int | None:
    length = next((n for key in CONTEXT_KEYS if (n := _positive(text.get(key))) is not None), None)
    rope = text.get("rope_parameters") or text.get("rope_scaling")
    if length is None or not isinstance(rope, dict):
        return length
    # Longrope swaps all frequencies once the longest sequence of a step passes this length. Beyond it the output of a
    # short request would depend on the other requests in the step. (Gemma nests one dictionary per layer type.)
    for entry in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if entry.get("rope_type", entry.get("type")) in ("longrope", "su"):
            key = "original_max_position_embeddings"
            original = _positive(entry.get(key, text.get(key)))
            length = length if original is None else min(length, original)
    return length


def _dtype(outer: dict[str, Any], text: dict[str, Any]) -> str | None:
    found = next(
        (s[key] for s in (text, outer) for key in ("dtype", "torch_dtype") if isinstance(s.get(key), str)), None
    )
    name = None if found is None else found.removeprefix("torch.")
    return name if name in DTYPES else None


def _quantization(path: Path, outer: dict[str, Any], text: dict[str, Any]) -> dict[str, Any] | None:
    """`quantization_config` from where transformers looks: the outer configuration, else the language model's part."""
    found = next((s[QUANTIZATION_KEY] for s in (outer, text) if s.get(QUANTIZATION_KEY) is not None), None)
    if found is not None and not isinstance(found, dict):
        raise ModelLoadError(f"{path / 'config.json'}: quantization_config must be an object, got {found!r:.100}")
    return found


def _eos_ids(sources: tuple[dict[str, Any], ...]) -> tuple[int, ...]:
    ids = [i for source in sources for i in _numbers(source.get("eos_token_id"))]
    return tuple(dict.fromkeys(ids))


def _numbers(value: Any) -> list[int]:
    """The integers in `value`, which is one number, a list, or None."""
    values = value if isinstance(value, list) else [value]
    return [int(v) for v in values if _is_int(v)]


def _sampling_defaults(file: Path, generation: dict[str, Any]) -> dict[str, float | int]:
    found: dict[str, float | int] = {}
    for key in SAMPLING_KEYS:
        value = generation.get(key)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelLoadError(f"{file}: {key} must be a number, got {value!r}")
        found[key] = int(value) if key == "top_k" else float(value)
    if generation.get("do_sample") is False:
        found["temperature"] = 0.0
    return found


def _positive(value: Any) -> int | None:
    return value if _is_int(value) and value > 0 else None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
