"""Tokenizers of every family the detokenizer has to get right, trained here in a moment, loaded as checkpoints are."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world!",
    "def add(x, y):\n    return x + y\n\nfor i in range(10):\n\tprint(f'{i}: {add(i, 1)}')",
    "Größe, naïve café, ça va? Привет, мир! γειά σου",
    "世界你好,这是一个测试。こんにちは世界。안녕하세요",
    "emoji 😀 👩‍👩‍👧 🇨🇭 and combining e\u0301 a\u030a, zero\u200bwidth",
] * 20

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m['role'] not in ('system', 'user', 'assistant') %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

SPECIAL = ["<unk>", "<s>", "</s>"]


def _save(core: Tokenizer, directory: Path, chat_template: str | None) -> Path:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=core,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
    )
    fast.save_pretrained(directory)
    return directory


def byte_level(directory: Path, chat_template: str | None = CHAT_TEMPLATE) -> Path:
    """As GPT-2, Llama 3, Qwen: tokens are pieces of UTF-8, so characters fall apart between tokens."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(vocab_size=420, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(core, directory, chat_template)


def byte_fallback(directory: Path) -> Path:
    """As Llama 2, Mistral, Gemma: words with ▁ in front, and one token per byte for what the vocabulary lacks."""
    core = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    core.train_from_iterator(
        [text.encode("ascii", "ignore").decode() for text in CORPUS],
        trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL + bytes_, show_progress=False),
    )
    built = json.loads(core.to_str())
    # The trainer can only be told of them as special tokens; in such checkpoints they are plain entries.
    built["added_tokens"] = [token for token in built["added_tokens"] if token["content"] in SPECIAL]
    core = Tokenizer.from_str(json.dumps(built))
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    core.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return _save(core, directory, None)


def metaspace(directory: Path) -> Path:
    """As T5 and XLNet: a unigram model whose decoder drops the first token's space."""
    core = Tokenizer(models.Unigram())
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.train_from_iterator(
        CORPUS, trainers.UnigramTrainer(vocab_size=300, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    )
    return _save(core, directory, None)


def word_piece(directory: Path) -> Path:
    """As BERT: continuation marks instead of spaces."""
    core = Tokenizer(models.WordPiece(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+|[^\w\s]"), "isolated")
    core.decoder = decoders.WordPiece(cleanup=False)
    core.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=400, special_tokens=SPECIAL, show_progress=False)
    )
    return _save(core, directory, None)


def pure_python(directory: Path) -> Path:
    """A tokenizer without a Rust backend."""
    ByT5Tokenizer().save_pretrained(directory)
    return directory


FAMILIES = {
    "byte_level": byte_level,
    "byte_fallback": byte_fallback,
    "metaspace": metaspace,
    "word_piece": word_piece,
    "pure_python": pure_python,
}
