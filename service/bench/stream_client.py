"""The client of `slipstream bench service`, in a process of its own: `python -m service.bench.stream_client`.

It reads one JSON object a line from standard input (`Job`) and answers each with one line. It ends when its input does.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from asyncio.subprocess import PIPE, Process, create_subprocess_exec
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc.aio

from service.bench.stream_rate import Latencies, Rate, Stream, measure_latencies, measure_rate
from service.pb.slipstream.v1 import inference_pb2 as pb

GENERATE_METHOD = "/slipstream.v1.InferenceService/Generate"
LINE_LIMIT = 16 * 1024 * 1024
"""Most bytes of one answer, which lists every latency."""
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Job:
    """`count` streams of `tokens` tokens each after prompts of `prompt` tokens: all at once, or `one_by_one`."""

    port: int
    method: str
    count: int
    tokens: int
    prompt: int
    one_by_one: bool = False


def request(prompt: int, tokens: int) -> pb.GenerateRequest:
    """The request of every stream."""
    sampling = pb.SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
    return pb.GenerateRequest(token_ids=pb.TokenIds(ids=range(3, 3 + prompt)), sampling_params=sampling)


def opener(channel: grpc.aio.Channel, job: Job) -> Stream:
    """A function that opens one of the job's streams on `channel`."""
    method: Any = channel.unary_stream(
        job.method,
        request_serializer=pb.GenerateRequest.SerializeToString,
        response_deserializer=pb.GenerateResponse.FromString,
    )
    message = request(job.prompt, job.tokens)

    async def read() -> AsyncIterator[int]:
        async for response in method(message):
            count = len(response.delta.token_ids)
            if count:
                yield count

    return read


async def _answer(job: Job) -> dict[str, Any]:
    options = (("grpc.use_local_subchannel_pool", 1),)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{job.port}", options=options) as channel:
        stream = opener(channel, job)
        if job.one_by_one:
            # Otherwise the first request would include the time of connecting.
            await channel.channel_ready()
            return asdict(await measure_latencies(stream, job.count))
        return asdict(await measure_rate(stream, job.count, job.tokens))


class StreamClient:
    """Starts the client process and gives it jobs. Use it as an async context manager."""

    _process: Process

    async def __aenter__(self) -> StreamClient:
        # The other process must import the same package, from wherever this one was started.
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        command = (sys.executable, "-P", "-m", "service.bench.stream_client")
        self._process = await create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, env=env, limit=LINE_LIMIT)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        await self._process.wait()

    async def rate(self, job: Job) -> Rate:
        """The rate of the job's streams, all at once. Raises RuntimeError if the client failed."""
        return Rate(**await self._run(job))

    async def latencies(self, job: Job) -> Latencies:
        """The latencies of the job's streams, one after the other. Raises RuntimeError if the client failed."""
        return Latencies(**await self._run(job))

    async def _run(self, job: Job) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        answer: dict[str, Any] = json.loads(await self._process.stdout.readline() or b'{"error": "the client died"}')
        if "error" in answer:
            raise RuntimeError(answer["error"])
        return answer


def main() -> None:
    """Answer one job for each line of standard input."""
    for line in sys.stdin:
        try:
            answer = asyncio.run(_answer(Job(**json.loads(line))))
        except (ValueError, grpc.aio.AioRpcError) as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
