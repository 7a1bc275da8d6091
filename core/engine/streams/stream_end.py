"""How a stream ends, for the engine's own streams and for those of its front ends."""

from __future__ import annotations


class StreamEnd:
    """The end of one stream: the terminal of its last output, or an error, which comes after what is pending.

    The reader meets it once, having read everything before it: `OutputStream` in `core.engine.api`.
    """

    def __init__(self, outputs: int) -> None:
        self.open_outputs = outputs
        """Outputs that have not got their terminal."""
        self.error: BaseException | None = None
        self.met = False
        """Whether the reader has met the end, or has gone."""

    @property
    def known(self) -> bool:
        """Whether it is known how the stream ends: no event comes that is not pending already."""
        return self.met or self.error is not None or self.open_outputs == 0

    def fail(self, error: BaseException) -> bool:
        """End with `error`. Returns whether it is the first: a later one changes nothing."""
        if self.error is not None:
            return False
        self.error = error
        return True

    def meet(self) -> bool:
        """Called by the reader where nothing is pending: returns whether this is the end. Raises the error, once."""
        if not self.met:
            self.met = self.known
            if self.error is not None:
                raise self.error
        return self.met
