"""The executor of an engine that shares experts: between its own steps it takes part in those of the others."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import Empty
from typing import Any, Final, Protocol

from core.executor.forward_thread import ForwardThread
from core.executor.step import StepRunner

logger = logging.getLogger(__name__)

LEAVE_SECONDS: Final = 5.0
"""Seconds that the other engines have to stop too."""


@dataclass(frozen=True, slots=True)
class Join:
    """Another engine has begun step `step`."""

    step: int


@dataclass(frozen=True, slots=True)
class Left:
    """Another engine, `rank`, begins no step any more."""

    rank: int


@dataclass(frozen=True, slots=True)
class Lost:
    """Another engine has ended, and with it what steps need."""

    error: BaseException


class Joining(Protocol):
    """See `core.distributed.joint_runner.JointRunner`."""

    def join(self, step: int) -> None: ...


class Company(Protocol):
    """The other engines: see `core.distributed.bells.Bells`."""

    @property
    def others(self) -> Sequence[int]: ...

    def listen(self, heard: Callable[[int, int], None], lost: Callable[[BaseException], None]) -> None: ...

    def leave(self) -> None: ...


class JointThread(ForwardThread):
    """As `ForwardThread`, over a `JointRunner`.

    Engines that share experts stop together: until all others have left, or LEAVE_SECONDS are over, one that stops
    takes part in what the others still run. One that is lost ends the engine, as no step can be trusted any more.
    """

    def __init__(self, runner: StepRunner, joining: Joining, company: Company, wake: Callable[[], None]) -> None:
        """`joining` and `runner` are one object, as each side of it is used."""
        self._joining = joining
        self._company = company
        self._staying = set(company.others)
        self._failed = False
        super().__init__(runner, wake)
        company.listen(self._heard, lambda error: self._inbox.put(Lost(error)))

    def _serve(self) -> None:
        super()._serve()
        if self._failed:
            return
        try:
            self._say_farewell()
        except RuntimeError as error:
            logger.warning("another engine was gone already: %s", str(error).partition("\n")[0])

    def _say_farewell(self) -> None:
        self._company.leave()
        end = time.monotonic() + LEAVE_SECONDS
        with contextlib.suppress(Empty):
            while self._staying and (left := end - time.monotonic()) > 0:
                self._do(self._inbox.get(timeout=left), None)
        if self._staying:
            logger.warning("engines %s go on without this one's experts", sorted(self._staying))

    def _heard(self, rank: int, step: int) -> None:
        self._inbox.put(Join(step) if step >= 0 else Left(rank))

    def _do(self, told: Any, failure: BaseException | None) -> BaseException | None:
        if isinstance(told, Join):
            # Another step than that which is held back.
            self._let_go()
            if not self._failed:
                self._joining.join(told.step)
        elif isinstance(told, Left):
            self._staying.discard(told.rank)
        elif isinstance(told, Lost):
            raise told.error
        else:
            failure = super()._do(told, failure)
            self._failed = failure is not None
        return failure
