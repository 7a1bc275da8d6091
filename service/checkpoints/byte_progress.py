"""The bytes of a download, told as a server's progress: `huggingface_hub` tells them to bars of tqdm."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

if TYPE_CHECKING:
    from service.engine.builder import Progress


class ByteProgress:
    """Of one download of `total` bytes in all, of which `present` are here already. Called from several threads."""

    def __init__(self, stage: str, total: int, present: int, progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._present, self._most = present, 0
        self._lock = threading.Lock()
        self.reached(0)

    @classmethod
    def silent(cls) -> type[tqdm[Any]]:
        """A class of bars that neither draw nor tell anything."""
        return cls("", 0, 0, None).bar()

    def reached(self, count: int) -> None:
        """A bar stands at `count` bytes that came. Bars of several kinds count the same bytes: the furthest is told."""
        with self._lock:
            self._most = max(self._most, self._present + count)
            if self._progress is not None:
                self._progress(self._stage, min(1.0, self._most / max(1, self._total)))

    def bar(self) -> type[tqdm[Any]]:
        """A class of bars that draw nothing and tell their bytes here."""
        told = self

        class Bar(tqdm):  # type: ignore[misc]  # it has no types
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs | {"disable": True})
                self._bytes: int | None = kwargs.get("initial", 0) if kwargs.get("unit") == "B" else None

            def update(self, n: float | None = 1) -> bool | None:
                if self._bytes is not None:
                    self._bytes += int(n or 0)
                    told.reached(self._bytes)
                return None

        return Bar
