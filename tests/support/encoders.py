"""Tiny encoders with a tokenizer that joins pairs, and what transformers makes of texts by them."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from core.types.io import Pooling

LONGEST = 128
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
PAD, UNK, CLS, SEP, MASK = range(5)

_BERT: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "pad_token_id": PAD,
}
_ROBERTA = {**_BERT, "type_vocab_size": 1, "max_position_embeddings": LONGEST + 1}

ENCODERS: dict[str, dict[str, Any]] = {
    "bert": _BERT,
    "roberta": _ROBERTA,
    "xlm-roberta": _ROBERTA,
    "camembert": _ROBERTA,
    "modernbert": {**_BERT, "local_attention": 8, "global_attn_every_n_layers": 2, "num_hidden_layers": 4},
    "distilbert": {
        "vocab_size": 320,
        "dim": 64,
        "hidden_dim": 96,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": LONGEST,
        "pad_token_id": PAD,
    },
    "electra": {**_BERT, "embedding_size": 32},
    "albert": {**_BERT, "embedding_size": 32, "num_hidden_groups": 1},
    # Whatever its configuration says, it counts positions by the tokens that are not number 1.
    "mpnet": {**_BERT, "max_position_embeddings": LONGEST + 2, "pad_token_id": 1},
    "deberta": {**_BERT, "type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {
        **_BERT,
        "type_vocab_size": 0,
        "relative_attention": True,
        "position_buckets": 16,
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "norm_rel_ebd": "layer_norm",
        "position_biased_input": False,
    },
    "data2vec-text": _ROBERTA,
    "ernie": _BERT,
    "roberta-prelayernorm": _ROBERTA,
    "xlm-roberta-xl": _ROBERTA,
    "nomic_bert": _BERT,
    "gte": _BERT,
    "jina_embeddings_v3": _BERT,
    "eurobert": {**_BERT, "num_key_value_heads": 2},
    "megatron-bert": _BERT,
    "ibert": {**_ROBERTA},
    "rembert": {**_BERT, "input_embedding_size": 32, "output_embedding_size": 32},
    "convbert": _BERT,
    "mobilebert": {**_BERT, "embedding_size": 32, "intra_bottleneck_size": 32, "true_hidden_size": 32},
    "roformer": _BERT,
    "gemma3_text": {
        **_BERT,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "use_bidirectional_attention": True,
    },
}
"""Configuration of a small model of each type; the last one is a decoder that is told to see both ways."""

AUTO = {
    "": AutoModel,
    "ForSequenceClassification": AutoModelForSequenceClassification,
    "ForMaskedLM": AutoModelForMaskedLM,
}


def make_encoder(kind: str, directory: Path | str, suffix: str = "", seed: int = 0, **overrides: Any) -> Path:
    """Write an encoder of `kind`, of the class named with `suffix`, and its tokenizer; returns `directory`."""
    transformers_logging.disable_progress_bar()
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = AutoConfig.for_model(kind, **{**ENCODERS[kind], **overrides})
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AUTO[suffix].from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.15 if parameter.dim() > 1 else 0.05)
    model.save_pretrained(path)
    encoder_tokenizer().save_pretrained(path)
    return path


@cache
def encoder_tokenizer() -> PreTrainedTokenizerFast:
    """Every byte is a token; a text stands between [CLS] and [SEP], and of a pair the second one has type 1."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    core = Tokenizer(models.BPE(vocab, [], unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.add_special_tokens(list(SPECIAL))
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    names = dict(zip(("pad_token", "unk_token", "cls_token", "sep_token", "mask_token"), SPECIAL, strict=True))
    return PreTrainedTokenizerFast(
        tokenizer_object=core, model_input_names=["input_ids", "token_type_ids", "attention_mask"], **names
    )


@torch.no_grad()
def encoded_by_hand(directory: Path, prompts: Sequence[tuple[int, ...]]) -> list[dict[Pooling, np.ndarray]]:
    """float32[H] per pooling and prompt, not normalised, as transformers gives them one text at a time."""
    model = AutoModel.from_pretrained(directory, dtype=torch.float32).eval()
    found = []
    for prompt in prompts:
        states = model(input_ids=torch.tensor([prompt])).last_hidden_state[0]
        found.append(
            {Pooling.MEAN: states.mean(0).numpy(), Pooling.LAST: states[-1].numpy(), Pooling.CLS: states[0].numpy()}
        )
    return found


@torch.no_grad()
def pairs_by_hand(directory: Path, pairs: Sequence[tuple[str, str]], **options: Any) -> list[np.ndarray]:
    """float32[L] of each pair, as the tokenizer, with `options`, and the model of transformers judge it."""
    model = AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(directory)
    takes = set(inspect.signature(model.forward).parameters)
    if getattr(model.config, "type_vocab_size", 2) < 2:
        takes.discard("token_type_ids")
    found = []
    for pair in pairs:
        given = {
            name: value for name, value in tokenizer(*pair, return_tensors="pt", **options).items() if name in takes
        }
        found.append(model(**given).logits[0].numpy())
    return found
