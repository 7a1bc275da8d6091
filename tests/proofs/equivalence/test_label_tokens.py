"""Labels that are tokens of a causal reranker: their numbers are transformers' log probabilities of the next token."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from core.config import ModelConfig
from core.engine.labelling import Labelling, labelling_of
from core.engine.prompt_bounds import CHARS_PER_TOKEN
from core.errors import ConfigError, DeadlinePassed, InvalidRequest, Overloaded, RequestAborted
from core.text.tokenizer import Tokenizer
from core.types.io import EmbedRequest, Pooling, TextPair
from core.types.labels import Activation, Labels
from tests.proofs.equivalence.oracle import make_prompts
from tests.proofs.equivalence.test_embeddings import engine, named, tokens_of
from tests.proofs.equivalence.test_labels import agree, judge

TOKENS = "y,n,<|eos|>"
TEMPLATE = "judge {query} by {document}:"


@torch.no_grad()
def next_by_hand(directory: Path, prompts: list[tuple[int, ...]], ids: list[int]) -> list[np.ndarray]:
    """float32[len(ids)] of each prompt: natural-log probabilities of `ids` behind it."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    logits = [model(input_ids=torch.tensor([prompt])).logits[0, -1] for prompt in prompts]
    return [each.log_softmax(-1)[ids].numpy() for each in logits]


@pytest.mark.parametrize("kind", ["llama", "gemma2", "cohere2", "bamba"])
async def test_numbers_equal_transformers_beside_streams(kind: str, checkpoint_of: Callable[[str], Path]) -> None:
    directory = checkpoint_of(kind)
    ids = AutoTokenizer.from_pretrained(directory).convert_tokens_to_ids(TOKENS.split(","))
    prompts = make_prompts(30, 150, seed=4)
    async with engine(directory, model_fields={"label_tokens": TOKENS}) as made:
        assert made.model_info.labels == Labels(("y", "n", "<|eos|>"), Activation.SOFTMAX, relevance=0)
        assert made.model_info.generates
        found, *streams = await asyncio.gather(judge(made, *prompts), *(tokens_of(made, each) for each in prompts[:4]))
    agree(found, next_by_hand(directory, prompts, ids))
    assert [each.prompt_tokens for each in found.embeddings] == [len(each) for each in prompts]
    assert all(streams)


async def test_pairs_become_what_the_template_says(checkpoint_of: Callable[[str], Path]) -> None:
    directory = checkpoint_of("llama")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    prompt = tuple(tokenizer("judge {document} a by the dog:")["input_ids"])
    fields = {"label_tokens": "n,y", "pair_template": TEMPLATE}
    async with engine(directory, model_fields=fields) as made:
        found = await judge(made, TextPair("{document} a", "the dog"))
    agree(found, next_by_hand(directory, [prompt], tokenizer.convert_tokens_to_ids(["n", "y"])))


async def test_a_known_prefix_is_counted(checkpoint_of: Callable[[str], Path]) -> None:
    async with engine(checkpoint_of("llama"), model_fields={"label_tokens": "y,n"}) as made:
        counted = [(await judge(made, tuple(range(3, 103)))).embeddings[0].cached_tokens for _ in range(2)]
    assert counted == [0, 96]


async def test_what_is_judged_drafts_for_no_text(checkpoint_of: Callable[[str], Path]) -> None:
    """It asks for one token, and nothing that is written reads on from it."""
    async with engine(checkpoint_of("llama"), model_fields={"label_tokens": "y,n"}) as made:
        request = EmbedRequest(((5,), (6, 7)), pooling=Pooling.LABELS)
        reqs = await made._embeddings.sequences(request, "one", 0.0)
    assert [req.speculates for req in reqs] == [False, False]


def test_a_token_without_a_logit_is_no_label(checkpoint_of: Callable[[str], Path]) -> None:
    """A tokenizer may know more tokens than the model has."""
    tokenizer, config = Tokenizer.load(checkpoint_of("llama")), ModelConfig("somewhere", label_tokens="y,n")
    most = max(*tokenizer.encode("y", False), *tokenizer.encode("n", False))

    def labelling(vocab_size: int) -> Labelling | None:
        spec: Any = SimpleNamespace(encoder=None, whole_prompts=False, vocab_size=vocab_size)
        return labelling_of(config, spec, tokenizer, None)

    assert labelling(most + 1)
    with pytest.raises(ConfigError, match="must be one token of the model"):
        labelling(most)


async def test_what_ends_a_call_early_ends_it_with_an_error(checkpoint_of: Callable[[str], Path]) -> None:
    async with engine(checkpoint_of("llama"), model_fields={"label_tokens": "y,n"}) as made:
        call = await made.embed(EmbedRequest(((5,) * 900,), request_id="one", pooling=Pooling.LABELS))
        assert made.abort("one")
        with pytest.raises(RequestAborted):
            await call.result()
        with pytest.raises(DeadlinePassed):
            await judge(made, (5,), deadline=0.0)
        with pytest.raises(Overloaded):
            await judge(made, *((5,),) * 2000)
        with pytest.raises(InvalidRequest) as refused:
            await judge(made, (5,) * 1024)
        assert named(refused.value) == ["inputs[0].token_ids.ids"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"label_tokens": "y"}, "2 to 64 different"),
        ({"label_tokens": "y,y"}, "2 to 64 different"),
        ({"label_tokens": "yz,n"}, "'yz' must be one token"),
        ({"label_tokens": "y,"}, "'' must be one token"),
        ({"pair_template": TEMPLATE}, "has no labels"),
    ],
)
async def test_settings_that_cannot_work_are_refused(
    checkpoint_of: Callable[[str], Path], fields: dict[str, str], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        async with engine(checkpoint_of("llama"), model_fields=fields):
            pass


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{query}", "once each"),
        ("{query}{document}{document}", "once each"),
        ("{document}{query}", "must come before"),
    ],
)
def test_templates_without_their_places_are_refused(template: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        ModelConfig("somewhere", label_tokens="y,n", pair_template=template)


async def test_of_a_long_document_no_more_is_tokenised_than_could_be_read(
    checkpoint_of: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    inner, seen = Tokenizer.encode_within, list[str]()

    def encode_within(self: Tokenizer, text: str, limit: int, part: tuple[int, int] | None = None) -> list[int]:
        seen.append(text)
        return inner(self, text, limit, part)

    monkeypatch.setattr(Tokenizer, "encode_within", encode_within)
    fields = {"label_tokens": "n,y", "pair_template": TEMPLATE, "context_length": 100}
    async with engine(checkpoint_of("llama"), model_fields=fields) as made:
        found = await judge(made, TextPair("dog", "fox " * 100_000), truncate=True)
        short = await judge(made, TextPair("dog", "fox " * 100), truncate=True)
    assert seen[0] == f"judge dog by {'fox ' * (100 * CHARS_PER_TOKEN // 4)}:"
    assert found.embeddings[0].prompt_tokens == 99
    np.testing.assert_allclose(found.embeddings[0].values, short.embeddings[0].values, atol=1e-5)


async def test_of_a_template_the_document_alone_is_cut(checkpoint_of: Callable[[str], Path]) -> None:
    """What the template says behind the document, which asks the question, stays."""
    directory = checkpoint_of("llama")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    document = " ".join("the quick brown fox" for _ in range(900))
    whole = tokenizer(f"judge dog by {document}:")["input_ids"]
    limit = 100 - 1
    end = tokenizer(":")["input_ids"]
    assert whole[-len(end) :] == end
    expected = (*whole[: limit - len(end)], *end)
    fields = {"label_tokens": "n,y", "pair_template": TEMPLATE, "context_length": 100}
    async with engine(directory, model_fields=fields) as made:
        found = await judge(made, TextPair("dog", document), truncate=True)
        with pytest.raises(InvalidRequest) as refused:
            await judge(made, TextPair("dog " * 100, "a"), truncate=True)
        assert named(refused.value) == ["inputs[0].pair.first"]
    assert found.embeddings[0].prompt_tokens == limit
    agree(found, next_by_hand(directory, [expected], tokenizer.convert_tokens_to_ids(["n", "y"])))
