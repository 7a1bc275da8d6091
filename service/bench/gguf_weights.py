"""Writes a Llama or Qwen2 checkpoint as a file of llama.cpp, without a tokenizer: benchmarks feed token ids.

Read by the interpreter that has llama.cpp, so it imports nothing of this project, and neither PyTorch nor safetensors.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

ARCHITECTURES = {"llama": "LLAMA", "qwen2": "QWEN2"}
"""`model_type` -> name in gguf's `MODEL_ARCH`."""
FILE_TYPES = {"float32": ("F32", 0), "bfloat16": ("BF16", 32)}
"""By dtype: what matrices are stored as, and the number of such a file. Vectors are always float32."""

Floats = npt.NDArray[np.float32]


def read_safetensors(path: Path) -> Iterator[tuple[str, Floats]]:
    """(name, float32 values) of each tensor. The format is a length, a JSON header, then bytes."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    for name, entry in json.loads(data[8:begin]).items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        raw = data[begin + first : begin + last]
        if entry["dtype"] == "BF16":
            values = (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
        else:
            values = np.frombuffer(raw, np.float32)
        yield name, values.reshape(entry["shape"])


def interleaved(weight: Floats, heads: int) -> Floats:
    """Rows of a rotary projection, whose halves turn together, in llama.cpp's order: pairs side by side."""
    rows, width = weight.shape
    paired = weight.reshape(heads, 2, rows // heads // 2, width).swapaxes(1, 2)
    return np.ascontiguousarray(paired).reshape(rows, width)


def write_gguf(model: Path, out: Path, dtype: str) -> None:
    """Write `out`. Raises KeyError for a model or a dtype that is not in the tables above."""
    gguf: Any = importlib.import_module("gguf")
    config = json.loads((model / "config.json").read_text())
    architecture = getattr(gguf.MODEL_ARCH, ARCHITECTURES[config["model_type"]])
    kind, number = FILE_TYPES[dtype]
    writer = gguf.GGUFWriter(out, config["model_type"])
    _write_shape(writer, config)
    writer.add_file_type(number)
    names = gguf.get_tensor_name_map(architecture, config["num_hidden_layers"])
    types = gguf.GGMLQuantizationType
    for file in sorted(model.glob("*.safetensors")):
        for name, values in read_safetensors(file):
            for part, key in ((".q_proj.", "num_attention_heads"), (".k_proj.", "num_key_value_heads")):
                if config["model_type"] == "llama" and part in name:
                    values = interleaved(values, config[key])
            stored = types.F32 if values.ndim == 1 else getattr(types, kind)
            found = names.get_name(name, try_suffixes=(".weight", ".bias"))
            writer.add_tensor(found, gguf.quants.quantize(values, stored), raw_dtype=stored)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_shape(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    width = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or config
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope["rope_theta"])
    writer.add_rope_dimension_count(width)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
