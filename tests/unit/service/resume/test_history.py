"""What a history that was trimmed can still tell, and to whom."""

from __future__ import annotations

import pytest

from core.types.io import Delta
from service.errors import PositionTooOld
from service.resume.history import History
from service.wire.position import Position

TOKENS, EACH = 4000, 100


@pytest.mark.parametrize(
    ("keeps_text", "place"),
    [(False, Position()), (True, Position()), (True, Position(TOKENS, 0)), (True, Position(0, TOKENS))],
    ids=["ids alone", "from the start", "text behind", "ids behind"],
)
def test_a_place_before_what_is_kept_of_ids_or_of_text_is_too_old(keeps_text: bool, place: Position) -> None:
    history = History(1, keeps_text)
    for at in range(0, TOKENS, EACH):
        history.add(Delta(0, at, (7,) * EACH, "x" * EACH))
    history.refuse([place])
    assert history.trim() > 0
    with pytest.raises(PositionTooOld):
        history.refuse([place])
    history.refuse(history.ends())
