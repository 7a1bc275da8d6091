"""What gateways say of prefill/decode disaggregation is read as it is meant, and what is wrong is named."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest
from smg_grpc_proto import sglang_scheduler_pb2 as sglang_pb
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb

from core.errors import InvalidRequest
from core.types.handover import Handed, HandOver, TakeOver
from service.gateway.pairing import read_bootstrap, read_json, written
from tests.contract.gateway.spoken import DIALECTS
from tests.support.fakes.fake_engine import INFO, FakeEngine, held
from tests.support.servers import Serve

HANDED = Handed("a" * 32, "10.0.0.7", 9000, "e" * 32, 48)


def test_what_a_worker_that_prefills_answers_is_what_the_other_reads() -> None:
    assert read_json(written(HANDED)) == (None, TakeOver("10.0.0.7", 9000, "a" * 32, "e" * 32))
    assert written(None) == "" and read_json("") == (None, None)


def test_a_prefill_is_asked_for() -> None:
    assert read_json('{"do_remote_decode": true, "do_remote_prefill": false}') == (HandOver(), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "must be JSON"),
        ("[" * 3000, "must be JSON"),
        ('{"a": "' + "x" * 5000 + '"}', "more than 4096 characters"),
        ("[]", "must be a JSON object"),
        ("{}", "either do_remote_decode or do_remote_prefill"),
        ('{"do_remote_decode": 1}', "either do_remote_decode or do_remote_prefill"),
        ('{"do_remote_decode": true, "do_remote_prefill": true}', "either do_remote_decode or do_remote_prefill"),
    ],
)
def test_json_that_says_nothing_is_refused(text: str, told: str) -> None:
    with pytest.raises(InvalidRequest, match=f"kv_transfer_params_json: .*{told}"):
        read_json(text)


@pytest.mark.parametrize(
    "change",
    [
        {"remote_host": None},
        {"remote_host": ""},
        {"remote_host": "h" * 254},
        {"remote_port": 0},
        {"remote_port": 65536},
        {"remote_port": "9000"},
        {"remote_port": True},
        {"room": 7},
        {"room": "r" * 129},
        {"room": "a\0b"},
        {"remote_engine_id": None},
        {"remote_engine_id": ""},
    ],
)
def test_an_answer_that_was_changed_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="must be what a worker that prefills has answered"):
        read_json(json.dumps(json.loads(written(HANDED)) | change))


def bootstrap(**fields: Any) -> Any:
    given = {"bootstrap_host": "10.0.0.7", "bootstrap_port": 8998, "bootstrap_room": 5} | fields
    return sglang_pb.GenerateRequest(disaggregated_params=sglang_pb.DisaggregatedParams(**given))


def test_a_room_is_for_the_role_of_its_worker() -> None:
    prefill, decode = (dataclasses.replace(INFO, role=role) for role in ("prefill", "decode"))
    assert read_bootstrap(bootstrap(), prefill) == (HandOver("5"), None)
    assert read_bootstrap(bootstrap(), decode) == (None, TakeOver("10.0.0.7", 8998, "5"))
    assert read_bootstrap(bootstrap(bootstrap_port=0, bootstrap_host=""), prefill) == (HandOver("5"), None)
    for info in (prefill, decode, INFO):
        assert read_bootstrap(sglang_pb.GenerateRequest(), info) == (None, None)
    with pytest.raises(InvalidRequest, match="disaggregated_params: this server has no --role"):
        read_bootstrap(bootstrap(), INFO)
    for wrong in ({"bootstrap_port": 0}, {"bootstrap_port": 70000}, {"bootstrap_host": ""}):
        with pytest.raises(InvalidRequest, match="must have bootstrap_host and bootstrap_port"):
            read_bootstrap(bootstrap(**wrong), decode)


def test_the_older_message_is_refused_by_name() -> None:
    """It says a host and a port, and no room."""
    from service.gateway.vllm import VllmDialect

    message = vllm_pb.GenerateRequest(
        tokenized=vllm_pb.TokenizedInput(input_ids=[1]),
        kv_transfer_params=vllm_pb.KvTransferParams(remote_host="h", remote_port=1),
    )
    with pytest.raises(InvalidRequest, match="kv_transfer_params: this server reads kv_transfer_params_json"):
        VllmDialect().generate_request(message, INFO, None)


async def test_a_call_that_waits_for_keys_has_headers(serve: Serve) -> None:
    """smg aborts it where the prefill is refused, but not before it has them."""
    gate = asyncio.Event()
    engine = FakeEngine(held(gate, after=0))
    engine.model_info = dataclasses.replace(engine.model_info, role="decode")
    async with serve(engine) as serving:
        asked = bootstrap()
        asked.tokenized.input_ids.extend([5, 6])
        call = DIALECTS[0].stub(serving.client.channel).Generate(asked)
        async with asyncio.timeout(10):
            await call.initial_metadata()
        opened = await engine.stream_number(1)
        assert opened.request.take_over == TakeOver("10.0.0.7", 8998, "5")
        call.cancel()
        gate.set()


def test_a_prefill_has_no_constraint() -> None:
    """smg sends it beside `ignore_eos`, which it contradicts, and the one token is thrown away."""
    from service.gateway.sglang import SglangDialect
    from service.gateway.vllm import VllmDialect

    prefill = dataclasses.replace(INFO, role="prefill")
    asked = vllm_pb.GenerateRequest(
        tokenized=vllm_pb.TokenizedInput(input_ids=[5]),
        sampling_params=vllm_pb.SamplingParams(regex="a*", ignore_eos=True),
        kv_transfer_params_json='{"do_remote_decode": true}',
    )
    read = VllmDialect().generate_request(asked, prefill, None).request
    assert read.hand_over == HandOver() and read.constraint is None
    asked.kv_transfer_params_json = ""
    assert VllmDialect().generate_request(asked, INFO, None).request.constraint is not None
    other = bootstrap()
    other.tokenized.input_ids.append(5)
    other.sampling_params.regex = "a*"
    assert SglangDialect().generate_request(other, prefill, None).request.constraint is None
    decode = dataclasses.replace(INFO, role="decode")
    assert SglangDialect().generate_request(other, decode, None).request.constraint is not None
