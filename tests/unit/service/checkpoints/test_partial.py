"""Weights that were cut off: the next start asks for what is missing, and takes what is there only if it is right."""

from __future__ import annotations

import hashlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

from service.checkpoints import download as downloads
from service.checkpoints.byte_progress import ByteProgress
from service.checkpoints.download import download
from service.checkpoints.partial import PartialFile, located
from tests.support.fakes.fake_hub import FakeHub
from tests.unit.service.checkpoints.hub_at_hand import NAME, hub_at_hand, refusal

WEIGHTS = "model.safetensors"
SIZE, CUT = 450_000, 350_000


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_at_hand(checkpoint, tmp_path / "cache", monkeypatch) as hub:
        hub.files[WEIGHTS] = os.urandom(SIZE)
        yield hub


def cut_off(hub: FakeHub) -> Path:
    """What the first start leaves of the weights, behind which the hub fails."""
    # The small files are there: one of them that fails would have the weights left sooner.
    huggingface_hub.snapshot_download("org/name", endpoint=hub.endpoint, ignore_patterns="*.safetensors")
    hub.cut_after, hub.status_after_cut = CUT, 503
    assert "status 503" in refusal()
    hub.status = None
    hub.asked.clear()
    (left,) = Path(constants.HF_HUB_CACHE).rglob("*.incomplete")
    return left


def asked(hub: FakeHub) -> list[str]:
    """The ranges of the weights that were asked for."""
    return [part for method, path, part in hub.asked if method == "GET" and path.endswith(WEIGHTS)]


def whole(hub: FakeHub, found: Path) -> bool:
    left = list(Path(constants.HF_HUB_CACHE).rglob("*.incomplete"))
    return (found / WEIGHTS).read_bytes() == hub.files[WEIGHTS] and not left


def test_the_next_start_goes_on_where_the_last_one_ended(hub: FakeHub) -> None:
    left = cut_off(hub)
    present = left.stat().st_size
    assert CUT - downloads.PIECE_BYTES <= present <= CUT
    told: list[float] = []
    found = download(NAME, lambda _, fraction: told.append(fraction))
    assert whole(hub, found) and asked(hub) == [f"bytes={present}-"]
    total = sum(path.stat().st_size for path in found.iterdir())
    assert told[0] >= present / total and told == sorted(told) and told[-1] == 1.0


def test_what_is_here_needs_no_space(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    cut_off(hub)
    usage = shutil.disk_usage("/")
    free = downloads.MARGIN_BYTES + SIZE - CUT + 2 * downloads.PIECE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=free))
    assert whole(hub, download(NAME, None))


def test_a_part_that_is_too_long_is_of_another_file(hub: FakeHub) -> None:
    left = cut_off(hub)
    left.write_bytes(b"0" * (SIZE + 1))
    assert whole(hub, download(NAME, None)) and asked(hub) == [""]


def test_a_part_with_other_bytes_is_found_by_its_hash(hub: FakeHub) -> None:
    hub.etags[WEIGHTS] = hashlib.sha256(hub.files[WEIGHTS]).hexdigest()
    left = cut_off(hub)
    present = left.stat().st_size
    left.write_bytes(b"0" * present)
    told: list[float] = []
    assert whole(hub, download(NAME, lambda _, fraction: told.append(fraction)))
    assert asked(hub) == [f"bytes={present}-", ""] and told[-1] == 1.0


def test_a_part_that_is_all_of_the_file_is_taken(hub: FakeHub) -> None:
    left = cut_off(hub)
    left.write_bytes(hub.files[WEIGHTS])
    assert whole(hub, download(NAME, None)) and asked(hub) == []


def test_a_hub_that_sends_no_parts_sends_the_file(hub: FakeHub) -> None:
    cut_off(hub)
    hub.ranges = False
    told: list[float] = []
    assert whole(hub, download(NAME, lambda _, fraction: told.append(fraction)))
    assert told[-1] == 1.0 and max(told[:-1]) <= 1.0


def test_an_etag_that_leads_elsewhere_names_no_file(hub: FakeHub) -> None:
    def names() -> list[str]:
        files = huggingface_hub.snapshot_download("org/name", endpoint=hub.endpoint, dry_run=True)
        assert isinstance(files, list)
        return [each.name for each in located(files, "org/name", hub.endpoint, {})]

    assert names() == [WEIGHTS]
    for etag in ("..", ".", "a%2Fb/c"):
        hub.etags[WEIGHTS] = etag
        assert names() == []


def test_two_that_fetch_the_same_do_it_once(hub: FakeHub) -> None:
    hub.held = threading.Event()
    found: list[Path] = []
    both = [threading.Thread(target=lambda: found.append(download(NAME, None))) for _ in range(2)]
    for each in both:
        each.start()
    hub.held.set()
    for each in both:
        each.join()
    assert found[0] == found[1] and whole(hub, found[0]) and asked(hub) == [""]


def test_where_locks_do_not_hold_each_writes_the_same_bytes_to_the_same_places(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On some network disks every process gets the lock."""
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 1000)
    data, url = hub.files[WEIGHTS], f"{hub.endpoint}/org/name/resolve/main/{WEIGHTS}"
    blob = tmp_path / "blobs" / "etag"
    hub.pace = 0.0001
    files = [PartialFile(WEIGHTS, url, SIZE, blob, tmp_path / f"lock-{number}") for number in range(4)]
    threads = [threading.Thread(target=each.fetch, args=({}, ByteProgress("stage", SIZE, 0, None))) for each in files]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert blob.read_bytes() == data and not list(tmp_path.rglob("*.incomplete"))


def test_if_one_file_fails_the_others_are_left(hub: FakeHub) -> None:
    hub.files["model-2.safetensors"] = os.urandom(SIZE)
    hub.pace, hub.cut_after, hub.status_after_cut = 0.005, 30_000, 503
    assert "status 503" in refusal()
    left = [path.stat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("*.incomplete")]
    assert len(left) == 2 and max(left) < SIZE
