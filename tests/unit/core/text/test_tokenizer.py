"""Loading, encoding, chat templates, and use from several threads at once."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from core.errors import InvalidRequest, ModelLoadError
from core.text import tokenizer as module
from core.text.detokenizer import IncrementalDetokenizer
from core.text.tokenizer import Tokenizer
from core.types.chat import ChatMessage
from tests.unit.core.text.checkpoints import FAMILIES, byte_level
from tests.unit.core.text.test_detokenizer import TEXTS


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("special", [True, False])
def test_same_ids_and_text_as_transformers(
    family: str, special: bool, families: dict[str, Path], tokenizers: dict[str, Tokenizer]
) -> None:
    theirs, ours = AutoTokenizer.from_pretrained(families[family], local_files_only=True), tokenizers[family]
    assert ours.vocab_size == len(theirs)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in TEXTS:
        ids = theirs.encode(text, add_special_tokens=special)
        assert ours.encode(text, add_special_tokens=special) == ids
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)


def test_bos_is_not_doubled(byte_level: Tokenizer) -> None:
    bos = byte_level.bos_token_id
    assert byte_level.encode("a", add_special_tokens=True)[0] == bos
    rendered = byte_level.render_chat([ChatMessage("user", "hi")])
    with_bos = byte_level.encode(rendered, add_special_tokens=True)
    assert with_bos == byte_level.encode(rendered, add_special_tokens=False)
    assert with_bos.count(bos) == 1  # type: ignore[arg-type]
    # Two in the text are the client's wish.
    assert byte_level.encode("<s><s>a", add_special_tokens=True).count(bos) == 2  # type: ignore[arg-type]


def test_a_bos_of_the_text_is_not_doubled_where_the_end_is_cut(byte_level: Tokenizer) -> None:
    text = "<s>" + "a b c d " * 9
    whole = byte_level.encode(text, add_special_tokens=True)
    assert byte_level.encode_within(text, 8) == whole[:8]


def test_chat_is_the_template_of_the_checkpoint(byte_level: Tokenizer) -> None:
    messages = [ChatMessage("system", "Be brief."), ChatMessage("user", "1+1?")]
    assert byte_level.has_chat_template
    assert byte_level.render_chat(messages) == "<s><|system|>Be brief.<|user|>1+1?<|assistant|>"


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ([ChatMessage("wizard", "hi")], "unknown role wizard"),
        ([ChatMessage("user", "\ud800")], "surrogate"),
        ([ChatMessage("user", "x" * (module.MAX_CHAT_CHARS + 1))], "more than"),
    ],
    ids=["empty", "refused", "surrogate", "large"],
)
def test_bad_chats_name_the_field(byte_level: Tokenizer, messages: list[ChatMessage], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason) as caught:
        byte_level.render_chat(messages)
    assert [violation.field for violation in caught.value.violations] == ["chat"]


def test_model_without_a_template(tokenizers: dict[str, Tokenizer]) -> None:
    assert not tokenizers["metaspace"].has_chat_template
    with pytest.raises(InvalidRequest, match="no chat template"):
        tokenizers["metaspace"].render_chat([ChatMessage("user", "hi")])


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ messages[0]['content'] * 100000 }}", "once rendered"),
        ("{{ messages[9]['content'] }}", "cannot render"),
        ("{{ messages[0].__class__.__mro__[1].__subclasses__() }}", "cannot render"),
        ("{% for m in messages %}", "cannot render"),
        ("{{ 1 // 0 }}", "cannot render"),
        ("{{ raise_exception('') }}", "cannot render"),
    ],
    ids=["bomb", "index", "sandbox", "syntax", "python error", "no words"],
)
def test_templates_that_fail(tmp_path: Path, template: str, reason: str) -> None:
    tokenizer = Tokenizer.load(byte_level(tmp_path / "model", template))
    with pytest.raises(InvalidRequest, match=reason) as caught:
        tokenizer.render_chat([ChatMessage("user", "x" * 100)])
    assert [violation.field for violation in caught.value.violations] == ["chat"]
    told = caught.value.message
    assert str(tmp_path) not in told and "Error" not in told and "object" not in told


@pytest.mark.parametrize("text", ["\ud800", "ok \udfff", "\udc80\ud83d"])
def test_lone_surrogates(text: str, tokenizers: dict[str, Tokenizer]) -> None:
    for tokenizer in tokenizers.values():
        with pytest.raises(InvalidRequest, match="surrogate") as caught:
            tokenizer.encode(text, add_special_tokens=True)
        assert [violation.field for violation in caught.value.violations] == ["text"]


def _copy(source: Path, target: Path, **changed: bytes | None) -> Path:
    shutil.copytree(source, target)
    for name, content in changed.items():
        path = target / name.replace("__", ".")
        if content is None:
            path.unlink()
        else:
            path.write_bytes(content)
    return target


def _failure(directory: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        Tokenizer.load(directory)
    told = caught.value.message
    assert "\n" not in told and len(told) < 400 + len(str(directory))
    assert str(directory) in told
    assert caught.value.exit_code == 3
    return told


def test_unreadable_checkpoints(tmp_path: Path, families: dict[str, Path]) -> None:
    good = families["byte_level"]
    assert "no model directory" in _failure(tmp_path / "nowhere")
    assert "no model directory" in _failure(good / "tokenizer.json")
    (tmp_path / "empty").mkdir()
    assert "no tokenizer files" in _failure(tmp_path / "empty")
    whole = (good / "tokenizer.json").read_bytes()
    broken = {
        "truncated": {"tokenizer__json": whole[: len(whole) // 2]},
        "other": {"tokenizer__json": b'{"a": 1}'},
        "binary": {"tokenizer__json": b"\xff\xfe\x00"},
        "config": {"tokenizer_config__json": b"[1"},
        "absent": {"tokenizer__json": None},
    }
    for name, changed in broken.items():
        assert "cannot read the tokenizer" in _failure(_copy(good, tmp_path / name, **changed))  # type: ignore[arg-type]


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path, families: dict[str, Path]) -> None:
    config = json.loads((families["byte_level"] / "tokenizer_config.json").read_text())
    config |= {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    path = _copy(families["byte_level"], tmp_path / "evil", tokenizer_config__json=json.dumps(config).encode())
    (path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    assert "cannot read the tokenizer" in _failure(path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("family", ["byte_level", "byte_fallback", "pure_python"])
def test_many_threads_at_once(family: str, tokenizers: dict[str, Tokenizer]) -> None:
    """Encoding, decoding, streaming and rendering together; the Rust tokenizer must never be found borrowed."""
    tokenizer = tokenizers[family]
    text = " ".join(TEXTS[:4]) * 6
    ids = tokenizer.encode(text, add_special_tokens=True)
    decoded = tokenizer.decode(ids, True)

    def work(number: int) -> None:
        for _ in range(5):
            assert tokenizer.encode(text, add_special_tokens=True) == ids
            assert tokenizer.decode(ids, True) == decoded
            detokenizer = IncrementalDetokenizer(tokenizer, [], True)
            assert detokenizer.feed(ids[:300]) + detokenizer.finish() == tokenizer.decode(ids[:300], True)
            if tokenizer.has_chat_template:
                assert str(number) in tokenizer.render_chat([ChatMessage("user", str(number))])

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_truncation_and_padding_of_the_checkpoint_are_switched_off(tmp_path: Path, families: dict[str, Path]) -> None:
    """Some published tokenizers come with both on; a prompt must arrive whole."""
    theirs = AutoTokenizer.from_pretrained(families["byte_level"], local_files_only=True)
    theirs.backend_tokenizer.enable_truncation(max_length=4)
    theirs.backend_tokenizer.enable_padding(length=64)
    theirs.save_pretrained(tmp_path / "model")
    ours, plain = Tokenizer.load(tmp_path / "model"), Tokenizer.load(families["byte_level"])
    for text in ("hello", "hello world " * 30):
        assert ours.encode(text, add_special_tokens=False) == plain.encode(text, add_special_tokens=False)


def test_a_cut_asks_for_the_ids_of_a_text_a_few_times(tmp_path: Path) -> None:
    """Each time the library makes a list of all of them, and nothing else runs meanwhile."""
    ours = Tokenizer.load(byte_level(tmp_path))
    backend, asked = ours.backend, list[str]()

    class Watched:
        def __init__(self, encoding: Any) -> None:
            self.encoding = encoding

        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(self.encoding, name)

    class Backend:
        def encode_batch_fast(self, *given: Any, **options: Any) -> list[Any]:
            return [*map(Watched, backend.encode_batch_fast(*given, **options))]  # type: ignore[union-attr]

        def encode_batch(self, *given: Any, **options: Any) -> list[Any]:
            return [*map(Watched, backend.encode_batch(*given, **options))]  # type: ignore[union-attr]

    text = "a fox " * 300
    expected = ours.encode_within(text, 200)
    ours.backend = Backend()  # type: ignore[assignment]
    assert ours.encode_within(text, 200) == expected and len(expected) == 200
    assert len(asked) < 10
