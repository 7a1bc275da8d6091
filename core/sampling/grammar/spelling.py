"""The tokenizer as a grammar library may know it: ordinary tokens, and special ones that no text spells.

A library splits text that a grammar forces into tokens, by the tokenizer, and a tokenizer finds its special tokens in
text as well. A constraint that quotes `<|eos|>` would then force the end of the output, in the middle of it.
"""

from __future__ import annotations

import json
import secrets
from typing import Any

import tokenizers


def spelling_of(backend: tokenizers.Tokenizer, model_size: int) -> tokenizers.Tokenizer:
    """A copy of `backend` that splits text into what the model can sample, and into no special token.

    Special tokens keep their ids, and have names that are drawn here. Ids of `model_size` and above are gone: the model
    has no logits for them, and text that they spell has to be spelled by others.
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
    """In `model`, as a tokenizer serialises it; pieces of ids from `size` on are left out, and what merges to them."""
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
