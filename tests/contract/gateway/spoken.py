"""Both dialects as their clients use them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc.aio
from smg_grpc_proto import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc, vllm_engine_pb2, vllm_engine_pb2_grpc


@dataclass(frozen=True)
class Spoken:
    """A dialect from outside: messages, stub, and what the two call differently."""

    name: str
    pb: Any
    new_stub: Any
    service: str
    length: str
    """The field for the most tokens of an output."""

    def stub(self, channel: grpc.aio.Channel) -> Any:
        return self.new_stub(channel)

    def generate(self, ids: list[int], *, params: dict[str, Any] | None = None, **fields: Any) -> Any:
        """A GenerateRequest; `max_tokens` in `params` is called what the dialect calls it."""
        given = dict(params or {})
        if "max_tokens" in given:
            given[self.length] = given.pop("max_tokens")
        sampling = self.pb.SamplingParams(**given)
        tokenized = self.pb.TokenizedInput(input_ids=ids)
        return self.pb.GenerateRequest(tokenized=tokenized, sampling_params=sampling, **fields)

    def logprobs(self, top: int) -> dict[str, Any]:
        """Fields of `generate` that ask for them."""
        if self.name == "vllm":
            return {"params": {"logprobs": top}}
        return {"return_logprob": True, "top_logprobs_num": top}

    def abort(self, request_id: str) -> Any:
        """An AbortRequest."""
        if self.name == "vllm":
            return self.pb.AbortRequest(request_ids=[request_id])
        return self.pb.AbortRequest(request_id=request_id, reason="Stream dropped")


DIALECTS = (
    Spoken(
        "sglang",
        sglang_scheduler_pb2,
        sglang_scheduler_pb2_grpc.SglangSchedulerStub,
        "sglang.grpc.scheduler.SglangScheduler",
        "max_new_tokens",
    ),
    Spoken(
        "vllm",
        vllm_engine_pb2,
        vllm_engine_pb2_grpc.VllmEngineStub,
        "vllm.grpc.engine.VllmEngine",
        "max_tokens",
    ),
)
