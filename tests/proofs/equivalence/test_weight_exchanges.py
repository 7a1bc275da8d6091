"""What an exchange of weights leaves behind: no hooks, no old weights, and memory that goes back in sleep."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from core.config import LoraConfig, SpeculationConfig
from core.engine.build import build_engine
from core.engine.renewal import Renewal
from core.errors import ConfigError, InvalidRequest, RequestFailed
from tests.proofs.equivalence.test_weight_updates import NEW, OLD, PAGE, PROMPTS, answers, ask, config, update
from tests.proofs.equivalence.test_weight_updates import llamas as llamas
from tests.support.engines import started
from tests.support.mtp_checkpoints import make_mtp_checkpoint
from tests.unit.core.models.lora.peft_oracle import ADAPTERS, make_adapter


async def test_adapters_add_once_where_the_old_weights_come_back(
    llamas: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New weights that cannot be put in place leave no hooks."""
    given = (("one", str(make_adapter(llamas / OLD, tmp_path / "one", 3, **ADAPTERS["all"]))),)
    requests, install = [ask(prompt, adapter="one") for prompt in PROMPTS[:2]], Renewal.install
    async with started(build_engine(config(llamas, OLD, lora=LoraConfig(adapters=given)))) as engine:
        old, before = engine.control._renewal.serving, await answers(engine, requests)

        def fails(renewal: Renewal) -> Any:
            runner = install(renewal)
            if renewal.serving is not old:
                raise RuntimeError("no graph could be captured")
            return runner

        monkeypatch.setattr(Renewal, "install", fails)
        with pytest.raises(RequestFailed):
            await update(engine)
        assert await answers(engine, requests) == before


async def test_weights_that_slept_do_not_come_back_beside_new_ones(llamas: Path) -> None:
    async with started(build_engine(config(llamas, OLD))) as engine:
        await engine.control.sleep()
        await update(engine)
        pools_alone = engine.control._renewal._given_back
        assert len(pools_alone) == 1
        await engine.control.wake()


@pytest.mark.parametrize("proof", ["prove_attention", "prove_codes", "prove_deterministic"])
async def test_new_weights_are_proved_as_those_of_a_start(
    llamas: Path, proof: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any) -> None:
        raise ConfigError("other logits than PyTorch's")

    async with started(build_engine(config(llamas, OLD))) as engine:
        monkeypatch.setattr(f"core.engine.renewal.{proof}", refuses)
        with pytest.raises(InvalidRequest, match="other logits"):
            await update(engine)


async def test_what_drafts_gives_its_pages_back_too(tmp_path: Path) -> None:
    make_mtp_checkpoint("glm4_moe", tmp_path / OLD)
    parts = {"speculation": SpeculationConfig("mtp", 3), "memory": {"max_total_tokens": 4000 * PAGE}}
    async with started(build_engine(config(tmp_path, OLD, **parts))) as engine:
        pools = engine.control._renewal._pools
        assert pools.drafts is not None
        drafts = pools.drafts.kv.nbytes
        nap = await engine.control.sleep()
        assert nap.freed_bytes > pools.kv.nbytes + drafts * 0.9 - 64 * 4096 and drafts > 64 * 4096
        await engine.control.wake()


SLEEPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "packed products": ("bitnet", {}),
    "inputs of each layer": ("gemma4_text", {}),
    "embedded positions": ("gpt2", {}),
    "adapters": ("llama", {"lora": LoraConfig(directory="/nowhere")}),
    "codes by modules": ("llama", {"model": {"kv_cache_dtype": "fp8_e4m3"}}),
    "codes by compiled code": ("llama", {"model": {"kv_cache_dtype": "int8"}}),
    "modules": ("llama", {"model": {"native": "off"}}),
    "windows": ("gemma3_text", {}),
    "states": ("mamba2", {}),
}


@pytest.mark.parametrize("name", SLEEPERS)
async def test_whatever_serves_can_sleep(name: str, checkpoint_of: Callable[[str], Path]) -> None:
    """Before its first step and behind it: packed matrices have left their modules by then."""
    kind, parts = SLEEPERS[name]
    directory = checkpoint_of(kind)
    requests = [ask(prompt) for prompt in PROMPTS]
    async with started(build_engine(config(directory.parent, directory.name, **parts))) as engine:
        told = []
        for _ in range(3):
            nap = await engine.control.sleep()
            assert nap.freed_bytes > 0 or kind == "mamba2", "what is small fills no page of memory"
            await engine.control.wake()
            told.append(await answers(engine, requests))
        assert told[0] == told[1] == told[2]


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "adapters"])
async def test_weights_that_were_replaced_are_let_go(llamas: Path, lora: bool) -> None:
    """Each time; adapters are read for the new ones."""
    parts: dict[str, Any] = {"lora": LoraConfig(directory=str(llamas))} if lora else {}
    # What is built and started is let go: it makes the first runner, and so knows the first model.
    engine, gone = await build_engine(config(llamas, OLD, model={"native": "off"}, **parts)).start(), []
    try:
        for name in (NEW, OLD, NEW):
            model: Any = engine.control._renewal.serving.model
            gone.append(weakref.ref(model.module))
            del model
            await answers(engine, [ask(PROMPTS[0], 4)])
            await update(engine, name)
            await answers(engine, [ask(PROMPTS[0], 4)])
        gc.collect()
        assert [each() is None for each in gone] == [True, True, True]
    finally:
        await engine.stop()
