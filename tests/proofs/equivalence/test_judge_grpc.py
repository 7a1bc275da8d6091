"""Classify and Score through gRPC sockets and the real engine: equal to what transformers says of the same texts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

from core.types.labels import Activation
from service.client import CallFailed, Classification, SlipstreamClient
from tests.chaos.process import ServerProcess
from tests.proofs.equivalence.oracle import make_prompts
from tests.proofs.equivalence.test_embed_grpc import serving
from tests.proofs.equivalence.test_label_tokens import next_by_hand
from tests.support.encoders import LONGEST, make_encoder, pairs_by_hand
from tests.support.judges import change_config, judged_by_hand, make_judge

LABELS = ("bad", "fine", "good")
QUERY = "what eats hens"
DOCUMENTS = ("the fox is a predator", "hens lay eggs", "a dog barks at the moon", "hens lay eggs")


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge("llama", tmp_path_factory.mktemp("judge"), LABELS)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge("llama", tmp_path_factory.mktemp("reranker"), ["relevance"], seed=3)


def joined(directory: Path, *pairs: tuple[str, str]) -> list[tuple[int, ...]]:
    """Ids of pairs as the tokenizer joins them."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    return [tuple(tokenizer(first, second)["input_ids"]) for first, second in pairs]


def close(found: Any, want: Any) -> None:
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


def scores_of(found: Classification) -> list[float]:
    assert tuple(each.label for each in found.scores) == LABELS
    return [each.score for each in found.scores]


async def test_scores_of_texts_ids_and_pairs_equal_transformers(judge: Path) -> None:
    prompts, pairs = make_prompts(20, 150, seed=5), [(QUERY, each) for each in DOCUMENTS]
    tokens = [*prompts, *joined(judge, *pairs)]
    numbers = judged_by_hand(judge, tokens)
    async with serving(judge) as (_, client):
        scored, raw = await asyncio.gather(
            client.classify(*prompts, *pairs), client.classify(*prompts, *pairs, raw_scores=True)
        )
        text, ids = await client.classify("the quick fox", await client.tokenize("the quick fox"))
        info = await client.model_info()
    for each, found, want in zip(scored, raw, numbers, strict=True):
        close(scores_of(found), want)
        close(scores_of(each), Activation.SOFTMAX(want))
    assert [each.prompt_tokens for each in scored] == [len(each) for each in tokens]
    assert text == ids
    assert (list(info.labels), info.no_generation, info.HasField("relevance_label")) == (list(LABELS), True, False)


async def test_documents_are_ranked_as_transformers_ranks_them(reranker: Path) -> None:
    numbers = np.concatenate(judged_by_hand(reranker, joined(reranker, *((QUERY, each) for each in DOCUMENTS))))
    order = sorted(range(len(DOCUMENTS)), key=lambda index: -numbers[index])
    async with serving(reranker) as (_, client):
        found = await client.score(QUERY, DOCUMENTS)
        raw = await client.score(QUERY, DOCUMENTS, raw_scores=True)
        best = await client.score(QUERY, DOCUMENTS, top_n=3)
    close([each.score for each in raw], numbers)
    close([each.score for each in found], Activation.SIGMOID(numbers))
    assert [each.index for each in best] == order[:3]


@pytest.mark.parametrize("kind", ["bert", "modernbert"])
async def test_a_cross_encoder_scores_and_embeds_and_writes_nothing(kind: str, tmp_path: Path) -> None:
    directory = make_encoder(kind, tmp_path, "ForSequenceClassification", id2label={0: "relevance"})
    numbers = np.concatenate(pairs_by_hand(directory, [(QUERY, each) for each in DOCUMENTS]))
    async with serving(directory) as (_, client):
        raw, found, vectors = await asyncio.gather(
            client.score(QUERY, DOCUMENTS, raw_scores=True),
            client.score(QUERY, DOCUMENTS, top_n=1),
            client.embed(QUERY, *DOCUMENTS, pooling="cls"),
        )
        info = await client.model_info()
        with pytest.raises(CallFailed, match="puts out no text; use Embed or Classify or Score"):
            await client.complete(QUERY)
        await refused(client.score(QUERY, ["a", "b " * LONGEST]), ["documents[1]"])
    close([each.score for each in raw], numbers)
    assert found[0].index == int(np.argmax(numbers))
    assert len({len(each.values) for each in vectors}) == 1 and info.no_generation


async def test_tokens_of_a_causal_reranker_score_documents_and_it_still_generates(
    checkpoint_of: Callable[[str], Path],
) -> None:
    directory, template = checkpoint_of("llama"), "judge {query} by {document}:"
    tokenizer = AutoTokenizer.from_pretrained(directory)
    filled = [template.format(query=QUERY, document=each) for each in DOCUMENTS]
    prompts = [tuple(tokenizer(each)["input_ids"]) for each in filled]
    numbers = np.array(next_by_hand(directory, prompts, tokenizer.convert_tokens_to_ids(["y", "n"])))
    async with serving(directory, label_tokens="y,n", pair_template=template) as (_, client):
        found = await client.score(QUERY, DOCUMENTS)
        raw = await client.classify(*filled, raw_scores=True)
        (written,) = await client.complete("a", max_tokens=2, ignore_eos=True)
    close([each.score for each in found], Activation.SOFTMAX(numbers)[:, 0])
    close([[label.score for label in each.scores] for each in raw], numbers)
    assert len(written.token_ids) == 2


async def test_what_cannot_be_served_is_refused_by_name(judge: Path, reranker: Path) -> None:
    async with serving(judge, max_total_tokens=512) as (_, client):
        for inputs, named in (
            (("a", "z" * 4000), ["inputs[1].text"]),
            (((5, 320),), ["inputs[0].token_ids.ids[1]"]),
            ((("a", "b"), ("a", "z" * 4000)), ["inputs[1].pair"]),
        ):
            await refused(client.classify(*inputs), named)
        for unserved in (
            client.score("a", ["b"]),
            client.complete("a"),
            client.complete([{"role": "user", "content": "a"}]),
        ):
            with pytest.raises(CallFailed) as failed:
                await unserved
            assert failed.value.reason == "UNSUPPORTED"
    async with serving(reranker, max_total_tokens=512) as (_, client):
        await refused(client.score("a", ["b", "z" * 4000, "c", "z" * 100_000]), ["documents[1]", "documents[3]"])
        await refused(client.score("a", ["b"], adapter="no name"), ["adapter"])


async def refused(call: Any, named: list[str]) -> None:
    with pytest.raises(CallFailed) as failed:
        await call
    assert (failed.value.code.name, sorted(failed.value.fields)) == ("INVALID_ARGUMENT", named)


async def test_an_activation_of_the_checkpoint_is_that_of_the_scores(tmp_path: Path) -> None:
    directory = make_judge("llama", tmp_path, LABELS)
    change_config(directory, problem_type="multi_label_classification")
    (numbers,) = judged_by_hand(directory, [(5, 6, 7)])
    async with serving(directory) as (_, client):
        (found,) = await client.classify([5, 6, 7])
    close(scores_of(found), Activation.SIGMOID(numbers))


@pytest.fixture
def behind_front_ends(reranker: Path) -> Iterator[ServerProcess]:
    started = ServerProcess(None, "service", model=reranker, frontends=2, max_total_tokens=8192)
    try:
        yield started.wait_ready()
    finally:
        started.close()


async def test_pairs_and_labels_pass_between_processes(reranker: Path, behind_front_ends: ServerProcess) -> None:
    numbers = np.concatenate(judged_by_hand(reranker, joined(reranker, *((QUERY, each) for each in DOCUMENTS))))
    async with SlipstreamClient(behind_front_ends.target) as client:
        info = await client.model_info()
        found = await client.score(QUERY, DOCUMENTS, raw_scores=True)
        (pair, ids) = await client.classify((QUERY, DOCUMENTS[0]), [5, 6, 7], raw_scores=True)
        await refused(client.score("a", ["b", "z" * 100_000]), ["documents[1]"])
        with pytest.raises(CallFailed) as writes:
            await client.complete("a")
    assert (list(info.labels), info.relevance_label, info.no_generation) == (["relevance"], 0, True)
    close([each.score for each in found], numbers)
    close(pair.scores[0].score, numbers[0])
    close(ids.scores[0].score, judged_by_hand(reranker, [(5, 6, 7)])[0])
    assert writes.value.reason == "UNSUPPORTED"
