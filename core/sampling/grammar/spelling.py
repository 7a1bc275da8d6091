"""A copy of the tokenizer for grammar libraries, in which no text spells a special token.

A library uses the tokenizer to split text that a grammar forces, and a tokenizer also finds special tokens in text. So
a constraint that quotes `<|eos|>` would force the end of the output where it should only print those characters.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import tokenizers


def spelling_of(backend: tokenizers.Tokenizer, model_size: int) -> tokenizers.Tokenizer:
    """A copy of `backend` that splits text only into tokens that the model can sample, and into no special token.

    Special tokens keep their ids and get random names. Ids of `model_size` and above are removed: the model has no
    logits for them, so their text must be split into other tokens.
    """
    told: dict[str, Any] = json.loads(backend.to_str())
    told |= {"post_processor": None, "truncation": None, "padding": None}
    names: dict[str, str] = {}
    kept = [token for token in told["added_tokens"] if token["id"] < model_size]
    for token in kept:
        if token["special"]:
            names[token["content"]] = token["content"] = special_name(str(token["id"]))
    told["added_tokens"] = kept
    _rename(told["model"], names, model_size)
    return tokenizers.Tokenizer.from_str(json.dumps(told))


def special_name(of: str) -> str:
    """A name for a special token that no constraint can quote."""
    return f"<|special {of} {secrets.token_hex(16)}|>"


def _rename(model: dict[str, Any], names: dict[str, str], size: int) -> None:
    """Rename pieces by `names` in `model`, a serialised tokenizer. Removes ids from `size` on, and merges to them."""
    pieces = model.get("vocab", {})
    if isinstance(pieces, dict):
        model["vocab"] = {names.get(piece, piece): index for piece, index in pieces.items() if index < size}
    else:  # of Unigram: pieces and their scores, by id
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in pieces[:size]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        known, prefix = model["vocab"], model.get("continuing_subword_prefix") or ""
        pairs = (merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"])
        model["merges"] = [[a, b] for a, b in pairs if {a, b, a + b.removeprefix(prefix)} <= known.keys()]
