"""What a model says of texts by the head of its checkpoint is what transformers says, on every path of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from core.engine.async_engine import AsyncEngine
from core.errors import ConfigError, InvalidRequest, ModelLoadError, TextFailed, Unsupported
from core.models.loader import check_checkpoint
from core.types.control import WeightSource
from core.types.io import EmbedRequest, EmbedResult, GenerateRequest, Input, Pooling, TextPair
from core.types.labels import Activation
from tests.proofs.equivalence.oracle import make_prompts
from tests.proofs.equivalence.test_embeddings import engine, named
from tests.support.checkpoints import PAD_ID, make_checkpoint
from tests.support.judges import change_config, judged_by_hand, make_judge

KINDS = ("llama", "gemma2", "gpt_oss", "deepseek_v3", "jamba")
LABELS = ("bad", "fine", "good")
LONGEST = 150


async def judge(made: AsyncEngine, *inputs: Input, **fields: Any) -> EmbedResult:
    """What is said of each input of one request."""
    async with aclosing(await made.embed(EmbedRequest(inputs, pooling=Pooling.LABELS, **fields))) as call:
        return await call.result()


def agree(result: EmbedResult, expected: list[np.ndarray]) -> None:
    assert len(result.embeddings) == len(expected)
    for found, want in zip(result.embeddings, expected, strict=True):
        np.testing.assert_allclose(found.values, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())


@pytest.fixture(scope="module")
def llama_judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_judge("llama", tmp_path_factory.mktemp("judge"), LABELS)


@pytest.mark.parametrize("kind", KINDS)
async def test_labels_equal_transformers_among_embeddings_in_a_small_pool(kind: str, tmp_path: Path) -> None:
    directory = make_judge(kind, tmp_path, LABELS)
    prompts = make_prompts(40, LONGEST, seed=3)
    expected = judged_by_hand(directory, prompts)
    async with engine(directory, pool=LONGEST + 42) as made:
        assert made.model_info.labels is not None and made.model_info.labels.names == LABELS
        asks = [judge(made, prompt) for prompt in prompts]
        others = [judge(made, *prompts[:3]), embedded(made, *prompts)]
        answers = await asyncio.gather(*asks, *others)
    for answer, want in zip(answers, expected, strict=False):
        agree(answer, [want])
    agree(answers[-2], expected[:3])


async def embedded(made: AsyncEngine, *prompts: Input) -> EmbedResult:
    async with aclosing(await made.embed(EmbedRequest(prompts, normalize=False))) as call:
        return await call.result()


async def test_vectors_beside_labels_keep_their_width(llama_judge: Path, tmp_path: Path) -> None:
    """More labels than hidden states, and fewer: neither leaks into the other."""
    many = make_judge("llama", tmp_path, [f"label {n}" for n in range(100)])
    for directory, count in ((llama_judge, 3), (many, 100)):
        async with engine(directory) as made:
            labels, vectors = await asyncio.gather(judge(made, (5, 6, 7)), embedded(made, (5, 6, 7)))
        assert labels.embeddings[0].values.shape == (count,)
        assert vectors.embeddings[0].values.shape == (64,)
        (want,) = judged_by_hand(directory, [(5, 6, 7)])
        agree(labels, [want])


async def test_a_known_prefix_is_not_computed_again(llama_judge: Path) -> None:
    prompt = tuple(range(3, 103))
    async with engine(llama_judge) as made:
        first, again = await judge(made, prompt), await judge(made, prompt)
    agree(again, judged_by_hand(llama_judge, [prompt]))
    assert (first.embeddings[0].cached_tokens, again.embeddings[0].cached_tokens > 0) == (0, True)


async def test_padding_at_the_end_is_left_out_as_in_transformers(llama_judge: Path) -> None:
    prompts = [(5, 9, PAD_ID, PAD_ID), (5, PAD_ID, 9), (PAD_ID, PAD_ID)]
    expected = judged_by_hand(llama_judge, prompts)
    async with engine(llama_judge) as made:
        found = await judge(made, *prompts)
        vectors = await embedded(made, *prompts)
    agree(found, expected)
    assert [each.prompt_tokens for each in found.embeddings] == [2, 3, 1]
    assert [each.prompt_tokens for each in vectors.embeddings] == [4, 3, 2], "only who judges leaves it out"


async def test_pairs_are_joined_by_the_tokenizer_or_by_a_template(llama_judge: Path) -> None:
    pair = TextPair("a {document} of text", "the {query} dog")
    tokenizer = AutoTokenizer.from_pretrained(llama_judge)
    joined = tuple(tokenizer(pair.first, pair.second)["input_ids"])
    filled = tuple(tokenizer("Q a {document} of text; D the {query} dog.")["input_ids"])
    async with engine(llama_judge) as made:
        agree(await judge(made, pair), judged_by_hand(llama_judge, [joined]))
    async with engine(llama_judge, model_fields={"pair_template": "Q {query}; D {document}."}) as made:
        agree(await judge(made, pair), judged_by_hand(llama_judge, [filled]))


async def test_what_is_cut_is_as_long_as_can_be_in_tokens(llama_judge: Path) -> None:
    """Tokens are words here, so a text has more characters than fit tokens."""
    long = " ".join("the quick brown fox" for _ in range(900))
    tokenizer = AutoTokenizer.from_pretrained(llama_judge)
    async with engine(llama_judge, model_fields={"context_length": 100}) as made:
        longest = made.model_info.max_input_length
        found = await judge(made, long, TextPair("dog", long), truncate=True)
    text, pair = tokenizer(long)["input_ids"], tokenizer("dog", long)["input_ids"]
    assert [each.prompt_tokens for each in found.embeddings] == [longest, longest]
    agree(found, judged_by_hand(llama_judge, [tuple(text[:longest]), tuple(pair[:longest])]))


async def test_a_judge_writes_nothing_and_a_writer_judges_nothing(
    llama_judge: Path, checkpoint_of: Callable[[str], Path]
) -> None:
    async with engine(llama_judge) as made:
        assert not made.model_info.generates
        with pytest.raises(Unsupported, match="puts out no text"):
            await made.generate(GenerateRequest(text="a"))
        for inputs, fields in (
            ((TextPair("", ""),), ["inputs[0].pair"]),
            ((TextPair("a", "\ud800"),), ["inputs[0].pair"]),
            (((5,), (320,), TextPair("a " * 1024, "b")), ["inputs[1].token_ids.ids[0]", "inputs[2].pair.first"]),
        ):
            with pytest.raises(InvalidRequest) as refused:
                await judge(made, *inputs)
            assert named(refused.value) == fields
        with pytest.raises(InvalidRequest) as refused:
            await embedded(made, TextPair("a", "b"))
        assert named(refused.value) == ["inputs"]
        with pytest.raises((InvalidRequest, TextFailed)) as failed:
            await judge(made, TextPair("\ud800", "a"))
        assert isinstance(failed.value, InvalidRequest)
    async with engine(checkpoint_of("llama")) as made:
        assert made.model_info.generates and made.model_info.labels is None
        with pytest.raises(InvalidRequest) as refused:
            await judge(made, "a")
        assert named(refused.value) == ["pooling"]


async def test_an_update_of_weights_brings_its_own_head(llama_judge: Path, tmp_path: Path) -> None:
    other = make_judge("llama", tmp_path / "root" / "other", LABELS, seed=9)
    root = str(tmp_path / "root")
    async with engine(llama_judge, model_fields={"weights_dir": root}) as made:
        agree(await judge(made, (5, 6, 7)), judged_by_hand(llama_judge, [(5, 6, 7)]))
        await made.control.update_weights(WeightSource(path="other"), "two")
        agree(await judge(made, (5, 6, 7)), judged_by_hand(other, [(5, 6, 7)]))
        change_config(other, pad_token_id=9)
        with pytest.raises(InvalidRequest, match="pad_token_id 9"):
            await made.control.update_weights(WeightSource(path="other"), "three")


@pytest.mark.parametrize(
    ("fields", "names", "activation", "relevance"),
    [
        ({}, LABELS, Activation.SOFTMAX, None),
        ({"problem_type": "multi_label_classification"}, LABELS, Activation.SIGMOID, None),
        ({"problem_type": "regression"}, LABELS, Activation.NONE, None),
        ({"id2label": {"0": "relevance"}}, ("relevance",), Activation.SIGMOID, 0),
        (
            {"id2label": {"0": "x"}, "sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"},
            ("x",),
            Activation.NONE,
            0,
        ),
        (
            {"id2label": {"0": "x"}, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("x",),
            Activation.NONE,
            0,
        ),
        ({"id2label": None, "num_labels": 3}, ("LABEL_0", "LABEL_1", "LABEL_2"), Activation.SOFTMAX, None),
        ({"id2label": None}, ("LABEL_0", "LABEL_1"), Activation.SOFTMAX, None),
        ({"problem_type": "single_label_classification"}, LABELS, Activation.SOFTMAX, None),
        (
            {"id2label": {"0": "x"}, "problem_type": "single_label_classification"},
            ("x",),
            Activation.SIGMOID,
            0,
        ),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}},
            LABELS,
            Activation.SIGMOID,
            None,
        ),
    ],
)
def test_labels_are_read_as_the_libraries_do(
    tmp_path: Path, fields: dict[str, Any], names: tuple[str, ...], activation: Activation, relevance: int | None
) -> None:
    directory = make_judge("llama", tmp_path, LABELS)
    change_config(directory, **fields)
    labels = check_checkpoint(directory).labels
    assert labels is not None
    assert (labels.names, labels.activation, labels.relevance) == (names, activation, relevance)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "no name for label 1"),
        ({"id2label": []}, "must name 1 to"),
        ({"id2label": {}}, "must name 1 to"),
        ({"id2label": {"0": 7}}, "no name for label 0"),
        ({"id2label": {"0": "a", "1": "\ud800"}}, "lone surrogate in the name of label 1"),
        ({"id2label": None, "num_labels": 0}, "num_labels must be"),
        ({"id2label": None, "num_labels": "3"}, "num_labels must be"),
    ],
)
def test_labels_that_cannot_be_used_are_refused(tmp_path: Path, fields: dict[str, Any], said: str) -> None:
    directory = make_judge("llama", tmp_path, LABELS)
    change_config(directory, **fields)
    with pytest.raises(ModelLoadError, match=said):
        check_checkpoint(directory)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda weights: weights.pop("score.weight"), "no weights score.weight"),
        (lambda weights: weights.update({"score.weight": torch.zeros(2, 64)}), "must be plain numbers"),
        (lambda weights: weights.update({"score.weight": torch.zeros(3, 64, dtype=torch.int32)}), "must be plain"),
        (lambda weights: weights.update({"other.weight": torch.zeros(3)}), "unexpected weights other.weight"),
        (lambda weights: weights.pop("model.norm.weight"), "missing weights model.norm.weight"),
    ],
)
async def test_a_head_that_does_not_fit_is_refused(tmp_path: Path, change: Callable[[Any], Any], said: str) -> None:
    directory = make_judge("llama", tmp_path, LABELS)
    weights = load_file(directory / "model.safetensors")
    change(weights)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match=said):
        async with engine(directory):
            pass


async def test_labels_of_a_head_and_of_tokens_are_not_both_meant(llama_judge: Path) -> None:
    with pytest.raises(ConfigError, match="has a classification head with labels of its own"):
        async with engine(llama_judge, model_fields={"label_tokens": "y,n"}):
            pass


async def test_a_class_whose_head_does_more_is_refused(llama_judge: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import LlamaForSequenceClassification

    plain = LlamaForSequenceClassification.forward

    def doubled(self: Any, *args: Any, **named: Any) -> Any:
        found = plain(self, *args, **named)
        found.logits = found.logits * 2
        return found

    monkeypatch.setattr(LlamaForSequenceClassification, "forward", doubled)
    with pytest.raises(ModelLoadError, match="does more than a linear layer"):
        async with engine(llama_judge):
            pass


async def test_a_model_whose_base_is_passed_by_embeds_nothing(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 96, "num_hidden_layers": 2}
    directory = make_checkpoint("opt", tmp_path, num_attention_heads=4, max_position_embeddings=1024, **sizes)
    async with engine(directory) as made:
        assert made.model_info.embedding_dimension == 0
        with pytest.raises(InvalidRequest) as refused:
            await embedded(made, "a")
        assert named(refused.value) == ["pooling"]
