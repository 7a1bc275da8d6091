"""What `--model` may name: a directory wherever there is one, and else a model of a hub if it is spelled as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from service.checkpoints.model_name import HubModel, hub_model


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Qwen/Qwen3-0.6B", HubModel("Qwen/Qwen3-0.6B")),
        ("org/name@main", HubModel("org/name", "main")),
        ("org/name@refs/pr/3", HubModel("org/name", "refs/pr/3")),
        ("a_b.c-d/e_f.g-h@v1.0", HubModel("a_b.c-d/e_f.g-h", "v1.0")),
        *(
            (path, None)
            for path in ("", "name", "name@main", "/a/b", "./a/b", "../a", "~/a", "a/b/c", "a/b@", "a//b", "a/")
        ),
        *(
            (path, None)
            for path in ("a/..", "-a/b", "a/b@-x", "a/b c", "a/b\n", "https://hub/a", "a/b@main@main", "a/b@x/../../y")
        ),
    ],
)
def test_names_and_paths(given: str, found: HubModel | None) -> None:
    assert hub_model(given) == found
    assert found is None or str(found) == given


def test_a_directory_that_is_there_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org").mkdir()
    (tmp_path / "org" / "file").touch()
    assert hub_model("org/name") == HubModel("org/name") and hub_model("org/file") == HubModel("org/file")
    (tmp_path / "org" / "name").mkdir()
    assert hub_model("org/name") is None
