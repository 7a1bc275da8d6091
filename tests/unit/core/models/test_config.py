"""What a checkpoint's JSON files say, and what is said when they say nonsense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from core.errors import ModelLoadError
from core.models.config import CheckpointConfig, own_ids, read_checkpoint_config

PLAIN = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 100}


def read(path: Path, config: Any, generation: Any = None) -> CheckpointConfig:
    (path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return read_checkpoint_config(path)


def test_reads_the_common_case(tmp_path: Path) -> None:
    config = {**PLAIN, "max_position_embeddings": 64, "eos_token_id": 2, "bos_token_id": 1, "torch_dtype": "bfloat16"}
    found = read(tmp_path, config)
    assert (found.model_type, found.architecture) == ("llama", "LlamaForCausalLM")
    assert (found.vocab_size, found.context_length, found.dtype) == (100, 64, "bfloat16")
    assert (found.eos_token_ids, found.bos_token_id) == ((2,), 1)
    assert not found.is_encoder_decoder
    assert found.sampling_defaults == {}


@pytest.mark.parametrize("key", ["n_positions", "max_position_embeddings", "max_seq_len", "n_ctx"])
def test_context_length_by_its_older_names(tmp_path: Path, key: str) -> None:
    assert read(tmp_path, {**PLAIN, key: 77}).context_length == 77


def test_no_context_length_is_none(tmp_path: Path) -> None:
    assert read(tmp_path, PLAIN).context_length is None
    assert read(tmp_path, {**PLAIN, "max_position_embeddings": None}).context_length is None
    assert read(tmp_path, {**PLAIN, "max_position_embeddings": True}).context_length is None


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 40}},
        {"rope_scaling": {"type": "su"}, "original_max_position_embeddings": 40},
        {"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 40},
        {"rope_parameters": {"full_attention": {"rope_type": "longrope", "original_max_position_embeddings": 40}}},
    ],
)
def test_longrope_ends_where_its_frequencies_would_change(tmp_path: Path, rope: dict[str, Any]) -> None:
    assert read(tmp_path, {**PLAIN, "max_position_embeddings": 64, **rope}).context_length == 40


def test_other_rope_scaling_keeps_the_context(tmp_path: Path) -> None:
    rope = {"rope_type": "yarn", "original_max_position_embeddings": 40}
    assert read(tmp_path, {**PLAIN, "max_position_embeddings": 64, "rope_parameters": rope}).context_length == 64


def test_eos_ids_of_both_files_end_an_output(tmp_path: Path) -> None:
    found = read(tmp_path, {**PLAIN, "eos_token_id": [7, 8]}, {"eos_token_id": [9, 7], "bos_token_id": 3})
    assert found.eos_token_ids == (9, 7, 8)
    assert found.bos_token_id == 3
    assert read(tmp_path, {**PLAIN, "eos_token_id": None}, {}).eos_token_ids == ()


def test_nested_text_config_gives_vocabulary_and_context(tmp_path: Path) -> None:
    text = {"model_type": "gemma3_text", "vocab_size": 50, "max_position_embeddings": 32, "dtype": "bfloat16"}
    found = read(tmp_path, {"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (found.model_type, found.architecture) == ("gemma3", "gemma3")
    assert (found.vocab_size, found.context_length, found.dtype) == (50, 32, "bfloat16")
    assert found.eos_token_ids == (1, 106)


def test_sampling_defaults_are_the_authors(tmp_path: Path) -> None:
    generation = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "min_p": None, "repetition_penalty": 1.05}
    found = read(tmp_path, PLAIN, {**generation, "do_sample": True, "max_length": 20})
    assert found.sampling_defaults == {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def test_do_sample_false_is_greedy(tmp_path: Path) -> None:
    assert read(tmp_path, PLAIN, {"do_sample": False, "temperature": 0.9}).sampling_defaults == {"temperature": 0.0}


@pytest.mark.parametrize(
    ("config", "generation", "cause"),
    [
        ([], None, "config.json must hold a JSON object"),
        ({"vocab_size": 3}, None, "names no model_type"),
        ({"model_type": ["llama"], "vocab_size": 3}, None, "names no model_type"),
        ({"model_type": "llama"}, None, "no usable vocab_size"),
        ({"model_type": "llama", "vocab_size": "many"}, None, "no usable vocab_size .got 'many'"),
        ({"model_type": "llama", "vocab_size": -1}, None, "no usable vocab_size"),
        (PLAIN, {"temperature": "hot"}, "generation_config.json: temperature must be a number"),
        (PLAIN, {"top_k": True}, "generation_config.json: top_k must be a number"),
        (PLAIN, [1], "generation_config.json must hold a JSON object"),
    ],
)
def test_nonsense_is_one_line(tmp_path: Path, config: Any, generation: Any, cause: str) -> None:
    with pytest.raises(ModelLoadError, match=cause) as caught:
        read(tmp_path, config, generation)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("content", [b"", b"{", b'{"a": 1', b"\xff\xfe", b"[" * 100_000])
def test_broken_json_names_the_file(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"config\.json is not valid JSON") as caught:
        read_checkpoint_config(tmp_path)
    assert "\n" not in caught.value.message


def test_missing_directory_and_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere does not exist"):
        read_checkpoint_config(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(ModelLoadError, match="is no directory"):
        read_checkpoint_config(tmp_path / "file")
    with pytest.raises(ModelLoadError, match=r"has no config\.json"):
        read_checkpoint_config(tmp_path)


def test_ends_without_a_logit_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = read(tmp_path, {**PLAIN, "eos_token_id": [7, 2**40], "bos_token_id": 3}, {"eos_token_id": 64})
    assert own_ids(found, 64) == {"eos_token_ids": (7,), "bos_token_id": 3}
    assert "[64, 1099511627776] is outside the 64 logits" in caplog.text
    assert own_ids(found, 3) == {"eos_token_ids": (), "bos_token_id": None}


def test_a_negative_end_is_left_out_and_told_like_one_that_is_too_large(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = read(tmp_path, {**PLAIN, "eos_token_id": 7, "bos_token_id": 3}, {"eos_token_id": -1, "bos_token_id": -1})
    assert own_ids(found, 64) == {"eos_token_ids": (7,), "bos_token_id": 3}
    assert "eos_token_id [-1] is outside the 64 logits" in caplog.text
