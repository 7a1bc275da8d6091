"""Errors on the wire: code, details, trailers, and what must never be in them."""

from __future__ import annotations

import logging
import re
from collections import Counter

import grpc
import grpc.aio
import pytest

from core import errors
from core.errors import (
    Draining,
    FieldViolation,
    InvalidRequest,
    Overloaded,
    QueueTimeout,
    SlipstreamError,
    SlowConsumer,
)
from core.invariants import InvariantViolation
from core.types.io import Delta, GenerateRequest
from service.client import CallFailed
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.rpc.status import CODES, status_of
from tests.support.fakes.fake_engine import FakeEngine, Step, token_at
from tests.support.servers import Serve

EXAMPLES: list[tuple[SlipstreamError, str, str]] = [
    (InvalidRequest.of("text", "is too long"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (errors.DuplicateRequest("taken"), "ALREADY_EXISTS", "DUPLICATE_REQUEST_ID"),
    (Overloaded("the queue is full", reason="QUEUE_FULL", retry_after=1.25), "RESOURCE_EXHAUSTED", "QUEUE_FULL"),
    (errors.QueueTimeout("waited too long"), "RESOURCE_EXHAUSTED", "QUEUE_TIMEOUT"),
    (errors.SlowConsumer("slow"), "RESOURCE_EXHAUSTED", "SLOW_CONSUMER"),
    (errors.DeadlinePassed("late"), "DEADLINE_EXCEEDED", "DEADLINE_EXCEEDED"),
    (errors.RequestFailed("not finite"), "INTERNAL", "REQUEST_FAILED"),
    (errors.RequestAborted("aborted"), "CANCELLED", "REQUEST_ABORTED"),
    (errors.EngineDead("failed"), "UNAVAILABLE", "ENGINE_DEAD"),
    (errors.Draining("going"), "UNAVAILABLE", "DRAINING"),
]

LEAKS = re.compile(r"0x[0-9a-f]{6,}|/[a-z]+/|Traceback|Error\(|Exception")

UNMAPPED: list[Exception] = [
    ValueError("secret /models/path 0x7f00deadbeef"),
    InvariantViolation("row_double_free", {"row": 3}),
    errors.ModelLoadError("cannot read /srv/models/weights.safetensors"),
    SlipstreamError("no subclass"),
    TimeoutError(),
    ExceptionGroup("several", [KeyError("x")]),
]


def test_every_client_facing_error_of_core_has_a_code() -> None:
    kinds = {
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, SlipstreamError) and kind is not SlipstreamError
    }
    # A kind without a code of its own has that of the kind which it refines.
    without = {kind for kind in kinds if not CODES.keys() & set(kind.__mro__)}
    assert without == {errors.StartupError, errors.ConfigError, errors.ModelLoadError}


@pytest.mark.parametrize(("error", "code", "reason"), EXAMPLES, ids=lambda each: type(each).__name__)
async def test_refusals_carry_code_reason_and_details(
    serve: Serve, error: SlipstreamError, code: str, reason: str
) -> None:
    async with serve() as serving:
        # Retried errors would only repeat; one attempt keeps the counters readable.
        serving.engine.refuse_with = error
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
        rejected = await serving.metric(f'slipstream_requests_rejected_total{{reason="{reason}"}}')
    assert (failed.value.code.name, failed.value.reason, failed.value.message) == (code, reason, error.message)
    assert failed.value.tokens_emitted == 0
    assert rejected >= 1


@pytest.mark.parametrize(("error", "code", "reason"), EXAMPLES, ids=lambda each: type(each).__name__)
async def test_failures_inside_a_stream_look_the_same(
    serve: Serve, error: SlipstreamError, code: str, reason: str
) -> None:
    async with serve(FakeEngine(lambda request: [error])) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
        assert all(stream.closed.is_set() for stream in serving.engine.streams)
        attempts = len(serving.engine.streams)
    # Nothing had been told yet, so gRPC may try elsewhere; but not with a request that an engine may have died of.
    again = (code == "UNAVAILABLE" and reason != "ENGINE_DEAD") or reason == "QUEUE_FULL"
    assert attempts == (2 if again else 1)
    assert (failed.value.code.name, failed.value.reason) == (code, reason)


async def test_a_stream_that_has_begun_is_not_retried(serve: Serve) -> None:
    def one_token(request: GenerateRequest) -> list[Step]:
        return [Delta(0, 0, (token_at(0),), "a", ()), Draining("going")]

    async with serve(FakeEngine(one_token)) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
        assert len(serving.engine.streams) == 1
    assert (failed.value.reason, failed.value.tokens_emitted) == ("DRAINING", 1)


async def test_bad_fields_are_named_all_at_once(serve: Serve) -> None:
    async with serve() as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi", top_p=0.0, temperature=float("nan"), n=65)
    assert set(failed.value.fields) == {
        "sampling_params.top_p",
        "sampling_params.temperature",
        "sampling_params.n",
    }


async def test_overload_says_when_to_come_back(serve: Serve) -> None:
    async with serve() as serving:
        serving.engine.refuse_with = Overloaded("full", reason="QUEUE_FULL", retry_after=1.25)
        call = serving.stub.Generate(pb.GenerateRequest(text="hi"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            _ = [response async for response in call]
    pushback = int(dict(failed.value.trailing_metadata()).get("grpc-retry-pushback-ms", 0))
    assert 1250 <= pushback <= 2500
    assert CallFailed(failed.value).retry_after == pytest.approx(pushback / 1000), "both say the same"


def test_what_is_refused_in_one_moment_does_not_come_back_in_one() -> None:
    statuses = [status_of(Overloaded("full", reason="QUEUE_FULL", retry_after=1.0)) for _ in range(1000)]
    waits = sorted(int(dict(each.trailers)["grpc-retry-pushback-ms"]) for each in statuses)
    assert waits[0] >= 1000 and waits[-1] <= 2000, "never before there can be room"
    tenths = Counter(wait // 100 for wait in waits)
    assert all(50 <= tenths[tenth] <= 200 for tenth in range(10, 20)), "and evenly over a second"


def test_only_what_says_when_may_be_tried_again() -> None:
    """The published policy retries RESOURCE_EXHAUSTED, and this trailer decides."""
    pushbacks = {
        type(error).__name__: dict(status_of(error).trailers).get("grpc-retry-pushback-ms")
        for error in (SlowConsumer("slow"), QueueTimeout("late"))
    }
    assert pushbacks == {"SlowConsumer": "-1", "QueueTimeout": "-1"}


@pytest.mark.parametrize("error", UNMAPPED, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("inside_stream", [False, True])
async def test_unknown_errors_are_hidden_behind_an_incident(
    serve: Serve, error: Exception, inside_stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, "service.rpc.status")
    async with serve(FakeEngine(lambda request: [error])) as serving:
        if not inside_stream:
            serving.engine.refuse_with = error
        call = serving.stub.Generate(pb.GenerateRequest(text="hi"))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            _ = [response async for response in call]
    shown = f"{failed.value.details()} {failed.value.trailing_metadata()}"
    assert failed.value.code() is grpc.StatusCode.INTERNAL
    assert failed.value.details() == "internal error"
    assert not LEAKS.search(shown) and "secret" not in shown
    (incident,) = re.findall(r"incident ([0-9a-f]{12})", caplog.text)
    assert incident in shown


def test_many_long_violations_stay_below_the_clients_limit_for_trailers() -> None:
    error = InvalidRequest([FieldViolation(f"logit_bias[{i}]" * 20, "x" * 500) for i in range(2000)])
    status = status_of(error)
    size = sum(len(key) + len(value) * 4 / 3 for key, value in status.metadata())
    assert size + 3 * len(status.message) < 8 * 1024


async def test_oversized_messages_and_unknown_methods(serve: Serve) -> None:
    async with serve(max_receive_bytes=65_536) as serving:
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("x" * 65_537)
        assert failed.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        unknown = serving.client.channel.unary_unary("/slipstream.v1.InferenceService/Nonesuch")
        with pytest.raises(grpc.aio.AioRpcError) as missing:
            await unknown(b"")
        assert missing.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "Nonesuch" not in await serving.metrics(), "only known methods become labels"
