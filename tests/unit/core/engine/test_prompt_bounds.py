"""Where the ids of prompts end: at the vocabulary and at the context."""

from __future__ import annotations

import numpy as np
import pytest

from core.engine.prompt_bounds import PromptBounds
from core.errors import InvalidRequest

BOUNDS = PromptBounds(vocab_size=10, max_input=5)


@pytest.mark.parametrize("bad", [10, 11, -1, 2**62, -(2**63)])
def test_the_first_id_beyond_the_vocabulary_is_refused_and_all_behind_it(bad: int) -> None:
    ids = np.array([9, bad, 0])
    with pytest.raises(InvalidRequest) as refused:
        BOUNDS.refuse_foreign_ids("token_ids", ids)
    assert [each.field for each in refused.value.violations] == ["token_ids[1]"]
    with pytest.raises(InvalidRequest, match=f"has token {bad}"):
        BOUNDS.refuse_unservable("text", ids)


def test_ids_of_the_vocabulary_are_taken_up_to_the_longest_prompt() -> None:
    ids = np.array([0, 9, 1, 8, 0])
    BOUNDS.refuse_foreign_ids("token_ids", ids)
    BOUNDS.refuse_unservable("text", ids)
    with pytest.raises(InvalidRequest, match="has 6 tokens"):
        BOUNDS.refuse_unservable("text", np.append(ids, 3))
