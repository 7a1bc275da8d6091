"""Which request is admitted next and which gives way, by the harness' own keys, patience and count of cached tokens."""

from __future__ import annotations

from typing import Any

from core.types.request import Req, RequestState
from tests.proofs.sim.clients import Client
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.shelf import Shelf
from tests.proofs.sim.story import Violation

MAX_IDLE_RETRACTIONS = 1
"""How often one request may give way while none gets a token or ends: it must not be preempted for ever."""
PATIENCE = 32
"""A request that so many younger ones were admitted before is first in line under `lpm`."""


def place(client: Client, policy: str) -> tuple[int, int]:
    """Smaller is served earlier, where what is cached makes no difference."""
    return (client.priority if policy == "priority" else 0, client.number)


class Order(Family):
    """Stands on the instance of the lifecycle: the queue and the cache are those of the very moment of an admission."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        self._policy = view.scenario.config.policy
        self._shelf = Shelf(view) if self._policy == "lpm" else None
        self._passed: dict[Client, int] = {}
        """How many younger requests were admitted before each."""
        self._gave: list[tuple[Client, set[Client]]] = []
        """Clients that gave way since the last look, each with all that ran."""
        self._chosen: Req | None = None
        """The request that others gave way for and that has not been admitted yet."""
        self._watch()

    def _watch(self) -> None:
        lifecycle = self.view.scheduler._lifecycle
        admit, retract, preempt = lifecycle.admit, lifecycle.retract, lifecycle.preempt

        def waiting_with(req: Req) -> list[Client]:
            live = [r for r in self.view.clients.live if r.tenant == req.tenant]
            return [r.sink for r in live if r.state is RequestState.WAITING]

        def made_way(loser: Req, newcomer: Req) -> None:
            # The newcomer was chosen before: what losers computed is in the cache from here on, and may fit others.
            if self._chosen is not newcomer:
                self._check_first(newcomer.sink, waiting_with(newcomer))
                self._chosen = newcomer
            preempt(loser, newcomer)

        def admitted(req: Req, *args: Any, **kwargs: Any) -> bool:
            waiting = waiting_with(req)
            if self._chosen is not req:
                self._check_first(req.sink, waiting)
            self._chosen = None
            taken = admit(req, *args, **kwargs)
            if taken and self._shelf is not None:
                for older in waiting:
                    if older.number < req.sink.number:
                        self._passed[older] = self._passed.get(older, 0) + 1
                        self.view.hits("lpm_passed_over")
            return taken

        def gave_way(req: Req, **kwargs: Any) -> None:
            self._gave.append((req.sink, set(self.view.seated())))
            retract(req, **kwargs)

        lifecycle.admit, lifecycle.retract = admitted, gave_way  # type: ignore[method-assign]
        lifecycle.preempt = made_way  # type: ignore[method-assign]

    def _check_first(self, chosen: Client, waiting: list[Client]) -> None:
        if self._shelf is None or len(waiting) == 1:
            first = min(waiting, key=lambda client: place(client, self._policy))
            if first is not chosen:
                raise Violation("order", f"{chosen.name} is tried before {first.name}, which is first in line")
            return
        self._shelf.note()
        cached = self._shelf.cached()
        ranks = {client: self._rank(client, self._shelf.match(client, cached)) for client in waiting}
        first = min(waiting, key=ranks.__getitem__)
        if first is not chosen:
            text = f"{chosen.name} at {ranks[chosen]} is tried before {first.name} at {ranks[first]}"
            raise Violation("lpm_order", f"{text}: (patient, cached tokens, arrival)")
        if not ranks[first][0]:
            self.view.hits("lpm_out_of_patience")

    def _rank(self, client: Client, cached: int) -> tuple[bool, int, int]:
        patient = self._passed.get(client, 0) < PATIENCE
        return patient, -cached if patient else 0, client.number

    def planned(self, batch: object) -> None:
        """What the rows hold now may be in the cache before anything else of this step is seen."""
        if self._shelf is not None:
            self._shelf.note()

    def after_step(self) -> None:
        """A client that gave way was last in line of those that run, and one got something since it did so before."""
        gave, self._gave = self._gave, []
        left = {client for client, _ in gave}
        for client, others in gave:
            if client.forced > client.forced_before:
                client.forced_before += 1
                continue
            if client.by_class > client.by_class_before:
                # `classes` looks at those.
                client.by_class_before += 1
                continue
            if client.by_share > client.by_share_before:
                # `fairness` looks at those.
                client.by_share_before += 1
                continue
            client.gave_way += 1
            self.view.hits("retraction")
            self._check_progress(client)
            # Of several tenants `fairness` says whose requests give way.
            others = set() if len(self.view.scenario.weights) > 1 else others
            if any(place(other, self._policy) > place(client, self._policy) for other in others - left):
                raise Violation("order", f"{client.name} gave way to one that the policy puts behind it")

    def _check_progress(self, client: Client) -> None:
        progress = self.view.clients.progress
        client.in_vain = client.in_vain + 1 if client.retracted_at == progress else 0
        client.retracted_at = progress
        if client.in_vain > MAX_IDLE_RETRACTIONS:
            raise Violation(
                "preempted_for_ever", f"{client.name} gave way {client.in_vain} times, no client got anything"
            )
