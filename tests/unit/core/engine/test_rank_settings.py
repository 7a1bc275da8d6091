"""Ranks of several machines that differ in what makes them one engine say so, and in nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import EngineConfig, LoraConfig, MemoryConfig, ModelConfig, NodesConfig
from core.engine import rank_settings
from core.engine.rank_settings import check_alike
from core.errors import StartupError

CPU = torch.device("cpu")


class Words:
    """The ranks of three machines, as `rank` sees them. `words`: what each has said."""

    size = 3

    def __init__(self, words: dict[int, str], rank: int) -> None:
        self._words = words
        self.rank = rank

    def say(self, name: str, value: str) -> None:
        self._words[self.rank] = value

    def said(self, rank: int, name: str) -> str:
        return self._words[rank]

    def called(self, rank: int) -> str:
        return f"rank {rank} over there"


def made(folder: Path, **changes: Any) -> EngineConfig:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    found = EngineConfig(model=ModelConfig(str(folder), tensor_parallel=3))
    return dataclasses.replace(found, **changes)


def checked(first: EngineConfig, third: EngineConfig, kinds: tuple[str, str] = ("cpu", "cpu")) -> str:
    """What rank 0 has against rank 2, which has as much against it; rank 1 is as the first."""
    words = dict[int, str]()

    def found(rank: int) -> str:
        config, kind = (third, kinds[1]) if rank == 2 else (first, kinds[0])
        world: Any = Words(words, rank)
        try:
            check_alike(config, torch.device(kind), world)
        except StartupError as error:
            return str(error).partition(": ")[2]
        return ""

    for rank in (1, 2):
        with pytest.raises(KeyError):
            found(rank)  # rank 0 has not said anything yet
    told = found(0)
    assert bool(found(2)) == bool(told) and not found(1)
    return told


def test_ranks_that_are_alike_say_nothing(tmp_path: Path) -> None:
    assert checked(made(tmp_path / "a"), made(tmp_path / "a")) == ""


def test_where_files_are_is_a_machines_own(tmp_path: Path) -> None:
    here, there = made(tmp_path / "a"), made(tmp_path / "b")
    there = dataclasses.replace(there, nodes=NodesConfig(3, 2), seed=7)
    there = dataclasses.replace(there, executor=dataclasses.replace(there.executor, cpu_threads=5))
    assert checked(here, there) == ""


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"memory": MemoryConfig(page_size=32)}, "page_size 32 at rank 2 over there, and 16 at rank 0"),
        ({"lora": LoraConfig(directory="x", max_rank=7)}, "max_lora_rank 7 at rank 2 over there, and 64 at rank 0"),
        ({"lora": LoraConfig((("fr", "/x"),))}, "adapter fr at rank 2 over there, and none at rank 0"),
    ],
)
def test_settings_that_differ_are_named_as_flags_are(tmp_path: Path, changes: Any, told: str) -> None:
    assert checked(made(tmp_path / "a"), made(tmp_path / "a", **changes)) == told


def test_devices_packages_and_weights_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here, there = made(tmp_path / "a"), made(tmp_path / "b")
    assert checked(here, here, ("cpu", "cuda")) == "device cuda at rank 2 over there, and cpu at rank 0"
    (tmp_path / "b" / "model.safetensors").write_bytes(b"12")
    assert checked(here, there).startswith("checkpoint ")
    (tmp_path / "a" / "model.safetensors").write_bytes(b"123")
    assert checked(here, there).startswith("checkpoint "), "of other sizes"
    monkeypatch.setattr(rank_settings, "version", lambda name: "another" if spoiled == [name] else "1")
    words = dict[int, str]()
    for name in ("slipstream", "torch", "transformers"):
        for rank, spoiled in ((1, [name]), (0, [])):  # noqa: B007
            world: Any = Words(words, rank)
            world.size = 2
            with pytest.raises((KeyError, StartupError)) as refused:
                check_alike(here, CPU, world)
        assert f"{name} another at rank 1 over there, and 1 at rank 0" in str(refused.value)
        words.clear()
