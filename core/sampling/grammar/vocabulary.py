"""The facts that a grammar library needs about the vocabulary, as plain data that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import tokenizers

from core.sampling.grammar.spelling import special_name, spelling_of
from core.types.grammar import Words


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a served model. `end_ids` end an output. `virtual_end`: the model has no end id; one is made up."""

    tokenizer_json: str
    """The tokenizer as `spelling_of` returns it, plus the made-up end token if there is one."""
    size: int
    """Number of ids: all logits of the model, also those without a token, and the made-up end if there is one."""
    model_size: int
    """Number of logits of the model."""
    end_ids: tuple[int, ...]
    virtual_end: bool
    marks: dict[str, int] = field(default_factory=dict)
    """Ids of the added tokens that the model can sample, by their texts."""

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, model_size: int, ends: tuple[int, ...]) -> Vocabulary:
        """The vocabulary of a model with `model_size` logits and the end ids `ends`, all below `model_size`.

        Libraries need an end token, so a model without one gets an id that it cannot sample.
        """
        copy = spelling_of(backend, model_size)
        added = backend.get_added_tokens_decoder().items()
        marks = {token.content: index for index, token in added if token.content and index < model_size}
        if ends:
            return cls(copy.to_str(), model_size, model_size, ends, False, marks)
        name = special_name("end")
        copy.add_special_tokens([name])
        end = copy.token_to_id(name)
        assert end is not None and end <= model_size, "it was added just now, behind tokens of the model"
        return cls(copy.to_str(), max(end + 1, model_size), model_size, (end,), True, marks)

    @property
    def words(self) -> int:
        """Words of a mask over `size` ids; even, so that masks can travel as int64."""
        return -(-self.size // 64) * 2

    def cut(self, words: Words) -> None:
        """Clear in int32[..., W] the bits of ids that the model cannot sample: a made-up end, ids beyond its logits."""
        if self.virtual_end:
            end = self.end_ids[0]
            words[..., end >> 5] &= ~np.int32(np.uint32(1 << (end & 31)).astype(np.int32))
        whole, rest = divmod(self.model_size, 32)
        words[..., whole + bool(rest) :] = 0
        if rest:
            words[..., whole] &= np.int32((1 << rest) - 1)
