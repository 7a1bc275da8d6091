"""What the clients of one seed are going to do: requests, and manners."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

from core.types.io import EMBEDDINGS, EmbedRequest, GenerateRequest
from core.types.sampling_params import SamplingParams
from tests.proofs.sim.reference import EOS, VOCAB
from tests.proofs.sim.shell.clients import Plan
from tests.proofs.sim.shell.expected import expected
from tests.proofs.sim.shell.process import ADAPTERS
from tests.proofs.sim.shell.scenario import ShellScenario
from tests.proofs.sim.shell.tokens import WORDS, ids_of

TENANTS = ("alice", "bob", "carol")
MOST_TOKENS = 24


class Inputs:
    """Draws plans, some of them for the id or the stream of an earlier one."""

    NEUTRAL = SamplingParams(temperature=0.0, max_tokens=1, seed=0)
    """Of a request that will be refused."""

    def __init__(self, scenario: ShellScenario, rng: random.Random) -> None:
        self._scenario, self._rng = scenario, rng
        self._shared = "".join(chr(rng.randrange(0x20, 0x7F)) for _ in range(12))
        self.plans: list[Plan] = []

    def draw(self) -> list[Plan]:
        """All plans, in no order."""
        for number in range(self._scenario.clients):
            self.plans.append(self._plan(number))
        return self.plans

    def _on(self, fault: str) -> bool:
        rate = self._scenario.faults.get(fault, 0.0)
        return self._rng.random() < rate

    def _plan(self, number: int) -> Plan:
        rng, scenario = self._rng, self._scenario
        earlier = [plan for plan in self.plans if plan.kind == "keep"]
        if earlier and self._on("takeover"):
            return self._rival(number, rng.choice(earlier))
        kind = "embed" if self._on("embed") else "keep" if self._on("resumable") else "generate"
        tenant = rng.choice(TENANTS) if scenario.tenants or rng.random() < 0.3 else None
        at = rng.random() * scenario.span
        plan = Plan(f"#{number}", kind, None, tenant, at, rng.random() < scenario.local_share)
        request_id = f"r{number}"
        if self.plans and self._on("duplicate"):
            twin = rng.choice(self.plans)
            request_id, plan.tenant, plan.at = (
                twin.asked.request_id,
                twin.tenant,
                twin.at + rng.choice((0.0, 0.01, 0.1)),
            )
        plan.asked = self._embed(plan, request_id) if kind == "embed" else self._generate(plan, request_id)
        self._manners(plan)
        return plan

    def _rival(self, number: int, other: Plan) -> Plan:
        """The same request again, by another connection: it takes the stream over."""
        at = other.at + self._rng.random() * 0.1
        local = self._rng.random() < self._scenario.local_share
        plan = replace(other, name=f"#{number}", at=at, local=local, aborts=[], leaves=[], rival=True)
        self._manners(plan)
        return plan

    def _prompt(self) -> list[int]:
        rng = self._rng
        size = min(rng.randrange(1, 16), self._scenario.sizes.context - 4, self._scenario.sizes.slots - 4)
        shared = rng.randrange(size + 1)
        return ids_of((self._shared + "".join(chr(rng.randrange(0x20, 0x7F)) for _ in range(size)))[shared:][:size])

    def _times(self) -> dict[str, Any]:
        """Deadline and queue timeout; the deadline counts from when the client begins."""
        rng, own = self._rng, {}
        if self._on("queue_timeout"):
            own["queue_timeout"] = rng.choice((0.001, 0.02, 0.2))
        if self._on("deadline"):
            own["deadline"] = rng.choice((0.001, 0.02, 0.1, 0.5))
        return own

    def _common(self, plan: Plan, request_id: str) -> dict[str, Any]:
        own = self._times()
        if "deadline" in own:
            own["deadline"] += plan.at
        if self._scenario.sizes.adapters is not None and self._rng.random() < 0.6:
            plan.adapter = self._rng.choice(tuple(ADAPTERS))
        salt = self._rng.choice(("", "", "pepper"))
        return {
            "request_id": request_id, "adapter": plan.adapter, "cache_salt": salt,
            "priority": self._rng.randrange(3), **own,
        }  # fmt: skip

    def _embed(self, plan: Plan, request_id: str) -> EmbedRequest:
        rng = self._rng
        plan.prompts = [self._prompt() for _ in range(rng.randrange(1, 4))]
        inputs: list[Any] = []
        for prompt in plan.prompts:
            inputs.append("".join(chr(0x20 + each) for each in prompt) if rng.random() < 0.5 else tuple(prompt))
        if self._on("bad_request"):
            plan.bad = True
            inputs[0] = (VOCAB,)
        return EmbedRequest(
            inputs=tuple(inputs), pooling=rng.choice(EMBEDDINGS), normalize=rng.random() < 0.5,
            **self._common(plan, request_id),
        )  # fmt: skip

    def _generate(self, plan: Plan, request_id: str) -> GenerateRequest:
        rng = self._rng
        prompt = self._prompt()
        plan.prompts = [prompt]
        room = self._scenario.sizes.room(len(prompt))
        params = self._tight(prompt, self._sampling(min(1 + rng.randrange(MOST_TOKENS), room)), room)
        text = "".join(chr(0x20 + each) for each in prompt)
        asked = GenerateRequest(
            sampling=params, want_text=rng.random() < 0.7, **self._common(plan, request_id),
            **({"text": text} if rng.random() < 0.6 else {"token_ids": tuple(prompt)}),
        )  # fmt: skip
        if not self._on("bad_request"):
            return asked
        plan.bad = True
        wrong: Any = rng.choice(({"max_tokens": room + 1}, {"temperature": -1.0}, {"top_p": 0.0}))
        return replace(asked, sampling=replace(params, **wrong))

    def _tight(self, prompt: list[int], params: SamplingParams, room: int) -> SamplingParams:
        """Often with a limit of length just where a stop string ends the output: which of the two wins is a race."""
        if params.stop and self._rng.random() < 0.5:
            right = expected(prompt, params, 0, None)
            if right.matched in params.stop:
                return replace(params, max_tokens=min(room, len(right.tokens) + self._rng.randrange(3)))
        return params

    def _sampling(self, most: int) -> SamplingParams:
        rng, own = self._rng, {}
        if self._on("group"):
            own["n"] = rng.randrange(2, 5)
        if self._on("stop_string"):
            words = rng.sample([*WORDS, "1", "e", "o"], rng.randrange(1, 3))
            own["stop"] = tuple(word for word in words if word.isascii())
            own["include_stop_in_output"] = rng.random() < 0.5
        if self._on("options"):
            own |= {"temperature": rng.choice((0.0, 0.5, 1.0)), "top_k": rng.choice((0, 5))}
            own |= {"logprobs": True, "top_logprobs": rng.randrange(3)} if rng.random() < 0.5 else {}
            own |= {"frequency_penalty": 0.5} if rng.random() < 0.3 else {}
            own |= {"stop_token_ids": tuple(rng.sample(range(VOCAB), 12))} if rng.random() < 0.3 else {}
            own |= {"logit_bias": {EOS[0]: 2.0}} if rng.random() < 0.2 else {}
            own["skip_special_tokens"] = rng.random() < 0.7
        defaults = {"temperature": 0.0, "ignore_eos": rng.random() < 0.5}
        return SamplingParams(**{**defaults, "max_tokens": most, "seed": rng.randrange(1 << 30), **own})

    def _manners(self, plan: Plan) -> None:
        rng = self._rng
        plan.pace = rng.choice((0.02, 0.1)) if self._on("slow_reader") else 0.0
        plan.dead_after = rng.randrange(1, 5) if self._on("dead_reader") else -1
        plan.cancel_after = rng.choice((0.0, 0.003, 0.02, 0.1, 0.4)) * rng.random() if self._on("cancel") else -1.0
        if self._on("abort"):
            plan.aborts = [rng.choice((0.0, 0.003, 0.02, 0.2)) * rng.random() for _ in range(rng.randrange(1, 3))]
        if plan.kind == "keep":
            plan.gap = rng.choice((0.001, 0.01, self._scenario.resume_seconds or 0.01, 1.0))
            if self._on("leaves"):
                plan.leaves = [rng.randrange(5) for _ in range(rng.randrange(1, 5))]
