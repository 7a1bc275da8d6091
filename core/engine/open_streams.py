"""The engine's live streams for whoever looks on: counted out when asked for, at no cost while nobody does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice

from core.engine.adapter_table import AdapterTable
from core.engine.stream import TokenStream
from core.types.request import Req, RequestState
from core.types.streams import StreamInfo


class LiveStreams:
    """The `OpenStreams` of `core.engine.door`, over the engine's own table of streams by id. Event-loop thread only."""

    def __init__(self, live: Mapping[str, TokenStream], adapters: AdapterTable) -> None:
        self._live, self._adapters = live, adapters

    def __len__(self) -> int:
        return len(self._live)

    def oldest(self, count: int) -> tuple[StreamInfo, ...]:
        """See `OpenStreams.oldest`."""
        return tuple(self._info(stream) for stream in islice(self._live.values(), count))

    def _info(self, stream: TokenStream) -> StreamInfo:
        first = stream.reqs[0]
        # The outputs of one prompt share it; the inputs of an embedding are prompts of their own.
        prompts = stream.reqs[:1] if first.pooling is None else stream.reqs
        return StreamInfo(
            request_id=stream.request_id,
            state=stage(stream.reqs),
            prompt_tokens=sum(req.input_len for req in prompts),
            output_tokens=sum(output.total for output in stream.outputs),
            arrived_at=first.arrived_at,
            adapter=self._adapters.name(first.adapter_slot),
        )


def stage(reqs: Sequence[Req]) -> str:
    """The state of a request whose sequences are `reqs`: that of the one which got furthest."""
    running = [req for req in reqs if req.state is RequestState.RUNNING]
    if running:
        return "decode" if any(req.first_token_at is not None for req in running) else "prefill"
    return "preempted" if any(req.retractions for req in reqs) else "waiting"
