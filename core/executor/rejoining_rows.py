"""Rows that come from host memory: made, on the forward stream, what the step before would have left of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from core.executor.device_state import DeviceState
from core.memory.host_moves import CopyBack
from core.relay.payload import RelayPayload


def bring_back(state: DeviceState, backs: Sequence[CopyBack]) -> None:
    """Copy what rows computed before they were retracted into their new slots, and seed their places in the FutureMap.

    Right after `forget`, before anything of the step reads: a step that decodes such a row finds its newest token and
    its length where those of any other row are.
    """
    assert state.host is not None, "what comes back was copied out"
    for back in backs:
        state.host.copy_back(back)
    columns = np.array([(back.row, back.copy.tokens, back.newest) for back in backs], np.int64).T
    rows, lens, newest = state.staging.upload([np.ascontiguousarray(column) for column in columns])
    state.future_map.publish(rows, lens)
    state.future_map.stash(rows, RelayPayload(newest))
