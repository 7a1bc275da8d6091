"""Constraints that are meant to hurt: each is refused by name within its time, and the neighbours notice nothing."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
import pytest_asyncio

from service.client import CallFailed, SlipstreamClient
from service.server.server import Server
from tests.proofs.constraints.asks import BACKENDS
from tests.security.neighbour import beside
from tests.support.checkpoints import make_checkpoint
from tests.support.servers import serve_checkpoint

shared_loop = pytest.mark.asyncio(loop_scope="module")
LIMIT = 1.5
START_SECONDS = 10.0
"""Of the processor, to start a process that compiles and to answer harmless questions; measured: about 1."""
SLOW = {"json_schema": {"type": "integer", "multipleOf": 999_983}}
"""Takes llguidance 26 seconds."""


def deep_references(count: int, joint: str) -> dict[str, Any]:
    """Two ways at each of `count` levels."""
    step = {f"d{i}": {joint: [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**step, f"d{count}": {"type": "integer"}}}


BOMBS: dict[str, dict[str, Any]] = {
    "multiples of a large number": SLOW,
    "a counter of a counter": {"regex": "(a{1000}){1000}"},
    "counters three deep": {"regex": "(((a|b){1,999}c?){1,999}){1,999}x"},
    "an automaton of 2^30 states": {"regex": "(a|b)*a(a|b){30}"},
    "parentheses": {"regex": "(" * 4000 + "a" + ")" * 4000},
    "many words": {"regex": "|".join(f"w{i}x*" for i in range(1000))},
    "doubling references": {"json_schema": deep_references(25, "anyOf")},
    "doubling conjunctions": {"json_schema": deep_references(25, "allOf")},
    "a reference to itself": {"json_schema": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}},
    "a remote reference": {"json_schema": {"$ref": "http://127.0.0.1:1/schema.json"}},
    "many properties": {"json_schema": {"properties": {f"p{i}": {} for i in range(4000)}}},
    "a million items": {"json_schema": {"type": "array", "minItems": 1_000_000, "items": {"type": "integer"}}},
    "a pattern of counters": {"json_schema": {"type": "string", "pattern": "((a{0,100}){0,100}){0,100}"}},
    "a grammar of itself": {"ebnf": "root ::= root root root | root"},
    "nothing in the end": {"ebnf": 'root ::= a a a a a\na ::= b b b b b\nb ::= c c c c c\nc ::= ""'},
    "repeated repetition": {"ebnf": 'root ::= (("a"{1,999}){1,999}){1,999}'},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=BACKENDS)
async def served(
    request: pytest.FixtureRequest, checkpoint_of: Callable[[str], Path]
) -> AsyncIterator[tuple[Server, SlipstreamClient]]:
    settings = {"grammar_backend": request.param, "grammar_compile_timeout": LIMIT, "grammar_callers": "*"}
    async with serve_checkpoint(checkpoint_of("llama"), **settings) as made:
        await made[1].complete("a", max_tokens=4, constraint={"regex": "[ab]{2}"})
        yield made


@shared_loop
async def test_bombs(served: tuple[Server, SlipstreamClient]) -> None:
    server, client = served
    library, refused = server.engine.model_info.grammar_backend, list[str]()
    async with beside(client) as neighbour:
        for name, bomb in list(BOMBS.items())[:: 1 if library == "llguidance" else 4]:
            before = seconds_of_ended_children()
            try:
                await client.complete("a", max_tokens=24, constraint=bomb)
            except CallFailed as failed:
                refused.append(name)
                (kind,) = bomb
                assert failed.code is grpc.StatusCode.INVALID_ARGUMENT, (name, failed)
                assert list(failed.fields) == [f"constraint.{kind}"], (name, failed.fields)
            # Those of a process that was killed, in which it started and answered others before.
            assert seconds_of_ended_children() - before < LIMIT + START_SECONDS, name
    print(f"refused: {refused}; the loop was late by {neighbour.worst_lag:.3f} s at worst")
    assert {"multiples of a large number", "parentheses"} & set(refused)
    assert neighbour.worst_lag < 1.0
    (done,) = await client.complete("a", max_tokens=16, constraint={"choice": ["still here"]})
    assert done.text == "still here"
    assert not any(server.engine.stats.assert_failures.values())


def seconds_of_ended_children() -> float:
    """Processor time of this process's children that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


async def slow_call(client: SlipstreamClient, request_id: str, **options: Any) -> CallFailed:
    with pytest.raises(CallFailed) as failed:
        await client.complete("a", request_id=request_id, max_tokens=4, constraint=SLOW, **options)
    return failed.value


@shared_loop
async def test_ended_while_it_compiles(served: tuple[Server, SlipstreamClient]) -> None:
    """By Abort, by its deadline, and by a client that hangs up; others of the same constraint go on."""
    server, client = served
    if server.engine.model_info.grammar_backend != "llguidance":
        pytest.skip("this constraint is slow for llguidance only")
    aborted = asyncio.create_task(slow_call(client, "aborted"))
    late = asyncio.create_task(slow_call(client, "late", timeout=0.3))
    gone = asyncio.create_task(slow_call(client, "gone"))
    last = asyncio.create_task(slow_call(client, "last"))
    while not await client.abort("aborted"):
        await asyncio.sleep(0.01)
    assert (await aborted).reason == "REQUEST_ABORTED"
    gone.cancel()
    assert (await late).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert not last.done(), "it waits until the time for compiling is over"
    assert "constraint.json_schema" in (await last).fields
    assert not await client.abort("aborted")
    assert server.engine.live_requests == 0


@shared_loop
async def test_what_is_refused_before_it_compiles(served: tuple[Server, SlipstreamClient]) -> None:
    _, client = served
    for constraint in ({"json_schema": "nothing"}, {"json_schema": "[]"}, {"regex": "a" * 9000}, {"choice": []}):
        with pytest.raises(CallFailed) as failed:
            await client.complete("a", constraint=constraint)
        assert list(failed.value.fields) == [f"constraint.{next(iter(constraint))}"]
    for option in ({"min_tokens": 3}, {"ignore_eos": True}):
        with pytest.raises(CallFailed) as failed:
            await client.complete("a", constraint={"regex": "a+"}, max_tokens=5, **option)
        assert list(failed.value.fields) == [f"sampling_params.{next(iter(option))}"]


@shared_loop
async def test_compiled_ones_are_kept_and_counted(served: tuple[Server, SlipstreamClient]) -> None:
    server, client = served
    before = server.engine.stats
    schema = json.dumps({"enum": ["once", "twice"]})
    for _ in range(3):
        (done,) = await client.complete("a", max_tokens=20, constraint={"json_schema": schema})
        assert json.loads(done.text) in ("once", "twice")
    after = server.engine.stats
    assert after.grammar_cache_hits - before.grammar_cache_hits == 2
    counts = [each.histograms["grammar_compile_seconds"].counts[-1] for each in (before, after)]
    assert counts[1] - counts[0] == 1


async def test_without_a_library(tmp_path: Path) -> None:
    async with serve_checkpoint(make_checkpoint("llama", tmp_path / "m"), grammar_backend="none") as (_, client):
        assert (await client.model_info()).grammar_backend == ""
        with pytest.raises(CallFailed) as failed:
            await client.complete("a", constraint={"regex": "a"})
        assert failed.value.code is grpc.StatusCode.INVALID_ARGUMENT
        assert "slipstream[grammar]" in failed.value.fields["constraint"]
