"""The control service, its client, its command, and what health and metrics say meanwhile, over a scripted engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result

from core.errors import (
    Asleep,
    Draining,
    InvalidRequest,
    Overloaded,
    Paused,
    RequestFailed,
    SlipstreamError,
    Unsupported,
)
from core.types.control import Activity, WeightSource
from service.cli.cli import cli
from service.client import CallFailed, ControlClient, SlipstreamClient, SyncControlClient, SyncSlipstreamClient
from service.pb.slipstream.v1 import control_pb2 as pb
from service.pb.slipstream.v1 import inference_pb2
from tests.contract.api.test_health import BOTH, LIVES_ONLY, _named, check
from tests.support.log_lines import LogLines
from tests.support.servers import Serve, Serving

OPEN = {"unnamed_callers": "all"}

REFUSALS: tuple[tuple[SlipstreamError, str, str], ...] = (
    (InvalidRequest.of("weight_version", "is no name"), "INVALID_ARGUMENT", "INVALID_REQUEST"),
    (Unsupported("off"), "UNIMPLEMENTED", "UNSUPPORTED"),
    (Overloaded("busy", reason="CONTROL_BUSY"), "RESOURCE_EXHAUSTED", "CONTROL_BUSY"),
    (RequestFailed("the old ones serve on"), "INTERNAL", "REQUEST_FAILED"),
    (Asleep("wake it"), "FAILED_PRECONDITION", "ASLEEP"),
    (Draining("going"), "UNAVAILABLE", "DRAINING"),
)


async def info(serving: Serving) -> tuple[str, str]:
    told = await serving.client.server_info()
    return inference_pb2.ServerActivity.Name(told.activity).removeprefix("SERVER_ACTIVITY_"), told.weight_version


async def test_what_it_does_is_told_field_by_field(serve: Serve) -> None:
    async with serve(**OPEN) as serving:
        control = ControlClient(serving.client)
        assert serving.engine.control.fetch is None, "names are for servers of a name"
        assert await info(serving) == ("SERVING", "first")
        assert await control.pause() == 7
        assert await info(serving) == ("PAUSED", "first")
        assert await control.pause(end=True) == 7
        assert await info(serving) == ("REFUSING", "first")
        await control.resume()
        done = await control.update_weights("step-1", path="runs/step-1")
        assert (done.weight_version, done.replaced_version, done.restarted_requests) == ("step-1", "first", 3)
        assert (done.load.ToTimedelta().total_seconds(), done.held.ToTimedelta().total_seconds()) == (1.5, 0.25)
        await control.update_weights("step-3")
        assert serving.engine.control.updates.pop() == WeightSource("step-3"), "the directory of that name"
        await control.update_weights("step-2", name="org/model@v2")
        assert serving.engine.control.updates == [WeightSource("runs/step-1"), WeightSource(name="org/model@v2")]
        nap = await control.sleep()
        assert (nap.freed_bytes, nap.live_requests) == (4096, 2)
        assert await info(serving) == ("ASLEEP", "step-2")
        with pytest.raises(CallFailed) as asleep:
            await control.resume()
        assert (asleep.value.code.name, asleep.value.reason) == ("FAILED_PRECONDITION", "ASLEEP")
        await control.wake()
        assert await info(serving) == ("SERVING", "step-2")
        (whole,) = await serving.client.complete("hi")
        assert whole.end.started_version == "step-2"


async def test_readiness_is_the_will_to_take_requests(serve: Serve) -> None:
    """A paused server lets requests wait; one that refuses them, or sleeps, wants them elsewhere."""
    async with serve(**OPEN) as serving:
        control, seen = ControlClient(serving.client), dict[str, Any]()
        for name, act in {
            "paused": control.pause,
            "refusing": lambda: control.pause(end=True),
            "resumed": control.resume,
            "asleep": control.sleep,
            "awake": control.wake,
        }.items():
            await act()
            seen[name] = _named(await check(serving.client.channel)), await serving.metric("slipstream_ready")
        assert seen == {
            "paused": (BOTH, 1.0),
            "refusing": (LIVES_ONLY, 0.0),
            "resumed": (BOTH, 1.0),
            "asleep": (LIVES_ONLY, 0.0),
            "awake": (BOTH, 1.0),
        }
        serving.server.refuse_readiness()
        serving.engine.control.become(Activity.SERVING)
        assert _named(await check(serving.client.channel)) == LIVES_ONLY, "a server that drains never is ready again"


async def test_metrics_say_what_it_does_and_which_weights_it_serves(serve: Serve) -> None:
    async with serve(**OPEN) as serving:
        control = ControlClient(serving.client)
        await control.update_weights("step-1", path="x")
        await control.sleep()
        page = await serving.metrics()
    assert 'slipstream_weights_info{weight_version="step-1"} 1.0' in page and '"first"' not in page
    for activity in Activity:
        assert f'slipstream_activity{{activity="{activity.value}"}} {float(activity is Activity.ASLEEP)}' in page
    for name, value in (("weight_updates", 9), ("weight_update_failures", 12), ("restart_preemptions", 1)):
        assert f"slipstream_{name}_total {value}.0" in page


async def test_every_refusal_has_its_status(serve: Serve) -> None:
    async with serve(**OPEN) as serving:
        for error, code, reason in REFUSALS:
            serving.engine.control.refuse_with = error
            with pytest.raises(CallFailed) as failed:
                await ControlClient(serving.client).update_weights("x", path="x")
            assert (failed.value.code.name, failed.value.reason) == (code, reason)
            assert (failed.value.retry_after is not None) == (code == "RESOURCE_EXHAUSTED")


@pytest.mark.parametrize(
    "method, request_, field",
    [
        ("Pause", pb.PauseRequest(mode=9), "mode"),  # type: ignore[arg-type]
        ("UpdateWeights", pb.UpdateWeightsRequest(weight_version="a"), "path"),
        ("UpdateWeights", pb.UpdateWeightsRequest(weight_version="a", name=""), "path"),
    ],
)
async def test_what_says_nothing_is_refused_by_field(serve: Serve, method: str, request_: Any, field: str) -> None:
    async with serve(**OPEN) as serving:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await getattr(ControlClient(serving.client).stub, method)(request_)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert (refused.value.details() or "").startswith(f"{field}: ")
        assert serving.engine.control.activity is Activity.SERVING


async def test_streams_that_a_pause_ended_say_so(serve: Serve) -> None:
    async with serve(**OPEN) as serving:
        serving.engine.refuse_with = Paused("the engine is paused and takes no requests; try another replica")
        with pytest.raises(CallFailed) as failed:
            await serving.client.complete("hi")
    assert (failed.value.code.name, failed.value.reason) == ("UNAVAILABLE", "PAUSED")


async def test_only_admins_may_call_any_of_it(serve: Serve, tmp_path: Path) -> None:
    tokens, alice, bob = tmp_path / "tokens", "alice-0123456789abcdef", "bobby-0123456789abcdef"
    tokens.write_text(f"alice:{alice}\nbob:{bob}\n")
    async with serve(auth_token_file=str(tokens), admins="alice") as serving:
        codes = dict[str, list[str]]()
        for name, token in (("alice", alice), ("bob", bob)):
            async with SlipstreamClient(serving.target, token=token) as client:
                control = ControlClient(client)
                for call in (control.pause, control.resume, control.sleep, control.wake):
                    try:
                        await call()
                        codes.setdefault(name, []).append("OK")
                    except CallFailed as failed:
                        codes.setdefault(name, []).append(failed.code.name)
                with pytest.raises(CallFailed) as refused:
                    await control.update_weights("")
                codes[name].append(refused.value.code.name)
    assert codes == {"alice": ["OK"] * 4 + ["INVALID_ARGUMENT"], "bob": ["PERMISSION_DENIED"] * 5}


async def test_the_audit_log_says_which_weights(serve: Serve, logged: LogLines) -> None:
    async with serve(**OPEN) as serving:
        await ControlClient(serving.client).update_weights("step-1", path="runs/1")
        await ControlClient(serving.client).update_weights("step-2", name="org/model")
    told = [json.loads(line.partition(" ")[2]) for line in logged.lines if line.startswith("slipstream.audit ")]
    assert [(each.get("path"), each.get("weights")) for each in told] == [("runs/1", "step-1"), ("org/model", "step-2")]
    assert {(each["event"], each["outcome"]) for each in told} == {("act", "OK")}


async def test_a_blocking_client_has_it_all(serve: Serve) -> None:
    """For training loops, which have no event loop."""

    def trains(target: str) -> list[object]:
        with SyncSlipstreamClient(target) as client:
            control = SyncControlClient(client)
            told: list[object] = [control.pause(), control.update_weights("step-1", path="x").weight_version]
            control.resume()
            told += [control.sleep().freed_bytes]
            control.wake()
            with pytest.raises(CallFailed):
                SyncControlClient(client).update_weights("")
            return told

    async with serve(**OPEN) as serving:
        assert await asyncio.to_thread(trains, serving.target) == [7, "step-1", 4096]
        assert serving.engine.control.activity is Activity.SERVING


async def test_the_commands(serve: Serve) -> None:
    async with serve(**OPEN) as serving:

        async def run(*args: str) -> Result:
            return await asyncio.to_thread(CliRunner().invoke, cli, ["control", *args, "--server", serving.target])

        assert (await run("pause")).output == "paused; 7 streams wait\n"
        assert serving.engine.control.activity is Activity.PAUSED
        assert (await run("pause", "--end")).output == "paused; 7 streams ended\n"
        assert serving.engine.control.activity is Activity.REFUSING
        assert (await run("resume")).output == "resumed\n"
        told = "is served instead of first: loaded in 1.50 s, no step for 0.25 s, 3 requests computed again\n"
        assert (await run("update", "step-1")).output == f"step-1 {told}"
        assert (await run("update", "two", "--path", "runs/2")).exit_code == 0
        assert (await run("update", "three", "--name", "org/model")).exit_code == 0
        expected = [WeightSource("step-1"), WeightSource("runs/2"), WeightSource(name="org/model")]
        assert serving.engine.control.updates == expected
        both = await run("update", "x", "--path", "a", "--name", "b/c")
        assert both.exit_code == 2 and "not both" in both.output
        assert (await run("sleep")).output == "asleep; 4.1 kB given back, 2 streams wait\n"
        asleep = await run("resume")
        assert asleep.exit_code == 1 and "wake it" in asleep.output and "Traceback" not in asleep.output
        assert (await run("wake")).output == "awake\n"
