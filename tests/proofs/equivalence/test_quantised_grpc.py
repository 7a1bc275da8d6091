"""Quantised checkpoints through gRPC say what `transformers.generate` says of the same files, greedy, token for token.

16 requests at once in chunks of 32 over a pool that holds few of them, overlap on and off.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.client import SlipstreamClient
from tests.proofs.equivalence.oracle import MARGIN, Example, make_prompts
from tests.support.quantised import COMPRESSED, TORCHAO, make_quantised
from tests.support.servers import serve_checkpoint

pytest.importorskip("compressed_tensors", reason="needs the extra: pip install slipstream[quantization]")
pytest.importorskip("torchao", reason="needs the extra: pip install slipstream[quantization]")

FORMATS = (*COMPRESSED, "ct-moe", *TORCHAO, "mxfp4")
CONCURRENT = 16
TOKENS = 8
LONGEST = 80

ROUNDED = ("ct-w8a8", "ct-fp8-static", "ct-fp8-dynamic", "ao-int8-dynamic")
"""Formats that quantise activations: the last bit of a float may decide about an eight-bit step."""
ROUNDED_MARGIN = 0.1
"""What such a step can move a logit by."""


@dataclass(frozen=True)
class Decided:
    """A prompt, what `transformers` goes on with, and how many of those tokens it was sure of before the first tie."""

    example: Example
    sure: int


@pytest.fixture(scope="module", params=FORMATS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Decided]]:
    """A checkpoint in one format, and the oracle's answers for it."""
    directory = make_quantised(request.param, tmp_path_factory.mktemp(request.param))
    return directory, _answers(directory, ROUNDED_MARGIN if request.param in ROUNDED else MARGIN)


@torch.no_grad()
def _answers(directory: Path, margin: float) -> list[Decided]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()
    model.generation_config.eos_token_id = None
    decided = []
    for prompt in make_prompts(CONCURRENT, LONGEST, seed=1):
        answer = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=TOKENS,
            do_sample=False,
            pad_token_id=0,
            output_logits=True,
            return_dict_in_generate=True,
        )
        best = torch.cat(answer.logits).topk(2).values
        ties = ((best[:, 0] - best[:, 1]) <= margin).nonzero().flatten().tolist()
        output = tuple(answer.sequences[0, len(prompt) :].tolist())
        decided.append(Decided(Example(prompt, output), ties[0] if ties else TOKENS))
    return decided


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "inline"])
async def test_greedy_equals_transformers(reference: tuple[Path, list[Decided]], overlap: bool) -> None:
    directory, decided = reference
    async with serve_checkpoint(
        directory,
        overlap=overlap,
        chunked_prefill_size=32,
        page_size=8,
        max_running_requests=12,
        max_total_tokens=LONGEST + 40,
    ) as (server, client):
        answers = await asyncio.gather(*(_ask(client, each.example) for each in decided))
        stats = server.engine.stats
    for answer, each in zip(answers, decided, strict=True):
        assert answer[: each.sure] == each.example.output[: each.sure], (each, answer)
    print(sum(e.sure for e in decided), [a == e.example.output for a, e in zip(answers, decided)].count(True))
    # Else near ties would have excused everything.
    assert sum(each.sure for each in decided) >= 0.25 * CONCURRENT * TOKENS
    assert sum(stats.assert_failures.values()) == 0
    assert all(pool.used == 0 for pool in stats.pools)


async def _ask(client: SlipstreamClient, example: Example) -> tuple[int, ...]:
    (answer,) = await client.complete(
        example.prompt, temperature=0.0, max_tokens=TOKENS, ignore_eos=True, want_text=False
    )
    return answer.token_ids
