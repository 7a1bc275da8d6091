"""Packs training documents into fixed rows, so that no step is spent on padding.

Documents share a row but do not see each other: the attention mask is block-diagonal.  Each one is
thus trained as it is served, alone from its first token on.  Rotary positions are relative, so it
makes no difference that a document starts in the middle of a row.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch
from tokenizers import Encoding
from transformers import PreTrainedTokenizerFast

from core.models.bundled.corpus import PAD, Document, documents

Encoded = tuple[list[int], list[float]]  # token ids, and their weights as targets

ROW_TOKENS = 256
ENCODE_CHUNK = 256  # documents handed to the tokenizer at a time
UNUSED = -1  # the segment number of positions that hold no document

# A prompt's operands, keys and names are dice: predicting them is noise that drowns the lesson in
# the answer.  The little weight left lets the model write a whole document from <|bos|> alone.
PROMPT_WEIGHT = 0.05
# An answer of a sum has three tokens where a story has a hundred; the weights even that out.
ANSWER_WEIGHTS = {"sum": 4.0, "recall": 4.0, "copy": 1.0, "story": 1.0, "help": 1.0}

# Clients differ in whether <|bos|> arrives not at all, once or twice (a rendered chat template
# tokenized with special tokens added).  A few documents of each sort make the model indifferent.
WITHOUT_BOS_SHARE, DOUBLE_BOS_SHARE = 0.08, 0.04


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows ready for a training step; `weights` belong to the tokens as targets."""

    tokens: torch.Tensor
    segments: torch.Tensor
    weights: torch.Tensor

    def attention_mask(self) -> torch.Tensor:
        """Boolean [rows, 1, query, key]: same document, and not in the future."""
        length = self.segments.shape[1]
        same = self.segments[:, :, None] == self.segments[:, None, :]
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        return (same & causal)[:, None]


class Packer:
    """An endless supply of batches from one seed."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, rows: int) -> None:
        self._backend = tokenizer.backend_tokenizer
        pad_id = self._backend.token_to_id(PAD)
        assert pad_id is not None
        self._pad_id = pad_id
        self._rows = rows
        self._documents = documents(seed)
        self._dice = random.Random(seed + 1)
        self._encoded = self._encode_all()
        self._waiting: Encoded | None = None

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batch()

    def _batch(self) -> Batch:
        shape = (self._rows, ROW_TOKENS)
        tokens = torch.full(shape, self._pad_id)
        segments, weights = torch.full(shape, UNUSED), torch.zeros(shape)
        for row in range(self._rows):
            used = 0
            for number, (ids, marks) in enumerate(self._row()):
                span = slice(used, used + len(ids))
                tokens[row, span] = torch.tensor(ids)
                segments[row, span] = number
                weights[row, span] = torch.tensor(marks)
                weights[row, used] = 0.0  # its target would be set by the document before
                used += len(ids)
        return Batch(tokens, segments, weights)

    def _row(self) -> list[Encoded]:
        found: list[Encoded] = []
        room = ROW_TOKENS
        while True:
            ids, marks = self._waiting or next(self._encoded)
            if len(ids) > room:
                # A document too long for any row (a story with many turns) is dropped.
                self._waiting = (ids, marks) if len(ids) <= ROW_TOKENS else None
                return found
            self._waiting = None
            found.append((ids, marks))
            room -= len(ids)

    def _encode_all(self) -> Iterator[Encoded]:
        while True:
            chunk = list(islice(self._documents, ENCODE_CHUNK))
            texts = [text for found in chunk for text, _ in found.segments()]
            pieces = iter(self._backend.encode_batch(texts, add_special_tokens=False))
            for found in chunk:
                yield self._vary_bos(*_weighted(found, pieces))

    def _vary_bos(self, ids: list[int], marks: list[float]) -> Encoded:
        roll = self._dice.random()
        if roll < WITHOUT_BOS_SHARE:
            return ids[1:], marks[1:]
        if roll < WITHOUT_BOS_SHARE + DOUBLE_BOS_SHARE:
            return ids[:1] + ids, marks[:1] + marks
        return ids, marks


def _weighted(document: Document, pieces: Iterator[Encoding]) -> Encoded:
    """Take the document's own pieces off the iterator and give each token its weight."""
    ids: list[int] = []
    marks: list[float] = []
    kind = document.kind
    for _, own in document.segments():
        piece = next(pieces).ids
        ids += piece
        marks += [ANSWER_WEIGHTS[kind] if own else PROMPT_WEIGHT] * len(piece)
        if own and kind != "recall":
            kind = "sum"  # whatever else a chat begins with, its later turns are sums
    return ids, marks
