"""What a stream has sent so far: ids, text and terminals of each output, in segments that can be dropped one by one.

A terminal is the `Finished` event of an output. Ids and text are counted apart, since text lags behind ids and is cut
elsewhere. A reader's position in one output is therefore a pair of counts. From any pair that a reader may have, the
rest is sent without a gap and without a repeat.
"""

from __future__ import annotations

from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from secrets import token_hex

from core.errors import InvalidRequest
from core.types.io import Delta, Finished, OutputEvent, Started
from core.types.logprobs import TokenLogprobs
from service.errors import PositionAhead, PositionTooOld
from service.wire.position import Position

SEGMENT_BYTES = 4096
"""Bytes of ids, text and log probabilities that a segment holds before the next segment is begun."""
EMPTY_SEGMENT_BYTES = 640
"""Bytes that a segment takes beside them: its objects and empty columns."""


@dataclass(slots=True)
class _Segment:
    tokens_at: int
    text_at: int
    ids: array[int] = field(default_factory=lambda: array("i"))
    text: bytes = b""
    logprobs: TokenLogprobs = field(default_factory=TokenLogprobs)
    size: int = EMPTY_SEGMENT_BYTES

    @property
    def tokens_end(self) -> int:
        return self.tokens_at + len(self.ids)

    @property
    def text_end(self) -> int:
        return self.text_at + len(self.text)

    def add(self, delta: Delta, text: bytes) -> int:
        before = self.size
        self.ids.extend(delta.token_ids)
        self.text += text
        self.size += self.ids.itemsize * len(delta.token_ids) + len(text)
        if delta.logprobs:
            before_logprobs = self.logprobs.held_bytes
            self.logprobs.extend(delta.logprobs)
            self.size += self.logprobs.held_bytes - before_logprobs
        return self.size - before

    def after(self, index: int, place: Position) -> Delta:
        """The part of this segment that follows `place`; moves `place` to the end of the segment."""
        skipped = max(0, place.tokens - self.tokens_at)
        text = self.text[max(0, place.text_bytes - self.text_at) :].decode("utf-8", "surrogatepass")
        delta = Delta(index, place.tokens, tuple(self.ids[skipped:]), text, self.logprobs[skipped:] or ())
        place.tokens, place.text_bytes = max(place.tokens, self.tokens_end), max(place.text_bytes, self.text_end)
        return delta


class _Output:
    """One output: its segments, oldest first, and where they begin and end."""

    def __init__(self) -> None:
        self.segments: deque[_Segment] = deque()
        self.first = Position()
        self.end = Position()
        self.finished: Finished | None = None

    def add(self, delta: Delta, keeps_text: bool) -> int:
        text = delta.text.encode("utf-8", "surrogatepass") if keeps_text else b""
        grown = 0
        if not self.segments or self.segments[-1].size >= EMPTY_SEGMENT_BYTES + SEGMENT_BYTES:
            self.segments.append(_Segment(self.end.tokens, self.end.text_bytes))
            grown = EMPTY_SEGMENT_BYTES
        grown += self.segments[-1].add(delta, text)
        self.end.tokens += len(delta.token_ids)
        self.end.text_bytes += len(text)
        return grown

    def drop_oldest(self) -> int:
        gone = self.segments.popleft()
        self.first = Position(gone.tokens_end, gone.text_end)
        return gone.size

    def refuse(self, index: int, place: Position) -> None:
        if place.tokens > self.end.tokens or place.text_bytes > self.end.text_bytes:
            raise PositionAhead(f"output {index} has told less so far; attach with what was received")
        self.refuse_trimmed(index, place)
        for segment in self.segments:
            at = place.text_bytes - segment.text_at
            # A byte of the form 10xxxxxx goes on with a character that began before it.
            if 0 < at < len(segment.text) and segment.text[at] & 0xC0 == 0x80:
                raise InvalidRequest.of(f"positions[{index}].text_bytes", "is inside a character")

    def refuse_trimmed(self, index: int, place: Position) -> None:
        if place.tokens < self.first.tokens or place.text_bytes < self.first.text_bytes:
            raise PositionTooOld(
                f"of output {index} the first {self.first.tokens} tokens are no longer kept; send the request again"
            )

    def after(self, index: int, place: Position) -> Delta | Finished | None:
        self.refuse_trimmed(index, place)
        for segment in self.segments:
            if segment.tokens_end > place.tokens or segment.text_end > place.text_bytes:
                return segment.after(index, place)
        if self.finished is None or place.finished:
            return None
        place.finished = True
        return self.finished


class History:
    """The events of one stream, in the order in which they are added; `size` is the bytes that they take.

    `outputs` is the number of outputs of the request. Without `keeps_text` only ids are kept.
    """

    def __init__(self, outputs: int, keeps_text: bool) -> None:
        # Drawn and not counted: a server that starts again must not give an incarnation that it gave before.
        self.incarnation = token_hex(8)
        """Tells this stream from others of the same request id, earlier ones and later ones."""
        self.started: Started | None = None
        self.size = 0
        self._outputs = [_Output() for _ in range(outputs)]
        self._keeps_text = keeps_text

    def __len__(self) -> int:
        return len(self._outputs)

    @property
    def finished(self) -> bool:
        """Whether every output has its terminal."""
        return all(output.finished is not None for output in self._outputs)

    def add(self, event: OutputEvent) -> OutputEvent:
        """Keep one more event. Returns it as readers are told it: `Started` with the incarnation."""
        if type(event) is Delta:
            self.size += self._outputs[event.index].add(event, self._keeps_text)
        elif isinstance(event, Finished):
            self._outputs[event.index].finished = event
        elif isinstance(event, Started):
            event = self.started = replace(event, incarnation=self.incarnation)
        return event

    def ends(self) -> list[Position]:
        """For each output, the position after everything that was added."""
        return [Position(each.end.tokens, each.end.text_bytes, each.finished is not None) for each in self._outputs]

    def refuse(self, places: list[Position]) -> None:
        """Raise unless everything after `places` can be sent; `places` has one position for each output.

        Raises PositionTooOld where segments after the position were dropped, PositionAhead where the output has not
        reached the position, and InvalidRequest where `text_bytes` is inside a character.
        """
        for index, (output, place) in enumerate(zip(self._outputs, places, strict=True)):
            # A reader that has the terminal needs nothing more of this output, so trimmed segments do not matter to it.
            if place.finished and output.finished is None:
                raise PositionAhead(f"output {index} has not finished; attach with what was received")
            if not place.finished:
                output.refuse(index, place)

    def after(self, places: list[Position]) -> Delta | Finished | None:
        """The next event after `places`; None when they are at the end. Moves `places` past the event.

        Raises PositionTooOld where segments after a position were dropped.
        """
        for index, (output, place) in enumerate(zip(self._outputs, places, strict=True)):
            if not place.finished and (event := output.after(index, place)) is not None:
                return event
        return None

    def trim(self) -> int:
        """Drop the older half of each output's segments, rounded up. Returns the number of bytes freed."""
        freed = 0
        for output in self._outputs:
            for _ in range((len(output.segments) + 1) // 2):
                freed += output.drop_oldest()
        self.size -= freed
        return freed
