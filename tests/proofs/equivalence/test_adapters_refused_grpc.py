"""What does not fit is refused over gRPC by what is wrong with it, and a stream beside it does not notice."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from core.types.io import EmbedRequest, Pooling
from service.client import CallFailed
from service.client.adapters import AdapterClient
from tests.proofs.equivalence.adapter_world import GREEDY
from tests.support.checkpoints import make_checkpoint
from tests.support.servers import serve_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, PeftOracle, make_adapter
from tests.unit.core.models.lora.test_refusals import REFUSALS

PROMPT = list(range(30, 70))
OUTPUT = 200


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("llama", tmp_path_factory.mktemp("refused") / "base")


async def test_every_misfit_is_refused_by_name_beside_a_stream(base: Path, tmp_path: Path) -> None:
    good = make_adapter(base, tmp_path / "good", 0, **ADAPTERS["narrow"])
    for number, (change, _) in enumerate(REFUSALS.values()):
        change(Path(shutil.copytree(good, tmp_path / str(number))))
    async with serve_checkpoint(base, lora_dir=str(tmp_path), unnamed_callers="all", max_lora_rank=8) as (
        server,
        client,
    ):
        adapters = AdapterClient(client)
        stream = asyncio.create_task(client.complete(PROMPT, max_tokens=OUTPUT, **GREEDY))
        for number, (_, message) in enumerate(REFUSALS.values()):
            with pytest.raises(CallFailed) as refused:
                await adapters.load("x", str(number))
            assert refused.value.code.name == "INVALID_ARGUMENT" and list(refused.value.fields) == ["path"]
            assert message in refused.value.message
            assert str(tmp_path) not in refused.value.message
        (output,) = await stream
        assert server.engine.stats.adapter_load_failures == len(REFUSALS)
        assert server.engine.stats.adapters_loaded == 0
        await adapters.load("x", "good")
    assert list(output.token_ids) == PeftOracle(base, {"x": good}).greedy(PROMPT, None, OUTPUT)


async def test_no_salt_of_an_embedding_reaches_the_prefixes_of_an_adapter(base: Path, tmp_path: Path) -> None:
    """Its vector would be made of the adapter's keys and values."""
    good = make_adapter(base, tmp_path / "good", 0, **ADAPTERS["all"])
    async with serve_checkpoint(base, adapter=(("x", str(good)),), page_size=4) as (server, client):

        async def vector(salt: str) -> tuple[tuple[float, ...], int]:
            call = await server.engine.embed(EmbedRequest((tuple(PROMPT),), pooling=Pooling.LAST, cache_salt=salt))
            (made,) = (await call.result()).embeddings
            return tuple(made.values.tolist()), made.cached_tokens

        fresh, _ = await vector("")
        await client.complete(PROMPT, adapter="x", max_tokens=2, **GREEDY)
        (slot,) = [adapter.load_id for adapter in (await AdapterClient(client).list()).adapters]
        for salt in (f"{slot}\0", f"\0{slot}\0", "x\0", str(slot)):
            assert await vector(salt) == (pytest.approx(fresh, abs=1e-6), 0), salt
        assert (await vector(""))[1] > 0
