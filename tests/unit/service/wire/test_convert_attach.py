"""Where a client wants to go on, read from its message: by output, or refused with every bad field named."""

from __future__ import annotations

import pytest

from core.errors import InvalidRequest
from core.types.sampling_params import MAX_N
from service.pb.slipstream.v1 import inference_pb2 as pb
from service.wire.attach import positions
from service.wire.position import Position


def test_places_are_read_by_output() -> None:
    message = pb.AttachRequest(
        request_id="mine",
        positions=[
            pb.AttachPosition(index=3, tokens=5, text_bytes=7, finished=True),
            pb.AttachPosition(index=0, tokens=0, text_bytes=2),
        ],
    )
    assert positions(message) == {3: Position(5, 7, True), 0: Position(0, 2, False)}


def test_every_bad_field_is_named_at_once() -> None:
    message = pb.AttachRequest(
        positions=[
            pb.AttachPosition(index=1, tokens=-1, text_bytes=-1),
            pb.AttachPosition(index=-1),
            pb.AttachPosition(index=1),
        ]
    )
    with pytest.raises(InvalidRequest) as refused:
        positions(message)
    assert [each.field for each in refused.value.violations] == [
        "request_id",
        "positions[0].tokens",
        "positions[0].text_bytes",
        "positions[1].index",
        "positions[2].index",
    ]


def test_more_places_than_outputs_are_refused_unread() -> None:
    many = [pb.AttachPosition(index=index) for index in range(MAX_N + 1)]
    with pytest.raises(InvalidRequest) as refused:
        positions(pb.AttachRequest(request_id="mine", positions=many))
    assert [each.field for each in refused.value.violations] == ["positions"]
    assert len(positions(pb.AttachRequest(request_id="mine", positions=many[:-1]))) == MAX_N
