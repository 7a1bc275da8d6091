"""Commands that have an engine of their own, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest

from core.errors import StartupError
from service.cli.commands import local
from service.config.server_config import ServerConfig


async def test_a_load_that_fails_ends_its_line_of_progress(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the error would stand behind it, in the line that is redrawn."""
    told: list[str] = []

    class Progress:
        def __call__(self, stage: str, fraction: float) -> None:
            told.append(stage)

        def close(self) -> None:
            told.append("closed")

    def build(_: object, progress: Any) -> NoReturn:
        progress("weights", 0.5)
        raise StartupError("the weights do not fit")

    monkeypatch.setattr(local, "TerminalProgress", Progress)
    monkeypatch.setattr(local, "check_model", lambda _: None)
    monkeypatch.setattr("service.engine.builder.build_core_engine", build)
    with pytest.raises(StartupError, match="do not fit"):
        async with local.local_engine(ServerConfig.of(model=str(checkpoint))):
            pass
    assert told == ["weights", "closed"]
