"""Four-bit checkpoints whose layers are called otherwise than the modules that they stand for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.checkpoints import make_checkpoint
from tests.support.packed_int4 import make_packed
from tests.unit.core.models.test_packed_int4 import loaded, together


def test_files_of_the_model_below_its_head_are_read(tmp_path: Path) -> None:
    """They call its layers as that model does. The head has the weights of the embeddings."""
    packed, _ = make_packed(make_checkpoint("llama", tmp_path / "base", tie_word_embeddings=True), tmp_path, "gptq")
    want = together(loaded(packed))
    tensors = load_file(packed / "model.safetensors")
    below = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    assert not below.keys() & tensors.keys()
    save_file(below, packed / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(together(loaded(packed)), want)
