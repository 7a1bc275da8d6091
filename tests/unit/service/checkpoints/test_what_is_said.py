"""What a person is told of a download that is not as hoped: one line, and what it says is so."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from core.errors import ModelLoadError
from service.checkpoints import download as downloads
from service.checkpoints.download import download
from service.checkpoints.fetching import fetch
from service.checkpoints.files import check_model
from service.checkpoints.model_name import HubModel, pinned
from service.process.sizes import shown
from tests.support.fakes.fake_hub import COMMIT, FakeHub
from tests.unit.service.checkpoints.hub_at_hand import NAME, hub_at_hand, refusal


@pytest.fixture
def hub(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with hub_at_hand(checkpoint, tmp_path / "cache", monkeypatch) as hub:
        yield hub


def taken(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "taken from the cache" in record.getMessage()]


@pytest.mark.parametrize("status", [401, 403, 404, 429, 500])
def test_of_an_empty_cache_nothing_is_taken(hub: FakeHub, status: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    hub.status = status
    refusal()
    assert not caplog.records


def test_a_hub_that_fails_behind_the_list_of_files_is_not_out_of_reach(hub: FakeHub) -> None:
    """The library says then that a file is not in the cache, because of the answer."""

    class Asked(list[tuple[str, str, str]]):
        def append(self, each: tuple[str, str, str]) -> None:
            super().append(each)
            hub.status = 503 if "/resolve/" in each[1] else None

    hub.asked = Asked()
    assert f"{hub.endpoint} answered with status 503" in refusal()


def test_what_is_taken_is_said_with_the_reason(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = download(NAME, None)
    caplog.set_level(logging.INFO)
    hub.status = 503
    assert download(NAME, None) == found
    assert taken(caplog) == [f"org/name: taken from the cache, since {hub.endpoint} answered with status 503"]
    caplog.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    assert download(NAME, None) == found
    assert taken(caplog) == ["org/name: taken from the cache, since TRANSFORMERS_OFFLINE is set"]


def test_the_variable_that_is_set_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TRANSFORMERS_OFFLINE", "1")
    rest = "is set, and the cache does not have all of its files;"
    assert refusal() == f"org/name: TRANSFORMERS_OFFLINE {rest} TRANSFORMERS_OFFLINE=0 lets the server fetch them"
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert refusal() == f"org/name: HF_HUB_OFFLINE {rest} HF_HUB_OFFLINE=0 lets the server fetch them"


def test_what_stays_free_is_named(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=downloads.MARGIN_BYTES))
    margin = shown(downloads.MARGIN_BYTES)
    assert f" more, beside {margin} that stay free, and " in refusal()
    assert f" has {margin} free; " in refusal()


def test_a_cache_that_cannot_be_written_is_refused_before_anything_comes(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(file))
    with pytest.raises(ModelLoadError, match="cannot be written"):
        download(NAME, lambda stage, _: told.append(stage))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ModelLoadError, match=r"cache cannot be written \(permission denied\)"):
        download(NAME, lambda stage, _: told.append(stage))
    assert told == [] and hub.fetched() == []


def test_a_bare_name_is_told_how_models_of_a_hub_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError) as bare:
        check_model(Path("gpt2"))
    assert bare.value.message == "model directory gpt2 does not exist; a model of a hub is named ORG/NAME"
    for path in (tmp_path / "gpt2", Path("a/b/c")):
        with pytest.raises(ModelLoadError) as plain:
            check_model(path)
        assert plain.value.message == f"model directory {path} does not exist"


def test_other_weights_are_not_taken_from_a_cache_that_may_be_old(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = download(NAME, None)
    assert fetch("org/name@main") == found
    hub.status = 503
    with pytest.raises(ModelLoadError, match="the cache does not have all of its files; try again later"):
        fetch("org/name@0123456")
    for name in ("org/name", "org/name@main"):
        with pytest.raises(ModelLoadError) as refused:
            fetch(name)
        assert refused.value.message == (
            f"{name}: {hub.endpoint} answered with status 503, and what the cache has of it may be old; "
            "a full commit, as ORG/NAME@COMMIT, is taken from there"
        )
    assert fetch(f"org/name@{COMMIT}") == found
    assert download(NAME, None) == found, "at a start it is right"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert fetch("org/name@main") == found, "no hub is to be asked"


def test_a_commit_without_the_list_of_its_files_is_taken_too(hub: FakeHub) -> None:
    found = download(NAME, None)
    for listed in Path(constants.HF_HUB_CACHE).rglob("trees/*.json"):
        listed.unlink()
    hub.status = 503
    assert fetch(f"org/name@{COMMIT}") == found


def test_a_name_that_no_hub_has_is_told_as_such_for_other_weights_too(hub: FakeHub) -> None:
    assert "no such model" in refusal(HubModel("org/other"), current=True)


def test_a_name_is_pinned_to_the_commit_that_came() -> None:
    for name in ("org/name", "org/name@main"):
        assert pinned(name, Path("/cache/snapshots") / COMMIT) == f"org/name@{COMMIT}"
    assert pinned("org/name@main", Path("/a/b")) == "org/name@main"
