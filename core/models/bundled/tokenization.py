"""The bundled model's tokenizer: byte-level BPE with one token per digit.

All 256 bytes are in the vocabulary, so any UTF-8 text round-trips, seen in training or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from core.models.bundled.corpus import (
    ASSISTANT,
    BOS,
    END,
    EOS,
    KIND_SHARES,
    PAD,
    SYSTEM,
    USER,
    documents_of,
)

VOCAB_SIZE = 704  # below the ~760 at which the corpus runs out of pairs to merge
MAX_POSITIONS = 2048
SAMPLE_SEED = 11
SAMPLE_PER_KIND = 2_000

# The order fixes the ids: pad is 0, so a zeroed buffer is a padded one.
SPECIAL_TOKENS = [PAD, BOS, EOS, SYSTEM, USER, ASSISTANT, END]

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] == 'system' %}<|system|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'user' %}<|user|>{{ message['content'] }}<|end|>"
    "{% elif message['role'] == 'assistant' %}<|assistant|>{{ message['content'] }}{{ eos_token }}"
    "{% else %}{{ raise_exception('unknown role: ' + message['role']) }}"
    "{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def _ascii_sample() -> Iterator[str]:
    """Text to learn merges from: no special tokens, and ASCII only (see `story` for the reason)."""
    for kind in KIND_SHARES:
        for found in islice(documents_of(kind, SAMPLE_SEED), SAMPLE_PER_KIND):
            for turn in found.turns:
                text = turn.prompt + turn.answer
                yield text.encode("ascii", "ignore").decode("ascii")


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Learn the tokenizer from the corpus; the result depends on nothing but this file's seeds."""
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # A merged "46" would hide its digits from the model, which must add them one by one.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        _ascii_sample(),
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    core.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A",
        pair=f"{BOS} $A $B",
        special_tokens=[(BOS, core.token_to_id(BOS))],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        additional_special_tokens=[SYSTEM, USER, ASSISTANT, END],
        chat_template=CHAT_TEMPLATE,
        model_max_length=MAX_POSITIONS,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
