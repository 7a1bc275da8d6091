"""What comes from outside: requests through the production entry checks, aborts, and readers that behave badly."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np

from core.batch.schedule_batch import ScheduleBatch
from core.engine.adapters.table import AdapterTable
from core.engine.async_engine import AsyncEngine
from core.engine.input_processor import InputProcessor
from core.errors import AdapterNotFound, DeadlinePassed, InvalidRequest, Overloaded
from core.scheduler.outputs import Ending
from core.scheduler.scheduler import Scheduler
from core.text.tokenizer import Tokenizer
from core.types.io import FinishReason, GenerateRequest
from core.types.request import Req, RequestState
from core.types.sampling_params import SamplingParams
from tests.proofs.sim.adapter_inputs import AdapterInputs
from tests.proofs.sim.clients import Client, Clients
from tests.proofs.sim.cross_inputs import ENCODER_VOCAB, CrossInputs, entered
from tests.proofs.sim.device import SimExecutor
from tests.proofs.sim.reference import VOCAB, EncoderSide
from tests.proofs.sim.scenario import Scenario
from tests.proofs.sim.story import Hits, Story, Violation

TICK = 2.0**-7
"""Seconds between two steps of the scheduler; a power of two, so that sums of times are exact."""


class Inputs:
    """Draws what happens to one scheduler before each of its steps."""

    def __init__(
        self,
        scenario: Scenario,
        scheduler: Scheduler,
        device: SimExecutor,
        clients: Clients,
        rng: random.Random,
        story: Story,
        hits: Hits,
        table: AdapterTable | None = None,
    ) -> None:
        self._scenario, self._rates = scenario, scenario.faults
        self._scheduler, self._device, self._clients = scheduler, device, clients
        self._rng, self._story, self._hits = rng, story, hits
        cross = self.cross = None if scenario.cross is None else CrossInputs(scenario, scenario.cross)
        self.entry = InputProcessor(
            cast(Tokenizer, SimpleNamespace(chats=None)),
            scheduler.memory,
            VOCAB if cross is None else ENCODER_VOCAB,
            scenario.context,
            scenario.seed,
            adapters=table,
            encoder=None if cross is None else cross.entry,
        )
        self.adapters: AdapterInputs | None = None
        if scenario.adapters is not None and table is not None:
            adapters = self.adapters = AdapterInputs(scenario.adapters, table, rng, story, hits)
            clients.closed = lambda req: adapters.closed(req.adapter_slot)
        config = SimpleNamespace(scheduler=scenario.config)
        self._door = cast(AsyncEngine, SimpleNamespace(_scheduler=scheduler, _config=config, _refusal=None))
        self._prompts: list[list[int]] = [[0]]
        self._arrived = 0
        # Not the generator of the run, so that with one tenant a seed is what it was before there were others.
        self._tenants = random.Random(f"tenants of requests of {scenario.seed}")
        rates = (("abort", self._abort), ("abort_late", self._abort_late))
        self._per_step: list[tuple[float, Callable[[], None]]] = [
            (scenario.faults[name], act) for name, act in rates if name in scenario.faults
        ]

    def close(self) -> None:
        """No more requests from this entry."""
        self.entry.close()

    def before_step(self, now: float) -> None:
        """Arrivals first, so that an abort can meet a request in the intake."""
        if self.adapters is not None and (withdrawn := self.adapters.before_step()) is not None:
            for req in [req for req in self._clients.live if req.adapter_slot == withdrawn]:
                self._clients.end(Ending(req, reason=FinishReason.CANCELLED))
        if self._rng.random() < self._scenario.arrivals:
            self._arrive(now)
        for rate, act in self._per_step:
            if self._rng.random() < rate:
                act()

    def end_all(self, command: Callable[[Req], Ending]) -> None:
        """Queue an ending for everybody who is live."""
        for req in list(self._clients.live):
            self._clients.end(command(req))

    def _chance(self, fault: str) -> bool:
        rate = self._rates.get(fault)
        return rate is not None and self._rng.random() < rate

    def _arrive(self, now: float) -> None:
        cross = self.cross
        prompt = self._prompt() if cross is None else cross.draw(self._rng)
        room = self._scenario.room(len(prompt if cross is None else cross.cross.start_ids))
        power = 1 if self._scenario.long_outputs else 4
        asked = 1 + int(self._rng.random() ** power * room)
        if self._chance("too_big"):
            asked = room + 1 + int(self._rng.random() * 4)
        request = self._request(prompt, asked, now)
        try:
            # The production rule, of which the harness only counts what comes of it (`queue_bound`).
            AsyncEngine._refuse_if_late_or_full(self._door, request, now)
        except Overloaded:
            self._hits("queue_full")
            return
        except DeadlinePassed:
            self._check_late(request, now)
            return
        fits = cross is None or cross.fits(prompt)
        try:
            ids = np.asarray(prompt) if cross is None else entered(self.entry, request)
            reqs = self.entry.sequences(request, request.request_id, str(self._arrived), ids, now)
        except AdapterNotFound as error:
            if self.adapters is None or self.adapters.known(request.adapter):
                raise Violation("entry", f"{request.adapter!r} is loaded, refused: {error}") from error
            self._hits("adapter_unknown")
            return
        except InvalidRequest as error:
            if asked > room or not fits:
                self._hits("too_big" if fits else "cross_too_big")
            elif self._windows_are_scarce(len(prompt) + asked - 1):
                self._hits("window_too_big")
            else:
                raise Violation("entry", f"prompt {len(prompt)} asks {asked} of {room}, refused: {error}") from error
            return
        if self.adapters is not None and not self.adapters.known(request.adapter):
            raise Violation("entry", f"nobody loaded {request.adapter!r}, and a request for it is let in")
        if asked > room or not fits:
            raise Violation("entry", f"prompt {len(prompt)} asks {asked}, more than {room} or than fits, and is let in")
        spec = None if cross is None else cross.cross
        encoder = None if spec is None else EncoderSide(tuple(prompt), spec.forced_first, spec.forced_last)
        self._enter(
            request, reqs, encoder, None if self.adapters is None else self.adapters.enter(request.adapter, reqs), now
        )

    def _windows_are_scarce(self, tokens: int) -> bool:
        """Whether the door may refuse for want of window pages: a row is charged one at most that it may not touch."""
        scenario = self._scenario
        if scenario.windows is None or -(-tokens // scenario.page_size) <= scenario.windows.pages:
            return False
        return scenario.windows.pages <= scenario.window_pages

    def _check_late(self, request: GenerateRequest, now: float) -> None:
        if request.deadline is None or request.deadline > now:
            raise Violation("entry", f"refused at {now} for a deadline of {request.deadline}")
        self._hits("too_late")

    def _enter(
        self, request: GenerateRequest, reqs: list[Req], encoder: EncoderSide | None, adapter: int | None, now: float
    ) -> None:
        siblings: list[Client] = []
        reads, stop_after = not self._chance("slow_reader"), 0
        if self._chance("stop_string"):
            stop_after = 1 + int(self._rng.random() * 8)
        for req in reqs:
            self._arrived += 1
            client = Client(f"#{self._arrived}", req, siblings, number=self._arrived, arrived=now, reads=reads)
            client.pools, client.encoder, client.adapter = self._scenario.pools, encoder, adapter
            client.stop_after, client.salt, client.priority = stop_after, request.cache_salt, request.priority
            client.deadline = request.deadline
            client.queue_deadline = None if request.queue_timeout is None else now + request.queue_timeout
            _check_entered(client, request)
            siblings.append(client)
            req.sink = client
            self._clients.live[req] = client
            self._scheduler.intake.add(req)
        if len(reqs) > 1:
            self._hits("group")
        if self._story.tracing:
            req, names = reqs[0], ",".join(client.name for client in siblings)
            options = f"priority {req.priority}, deadline {req.deadline}, queue until {req.queue_deadline}"
            self._story.note(
                f"{names} arrive as {req.request_id!r}: prompt {req.prompt.tolist()}, "
                f"{'' if encoder is None else f'encoder reads {list(encoder.ids)}, '}"
                f"{req.max_new_tokens} tokens, {options}, salt {req.salt!r}, slot {req.adapter_slot}, {req.params}"
            )

    def _prompt(self) -> list[int]:
        """Few symbols, and often the beginning of an earlier prompt, so that prefixes are shared."""
        rng, scenario = self._rng, self._scenario
        longest = min(scenario.context - 1, scenario.slots)
        length = 1 + int(rng.random() ** 2 * longest)
        base = self._prompts[int(rng.random() * len(self._prompts))] if self._chance("shared_prefix") else []
        length = min(length, longest)
        kept = base[: min(len(base), length)]
        prompt = kept + [int(rng.random() * scenario.symbols) for _ in range(length - len(kept))]
        if len(self._prompts) < 12:
            self._prompts.append(prompt)
        return prompt

    def _request(self, prompt: list[int], asked: int, now: float) -> GenerateRequest:
        rng = self._rng
        request_id = str(self._arrived)
        live = self._clients.live
        if live and self._chance("duplicate_id"):
            # Two live requests of one name: refused at the door, and harmless behind it.
            request_id = next(iter(live)).request_id
            self._hits("duplicate_id")
        return GenerateRequest(
            request_id=request_id,
            token_ids=() if self.cross is None else tuple(prompt),
            sampling=self._params(asked, 2 + int(rng.random() * 3) if self._chance("group") else 1),
            priority=int(rng.random() * 3) if self._chance("priority") else 0,
            deadline=now + (rng.random() * 204 - 4) * TICK if self._chance("deadline") else None,
            queue_timeout=rng.random() * 40 * TICK if self._chance("queue_timeout") else None,
            cache_salt="ab"[int(rng.random() * 2)] if self._chance("salt") else "",
            adapter="" if self.adapters is None else self.adapters.wanted(),
            **self._of_tenant(),
        )

    def _of_tenant(self) -> dict[str, Any]:
        weights = self._scenario.weights
        if len(weights) == 1:
            return {}
        number = int(self._tenants.random() * 2) * (1 + int(self._tenants.random() * (len(weights) - 1)))
        return {"tenant": f"t{number}", "weight": weights[number]}

    def _params(self, asked: int, n: int) -> SamplingParams:
        rng = self._rng
        if not self._chance("options"):
            return SamplingParams(temperature=0.0, max_tokens=asked, ignore_eos=not self._chance("eos"), n=n)
        penalised = rng.random() < 0.3
        logprobs = rng.random() < 0.3
        return SamplingParams(
            temperature=(0.0, 0.5, 1.0)[int(rng.random() * 3)],
            top_p=(1.0, 0.5)[int(rng.random() * 2)],
            top_k=int(rng.random() * 3) * 4,
            min_p=(0.0, 0.25)[int(rng.random() * 2)],
            repetition_penalty=1.5 if penalised else 1.0,
            presence_penalty=0.25 if penalised and rng.random() < 0.5 else 0.0,
            max_tokens=asked,
            min_tokens=int(rng.random() * min(asked, 6)) if rng.random() < 0.4 else 0,
            stop_token_ids=tuple(rng.sample(range(VOCAB), 24)) if rng.random() < 0.4 else (),
            ignore_eos=not self._chance("eos"),
            seed=int(rng.random() * 2**40) if rng.random() < 0.5 else None,
            n=n,
            logit_bias={int(rng.random() * VOCAB): 2.5 for _ in range(3)} if rng.random() < 0.3 else {},
            logprobs=logprobs,
            top_logprobs=int(rng.random() * 3) if logprobs else 0,
        )

    def _abort(self) -> None:
        """End a whole stream, wherever it is; sometimes twice, and sometimes only one sample of a group."""
        live = list(self._clients.live)
        if not live:
            return
        req = self._victim(live)
        self._count_phase(req)
        client: Client = req.sink
        chosen = client.siblings if self._rng.random() < 0.7 else [client]
        twice = self._rng.random() < 0.2
        for each in chosen * (1 + twice):
            self._clients.end(Ending(each.req, reason=FinishReason.CANCELLED))
        if twice:
            self._hits("abort_twice")
        if self._story.tracing:
            self._story.note(f"abort of {', '.join(each.name for each in chosen)}{' twice' if twice else ''}")

    def _victim(self, live: list[Req]) -> Req:
        """Often the newest, which may still be in the intake, or one that was retracted: rare moments otherwise."""
        kind = self._rng.random()
        if kind < 0.3:
            return live[-1]
        rare = [req for req in live if req.retractions and req.state is RequestState.WAITING] if kind < 0.8 else []
        pool = rare or live
        return pool[int(self._rng.random() * len(pool))]

    def _abort_late(self) -> None:
        """For somebody who has gone, and whose row may be another's by now."""
        if self._clients.gone:
            client = self._clients.gone[-1 - int(self._rng.random() * min(8, len(self._clients.gone)))]
            self._clients.end(Ending(client.req, reason=FinishReason.CANCELLED))
            self._hits("abort_after_end")

    def _count_phase(self, req: Req) -> None:
        scheduler = self._scheduler
        if req.state is RequestState.WAITING:
            if req not in scheduler.waiting:
                self._hits("abort_in_intake")
            else:
                self._hits("abort_retracted" if req.retractions else "abort_waiting")
            return
        running = scheduler.running
        prefilling = running.planned[req.row] < running.prefill_end[req.row]
        self._hits("abort_prefilling" if prefilling else "abort_decoding")
        flying = [batch for batch in self._device.queued if req.row in batch.rows]
        if flying:
            self._hits("abort_in_flight")
        if any(len(batch.encoder_lens) and _starts(batch, req) for batch in flying):
            self._hits("abort_before_encoding")


def _check_entered(client: Client, request: GenerateRequest) -> None:
    """The door passes on what was asked."""
    req, params = client.req, request.sampling
    told = (req.max_new_tokens, req.priority, req.deadline, req.queue_deadline, req.arrived_at, req.params)
    asked = (params.max_tokens, client.priority, client.deadline, client.queue_deadline, client.arrived, params)
    if told != asked:
        raise Violation("entry", f"{client.name} asked for {asked}, and enters with {told}")


def _starts(batch: ScheduleBatch, req: Req) -> bool:
    """Whether `batch` is the first step of `req` since its admission."""
    at = batch.rows.tolist().index(req.row)
    return req.row in batch.fresh_rows and int(batch.generations[at]) == req.generation
