"""What an engine does when it is held still, as its API describes it: plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

WEIGHT_VERSION: Final = re.compile(r"[A-Za-z0-9._:/@+-]{1,128}")
"""Names of weights: an HTTP header, a label of a metric and a path may hold them as they are."""


CONTROL_BUSY: Final = "CONTROL_BUSY"
"""The `reason` of Overloaded while weights are updated, or the engine falls asleep or wakes."""


class Activity(Enum):
    """Whether an engine that is READY plans steps."""

    SERVING = "serving"
    PAUSED = "paused"
    """No step is planned; what runs and waits stays as it is."""
    REFUSING = "refusing"
    """Paused, and requests are refused."""
    ASLEEP = "asleep"
    """Paused, and without the memory of its pools. On an accelerator without its weights too."""

    @property
    def invites(self) -> bool:
        """Whether new requests are welcome: another replica would have them wait less."""
        return self in (Activity.SERVING, Activity.PAUSED)


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Where new weights are: a directory `path` below the configured one, or a model of the hub by `name`."""

    path: str = ""
    name: str = ""


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """What an update did."""

    version: str
    replaced: str
    """The version that was served before."""
    load_seconds: float
    """Reading and proving the new weights, beside serving the old ones."""
    held_seconds: float
    """Between the last step with the old weights and the first that may have the new ones."""
    restarted: int
    """Running requests whose keys and values the new weights compute again."""


@dataclass(frozen=True, slots=True)
class Nap:
    """What an engine gave up to sleep."""

    freed_bytes: int
    """Of device memory."""
    live_requests: int
    """Streams that wait until it wakes."""
