"""Files that come in parts: what is told of their bytes, who may read them, and which of them are gone on with."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants

from core.errors import ModelLoadError
from service.checkpoints import partial
from service.checkpoints.byte_progress import ByteProgress
from service.checkpoints.download import download
from service.checkpoints.fetching import fetch
from service.checkpoints.partial import PartialFile, fetching_beside, located
from tests.support.fakes import fake_hub
from tests.support.fakes.fake_hub import COMMIT, FakeHub
from tests.unit.service.checkpoints.hub_at_hand import NAME, hub_at_hand, refusal

WEIGHTS = "model.safetensors"
SIZE, CUT = 450_000, 350_000


class Shown:
    """Notes the bytes that a terminal would show."""

    def __init__(self) -> None:
        self.counts, self.totals = list[int](), set[int]()

    def __call__(self, stage: str, fraction: float) -> None:
        raise AssertionError("bytes are told as bytes")

    def bytes_came(self, stage: str, count: int, total: int) -> None:
        self.counts.append(count)
        self.totals.add(total)

    def assert_whole(self) -> None:
        (total,) = self.totals
        assert max(self.counts) == self.counts[-1] == total, (max(self.counts), self.counts[-1], total)


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_at_hand(checkpoint, tmp_path / "cache", monkeypatch) as hub:
        hub.files[WEIGHTS] = os.urandom(SIZE)
        yield hub


def cut_off(hub: FakeHub) -> Path:
    huggingface_hub.snapshot_download("org/name", endpoint=hub.endpoint, ignore_patterns="*.safetensors")
    hub.cut_after, hub.status_after_cut = CUT, 503
    assert "status 503" in refusal()
    hub.status = None
    (left,) = Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    return left


@pytest.mark.parametrize("right", [True, False], ids=["gone on with", "begun anew"])
def test_no_byte_is_shown_twice(hub: FakeHub, right: bool) -> None:
    if not right:
        hub.etags[WEIGHTS] = hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    left = cut_off(hub)
    if not right:
        left.write_bytes(b"0" * left.stat().st_size)
    shown = Shown()
    assert (download(NAME, shown) / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    shown.assert_whole()


def test_what_another_process_has_brought_is_shown_once(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / "etag"
    blob.parent.mkdir()
    blob.write_bytes(b"0" * SIZE)
    shown = Shown()
    PartialFile(WEIGHTS, "http://nowhere", SIZE, blob, tmp_path / "lock", here=100).fetch(
        {}, ByteProgress("stage", SIZE, 100, shown)
    )
    shown.assert_whole()


def test_others_may_read_what_came(hub: FakeHub) -> None:
    before = os.umask(0o022)
    try:
        found = download(NAME, None)
    finally:
        os.umask(before)
    assert (found / WEIGHTS).stat().st_mode & 0o777 == 0o644


def test_weights_are_left_when_what_comes_beside_them_fails(hub: FakeHub, tmp_path: Path) -> None:
    hub.pace = 0.002
    blob, url = tmp_path / "blobs" / "etag", f"{hub.endpoint}/org/name/resolve/main/{WEIGHTS}"
    file = PartialFile(WEIGHTS, url, SIZE, blob, tmp_path / "lock")
    with (
        pytest.raises(ModelLoadError, match="small"),
        fetching_beside([file], {}, ByteProgress("stage", SIZE, 0, None)),
    ):
        raise ModelLoadError("small")
    assert not blob.exists()


def test_the_commit_is_asked_for_and_not_its_branch(hub: FakeHub) -> None:
    download(NAME, None)
    paths = [path for method, path, _ in hub.asked if path.endswith(WEIGHTS)]
    assert paths and all(f"/resolve/{COMMIT}/" in path for path in paths), paths


@pytest.mark.parametrize("off", [True, False])
def test_files_that_come_by_xet_are_left_to_the_library(
    off: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: Any = SimpleNamespace(xet_file_data=object(), etag="etag", size=SIZE)
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", lambda *_, **__: told)
    monkeypatch.setattr(partial, "find_spec", lambda _: object())
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", off)
    local = tmp_path / "models--a" / "snapshots" / COMMIT / WEIGHTS
    file: Any = SimpleNamespace(
        will_download=True, filename=WEIGHTS, file_size=SIZE, commit_hash=COMMIT, local_path=str(local)
    )
    assert [each.name for each in located([file], "org/name", "http://nowhere", {})] == [WEIGHTS] * off


def test_other_weights_of_a_hub_that_refuses_are_refused_too(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is gone, or may not be read any more, is served from the cache at a start, and is no update."""
    found = download(NAME, None)
    monkeypatch.setattr(fake_hub, "COMMIT", "f" * 40)
    for gated in (False, True):
        hub.token, hub.gated = "t", gated
        with pytest.raises(ModelLoadError, match="HF_TOKEN"):
            fetch("org/name@main")
        assert download(NAME, None) == found


def test_an_empty_cache_is_not_said_to_be_old(hub: FakeHub) -> None:
    for status, told in ((401, "HF_TOKEN has to be valid"), (503, "try again later")):
        hub.status = status
        with pytest.raises(ModelLoadError, match=told) as refused:
            fetch("org/name")
        assert "may be old" not in refused.value.message
