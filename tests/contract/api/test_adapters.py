"""The adapter service, its commands and its checks at start, over a scripted engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from core.errors import AdaptersOff, ConfigError, Draining, InvalidRequest, ModelLoadError, Overloaded, SlipstreamError
from core.types.adapters import AdapterInfo
from service.cli.cli import cli
from service.client import CallFailed, SlipstreamClient
from service.client.adapters import AdapterClient
from service.config.server_config import ServerConfig
from service.pb.slipstream.v1 import adapters_pb2 as pb
from service.server.startup_checks import check_adapters
from service.wire.adapters import adapter_message
from tests.support.fakes.fake_engine import FakeEngine
from tests.support.fakes.granted import granted
from tests.support.least_checkpoint import write_checkpoint
from tests.support.servers import Serve

REFUSALS: tuple[tuple[SlipstreamError, str, str], ...] = (
    (InvalidRequest.of("path", "it has no adapter_config.json"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (AdaptersOff("off"), "FAILED_PRECONDITION", "ADAPTERS_OFF"),
    (Overloaded("full", reason="ADAPTER_MEMORY"), "RESOURCE_EXHAUSTED", "ADAPTER_MEMORY"),
    (Draining("going"), "UNAVAILABLE", "DRAINING"),
)


async def test_what_is_loaded_is_told_field_by_field(serve: Serve) -> None:
    async with serve(unnamed_callers="all") as serving:
        adapters = AdapterClient(serving.client)
        made = await adapters.load("french", "evicts", pinned=True)
        assert list(made.evicted) == ["older"]
        listed = await adapters.list()
        assert list(listed.adapters) == [made.adapter] and (listed.used_bytes, listed.max_bytes) == (1000, 4000)
        one = made.adapter
        assert (one.name, one.state, one.load_id, one.rank) == ("french", pb.ADAPTER_STATE_READY, 1, 8)
        assert (one.bytes, one.pinned, one.live_requests, one.HasField("idle")) == (1000, True, 0, False)
        for call in (adapters.load("french"), adapters.unload("german")):
            with pytest.raises(CallFailed) as failed:
                await call
            assert failed.value.code.name in ("ALREADY_EXISTS", "NOT_FOUND")
            assert failed.value.reason in ("ADAPTER_EXISTS", "ADAPTER_NOT_FOUND")
        assert await adapters.unload("french") == 0
        assert not (await adapters.list()).adapters
        page = await serving.metrics()
    assert (
        'slipstream_rpc_handled_total{code="NOT_FOUND",method="slipstream.v1.AdapterService/UnloadAdapter"} 1' in page
    )


def test_one_that_waits_for_its_last_request_is_told_from_one_that_serves() -> None:
    going, ready = (AdapterInfo("french", 3, 8, 1000, False, unloading, 2, 2.5) for unloading in (True, False))
    assert adapter_message(going).state == pb.ADAPTER_STATE_UNLOADING
    message = adapter_message(ready)
    assert (message.state, message.live_requests, message.load_id) == (pb.ADAPTER_STATE_READY, 2, 3)
    assert message.idle.ToTimedelta().total_seconds() == 2.5


async def test_a_call_is_made_with_the_clients_token(serve: Serve, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{'a' * 20}\n")
    async with serve(auth_token_file=str(tokens)) as serving:
        async with SlipstreamClient(serving.target, token="a" * 20) as alice:
            with granted("a listing for a caller with a token"):
                assert not (await AdapterClient(alice).list()).adapters


async def test_every_refusal_has_its_status(serve: Serve) -> None:
    async with serve(unnamed_callers="all") as serving:
        for error, code, reason in REFUSALS:
            serving.engine.refuse_with = error
            with pytest.raises(CallFailed) as failed:
                await AdapterClient(serving.client).load("x")
            assert (failed.value.code.name, failed.value.reason) == (code, reason)
            assert (failed.value.retry_after is not None) == (code == "RESOURCE_EXHAUSTED")


async def test_the_commands(serve: Serve) -> None:
    async with serve(unnamed_callers="all") as serving:

        async def run(*args: str) -> Result:
            return await asyncio.to_thread(CliRunner().invoke, cli, ["adapters", *args, "--server", serving.target])

        loaded = await run("load", "french", "evicts", "--pin")
        assert (loaded.exit_code, loaded.output) == (0, "loaded french: rank 8, 1000 bytes\nevicted older\n")
        listed = await run("list")
        lines = [line.split() for line in listed.output.splitlines()]
        assert lines[0] == ["name", "state", "rank", "bytes", "pinned", "requests", "idle"]
        assert lines[1] == ["french", "ready", "8", "1000", "yes", "0", "never", "used"]
        assert listed.output.endswith("1000 of 4000 bytes\n")
        again = await run("load", "french")
        assert again.exit_code == 1 and "ALREADY_EXISTS" in again.output and "Traceback" not in again.output
        assert (await run("unload", "french")).output == "unloaded french\n"
        asked = ["generate", "--server", serving.target, "--adapter"]
        done = await asyncio.to_thread(CliRunner().invoke, cli, [*asked, "french", "--max-tokens", "2", "hi"])
        assert done.exit_code == 0 and serving.engine.streams[0].request.adapter == "french"
        for wrong in ([*asked, "french=/dir", "hi"], ["generate", "--adapter", "french", "hi"]):
            refused = await asyncio.to_thread(CliRunner().invoke, cli, wrong)
            assert refused.exit_code == 2 and "NAME=DIR" in refused.output


def adapter_files(directory: Path) -> Path:
    """What passes for an adapter before it is opened."""
    write_checkpoint(directory)
    (directory / "config.json").rename(directory / "adapter_config.json")
    (directory / "model.safetensors").rename(directory / "adapter_model.safetensors")
    return directory


def test_generate_loads_the_one_adapter_that_it_is_given(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []

    def build(config: Any, progress: Any) -> FakeEngine:
        seen.append(config.lora)
        return engine

    engine = FakeEngine()
    monkeypatch.setattr("service.engine.builder.build_core_engine", build)
    # What the environment lists is not loaded: the one request uses one adapter at most. Its limits hold.
    monkeypatch.setenv("SLIPSTREAM_ADAPTER", "other=/nowhere")
    monkeypatch.setenv("SLIPSTREAM_LORA_DIR", str(tmp_path))
    monkeypatch.setenv("SLIPSTREAM_MAX_LORA_RANK", "13")
    directory = adapter_files(tmp_path / "french")
    args = ["generate", "--model", str(checkpoint), "--adapter", f"french={directory}", "--max-tokens", "2", "hi"]
    result = CliRunner().invoke(cli, args)
    assert (result.exit_code, result.stdout) == (0, "0 1 \n")
    assert seen[0].adapters == (("french", str(directory)),)
    assert (seen[0].directory, seen[0].max_rank) == (None, 13)
    assert engine.streams[0].request.adapter == "french"


def test_adapters_are_looked_at_before_anything_heavy(tmp_path: Path) -> None:
    good = adapter_files(tmp_path / "good")
    check_adapters(ServerConfig.of(adapter=(("a", str(good)),), lora_dir=str(tmp_path)))
    cut = adapter_files(tmp_path / "cut")
    weights = cut / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    bare = adapter_files(tmp_path / "bare")
    (bare / "adapter_model.safetensors").unlink()
    for directory, message in (
        (cut, "is truncated"),
        (bare, "it has no adapter_model.safetensors"),
        (tmp_path, "it has no adapter_config.json"),
    ):
        with pytest.raises(ModelLoadError, match=message) as refused:
            check_adapters(ServerConfig.of(adapter=(("a", str(good)), ("b", str(directory)))))
        assert refused.value.message.startswith(f"adapter 'b' from {directory}: ") and refused.value.exit_code == 3
    with pytest.raises(ModelLoadError, match="is no directory"):
        check_adapters(ServerConfig.of(lora_dir=str(weights)))


def test_settings_of_adapters(tmp_path: Path) -> None:
    config = ServerConfig.of(lora_dir="/x", max_lora_bytes=5, auth_token_file="t", admins=" alice,bob ,")
    lora = config.engine.lora
    assert (lora.directory, lora.max_bytes, lora.enabled) == ("/x", 5, True)
    assert config.admin_names == {"alice", "bob"}
    assert ServerConfig().admin_names == frozenset() and not ServerConfig().engine.lora.enabled
    with pytest.raises(ConfigError, match="admins needs auth_token_file"):
        ServerConfig.of(admins="alice")
