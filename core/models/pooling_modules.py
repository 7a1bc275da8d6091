"""How a checkpoint of sentence-transformers wants its hidden states pooled, as the files beside its weights say."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any, Final

from core.errors import ModelLoadError
from core.models.config import read_json, read_json_list
from core.types.io import Pooling

logger = logging.getLogger(__name__)

MODULES: Final = "modules.json"
MODES: Final = {"mean": Pooling.MEAN, "cls": Pooling.CLS, "lasttoken": Pooling.LAST}
FLAGS: Final = {
    "pooling_mode_mean_tokens": Pooling.MEAN,
    "pooling_mode_cls_token": Pooling.CLS,
    "pooling_mode_lasttoken": Pooling.LAST,
}
"""Of releases before 6; one of them is true."""
HARMLESS: Final = ("Transformer", "Pooling", "Normalize")
"""Modules that are computed here or that a request asks for. What others do to a vector is not done."""


def read_pooling(directory: Path) -> Pooling | None:
    """The pooling of the checkpoint in `directory`; None where it names none, or one that is not served.

    The log says what is left out. Raises ModelLoadError for files that cannot be read.
    """
    modules = _modules(directory / MODULES)
    kinds = {str(module.get("type", "")).rpartition(".")[2]: module for module in modules}
    others = [kind for kind in kinds if kind not in HARMLESS]
    if others:
        logger.warning("embeddings are made without the checkpoint's %s", ", ".join(others))
    if "Pooling" not in kinds:
        return None
    path = PurePosixPath(str(kinds["Pooling"].get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise ModelLoadError(f"{directory / MODULES}: {path} leads out of the checkpoint")
    found = _pooling(read_json(directory / path / "config.json"))
    if found is None:
        logger.warning("the checkpoint's way of pooling is not served; requests name one of mean, last and cls")
    return found


def _modules(file: Path) -> list[Mapping[str, Any]]:
    if not file.is_file():
        return []
    content = read_json_list(file)
    return [each for each in content if isinstance(each, Mapping)]


def _pooling(config: Mapping[str, Any]) -> Pooling | None:
    mode = config.get("pooling_mode")
    if mode is not None:
        return MODES.get(mode) if isinstance(mode, str) else None
    named = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    return FLAGS.get(named[0]) if len(named) == 1 else None
