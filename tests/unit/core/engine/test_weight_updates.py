"""Updates of weights: loaded beside serving, one at a time, and the old ones go on where new ones fail."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig
from core.engine.api import EngineState
from core.engine.control import WEIGHT_MEMORY
from core.engine.renewal import Loaded, Renewal, why_not_in_place
from core.errors import Draining, InvalidRequest, ModelLoadError, Overloaded, RequestFailed, Unsupported
from core.memory.kv_pool import KVLayerSpec
from core.models.base import ModelSpec
from core.text.tokenizer import Tokenizer
from core.types.control import CONTROL_BUSY, WeightSource
from tests.support.until import turns, until
from tests.unit.core.engine.emulation import HookedModel, ask, assert_opened, assert_serves, read, running

SOURCE = WeightSource("new")


@pytest.fixture
def model(tokenizer: Tokenizer) -> HookedModel:
    return HookedModel(tokenizer)


@pytest.fixture
def weights(tmp_path: Path) -> ModelConfig:
    (tmp_path / "new").mkdir()
    return ModelConfig(weights_dir=str(tmp_path))


class Loads:
    """Stands in for the reading of checkpoints: each gives a model that is served in the place of the one before."""

    def __init__(self, tokenizer: Tokenizer, patch: pytest.MonkeyPatch) -> None:
        self.tokenizer, self.seen = tokenizer, list[Path]()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.gate.set()
        self.error: BaseException | None = None
        self.model = HookedModel(tokenizer)
        patch.setattr(Renewal, "load", lambda _, directory: self.load(directory))

    def load(self, directory: Path) -> Loaded:
        self.seen.append(directory)
        self.begun.set()
        assert_opened(self.gate)
        if self.error is not None:
            raise self.error
        return Loaded(self.model)


@pytest.fixture
def loads(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Iterator[Loads]:
    made = Loads(tokenizer, monkeypatch)
    yield made
    made.gate.set()


async def test_an_update_loads_beside_serving(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads
) -> None:
    loads.gate.clear()
    async with running(tokenizer, model, model=weights) as engine:
        assert engine.stats.weight_version == "default"
        update = asyncio.create_task(engine.control.update_weights(SOURCE, "step-1"))
        await until(loads.begun.is_set)
        _, _, end = await read(engine, ask())
        assert end.weight_version == "default" and model.step and not loads.model.step
        loads.gate.set()
        done = await update
        assert (done.version, done.replaced, done.restarted) == ("step-1", "default", 0)
        steps = model.step
        _, _, end = await read(engine, ask())
        assert end.weight_version == "step-1" and model.step == steps and loads.model.step
        assert loads.seen == [Path(str(weights.weights_dir)) / "new"]
        stats = engine.stats
        assert (stats.weight_updates, stats.weight_update_failures, stats.weight_version) == (1, 0, "step-1")
        assert_serves(engine)


async def test_one_change_at_a_time(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads
) -> None:
    loads.gate.clear()
    async with running(tokenizer, model, model=weights) as engine:
        update = asyncio.create_task(engine.control.update_weights(SOURCE, "step-1"))
        await until(loads.begun.is_set)
        for other in (engine.control.update_weights(SOURCE, "step-2"), engine.control.sleep()):
            asked = asyncio.ensure_future(other)
            await turns(50)
            assert asked.done(), "it does not wait for the first"
            with pytest.raises(Overloaded) as refused:
                await asked
            assert refused.value.reason == CONTROL_BUSY
        loads.gate.set()
        assert (await update).version == "step-1"
        assert (await engine.control.update_weights(SOURCE, "step-2")).replaced == "step-1"


async def test_a_caller_that_leaves_does_not_end_an_update(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads
) -> None:
    loads.gate.clear()
    async with running(tokenizer, model, model=weights) as engine:
        update = asyncio.create_task(engine.control.update_weights(SOURCE, "step-1"))
        await until(loads.begun.is_set)
        update.cancel()
        with pytest.raises(asyncio.CancelledError):
            await update
        loads.gate.set()
        await until(lambda: engine.stats.weight_version == "step-1")
        assert_serves(engine)


async def test_a_stop_ends_what_is_being_loaded(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads
) -> None:
    loads.gate.clear()
    async with running(tokenizer, model, model=weights) as engine:
        update = asyncio.create_task(engine.control.update_weights(SOURCE, "step-1"))
        await until(loads.begun.is_set)
        async with asyncio.timeout(20):
            await engine.control.close(Draining("the server is shutting down"))
            assert "slipstream-control" not in {each.get_name() for each in asyncio.all_tasks()}
            await engine.stop()
        with pytest.raises(Draining):
            await update
        assert engine.stats.weight_version == "default"


REFUSALS = {
    "version": (WeightSource("new"), "a b", InvalidRequest, "weight_version"),
    "no version": (WeightSource("new"), "", InvalidRequest, "weight_version"),
    "too long": (WeightSource("new"), "x" * 129, InvalidRequest, "weight_version"),
    "nothing": (WeightSource(), "a", InvalidRequest, "path"),
    "outside": (WeightSource("../new"), "a", InvalidRequest, "path"),
    "absent": (WeightSource("old"), "a", InvalidRequest, "no such directory below the server's directory of weights"),
    "by name": (WeightSource(name="org/model"), "a", Unsupported, "by name"),
}


@pytest.mark.parametrize("source, version, error, told", REFUSALS.values(), ids=list(REFUSALS))
async def test_what_cannot_be_asked_for_is_refused_by_field(
    tokenizer: Tokenizer, weights: ModelConfig, loads: Loads, source: Any, version: str, error: Any, told: str
) -> None:
    async with running(tokenizer, model=weights) as engine:
        with pytest.raises(error, match=told):
            await engine.control.update_weights(source, version)
        assert not loads.seen and engine.stats.weight_version == "default"
        assert len((await read(engine, ask()))[0]) == 8


async def test_without_a_directory_none_is_read(tokenizer: Tokenizer, loads: Loads) -> None:
    async with running(tokenizer) as engine:
        with pytest.raises(Unsupported, match="--weights-dir"):
            await engine.control.update_weights(SOURCE, "a")
    assert not loads.seen


async def test_a_name_is_fetched_off_the_loop(tokenizer: Tokenizer, loads: Loads, tmp_path: Path) -> None:
    asked = list[tuple[str, int]]()

    def fetch(name: str) -> Path:
        asked.append((name, threading.get_ident()))
        if name == "org/gone":
            raise ModelLoadError(f"{name}: the disk of {tmp_path / 'cache'} is full; see https://hub.example/{name}")
        return tmp_path / "fetched"

    async with running(tokenizer) as engine:
        engine.control.fetch_by(fetch)
        await engine.control.update_weights(WeightSource(name="org/model@v2"), "v2")
        assert loads.seen == [tmp_path / "fetched"]
        assert asked[0][0] == "org/model@v2" and asked[0][1] != threading.get_ident()
        with pytest.raises(InvalidRequest) as refused:
            await engine.control.update_weights(WeightSource(name="org/gone"), "v3")
        (violation,) = refused.value.violations
        assert violation.field == "name"
        assert violation.description == "org/gone: the disk of cache is full; see https://hub.example/org/gone"


def caused(error: Exception, by: BaseException) -> Exception:
    error.__cause__ = by
    return error


FAILURES: dict[str, tuple[BaseException, type[Exception], str]] = {
    "refused": (ModelLoadError("/models/x/y.safetensors is truncated"), InvalidRequest, "path: y.safetensors is trunc"),
    "no memory": (torch.OutOfMemoryError("CUDA out of memory"), Overloaded, "Sleep"),
    "no memory told by a library": (
        caused(ModelLoadError("cannot be loaded"), torch.OutOfMemoryError("CUDA out of memory")),
        Overloaded,
        "Sleep",
    ),
    "no host memory": (MemoryError(), Overloaded, "Sleep"),
    "a bug": (RuntimeError("of ours"), RuntimeError, "of ours"),
}


@pytest.mark.parametrize("error, seen, told", FAILURES.values(), ids=list(FAILURES))
async def test_a_load_that_fails_changes_nothing(
    tokenizer: Tokenizer,
    model: HookedModel,
    weights: ModelConfig,
    loads: Loads,
    error: BaseException,
    seen: Any,
    told: str,
) -> None:
    async with running(tokenizer, model, model=weights) as engine:
        reader = asyncio.create_task(read(engine, ask(tokens=200)))
        await until(lambda: model.step > 3)
        loads.error = error
        with pytest.raises(seen, match=told) as raised:
            await engine.control.update_weights(SOURCE, "step-1")
        assert not isinstance(raised.value, Overloaded) or raised.value.reason == WEIGHT_MEMORY
        ids, _, end = await reader
        assert len(ids) == 200 and end.weight_version == "default"
        stats = engine.stats
        assert (stats.weight_update_failures, stats.weight_updates, stats.restart_preemptions) == (1, 0, 0)


def failing(patch: pytest.MonkeyPatch, which: Callable[[Any], bool]) -> None:
    """Have the installing of models fail for which `which` says so."""
    install = Renewal.install

    def fails(renewal: Renewal) -> Any:
        if which(renewal.serving.model):
            raise RuntimeError("no graph could be captured")
        return install(renewal)

    patch.setattr(Renewal, "install", fails)


async def test_the_old_weights_go_on_where_new_ones_cannot_be_put_in_place(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer, model, model=weights) as engine:
        expected = await read(engine, ask(tokens=200))
        failing(monkeypatch, lambda given: given is loads.model)
        reader = asyncio.create_task(read(engine, ask(tokens=200)))
        await until(lambda: model.step > 210)
        updating = engine.control.update_weights(SOURCE, "step-1")
        (failed,) = await asyncio.gather(updating, return_exceptions=True)
        assert isinstance(failed, RequestFailed) and "the old ones serve on" in str(failed)
        assert_serves(engine)
        await asyncio.wait((reader,))
        assert reader.exception() is None
        ids, _, end = reader.result()
        assert ids == expected[0] and end.weight_version == "default"
        assert engine.stats.weight_update_failures == 1 and not loads.model.step


async def test_where_neither_can_be_the_engine_ends(
    tokenizer: Tokenizer, model: HookedModel, weights: ModelConfig, loads: Loads, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tokenizer, model, model=weights) as engine:
        failing(monkeypatch, lambda _: True)
        with pytest.raises(RuntimeError, match="no graph"):
            await engine.control.update_weights(SOURCE, "step-1")
        assert engine.state is EngineState.DEAD
        assert "no graph" in str(await engine.wait_dead())


LAYERS = (KVLayerSpec(0, 2, 16, 16), KVLayerSpec(1, 2, 16, 16))
SPEC = ModelSpec("old", "LlamaForCausalLM", 320, 512, torch.float32, LAYERS)


@pytest.mark.parametrize(
    "changes, told",
    [
        ({}, None),
        ({"name": "new", "sampling_defaults": {"top_p": 0.5}}, None),
        ({"vocab_size": 384}, "its vocab_size differs: 384, where the served one has 320"),
        ({"dtype": torch.bfloat16}, "its dtype differs: torch.bfloat16"),
        ({"eos_token_ids": (2,)}, r"its eos_token_ids differs: \(2,\)"),
        ({"kv_layers": LAYERS[:1]}, "it has 1 kv_layers, the served one 2"),
        ({"kv_layers": (LAYERS[0], KVLayerSpec(1, 4, 16, 16))}, "kv_layers differs: KVLayerSpec.*heads=4"),
    ],
)
def test_what_the_pools_are_built_for_must_be_the_same(changes: dict[str, Any], told: str | None) -> None:
    reason = why_not_in_place(SPEC, dataclasses.replace(SPEC, **changes))
    assert reason is None if told is None else reason is not None and re.search(told, reason)
