"""A gateway that has one worker prefill and another decode: clients get what one worker gives that does both.

The bundled model is behind all of them, and each request has a prompt of its own, so that no cache stands in for keys
that did not arrive.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from typing import Any

import pytest

from core.sampling.grammar.registry import choose
from tests.chaos.process import PATIENCE, ServerProcess
from tests.contract.gateway.smg import Smg, needs_smg
from tests.contract.gateway.smg_pairs import DIALECTS, in_front_of, pairing, transfers

pytestmark = [pytest.mark.tools, needs_smg]

MODEL = "slipstream-bundled"
TALE = "Once upon a time there was a little girl named Mia who loved to play in the garden with her dog"
LONG = 14
"""Times the tale, for a prompt of several hundred tokens: some thirty pages."""
SCHEMA = {"type": "object", "properties": {"a": {"enum": [17]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
NO_GRAMMARS = pytest.mark.skipif(choose("auto") is None, reason="no grammar library: pip install 'slipstream[grammar]'")
SPREAD: dict[str, Any] = {"temperature": 1.3, "ignore_eos": True}
"""Options of an output that depends on a seed, and is of one length whatever is drawn."""


@dataclass(frozen=True)
class Case:
    """One request. `drawn`: its tokens depend on a seed, which the gateway tells vLLM's workers only.

    `reason`: how it has to end, if it is to show anything.
    """

    name: str
    options: dict[str, Any] = field(hash=False)
    chat: bool = False
    drawn: bool = False
    reason: str = ""
    words: str = TALE
    """The prompt, behind the name of the test; none stands before a prompt of one letter, which has no page to send."""

    def body(self, mark: str) -> dict[str, Any]:
        """What a client sends; `mark` begins the prompt."""
        words = self.words if len(self.words) == 1 else f"{mark}. {self.words}"
        prompt = {"messages": [{"role": "user", "content": words}]} if self.chat else {"prompt": words}
        return {"model": MODEL, "max_tokens": 12, "temperature": 0.0} | prompt | self.options

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def sent(self, dialect: str) -> int:
        """Prompts whose keys go from worker to worker. Of several outputs vLLM's gateway has none sent."""
        several = self.options.get("n", 1)
        return 0 if len(self.words) == 1 or (several > 1 and dialect == "vllm") else several


CASES = [
    Case("greedy", {}),
    Case("greedy chat", {}, chat=True),
    Case("log probabilities", {"logprobs": True, "top_logprobs": 3}, chat=True),
    Case("seed", {"seed": 5, **SPREAD}, drawn=True),
    Case("seed chat", {"seed": 6, **SPREAD}, chat=True, drawn=True),
    Case("top_p", {"top_p": 0.8, "seed": 7, **SPREAD}, drawn=True),
    Case("top_k", {"top_k": 4, "seed": 8, **SPREAD}, drawn=True),
    Case("top_k of one", {"top_k": 1, **SPREAD}),
    Case("least top_p", {"top_p": 0.001, **SPREAD}),
    Case("penalties", {"frequency_penalty": 0.9, "presence_penalty": 0.8, "repetition_penalty": 1.4}),
    Case("bias", {"logit_bias": {"300": 100.0}}, chat=True),
    Case("stop strings", {"stop": ["e"], "max_tokens": 30}, reason="stop"),
    Case("stop strings chat", {"stop": ["e"], "max_tokens": 30}, chat=True, reason="stop"),
    Case("stop ids", {"stop_token_ids": list(range(260, 324)), "min_tokens": 3}, reason="stop"),
    Case("one token", {"max_tokens": 1}),
    Case("one token chat", {"max_tokens": 1, "logprobs": True, "top_logprobs": 2}, chat=True),
    Case("two outputs", {"n": 2, "logprobs": True, "top_logprobs": 1}, chat=True),
    Case("two drawn outputs", {"n": 2, "seed": 9, **SPREAD}, drawn=True),
    Case("schema", {"response_format": FORM, "max_tokens": 30}, chat=True, reason="stop"),
    Case("one letter", {}, words="O"),
    Case("long", {}, words=f"{TALE}, and then. " * LONG),
    Case("long chat", {"logprobs": True, "top_logprobs": 1}, chat=True, words=f"{TALE}, and then. " * LONG),
]


@dataclass(frozen=True)
class Fleet:
    """The three workers."""

    prefill: ServerProcess
    decode: ServerProcess
    plain: ServerProcess

    async def figures(self) -> tuple[dict[str, float], dict[str, float]]:
        """Of transfers, as the worker that prefills and the one that decodes tell of them."""
        return await transfers(self.prefill), await transfers(self.decode)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    settings: dict[str, Any] = {"max_total_tokens": 16384, "gateway_tokenizer": "path", "unnamed_callers": "watch"}
    settings |= {"native": "off", "cpu_threads": 1, "served_model_name": MODEL}
    with ExitStack() as stack:
        started = [
            stack.enter_context(closing(ServerProcess(program="service", forked=True, role=role, **settings)))
            for role in ("prefill", "decode", "both")
        ]
        yield Fleet(*(each.wait_ready() for each in started))


@dataclass(frozen=True)
class Gateways:
    """One that pairs workers, and one whose worker does both; of the same dialect."""

    dialect: str
    pairs: Smg
    plain: Smg


@pytest.fixture(scope="module", params=DIALECTS)
def gateways(
    fleet: Fleet, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Gateways]:
    folder = tmp_path_factory.mktemp("smg")
    with ExitStack() as stack:
        pairs = stack.enter_context(closing(pairing(folder, request.param, [fleet.prefill], [fleet.decode])))
        plain = stack.enter_context(closing(in_front_of(folder, request.param, fleet.plain)))
        yield Gateways(request.param, pairs.wait_ready(2), plain.wait_ready())


@dataclass
class Output:
    """One choice, whole or put together from the events of a stream."""

    text: str = ""
    finish_reason: str | None = None
    matched_stop: Any = None
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each token, and after it those of its alternatives."""

    def add(self, choice: dict[str, Any], stream: bool) -> None:
        """What a choice of an answer or of an event brings.

        A token without a text of its own is in a stream only if another one came with it, and that is by chance.
        """
        self.text += choice.get("text") or (choice.get("message") or choice.get("delta") or {}).get("content") or ""
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        self.matched_stop = choice.get("matched_stop") or self.matched_stop
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            if stream and (entry["token"].startswith("<|") or "\ufffd" in entry["token"]):
                continue
            told = [entry, *entry["top_logprobs"]]
            self.tokens += [each["token"] for each in told]
            self.logprobs += [each["logprob"] for each in told]


@dataclass
class Answer:
    """What a client got."""

    outputs: dict[int, Output]
    prompt_tokens: int
    completion_tokens: int


async def asked(smg: Smg, case: Case, mark: str, stream: bool) -> Answer:
    """The answer to `case`, whole or as a stream."""
    body = case.body(mark)
    if stream:
        options = {"stream_options": {"include_usage": True}}
        told = await asyncio.to_thread(lambda: list(smg.events(case.path, **body, **options)))
    else:
        status, whole = await asyncio.to_thread(smg.post, case.path, **body)
        assert status == 200, whole
        told = [whole]
    outputs: dict[int, Output] = {}
    for each in told:
        assert "error" not in each, each
        for choice in each["choices"]:
            outputs.setdefault(choice["index"], Output()).add(choice, stream)
    usage = next(each["usage"] for each in reversed(told) if each.get("usage"))
    return Answer(outputs, usage["prompt_tokens"], usage["completion_tokens"])


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(
    "case", [pytest.param(each, id=each.name, marks=[NO_GRAMMARS] * (each.name == "schema")) for each in CASES]
)
async def test_answers_are_those_of_one_worker(fleet: Fleet, gateways: Gateways, case: Case, stream: bool) -> None:
    mark = f"{gateways.dialect[0]}{stream:d} {case.name}"
    prefill, decode = await fleet.figures()
    expected, found = await asyncio.gather(
        *(asked(smg, case, mark, stream) for smg in (gateways.plain, gateways.pairs)),
    )
    assert not case.reason or case.reason == expected.outputs[0].finish_reason, "the case shows nothing"
    assert (found.prompt_tokens, found.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)
    assert found.outputs.keys() == expected.outputs.keys() == set(range(case.options.get("n", 1)))
    for index, want in expected.outputs.items():
        got = found.outputs[index]
        assert got.finish_reason == want.finish_reason is not None
        if case.drawn and gateways.dialect == "sglang":
            continue
        assert (got.text, got.tokens, got.matched_stop) == (want.text, want.tokens, want.matched_stop)
        assert got.logprobs == pytest.approx(want.logprobs, abs=1e-4)
    await sent(fleet, case.sent(gateways.dialect), prefill, decode)


async def sent(fleet: Fleet, count: int, prefill: dict[str, float], decode: dict[str, float]) -> None:
    """Wait until keys of `count` prompts have gone over since the figures `prefill` and `decode`, and none is kept."""
    async with asyncio.timeout(PATIENCE):
        while True:
            gave, took = await fleet.figures()
            if gave["given_prompts"] >= prefill["given_prompts"] + count and not gave["kept_prompts"]:
                break
            await asyncio.sleep(0.01)
    assert gave["given_prompts"] == prefill["given_prompts"] + count
    assert gave["lost_prompts"] == took["failures"] == took["evicted_requests"] == 0
    # Of several outputs the later ones may find the prompt in the cache.
    fresh = took["taken_requests"] - decode["taken_requests"]
    assert min(count, 1) <= fresh <= count, "a prompt was computed again"
    if fresh == count:
        assert took["taken_tokens"] - decode["taken_tokens"] == gave["given_tokens"] - prefill["given_tokens"]
