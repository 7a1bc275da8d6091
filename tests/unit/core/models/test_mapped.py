"""What is written over a file of weights, or cut off from it, changes nothing that is served."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from core.attention.torch_native import TorchNativeAttention
from core.config import ModelConfig
from core.models import mapped
from core.models.base import Model
from core.models.hf.self_check import packed_steps, small_pool
from core.models.loader import load_model
from core.models.mapped import own
from core.models.native.family import UpgradingModel
from core.models.native.reading import NotDense
from tests.support.checkpoints import make_checkpoint

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no other system tells what is mapped")


def logits_of(model: Model) -> list[torch.Tensor]:
    ids = [torch.arange(3, 11), torch.arange(20, 25)]
    pool = small_pool(model.spec, CPU)
    return [logits.clone() for _, logits in packed_steps(model, ids, pool, TorchNativeAttention())]


def overwritten(file: Path) -> None:
    """Other numbers in place, as a copy over the file would leave them."""
    with file.open("r+b") as stream:
        header = int.from_bytes(stream.read(8), "little")
        stream.seek(8 + header)
        length = file.stat().st_size - 8 - header
        stream.write(b"\x3f" * length)


@pytest.mark.parametrize("native", ["wait", "off"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3_moe", "qwen3_next", "gpt_oss"])
def test_a_file_that_is_written_over_is_not_seen(
    kind: str, native: str, checkpoint_of: Callable[[str], Path], tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(checkpoint_of(kind), tmp_path / kind))
    model = load_model(ModelConfig(str(directory), dtype="float32", native=native), CPU)
    before = logits_of(model)
    overwritten(directory / "model.safetensors")
    for old, new in zip(before, logits_of(model), strict=True):
        assert torch.equal(old, new)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma4_text"])
def test_large_tables_that_compiled_code_reads_as_they_are(
    kind: str, checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, native_code: None
) -> None:
    """Matrices are packed, and small tensors copied at once: what is left are embeddings, and inputs of each layer."""
    monkeypatch.setattr("core.models.hf.module_tree.SMALL", 512)
    directory = Path(shutil.copytree(checkpoint_of(kind), tmp_path / kind))
    model = load_model(ModelConfig(str(directory), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native
    logits_of(model)
    before = logits_of(model)
    overwritten(directory / "model.safetensors")
    for old, new in zip(before, logits_of(model), strict=True):
        assert torch.equal(old, new)


def test_modules_that_go_on_for_good_leave_their_files(
    checkpoint_of: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compiled code was to pack the matrices, and cannot; from the first step behind that on nothing is read there."""

    def not_dense(*_: object) -> None:
        raise NotDense("it is of another kind")

    monkeypatch.setattr("core.models.hf.module_tree.SMALL", 512)
    monkeypatch.setattr("core.models.native.family.NativeDecoder", not_dense)
    monkeypatch.setattr("core.models.native.family.with_products", lambda *_: None)
    directory = Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "llama"))
    model = load_model(ModelConfig(str(directory), dtype="float32", native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and not model.native
    before = logits_of(model)
    overwritten(directory / "model.safetensors")
    for old, new in zip(before, logits_of(model), strict=True):
        assert torch.equal(old, new)


def test_only_what_is_mapped_is_copied(checkpoint_of: Callable[[str], Path], tmp_path: Path) -> None:
    directory = Path(shutil.copytree(checkpoint_of("llama"), tmp_path / "llama"))
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    size = sum(each.nbytes for each in load_file(directory / "model.safetensors").values())
    assert 0 < own(module, directory, mapped.SMALL // 1024) < size
    assert own(module, tmp_path) == 0, "what lies in other files is left"
    own(module, directory)
    assert own(module, directory) == 0, "what was copied lies in no file"


def test_a_large_embedding_is_copied(tmp_path: Path) -> None:
    """Compiled code reads it where it is, and packs other matrices of its size."""
    directory = make_checkpoint("llama", tmp_path, vocab_size=20_000)
    assert mapped.SMALL < 20_000 * 64
    model = load_model(ModelConfig(str(directory), dtype="float32", native="wait"), CPU)
    before = logits_of(model)
    overwritten(directory / "model.safetensors")
    for old, new in zip(before, logits_of(model), strict=True):
        assert torch.equal(old, new)
