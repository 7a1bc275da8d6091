"""The codec of `vllm.grpc.engine.VllmEngine`. Field numbers differ from SGLang's everywhere, so no bytes are shared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from smg_grpc_proto import vllm_engine_pb2 as pb

from core.errors import FieldViolation
from core.types.constraint import MAX_CHOICES, Constraint, ConstraintKind
from core.types.io import EmbedRequest, GenerateRequest, ModelInfo
from service.gateway import reading
from service.gateway.answers import Answers
from service.gateway.dialect import Asked, ServerFacts, Whole
from service.gateway.pairing import CONNECTOR, KV_ROLES, PARAMS_JSON, read_json, written
from service.gateway.reading import IDS, PARAMS

MAX_ABORT_IDS = 256

SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "ignore_eos": "ignore_eos",
    "n": "n",
    "seed": "seed",
    "include_stop_str_in_output": "include_stop_in_output",
    "logit_bias": "logit_bias",
}

CONSTRAINTS: Mapping[str, ConstraintKind] = {
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "regex": ConstraintKind.REGEX,
    "grammar": ConstraintKind.EBNF,
    "structural_tag": ConstraintKind.STRUCTURAL_TAGS,
}
ANY_OBJECT = '{"type": "object"}'

UNSERVED: Mapping[str, str] = {
    "kv_transfer_params": "this server reads kv_transfer_params_json",
    "mm_inputs": "this server takes text only",
    "extra_mm_inputs": "this server takes text only",
    "media_refs": "this server takes text only",
}
UNSERVED_PARAMS: Mapping[str, str] = {
    "truncate_prompt_tokens": "prompts are not truncated here",
}


class VllmDialect(Answers):
    """The `Dialect` of vLLM's gateways. Its responses carry no request id."""

    name = "vllm"
    messages = pb
    service = pb.DESCRIPTOR.services_by_name["VllmEngine"]
    fields: Mapping[str, str] = {
        "token_ids.ids": IDS,
        "inputs[0].token_ids.ids": IDS,
        "text": "input",
        **{f"{PARAMS}.{ours}": f"{PARAMS}.{theirs}" for theirs, ours in SAMPLING.items()},
        f"{PARAMS}.top_logprobs": f"{PARAMS}.logprobs",
        f"{PARAMS}.prompt_logprobs": f"{PARAMS}.prompt_logprobs",
        **{f"constraint.{kind.value}": f"{PARAMS}.{theirs}" for theirs, kind in CONSTRAINTS.items()},
        "constraint.choice": f"{PARAMS}.choice",
        "hand_over": PARAMS_JSON,
        "take_over": PARAMS_JSON,
    }

    def generate_request(self, message: pb.GenerateRequest, info: ModelInfo, deadline: float | None) -> Asked:
        """Read a Generate. An unset temperature, length or seed is the checkpoint's default, other options are off.

        Raises InvalidRequest.
        """
        reading.refuse_oversized(message, info)
        params, wants = message.sampling_params, message.sampling_params.HasField("logprobs")
        text = message.text if message.WhichOneof("input") == "text" else None
        violations = [
            *reading.id_violations(message),
            *(reading.prompt_violations(message.tokenized.input_ids) if text is None else ()),
            *reading.unserved(message, UNSERVED),
            *reading.unserved(params, UNSERVED_PARAMS, f"{PARAMS}."),
            *reading.rank_violations(message),
        ]
        if text is not None and params.HasField("prompt_logprobs"):
            violations.append(FieldViolation(f"{PARAMS}.prompt_logprobs", "needs token ids for a prompt"))
        if params.HasField("prompt_logprobs"):
            told = (len(message.tokenized.input_ids), params.prompt_logprobs, info.vocab_size)
            violations += reading.told_violations(*told, f"{PARAMS}.prompt_logprobs")
        if text == "":
            violations.append(FieldViolation("text", "must not be empty"))
        if len(params.choice.choices) > MAX_CHOICES:
            violations.append(FieldViolation(f"{PARAMS}.choice", f"at most {MAX_CHOICES} choices can be served"))
        reading.refuse(violations)
        hand_over, take_over = read_json(message.kv_transfer_params_json)
        sampling = reading.sampling(
            params,
            SAMPLING,
            info.default_sampling,
            logprobs=wants,
            top_logprobs=params.logprobs,
            prompt_logprobs=params.prompt_logprobs if params.HasField("prompt_logprobs") else None,
        )
        request = GenerateRequest(
            request_id=reading.request_id(message),
            text=text,
            token_ids=tuple(message.tokenized.input_ids) if text is None else None,
            sampling=sampling,
            want_text=False,
            deadline=deadline,
            # Its one token is thrown away: no grammar is compiled for it, nor does it contradict the other fields.
            constraint=None if hand_over else _constraint(params),
            hand_over=hand_over,
            take_over=take_over,
        )
        return Asked(request, message.stream)

    def complete(self, request_id: str, whole: Whole) -> pb.GenerateResponse:
        """The response with all tokens of one output, and with where the keys of its prompt are."""
        response: pb.GenerateResponse = super().complete(request_id, whole)
        response.complete.kv_transfer_params_json = written(whole.handed)
        return response

    def embed_request(self, message: pb.EmbedRequest, info: ModelInfo, deadline: float | None) -> EmbedRequest:
        """Read an Embed: the token ids of one input. Raises InvalidRequest."""
        reading.refuse_long_prompt(message, info)
        reading.refuse([*reading.id_violations(message), *reading.prompt_violations(message.tokenized.input_ids)])
        return EmbedRequest(
            inputs=(tuple(message.tokenized.input_ids),),
            request_id=reading.request_id(message),
            deadline=deadline,
        )

    def abort_ids(self, message: pb.AbortRequest) -> Sequence[str]:
        """The ids to abort. Raises InvalidRequest unless there are 1 to MAX_ABORT_IDS."""
        if not 1 <= len(message.request_ids) <= MAX_ABORT_IDS:
            reading.refuse([FieldViolation("request_ids", f"must have 1 to {MAX_ABORT_IDS} ids")])
        return tuple(message.request_ids)

    def abort_response(self, found: bool) -> pb.AbortResponse:
        """The response, which has no fields."""
        return pb.AbortResponse()

    def server_info(self, facts: ServerFacts) -> pb.GetServerInfoResponse:
        """The response, with a KV connector where this server only prefills, or only decodes."""
        response = pb.GetServerInfoResponse(
            active_requests=facts.active_requests,
            is_paused=facts.paused,
            uptime_seconds=facts.uptime,
            server_type="slipstream",
            data_parallel_size=1,
            block_size=facts.page_size,
            model_dtype=facts.dtype,
            max_num_seqs=facts.max_running,
            constrained_decoding_start="first_token",
        )
        if facts.role != "both":
            response.kv_connector, response.kv_role = CONNECTOR, KV_ROLES[facts.role]
            response.kv_engine_id, response.kv_cache_dtype = facts.engine_id, facts.kv_dtype
        return response


def _constraint(params: pb.SamplingParams) -> Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind == "choice":
        return Constraint.choice(list(params.choice.choices))
    if kind == "json_object":
        return Constraint(ConstraintKind.JSON_SCHEMA, ANY_OBJECT) if params.json_object else None
    if kind == "structural_tag":
        return reading.structural_tags(params.structural_tag)
    return None if kind is None else Constraint(CONSTRAINTS[kind], getattr(params, kind))
