"""The bytes of a download, told as a server's progress: `huggingface_hub` tells them to bars of tqdm."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from tqdm import tqdm

if TYPE_CHECKING:
    from service.engine.builder import Progress


@runtime_checkable
class ShowsBytes(Protocol):
    """A `Progress` that says more of bytes than their part of the whole."""

    def bytes_came(self, stage: str, count: int, total: int) -> None:
        """Of `stage`, `count` bytes of `total` are here."""
        ...


class DownloadLeft(Exception):
    """Another part of the same download failed, so that this one is of no use."""


class ByteProgress:
    """Of one download of `total` bytes in all, of which `present` are here already. Called from several threads."""

    def __init__(self, stage: str, total: int, present: int, progress: Progress | None) -> None:
        self._stage, self._total, self._progress = stage, total, progress
        self._present, self._reached, self._most = present, 0, 0
        self._left = False
        self._lock = threading.Lock()
        self.reached(0)

    @classmethod
    def silent(cls) -> type[tqdm[Any]]:
        """A class of bars that neither draw nor tell anything."""
        return cls("", 0, 0, None).bar()

    def reached(self, count: int) -> None:
        """A bar stands at `count` bytes that came. Bars of several kinds count the same bytes: the furthest is told."""
        with self._lock:
            self._reached = max(self._reached, count)
            self._tell(self._reached)

    def came(self, count: int) -> None:
        """`count` bytes more are here, which no other bar counts; below 0, so many are to come again."""
        with self._lock:
            self._present += count
            self._tell(self._reached)

    def _tell(self, count: int) -> None:
        self._most = max(self._most, self._present + count)
        shows: object = self._progress
        if isinstance(shows, ShowsBytes):
            shows.bytes_came(self._stage, self._most, self._total)
        elif self._progress is not None:
            self._progress(self._stage, min(1.0, self._most / max(1, self._total)))

    def leave(self) -> None:
        """Have whatever fetches for this download end with its next bytes."""
        self._left = True

    def refuse_if_left(self) -> None:
        """Raise DownloadLeft after `leave`."""
        if self._left:
            raise DownloadLeft

    def bar(self) -> type[tqdm[Any]]:
        """A class of bars that draw nothing and tell their bytes here. They raise DownloadLeft after `leave`."""
        told = self

        class Bar(_Unseen):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self._bytes: int | None = kwargs.get("initial", 0) if kwargs.get("unit") == "B" else None

            def update(self, n: float | None = 1) -> bool | None:
                told.refuse_if_left()
                if self._bytes is not None:
                    self._bytes += int(n or 0)
                    told.reached(self._bytes)
                return None

        return Bar

    def bar_of_one_file(self, present: int) -> type[tqdm[Any]]:
        """The same for a file of its own, of which `present` bytes were told with `came` already."""
        told = self

        class Bar(_Unseen):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                # A hub that sends no parts of files begins anew.
                told.came(int(kwargs.get("initial", 0)) - present)

            def update(self, n: float | None = 1) -> bool | None:
                told.refuse_if_left()
                told.came(int(n or 0))
                return None

        return Bar


class _Unseen(tqdm):  # type: ignore[misc]  # it has no types
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs | {"disable": True})
