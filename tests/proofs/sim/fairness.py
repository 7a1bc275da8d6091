"""What tenants owe each other: a step's prompt tokens by weight, rows and pages by what each holds. By its own books.

`starved`: a tenant with a prompt that has a row or room for it gets half of its share of the budget at least, whatever
others send. `robbed`: a request gives way to one of another tenant only if that then holds no more than the one that
gave; and when pages run out, a request of the tenant that holds most gives way. `kept_out`: a tenant does not wait for
a row while another holds so many more.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from core.batch.schedule_batch import ScheduleBatch
from core.types.request import Req, RequestState
from tests.proofs.sim.clients import Client
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation

ADVANCE = 8
"""Tokens that a request puts out after it came back before it gives way again."""
SEAT = 16
"""Tokens that a seat is charged beside its prompt."""
PATIENCE = 24
"""Plans in a row that a tenant may be kept out of a row which another could give."""


class Fairness(Family):
    """Silent where there is one tenant."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        scenario = view.scenario
        self._budget = scenario.config.prompt_tokens
        self._several = len(scenario.weights) > 1
        self._owed: Counter[str] = Counter()
        self._out: Counter[str] = Counter()
        self._starts: dict[Client, int] = {}
        """Of those who run: the tokens they came (back) with."""
        if self._several:
            self._watch()

    def _watch(self) -> None:
        lifecycle: Any = self.view.scheduler._lifecycle
        admit, retract, preempt = lifecycle.admit, lifecycle.retract, lifecycle.preempt

        def admitted(req: Req, *args: Any, **kwargs: Any) -> bool:
            tokens = req.prompt_len + len(req.outputs)
            seated: bool = admit(req, *args, **kwargs)
            if seated:
                self._starts[req.sink] = tokens
            return seated

        def preempted(req: Req, newcomer: Req) -> None:
            if req.tenant != newcomer.tenant:
                self._check_move(req, newcomer)
                req.sink.by_share += 1
                self.view.hits("share_preemption")
            preempt(req, newcomer)

        def gave_way(req: Req, *, keep: bool = True) -> None:
            client: Client = req.sink
            own = client.gave_way + client.by_class + client.by_share + client.forced
            if keep and req.retractions == own:
                self._check_pressure(req)
            retract(req, keep=keep)

        lifecycle.admit, lifecycle.retract, lifecycle.preempt = admitted, gave_way, preempted

    def planned(self, batch: ScheduleBatch | None) -> None:
        """See the module: `starved` and `kept_out`."""
        if batch is None or not self._several:
            return
        extend = batch.num_extend
        got: Counter[str] = Counter()
        owners = {client.req.row: client.req.tenant for client in self.view.seated()}
        for row, length in zip(batch.rows[:extend].tolist(), batch.extend_lens[:extend].tolist(), strict=True):
            got[owners[row]] += length
        self._check_starved(got, sum(got.values()) + sum(batch.encoder_lens.tolist()))
        if extend or self.view.scenario.config.mixed_chunk:
            self._check_kept_out()

    def _check_starved(self, got: Counter[str], used: int) -> None:
        weights = {req.tenant: req.weight for req in self.view.clients.live}
        prompting = {c.req.tenant for c in self.view.seated() if c.admissions[-1].planned < c.admissions[-1].target}
        prompting |= self._admissible()
        self._owed = Counter({tenant: owed for tenant, owed in self._owed.items() if tenant in prompting})
        if used < self._budget:
            return
        for tenant in prompting:
            half = self._budget * weights[tenant] / (2 * sum(weights.values()))
            owed = self._owed[tenant] = max(0, self._owed[tenant] + half - got[tenant])  # type: ignore[assignment]
            cross = self.view.scenario.cross
            longest = self._budget + (0 if cross is None else cross.longest)
            if owed > 2 * longest + 3 * len(weights) * (SEAT + 1):
                raise Violation(
                    "starved", f"{tenant} is in the middle of a prompt, and is owed {owed:.1f} tokens of it"
                )

    def _admissible(self) -> set[str]:
        """Tenants that wait though there is room for all that wait, with all that may still be put out."""
        view, scenario = self.view, self.view.scenario
        waiting = [
            req for req in view.clients.live if req.state is RequestState.WAITING and req.sink.arrived < view.now
        ]
        seats = list(view.seated())
        if scenario.states or scenario.windows or scenario.cross or len(seats) + len(waiting) > scenario.rows:
            return set()
        lengths = [client.req.prompt_len + client.req.max_new_tokens for client in seats]
        lengths += [req.prompt_len + req.max_new_tokens for req in waiting]
        fits = sum(-(-length // scenario.page_size) + 1 for length in lengths) <= scenario.pages
        return {req.tenant for req in waiting} if fits else set()

    def _check_kept_out(self) -> None:
        """Rows only: pages, and what other pools refuse, are for `robbed` and for those pools."""
        free = self.view.scenario.rows - sum(1 for _ in self.view.seated())
        waits = {req.tenant for req in self.view.clients.live if req.state is RequestState.WAITING}
        for tenant in waits:
            kept = free == 0 and self._could_gain(tenant)
            self._out[tenant] = self._out[tenant] + 1 if kept else 0
            if self._out[tenant] > PATIENCE:
                raise Violation("kept_out", f"{tenant} waits for a row, and another tenant holds so many more")
        for tenant in set(self._out) - waits:
            del self._out[tenant]

    def _could_gain(self, tenant: str) -> bool:
        """One row less would leave some other tenant with more, and several of its rows could go."""
        rows = Counter(client.req.tenant for client in self.view.seated())
        weights = {req.tenant: req.weight for req in self.view.clients.live}
        able = Counter(client.req.tenant for client in self.view.seated() if self._movable(client))
        pages, all_pages = self._pages(), self.view.scenario.pages
        if max(pages.values(), default=0) * 2 > all_pages:
            return False
        return (
            any(
                able[other] > 1 and (rows[other] - 1) / weights[other] >= (rows[tenant] + 1) / weights[tenant]
                for other in rows
                if other != tenant
            )
            and pages[tenant] == 0
        )

    def _movable(self, client: Client) -> bool:
        stay = client.admissions[-1] if client.admissions else None
        if stay is None or stay.planned >= max(stay.target, client.last):
            return False
        return client.req.retractions == 0 or self._advanced(client)

    def _check_move(self, req: Req, newcomer: Req) -> None:
        client: Client = req.sink
        rows = Counter(each.req.tenant for each in self.view.seated())
        pages, size = self._pages(), self.view.scenario.page_size
        need = -(-(newcomer.prompt_len + len(newcomer.outputs)) // size)
        gains = self._share(newcomer, rows[newcomer.tenant] + 1, pages[newcomer.tenant] + need)
        left = self._share(req, rows[req.tenant] - 1, self._pages(client)[req.tenant])
        if left < gains:
            text = f"{client.name} of {req.tenant}, left with {left:.3f}, gives way to {newcomer.sink.name}"
            raise Violation("robbed", f"{text} of {newcomer.tenant}, which then holds {gains:.3f}")
        if req.retractions and not self._advanced(client):
            raise Violation("robbed", f"{client.name} gives way again, and has not put out {ADVANCE} tokens since")

    def _check_pressure(self, req: Req) -> None:
        """Nothing is known of the reason but that it is no class, no share and no force: pages ran out."""
        # One whose last tokens are still to be handed on has given back its row, and holds nothing.
        if len({each.tenant for each in self.view.clients.live if each.state is not RequestState.FINISHED}) < 2:
            return
        seats = list(self.view.seated())
        settled = [c for c in seats if not c.req.retractions or self._advanced(c)] or seats
        rows, pages = Counter(c.req.tenant for c in seats), self._pages()
        shares = {c.req.tenant: self._share(c.req, rows[c.req.tenant], pages[c.req.tenant]) for c in settled}
        if req.sink not in settled or shares[req.tenant] < max(shares.values()):
            raise Violation("robbed", f"{req.sink.name} of {req.tenant} gives way for pages, of shares {shares}")

    def _advanced(self, client: Client) -> bool:
        # What the client has is behind by the tokens that are handed on after the plan.
        known = int(self.view.scheduler.running.known[client.req.row])
        return known - self._starts[client] >= ADVANCE

    def _pages(self, leaving: Client | None = None) -> Counter[str]:
        """By tenant: pages that its rows did not find, and the longest prefix that one of them found."""
        taken: Counter[str] = Counter()
        found: Counter[str] = Counter()
        for client in (each for each in self.view.seated() if each is not leaving):
            taken[client.req.tenant] += self._taken(client)
            found[client.req.tenant] = max(found[client.req.tenant], self._found(client))
        return taken + found

    def _found(self, client: Client) -> int:
        return int(self.view.memory._shared[client.req.row]) // self.view.scenario.page_size

    def _taken(self, client: Client) -> int:
        return int(self.view.memory._count[client.req.row]) - self._found(client)

    def _share(self, req: Req, rows: int, pages: int) -> float:
        return max(rows / self.view.scenario.rows, pages / self.view.scenario.pages) / req.weight
