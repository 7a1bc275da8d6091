"""What may be a prompt: ids that the model has logits for, of which it takes as many. Every refusal names its field."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from core.errors import InvalidRequest
from core.types.arrays import Ints

CHARS_PER_TOKEN: Final = 64
"""No tokenizer packs more characters into one token on average. Longer prompts are refused before tokenising."""


@dataclass(frozen=True, slots=True)
class PromptBounds:
    """Those of one model. All methods raise InvalidRequest, or nothing."""

    vocab_size: int
    max_input: int
    """Tokens of the longest prompt."""

    @property
    def most_chars(self) -> int:
        """Of a text that may become as many tokens, and of one that is one token too long."""
        return (self.max_input + 1) * CHARS_PER_TOKEN

    def refuse_long(self, chars: int, field: str) -> None:
        """A text that is too long whatever its tokens are."""
        if chars > self.most_chars:
            raise InvalidRequest.of(field, f"must have at most {self.most_chars} characters")

    def refuse_foreign_ids(self, field: str, ids: Ints) -> None:
        """Ids of a client, int64[n], of which one has no logit: the field has its place."""
        bad = self._foreign(ids)
        if len(bad):
            raise InvalidRequest.of(f"{field}[{bad[0]}]", f"must be between 0 and {self.vocab_size - 1}")

    def refuse_unservable(self, field: str, prompt: Ints) -> None:
        """Ids of a text, int64[n]: none, too many, one without a logit (tokenizers may know more than models)."""
        if len(prompt) == 0:
            raise InvalidRequest.of(field, "must not be empty")
        bad = self._foreign(prompt)
        if bad.size:
            text = f"its tokenisation has token {prompt[bad[0]]}, for which the model has no logits"
            raise InvalidRequest.of(field, f"{text}: they are for tokens 0 to {self.vocab_size - 1}")
        if len(prompt) > self.max_input:
            raise InvalidRequest.of(field, f"has {len(prompt)} tokens, but the model takes at most {self.max_input}")

    def _foreign(self, ids: Ints) -> Ints:
        """int64[m]: the places in `ids` of ids that have no logit."""
        # Without a sign, ids below 0 are beyond any vocabulary: one comparison for both.
        found: Ints = (ids.view(np.uint64) >= self.vocab_size).nonzero()[0]
        return found
