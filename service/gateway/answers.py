"""Answers as messages, for fields with the same names in all dialects. Their numbers differ: no bytes are shared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from core.types.io import EmbedResult, TokenLogprob
from service.gateway.dialect import Load, ModelFacts, Piece, Whole


class Answers:
    """The writing half of a `service.gateway.dialect.Dialect`, over the generated module `messages`."""

    messages: Any

    def response(self, request_id: str, **one: Any) -> Any:
        """A GenerateResponse with the given chunk or complete."""
        return self.messages.GenerateResponse(**one)

    def chunk(self, request_id: str, piece: Piece) -> Any:
        """The response with the new tokens of one output."""
        chunk = self.messages.GenerateStreamChunk(
            token_ids=piece.token_ids,
            prompt_tokens=piece.prompt_tokens,
            completion_tokens=piece.completion_tokens,
            output_logprobs=self._logprobs(piece.logprobs, piece.chosen_ids),
            input_logprobs=piece.prompt,
            index=piece.index,
        )
        return self.response(request_id, chunk=chunk)

    def complete(self, request_id: str, whole: Whole) -> Any:
        """The response with all tokens of one output."""
        complete = self.messages.GenerateComplete(
            output_ids=whole.token_ids,
            finish_reason=whole.reason,
            prompt_tokens=whole.usage.prompt_tokens,
            completion_tokens=whole.usage.completion_tokens,
            cached_tokens=whole.usage.cached_tokens,
            spec_draft_tokens=whole.usage.draft_tokens,
            spec_accepted_tokens=whole.usage.accepted_draft_tokens,
            output_logprobs=self._logprobs(whole.logprobs, whole.chosen_ids),
            input_logprobs=whole.prompt,
            index=whole.index,
        )
        if isinstance(whole.matched_stop, int):
            complete.matched_token_id = whole.matched_stop
        elif whole.matched_stop is not None:
            complete.matched_stop_str = whole.matched_stop
        return self.response(request_id, complete=complete)

    def _logprobs(self, entries: Sequence[TokenLogprob], chosen_ids: Sequence[int]) -> Any:
        """Three lists of equal length, which gateways rely on; None without log probabilities."""
        if not entries:
            return None
        make = self.messages.TopLogProbs
        return self.messages.OutputLogProbs(
            token_logprobs=[each.logprob for each in entries],
            token_ids=[each.token_id for each in entries],
            top_logprobs=[
                make(values=[v for _, v in each.top], token_ids=[t for t, _ in each.top]) for each in entries
            ],
        )

    def prompt(self, first: int | None) -> Any:
        """What is told of a prompt, with its first token alone if that is told of; it has no log probability."""
        if first is None:
            return self.messages.InputLogProbs()
        messages = self.messages
        return messages.InputLogProbs(
            token_logprobs=[messages.InputTokenLogProb()], token_ids=[first], top_logprobs=[messages.TopLogProbs()]
        )

    def add_to_prompt(self, told: Any, entries: Sequence[TokenLogprob]) -> None:
        """Tell of more tokens of the prompt, in three lists of equal length, as for outputs."""
        make, value = self.messages.TopLogProbs, self.messages.InputTokenLogProb
        told.token_logprobs.extend(value(value=each.logprob) for each in entries)
        told.token_ids.extend(each.token_id for each in entries)
        told.top_logprobs.extend(
            make(values=[v for _, v in each.top], token_ids=[t for t, _ in each.top]) for each in entries
        )

    def embed_response(self, result: EmbedResult) -> Any:
        """The response with the vector of the one input."""
        (found,) = result.embeddings
        dimension, tokens = len(found.values), found.prompt_tokens
        return self.messages.EmbedResponse(embedding=found.values, embedding_dim=dimension, prompt_tokens=tokens)

    def health(self, healthy: bool, message: str) -> Any:
        """The response with the server's readiness, and a word for its state."""
        return self.messages.HealthCheckResponse(healthy=healthy, message=message)

    def model_info(self, facts: ModelFacts) -> Any:
        """The response with facts of the model. Token ids that the checkpoint lacks stay 0."""
        info = facts.info
        return self.messages.GetModelInfoResponse(
            model_path=facts.path,
            tokenizer_path=facts.path,
            is_generation=info.generates,
            served_model_name=info.name,
            max_context_length=info.context_length,
            vocab_size=info.vocab_size,
            model_type=facts.model_type,
            eos_token_ids=info.eos_token_ids,
            pad_token_id=facts.pad_token_id,
            bos_token_id=info.bos_token_id,
            max_req_input_len=info.max_input_length,
            architectures=[info.architecture],
            default_sampling_params_json=facts.default_sampling,
        )

    def loads(self, version: str, timestamp: str, load: Load) -> Any:
        """The response with the load of the one rank."""
        rank = self.messages.SchedulerLoad(
            num_running_reqs=load.running,
            num_waiting_reqs=load.waiting,
            num_total_reqs=load.running + load.waiting,
            num_used_tokens=load.used_tokens,
            max_total_num_tokens=load.max_total_tokens,
            token_usage=load.token_usage,
            gen_throughput=load.gen_throughput,
            cache_hit_rate=load.cache_hit_rate,
            utilization=load.running / load.max_running,
            max_running_requests=load.max_running,
        )
        return self.messages.GetLoadsResponse(timestamp=timestamp, version=version, dp_rank_count=1, loads=[rank])
