"""Log probabilities in columns read as the objects that went in, however they are put together, cut and taken."""

from __future__ import annotations

import gc
import tracemalloc
from array import array

from hypothesis import example, given
from hypothesis import strategies as st

from core.types.io import TokenLogprob
from core.types.logprobs import TokenLogprobs

numbers = st.floats(width=32, allow_nan=False)
ids = st.integers(0, 2**31 - 1)
tops = st.lists(st.tuples(ids, numbers), max_size=3).map(tuple)


chosen = st.lists(numbers, max_size=2).map(tuple)
entries = st.lists(st.builds(TokenLogprob, ids, numbers, tops, chosen))

ONE, TWO = TokenLogprob(1, -1.0, ((2, -2.0),), (-6.0,)), TokenLogprob(3, -3.0, ((4, -4.0), (5, -5.0)), (-7.0,))
OF_A_PROMPT = TokenLogprob(6, -1.5, ((7, -2.5),))


@given(entries, entries, st.integers(0, 8), st.integers(0, 8))
@example([ONE, TWO], [TWO, ONE], 1, 3)
@example([OF_A_PROMPT, OF_A_PROMPT, ONE], [OF_A_PROMPT, TWO], 2, 4)
def test_columns_are_a_sequence_of_entries(first: list[TokenLogprob], more: list[TokenLogprob], a: int, b: int) -> None:
    kept = TokenLogprobs(first)
    kept.extend(TokenLogprobs(more))
    model = first + more
    assert kept == model and list(kept) == model and len(kept) == len(model)
    assert kept[a:b] == model[a:b] and kept[a:] == model[a:] and kept[::2] == model[::2]
    for place in range(-len(model), len(model)):
        assert kept[place] == model[place]
    taken = kept.moved()
    assert taken == model and not kept
    count = min(a, len(model))
    taken.cut(count)
    taken.extend(first)
    assert taken == model[:count] + first


def test_what_it_says_it_holds_is_what_it_holds() -> None:
    """100 tokens of 64 alternatives and 64 chosen ids: 77 KiB and room to grow; alternatives as objects took 900."""

    def filled() -> tuple[TokenLogprobs, int]:
        before = tracemalloc.get_traced_memory()[0]
        kept = TokenLogprobs()
        for token in range(100):
            sixty_four = array("f", [-1.0] * 64).tobytes()
            kept.add(token, -0.5, array("i", range(64)).tobytes(), sixty_four, sixty_four)
        return kept, tracemalloc.get_traced_memory()[0] - before

    gc.collect()
    tracemalloc.start()
    try:
        # Threads that other tests left allocate too, so that of several tries the least is the truth.
        kept, held = min((filled() for _ in range(5)), key=lambda found: found[1])
    finally:
        tracemalloc.stop()
    assert 100 * (64 * 12 + 16) <= held <= kept.held_bytes * 1.05 <= 105_000
    assert kept[99].top[63] == (63, -1.0) and kept[99].chosen == (-1.0,) * 64
