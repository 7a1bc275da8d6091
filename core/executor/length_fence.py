"""Where planning waits for the lengths of a step: for its publish event, and never for its drafts (law 9)."""

from __future__ import annotations

from collections.abc import Callable

from core.batch.result import Published


class LengthFence:
    """Hands the lengths of the newest step from the forward thread to the loop thread.

    The loop thread does not block: a reader that comes too early is woken once. Each side writes before it looks at
    what the other side has written, so no wake-up is lost. From SGLang's `resolve_seq_lens`, which waits in place.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        """`wake` is called on the forward thread."""
        self._wake = wake
        self._newest: Published | None = None
        self._wanted = 0
        """The step that a reader has come for too early; 0 for none."""

    def publish(self, published: Published) -> None:
        """The publish event of a step has fired. Forward thread only, in the order of steps."""
        self._newest = published
        if self._wanted == published.step_id:
            self._wanted = 0
            self._wake()

    def resolve(self, step_id: int) -> Published | None:
        """The lengths of step `step_id`, no step after which was published; None before its publish event.

        Loop thread only. After None it wakes the reader when the event has fired.
        """
        self._wanted = step_id
        newest = self._newest
        if newest is None or newest.step_id != step_id:
            return None
        self._wanted = 0
        return newest
