"""A bad checkpoint is refused quickly, in one line that names the cause; code beside the weights never runs."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.loader import check_checkpoint, check_parts, load_model
from core.models.registry import MODEL_FAMILIES, family_of, model_factory
from tests.support.checkpoints import CONTEXT_LENGTH, make_checkpoint
from tests.support.vision_checkpoints import make_vision_checkpoint
from tests.unit.core.models.reference import CPU, load

Make = Callable[[str], Path]
VAST_BYTES = 1 << 31


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return make_checkpoint("llama", tmp_path / "llama")


def edit_config(directory: Path, **changes: Any) -> None:
    file = directory / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_weights(directory: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    file = directory / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(directory)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_check_reads_no_weights(llama: Path) -> None:
    """Behind the same header lie 2 GiB, none of which is on the disk."""
    file = llama / "model.safetensors"
    header = json.loads(file.read_bytes()[8 : 8 + struct.unpack("<Q", file.read_bytes()[:8])[0]])
    begin = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    header["vast"] = {"dtype": "U8", "shape": [VAST_BYTES], "data_offsets": [begin, begin + VAST_BYTES]}
    text = json.dumps(header).encode()
    with file.open("wb") as written:
        written.write(struct.pack("<Q", len(text)) + text)
        written.truncate(8 + len(text) + begin + VAST_BYTES)
    before = bytes_read()
    assert check_checkpoint(llama).model_type == "llama"
    assert bytes_read() - before < VAST_BYTES // 1000


def bytes_read() -> int:
    """By this process, from files or caches, as the system counts."""
    (line,) = (line for line in Path("/proc/self/io").read_text().splitlines() if line.startswith("rchar:"))
    return int(line.split()[1])


def test_progress_names_every_stage_from_start_to_end(llama: Path) -> None:
    seen: list[tuple[str, float]] = []
    load_model(ModelConfig(str(llama), native="off"), CPU, lambda stage, fraction: seen.append((stage, fraction)))
    assert seen == [(stage, part) for stage in ("check", "weights", "self-check") for part in (0.0, 1.0)]


def test_auto_dtype_is_float32_on_the_cpu(llama: Path) -> None:
    edit_config(llama, dtype="bfloat16")
    assert load(llama, "auto").spec.dtype == torch.float32
    assert load(llama, "bfloat16").spec.dtype == torch.bfloat16


def test_unknown_model_type(llama: Path) -> None:
    edit_config(llama, model_type="quux")
    assert "model type 'quux' is unknown" in refusal(llama)


@pytest.mark.parametrize("known", [True, False])
def test_code_beside_the_weights_never_runs(llama: Path, known: bool) -> None:
    ran = llama / "ran"
    (llama / "modeling_evil.py").write_text(f"open({str(ran)!r}, 'w').close()\nraise SystemExit\n")
    auto_map = {"AutoConfig": "modeling_evil.Config", "AutoModelForCausalLM": "modeling_evil.Model"}
    edit_config(llama, auto_map=auto_map, **({} if known else {"model_type": "evil"}))
    if known:
        load(llama)
    else:
        assert "code from checkpoints is never run" in refusal(llama)
    assert not ran.exists()


def test_encoder_decoders_and_encoders(llama: Path) -> None:
    edit_config(llama, model_type="led")
    assert "'led' is not supported: it is an encoder-decoder" in refusal(llama)
    edit_config(llama, model_type="vit")
    assert "'vit' is not supported: transformers has no causal language model" in refusal(llama)
    edit_config(llama, model_type="llama", is_encoder_decoder=True)
    assert "encoder-decoder" in refusal(llama)


def test_missing_weights_are_not_made_up(llama: Path) -> None:
    edit_weights(llama, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "missing weights model.layers.1.mlp.up_proj.weight" in refusal(llama)


def test_weights_without_a_place_are_not_dropped(llama: Path) -> None:
    edit_weights(llama, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}))
    assert "unexpected weights model.layers.0.self_attn.q_proj.bias" in refusal(llama)


def test_weights_of_another_shape(llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line, without the tables that transformers has beside it; what it says otherwise is still heard."""
    edit_weights(llama, lambda t: t.update({"model.norm.weight": torch.zeros(63)}))
    library = logging.getLogger("transformers")
    reporters = [library.getChild(name) for name in ("modeling_utils", "distributed.tensor_parallel")]
    heard = [each.level for each in reporters]
    library.addHandler(caplog.handler)
    try:
        message = refusal(llama)
    finally:
        library.removeHandler(caplog.handler)
    assert "llama" in message
    assert (caplog.records, [each.level for each in reporters]) == ([], heard)


def test_tied_output_matrix_may_be_absent(checkpoint: Make) -> None:
    path = checkpoint("qwen2")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    load(path)


def test_truncated_weights_are_refused_before_loading(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = llama / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    loaded: list[object] = []
    monkeypatch.setattr("core.models.loader.model_factory", loaded.append)
    assert "model.safetensors is truncated" in refusal(llama)
    assert not loaded


def test_invalid_configuration_values(llama: Path) -> None:
    edit_config(llama, num_attention_heads=3)
    assert "llama" in refusal(llama)


def test_context_length_comes_from_the_checkpoint_or_from_configuration(llama: Path) -> None:
    assert load(llama).spec.context_length == CONTEXT_LENGTH
    with pytest.raises(ModelLoadError, match=f"context_length 9999 is more than the {CONTEXT_LENGTH}"):
        load_model(ModelConfig(str(llama), context_length=9999), CPU)
    # Shorter is the engine's business: pools are sized by it, the model is the same.
    assert load_model(ModelConfig(str(llama), context_length=32), CPU).spec.context_length == CONTEXT_LENGTH


def test_every_family_can_be_imported() -> None:
    assert (family_of("llama"), family_of("never heard of")) == ("native", "transformers")
    assert all(callable(model_factory(name)) for name in MODEL_FAMILIES)


def test_ranks_share_a_model_that_sees_where_its_text_has_a_class(tmp_path: Path) -> None:
    check_parts(ModelConfig(str(make_vision_checkpoint("qwen3_5", tmp_path / "text")), tensor_parallel=2))
    whole = make_vision_checkpoint("gemma3", tmp_path / "whole")
    with pytest.raises(ModelLoadError, match="tensor_parallel is not possible with 'gemma3' yet: it reads images"):
        check_parts(ModelConfig(str(whole), tensor_parallel=2))
