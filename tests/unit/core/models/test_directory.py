"""A client's path leads below the root or nowhere, and outside is answered as what does not exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from core.errors import ModelLoadError
from core.models.directory import directory_below

FILES = ("adapter_config.json", "adapter_model.safetensors")


def adapter(directory: Path) -> Path:
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).write_text("{}")
    return directory


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An operator's directory, with what a hostile one outside could be reached by."""
    root = tmp_path / "root"
    adapter(root / "team" / "french")
    outside = adapter(tmp_path / "outside")
    (root / "escape").symlink_to(outside)
    (root / "escape-above").symlink_to("../outside")
    for name in FILES:
        directory = adapter(root / f"linked-{name}")
        (directory / name).unlink()
        (directory / name).symlink_to(outside / name)
    (root / "loop").symlink_to("loop")
    (root / "file").write_text("")
    # How caches of models look: an entry of links into a store of blobs, both below the root.
    adapter(root / "blobs" / "x")
    (root / "alias").symlink_to("team/french")
    (root / "snapshot").mkdir()
    for name in FILES:
        (root / "snapshot" / name).symlink_to(f"../blobs/x/{name}")
    return root


@pytest.mark.parametrize("path", ["team/french", "./team//french/", "alias", "snapshot", "team"])
def test_what_is_below_is_found(root: Path, path: str) -> None:
    assert directory_below(root, path, "adapters").is_relative_to(root.resolve())


def test_a_root_behind_a_link_is_a_root(root: Path, tmp_path: Path) -> None:
    (tmp_path / "mounted").symlink_to(root)
    assert directory_below(tmp_path / "mounted", "team/french", "adapters") == (root / "team" / "french").resolve()


WILD = (
    "",
    ".",
    "/",
    "..",
    "../outside",
    "team/../../outside",
    "/etc",
    "//etc",
    "team/..",
    "a\0b",
    "a\nb",
    "..\\x",
    "x" * 513,
)
MISSING = (
    *(
        "escape",
        "escape-above",
        "escape/.",
        *(f"linked-{name}" for name in FILES),
        "loop",
        "file",
        "nobody",
        "team/nobody",
    ),
    *("file/x", "~", "$HOME", "%2e%2e/outside", "．．/outside", "x" * 300),
)


@pytest.mark.parametrize("path", WILD)
def test_what_is_no_relative_path_is_refused(root: Path, path: str) -> None:
    with pytest.raises(ModelLoadError, match="must be a relative path"):
        directory_below(root, path, "adapters")


@pytest.mark.parametrize("path", MISSING)
def test_what_leads_outside_looks_like_what_is_not_there(root: Path, path: str) -> None:
    with pytest.raises(ModelLoadError) as refused:
        directory_below(root, path, "adapters")
    assert refused.value.message == "there is no such directory below the server's directory of adapters"


def test_a_root_that_went_away_is_no_crash(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such directory"):
        directory_below(tmp_path / "gone", "x", "adapters")
