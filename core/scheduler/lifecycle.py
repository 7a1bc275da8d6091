"""Every change of a request's state: admitted, retracted, ended. The one path on which rows and pages go back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from core.invariants import check
from core.memory.request_memory import RequestMemory
from core.scheduler.fair_share import FairShare
from core.scheduler.host_cache import HostCache
from core.scheduler.outputs import Ending
from core.scheduler.running import RunningSet
from core.scheduler.sampling_table import SamplingTable
from core.scheduler.tally import Tally
from core.scheduler.waiting_queue import WaitingQueue
from core.types.arrays import Ints
from core.types.request import Req, RequestState


class Lifecycle:
    """Moves requests between the waiting queue, the running set and their end, and keeps memory in step."""

    def __init__(
        self,
        waiting: WaitingQueue,
        running: RunningSet,
        memory: RequestMemory,
        sampling: SamplingTable,
        tally: Tally,
        shares: FairShare,
        host: HostCache | None = None,
    ) -> None:
        """`host`: what host memory keeps of keys and values; None where it keeps nothing."""
        self.rejoining = None if host is None else host.rejoining
        self.copies = None if host is None else host.prefixes
        self.handing = None if host is None else host.handing
        self.taking = None if host is None else host.taking
        self.shares = shares
        self.waiting = waiting
        self.running = running
        self.memory = memory
        self.sampling = sampling
        self._tally = tally
        self._ended: list[Ending] = []
        """Endings that `take_ended` has not returned yet."""
        self._fresh: list[Req] = []
        """Running requests that `take_fresh` has not returned since their admission."""

    def enter(self, req: Req) -> None:
        """Queue a new request."""
        self.waiting.push(req)
        self.shares.entered(req)

    def would_admit(self, req: Req, reserve_pages: int, leaving: Ints) -> int | None:
        """Whether `req` fits once the owners of rows `leaving`, int64[k], are retracted.

        Returns what `admit` then needs as `at_most`, or None if `req` would not fit. `reserve_pages` as for `admit`.
        """
        return self.memory.would_admit(
            *(req.images.keyed(req.known_ids()), req.salt, reserve_pages, leaving),
            encoder_tokens=req.encoder_len,
            usable=req.usable,
        )

    def admit(self, req: Req, reserve_pages: int, now: float, at_most: int | None = None) -> bool:
        """Give a waiting request a row, and pages for all known tokens; False, and no change, if it does not fit.

        `reserve_pages`: pages that must stay obtainable for outputs. `at_most`: limit of the tokens that come from the
        prefix cache. `now`: seconds of the loop's clock.
        """
        ids = req.images.keyed(req.known_ids())
        taking = self.taking if self.taking is not None and req in self.taking else None
        copies = self.copies if taking is None and (self.rejoining is None or req not in self.rejoining) else None
        if taking is not None:
            at_most = taking.at_most(at_most)
        elif copies is not None:
            at_most = copies.at_most(ids, req.salt, req.usable, at_most)
        seat = self.memory.admit(
            ids,
            req.salt,
            reserve_pages,
            encoder_tokens=req.encoder_len,
            adapter_slot=req.adapter_slot,
            at_most=at_most,
            elsewhere=0 if copies is None else copies.known(ids, req.salt) // self.memory.page_size,
            usable=req.usable,
        )
        if seat is None:
            return False
        cached = seat.cached_tokens
        if taking is not None:
            told, found = taking.cached_tokens(req), taking.fetch(req, seat)
            cached, seat = cached if found is seat else told, found
        elif copies is not None:
            seat = copies.fetch(seat, ids, req.salt, req.usable)
            cached = seat.cached_tokens
        self.waiting.took(req)
        self.running.add(req, seat)
        self.shares.seated(req)
        if req.pooling is None:
            self.sampling.fill(req)
        self._fresh.append(req)
        if self.rejoining is not None and self.rejoining.rejoin(req, seat):
            self.running.rejoin(seat.row)
            self.memory.vouch(seat.row, len(ids) - 1)
            req.computed_from = min(req.computed_from, seat.cached_tokens)
        elif req.scheduled_at is None:
            req.scheduled_at = now
            req.cached_tokens, req.computed_from = cached, seat.cached_tokens
            self._tally.scheduled(req, now)
        else:
            # The least of all its admissions: if it is condemned, what it computed after any of them is given up.
            req.computed_from = min(req.computed_from, seat.cached_tokens)
            self._tally.recomputed_tokens += len(ids) - seat.cached_tokens + req.encoder_len
        return True

    def computed(self, row: int, tokens: int) -> None:
        """The `tokens` tokens of `row` have led to a token, the first one since it was seated."""
        self.memory.vouch(row, tokens)
        if self.copies is not None and self.copies.trails is not None:
            # Kept when its row is given back, part of it would be gone.
            req = self.running.owner(row)
            self.copies.keep(row, req.images.keyed(self.running.ids(row, tokens)), req.salt, req.prompt_len)

    def retract(self, req: Req, *, keep: bool = True) -> None:
        """Take row and pages from a running request and queue it again. It keeps its outputs.

        Where host memory has room, what it has computed is copied there, and it goes on from that later.

        A step in flight may still sample for it. That token is dropped, because the row's generation has changed, and
        sampled again later: the same one, because sampling depends on seed and position only (law 13). With `keep` off,
        nothing more of what the request computed goes to the prefix cache.
        """
        self._unseat(req, keep=keep, returns=True)
        req.move_to(RequestState.WAITING)
        req.retractions += 1
        self._tally.preemptions += 1
        self.waiting.push(req)

    def start_over(self) -> int:
        """Retract all that runs, and give up every key and value there is, in the cache and in host memory too.

        Returns how many requests ran. For changed weights: no token may read what others have computed.
        """
        running = self.running.members()
        for req in running:
            self.retract(req, keep=False)
        for kept in (self.rejoining, self.handing, self.taking, self.copies):
            if kept is not None:
                kept.forget()
        self.flush()
        left = self.memory.cache.cached_pages
        check("pools_start_over", left == 0 and self.memory.rows.used == 0, cached=left, rows=self.memory.rows.used)
        self._tally.restart_preemptions += len(running)
        return len(running)

    def flush(self, tenant: str | None = None) -> int:
        """Free every cached page that no row reads, and all copies of prefixes, of `tenant` only if given.

        Returns how many pages. Not within a plan.
        """
        if self.copies is not None:
            self.copies.flush(tenant)
        return self.memory.flush(tenant)

    def preempt(self, req: Req, newcomer: Req) -> None:
        """Retract `req` for `newcomer`, which is of a higher class or of a tenant that holds less."""
        self.retract(req)
        if req.tenant == newcomer.tenant:
            self._tally.priority_preemptions += 1
        else:
            self._tally.share_preemptions += 1

    def is_without_logits(self, req: Req) -> bool:
        """Whether `req` runs and has had no token since it was seated: no logits vouch for what it computes."""
        return req.state is RequestState.RUNNING and not self.running.has_sampled(req.row)

    def condemn(self, ended: Ending) -> None:
        """End a running request whose numbers are wrong. No later request finds what it computed (decision 21).

        Its pages were offered to the prefix cache while it was still computing, so other requests may read them. The
        cache gives up the nodes from where the request began to compute, and all nodes below, whichever request
        computed those. Requests that read such nodes are retracted, and nothing of theirs is kept: they compute the
        same tokens again behind a clean prefix. Tokens that a reader has sent stand: they came of finite logits, and
        logits are not finite where a key or value that they depend on is not.
        """
        req = ended.req
        ids = req.images.keyed(self.running.ids(req.row, int(self.running.known[req.row])))
        doubt = self.memory.doubt(req.row, ids, req.computed_from)
        self.end(replace(ended, condemned=True), keep=False)
        for reader in self.running.owners(np.asarray(doubt.readers, np.int64)):
            self.retract(reader, keep=False)
        self.memory.condemn(doubt)

    def end(self, ended: Ending, *, keep: bool = True) -> None:
        """End a request in any state. One that has ended already is left alone, so late aborts are harmless.

        With `keep` off, nothing more of what it computed goes to the prefix cache.
        """
        req = ended.req
        if req.state is RequestState.FINISHED:
            return
        if req.state is RequestState.RUNNING:
            self._unseat(req, keep=keep)
        else:
            self.waiting.remove(req)
            for kept in (self.rejoining, self.taking):
                if kept is not None:
                    kept.gone(req, 0)
            if self.handing is not None and req.kept is not None:
                self.handing.refuse(req)
        req.move_to(RequestState.FINISHED)
        self.shares.left(req)
        self._ended.append(ended)

    def _unseat(self, req: Req, *, keep: bool, returns: bool = False) -> None:
        # Read first: `running.remove` resets them in `req`.
        row, generation, sampled = req.row, req.generation, self.running.has_sampled(req.row)
        if req in self._fresh:
            self._fresh.remove(req)
        self.shares.unseated(req)
        tokens = int(self.running.known[row]) - 1
        # What a request has not computed to its end is not copied: it would have to go on in the middle of its prompt.
        rooms = [room for room in (self.rejoining, self.taking) if room is not None]
        copied = returns and keep and sampled and any(room.leave(req, tokens) for room in rooms)
        still_waited = [] if copied else [room.gone(req, row) for room in rooms]
        if any(still_waited):
            keep = False
        if self.copies is not None and self.copies.gone(row):
            keep = False
        written = req.images.keyed(self.running.remove(req))
        if copied:
            # Its leased pages come back when they are copied. It does not look for them in the cache.
            self.memory.release(row, generation, written[:0])
            return
        if self.handing is not None and req.kept is not None and not returns:
            if keep and sampled:
                self.handing.keep(req, row)
            else:
                self.handing.refuse(req)
        if keep and sampled:
            self.memory.vouch(row, len(written))
            if self.copies is not None:
                self.copies.keep(row, written, req.salt, req.prompt_len)
        self.memory.release(row, generation, written if keep else written[:0])

    def take_ended(self) -> tuple[Ending, ...]:
        """Endings since the last call, in order: the terminals of their requests."""
        ended, self._ended = tuple(self._ended), []
        return ended

    def untold(self) -> list[Req]:
        """Requests that ended since the last call of `take_ended`."""
        return [ended.req for ended in self._ended]

    def take_fresh(self) -> tuple[list[Req], Ints]:
        """Requests admitted since the last call that still run, and their rows as int64[n]."""
        fresh, self._fresh = self._fresh, []
        return fresh, np.fromiter((req.row for req in fresh), np.int64, len(fresh))
