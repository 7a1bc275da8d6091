"""A request whose prompt one engine computes and whose outputs another one makes: what each of the two is told."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class HandOver:
    """The prompt is computed, and its keys are kept in `room` for the engine that decodes; empty: a room is drawn."""

    room: str = ""


@dataclass(frozen=True, slots=True)
class TakeOver:
    """Keys of the prompt are in `room` of the engine at `host` and `port`, or will be.

    `engine_id`: of that engine; empty where the two are asked at the same time, so that the room may not be there yet.
    """

    host: str
    port: int
    room: str
    engine_id: str = ""


@dataclass(frozen=True, slots=True)
class Handed:
    """Where the keys of a prompt are: what the engine that decodes must be told."""

    room: str
    host: str
    port: int
    engine_id: str
    tokens: int


@dataclass(frozen=True, slots=True)
class Kept:
    """Of a sequence whose keys are handed over: the room, and what an engine that asks for it has to know."""

    room: str
    claim: str


def claim_of(prompt: npt.NDArray[np.int64], adapter: str) -> str:
    """A digest of `prompt`, int64[n], and of `adapter`, itself a digest of weights; a room is of one salt.

    Rooms of an SGLang gateway are 31 bits that can be guessed. Only a request that has the same prompt gets its keys.
    """
    encoded = adapter.encode()
    digest = hashlib.sha256(len(encoded).to_bytes(8, "little") + encoded)
    digest.update(np.ascontiguousarray(prompt, np.int64).tobytes())
    return digest.hexdigest()
