"""What `--model` names: a directory, or a model of a hub as `ORG/NAME[@REVISION]`."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

_NAME = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*)(?:@([A-Za-z0-9][A-Za-z0-9._/-]*))?")

COMMIT: Final = re.compile(r"[0-9a-f]{40}")
"""A revision that always means the same files."""


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of a hub. `revision` is a branch, a tag or a commit; None is the hub's main branch."""

    repo: str
    revision: str | None = None

    def __str__(self) -> str:
        return self.repo if self.revision is None else f"{self.repo}@{self.revision}"


def hub_model(given: str) -> HubModel | None:
    """The model that `given` names, or None if it is a path.

    A directory that is there wins over a name. So does a spelling that only a path can have: `./a/b`, `/a/b`, `a/b/c`.
    """
    found = _NAME.fullmatch(given)
    # A revision is the name of a file in the cache too.
    if found is None or ".." in given or Path(given).is_dir():
        return None
    return HubModel(found[1], found[2])


def pinned(name: str, directory: Path) -> str:
    """`name` at the commit whose files are in `directory`, so that it means these for all that ask; else `name`."""
    model = hub_model(name)
    if model is None or not COMMIT.fullmatch(directory.name):
        return name
    return str(replace(model, revision=directory.name))
