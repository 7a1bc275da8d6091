"""What operators see of bytes that come: how many, of how many, and soon enough."""

from __future__ import annotations

import io
import time
from itertools import pairwise
from pathlib import Path

import pytest
from huggingface_hub import constants

from service.checkpoints.byte_progress import ByteProgress
from service.checkpoints.download import download
from service.cli.progress import TerminalProgress
from service.process.sizes import shown_of
from tests.unit.service.checkpoints.hub_at_hand import NAME, hub_at_hand


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


def test_a_part_has_the_unit_of_its_whole() -> None:
    assert shown_of(1_200_000, 3_500_000) == "1.2 of 3.5 MB"
    assert shown_of(1_000, 3_500_000_000) == "0.0 of 3.5 GB"
    assert shown_of(12, 900) == "12 of 900 bytes"
    assert shown_of(0, 999_990) == "0.0 of 1.0 MB"


def test_a_terminal_shows_bytes_and_moves_many_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, screen = Clock(monkeypatch), Terminal()
    bytes_come = ByteProgress("downloading", 3_500_000, 0, TerminalProgress(screen))
    bar = bytes_come.bar()(unit="B")
    for _ in range(35):
        clock.now += 0.2
        bar.update(100_000)
    shown = screen.getvalue().split("\r\x1b[K")
    assert "downloading [##########....................] 1.2 of 3.5 MB" in shown
    assert len(shown) > 35 and shown[-1].endswith("] 3.5 of 3.5 MB")


def test_elsewhere_a_line_comes_every_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, log = Clock(monkeypatch), io.StringIO()
    progress = TerminalProgress(log)
    for second in range(35):
        progress.bytes_came("downloading", second * 100_000, 3_500_000)
        clock.now += 1.0
    progress.close()
    lines = [f"downloading: {part} of 3.5 MB" for part in ("1.0", "2.0", "3.0")]
    assert log.getvalue().splitlines() == ["downloading ...", *lines]


def test_a_slow_hub_is_seen_to_send(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library tells of 10 MiB at once unless it is told otherwise, and these are fewer."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10 * 1024 * 1024)
    told: list[float] = []
    with hub_at_hand(checkpoint, tmp_path / "cache", monkeypatch) as hub:
        hub.files["model.safetensors"] = bytes(400_000)
        download(NAME, lambda _, fraction: told.append(fraction))
    assert max(after - before for before, after in pairwise(told)) < 0.1
