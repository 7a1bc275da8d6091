"""The end of a stream: met once, with the first error if there is one."""

from __future__ import annotations

import pytest

from core.engine.streams.stream_end import StreamEnd
from core.errors import Draining, SlowConsumer


def test_a_stream_ends_with_its_last_output() -> None:
    end = StreamEnd(2)
    end.open_outputs -= 1
    assert not end.known and not end.meet()
    end.open_outputs -= 1
    assert end.known and not end.met
    assert end.meet() and end.met and end.meet()


@pytest.mark.parametrize("outputs", [0, 1])
def test_the_first_error_is_raised_once_however_many_outputs_are_open(outputs: int) -> None:
    end = StreamEnd(outputs)
    assert end.fail(SlowConsumer("first")) and not end.fail(Draining("second"))
    assert end.known
    with pytest.raises(SlowConsumer):
        end.meet()
    assert end.meet()


def test_a_reader_that_has_gone_meets_no_error() -> None:
    end = StreamEnd(1)
    end.met = True
    end.fail(Draining("gone"))
    assert end.meet()
