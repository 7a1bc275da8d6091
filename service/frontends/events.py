"""The body of an EVENTS frame: everything that a step made for one front end, each stream on its own.

Its parts, in this order:
(1) four lengths (`_LENGTHS`);
(2) the head, in JSON: the events before the deltas (`Started`), those after them (`Finished` and errors), and parts of
    answers by the row of their delta;
(3) one row for each delta (`_ROW`), then the token ids of all deltas;
(4) the log probabilities in columns: their ids, the counts of their alternatives, their values;
(5) the ids of the alternatives, then their values;
(6) the texts of all deltas, in UTF-8.
Integers are uint32 (stream numbers uint64), values float64.

An event that cannot be written or read fails its own stream: nothing of it is added, and the other streams are whole.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

from core.types.chat import AnswerPart
from core.types.io import Delta, TokenLogprob
from core.types.plain import to_plain
from service.frontends.plain_json import from_plain
from service.frontends.wire import Kind, WireError, pack

_LENGTHS = struct.Struct("<5I")
"""Bytes of the head; then the numbers of deltas, of log probabilities, of their alternatives and of chosen ids."""

_ROW = struct.Struct("<QIiIII")
"""One delta: stream, index, position, number of token ids, number of log probabilities, bytes of text."""

assert array("I").itemsize == 4 and array("d").itemsize == 8


class EventBatch:
    """The events that one step made for one front end. They are read in this order: starts, deltas, ends.

    `start`, `add` and `end` raise TypeError, ValueError, OverflowError or struct.error for an event that cannot be
    written, and have added nothing then.
    """

    def __init__(self) -> None:
        self.size = 0
        """Bytes of the frame, estimated."""
        self._before: list[str] = []
        self._after: list[str] = []
        self._parts: list[str] = []
        self._rows: list[bytes] = []
        self._texts: list[bytes] = []
        self._ids, self._logprob_ids, self._counts, self._top_ids, self._named = (array("I") for _ in range(5))
        self._logprobs, self._top_logprobs, self._chosen = array("d"), array("d"), array("f")

    def __bool__(self) -> bool:
        return bool(self._before or self._after or self._rows)

    def start(self, stream: int, started: Any) -> None:
        """Add `started`, a JSON value that is read before the deltas of `stream`."""
        self._before.append(self._told([stream, started]))

    def end(self, stream: int, kind: str, value: Any) -> None:
        """Add `value`, a JSON value that is read after the deltas of `stream`; `kind` is "finished" or "error"."""
        self._after.append(self._told([stream, kind, value]))

    def _told(self, value: Any) -> str:
        text = json.dumps(value, separators=(",", ":"))
        self.size += len(text)
        return text

    def add(self, stream: int, delta: Delta) -> None:
        """Add one delta of `stream`."""
        ids, logprobs, text = delta.token_ids, delta.logprobs, delta.text.encode("utf-8", "surrogatepass")
        parts = [len(self._rows), to_plain(delta.parts)] if delta.parts else None
        row = _ROW.pack(stream, delta.index, delta.position, len(ids), len(logprobs), len(text))
        if len(ids) == 1 and not logprobs:
            # The usual delta of a step, made without a temporary array.
            self._ids.append(ids[0])
        else:
            # Everything that can fail comes before the first column grows, so that a bad delta has added nothing.
            numbers = array("I", ids)
            self._add_logprobs(logprobs)
            self._ids += numbers
        if parts is not None:
            self._parts.append(self._told(parts))
        self._rows.append(row)
        self._texts.append(text)
        self.size += _ROW.size + 4 * len(ids) + len(text)

    def _add_logprobs(self, entries: Sequence[TokenLogprob]) -> None:
        # A copy: they are walked four times, and `TokenLogprobs` makes each entry anew on every walk.
        logprobs = tuple(entries)
        alternatives = [pair for each in logprobs for pair in each.top]
        top_ids = array("I", [token for token, _ in alternatives])
        top_logprobs = array("d", [value for _, value in alternatives])
        ids = array("I", [each.token_id for each in logprobs])
        values = array("d", [each.logprob for each in logprobs])
        chosen = array("f", [value for each in logprobs for value in each.chosen])
        self._named += array("I", [len(each.chosen) for each in logprobs])
        self._chosen += chosen
        self._counts += array("I", [len(each.top) for each in logprobs])
        self._logprob_ids += ids
        self._logprobs += values
        self._top_ids += top_ids
        self._top_logprobs += top_logprobs
        self.size += 20 * len(ids) + 12 * len(top_ids) + 4 * len(chosen)

    def frame(self) -> bytes:
        """The whole EVENTS frame. Raises WireError where it would be larger than a frame may be."""
        head = "[{}]".format(
            ",".join(f"[{','.join(each)}]" for each in (self._before, self._after, self._parts))
        ).encode()
        numbers = (self._ids, self._logprob_ids, self._counts, self._named, self._logprobs)
        told = (self._top_ids, self._top_logprobs, self._chosen)
        counts = (len(self._rows), len(self._logprobs), len(self._top_ids), len(self._chosen))
        lengths = _LENGTHS.pack(len(head), *counts)
        parts = (lengths, head, *self._rows, *(each.tobytes() for each in (*numbers, *told)), *self._texts)
        return pack(Kind.EVENTS, b"".join(parts))


def read_events(body: bytes) -> tuple[list[Any], Iterator[tuple[int, Delta | None]], list[Any]]:
    """Read what an `EventBatch` wrote: starts, then pairs of stream and delta, then ends.

    The delta is None where its text or its parts cannot be read. Raises WireError, struct.error or ValueError for a
    body that does not add up.
    """
    head_length, count, logprobs, tops, chosen = _LENGTHS.unpack_from(body)
    at = _LENGTHS.size + head_length
    before, after, parts = json.loads(body[_LENGTHS.size : at])
    rows_end = at + count * _ROW.size
    rows = list(_ROW.iter_unpack(body[at:rows_end]))
    columns = _Columns(body, rows_end)
    ids = columns.take("I", sum(row[3] for row in rows))
    told = _Logprobs(columns, logprobs, tops, chosen)
    if len(rows) != count or sum(row[4] for row in rows) != logprobs:
        raise WireError("the rows of an EVENTS frame do not add up")
    if len(body) != columns.at + sum(row[5] for row in rows):
        raise WireError("the texts of an EVENTS frame do not add up")
    return before, _read_deltas(body[columns.at :], rows, ids, told, dict(parts)), after


class _Columns:
    """Arrays that lie one behind another in `body`, from the byte `at` on."""

    def __init__(self, body: bytes, at: int) -> None:
        self._body, self.at = body, at

    def take(self, code: str, count: int) -> array[Any]:
        column = array(code)
        end = self.at + count * column.itemsize
        if end > len(self._body):
            raise WireError("an EVENTS frame ends within its numbers")
        column.frombytes(self._body[self.at : end])
        self.at = end
        return column


class _Logprobs:
    """The log probabilities of a frame, read from its columns. Raises WireError where the columns do not fit."""

    def __init__(self, columns: _Columns, count: int, alternatives: int, chosen: int) -> None:
        self._ids, counts, named, self._values = (columns.take(code, count) for code in ("I", "I", "I", "d"))
        self._top_ids, self._top_values = columns.take("I", alternatives), columns.take("d", alternatives)
        self._chosen = columns.take("f", chosen)
        self._ends, self._named = list(accumulate(counts, initial=0)), list(accumulate(named, initial=0))
        if self._ends[-1] != alternatives or self._named[-1] != chosen:
            raise WireError("the log probabilities of an EVENTS frame do not add up")

    def read(self, start: int, end: int) -> tuple[TokenLogprob, ...]:
        """Entries `start` to `end`, `end` excluded."""
        tops = (
            tuple(zip(self._top_ids[first:last], self._top_values[first:last]))
            for first, last in pairwise(self._ends[start : end + 1])
        )
        chosen = (tuple(self._chosen[first:last]) for first, last in pairwise(self._named[start : end + 1]))
        return tuple(map(TokenLogprob, self._ids[start:end], self._values[start:end], tops, chosen))


def _read_deltas(
    texts: bytes, rows: list[tuple[int, ...]], ids: array[int], logprobs: _Logprobs, parts: dict[int, list[Any]]
) -> Iterator[tuple[int, Delta | None]]:
    first = told = at = 0
    for row, (stream, index, position, id_count, logprob_count, length) in enumerate(rows):
        try:
            text = texts[at : at + length].decode("utf-8", "surrogatepass")
            tokens = tuple(ids[first : first + id_count])
            values = logprobs.read(told, told + logprob_count) if logprob_count else ()
            told_parts = tuple(from_plain(AnswerPart, each) for each in parts.get(row, ()))
            delta = Delta(index, position, tokens, text, values, told_parts)
        except (UnicodeDecodeError, KeyError, TypeError, ValueError, AttributeError):
            yield stream, None
        else:
            yield stream, delta
        first, told, at = first + id_count, told + logprob_count, at + length
