"""Adapters over other kinds of models: windows, experts, latents, recurrent layers. Loaded over gRPC, equal to PEFT."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from core.models.lora.slots import LORA
from service.client import SlipstreamClient
from service.client.adapters import AdapterClient
from tests.proofs.equivalence.adapter_world import GREEDY
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.servers import serve_checkpoint
from tests.unit.core.models.lora.peft_oracle import PeftOracle, make_adapter

OUTPUT = 10
TARGETS: dict[str, Any] = {
    "gemma3_text": "all-linear",
    "gpt_oss": "all-linear",
    "deepseek_v3": ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"],
    "bamba": "all-linear",
    "lfm2": "all-linear",
    "jamba": ["in_proj", "x_proj", "out_proj", "q_proj", "v_proj"],
    "qwen3_next": ["in_proj_qkvz", "in_proj_ba", "out_proj", "q_proj", "shared_expert_gate"],
}


@pytest.mark.parametrize("kind", TARGETS)
async def test_other_kinds_of_models_equal_peft(kind: str, tmp_path: Path) -> None:
    base = make_checkpoint(kind, tmp_path / "base")
    adapter = make_adapter(base, tmp_path / "root" / "x", 0, r=4, lora_alpha=4, target_modules=TARGETS[kind])
    rng = random.Random(5)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (3, 20, 41)]

    async def ask(client: SlipstreamClient, prompt: list[int], name: str) -> list[int]:
        (output,) = await client.complete(prompt, adapter=name, max_tokens=OUTPUT, **GREEDY)
        return list(output.token_ids)

    async with serve_checkpoint(
        base, lora_dir=str(tmp_path / "root"), unnamed_callers="all", chunked_prefill_size=16
    ) as (server, client):
        engine: Any = server.engine
        slots = engine._executor._runner._state.companions[LORA]
        await AdapterClient(client).load("x")
        await ask(client, prompts[1], "x")
        assert slots._targeted and slots._seen.keys() == slots._targeted, "a layer's share is missing without a word"
        asked = [(prompt, name) for prompt in prompts for name in ("x", "")]
        found = await asyncio.gather(*(ask(client, prompt, name) for prompt, name in asked))
    oracle = PeftOracle(base, {"x": adapter})
    wanted = [oracle.greedy(prompt, name or None, OUTPUT) for prompt, name in asked]
    assert found == wanted
    assert wanted[0::2] != wanted[1::2], "the adapter changes nothing"
