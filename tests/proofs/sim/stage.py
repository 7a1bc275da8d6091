"""A scripted run: the same world with every oracle on, but the test says who arrives and when the device moves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from core.config import SchedulerConfig
from core.scheduler.outputs import Ending
from core.types.io import FinishReason
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from tests.proofs.sim.clients import Client
from tests.proofs.sim.reference import EncoderSide
from tests.proofs.sim.scenario import Cross, Drafts, Scenario, States
from tests.proofs.sim.story import Hits, Story
from tests.proofs.sim.world import World

OWN = ("priority", "deadline", "queue_deadline", "tenant", "weight")
"""Fields of the request; others of `add` are of its sampling parameters."""


class Stage:
    """A world in which nothing happens by itself. Time passes by one tick per step."""

    def __init__(
        self,
        *,
        rows: int = 4,
        pages: int = 32,
        page_size: int = 4,
        context: int = 64,
        cache: str = "radix",
        depth: int = 2,
        retract_every: int = 0,
        real_steps: bool = False,
        chunk: int = 16,
        mixed: bool = True,
        policy: str = "fcfs",
        states: States | None = None,
        cross: Cross | None = None,
        weights: tuple[float, ...] = (1.0,),
        drafts: Drafts | None = None,
    ) -> None:
        config = SchedulerConfig(chunked_prefill_size=chunk, mixed_chunk=mixed, policy=policy, max_queued_requests=256)
        scenario = Scenario(
            seed=0, rows=rows, pages=pages, page_size=page_size, context=context, cache=cache, depth=depth,
            config=config, symbols=1, arrivals=0.0, long_outputs=False, speed=0.0, retract_every=retract_every,
            real_steps=real_steps, states=states, cross=cross, weights=weights, drafts=drafts,
        )  # fmt: skip
        self.world = World(scenario, Story(tracing=True), Hits())
        self.device, self.scheduler = self.world.device, self.world.scheduler
        self.memory, self.hits = self.world.memory, self.world.hits.counts

    def add(self, prompt: Sequence[int], max_tokens: int = 8, *, salt: str = "", **params: Any) -> Client:
        """A request at the door; `params` are fields of `SamplingParams`, or of the request itself. Where there is an
        encoder, `prompt` is for it.
        """
        cross, encoder = self.world.inputs.cross, None
        sides: dict[str, Any] = {"prompt": np.asarray(prompt, np.int64)}
        if cross is not None:
            assert cross.fits(list(prompt)), "the door would refuse it"
            sides = cross.entry.sides(sides["prompt"])
            encoder = EncoderSide(tuple(prompt), cross.spec.forced_first, cross.spec.forced_last)
        assert max_tokens <= self.world.scenario.room(len(sides["prompt"])), "the door would refuse it"
        own = {name: params.pop(name) for name in OWN if name in params}
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **params})
        req = Req(
            "same-name", 0, params=sampling, seed=sampling.seed or 0, max_new_tokens=max_tokens,
            salt=self.memory.cache.namespace(salt, None), arrived_at=self.world.now, **own, **sides,
        )  # fmt: skip
        number = len(self.world.clients.live) + len(self.world.clients.gone) + 1
        client = Client(f"#{number}", req, number=number, arrived=self.world.now, salt=salt)
        client.deadline, client.queue_deadline, client.priority = req.deadline, req.queue_deadline, req.priority
        client.siblings.append(client)
        client.pools, client.encoder = self.world.scenario.pools, encoder
        req.sink = client
        self.world.clients.live[req] = client
        self.scheduler.intake.add(req)
        return client

    def abort(self, client: Client) -> None:
        """The client leaves; the next step hears of it."""
        self.world.clients.end(Ending(client.req, reason=FinishReason.CANCELLED))

    def step(self, *, execute: int = 1, deliver: int = 1) -> None:
        """One step of the scheduler; then the device executes and delivers at most so many steps."""
        self.world.tick()
        for _ in range(execute):
            self.device.execute_one()
        for _ in range(deliver):
            self.device.deliver_one()

    def stall(self) -> None:
        """One step of the scheduler while the device stands still."""
        self.step(execute=0, deliver=0)

    def finish(self) -> None:
        """Run until everybody has ended; nothing may be left behind."""
        self.world.finish()

    @staticmethod
    def complete(*clients: Client) -> None:
        """They ended by themselves, with all tokens of the reference."""
        for client in clients:
            assert client.ended is not None and client.ended.reason in (FinishReason.LENGTH, FinishReason.STOP), client
            assert tuple(client.tokens) == client.answer.tokens

    @staticmethod
    def cut(*clients: Client) -> None:
        """They were ended by others, with a beginning of what the reference says."""
        for client in clients:
            assert client.ended is not None and client.ended.reason is FinishReason.CANCELLED, client
            assert tuple(client.tokens) == client.answer.tokens[: len(client.tokens)]
