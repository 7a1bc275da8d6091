"""The real gateway in front of workers of both roles, and what those tell of the keys that go between them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.chaos.process import PATIENCE, ServerProcess
from tests.contract.gateway.smg import Smg

DIALECTS = ("sglang", "vllm")
TRANSFER = "slipstream_transfer_"


def in_front_of(folder: Path, dialect: str, worker: ServerProcess, **flags: Any) -> Smg:
    """A gateway of that dialect with one worker for whole requests."""
    smg = Smg(folder, **flags)
    smg.add(worker.target, dialect)
    return smg


def pairing(
    folder: Path, dialect: str, prefill: Sequence[ServerProcess], decode: Sequence[ServerProcess], **flags: Any
) -> Smg:
    """A gateway that has a request prefilled by one of `prefill` and decoded by one of `decode`.

    As the documents tell: SGLang's workers are named when it starts, and vLLM's are added by their dialect.
    """
    if dialect == "sglang":
        ports = {each.target: transfer_port(each) for each in prefill}
        return Smg(folder, pairs=True, prefill=ports, decode=[each.target for each in decode], **flags)
    smg = Smg(folder, pairs=True, **flags)
    for each in prefill:
        smg.add(each.target, dialect, "prefill")
    for each in decode:
        smg.add(each.target, dialect, "decode")
    return smg


def transfer_port(worker: ServerProcess) -> int:
    """Where keys are fetched from `worker`, which prefills: it chose the port itself."""
    # May be absent: then no test that asks this runs.
    from smg_grpc_proto.generated.sglang_scheduler_pb2 import GetServerInfoRequest
    from smg_grpc_proto.generated.sglang_scheduler_pb2_grpc import SglangSchedulerStub

    with grpc.insecure_channel(worker.target) as channel:
        told = SglangSchedulerStub(channel).GetServerInfo(GetServerInfoRequest(), timeout=PATIENCE)
    return int(told.server_args["disaggregation_bootstrap_port"])


async def transfers(worker: ServerProcess) -> dict[str, float]:
    """The figures of transfers by their names without what all have in common; `failures` of all reasons together."""
    told = {name: value for name, value in (await worker.metrics()).items() if name.startswith(TRANSFER)}
    found = {name.removeprefix(TRANSFER).removesuffix("_total"): value for name, value in told.items()}
    return found | {"failures": sum(value for name, value in found.items() if name.startswith("failures_total{"))}
