"""Checkpoints name ids that their model has no logit for: of a tokenizer that is larger, or of another model."""

from __future__ import annotations

import json
from collections.abc import Awaitable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from core.invariants import InvariantViolation
from core.memory.kv_pool import KVLayerSpec
from core.models.base import ModelSpec
from core.scheduler.sampling_table import SamplingTable
from core.types.request import Req
from core.types.sampling_params import SamplingParams
from service.client import CallFailed, SlipstreamClient
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, make_checkpoint
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.servers import serve_checkpoint

FOREIGN = (VOCAB_SIZE, 10**6, 2**40)


def with_foreign_ends(directory: Path) -> Path:
    """The checkpoint, whose files name ends that it cannot sample beside the one that it can."""
    for name in ("config.json", "generation_config.json"):
        file = directory / name
        file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [EOS_ID, *FOREIGN]}))
    return directory


@pytest.mark.parametrize("kind", ["llama", "bart"])
async def test_an_end_that_has_no_logit_is_left_out(kind: str, tmp_path: Path) -> None:
    """`min_tokens` forbids every end by its place among the logits, so one outside of them killed the engine."""
    made = make_encoder_decoder(kind, tmp_path) if kind == "bart" else make_checkpoint(kind, tmp_path)
    async with serve_checkpoint(with_foreign_ends(made), max_running_requests=4) as (_, client):
        options: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}
        plain = await tokens(client, options)
        assert len(await tokens(client, options | {"min_tokens": 12})) == 12
        assert await tokens(client, options) == plain, "the engine lives"
        assert list((await client.model_info()).eos_token_ids) == [EOS_ID]
        ends = await tokens(client, options | {"logit_bias": {EOS_ID: 100.0}})
        assert ends[-1] == EOS_ID, "the end that it can sample still ends an output"


async def tokens(client: SlipstreamClient, options: dict[str, Any]) -> tuple[int, ...]:
    (found,) = await client.complete((5, 6, 7), **options)
    return found.token_ids


async def test_constraints_end_where_a_foreign_end_is_named(tmp_path: Path) -> None:
    async with serve_checkpoint(with_foreign_ends(make_checkpoint("llama", tmp_path))) as (_, client):
        (found,) = await client.complete("x", constraint={"regex": "[ab]{3}"}, temperature=0.0, max_tokens=8)
        assert len(found.text) == 3 and set(found.text) <= {"a", "b"} and found.end.reason == "stop"


def test_a_model_whose_ends_have_no_logits_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        ModelSpec("m", "M", 10, 16, torch.float32, (KVLayerSpec(0, 1, 1, 1),), eos_token_ids=(2, 10))


@pytest.mark.parametrize(
    "asked",
    [
        {"params": SamplingParams(logit_bias={10: 1.0})},
        {"params": SamplingParams(stop_token_ids=(-1,))},
        {"params": SamplingParams(), "forced_last": (3, 11)},
    ],
)
def test_an_index_outside_the_logits_is_stopped_before_the_device(asked: dict[str, Any]) -> None:
    table = SamplingTable(2, 10, (2,))
    req = Req("r", 0, np.array([7]), seed=0, max_new_tokens=4, **asked)
    req.row = 1
    with pytest.raises(InvariantViolation, match="bias_in_logits"):
        table.fill(req)


async def test_a_text_with_a_token_that_has_no_logit_is_refused_as_a_text(tmp_path: Path) -> None:
    """Its caller knows no ids, so neither a place among them nor their range says what is wrong."""
    logits = VOCAB_SIZE - 20
    text = "the quick brown fox"
    async with serve_checkpoint(make_checkpoint("llama", tmp_path, vocab_size=logits)) as (_, client):
        ids = await client.tokenize(text)
        token = next(token for token in ids if token >= logits)
        said = f"its tokenisation has token {token}, for which the model has no logits: "
        said += f"they are for tokens 0 to {logits - 1}"
        assert await refused_fields(client.complete(text)) == {"text": said}
        assert await refused_fields(client.embed("a", text)) == {"inputs[1].text": said}
        (chat,) = (await refused_fields(client.complete([{"role": "user", "content": text}]))).items()
        assert chat[0] == "chat.messages" and "for which the model has no logits" in chat[1]
        found = await refused_fields(client.complete([5, token]))
        assert found == {"token_ids.ids[1]": f"must be between 0 and {logits - 1}"}


async def refused_fields(call: Awaitable[object]) -> dict[str, str]:
    with pytest.raises(CallFailed) as refused:
        await call
    return refused.value.fields
