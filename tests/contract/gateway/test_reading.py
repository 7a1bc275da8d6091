"""What a request in either dialect asks of the engine, and what is refused by the name that its client knows."""

from __future__ import annotations

import json
import math
from typing import Any

import grpc
import grpc.aio
import pytest

from core.types.constraint import Constraint, ConstraintKind
from core.types.sampling_params import SamplingParams
from core.types.structural_tags import StructuralTag, StructuralTags
from service.client import CallFailed
from service.gateway.reading import as_written
from tests.contract.gateway.spoken import DIALECTS, Spoken
from tests.support.fakes.fake_engine import INFO, VOCAB, FakeEngine, info_with
from tests.support.fakes.granted import granted
from tests.support.servers import Serve, Serving

SGLANG, VLLM = DIALECTS
IDS = [5, 6, 7]


async def asked(serving: Serving, spoken: Spoken, message: Any) -> Any:
    """What the engine was asked for."""
    with granted("the engine is asked"):
        await called(serving, spoken, message)
    return serving.engine.streams[-1].request


async def called(serving: Serving, spoken: Spoken, message: Any) -> None:
    """Read the call to its end, which may be a refusal."""
    async for _ in spoken.stub(serving.client.channel).Generate(message):
        pass


EVERYTHING = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "frequency_penalty": -0.3,
    "presence_penalty": 1.1,
    "repetition_penalty": 1.2,
    "max_tokens": 6,
    "stop": ["a", "b"],
    "stop_token_ids": [3, 4],
    "skip_special_tokens": True,
    "n": 2,
    "ignore_eos": True,
}
AS_SAMPLED = {name: tuple(value) if isinstance(value, list) else value for name, value in EVERYTHING.items()}


async def test_a_long_prompt_leaves_room_for_few_tokens_that_are_told_of(serve: Serve) -> None:
    """Of a context of 4,096 it leaves half: as many values of 1,024 ids for two outputs as may be told of."""
    told: dict[str, Any] = {"return_logprob": True, "token_ids_logprob": [7] * 1024}
    message = SGLANG.generate([5] * 2048, params={"n": 2}, **told)
    async with serve() as serving:
        assert len((await asked(serving, SGLANG, message)).sampling.logprob_token_ids) == 1024


async def test_every_option_of_sglang_arrives(serve: Serve) -> None:
    params = EVERYTHING | {"min_new_tokens": 2, "no_stop_trim": True, "logit_bias": {"9": -1.5}}
    told: dict[str, Any] = {"return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 2]}
    message = SGLANG.generate(IDS, params=params, lora_id="french", **told)
    async with serve() as serving:
        request = await asked(serving, SGLANG, message)
    expected: dict[str, Any] = {"min_tokens": 2, "include_stop_in_output": True, "logit_bias": {9: -1.5}}
    expected |= {"logprobs": True, "top_logprobs": 3, "logprob_token_ids": (5, 2)}
    assert request.sampling == SamplingParams(**AS_SAMPLED, **expected)
    assert request.adapter == "french"


async def test_every_option_of_vllm_arrives(serve: Serve) -> None:
    params = EVERYTHING | {"min_tokens": 2, "include_stop_str_in_output": True, "logit_bias": {9: -1.5}, "seed": 11}
    async with serve() as serving:
        told = {"logprobs": 3, "prompt_logprobs": 0}
        request = await asked(serving, VLLM, VLLM.generate(IDS, params=params | told))
    expected: dict[str, Any] = {"min_tokens": 2, "include_stop_in_output": True, "logit_bias": {9: -1.5}, "seed": 11}
    found = {"logprobs": True, "top_logprobs": 3, "prompt_logprobs": 0}
    assert request.sampling == SamplingParams(**AS_SAMPLED, **expected, **found)


async def test_zeros_without_presence_switch_options_off(serve: Serve) -> None:
    async with serve() as serving:
        assert INFO.default_sampling == SamplingParams(temperature=0.5, max_tokens=8)
        sglang = await asked(serving, SGLANG, SGLANG.generate(IDS))
        vllm = await asked(serving, VLLM, VLLM.generate(IDS))
        off = await asked(serving, SGLANG, SGLANG.generate(IDS, params={"top_k": -1}))
    # SGLang has no way to leave a temperature out; vLLM has, and gets the checkpoint's.
    assert sglang.sampling == SamplingParams(temperature=0.0, max_tokens=8, skip_special_tokens=False)
    assert vllm.sampling == SamplingParams(temperature=0.5, max_tokens=8, skip_special_tokens=False)
    assert off.sampling.top_k == 0
    assert sglang.request_id != off.request_id and len(sglang.request_id) == 32


TAGS = StructuralTags((StructuralTag("<f=a>", {"type": "integer"}, "</f>"),), ("<f=",))
FLAGGED = StructuralTags(TAGS.tags, TAGS.triggers, at_least_one=True)
OLDER = json.dumps(
    {
        "type": "structural_tag",
        "structures": [{"begin": "<f=a>", "schema": {"type": "integer"}, "end": "</f>"}],
        "triggers": ["<f="],
    }
)
CONTENT = {"type": "json_schema", "json_schema": {"type": "integer"}}
NEWER = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "triggered_tags",
            "triggers": ["<f="],
            "tags": [{"type": "tag", "begin": "<f=a>", "content": CONTENT, "end": "</f>"}],
            "at_least_one": True,
        },
    }
)


@pytest.mark.parametrize(
    ("spoken", "params", "constraint"),
    [
        (SGLANG, {"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        (SGLANG, {"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        (SGLANG, {"ebnf_grammar": "root ::= x"}, Constraint(ConstraintKind.EBNF, "root ::= x")),
        (VLLM, {"regex": "a+"}, Constraint(ConstraintKind.REGEX, "a+")),
        (VLLM, {"json_schema": "{}"}, Constraint(ConstraintKind.JSON_SCHEMA, "{}")),
        (VLLM, {"grammar": "root ::= x"}, Constraint(ConstraintKind.EBNF, "root ::= x")),
        (VLLM, {"json_object": True}, Constraint(ConstraintKind.JSON_SCHEMA, '{"type": "object"}')),
        (VLLM, {"json_object": False}, None),
        (VLLM, {"choice": VLLM.pb.ChoiceConstraint(choices=["yes", "no"])}, Constraint.choice(["yes", "no"])),
        (SGLANG, {"structural_tag": OLDER}, Constraint(ConstraintKind.STRUCTURAL_TAGS, TAGS.source)),
        (VLLM, {"structural_tag": NEWER}, Constraint(ConstraintKind.STRUCTURAL_TAGS, FLAGGED.source)),
    ],
)
async def test_constraints_arrive(serve: Serve, spoken: Spoken, params: Any, constraint: Constraint | None) -> None:
    async with serve(grammar_callers="*") as serving:
        assert (await asked(serving, spoken, spoken.generate(IDS, params=params))).constraint == constraint


def test_the_flags_of_tags_count_and_other_formats_do_not() -> None:
    assert StructuralTags.of_gateway(NEWER) == FLAGGED != TAGS == StructuralTags.of_gateway(OLDER)
    with pytest.raises(ValueError, match="of type any_tags; triggered_tags is served"):
        StructuralTags.of_gateway(NEWER.replace("triggered_tags", "any_tags"))


async def test_vllm_takes_a_text_as_well(serve: Serve) -> None:
    async with serve() as serving:
        request = await asked(serving, VLLM, VLLM.pb.GenerateRequest(text="hello"))
        assert (request.text, request.token_ids) == ("hello", None)
        told = VLLM.pb.GenerateRequest(text="hello", sampling_params=VLLM.pb.SamplingParams(prompt_logprobs=1))
        with pytest.raises(grpc.aio.AioRpcError, match="needs token ids for a prompt"):
            await called(serving, VLLM, told)


NO_TAGS = [
    *(
        "",
        "{",
        "{}",
        "[]",
        "1",
        "[" * 100_000,
        '{"format": {}}',
        '{"format": 1}',
        '{"structures": [{}], "triggers": []}',
    ),
    *(OLDER.replace('["<f="]', '"<f="'), NEWER.replace('["<f="]', '"<f="')),
    *('{"format": {"type": "any_text"}}', NEWER.replace("json_schema", "regex"), NEWER + " " * 200_000),
]
MANY = {"logit_bias": dict.fromkeys(range(2000), 1.0)}

REFUSED: list[tuple[Spoken, dict[str, Any], str]] = [
    (SGLANG, {"ids": []}, "tokenized.input_ids"),
    (VLLM, {"ids": []}, "tokenized.input_ids"),
    (SGLANG, {"ids": [1] * 5000}, "tokenized.input_ids"),
    (VLLM, {"ids": [1] * 5000}, "tokenized.input_ids"),
    (SGLANG, {"request_id": "a b"}, "request_id"),
    (VLLM, {"request_id": "x" * 129}, "request_id"),
    (SGLANG, {"lora_id": "../up$"}, "lora_id"),
    (SGLANG, {"params": {"top_p": 1.5}}, "sampling_params.top_p"),
    (VLLM, {"params": {"top_p": math.nan}}, "sampling_params.top_p"),
    (SGLANG, {"params": {"top_k": -2}}, "sampling_params.top_k"),
    (SGLANG, {"params": {"max_tokens": 0}}, "sampling_params.max_new_tokens"),
    (VLLM, {"params": {"max_tokens": 0}}, "sampling_params.max_tokens"),
    (SGLANG, {"params": {"max_tokens": 2, "min_new_tokens": 3}}, "sampling_params.min_new_tokens"),
    (VLLM, {"params": {"max_tokens": 2, "min_tokens": 3}}, "sampling_params.min_tokens"),
    (VLLM, {"params": {"seed": -1}}, "sampling_params.seed"),
    (SGLANG, {"params": {"n": 65}}, "sampling_params.n"),
    (SGLANG, {"params": {"stop": ["x"] * 17}}, "sampling_params.stop"),
    (VLLM, {"params": {"stop": [""]}}, "sampling_params.stop[0]"),
    (VLLM, {"params": {"stop_token_ids": [VOCAB]}}, "sampling_params.stop_token_ids[0]"),
    (VLLM, {"params": MANY}, "sampling_params.logit_bias"),
    (SGLANG, {"params": {"logit_bias": {"five": 1.0}}}, "sampling_params.logit_bias"),
    (SGLANG, {"params": {"logit_bias": {"-1": 1.0}}}, "sampling_params.logit_bias"),
    (SGLANG, {"params": {"logit_bias": {str(VOCAB): 1.0}}}, f"sampling_params.logit_bias[{VOCAB}]"),
    *((SGLANG, {"params": {"structural_tag": text}}, "sampling_params.structural_tag") for text in NO_TAGS),
    (VLLM, {"params": {"structural_tag": "{}"}}, "sampling_params.structural_tag"),
    (SGLANG, {"params": {"custom_params": {"a": 1}}}, "sampling_params.custom_params"),
    (VLLM, {"params": {"choice": VLLM.pb.ChoiceConstraint(choices=["x"] * 2000)}}, "sampling_params.choice"),
    (SGLANG, {"return_logprob": True, "top_logprobs_num": 65}, "top_logprobs_num"),
    (SGLANG, {"top_logprobs_num": 2}, "top_logprobs_num"),
    (SGLANG, {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
    (VLLM, {"params": {"logprobs": -1}}, "sampling_params.logprobs"),
    (VLLM, {"params": {"logprobs": 65}}, "sampling_params.logprobs"),
    (SGLANG, {"logprob_start_len": 1}, "logprob_start_len"),
    (SGLANG, {"logprob_start_len": 1, "return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
    (VLLM, {"params": {"prompt_logprobs": 21}}, "sampling_params.prompt_logprobs"),
    (VLLM, {"params": {"prompt_logprobs": -1}}, "sampling_params.prompt_logprobs"),
    (VLLM, {"params": {"truncate_prompt_tokens": 5}}, "sampling_params.truncate_prompt_tokens"),
    (SGLANG, {"token_ids_logprob": [1]}, "token_ids_logprob"),
    (SGLANG, {"return_logprob": True, "token_ids_logprob": [VOCAB]}, "token_ids_logprob[0]"),
    (SGLANG, {"return_logprob": True, "token_ids_logprob": [1] * 1025}, "token_ids_logprob"),
    (SGLANG, {"return_logprob": True, "token_ids_logprob": [1] * 900, "params": {"n": 2}}, "token_ids_logprob"),
    (SGLANG, {"return_hidden_states": True}, "return_hidden_states"),
    (SGLANG, {"custom_logit_processor": "x"}, "custom_logit_processor"),
    (SGLANG, {"input_embeds": [0.5]}, "input_embeds"),
    (SGLANG, {"disaggregated_params": {"bootstrap_port": 1}}, "disaggregated_params"),
    (SGLANG, {"mm_inputs": {"image_urls": ["x"]}}, "mm_inputs"),
    (VLLM, {"mm_inputs": {"mm_hashes": ["x"]}}, "mm_inputs"),
    (VLLM, {"kv_transfer_params_json": "{}"}, "kv_transfer_params_json"),
    (SGLANG, {"data_parallel_rank": 1}, "data_parallel_rank"),
    (VLLM, {"data_parallel_rank": 1}, "data_parallel_rank"),
]


@pytest.mark.parametrize(
    ("spoken", "fields", "named"),
    REFUSED,
    ids=[f"{one.name}-{named}-{at}" for at, (one, _, named) in enumerate(REFUSED)],
)
async def test_a_bad_field_is_refused_by_its_name(
    serve: Serve, spoken: Spoken, fields: dict[str, Any], named: str
) -> None:
    fields = dict(fields)
    message = spoken.generate(fields.pop("ids", IDS), **fields)
    async with serve(FakeEngine(info=info_with(max_input_length=4000))) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await called(serving, spoken, message)
        refusal = CallFailed(failed.value)
        assert serving.engine.streams == []
        assert await serving.metric('slipstream_requests_rejected_total{reason="INVALID_REQUEST"}') == 1
    assert (refusal.code, list(refusal.fields)) == (grpc.StatusCode.INVALID_ARGUMENT, [named])
    assert named in refusal.message


@pytest.mark.parametrize("value", [0.7, 0.1, 1e-4, 1.9999, 0.0, -2.0])
def test_singles_are_read_as_they_were_written(value: float) -> None:
    message = VLLM.pb.SamplingParams(temperature=value)
    assert as_written(message.temperature) == value


async def test_embed_has_one_input_and_one_vector(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        stub = spoken.stub(serving.client.channel)
        tokenized = spoken.pb.TokenizedInput(input_ids=IDS)
        found = await stub.Embed(spoken.pb.EmbedRequest(request_id="e", tokenized=tokenized))
        (request,) = serving.engine.embedded
        with pytest.raises(grpc.aio.AioRpcError) as empty:
            await stub.Embed(spoken.pb.EmbedRequest())
    assert (found.embedding_dim, list(found.embedding)) == (4, [3, 0, 1, 1])
    assert (request.request_id, request.inputs) == ("e", ((5, 6, 7),))
    assert list(CallFailed(empty.value).fields) == ["tokenized.input_ids"]


async def test_what_sglang_embeds_besides_is_refused(serve: Serve) -> None:
    tokenized = SGLANG.pb.TokenizedInput(input_ids=IDS)
    message = SGLANG.pb.EmbedRequest(tokenized=tokenized, is_cross_encoder=True, texts=["a"], token_type_ids=[1])
    async with serve() as serving:
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await SGLANG.stub(serving.client.channel).Embed(message)
    assert set(CallFailed(failed.value).fields) == {"is_cross_encoder", "texts", "token_type_ids"}
