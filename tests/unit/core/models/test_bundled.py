"""The bundled checkpoint as any reader of Hugging Face folders finds it.

These tests use transformers only: they judge the checkpoint, not the server.  When a server test
gets sums wrong while these pass, the fault lies in the server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from core.models.bundled import bundled_model_dir
from core.models.bundled.corpus import (
    GREETING_ANSWER,
    KIND_SHARES,
    documents,
    documents_of,
    held_out_sums,
    sum_prompt,
    training_pairs,
)
from core.models.bundled.evaluate import chat_prompt, greedy_answers, right_lookups, right_sums
from core.models.bundled.story import ANIMALS
from core.models.bundled.tokenization import build_tokenizer

MAX_FOLDER_BYTES = 8 * 1024 * 1024
SUM_IN_TEXT = re.compile(r"(\d+) ?\+ ?(\d+)")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """The model is too small to gain from threads, and other jobs share the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def model(request: pytest.FixtureRequest) -> Any:
    dtype = getattr(torch, request.param)
    loaded = AutoModelForCausalLM.from_pretrained(bundled_model_dir(), dtype=dtype, local_files_only=True)
    assert loaded.dtype == dtype
    return loaded.eval()


def read_json(name: str) -> dict[str, Any]:
    found = json.loads((bundled_model_dir() / name).read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def test_folder_is_complete_and_small() -> None:
    files = {path.name: path.stat().st_size for path in bundled_model_dir().iterdir()}
    assert {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    } <= set(files)
    assert sum(files.values()) <= MAX_FOLDER_BYTES
    assert bundled_model_dir().is_absolute()


def test_config_and_tokenizer_agree(tokenizer: Any) -> None:
    config, generation = read_json("config.json"), read_json("generation_config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["vocab_size"] == len(tokenizer)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == generation[name] == getattr(tokenizer, name)


def test_held_out_sums_never_occur_in_training() -> None:
    held_out = held_out_sums()
    assert len(held_out) >= 300
    assert len(set(held_out)) == len(held_out)
    assert not set(held_out) & set(training_pairs())
    assert {(b, a) for a, b in held_out} == set(held_out)
    seen: set[tuple[int, int]] = set()
    for found in islice(documents(seed=1), 20_000):
        seen |= {(int(a), int(b)) for a, b in SUM_IN_TEXT.findall(found.text())}
    assert len(seen) > 5_000  # the pattern does find the sums
    assert not seen & set(held_out)


def test_same_seed_gives_same_documents() -> None:
    first = [found.text() for found in islice(documents(seed=7), 500)]
    assert first == [found.text() for found in islice(documents(seed=7), 500)]
    assert first != [found.text() for found in islice(documents(seed=8), 500)]


def test_checkpoint_tokenizer_is_what_the_repository_builds(tokenizer: Any) -> None:
    built = build_tokenizer()
    assert built.get_vocab() == tokenizer.get_vocab()
    assert built.chat_template == tokenizer.chat_template
    assert json.loads(built.backend_tokenizer.to_str()) == json.loads(tokenizer.backend_tokenizer.to_str())


@pytest.mark.parametrize(
    "text",
    [
        "12+34=46",
        "Zoë said: “hi”",
        "🦊👩‍👩‍👧‍👦🏳️‍🌈",
        "你好，世界",
        "  two\n\n\tlines \n",
        "ไทย עברית",
        "\x00\x7f\u2028",
    ],
)
def test_tokenizer_round_trips_any_text(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    assert tokenizer.encode(text)[0] == tokenizer.bos_token_id


def test_digits_are_single_tokens(tokenizer: Any) -> None:
    ids = tokenizer.encode("1234567890", add_special_tokens=False)
    assert [tokenizer.decode([one]) for one in ids] == list("1234567890")


@pytest.mark.parametrize("kind", sorted(KIND_SHARES))
def test_chat_template_renders_what_was_trained_on(tokenizer: Any, kind: str) -> None:
    chats = (found for found in documents_of(kind, seed=3) if found.chat)
    for found in islice(chats, 50):
        assert tokenizer.apply_chat_template(found.messages(), tokenize=False) == found.text()


@pytest.mark.parametrize("chat", [False, True], ids=["plain", "chat"])
def test_model_adds_held_out_numbers(model: Any, tokenizer: Any, chat: bool) -> None:
    assert right_sums(model, tokenizer, held_out_sums()[:100], chat=chat) >= 95


def test_model_answers_a_chat_with_system_text(model: Any, tokenizer: Any) -> None:
    a, b = held_out_sums()[0]
    prompt = chat_prompt(tokenizer, sum_prompt(a, b), system="You add numbers.")
    assert greedy_answers(model, tokenizer, [prompt]) == [f"{a + b}<|eos|>"]
    greeting = greedy_answers(model, tokenizer, [chat_prompt(tokenizer, "Hello")], 80)
    assert greeting == [f"{GREETING_ANSWER}<|eos|>"]


def test_bos_may_be_missing_or_doubled(model: Any, tokenizer: Any) -> None:
    a, b = held_out_sums()[1]
    core = tokenizer.encode(sum_prompt(a, b), add_special_tokens=False)
    for head in ([], [tokenizer.bos_token_id] * 2):
        ids = torch.tensor([head + core])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
        assert tokenizer.decode(output[0, ids.shape[1] :]) == f"{a + b}<|eos|>"


@pytest.mark.parametrize("kind", ["recall", "copy"])
def test_model_looks_back(model: Any, tokenizer: Any, kind: str) -> None:
    assert right_lookups(model, tokenizer, kind, 100) >= 90


def test_story_keeps_its_hero_and_stops(model: Any, tokenizer: Any) -> None:
    prompts = [f"A story about Mia the {animal}:" for animal in ANIMALS]
    stories = greedy_answers(model, tokenizer, prompts, 256)
    for story, (animal, emoji) in zip(stories, ANIMALS.items(), strict=True):
        assert story.startswith(" Once upon a time")
        assert f"{animal} named Mia" in story
        assert story.endswith(f"The end. {emoji}<|eos|>")


def test_generation_past_the_end_of_a_story_does_not_fail(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer("A story about Tom the owl:", return_tensors="pt")
    output = model.generate(
        inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        min_new_tokens=400,
        max_new_tokens=400,
    )
    # Well past the length of any training row.
    assert output.shape[1] == inputs["input_ids"].shape[1] + 400


def test_no_file_of_the_checkpoint_is_a_pickle() -> None:
    suffixes = {path.suffix for path in Path(bundled_model_dir()).iterdir()}
    assert suffixes <= {".json", ".jinja", ".safetensors"}
