"""One event of the page: ids as clients know them, ages, and the memory of adapters where there can be some."""

from __future__ import annotations

import json
import time

from core.types.streams import StreamInfo
from service.config.server_config import ServerConfig
from service.engine.handle import EngineHandle
from service.page.moment import moment
from service.page.streams import StreamsSeen
from tests.support.fakes.fake_engine import FakeEngine


def test_streams_are_named_as_their_clients_know_them_and_tenants_are_not() -> None:
    now = time.monotonic()
    rows = [StreamInfo("alice\0far", "decode", 3, 5, now - 10, ""), StreamInfo("near", "waiting", 4, 0, now, "french")]
    told = moment(EngineHandle(), ServerConfig(), "1.2.3", StreamsSeen(now, 7, rows), None)
    assert "alice" not in json.dumps(told)
    assert told["streams"]["total"] == 7 and (told["state"], told["pools"]) == ("starting", [])
    far, near = told["streams"]["rows"]
    assert (far[0], near[0]) == ("far", "near") and 10 <= far[4] < 70
    assert (far[1:4], near[1:4], near[5]) == (["decode", 3, 5], ["waiting", 4, 0], "french")


async def test_drafts_are_told_where_there_can_be_any() -> None:
    handle, seen = EngineHandle(), StreamsSeen(time.monotonic())
    assert moment(handle, ServerConfig(), "1.2.3", seen, None)["drafts"] is None
    handle.engine = FakeEngine()
    assert moment(handle, ServerConfig(), "1.2.3", seen, None)["drafts"] == {"rows": 4, "tokens": 19, "accepted": 8}


async def test_adapters_have_a_pool_where_some_may_be_loaded() -> None:
    handle = EngineHandle()
    handle.engine = FakeEngine()
    seen = StreamsSeen(time.monotonic())
    without, given = (
        {pool["name"]: pool for pool in moment(handle, config, "1.2.3", seen, None)["pools"]}
        for config in (ServerConfig(), ServerConfig.of(lora_dir="/adapters", max_lora_bytes=4000))
    )
    assert set(given) - set(without) == {"adapter_bytes"} and given["adapter_bytes"]["capacity"] == 4000
    assert given["kv_page"] == {"name": "kv_page", "capacity": 100, "used": 25, "cached": 50}
