"""How many steps the work that is left may take, computed from that work; and no step more.

Counted from the moment on which nothing more arrives and the device finishes at least one step between two steps of the
scheduler. `Conservation` sees to it that each step does something; here is what all of them together may come to:

- a prompt of p tokens takes ceil(p / budget) steps that fill in prompts, since the steps before it are full or end
  other prompts (with an encoder one more, whose input may need a step of its own beside one token);
- a step without prompts gives every row that decodes one token, so where everybody fits at once they take as many as
  the longest output, and where not, as many as all outputs together;
- a row that verifies drafts gets one token at least, and near its end waits for each step before the next;
- who gives way is filled in again, with all that it knows by then, and may lose what is in flight for it.
"""

from __future__ import annotations

from tests.proofs.sim.clients import Client
from tests.proofs.sim.conservation import pages
from tests.proofs.sim.family import Family, View
from tests.proofs.sim.story import Violation


class Liveness(Family):
    """Silent until `begin`."""

    def __init__(self, view: View) -> None:
        super().__init__(view)
        config = view.scenario.config
        self._budget, self._depth = config.prompt_tokens, view.device.depth
        self._left: int | None = None
        self._gave_way: dict[Client, int] = {}

    def begin(self) -> None:
        """Nothing arrives from now on."""
        clients = list(self.view.clients.live.values())
        self._gave_way = {client: _moves(client) for client in clients}
        outputs = [client.req.max_new_tokens - len(client.tokens) for client in clients]
        filled = sum(self._to_fill(client) for client in clients)
        decoded = max(outputs, default=0) if self._at_once(clients) else sum(outputs)
        if self.view.scenario.drafts is not None:
            # Near its end a row that may be there waits for the step before to say so.
            waits = [min(left, 2 * self.view.scenario.drafts.most + 2) * (self._depth - 1) for left in outputs]
            decoded += max(waits, default=0) if self._at_once(clients) else sum(waits)
        # What is in flight comes first, and the last result is taken by one more step of the scheduler.
        self._left = filled + decoded + self._depth + 1

    def _to_fill(self, client: Client) -> int:
        """Steps that fill in what a request lacks of what it knows."""
        known = client.req.prompt_len + len(client.tokens)
        if client.req.row:
            stay = client.admissions[-1]
            known = stay.target - stay.planned
        # Where tenants share a step, it need not be full or end the prompt that is looked at.
        shared = len(self.view.scenario.weights) > 1
        return max(0, -(-known // self._budget)) + (client.encoder is not None) + shared

    def _at_once(self, clients: list[Client]) -> bool:
        """Whether rows and pages hold everybody to the end, however little they share."""
        scenario = self.view.scenario
        if scenario.states or scenario.windows or scenario.cross or len(clients) > scenario.rows:
            return False
        size = scenario.page_size
        held = sum(pages(client.req.prompt_len + len(client.tokens), size) for client in clients)
        left = sum(client.req.max_new_tokens - len(client.tokens) for client in clients)
        # A page begun for each, and one for the sum.
        return held + pages(left, size) + len(clients) + 1 <= scenario.pages

    def after_step(self) -> None:
        """One step less; who gave way may take more."""
        if self._left is None:
            return
        self._left -= 1
        for client, before in self._gave_way.items():
            if (times := _moves(client)) > before:
                known = client.req.prompt_len + len(client.tokens)
                again = -(-known // self._budget) + self._depth + (client.encoder is not None)
                self._left += (times - before) * again
                self._gave_way[client] = times
        if self._left < 0:
            raise Violation("liveness", f"{len(self.view.clients.live)} requests take more steps than their work needs")


def _moves(client: Client) -> int:
    """How often it gave way, for whatever reason."""
    return client.gave_way + client.forced + client.by_class + client.by_share
