"""Health, model, server, load, tokenizer and flush in both dialects; and when the services are there at all."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from core.models.bundled import bundled_model_dir
from core.types.control import Activity, WeightSource
from core.types.labels import Activation, Labels
from core.types.sampling_params import SamplingParams
from core.types.stats import EngineStats, PoolStats
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.gateway import registration
from service.gateway.loads import LoadMeter
from service.gateway.tokenizer_zip import CHUNK_BYTES, chunks, pack
from service.gateway.worker import default_sampling
from service.limits.usage import TenantLoad
from service.server.server import Server
from tests.contract.gateway.spoken import Spoken
from tests.support.fakes.fake_engine import FakeEngine, info_with
from tests.support.fakes.figures import FIGURES
from tests.support.servers import Serve, listening

BUNDLED = str(bundled_model_dir())


async def test_a_model_that_only_judges_is_told_as_one(serve: Serve, spoken: Spoken) -> None:
    labels = Labels(("bad", "fine"), Activation.SOFTMAX)
    info = info_with(labels=labels, generates=False, has_chat_template=False)
    async with serve(FakeEngine(info=info)) as serving:
        stub = spoken.stub(serving.client.channel)
        sent = await stub.GetModelInfo(spoken.pb.GetModelInfoRequest())
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(spoken.generate([5])).read()
        assert serving.engine.streams == []
    assert not sent.is_generation
    if spoken.name == "sglang":
        assert (sent.num_labels, json.loads(sent.id2label_json)) == (2, {"0": "bad", "1": "fine"})
    refused = CallFailed(failed.value)
    assert (refused.code.name, refused.reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
    assert refused.message == "the served model puts out no text; use Embed or Classify"


async def test_health_is_readiness_and_answers_in_every_state(config: Any, spoken: Spoken) -> None:
    async with (
        listening(Server(config(), lambda *_: FakeEngine())) as server,
        SlipstreamClient(f"127.0.0.1:{server.port}") as client,
    ):
        stub, told = spoken.stub(client.channel), []
        request = spoken.pb.HealthCheckRequest()
        told.append(await stub.HealthCheck(request))
        with pytest.raises(grpc.aio.AioRpcError) as starting:
            await stub.GetModelInfo(spoken.pb.GetModelInfoRequest())
        await server.load()
        told.append(await stub.HealthCheck(request))
        server.refuse_readiness()
        told.append(await stub.HealthCheck(request))
    assert [(each.healthy, each.message) for each in told] == [
        (False, "starting"),
        (True, "ready"),
        (False, "draining"),
    ]
    assert starting.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_the_model_is_described_and_its_path_only_where_that_is_asked_for(serve: Serve, spoken: Spoken) -> None:
    engine = FakeEngine(info=info_with(default_sampling=SamplingParams(temperature=0.6, top_k=20, max_tokens=256)))
    told = []
    for tokenizer in ("zip", "path"):
        async with serve(engine, model=BUNDLED, gateway_tokenizer=tokenizer) as serving:
            told.append(await spoken.stub(serving.client.channel).GetModelInfo(spoken.pb.GetModelInfoRequest()))
    sent, path = told
    assert (sent.served_model_name, sent.is_generation, sent.vocab_size) == ("fake", True, 1000)
    assert (sent.max_context_length, sent.max_req_input_len) == (4096, 4095)
    assert (sent.model_type, list(sent.architectures)) == ("llama", ["FakeForCausalLM"])
    assert (list(sent.eos_token_ids), sent.bos_token_id, sent.pad_token_id) == ([2], 1, 0)
    assert json.loads(sent.default_sampling_params_json) == {"temperature": 0.6, "top_k": 20}
    assert sent.tokenizer_path == sent.model_path == "/dev/null/fake"
    assert path.tokenizer_path == path.model_path == str(Path(BUNDLED).resolve())


def test_a_checkpoint_without_defaults_has_none() -> None:
    assert default_sampling(SamplingParams(max_tokens=5)) == ""


async def test_the_server_is_described(serve: Serve, spoken: Spoken) -> None:
    async with serve(page_size=32, max_running_requests=7) as serving:
        told = await spoken.stub(serving.client.channel).GetServerInfo(spoken.pb.GetServerInfoRequest())
    assert told.server_type == "slipstream" and told.uptime_seconds > 0 and not told.is_paused
    if spoken.name == "sglang":
        args = dict(told.server_args)
        assert (args["page_size"], args["max_running_requests"], args["dp_size"]) == (32, 7, 1)
        assert told.max_total_num_tokens == 100
    else:
        assert (told.block_size, told.max_num_seqs, told.data_parallel_size, told.kv_connector) == (32, 7, 1, "")


async def test_gateways_learn_of_pauses_and_weights(serve: Serve, spoken: Spoken) -> None:
    async with serve(model=BUNDLED) as serving:
        stub, paused = spoken.stub(serving.client.channel), []
        for activity in Activity:
            serving.engine.control.become(activity)
            paused.append((await stub.GetServerInfo(spoken.pb.GetServerInfoRequest())).is_paused)
        assert paused == [False, True, True, True]
        await serving.engine.control.update_weights(WeightSource("x"), "step-1")
        told = await stub.GetModelInfo(spoken.pb.GetModelInfoRequest())
    # vLLM's message has no field for it.
    assert spoken.name == "vllm" or told.weight_version == "step-1"


async def test_loads_are_those_of_the_engine(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        stub = spoken.stub(serving.client.channel)
        (load,) = (await stub.GetLoads(spoken.pb.GetLoadsRequest(dp_rank=0, include=["core"]))).loads
        with pytest.raises(grpc.aio.AioRpcError) as other:
            await stub.GetLoads(spoken.pb.GetLoadsRequest(dp_rank=1))
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_used_tokens, load.max_total_num_tokens) == (
        0,
        0,
        25,
        100,
    )
    assert (load.token_usage, load.cache_hit_rate, load.max_running_requests) == (0.25, 5 / 7, 256)
    if spoken.name == "sglang":
        assert (load.speculative.accept_length, load.speculative.accept_rate) == (1 + 8 / 4, 8 / 19)
    assert list(CallFailed(other.value).fields) == ["dp_rank"]


async def test_a_load_without_speculation_says_nothing_of_drafts(serve: Serve, spoken: Spoken) -> None:
    plain = type("Plain", (FakeEngine,), {"stats": EngineStats(pools=(PoolStats("kv_page", 10, 2, 3),))})
    async with serve(plain()) as serving:
        answer = await spoken.stub(serving.client.channel).GetLoads(spoken.pb.GetLoadsRequest())
    assert "speculative" not in {field.name for field, _ in answer.loads[0].ListFields()}


def test_drafts_of_other_tenants_are_in_no_load_of_one() -> None:
    meter = LoadMeter(lambda: FIGURES, 8)
    assert meter.load().drafts is FIGURES.drafts is not None
    assert meter.own(TenantLoad(running=1, waiting=0, tokens=5)).drafts is None


def test_the_rate_is_over_time_however_often_one_asks() -> None:
    now, tokens = 0.0, 0
    stats = lambda: EngineStats(generation_tokens=tokens, page_size=16, pools=(PoolStats("kv_page", 10, 2, 3),))  # noqa: E731
    meter = LoadMeter(stats, 8, lambda: now)
    assert meter.load().gen_throughput == 0
    for _ in range(100):  # ten seconds at 50 tokens a second, asked ten times a second
        now, tokens = now + 0.1, tokens + 5
        assert meter.load().gen_throughput == pytest.approx(50)
    for _ in range(100):
        now += 0.1
        rate = meter.load().gen_throughput
    assert rate == 0
    now, tokens = now + 100, tokens + 1000
    assert meter.load().gen_throughput == pytest.approx(10, rel=0.1)
    assert (meter.load().used_tokens, meter.load().max_total_tokens) == (32, 160)


async def test_the_tokenizer_comes_as_a_zip_with_its_digest(serve: Serve, spoken: Spoken) -> None:
    async with serve(model=BUNDLED) as serving:
        call = spoken.stub(serving.client.channel).GetTokenizer(common_pb2.GetTokenizerRequest())
        sent = [chunk async for chunk in call]
    data = b"".join(chunk.data for chunk in sent)
    assert [bool(chunk.sha256) for chunk in sent] == [False] * (len(sent) - 1) + [True]
    assert sent[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert archive.testzip() is None
        names = archive.namelist()
        assert archive.read("tokenizer.json") == Path(BUNDLED, "tokenizer.json").read_bytes()
    assert {"tokenizer_config.json", "chat_template.jinja", "config.json"} <= set(names)
    assert not any(name.endswith((".safetensors", ".py")) for name in names)


def test_equal_files_make_equal_zips_and_large_ones_more_chunks(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        (folder / "tokenizer.json").write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(b"x")
        (folder / "tokenization_custom.py").write_text("raise SystemExit")
    (tmp_path / "b" / "tokenizer.json").touch()
    first, second = pack(tmp_path / "a"), pack(tmp_path / "b")
    assert first == second and len(first[0]) < CHUNK_BYTES
    with zipfile.ZipFile(io.BytesIO(first[0])) as archive:
        assert archive.namelist() == ["tokenizer.json"]


@pytest.mark.parametrize("length", [1, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES])
def test_the_last_piece_is_known_as_the_last(length: int) -> None:
    data = bytes(range(256)) * (length // 256 + 1)
    pieces = list(chunks(data[:length]))
    assert b"".join(piece for piece, _ in pieces) == data[:length]
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]


async def test_a_checkpoint_without_a_tokenizer_has_none_to_send(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        call = spoken.stub(serving.client.channel).GetTokenizer(common_pb2.GetTokenizerRequest())
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await call.read()
    assert (failed.value.code(), CallFailed(failed.value).reason) == (grpc.StatusCode.UNIMPLEMENTED, "UNSUPPORTED")


@pytest.mark.parametrize("timeout", [-1.0, 61.0, math.nan, math.inf])
async def test_a_flush_waits_within_bounds(serve: Serve, spoken: Spoken, timeout: float) -> None:
    async with serve(unnamed_callers="watch") as serving:
        stub = spoken.stub(serving.client.channel)
        flushed = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.5))
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=timeout))
        assert serving.engine.prefixes.flushes == 1
    assert flushed.success and "3 pages" in flushed.message
    assert list(CallFailed(failed.value).fields) == ["timeout_s"]


async def test_a_flush_is_of_the_callers_own_but_for_admins(serve: Serve, spoken: Spoken, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text(f"alice:{'a' * 20}\nbob:{'b' * 20}\n")
    async with serve(auth_token_file=str(tokens), admins="alice") as serving:
        stub, codes = spoken.stub(serving.client.channel), []
        for token in ("a" * 20, "b" * 20):
            call = stub.FlushCache(common_pb2.FlushCacheRequest(), metadata=(("authorization", f"Bearer {token}"),))
            codes.append(await call.code())
    assert serving.engine.prefixes.flushed == [None, "bob"]
    assert codes == [grpc.StatusCode.OK, grpc.StatusCode.OK]


async def test_what_is_not_served_is_unimplemented_and_uncounted(serve: Serve, spoken: Spoken) -> None:
    async with serve() as serving:
        stub = spoken.stub(serving.client.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.StartProfile(common_pb2.StartProfileRequest())
        with pytest.raises(grpc.aio.AioRpcError):
            await serving.client.channel.unary_unary("/mlx.grpc.engine.MlxEngine/HealthCheck")(b"")
        page = await serving.metrics()
    assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "StartProfile" not in page and "mlx" not in page


async def listed(server: Server) -> set[str]:
    """Services by reflection."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        return {each.name for each in (await call.read()).list_services_response.service}


async def test_the_services_are_there_unless_they_are_switched_off_or_not_installed(
    serve: Serve, spoken: Spoken, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(reflection=True) as serving:
        assert spoken.service in await listed(serving.server)
    async with serve(reflection=True, gateway=False) as serving:
        assert spoken.service not in await listed(serving.server)
        with pytest.raises(grpc.aio.AioRpcError) as off:
            await spoken.stub(serving.client.channel).HealthCheck(spoken.pb.HealthCheckRequest())
    monkeypatch.setattr(registration, "PACKAGE", "smg_grpc_proto_that_is_not_there")
    assert importlib.util.find_spec(registration.PACKAGE) is None
    async with serve(reflection=True) as serving:
        assert spoken.service not in await listed(serving.server)
        assert (await serving.client.complete("hi"))[0].end.reason == "length"
    assert off.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_the_default_is_to_serve_them() -> None:
    assert ServerConfig().gateway and ServerConfig().gateway_tokenizer == "zip"
