"""Whoever may call LoadAdapter reaches adapters below the operator's directory, and nothing else of the machine."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.pb.slipstream.v1 import adapters_pb2 as pb
from tests.security import replies
from tests.security.edges import STRINGS
from tests.security.neighbour import ASKED, PROMPT
from tests.security.wire import Fuzzer
from tests.support.servers import serve_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter

shared_loop = pytest.mark.asyncio(loop_scope="module")

FUZZED = 400


@pytest.fixture(scope="module")
def root(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One good adapter below the root, the same one outside, and ways from the one to the other."""
    top = tmp_path_factory.mktemp("secret-place")
    root = top / "root"
    outside = make_adapter(tiny, top / "outside", 0, **ADAPTERS["narrow"])
    shutil.copytree(outside, root / "good")
    (root / "link").symlink_to(outside)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        linked = Path(shutil.copytree(outside, root / f"linked-{name[8:13]}"))
        (linked / name).unlink()
        (linked / name).symlink_to(outside / name)
    passwd = Path(shutil.copytree(outside, root / "passwd"))
    (passwd / "adapter_config.json").unlink()
    (passwd / "adapter_config.json").symlink_to("/etc/passwd")
    pipe = Path(shutil.copytree(outside, root / "pipe"))
    (pipe / "adapter_model.safetensors").unlink()
    os.mkfifo(pipe / "adapter_model.safetensors")
    return root


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def client(tiny: Path, root: Path) -> AsyncIterator[SlipstreamClient]:
    async with serve_checkpoint(tiny, lora_dir=str(root), unnamed_callers="all") as (_, made):
        yield made


async def failure(stub: Any, method: str, message: Any) -> CallFailed | None:
    """How the call failed, every text of it checked; None if it did not."""
    try:
        await getattr(stub, method)(message)
    except grpc.aio.AioRpcError as error:
        return replies.read(error, ("secret-place",))
    return None


OUTSIDE = ("../outside", "good/../../outside", "link", "linked-confi", "linked-model", "passwd", "/etc", "", ".", "..")


@shared_loop
@pytest.mark.parametrize("path", OUTSIDE)
async def test_no_path_leads_out(client: SlipstreamClient, root: Path, path: str) -> None:
    stub = AdapterClient(client).stub
    for asked in (path, str(root / path) if path else str(root)):
        failed = await failure(stub, "LoadAdapter", pb.LoadAdapterRequest(name="x", path=asked))
        assert failed is not None and failed.code is grpc.StatusCode.INVALID_ARGUMENT
        assert list(failed.fields) == ["path"]


@shared_loop
async def test_a_name_that_is_a_path_leads_no_further(client: SlipstreamClient) -> None:
    """Without a path the name is one, and names may have dots and slashes."""
    stub = AdapterClient(client).stub
    for name in ("../outside", "/etc", "link", "good/../../outside", ".."):
        failed = await failure(stub, "LoadAdapter", pb.LoadAdapterRequest(name=name))
        assert failed is not None and list(failed.fields) == ["path"], name


@shared_loop
async def test_a_pipe_is_not_waited_for(client: SlipstreamClient) -> None:
    with pytest.raises(CallFailed, match="INVALID_ARGUMENT: path: it has no adapter_model"):
        await AdapterClient(client).load("x", "pipe")


@shared_loop
async def test_strings_that_programs_stumble_over(client: SlipstreamClient) -> None:
    stub = AdapterClient(client).stub
    for text in (*STRINGS.values(), "x" * 129, "x" * 100_000):
        for message in (pb.LoadAdapterRequest(name=text, path="nobody"), pb.LoadAdapterRequest(name="x", path=text)):
            failed = await failure(stub, "LoadAdapter", message)
            assert failed is not None and failed.code is grpc.StatusCode.INVALID_ARGUMENT, text
            assert set(failed.fields) <= {"name", "path"} and failed.fields
        unknown = await failure(stub, "UnloadAdapter", pb.UnloadAdapterRequest(name=text))
        assert unknown is not None and unknown.code is grpc.StatusCode.NOT_FOUND


@shared_loop
async def test_fuzzed_calls(client: SlipstreamClient, seed: int) -> None:
    print(f"fuzz seed {seed}")
    fuzzer, before = Fuzzer(seed), await client.complete(PROMPT, **ASKED)
    for _ in range(FUZZED):
        method = fuzzer.random.choice(("LoadAdapter", "UnloadAdapter", "ListAdapters"))
        raw = fuzzer.request(getattr(pb, f"{method}Request"))
        try:
            await client.channel.unary_unary(f"/slipstream.v1.AdapterService/{method}")(raw, timeout=30)
        except grpc.aio.AioRpcError as error:
            replies.read(error, ("secret-place",))
    assert (await AdapterClient(client).list()).used_bytes == 0
    assert [each.token_ids for each in await client.complete(PROMPT, **ASKED)] == [each.token_ids for each in before]
    await AdapterClient(client).load("good")
    await AdapterClient(client).unload("good")


async def test_without_a_directory_nothing_is_loaded(tiny: Path, root: Path) -> None:
    async with serve_checkpoint(tiny, adapter=(("given", str(root / "good")),), unnamed_callers="all") as (_, client):
        stub = AdapterClient(client).stub
        failed = await failure(stub, "LoadAdapter", pb.LoadAdapterRequest(name="x", path="good"))
        assert failed is not None and failed.code is grpc.StatusCode.FAILED_PRECONDITION
        assert failed.reason == "ADAPTERS_OFF"
        await AdapterClient(client).unload("given")
