"""Sounds of requests on their way to an encoder: heard off the loop."""

from __future__ import annotations

import numpy as np

from core.engine.workers import Workers
from core.errors import InvalidRequest
from core.text.audio.listener import Listener
from core.types.arrays import Floats, Ints
from core.types.audio import DEAF, HEARS, Audio
from core.types.io import GenerateRequest


class AudioInputs:
    """Makes prompts of sounds for one engine. Event-loop thread only."""

    def __init__(self, listener: Listener | None = None, start: tuple[int, ...] = (), why: str = DEAF) -> None:
        """`start`: what the decoder begins with. Without a listener, sounds are refused; `why`: what is said then."""
        self._listener = listener
        self._start = start
        self._why = why
        self._workers = Workers(1, "slipstream-audio")

    @property
    def hears(self) -> bool:
        """Whether sounds can be served, and nothing else."""
        return self._listener is not None

    def refuse_others(self, request: GenerateRequest, field: str) -> None:
        """Raises InvalidRequest where the model hears and `request` has no sound, or the other way round."""
        if request.audio is not None and self._listener is None:
            raise InvalidRequest.of("audio", self._why)
        if request.audio is None and self._listener is not None:
            raise InvalidRequest.of(field, HEARS)

    async def heard(self, audio: Audio, caller: str) -> tuple[Ints, Floats]:
        """(int64[n], the decoder's prompt; float32[mels, frames], what the encoder hears).

        Raises InvalidRequest naming the member of `audio`.
        """
        assert self._listener is not None, "others were refused"
        prompt = np.asarray(self._listener.prompt(self._start, audio), np.int64)
        return prompt, await self._workers.run(self._listener.hear, audio, caller=caller)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._workers.close()
