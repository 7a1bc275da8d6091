"""Two servers that prefill and two that decode, sixty streams, and one that is killed or stands still meanwhile.

The model is deterministic, so a stream that ends has the very text that a server without a role gives. One that fails
says so, and has a beginning of that text. A server that is left holds nothing in the end.
"""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from core.models.native.extension import load_extension
from core.native.kept_library import ExtensionUnavailable
from tests.chaos.process import ServerProcess
from tests.contract.gateway.smg import needs_smg
from tests.contract.gateway.smg_pairs import DIALECTS, in_front_of, transfers
from tests.proofs.equivalence.test_disaggregation import BY_NIXL
from tests.system.paired_fleet import (
    PATIENCE,
    Body,
    Figures,
    Fleet,
    Streams,
    Told,
    bodies,
    paired_fleet,
    reached,
    server,
    settled,
)
from tests.system.test_frozen import stopped

pytestmark = [pytest.mark.nightly, pytest.mark.tools, needs_smg]

STREAMS = 60
LATER = 12
"""Streams once all that happened is over."""


@pytest.fixture(scope="module")
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(STREAMS) as made:
        yield made


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of settings: the same bits in any batch. That takes compiled code."""
    try:
        load_extension()
    except ExtensionUnavailable as reason:
        pytest.skip(str(reason))
    path = tmp_path_factory.mktemp("settings") / "settings.yaml"
    path.write_text("deterministic: true\n")
    return path


@dataclass(frozen=True)
class Question:
    """Requests, and what a server without a role answers."""

    asked: list[Body]
    answers: list[Told]

    def judge(self, told: Sequence[Told]) -> list[str]:
        """Every stream has the text of its answer, all of it or, if it failed or was left, a beginning.

        Returns what those that failed were told.
        """
        for found, answer in zip(told, self.answers, strict=False):
            assert answer.text.startswith(found.text), (found, answer)
            if not (found.error or found.left):
                assert found == answer
        return [each.error for each in told if each.error]


@pytest.fixture(params=DIALECTS)
def dialect(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def question(threads: ThreadPoolExecutor, settings: Path, dialect: str, seed: int, tmp_path: Path) -> Question:
    asked = bodies(random.Random(f"{seed} {dialect}"), STREAMS)
    with ExitStack() as stack:
        plain = stack.enter_context(closing(server(config=settings)))
        smg = stack.enter_context(closing(in_front_of(tmp_path, dialect, plain.wait_ready())))
        answers = await Streams(threads, smg.wait_ready(), asked).ended()
    for body, answer in zip(asked, answers, strict=True):
        assert (answer.done, answer.reason, answer.tokens, answer.error) == (True, "length", body["max_tokens"], "")
    return Question(asked, answers)


@pytest.fixture(params=["tcp", pytest.param("nixl", marks=BY_NIXL)])
def way(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def fleet(settings: Path, dialect: str, way: str, tmp_path: Path) -> Iterator[Fleet]:
    with paired_fleet(tmp_path, dialect, config=settings, transfer_engine=way) as made:
        yield made


def prefills(figures: Figures) -> bool:
    """Whether a server has given some prompts away, and computes others."""
    return figures["slipstream_transfer_given_prompts_total"] >= 3 and figures["slipstream_requests_running"] >= 1


def decodes(figures: Figures) -> bool:
    """Whether a server is in the middle of outputs whose prompts others have computed."""
    begun = figures["slipstream_generation_tokens_total"] >= 50 and figures["slipstream_requests_running"] >= 5
    return begun and figures["slipstream_transfer_taken_requests_total"] >= 5


async def end_well(fleet: Fleet, threads: ThreadPoolExecutor, question: Question) -> None:
    """A server that is left holds nothing, and serves on."""
    await settled(fleet.alive)
    await asyncio.to_thread(fleet.smg.wait, fleet.is_known)
    told = await Streams(threads, fleet.smg, question.asked[:LATER]).ended()
    assert question.judge(told) == []
    await settled(fleet.alive)


async def test_a_server_that_prefills_is_killed(fleet: Fleet, threads: ThreadPoolExecutor, question: Question) -> None:
    streams = Streams(threads, fleet.smg, question.asked)
    victim = await reached(prefills, *fleet.prefill)
    victim.send(signal.SIGKILL)
    failed = question.judge(await streams.ended())
    assert len(failed) <= STREAMS // 2, "at most those that it was to prefill"
    await end_well(fleet, threads, question)


async def test_a_server_that_prefills_stands_still(
    fleet: Fleet, threads: ThreadPoolExecutor, question: Question, dialect: str
) -> None:
    """As behind a network that is cut: its connections stay, and nothing comes of them."""
    streams = Streams(threads, fleet.smg, question.asked)
    victim = await reached(prefills, *fleet.prefill)
    async with stopped(victim.pid):
        failed = question.judge(await streams.ended())
        given_up = [await timeouts(each) for each in fleet.decode]
    # In vLLM's dialect no server is asked for keys before it has answered: see the next test.
    assert dialect == "vllm" or sum(given_up) > 0, "none waited for it: this showed nothing"
    # The gateway may give up a connection of its own to that server before its streams have ended.
    assert len(failed) <= STREAMS // 2, "at most those that it was to prefill"
    await end_well(fleet, threads, question)


@pytest.mark.parametrize("dialect", ["vllm"])
async def test_a_server_that_has_prefilled_stands_still(fleet: Fleet, seed: int) -> None:
    """After its answer, which the gateway hands on, and before its keys were fetched."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(10, 700) for _ in range(rng.randint(100, 500))] for _ in range(8)]
    victim, (decode, other) = fleet.prefill[0], fleet.decode
    before = await timeouts(decode)
    handed = await asyncio.gather(*(asked(victim, ids, kv_transfer_params_json=REMOTE_DECODE) for ids in prompts))
    async with stopped(victim.pid):
        sources = [each.kv_transfer_params_json for each in handed]
        assert all(sources)
        together = zip(prompts, sources, strict=True)
        found = await asyncio.gather(*(asked(decode, ids, 40, kv_transfer_params_json=each) for ids, each in together))
        assert await timeouts(decode) == before + len(prompts)
    expected = await asyncio.gather(*(asked(other, ids, 40) for ids in prompts))
    assert [list(each.output_ids) for each in found] == [list(each.output_ids) for each in expected]
    await settled(fleet.alive)


REMOTE_DECODE = '{"do_remote_decode": true, "do_remote_prefill": false}'


async def asked(server: ServerProcess, ids: list[int], tokens: int = 1, **fields: str) -> Any:
    """The whole answer to one request in vLLM's dialect."""
    # May be absent: then no test that asks this runs.
    from smg_grpc_proto import vllm_engine_pb2 as pb
    from smg_grpc_proto.generated.vllm_engine_pb2_grpc import VllmEngineStub

    params = pb.SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    request = pb.GenerateRequest(tokenized=pb.TokenizedInput(input_ids=ids), sampling_params=params, **fields)
    async with server.client() as client:
        (answer,) = [each async for each in VllmEngineStub(client.channel).Generate(request, timeout=PATIENCE)]
    return answer.complete


async def timeouts(decode: ServerProcess) -> float:
    """How often `decode` has given up keys that did not come in time."""
    return (await transfers(decode))['failures_total{reason="timeout"}']


async def test_a_server_that_decodes_is_killed(fleet: Fleet, threads: ThreadPoolExecutor, question: Question) -> None:
    streams = Streams(threads, fleet.smg, question.asked)
    victim = await reached(decodes, *fleet.decode)
    victim.send(signal.SIGKILL)
    failed = question.judge(await streams.ended())
    assert 0 < len(failed) <= STREAMS // 2, "those that it was to decode"
    await end_well(fleet, threads, question)


async def test_clients_leave(fleet: Fleet, threads: ThreadPoolExecutor, question: Question, seed: int) -> None:
    """Before anything came, at the first event, or in the middle."""
    rng = random.Random(seed)
    leave = [rng.choice([None, 0, 1, 5, 15]) for _ in question.asked]
    told = await Streams(threads, fleet.smg, question.asked, leave).ended()
    assert question.judge(told) == []
    assert sum(each.left for each in told) >= STREAMS // 4, "few left: this showed little"
    await end_well(fleet, threads, question)
