"""Damaged weight files are found by reading headers, and named."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from core.errors import ModelLoadError
from core.models.weights import INDEX_FILE, SINGLE_FILE, check_weight_files


def write_single(directory: Path) -> Path:
    file = directory / SINGLE_FILE
    save_file({"a": torch.ones(4, 3), "b": torch.ones(5, dtype=torch.bfloat16), "c": torch.ones(0)}, file)
    return file


def write_sharded(directory: Path) -> tuple[Path, Path]:
    first, second = directory / "model-00001-of-00002.safetensors", directory / "model-00002-of-00002.safetensors"
    save_file({"a": torch.ones(4, 3)}, first)
    save_file({"b": torch.ones(5)}, second)
    write_index(directory, {"a": first.name, "b": second.name})
    return first, second


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def write_raw(file: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + data)


def entry(start: int, end: int, shape: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refusal(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        check_weight_files(directory)
    assert "\n" not in caught.value.message
    return caught.value.message


def test_whole_files_pass_and_are_counted(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    found = check_weight_files(tmp_path)
    assert (found.shards, found.nbytes) == ((file,), 4 * 3 * 4 + 5 * 2)


def test_whole_shards_pass_and_are_counted(tmp_path: Path) -> None:
    shards = write_sharded(tmp_path)
    found = check_weight_files(tmp_path)
    assert (set(found.shards), found.nbytes) == (set(shards), 4 * 3 * 4 + 5 * 4)


def test_every_truncation_is_found(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    whole = file.read_bytes()
    for size in range(len(whole)):
        file.write_bytes(whole[:size])
        assert f"{file} is truncated" in refusal(tmp_path), size


def test_trailing_bytes_are_found(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    file.write_bytes(file.read_bytes() + b"x")
    assert "1 bytes belong to no tensor" in refusal(tmp_path)


def test_random_damage_to_the_header_never_crashes(tmp_path: Path) -> None:
    file = write_single(tmp_path)
    whole = bytearray(file.read_bytes())
    (length,) = struct.unpack("<Q", whole[:8])
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed={seed}")
    draw = random.Random(seed)
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(draw.randint(1, 4)):
            damaged[draw.randrange(8 + length)] = draw.randrange(256)
        file.write_bytes(damaged)
        try:
            check_weight_files(tmp_path)
        except ModelLoadError as error:
            assert str(file) in error.message
            assert "\n" not in error.message


@pytest.mark.parametrize(
    ("header", "data", "cause"),
    [
        (b"not json", b"", "header is not valid JSON"),
        (b"\xff\xff", b"", "header is not valid JSON"),
        ([1], b"", "no JSON object"),
        ({"a": entry(0, 8, [2])}, b"\0" * 4, "truncated: its tensors need 8 bytes, it holds 4"),
        ({"a": entry(0, 8, [3])}, b"\0" * 8, "tensor 'a' has 8 bytes for F32 of shape"),
        ({"a": entry(4, 8, [1])}, b"\0" * 8, "tensor 'a' starts at byte 4, expected 0"),
        ({"a": entry(0, 8, [2]), "b": entry(4, 12, [2])}, b"\0" * 12, "tensor 'b' starts at byte 4, expected 8"),
        ({"a": entry(8, 0, [2])}, b"\0" * 8, "tensor 'a' has -8 bytes"),
        ({"a": entry(0, 8, [-2])}, b"\0" * 8, "tensor 'a' is malformed"),
        ({"a": entry(0, 8, 2)}, b"\0" * 8, "tensor 'a' is malformed"),
        ({"a": {"dtype": "F32"}}, b"", "tensor 'a' is malformed"),
        ({"a": entry(0, 8, [2], ["F32"])}, b"\0" * 8, "tensor 'a' is malformed"),
        ({"a": 5}, b"", "tensor 'a' is malformed"),
    ],
)
def test_corrupt_headers_are_named(tmp_path: Path, header: Any, data: bytes, cause: str) -> None:
    write_raw(tmp_path / SINGLE_FILE, header, data)
    message = refusal(tmp_path)
    assert cause in message
    assert SINGLE_FILE in message


def test_absurd_header_length_reads_nothing(tmp_path: Path) -> None:
    (tmp_path / SINGLE_FILE).write_bytes(struct.pack("<Q", 2**63) + b"{}")
    assert "claims a header of" in refusal(tmp_path)


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    _, second = write_sharded(tmp_path)
    second.write_bytes(second.read_bytes()[:-3])
    assert second.name in refusal(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    _, second = write_sharded(tmp_path)
    second.unlink()
    message = refusal(tmp_path)
    assert second.name in message
    assert "lacks" in message


def test_tensor_missing_from_its_shard_is_named(tmp_path: Path) -> None:
    first, second = write_sharded(tmp_path)
    write_index(tmp_path, {"a": first.name, "b": second.name, "d": second.name})
    assert f"{second} lacks tensor 'd'" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere.safetensors", "/etc/passwd", "sub/x.safetensors", "", "..", 7])
def test_index_may_not_lead_out_of_the_directory(tmp_path: Path, name: Any) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": name})
    assert "is no file name" in refusal(tmp_path)


@pytest.mark.parametrize("weight_map", [None, [], {}])
def test_index_without_a_map(tmp_path: Path, weight_map: Any) -> None:
    write_index(tmp_path, weight_map)
    assert "no weight_map" in refusal(tmp_path)


def test_nothing_and_only_pickles(tmp_path: Path) -> None:
    assert f"has no {SINGLE_FILE}" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    assert "only pytorch_model.bin; weights are read from safetensors files alone" in refusal(tmp_path)


def test_oddly_named_safetensors(tmp_path: Path) -> None:
    write_single(tmp_path).rename(tmp_path / "weights.safetensors")
    assert "weights.safetensors but neither" in refusal(tmp_path)
