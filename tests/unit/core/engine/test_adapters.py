"""Adapters through the engine: mixed requests give PEFT's tokens, and none sees the cached prefix of another."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import LoraConfig
from core.engine.adapters.build import reserved_bytes
from core.engine.adapters.table import AdapterTable
from core.errors import AdapterNotFound, ConfigError, ModelLoadError
from core.text.tokenizer import Tokenizer
from service.client import CallFailed, SlipstreamClient
from service.config.server_config import ServerConfig
from service.config.sources import load
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.servers import serve_checkpoint
from tests.unit.core.engine.emulation import ask, running
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, PeftOracle, make_adapter

OUTPUT = 20
REQUESTS = 16
NAMES = ("", *ADAPTERS)
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": OUTPUT, "ignore_eos": True}

Asked = list[tuple[list[int], str]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("adapters") / "base")


@pytest.fixture(scope="module")
def adapters(base: Path) -> dict[str, Path]:
    return {n: make_adapter(base, base.parent / n, i, **args) for i, (n, args) in enumerate(ADAPTERS.items())}


@pytest.fixture(scope="module")
def asked() -> Asked:
    """16 requests over all names; half of them begin with one prompt that every adapter is asked."""
    rng = random.Random(3)
    common = [rng.randrange(3, VOCAB_SIZE) for _ in range(40)]
    found: Asked = []
    for number in range(REQUESTS):
        own = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randint(1, 60))]
        found.append((common + own[:5] if number % 2 else own, NAMES[number % len(NAMES)]))
    return found


@pytest.fixture(scope="module")
def wanted(base: Path, adapters: dict[str, Path], asked: Asked) -> list[list[int]]:
    oracle = PeftOracle(base, adapters)
    want = [oracle.greedy(prompt, name or None, OUTPUT) for prompt, name in asked]
    plain = [oracle.greedy(prompt, None, OUTPUT) for prompt, _ in asked]
    assert sum(a == b for a, b in zip(want, plain, strict=True)) <= REQUESTS // 2, "the adapters change too little"
    return want


SMALL_POOL = 192


def given(adapters: dict[str, Path]) -> tuple[tuple[str, str], ...]:
    return tuple((name, str(path)) for name, path in adapters.items())


async def tokens(client: SlipstreamClient, prompt: list[int], name: str) -> tuple[list[int], int]:
    """Ids and how many prompt tokens were cached."""
    (output,) = await client.complete(prompt, adapter=name, **GREEDY)
    return list(output.token_ids), output.end.cached_tokens


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("pool", [2048, SMALL_POOL])
async def test_mixed_requests_equal_peft(
    base: Path, adapters: dict[str, Path], asked: Asked, wanted: list[list[int]], overlap: bool, pool: int
) -> None:
    """Chunked prompts, decode beside prefill, a shared prefix; the small pool forces requests to give way."""
    settings: dict[str, Any] = {"chunked_prefill_size": 24, "max_total_tokens": pool, "page_size": 4}
    async with serve_checkpoint(base, adapter=given(adapters), overlap=overlap, **settings) as (server, client):
        found = await asyncio.gather(*(tokens(client, prompt, name) for prompt, name in asked))
        again = await asyncio.gather(*(tokens(client, prompt, name) for prompt, name in asked))
        stats = server.engine.stats
    for (ids, _), (repeated, _), want, (_, name) in zip(found, again, wanted, asked, strict=True):
        assert ids == want, name
        assert repeated == want, f"{name!r} from the prefix cache"
    assert sum(stats.assert_failures.values()) == 0
    if pool == SMALL_POOL:
        assert stats.preemptions > 0, "the pool was meant to be too small"
    else:
        # The small pool may evict whatever was kept before anybody asks again.
        assert any(cached for _, cached in again), "nothing was ever cached"


async def test_a_prompt_cached_under_one_adapter_is_no_hit_for_another(base: Path, adapters: dict[str, Path]) -> None:
    """Also where a client's salt spells what another adapter's namespace looks like."""
    prompt = list(range(10, 50))
    async with serve_checkpoint(base, adapter=given(adapters), page_size=4) as (_, client):
        for name in NAMES:
            assert (await tokens(client, prompt, name))[1] == 0, name
            assert (await tokens(client, prompt, name))[1] >= 36, "its own prompt was not cached"
        for salt in ("all\0", "\0all\0", "\0", "all"):
            (output,) = await client.complete(prompt, cache_salt=salt, **GREEDY)
            assert output.end.cached_tokens == 0, salt


async def test_an_unknown_name_is_not_found_and_what_is_no_name_is_refused_by_field(
    base: Path, adapters: dict[str, Path]
) -> None:
    names = {"nobody": "NOT_FOUND", "al": "NOT_FOUND", "all\0": "INVALID_ARGUMENT", "x" * 10_000: "INVALID_ARGUMENT"}
    for served in ((), given(adapters)):
        async with serve_checkpoint(base, adapter=served) as (_, client):
            for name, code in names.items():
                with pytest.raises(CallFailed) as refused:
                    await client.complete([5, 6, 7], adapter=name, **GREEDY)
                assert refused.value.code.name == code
                assert "adapter" in str(refused.value)
                assert (refused.value.reason == "ADAPTER_NOT_FOUND") == (code == "NOT_FOUND")


async def test_an_unknown_name_is_told_before_anything_that_may_pass(tokenizer: Tokenizer) -> None:
    """A request that is late as well: who corrects the deadline alone would come back in vain."""
    async with running(tokenizer) as engine:
        with pytest.raises(AdapterNotFound):
            await engine.generate(ask(adapter="nobody", deadline=0.0))


async def test_samples_of_one_request_share_their_adapter(
    base: Path, adapters: dict[str, Path], asked: Asked, wanted: list[list[int]]
) -> None:
    async with serve_checkpoint(base, adapter=given(adapters), page_size=4, prefix_cache="none") as (_, client):
        for (prompt, name), want in zip(asked[:6], wanted, strict=False):
            outputs = await client.complete(prompt, adapter=name, n=2, **GREEDY)
            assert [list(output.token_ids) for output in outputs] == [want, want], name


async def test_an_adapter_that_does_not_fit_stops_the_start(base: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter 'broken' from .*has no adapter_config\.json"):
        async with serve_checkpoint(base, adapter=(("broken", str(tmp_path)),)):
            raise AssertionError("it started")


async def test_adapters_over_the_bound_stop_the_start(base: Path, adapters: dict[str, Path]) -> None:
    with pytest.raises(ModelLoadError, match=r"adapter 'narrow' from .*: it needs \d+ bytes"):
        async with serve_checkpoint(base, adapter=given(adapters), max_lora_bytes=3000):
            raise AssertionError("it started")


def test_room_for_adapters_to_come_is_kept_on_the_device() -> None:
    """On a GPU only: the pools of a CPU leave most of its memory alone."""
    table = AdapterTable(100, enabled=True)
    table.used_bytes = 40
    for device, directory, reserved in (("cuda", "/x", 60), ("cuda", None, 0), ("cpu", "/x", 0)):
        config = LoraConfig(directory=directory, max_bytes=100)
        assert reserved_bytes(config, table, torch.device(device)) == reserved


def test_how_adapters_are_configured(tmp_path: Path) -> None:
    two = (("a", "/x"), ("b", "/y=z"))
    file = tmp_path / "slipstream.yaml"
    file.write_text("adapter: [a=/x, b=/y=z]\n")
    assert load(ServerConfig, {"adapter": ("a=/x", "b=/y=z")}, {}).engine.lora.adapters == two
    assert load(ServerConfig, {"adapter": None}, {"SLIPSTREAM_ADAPTER": "a=/x,b=/y=z"}).engine.lora.adapters == two
    assert load(ServerConfig, {}, {}, str(file)).engine.lora.adapters == two
    assert load(ServerConfig, {}, {}).engine.lora.adapters == ()
    for bad in ("a", "=x", "a="):
        with pytest.raises(ConfigError, match="NAME=VALUE"):
            load(ServerConfig, {"adapter": (bad,)}, {})
    for pairs, message in ((("a=/x", "a=/y"), "given twice"), (("a b=/x",), "must be 1 to 128")):
        with pytest.raises(ConfigError, match=message):
            load(ServerConfig, {"adapter": pairs}, {})
