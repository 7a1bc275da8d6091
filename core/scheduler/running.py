"""The requests that own a row, as arrays indexed by row, so that a steady decode step costs no Python per request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from core.batch.result import Accepted
from core.invariants import check
from core.memory.seat import Seat
from core.types.arrays import Bools, Ints
from core.types.request import Req, RequestState


class RunningSet:
    """Arrays by row. `tokens`: ids known on the host. `known`: how many. `planned`: the most tokens whose KV was
    cached, or is written by a step that was planned. `planned_lower`: the least.

    Under overlap a step may be planned whose input token is still on the device, so `planned_lower` may exceed `known`,
    by the one token that two steps in flight allow, and by those that are `unseen`. How many drafts such a step accepts
    is not known either: `planned` counts all of them, beyond `limit` too, until the result is there. Without steps in
    flight, and without drafts, both are the same. `prefill_end`: the position at which the first new token is sampled.
    `limit`: tokens in the pools after the last useful step, prompt + max_new_tokens - 1, since the last token sampled
    is never fed back.
    """

    def __init__(self, num_rows: int, max_len: int) -> None:
        # An array of objects: the owners of a step's rows are then one gather and not a loop.
        self.reqs: npt.NDArray[np.object_] = np.full(num_rows, None, np.object_)
        # int32 halves a table of rows x context; the system maps its pages only when a row first reaches them.
        self.tokens: npt.NDArray[np.int32] = np.zeros((num_rows, max_len), np.int32)
        self.known: Ints = np.zeros(num_rows, np.int64)
        self.planned: Ints = np.zeros(num_rows, np.int64)
        self.planned_lower: Ints = np.zeros(num_rows, np.int64)
        self.prefill_end: Ints = np.zeros(num_rows, np.int64)
        self.prompt_lens: Ints = np.zeros(num_rows, np.int64)
        self.unseen: Ints = np.zeros(num_rows, np.int64)
        """Tokens beside the first of a step in flight that `planned_lower` counts already, as `resolve` has learnt."""
        self.resolved = 0
        """The newest step with drafts of which `planned` and `planned_lower` know how far it came."""
        self.limit: Ints = np.zeros(num_rows, np.int64)
        self.deltas: Ints = np.zeros(num_rows, np.int64)
        """What images add to the position of every token behind the prompt."""
        self.priorities: Ints = np.zeros(num_rows, np.int64)
        self.speculates = np.zeros(num_rows, np.bool_)
        """Whether the owner's drafts may be verified."""
        self.drafted: Ints = np.zeros(num_rows, np.int64)
        self.accepted: Ints = np.zeros(num_rows, np.int64)
        """Drafts that steps verified for the owner, and how many of its tokens were drafts."""
        self.returned = np.zeros(num_rows, np.bool_)
        """Whether the owner was retracted before."""
        self.last_token_at = np.zeros(num_rows, np.float64)
        """When the owner's newest token came, in seconds of the loop's clock; means nothing before its first token."""
        self._member = np.zeros(num_rows, np.bool_)
        """Whether the row has an owner."""
        self._order: Ints = np.empty(num_rows, np.int64)
        """Its first `_ordered` entries are rows by admission. If `_stale_order`, some of them have no owner."""
        self._ordered = 0
        self._moved = 0
        """Owners of which `deltas` is not 0."""
        self._stale_order = False

    def __len__(self) -> int:
        return int(np.count_nonzero(self._member))

    @property
    def order(self) -> Ints:
        """int64[n]: rows in the order of their admission. Do not keep it: the next change of the set replaces it."""
        order = self._order[: self._ordered]
        if self._stale_order:
            order = order[self._member[order]]
            self._ordered, self._stale_order = len(order), False
            # A new array: a caller that still iterates over an older answer keeps that.
            self._order = np.concatenate([order, np.empty(len(self._order) - len(order), np.int64)])
        return order

    def add(self, req: Req, seat: Seat) -> None:
        """Seat `req` in `seat.row`. All tokens it knows are to be prefilled, less those that the cache already holds.

        Raises InvariantViolation if the row has an owner.
        """
        row, ids = seat.row, req.known_ids()
        place = len(self.order)
        check("request_state", not self._member[row], row=row)
        self.tokens[row, : len(ids)] = ids
        self.known[row] = self.prefill_end[row] = len(ids)
        self.planned[row] = self.planned_lower[row] = seat.cached_tokens
        self.unseen[row] = 0
        self.prompt_lens[row] = req.prompt_len
        self.limit[row] = req.prompt_len + req.max_new_tokens - 1
        self.deltas[row] = delta = req.images.delta
        self._moved += delta != 0
        self.priorities[row] = req.priority
        self.speculates[row] = req.speculates
        self.drafted[row], self.accepted[row] = req.draft_tokens, req.accepted_draft_tokens
        self.returned[row] = req.retractions > 0
        self.last_token_at[row] = req.last_token_at
        self.reqs[row] = req
        self._member[row] = True
        self._order[place] = row
        self._ordered = place + 1
        req.row, req.generation = row, seat.generation
        req.move_to(RequestState.RUNNING)

    def rejoin(self, row: int) -> None:
        """The owner of `row`, seated just now, needs no prefill: all but its newest token are brought back."""
        known = int(self.known[row])
        self.planned[row] = self.planned_lower[row] = self.prefill_end[row] = known - 1

    def remove(self, req: Req) -> Ints:
        """Unseat `req` and move its outputs into it. Returns int64[n]: known tokens whose KV other requests may find.

        These are tokens whose KV planned steps write. If `req` has sampled, its last token out is not among them: the
        step that computes it may still be in flight, so no result vouches for what that step writes.
        Raises InvariantViolation if `req` does not own its row.
        """
        row = req.row
        check("request_state", self.reqs[row] is req, row=row)
        lower, planned, known = int(self.planned_lower[row]), int(self.planned[row]), int(self.known[row])
        most = known + 1 + int(self.unseen[row])
        check("request_state", lower <= planned and lower <= most, lower=lower, planned=planned, known=known)
        req.outputs = self.tokens[row, req.prompt_len : known].copy()
        written = self.ids(row, min(planned, known - self.has_sampled(row)))
        req.last_token_at = float(self.last_token_at[row])
        req.draft_tokens, req.accepted_draft_tokens = int(self.drafted[row]), int(self.accepted[row])
        self.reqs[row] = None
        self._moved -= req.images.delta != 0
        self._member[row] = False
        self._stale_order = True
        req.row, req.generation = 0, -1
        return written

    def plan_prompt(self, row: int, end: int) -> None:
        """The step being planned computes the prompt of `row` up to position `end`."""
        self.planned[row] = self.planned_lower[row] = end

    def plan_decodes(self, rows: Ints, counts: Ints) -> None:
        """The step being planned computes at least one token of each of `rows`, at most `counts`; int64[n] both."""
        self.planned[rows] += counts
        self.planned_lower[rows] += 1

    def append(self, rows: Ints, known: Ints, tokens: Ints) -> None:
        """`tokens[i]` is number `known[i]` of the owner of `rows[i]`, int64[A] each; those of a row in their order."""
        self.tokens[rows, known] = tokens
        # Of a row with several the last one decides.
        self.known[rows] = known + 1

    def settle(self, step_id: int, rows: Ints, before: Ints, most: Ints) -> None:
        """Each of `rows` knew `before` tokens, and took those that it has more from a step that could give it `most`.

        int64[n] each.
        """
        counts = self.known[rows] - before
        if step_id <= self.resolved:
            self.unseen[rows] -= counts - 1
            return
        self.resolved = step_id
        self.planned[rows] -= most - counts
        self.planned_lower[rows] += counts - 1

    def resolve(self, step_id: int, rows: Ints, counts: Ints, most: Ints) -> None:
        """A step in flight, which could give each of `rows` `most` tokens, gave them `counts`; int64[n] each."""
        check("request_state", step_id > self.resolved, step=step_id, resolved=self.resolved)
        self.resolved = step_id
        self.planned[rows] -= most - counts
        self.planned_lower[rows] += counts - 1
        self.unseen[rows] = counts - 1

    def drafted_in(self, rows: Ints, before: Ints, accepted: Accepted) -> None:
        """Count the drafts of a step in which each of `rows` knew `before` tokens, int64[n] both.

        `accepted`: what became of them. What was dropped behind the end of a row was no draft of it.
        """
        self.drafted[rows] += accepted.proposed
        # The last token that a row has from a step is no draft, unless it was dropped.
        self.accepted[rows] += np.minimum(self.known[rows] - before, accepted.counts - 1)

    def has_sampled(self, row: int) -> bool:
        """Whether the owner of `row` got a token since it was seated."""
        return bool(self.known[row] > self.prefill_end[row])

    def has_advanced(self, rows: Ints, tokens: int) -> Bools:
        """bool[n]: whether owners of `rows`, int64[n], got `tokens` tokens since they were seated or never gave way."""
        return ~self.returned[rows] | (self.known[rows] - self.prefill_end[rows] >= tokens)

    def ids(self, row: int, end: int, start: int = 0) -> Ints:
        """int64[end - start]: a copy of the known tokens of `row` at positions [start, end)."""
        return self.tokens[row, start:end].astype(np.int64)

    def deltas_of(self, rows: Ints) -> Ints | None:
        """int64[n]: the `deltas` of `rows`, int64[n]; None where all are 0."""
        found = self.deltas[rows] if self._moved else None
        return found if found is not None and found.any() else None

    def decoding(self) -> Ints:
        """int64[n]: rows that can take a decode step, oldest first: prompt planned to its end, outputs not."""
        rows = self.order
        planned = self.planned[rows]
        return rows[(planned >= self.prefill_end[rows]) & (planned < self.limit[rows])]

    def waits_for_lengths(self) -> bool:
        """Whether some row takes no decode step only because drafts in flight may prove right up to its end."""
        rows = self.order
        done = (self.planned[rows] >= self.prefill_end[rows]) & (self.planned[rows] >= self.limit[rows])
        return bool((done & (self.planned_lower[rows] < self.limit[rows])).any())

    def prefilling(self) -> Ints:
        """int64[n]: rows whose prompt is not planned to its end, oldest first."""
        rows = self.order
        return rows[self.planned[rows] < self.prefill_end[rows]]

    def members(self) -> list[Req]:
        """All running requests, oldest admission first."""
        return self.owners(self.order)

    def owner(self, row: int) -> Req:
        """The owner of `row`. Raises InvariantViolation if it has none."""
        req: Req | None = self.reqs[row]
        check("request_state", req is not None, row=row)
        assert req is not None
        return req

    def owners(self, rows: Ints) -> list[Req]:
        """The owner of each of `rows`, int64[n]. One gather, no Python per request.

        Raises InvariantViolation if a row has none.
        """
        check("request_state", bool(self._member[rows].all()), rows=rows)
        found: list[Req] = self.reqs[rows].tolist()
        return found
