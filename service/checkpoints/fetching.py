"""An engine of a model by name: its files are fetched first, while the server says that it is starting."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from core.errors import ModelLoadError
from service.checkpoints.files import check_model
from service.checkpoints.model_name import HubModel, hub_model

if TYPE_CHECKING:
    from core.config import EngineConfig
    from service.engine.builder import BuiltEngine, EngineBuilder, Progress


def fetching(build: EngineBuilder) -> EngineBuilder:
    """`build`, for models by name too. Such a model is served under its name, unless the settings give another one."""

    def fetch_and_build(config: EngineConfig, progress: Progress | None) -> BuiltEngine:
        return build(fetched(config, progress), progress)

    return fetch_and_build


def fetch(name: str) -> Path:
    """The directory of the hub's model `name`, fetched if it is not there. Raises ModelLoadError; blocks.

    A branch or tag is that of the hub: without it nothing is taken from the cache, which may be old.
    """
    model = hub_model(name)
    if model is None:
        raise ModelLoadError("must be ORG/NAME or ORG/NAME@REVISION")
    return _fetch(model, None, current=True)


def fetched(config: EngineConfig, progress: Progress | None) -> EngineConfig:
    """The settings with a directory for the model; those given, where it is one already. Raises ModelLoadError."""
    model = hub_model(config.model.path)
    if model is None:
        return config
    directory = _fetch(model, progress)
    name = config.model.served_name or model.repo
    return replace(config, model=replace(config.model, path=str(directory), served_name=name))


def _fetch(model: HubModel, progress: Progress | None, current: bool = False) -> Path:
    from service.checkpoints.download import download

    directory = download(model, progress, current)
    check_model(directory)
    return directory
