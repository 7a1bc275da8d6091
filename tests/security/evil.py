"""Ways to make a checkpoint directory hostile. Each takes a good directory, and the path of a canary that no code of it
may create."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

Spoil = Callable[[Path, Path], None]

WEIGHTS = "model.safetensors"


class Canary:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


def edit(file: Path, **changes: Any) -> None:
    """Change keys of a JSON file; None removes one."""
    content = json.loads(file.read_text()) if file.exists() else {}
    content |= changes
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def source(path: Path) -> str:
    """A module that creates the canary when it is imported."""
    return f"open({str(path)!r}, 'w')\nclass Evil:\n    pass\nclass EvilConfig:\n    model_type = 'evil'\n"


def auto_map(folder: Path, canary: Path) -> None:
    for name in ("modeling_evil", "configuration_evil", "tokenization_evil"):
        (folder / f"{name}.py").write_text(source(canary))
    names = {"AutoConfig": "configuration_evil.EvilConfig", "AutoModelForCausalLM": "modeling_evil.Evil"}
    edit(folder / "config.json", auto_map=names)
    tokenizer = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    edit(folder / "tokenizer_config.json", auto_map=tokenizer)


def auto_map_of_an_unknown_type(folder: Path, canary: Path) -> None:
    auto_map(folder, canary)
    edit(folder / "config.json", model_type="evil", architectures=["Evil"])


def unknown_tokenizer_class(folder: Path, canary: Path) -> None:
    auto_map(folder, canary)
    edit(folder / "tokenizer_config.json", tokenizer_class="Evil")
    (folder / "tokenizer.json").unlink()


def custom_generate(folder: Path, canary: Path) -> None:
    (folder / "custom_generate").mkdir()
    (folder / "custom_generate" / "generate.py").write_text(source(canary) + "def generate(*_, **__): pass\n")
    edit(folder / "generation_config.json", custom_generate=str(folder), trust_remote_code=True)


def pickles_beside(folder: Path, canary: Path) -> None:
    for name in ("pytorch_model.bin", "model.pt", "consolidated.00.pth", "training_args.bin", "tokenizer.pkl"):
        (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    edit(folder / "pytorch_model.bin.index.json", weight_map={"lm_head.weight": "pytorch_model.bin"})


def pickles_only(folder: Path, canary: Path) -> None:
    pickles_beside(folder, canary)
    (folder / WEIGHTS).unlink()


def adapter_beside(folder: Path, canary: Path) -> None:
    (folder / "adapter_model.bin").write_bytes(pickle.dumps(Canary(canary)))
    edit(folder / "adapter_config.json", base_model_name_or_path="example/remote", peft_type="LORA", auto_mapping=None)


def pickle_named_safetensors(folder: Path, canary: Path) -> None:
    (folder / WEIGHTS).write_bytes(pickle.dumps(Canary(canary)))


def index_out_of_the_directory(folder: Path, _: Path) -> None:
    (folder.parent / "outside.safetensors").write_bytes((folder / WEIGHTS).read_bytes())
    (folder / WEIGHTS).unlink()
    edit(folder / f"{WEIGHTS}.index.json", weight_map={"lm_head.weight": "../outside.safetensors"})


def index_to_an_absolute_path(folder: Path, _: Path) -> None:
    index_out_of_the_directory(folder, _)
    outside = str(folder.parent / "outside.safetensors")
    edit(folder / f"{WEIGHTS}.index.json", weight_map={"lm_head.weight": outside})


def weights_are_a_device(folder: Path, _: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to("/dev/zero")


def weights_are_a_pipe(folder: Path, _: Path) -> None:
    (folder / WEIGHTS).unlink()
    os.mkfifo(folder / WEIGHTS)


def config_is_a_device(folder: Path, _: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def parts(folder: Path) -> tuple[dict[str, Any], bytes]:
    """Header and data of the weights."""
    raw = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write(folder: Path, header: str, data: bytes) -> None:
    """Weights of this header and data."""
    encoded = header.encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(encoded)) + encoded + data)


def huge_header(folder: Path, _: Path) -> None:
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**62) + b"{}")


def deep_header(folder: Path, _: Path) -> None:
    write(folder, "[" * 200_000 + "]" * 200_000, b"")


def deep_index(folder: Path, _: Path) -> None:
    (folder / f"{WEIGHTS}.index.json").write_text("[" * 200_000 + "]" * 200_000)


def truncated(folder: Path, _: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(raw[: len(raw) // 2])


def duplicate_names(folder: Path, _: Path) -> None:
    header, data = parts(folder)
    name = next(name for name in header if name != "__metadata__")
    text = json.dumps(header)
    write(folder, text[:-1] + f", {json.dumps(name)}: {json.dumps(header[name])}" + "}", data)


def changed(folder: Path, **changes: Any) -> None:
    """One tensor whose header entry lies."""
    header, data = parts(folder)
    name = sorted(name for name in header if name != "__metadata__")[0]
    header[name] |= changes
    write(folder, json.dumps(header), data)


def overlapping(folder: Path, _: Path) -> None:
    header, data = parts(folder)
    first, second = sorted(name for name in header if name != "__metadata__")[:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    write(folder, json.dumps(header), data)


def shape_that_overflows(folder: Path, _: Path) -> None:
    changed(folder, shape=[2**33, 2**33, 2**33])


def negative_shape(folder: Path, _: Path) -> None:
    changed(folder, shape=[-1, 64])


def offsets_past_the_end(folder: Path, _: Path) -> None:
    changed(folder, data_offsets=[0, 2**63])


def unknown_type(folder: Path, _: Path) -> None:
    changed(folder, dtype="PICKLE")


def dimensions_that_lie(folder: Path, _: Path) -> None:
    edit(folder / "config.json", num_attention_heads=8, head_dim=64)


def vocabulary_that_lies(folder: Path, _: Path) -> None:
    edit(folder / "config.json", vocab_size=4000)


def json_that_is_none(folder: Path, _: Path) -> None:
    (folder / "tokenizer.json").write_text('{"version": ')


REFUSED: tuple[Spoil, ...] = (
    auto_map_of_an_unknown_type,
    pickles_only,
    pickle_named_safetensors,
    index_out_of_the_directory,
    index_to_an_absolute_path,
    weights_are_a_device,
    weights_are_a_pipe,
    config_is_a_device,
    huge_header,
    deep_header,
    deep_index,
    truncated,
    overlapping,
    shape_that_overflows,
    negative_shape,
    offsets_past_the_end,
    unknown_type,
    dimensions_that_lie,
    vocabulary_that_lies,
    json_that_is_none,
)
"""Must not be served."""

SERVED_OR_REFUSED: tuple[Spoil, ...] = (
    auto_map,
    unknown_tokenizer_class,
    custom_generate,
    pickles_beside,
    adapter_beside,
    duplicate_names,
)
"""Hold a good checkpoint too: if it is served, then exactly as without what was added."""
