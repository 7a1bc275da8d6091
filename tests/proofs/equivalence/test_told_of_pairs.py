"""What is wrong with inputs that are judged or embedded is told of where the client can mend it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from service.client import CallFailed
from tests.proofs.equivalence.test_embed_grpc import serving
from tests.proofs.equivalence.test_judge_grpc import refused
from tests.support.encoder_decoders import make_encoder_decoder
from tests.support.encoders import LONGEST, make_encoder

LONG = "q" * 2 * LONGEST
"""The tokenizer of the tests has a token for each of these letters."""
DOCUMENTS = ["a", "b " * 4 * LONGEST, "c"]


async def test_a_query_that_is_too_long_is_named_once(tmp_path: Path) -> None:
    """It leaves no room for any document, cut or not; a document that is too long by itself is named by its place."""
    directory = make_encoder("bert", tmp_path, "ForSequenceClassification", id2label={0: "relevance"})
    async with serving(directory) as (_, client):
        for truncate in (False, True):
            await refused(client.score(LONG, DOCUMENTS, truncate=truncate), ["query"])
            await refused(client.classify((LONG, "a"), "b", truncate=truncate), ["inputs[0].pair.first"])
        for letters in (LONGEST - 3, 64 * (LONGEST + 2)):
            # Three special tokens leave no room for a document; so many letters are refused before they are read.
            await refused(client.score("q" * letters, ["a", "b"]), ["query"])
        await refused(client.classify(("q" * 64 * (LONGEST + 2), "a"), "b", truncate=True), ["inputs[0].pair.first"])
        await refused(client.score("q" * (LONGEST - 4), ["a", "bcd"]), ["documents[1]"])
        await refused(client.score("q", DOCUMENTS), ["documents[1]"])
        assert len(await client.score("q", DOCUMENTS, truncate=True)) == 3


async def test_a_query_that_a_template_takes_is_named_too(checkpoint_of: Callable[[str], Path]) -> None:
    template = "judge {query} by {document}: is it?"
    async with serving(checkpoint_of("llama"), label_tokens="y,n", pair_template=template, context_length=100) as (
        _,
        client,
    ):
        for truncate in (False, True):
            await refused(client.score("dog " * 100, ["a", "b"], truncate=truncate), ["query"])
        await refused(client.score("dog", ["a", "fox " * 100]), ["documents[1]"])
        many = ("dog " * 64 * 101, "a")
        await refused(client.classify(many, truncate=True), ["inputs[0].pair.first"])


async def test_what_a_template_says_behind_the_document_counts(checkpoint_of: Callable[[str], Path]) -> None:
    template = "{query} by {document}" + ": is it the fox?" * 8
    async with serving(checkpoint_of("llama"), label_tokens="y,n", pair_template=template, context_length=100) as (
        _,
        client,
    ):
        whole = len(await client.tokenize(template.format(query="dog", document="")))
        assert 50 < whole < 95
        await refused(client.score("dog " * 90, ["a", "b"]), ["query"])
        await refused(client.score("dog " * (100 - whole), ["a", "b"]), ["query"])


async def test_cut_documents_behind_a_template(checkpoint_of: Callable[[str], Path]) -> None:
    template = "judge {query} by {document}: is it?"
    async with serving(checkpoint_of("llama"), label_tokens="y,n", pair_template=template, context_length=100) as (
        _,
        client,
    ):
        assert len(await client.score("dog", ["a", "fox " * 100], truncate=True)) == 2


async def test_ids_that_are_cut_off_are_checked_too(tmp_path: Path) -> None:
    async with serving(make_encoder("bert", tmp_path)) as (_, client):
        many = [5] * 2 * LONGEST
        assert len(await client.embed(many, truncate=True)) == 1
        for foreign in (-1, 1 << 20):
            place = f"inputs[1].token_ids.ids[{len(many)}]"
            await refused(client.embed("a", [*many, foreign], truncate=True), [place])


async def test_a_model_that_cannot_embed_says_so(tmp_path: Path) -> None:
    async with serving(make_encoder_decoder("t5", tmp_path / "t5")) as (_, client):
        with pytest.raises(CallFailed) as failed:
            await client.embed("a")
        assert (failed.value.code.name, failed.value.reason) == ("UNIMPLEMENTED", "UNSUPPORTED")
        assert failed.value.message == "the served model gives no hidden states to embed with; use Generate"
