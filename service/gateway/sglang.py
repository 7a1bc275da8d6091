"""The codec of `sglang.grpc.scheduler.SglangScheduler`, the dialect that the gateway prefers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from smg_grpc_proto import sglang_scheduler_pb2 as pb

from core.errors import FieldViolation, InvalidRequest
from core.types.constraint import Constraint, ConstraintKind
from core.types.io import EmbedRequest, GenerateRequest, ModelInfo, TokenLogprob
from core.types.sampling_params import MAX_LOGPROB_TOKEN_IDS, MAX_PROMPT_LOGPROBS
from service.gateway import reading
from service.gateway.answers import Answers
from service.gateway.dialect import Asked, Load, ModelFacts, ServerFacts
from service.gateway.pairing import BOOTSTRAP, read_bootstrap
from service.gateway.reading import IDS, PARAMS

SAMPLING: Mapping[str, str] = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "skip_special_tokens": "skip_special_tokens",
    "n": "n",
    "min_new_tokens": "min_tokens",
    "ignore_eos": "ignore_eos",
    "no_stop_trim": "include_stop_in_output",
}

CONSTRAINTS: Mapping[str, ConstraintKind] = {
    "regex": ConstraintKind.REGEX,
    "json_schema": ConstraintKind.JSON_SCHEMA,
    "ebnf_grammar": ConstraintKind.EBNF,
    "structural_tag": ConstraintKind.STRUCTURAL_TAGS,
}

MAX_CHOSEN = 1 << 22
"""Most values of chosen ids that a request is told: all that a gateway is told is kept until the end, 12 bytes each."""

UNSERVED: Mapping[str, str] = {
    "mm_inputs": "this server takes text only",
    "return_hidden_states": "hidden states are not served",
    "custom_logit_processor": "is not run here",
    "input_embeds": "prompts are token ids here",
}
UNSERVED_PARAMS: Mapping[str, str] = {
    "custom_params": "are for custom logit processors, which are not run here",
}
UNSERVED_EMBED: Mapping[str, str] = {
    "mm_inputs": "this server takes text only",
    "token_type_ids": "are not served",
    "is_cross_encoder": "pairs are judged by Score of slipstream.v1",
    "texts": "are for pairs, which Score of slipstream.v1 judges",
}


class SglangDialect(Answers):
    """The `Dialect` of SGLang's gateways."""

    name = "sglang"
    messages = pb
    service = pb.DESCRIPTOR.services_by_name["SglangScheduler"]
    fields: Mapping[str, str] = {
        "token_ids.ids": IDS,
        "inputs[0].token_ids.ids": IDS,
        "text": IDS,
        "adapter": "lora_id",
        **{f"{PARAMS}.{ours}": f"{PARAMS}.{theirs}" for theirs, ours in SAMPLING.items()},
        f"{PARAMS}.top_logprobs": "top_logprobs_num",
        f"{PARAMS}.logprob_token_ids": "token_ids_logprob",
        "hand_over": BOOTSTRAP,
        "take_over": BOOTSTRAP,
        **{f"constraint.{kind.value}": f"{PARAMS}.{theirs}" for theirs, kind in CONSTRAINTS.items()},
    }

    def generate_request(self, message: pb.GenerateRequest, info: ModelInfo, deadline: float | None) -> Asked:
        """Read a Generate. Unset options are off, as in SGLang: without a temperature the output is greedy.

        Raises InvalidRequest.
        """
        reading.refuse_oversized(message, info)
        if len(message.token_ids_logprob) > MAX_LOGPROB_TOKEN_IDS:
            raise InvalidRequest.of("token_ids_logprob", f"at most {MAX_LOGPROB_TOKEN_IDS} ids can be served")
        params = message.sampling_params
        violations = [
            *reading.id_violations(message, message.lora_id),
            *reading.prompt_violations(message.tokenized.input_ids),
            *reading.unserved(message, UNSERVED),
            *reading.unserved(params, UNSERVED_PARAMS, f"{PARAMS}."),
            *reading.rank_violations(message),
        ]
        # 0 is what a field has that was never set, so the prompt is told of from its second token at the earliest.
        told = message.return_logprob and message.logprob_start_len > 0
        violations += _told_violations(message, info, told)
        bias = {key: _token_id(key) for key in params.logit_bias}
        violations += [
            FieldViolation(f"{PARAMS}.logit_bias", "keys must be token ids") for token in bias.values() if token is None
        ][:1]
        reading.refuse(violations)
        hand_over, take_over = read_bootstrap(message, info)
        sampling = reading.sampling(
            params,
            SAMPLING,
            info.default_sampling,
            logprobs=message.return_logprob,
            top_logprobs=message.top_logprobs_num,
            logprob_token_ids=tuple(message.token_ids_logprob),
            prompt_logprobs=message.top_logprobs_num if told else None,
            logit_bias={bias[key]: reading.as_written(value) for key, value in params.logit_bias.items()},
        )
        request = GenerateRequest(
            request_id=reading.request_id(message),
            token_ids=tuple(message.tokenized.input_ids),
            sampling=sampling,
            want_text=False,
            deadline=deadline,
            adapter=message.lora_id,
            # Its one token is thrown away: no grammar is compiled for it, nor does it contradict the other fields.
            constraint=None if hand_over else _constraint(params),
            hand_over=hand_over,
            take_over=take_over,
        )
        return Asked(request, message.stream, max(0, message.logprob_start_len))

    def embed_request(self, message: pb.EmbedRequest, info: ModelInfo, deadline: float | None) -> EmbedRequest:
        """Read an Embed: the token ids of one input. Raises InvalidRequest."""
        reading.refuse_long_prompt(message, info)
        reading.refuse(
            [
                *reading.id_violations(message),
                *reading.prompt_violations(message.tokenized.input_ids),
                *reading.unserved(message, UNSERVED_EMBED),
                *reading.rank_violations(message),
            ]
        )
        return EmbedRequest(
            inputs=(tuple(message.tokenized.input_ids),),
            request_id=reading.request_id(message),
            deadline=deadline,
        )

    def _logprobs(self, entries: Sequence[TokenLogprob], chosen_ids: Sequence[int]) -> Any:
        """A fourth list of that length, where ids were chosen."""
        found = super()._logprobs(entries, chosen_ids)
        if found is not None and chosen_ids:
            found.token_ids_logprobs.extend(
                pb.TopLogProbs(values=each.chosen, token_ids=chosen_ids) for each in entries
            )
        return found

    def response(self, request_id: str, **one: Any) -> pb.GenerateResponse:
        """A GenerateResponse with the request id and the given chunk or complete."""
        return pb.GenerateResponse(request_id=request_id, **one)

    def abort_ids(self, message: pb.AbortRequest) -> Sequence[str]:
        """The one id of the message."""
        return (message.request_id,)

    def abort_response(self, found: bool) -> pb.AbortResponse:
        """The response, which says whether the request was live."""
        return pb.AbortResponse(success=found, message="" if found else "no live request of this caller has this id")

    def model_info(self, facts: ModelFacts) -> pb.GetModelInfoResponse:
        """The response, with the name of the weights and the labels too."""
        response: pb.GetModelInfoResponse = super().model_info(facts)
        response.weight_version = facts.weight_version
        if facts.info.labels is not None:
            names = facts.info.labels.names
            response.num_labels = len(names)
            response.id2label_json = json.dumps(dict(enumerate(names)))
        return response

    def server_info(self, facts: ServerFacts) -> pb.GetServerInfoResponse:
        """The response, with `server_args` under SGLang's names."""
        response = pb.GetServerInfoResponse(
            active_requests=facts.active_requests,
            is_paused=facts.paused,
            uptime_seconds=facts.uptime,
            server_type="slipstream",
            max_total_num_tokens=facts.max_total_tokens,
        )
        response.start_time.FromDatetime(facts.started_at)
        response.server_args.update(
            {
                "tp_size": 1,
                "dp_size": 1,
                "max_running_requests": facts.max_running,
                "disaggregation_mode": "null" if facts.role == "both" else facts.role,
                "page_size": facts.page_size,
                "dtype": facts.dtype,
                "slipstream_version": facts.version,
            }
        )
        if facts.transfer_port:
            response.server_args.update({"disaggregation_bootstrap_port": facts.transfer_port})
        return response

    def loads(self, version: str, timestamp: str, load: Load) -> pb.GetLoadsResponse:
        """The load of the one rank, and the same figures as the aggregate of all ranks."""
        response: pb.GetLoadsResponse = super().loads(version, timestamp, load)
        if load.drafts is not None:
            # The length counts the token behind the right drafts, as SGLang's does.
            told = response.loads[0].speculative
            told.accept_length, told.accept_rate = load.drafts.acceptance_length, load.drafts.acceptance_rate
        aggregate = response.aggregate
        aggregate.total_running_reqs = load.running
        aggregate.total_waiting_reqs = load.waiting
        aggregate.total_reqs = load.running + load.waiting
        aggregate.avg_token_usage = load.token_usage
        aggregate.avg_throughput = load.gen_throughput
        aggregate.avg_utilization = load.running / load.max_running
        return response


def _told_violations(message: pb.GenerateRequest, info: ModelInfo, of_prompt: bool) -> Iterator[FieldViolation]:
    """Of the fields about log probabilities."""
    params, chosen = message.sampling_params, len(message.token_ids_logprob)
    room = max(1, info.context_length - len(message.tokenized.input_ids))
    tokens = min(params.max_new_tokens, room) if params.HasField("max_new_tokens") else room
    most = MAX_CHOSEN // (max(1, tokens) * max(1, params.n))
    if chosen > most:
        words = f"has {chosen} ids, at most {most} can be told of each of {tokens} tokens; see max_new_tokens"
        yield FieldViolation("token_ids_logprob", words)
    if of_prompt:
        count = len(message.tokenized.input_ids) - message.logprob_start_len
        yield from reading.told_violations(count, message.top_logprobs_num, info.vocab_size, "logprob_start_len")
        if message.top_logprobs_num > MAX_PROMPT_LOGPROBS:
            words = f"of a prompt at most {MAX_PROMPT_LOGPROBS} alternatives are told, see logprob_start_len"
            yield FieldViolation("top_logprobs_num", words)
    if not message.return_logprob:
        asked = (message.logprob_start_len > 0, message.top_logprobs_num, message.token_ids_logprob)
        for name, value in zip(("logprob_start_len", "top_logprobs_num", "token_ids_logprob"), asked, strict=True):
            if value:
                yield FieldViolation(name, "needs return_logprob")


def _constraint(params: pb.SamplingParams) -> Constraint | None:
    kind = params.WhichOneof("constraint")
    if kind == "structural_tag":
        return reading.structural_tags(params.structural_tag)
    return None if kind is None else Constraint(CONSTRAINTS[kind], getattr(params, kind))


def _token_id(key: str) -> int | None:
    """The token id that a key of the `logit_bias` map spells in decimal; None if it is no such number."""
    return int(key) if key.isascii() and key.isdigit() and len(key) <= 10 else None
