"""What a grammar library must know of the vocabulary, as plain data that can be sent to another process."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import tokenizers

from core.types.grammar import Words

END = "<|end of the constrained output|>"


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens of a served model. `end_ids` may end an output; `virtual_end`: the model has none, the id is made up."""

    tokenizer_json: str
    """The Rust tokenizer, serialised; with the made-up end token if there is one."""
    size: int
    """Ids, those of the model without a token included."""
    model_size: int
    """Logits of the model: masks are this wide."""
    end_ids: tuple[int, ...]
    virtual_end: bool

    @classmethod
    def of(cls, backend: tokenizers.Tokenizer, model_size: int, ends: tuple[int, ...]) -> Vocabulary:
        """`ends` are ids below `model_size`.

        Libraries cannot do without an end token, so a model that has none gets one outside of what it can sample.
        """
        copy = tokenizers.Tokenizer.from_str(backend.to_str())
        if not ends:
            copy.add_special_tokens([END])
        size = copy.get_vocab_size(with_added_tokens=True)
        if not ends:
            end = copy.token_to_id(END)
            assert end is not None, "it was added just now"
            return cls(copy.to_str(), max(size, model_size), model_size, (end,), True)
        return cls(copy.to_str(), max(size, model_size), model_size, ends, False)

    @property
    def words(self) -> int:
        """Words of a mask over `size` ids; even, so that masks can travel as int64."""
        return -(-self.size // 64) * 2

    def cut(self, words: Words) -> None:
        """Clear in int32[..., W] what the model cannot sample: the made-up end, and ids beyond its logits."""
        if self.virtual_end:
            end = self.end_ids[0]
            words[..., end >> 5] &= ~np.int32(np.uint32(1 << (end & 31)).astype(np.int32))
        whole, rest = divmod(self.model_size, 32)
        words[..., whole + bool(rest) :] = 0
        if rest:
            words[..., whole] &= np.int32((1 << rest) - 1)
