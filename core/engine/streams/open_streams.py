"""The engine's live streams for whoever looks on: counted out when asked for, at no cost while nobody does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice

from core.engine.adapters.table import AdapterTable
from core.engine.streams.token_stream import TokenStream
from core.types.request import Req, RequestState
from core.types.streams import StreamInfo

STAGES = ("waiting", "preempted", "prefill", "decode")
ENDED = "ended"
WAITING, PREEMPTED, PREFILL, DECODE = range(len(STAGES))


class LiveStreams:
    """The `OpenStreams` of `core.engine.api`, over the engine's own table of streams by id. Event-loop thread only."""

    def __init__(self, live: Mapping[str, TokenStream], adapters: AdapterTable) -> None:
        self._live, self._adapters = live, adapters
        self._on_end: Callable[[StreamInfo], None] | None = None

    def __len__(self) -> int:
        return len(self._live)

    def oldest(self, count: int) -> tuple[StreamInfo, ...]:
        """See `OpenStreams.oldest`."""
        return tuple(self._info(stream) for stream in islice(self._live.values(), count))

    def on_end(self, told: Callable[[StreamInfo], None]) -> None:
        """See `OpenStreams.on_end`."""
        self._on_end = told

    def ended(self, stream: TokenStream) -> None:
        """Its sequences have ended, and are still there to be counted."""
        if self._on_end is not None:
            began = any(req.scheduled_at is not None for req in stream.reqs)
            self._on_end(self._info(stream)._replace(state=ENDED if began else STAGES[WAITING]))

    def _info(self, stream: TokenStream) -> StreamInfo:
        reqs, outputs = stream.reqs, stream.outputs
        first, tokens = reqs[0], outputs[0].total
        prompt = first.input_len
        for output in outputs[1:]:
            tokens += output.total
        # The outputs of one prompt share it; the inputs of an embedding are prompts of their own.
        if first.pooling is not None:
            prompt = sum(req.input_len for req in reqs)
        slot = first.adapter_slot
        adapter = self._adapters.name(slot) if slot else ""
        return StreamInfo(stream.request_id, stage(reqs), prompt, tokens, first.arrived_at, adapter)


def stage(reqs: Sequence[Req]) -> str:
    """The state of a request whose sequences are `reqs`: that of the one which got furthest."""
    furthest = 0
    for req in reqs:
        if req.state is RequestState.RUNNING:
            furthest = max(furthest, PREFILL if req.first_token_at is None else DECODE)
        elif req.retractions:
            furthest = max(furthest, PREEMPTED)
    return STAGES[furthest]
