"""The requests that own a row, as arrays indexed by row, so that a steady decode step costs no Python per request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.invariants import check
from core.memory.request_memory import Seat
from core.types.arrays import Bools, Ints
from core.types.request import Req, RequestState


class RunningSet:
    """Per row: `tokens` known on the host, `known` how many, `planned` how many have KV written by submitted steps.

    Under overlap a step may be planned whose input token is still on the device, so `planned` may pass `known`, by the
    one token that two steps in flight allow. `prefill_end` is where the first new token is sampled; `limit` is
    `planned` of the last useful step: prompt + max_new_tokens - 1, because the last token sampled is never fed back.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        # An array of objects, so that the owners of a step's rows are one gather and not a loop.
        self.reqs: npt.NDArray[np.object_] = np.full(num_rows, None, np.object_)
        # int32 halves a table of rows x context; the system maps its pages only when a row first reaches them.
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_rows, max_len), np.int32)
        self.known: Ints = np.zeros(num_rows, np.int64)
        self.planned: Ints = np.zeros(num_rows, np.int64)
        self.prefill_end: Ints = np.zeros(num_rows, np.int64)
        self.prompt_lens: Ints = np.zeros(num_rows, np.int64)
        self.limit: Ints = np.zeros(num_rows, np.int64)
        self.priorities: Ints = np.zeros(num_rows, np.int64)
        self.returned = np.zeros(num_rows, np.bool_)
        """Whether the owner gave a row back before."""
        self.last_token_at = np.zeros(num_rows, np.float64)
        """When the owner's newest token came, in whatever row it was then; means nothing before its first."""
        self._member = np.zeros(num_rows, np.bool_)
        self._order: Ints = np.empty(num_rows, np.int64)
        self._ordered = 0
        self._stale_order = False

    def __len__(self) -> int:
        return int(self._member.sum())

    @property
    def order(self) -> Ints:
        """int64[n]: rows from the longest to the shortest time in the set. Do not keep: the next change replaces it."""
        order = self._order[: self._ordered]
        if self._stale_order:
            order = order[self._member[order]]
            self._ordered, self._stale_order = len(order), False
            # Never in place: whoever iterates over an older answer keeps it.
            self._order = np.concatenate([order, np.empty(len(self._order) - len(order), np.int64)])
        return order

    def add(self, req: Req, seat: Seat) -> None:
        """Seat `req` in its row; everything it knows becomes the part to prefill, less what the cache already holds."""
        row, ids = seat.row, req.known_ids()
        place = len(self.order)
        check("request_state", not self._member[row], row=row)
        self.tokens[row, : len(ids)] = ids
        self.known[row] = self.prefill_end[row] = len(ids)
        self.planned[row] = seat.cached_tokens
        self.prompt_lens[row] = req.prompt_len
        self.limit[row] = req.prompt_len + req.max_new_tokens - 1
        self.priorities[row] = req.priority
        self.returned[row] = req.retractions > 0
        self.last_token_at[row] = req.last_token_at
        self.reqs[row] = req
        self._member[row] = True
        self._order[place] = row
        self._ordered = place + 1
        req.row, req.generation = row, seat.generation
        req.move_to(RequestState.RUNNING)

    def remove(self, req: Req) -> Ints:
        """Unseat `req` and move its outputs into it; returns int64[n], known tokens whose KV may be kept for others.

        Those are tokens whose KV submitted steps have written. Of a request that has sampled, the last token out is not
        among them: the step that computes it may be in flight still, so no result vouches for what it writes.
        """
        row = req.row
        check("request_state", self.reqs[row] is req, row=row)
        planned, known = int(self.planned[row]), int(self.known[row])
        check("request_state", planned <= known + 1, planned=planned, known=known)
        req.outputs = self.tokens[row, req.prompt_len : known].copy()
        written = self.ids(row, min(planned, known - self.has_sampled(row)))
        req.last_token_at = float(self.last_token_at[row])
        self.reqs[row] = None
        self._member[row] = False
        self._stale_order = True
        req.row, req.generation = 0, -1
        return written

    def has_sampled(self, row: int) -> bool:
        """Whether the owner of `row` got a token since it was seated."""
        return bool(self.known[row] > self.prefill_end[row])

    def has_advanced(self, rows: Ints, tokens: int) -> Bools:
        """bool[n]: whether the owner of each of `rows` got so many tokens since it was seated, or never gave way."""
        return ~self.returned[rows] | (self.known[rows] - self.prefill_end[rows] >= tokens)

    def ids(self, row: int, end: int, start: int = 0) -> Ints:
        """int64[end - start]: a copy of known tokens of `row`."""
        return self.tokens[row, start:end].astype(np.int64)

    def decoding(self) -> Ints:
        """int64[n]: rows that can take a decode step: prompt planned to its end, outputs not yet all planned."""
        rows = self.order
        planned = self.planned[rows]
        return rows[(planned >= self.prefill_end[rows]) & (planned < self.limit[rows])]

    def prefilling(self) -> Ints:
        """int64[n]: rows whose prompt is not planned to its end, oldest first."""
        rows = self.order
        return rows[self.planned[rows] < self.prefill_end[rows]]

    def members(self) -> list[Req]:
        """All running requests, oldest admission first."""
        return self.owners(self.order)

    def owners(self, rows: Ints) -> list[Req]:
        """Who owns each of `rows`, all of which must be in the set. One gather, no Python per request."""
        check("request_state", bool(self._member[rows].all()), rows=rows)
        found: list[Req] = self.reqs[rows].tolist()
        return found
