"""What an encoder makes of texts in steps with others is what transformers makes of each alone."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from core.config import LoraConfig, ModelConfig, SpeculationConfig
from core.errors import InvalidRequest, ModelLoadError, StartupError, Unsupported
from core.models.encoder_only import encoder_proof
from core.models.encoder_only.backend import EncoderOnlyModel
from core.models.encoder_only.encoder_head import EncoderHead
from core.models.encoder_only.ways import GroupedTexts, PackedTexts
from core.models.loader import check_checkpoint, load_model
from core.models.pooling_modules import read_pooling
from core.models.registry import ENCODER_TYPES
from core.types.control import WeightSource
from core.types.io import EMBEDDINGS, GenerateRequest, Pooling, TextPair
from tests.proofs.equivalence.oracle import make_prompts
from tests.proofs.equivalence.test_embeddings import embed, engine, named
from tests.proofs.equivalence.test_labels import agree, judge
from tests.support.encoders import (
    ENCODERS,
    LONGEST,
    PAD,
    encoded_by_hand,
    encoder_tokenizer,
    make_encoder,
    pairs_by_hand,
)
from tests.support.judges import change_config, judged_by_hand

TRIED = ("bert", "roberta", "modernbert", "albert", "eurobert", "gemma3_text", "mpnet", "deberta-v2", "convbert")
LABELS = {0: "bad", 1: "fine", 2: "good"}


def test_every_type_that_is_served_is_tried() -> None:
    assert set(ENCODERS) == {*ENCODER_TYPES, "gemma3_text"}


def loaded(directory: Path, **fields: Any) -> EncoderOnlyModel:
    """The model alone, as it is served."""
    config = ModelConfig(str(directory), dtype="float32", **{"native": "off", **fields})
    model = load_model(config, torch.device("cpu"))
    assert isinstance(model, EncoderOnlyModel)
    return model


@pytest.mark.parametrize("kind", list(ENCODERS))
@pytest.mark.parametrize("suffix", ["", "ForSequenceClassification"])
def test_every_type_is_proved_and_its_window_is_that_of_its_configuration(
    kind: str, suffix: str, tmp_path: Path
) -> None:
    """What is compared at load is real: the same states come out of texts that were not tried there."""
    directory = make_encoder(kind, tmp_path, suffix, **({"id2label": LABELS} if suffix else {}))
    try:
        model = loaded(directory)
    except ModelLoadError as refused:
        raise AssertionError("it is served") from refused
    assert model.spec.context_length == LONGEST
    assert isinstance(model.way, PackedTexts)
    prompts = make_prompts(9, LONGEST, seed=7)
    ids = torch.cat([torch.tensor(each) for each in prompts])
    with torch.inference_mode():
        places = torch.cat([torch.arange(len(each)) for each in prompts])
        hidden = model.way.states(ids, places, None, [len(each) for each in prompts])
    ends = np.cumsum([len(each) for each in prompts])
    starts = ends - [len(each) for each in prompts]
    if suffix:
        assert model.head is not None
        found = model.head.label(hidden, starts.tolist(), ends.tolist()).numpy()
        expected = np.stack(judged_by_hand(directory, prompts))
    else:
        found = np.stack([hidden[start:end].mean(0).numpy() for start, end in zip(starts, ends, strict=True)])
        expected = np.stack([each[Pooling.MEAN] for each in encoded_by_hand(directory, prompts)])
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


@pytest.mark.parametrize("native", ["off", "wait"])
@pytest.mark.parametrize("kind", TRIED)
async def test_vectors_equal_transformers(kind: str, native: str, tmp_path: Path) -> None:
    """In steps of 32 tokens: some texts share a step, and longer ones have one alone."""
    directory = make_encoder(kind, tmp_path)
    prompts = make_prompts(40, LONGEST, seed=8)
    expected = encoded_by_hand(directory, prompts)
    async with engine(directory, rows=8, model_fields={"native": native}) as made:
        info = made.model_info
        assert (info.generates, info.pooling, info.max_input_length) == (False, Pooling.MEAN, LONGEST)
        results = await asyncio.gather(
            *(embed(made, *prompts, pooling=pooling, normalize=False) for pooling in EMBEDDINGS)
        )
    for pooling, result in zip(EMBEDDINGS, results, strict=True):
        for found, want in zip(result.embeddings, expected, strict=True):
            np.testing.assert_allclose(found.values, want[pooling], rtol=1e-4, atol=1e-4 * np.abs(want[pooling]).max())
            assert found.cached_tokens == 0


@pytest.mark.parametrize("kind", TRIED)
async def test_pairs_equal_transformers(kind: str, tmp_path: Path) -> None:
    """Tokens of the second text have a type of their own, where the model knows types."""
    directory = make_encoder(kind, tmp_path, "ForSequenceClassification", id2label={0: "relevance"})
    pairs = [("what is a fox", "the quick brown fox"), ("a", "b"), ("[SEP] a", "b [SEP] c"), ("q" * 50, "d" * 70)]
    async with engine(directory) as made:
        found = await judge(made, *(TextPair(*each) for each in pairs))
    agree(found, pairs_by_hand(directory, pairs))


async def test_labels_and_vectors_share_steps(tmp_path: Path) -> None:
    directory = make_encoder("modernbert", tmp_path, "ForSequenceClassification", id2label=LABELS)
    prompts = make_prompts(30, LONGEST, seed=9)
    expected = judged_by_hand(directory, prompts)
    async with engine(directory) as made:
        labels, _ = await asyncio.gather(judge(made, *prompts), embed(made, *prompts, pooling=Pooling.MEAN))
    agree(labels, expected)


async def test_padding_among_the_ids_of_a_client_is_read_as_transformers_reads_it(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path, "ForSequenceClassification", id2label=LABELS)
    prompts = [(5, 9, PAD, PAD), (PAD, 5)]
    async with engine(directory) as made:
        found = await judge(made, *prompts)
    agree(found, judged_by_hand(directory, prompts))
    assert [each.prompt_tokens for each in found.embeddings] == [4, 2]


async def test_texts_share_a_step_up_to_its_budget_and_a_longer_one_has_its_own(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path)
    async with engine(directory, overlap=False) as made:
        await embed(made, (5,))
        before = made.stats.step
        await embed(made, *((5,) * 8,) * 4)
        assert made.stats.step - before == 1
        before = made.stats.step
        await embed(made, (5,) * 100, (5,) * 30, (5,) * 2)
        assert made.stats.step - before == 2
        before = made.stats.step
        await embed(made, (5,) * 30, (5,) * 3)
        assert made.stats.step - before == 2


async def test_the_longest_text_is_taken_and_one_token_more_is_refused(tmp_path: Path) -> None:
    directory = make_encoder("roberta", tmp_path)
    longest = tuple(5 + i % 300 for i in range(LONGEST))
    (want,) = encoded_by_hand(directory, [longest])
    async with engine(directory) as made:
        (found,) = (await embed(made, longest, pooling=Pooling.MEAN, normalize=False)).embeddings
        np.testing.assert_allclose(found.values, want[Pooling.MEAN], rtol=1e-4, atol=1e-4)
        with pytest.raises(InvalidRequest) as refused:
            await embed(made, (*longest, 5), "x" * 200)
        assert named(refused.value) == ["inputs[0].token_ids.ids", "inputs[1].text"]
        with pytest.raises(InvalidRequest) as refused:
            await embed(made, (320 + 5,))
        assert named(refused.value) == ["inputs[0].token_ids.ids[0]"]
        with pytest.raises(Unsupported, match="puts out no text"):
            await made.generate(GenerateRequest(text="a"))
    async with engine(directory, model_fields={"context_length": 64}) as made:
        assert made.model_info.max_input_length == 64, "positions that no text has count for the checkpoint alone"


def test_a_copy_runs_as_the_model_does(tmp_path: Path) -> None:
    """Products are tried by a copy, also where positions begin behind padding."""
    assert loaded(make_encoder("roberta", tmp_path)).twin().check().passed


@pytest.mark.parametrize(
    ("fields", "others", "said"),
    [
        ({"quantization": "int8"}, {}, "quantised weights"),
        ({"kv_cache_dtype": "int8"}, {}, "caches nothing"),
        ({"deterministic": True}, {}, "deterministic is not possible"),
        ({"label_tokens": "a,b"}, {}, "no token comes next"),
        ({}, {"lora": LoraConfig(adapters=(("one", "somewhere"),))}, "adapters of encoders"),
        ({}, {"speculation": SpeculationConfig(method="ngram")}, "puts out no tokens"),
    ],
)
async def test_settings_that_an_encoder_cannot_have_are_refused_by_name(
    fields: dict[str, Any], others: dict[str, Any], said: str, tmp_path: Path
) -> None:
    directory = make_encoder("bert", tmp_path)
    with pytest.raises(StartupError, match=said):
        async with engine(directory, model_fields=fields, **others):
            pass


async def test_settings_that_mean_nothing_for_an_encoder_do_no_harm(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path)
    async with engine(directory, speculation=SpeculationConfig(method="auto")) as made:
        assert (await embed(made, "a")).embeddings[0].prompt_tokens == 3


async def test_an_update_of_weights_takes_the_place_of_the_old_ones(tmp_path: Path) -> None:
    first = make_encoder("bert", tmp_path / "first", "ForSequenceClassification", id2label=LABELS)
    other = make_encoder("bert", tmp_path / "root" / "other", "ForSequenceClassification", 3, id2label=LABELS)
    async with engine(first, model_fields={"weights_dir": str(tmp_path / "root")}) as made:
        agree(await judge(made, (5, 6, 7)), judged_by_hand(first, [(5, 6, 7)]))
        await made.control.update_weights(WeightSource(path="other"), "two")
        agree(await judge(made, (5, 6, 7)), judged_by_hand(other, [(5, 6, 7)]))


def test_the_head_of_training_is_left_out_and_other_weights_are_refused(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path, "ForMaskedLM")
    model = loaded(directory)
    assert model.head is None
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"more.weight": torch.zeros(3)}, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="unexpected weights more"):
        loaded(directory)
    weights.pop("bert.encoder.layer.1.output.dense.bias")
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(ModelLoadError, match="missing weights encoder"):
        loaded(directory)


def test_a_head_that_is_missing_is_not_made_up(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path)
    change_config(directory, architectures=["BertForSequenceClassification"])
    with pytest.raises(ModelLoadError, match="missing weights classifier"):
        loaded(directory)


def test_encoders_that_are_not_tried_are_refused_by_name(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path)
    change_config(directory, model_type="fnet")
    with pytest.raises(ModelLoadError, match="it is an encoder, of which these are: albert, bert"):
        check_checkpoint(directory)


def test_a_bert_that_is_a_decoder_is_none_of_these(tmp_path: Path) -> None:
    directory = make_encoder("bert", tmp_path)
    change_config(directory, is_decoder=True)
    with pytest.raises(ModelLoadError):
        loaded(directory)


def test_a_head_that_makes_something_else_of_states_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make_encoder("bert", tmp_path, "ForSequenceClassification", id2label=LABELS)
    monkeypatch.setattr(EncoderHead, "_pooled", lambda self, states: states[:, 0])
    with pytest.raises(ModelLoadError, match="other labels of hidden states"):
        loaded(directory)


def test_an_encoder_that_cannot_be_packed_says_why_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    directory = make_encoder("mpnet", tmp_path)
    monkeypatch.setattr(encoder_proof, "DECLARED", {})
    with caplog.at_level(logging.INFO):
        assert isinstance(loaded(directory).way, GroupedTexts)
    assert "texts are computed side by side, not packed" in caplog.text
    assert "attention interface" in caplog.text


@pytest.mark.parametrize(
    ("modules", "config", "pooling", "said"),
    [
        (["Transformer", "Pooling"], {"pooling_mode": "cls"}, Pooling.CLS, ""),
        (["Transformer", "Pooling", "Normalize"], {"pooling_mode_cls_token": True}, Pooling.CLS, ""),
        (["Transformer", "Pooling"], {"pooling_mode_lasttoken": True}, Pooling.LAST, ""),
        (["Transformer", "Pooling"], {"pooling_mode": "max"}, Pooling.MEAN, "is not served"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            Pooling.MEAN,
            "is not served",
        ),
        (["Transformer", "Pooling", "Dense"], {"pooling_mode": "cls"}, Pooling.CLS, "without the checkpoint's Dense"),
        (["Transformer"], {}, Pooling.MEAN, ""),
    ],
)
async def test_the_pooling_of_a_checkpoint_is_its_default(
    modules: list[str],
    config: dict[str, Any],
    pooling: Pooling,
    said: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = make_encoder("bert", tmp_path)
    listed = [
        {
            "idx": place,
            "path": "" if kind == "Transformer" else f"{place}_{kind}",
            "type": f"sentence_transformers.{kind}",
        }
        for place, kind in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(listed))
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(config))
    with caplog.at_level(logging.WARNING):
        async with engine(directory) as made:
            assert made.model_info.pooling is pooling
    assert said in caplog.text if said else "pool" not in caplog.text


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken"}, Pooling.LAST),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
    ],
)
def test_every_pooling_has_its_own_name(config: dict[str, Any], pooling: Pooling, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": ""}]))
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert read_pooling(tmp_path) is pooling


def test_a_pooling_outside_the_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "../elsewhere"}]))
    with pytest.raises(ModelLoadError, match="leads out of the checkpoint"):
        read_pooling(tmp_path)


async def test_what_is_too_long_is_cut_as_transformers_cuts_it(tmp_path: Path) -> None:
    """The first text of a pair and the tokens around both stay."""
    directory = make_encoder("bert", tmp_path, "ForSequenceClassification", id2label={0: "relevance"})
    long = "".join(chr(97 + n * n % 26) for n in range(40_000))
    pairs = [("query", long[:300]), ("q" * 100, long[:40]), ("a", "b"), ("query", long)]
    async with engine(directory) as made:
        found = await judge(made, *(TextPair(*each) for each in pairs), truncate=True)
        agree(found, pairs_by_hand(directory, pairs, truncation="only_second", max_length=LONGEST))
        assert [each.prompt_tokens for each in found.embeddings] == [LONGEST, LONGEST, 5, LONGEST]
        inputs = long[:500], "[SEP] s", tuple(5 + n % 9 for n in range(400)), long * 2
        texts = await embed(made, *inputs, truncate=True)
        assert [each.prompt_tokens for each in texts.embeddings] == [LONGEST, 5, LONGEST, LONGEST]
        ids = encoder_tokenizer()(long[:500], truncation=True, max_length=LONGEST)["input_ids"]
        (want,) = (await embed(made, tuple(ids))).embeddings
        np.testing.assert_allclose(texts.embeddings[0].values, want.values, atol=1e-6)
        (want,) = (await embed(made, inputs[2][:LONGEST])).embeddings
        np.testing.assert_allclose(texts.embeddings[2].values, want.values, atol=1e-6)
        with pytest.raises(InvalidRequest) as refused:
            await judge(made, TextPair("q" * 200, "d"), truncate=True)
        assert named(refused.value) == ["inputs[0].pair.first"] and "without what may be cut" in str(refused.value)
        with pytest.raises(InvalidRequest) as refused:
            await judge(made, TextPair("q", "d" * 300))
        assert named(refused.value) == ["inputs[0].pair"]
