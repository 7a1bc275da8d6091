"""OpenAI's API over the real gateway and the bundled model, in both dialects: clients get what we say ourselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from core.sampling.grammar.registry import choose
from service.client import SlipstreamClient
from service.pb.slipstream.v1 import inference_pb2 as pb
from tests.chaos.process import ServerProcess
from tests.contract.gateway.smg import Smg, needs_smg

pytestmark = [pytest.mark.tools, needs_smg]

MODEL = "slipstream-bundled"
TURNS = [{"role": "user", "content": "Tell me a story"}]
TALE = "Once there was a"
GREEDY: dict[str, Any] = {"temperature": 0.0}


@pytest.fixture(scope="module")
def worker() -> Iterator[ServerProcess]:
    settings = {
        "native": "off",
        "cpu_threads": 1,
        "max_total_tokens": 16384,
        "gateway_tokenizer": "path",
        "unnamed_callers": "watch",
    }
    started = ServerProcess(program="service", served_model_name=MODEL, **settings)
    try:
        yield started.wait_ready()
    finally:
        started.close()


@pytest.fixture(scope="module", params=["sglang", "vllm"])
def smg(
    worker: ServerProcess, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Smg]:
    """One gateway per dialect; which it speaks is said when the worker is added."""
    started = Smg(tmp_path_factory.mktemp("smg"))
    try:
        started.add(worker.target, request.param)
        yield started.wait_ready()
    finally:
        started.close()


@pytest.fixture
def dialect(smg: Smg) -> str:
    """What the gateway says that it speaks."""
    (worker,) = smg.workers()
    found: str = worker["runtime_type"]
    return found


def content(events: list[Any]) -> str:
    """The text of a streamed chat."""
    return "".join(choice["delta"].get("content") or "" for each in events for choice in each["choices"])


async def test_chat(worker: ServerProcess, smg: Smg) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 40}
    async with worker.client() as client:
        (own,) = await client.complete(TURNS, max_tokens=40)
    # The checkpoint says that it is to be sampled greedily, and the gateway knows it from us.
    status, whole = smg.post("/v1/chat/completions", **asked)
    events = list(smg.events("/v1/chat/completions", **asked, stream_options={"include_usage": True}))
    assert status == 200 and len(own.text) > 20
    assert whole["choices"][0]["message"]["content"] == own.text == content(events)
    assert whole["choices"][0]["finish_reason"] == own.end.reason == events[-2]["choices"][0]["finish_reason"]
    for usage in (whole["usage"], events[-1]["usage"]):
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (
            own.end.prompt_tokens,
            own.end.completion_tokens,
        )
    assert len(events) > 5, "it came in one piece"


async def test_completions(worker: ServerProcess, smg: Smg) -> None:
    asked = {"model": MODEL, "prompt": TALE, "max_tokens": 24, **GREEDY}
    async with worker.client() as client:
        # The gateway puts no special tokens before a plain prompt.
        plain = await client.stub.Tokenize(pb.TokenizeRequest(text=TALE, add_special_tokens=False))
        (own,) = await client.complete(list(plain.token_ids), max_tokens=24, **GREEDY)
    status, whole = smg.post("/v1/completions", **asked)
    events = list(smg.events("/v1/completions", **asked))
    assert status == 200 and whole["choices"][0]["text"] == own.text
    assert "".join(each["choices"][0]["text"] for each in events if each["choices"]) == own.text
    assert whole["choices"][0]["finish_reason"] == own.end.reason
    assert whole["usage"]["completion_tokens"] == own.end.completion_tokens


async def test_log_probabilities(worker: ServerProcess, smg: Smg) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 6, "logprobs": True, "top_logprobs": 3, **GREEDY}
    entries = []
    async with worker.client() as client:
        async for event in client.generate(TURNS, max_tokens=6, logprobs=True, top_logprobs=3, **GREEDY):
            entries += getattr(event, "logprobs", ())
    _, whole = smg.post("/v1/chat/completions", **asked)
    streamed = [
        entry
        for event in smg.events("/v1/chat/completions", **asked)
        for choice in event["choices"]
        for entry in (choice.get("logprobs") or {}).get("content", ())
    ]
    for told in (whole["choices"][0]["logprobs"]["content"], streamed):
        assert [each["logprob"] for each in told] == pytest.approx([value for _, value, _ in entries], abs=1e-5)
        for each, (_, _, top) in zip(told, entries, strict=True):
            assert [one["logprob"] for one in each["top_logprobs"]] == pytest.approx([v for _, v in top], abs=1e-5)


async def test_several_choices(worker: ServerProcess, smg: Smg, dialect: str) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 12, "n": 2, "temperature": 1.7, "seed": 11}
    async with worker.client() as client:
        own = await client.complete(TURNS, max_tokens=12, n=2, temperature=1.7, seed=11)
    _, whole = smg.post("/v1/chat/completions", **asked)
    events = list(smg.events("/v1/chat/completions", **asked))
    assert [each["index"] for each in whole["choices"]] == [0, 1]
    assert {choice["index"] for each in events for choice in each["choices"]} == {0, 1}
    ends = [choice["finish_reason"] for each in events for choice in each["choices"] if choice["finish_reason"]]
    assert len(ends) == 2
    assert whole["usage"]["completion_tokens"] >= sum(bool(each["message"]["content"]) for each in whole["choices"])
    if dialect == "vllm":  # the other has no field for a seed
        assert [each["message"]["content"] for each in whole["choices"]] == [each.text.rstrip("\ufffd") for each in own]
        assert whole["usage"]["completion_tokens"] == sum(each.end.completion_tokens for each in own)


async def test_stop_strings(worker: ServerProcess, smg: Smg, dialect: str) -> None:
    async with worker.client() as client:
        (full,) = await client.complete(TURNS, max_tokens=40, **GREEDY)
        stop = full.text[10:14]
        (own,) = await client.complete(TURNS, max_tokens=40, stop=[stop], **GREEDY)
    _, whole = smg.post("/v1/chat/completions", model=MODEL, messages=TURNS, max_tokens=40, stop=[stop], **GREEDY)
    assert whole["choices"][0]["message"]["content"] == own.text == full.text[: full.text.index(stop)]
    assert whole["choices"][0]["finish_reason"] == "stop"
    if dialect == "vllm":  # in the other the gateway keeps stop strings to itself, and the worker goes on
        assert whole["usage"]["completion_tokens"] == own.end.completion_tokens < full.end.completion_tokens


async def test_stop_ids(worker: ServerProcess, smg: Smg) -> None:
    async with worker.client() as client:
        (full,) = await client.complete(TURNS, max_tokens=40, **GREEDY)
        stop = {"stop_token_ids": [full.token_ids[9]]}
        (own,) = await client.complete(TURNS, max_tokens=40, **stop, **GREEDY)
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 40, **stop, **GREEDY}
    _, whole = smg.post("/v1/chat/completions", **asked)
    events = list(smg.events("/v1/chat/completions", **asked, stream_options={"include_usage": True}))
    assert whole["choices"][0]["message"]["content"] == own.text == content(events)
    for usage in (whole["usage"], events[-1]["usage"]):
        assert usage["completion_tokens"] == own.end.completion_tokens == 10


@pytest.mark.skipif(choose("auto") is None, reason="no grammar library: pip install 'slipstream[grammar]'")
async def test_constraints(smg: Smg) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [17]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 30, "response_format": form}
    status, whole = smg.post("/v1/chat/completions", **asked)
    assert status == 200, whole
    assert json.loads(whole["choices"][0]["message"]["content"]) == {"a": 17}


async def test_bad_fields_are_named_to_the_client(smg: Smg) -> None:
    asked = {"model": MODEL, "messages": TURNS, "max_tokens": 4}
    status, body = smg.post("/v1/chat/completions", **asked, stop_token_ids=[9999])
    assert status == 400 and "sampling_params.stop_token_ids[0]" in body["error"]["message"]
    assert smg.post("/v1/chat/completions", **asked | {"model": "nobody"})[0] == 404


async def test_embeddings(worker: ServerProcess, smg: Smg) -> None:
    async with worker.client() as client:
        (own,) = await client.embed(await client.tokenize("a quick fox"))
    status, body = smg.post("/v1/embeddings", model=MODEL, input="a quick fox")
    assert status == 200, body
    assert body["data"][0]["embedding"] == pytest.approx(own.values, abs=1e-4)


async def test_a_flush_reaches_the_worker(worker: ServerProcess, smg: Smg) -> None:
    async def cached(client: SlipstreamClient) -> int:
        return next(pool.cached for pool in (await client.load()).pools if pool.name == "kv_page")

    async with worker.client() as client:
        await client.complete(list(range(10, 100)), max_tokens=1)
        assert await cached(client) >= 5
        assert smg.ask("POST", "/flush_cache")[0] == 200
        assert await cached(client) == 0


async def test_the_openai_client(worker: ServerProcess, smg: Smg) -> None:
    openai = pytest.importorskip("openai", reason="pip install openai for its client")
    async with worker.client() as client:
        (own,) = await client.complete(TURNS, max_tokens=40)
    async with openai.AsyncOpenAI(base_url=smg.url, api_key="none", max_retries=0) as theirs:
        assert [each.id async for each in await theirs.models.list()] == [MODEL]
        whole = await theirs.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=40)
        stream = await theirs.chat.completions.create(model=MODEL, messages=TURNS, max_tokens=40, stream=True)
        pieces = [choice.delta.content or "" async for each in stream for choice in each.choices]
        plain = await theirs.completions.create(model=MODEL, prompt="27+45=", max_tokens=8)
        with pytest.raises(openai.BadRequestError):
            await theirs.chat.completions.create(
                model=MODEL, messages=TURNS, max_tokens=4, extra_body={"stop_token_ids": [9999]}
            )
    assert whole.choices[0].message.content == own.text == "".join(pieces)
    assert whole.usage is not None and whole.usage.completion_tokens == own.end.completion_tokens
    assert plain.choices[0].text == "72"


async def test_the_tokenizer_was_read_from_the_workers_path(worker: ServerProcess, smg: Smg, dialect: str) -> None:
    """Last, for it looks back: nobody asked for the zip."""
    counted = await worker.metrics()
    assert not any("GetTokenizer" in series for series in counted)
    served = {series for series in counted if "Generate" in series and f'method="{dialect}.' in series}
    assert served, "the other dialect was spoken"
