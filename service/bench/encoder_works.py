"""What `slipstream bench encoders` measures: shapes of published encoders, and texts of lengths that search has."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModel, AutoModelForSequenceClassification
from transformers.utils import logging

WORDS: Final = 2000
"""Of the vocabulary that is written; each is a token."""
SPECIAL: Final = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")

_BERT: Final = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "minilm": {
        **_BERT,
        "model_type": "bert",
        "hidden_size": 384,
        "num_hidden_layers": 6,
        "intermediate_size": 1536,
    },
    "bert": {**_BERT, "model_type": "bert"},
    "xlm-roberta": {
        **_BERT,
        "model_type": "xlm-roberta",
        "vocab_size": 50000,
        "type_vocab_size": 1,
        "max_position_embeddings": 514,
        "pad_token_id": 1,
    },
    "modernbert": {
        **_BERT,
        "model_type": "modernbert",
        "num_hidden_layers": 22,
        "intermediate_size": 1152,
        "max_position_embeddings": 8192,
    },
    "mpnet": {**_BERT, "model_type": "mpnet", "max_position_embeddings": 514, "pad_token_id": 1},
    "deberta": {
        **_BERT,
        "model_type": "deberta-v2",
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 256,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
    },
    "deberta-v1": {
        **_BERT,
        "model_type": "deberta",
        "type_vocab_size": 0,
        "relative_attention": True,
        "pos_att_type": ["c2p", "p2c"],
        "position_biased_input": False,
    },
    "roformer": {**_BERT, "model_type": "roformer"},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 30522,
        "max_position_embeddings": 512,
        "dim": 768,
        "n_layers": 6,
        "n_heads": 12,
        "hidden_dim": 3072,
    },
    "albert": {**_BERT, "model_type": "albert", "embedding_size": 128},
    "electra": {
        **_BERT,
        "model_type": "electra",
        "embedding_size": 128,
        "hidden_size": 256,
        "num_attention_heads": 4,
        "intermediate_size": 1024,
    },
    "rembert": {**_BERT, "model_type": "rembert", "input_embedding_size": 256},
    "megatron-bert": {**_BERT, "model_type": "megatron-bert"},
    "convbert": {**_BERT, "model_type": "convbert"},
    "mobilebert": {
        **_BERT,
        "model_type": "mobilebert",
        "hidden_size": 512,
        "num_hidden_layers": 24,
        "num_attention_heads": 4,
        "intermediate_size": 512,
    },
    "ibert": {**_BERT, "model_type": "ibert", "max_position_embeddings": 514, "pad_token_id": 1},
}
"""Of all-MiniLM-L6, BERT and its kin, DeBERTa-v3 and the first DeBERTa, and what else attends by itself: base sizes,
but for ELECTRA, which is small, and MobileBERT."""
USUAL: Final = ("minilm", "bert", "xlm-roberta", "modernbert", "mpnet", "deberta")
"""Those that are measured unless others are named."""

Text = str | tuple[str, str]


def save_encoder(shape: Mapping[str, Any], dtype: torch.dtype, directory: Path, *, judges: bool) -> None:
    """Write an encoder of `shape` with random weights and a tokenizer of words, with a head for a label if `judges`."""
    logging.disable_progress_bar()
    fields = dict(shape)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    auto: Any = AutoModel
    if judges:
        config.id2label, auto = {0: "relevance"}, AutoModelForSequenceClassification
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = auto.from_config(config, dtype=dtype)
    model.save_pretrained(directory)
    _tokenizer(int(shape["max_position_embeddings"])).save_pretrained(directory)


def _tokenizer(longest: int) -> PreTrainedTokenizerFast:
    vocab = {token: number for number, token in enumerate((*SPECIAL, *(f"w{n}" for n in range(WORDS))))}
    core = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B [SEP]",
        special_tokens=[("[CLS]", vocab["[CLS]"]), ("[SEP]", vocab["[SEP]"])],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        model_max_length=min(longest, 512),
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def texts_to_embed() -> dict[str, list[Text]]:
    """By name, the texts of one round: of few words as queries have, and of hundreds as passages."""
    draw = random.Random(0)
    return {
        "128 queries": [_text(draw, draw.randint(3, 30)) for _ in range(128)],
        "24 passages": [_text(draw, draw.randint(100, 400)) for _ in range(24)],
    }


def pairs_to_judge() -> dict[str, list[Text]]:
    """By name, the pairs of one round: documents of one query, and pairs of sentences."""
    draw = random.Random(1)
    query = _text(draw, 9)
    return {
        "32 documents": [(query, _text(draw, draw.randint(60, 180))) for _ in range(32)],
        "64 pairs": [(_text(draw, 8), _text(draw, draw.randint(5, 30))) for _ in range(64)],
    }


def _text(draw: random.Random, words: int) -> str:
    return " ".join(f"w{draw.randrange(WORDS)}" for _ in range(words))


def chosen(names: str) -> Sequence[str]:
    """Names of SHAPES in a list with commas. Raises ValueError for another one."""
    found = names.split(",")
    for name in found:
        if name not in SHAPES:
            raise ValueError(f"{name!r} is none of {', '.join(SHAPES)}")
    return found
