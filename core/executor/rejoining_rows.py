"""Rows that come from host memory: made, on the forward stream, what the step before would have left of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from core.device.staging import Staging
from core.executor.device_state import DeviceState
from core.memory.host_moves import CopyBack, Rejoined
from core.relay.payload import RelayPayload


def carried(backs: Sequence[CopyBack]) -> list[np.ndarray]:
    """Host arrays that `bring_back` is going to upload: those very objects."""
    return [array for back in backs for array in back.arrays]


def bring_back(state: DeviceState, backs: Sequence[CopyBack], staging: Staging) -> None:
    """Copy what host memory has of rows into their slots. Those that decode at once get their places in the FutureMap.

    Right after `forget`, before anything of the step reads: a step that decodes such a row finds its newest token and
    its length where those of any other row are. `staging`: may have what is `carried` on the device already.
    """
    assert state.host is not None, "what comes back was copied out"
    for back in backs:
        state.host.copy_back(back, staging)
    seats = [back.seat for back in backs if isinstance(back, Rejoined)]
    if not seats:
        return
    rows, lens, newest = torch.stack(staging.upload(seats), 1)
    state.future_map.publish(rows, lens)
    state.future_map.stash(rows, RelayPayload(newest))
