"""A server over the emulated device, for streams that outlive their calls, and what to ask it."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from core.engine.async_engine import AsyncEngine
from core.engine.built_engine import BuiltEngine
from core.models.bundled import bundled_model_dir
from core.text.tokenizer import Tokenizer
from service.client import Chunk, End, SlipstreamClient
from service.client.resumed_call import Received
from service.config.server_config import ServerConfig
from service.server.server import Server
from tests.support.fakes.emulated_engine import emulated_engine
from tests.support.servers import loaded

QUICK: tuple[tuple[str, Any], ...] = (
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.initial_reconnect_backoff_ms", 20),
    ("grpc.min_reconnect_backoff_ms", 20),
    ("grpc.max_reconnect_backoff_ms", 100),
)
"""A client that comes back at once."""

GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class KeptServer:
    """A server and the engine behind it."""

    server: Server
    engine: AsyncEngine

    @property
    def port(self) -> int:
        return self.server.port

    def client(self, target: str = "", **options: Any) -> SlipstreamClient:
        """A client that comes back at once."""
        return SlipstreamClient(target or f"127.0.0.1:{self.port}", QUICK, **options)

    def sample(self, series: str, **labels: str) -> float:
        """The value of a metric."""
        return self.server.metrics.registry.get_sample_value(series, labels) or 0.0


def small_engine(step_seconds: float = 0.002) -> BuiltEngine:
    """The production engine over the emulated device, with the bundled tokenizer."""
    directory = str(bundled_model_dir())
    tokenizer, room = Tokenizer.load(directory), {"context": 8192, "max_total_tokens": 64 * 1024}
    return emulated_engine(tokenizer, step_seconds=step_seconds, rows=64, directory=directory, **room)


@asynccontextmanager
async def kept_server(step_seconds: float = 0.002, **settings: Any) -> AsyncIterator[KeptServer]:
    built = small_engine(step_seconds)
    pending = settings.get("max_pending_tokens", built.config.max_pending_tokens)
    built = dataclasses.replace(built, config=dataclasses.replace(built.config, max_pending_tokens=pending))
    defaults = {"port": 0, "metrics_port": 0, "drain_linger": 0.0}
    async with loaded(Server(ServerConfig.of(**(defaults | settings)), lambda *_: built)) as server:
        yield KeptServer(server, cast(AsyncEngine, server.engine))


@dataclass
class Seen:
    """What arrived of one request, over all calls."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    texts: dict[int, str] = field(default_factory=dict)
    ends: dict[int, End] = field(default_factory=dict)
    told: dict[int, list[Any]] = field(default_factory=dict)
    """Log probabilities, and those of chosen ids."""

    def note(self, event: Chunk | End) -> None:
        """One event; fails for a gap, a repeat, or anything after the end of an output."""
        if isinstance(event, End):
            assert event.index not in self.ends, "one terminal per output"
            self.ends[event.index] = event
            return
        assert event.index not in self.ends, "nothing after the terminal"
        ids = self.ids.setdefault(event.index, [])
        assert event.position == len(ids), f"output {event.index}: at {event.position} after {len(ids)}"
        ids += event.token_ids
        self.texts[event.index] = self.texts.get(event.index, "") + event.text
        chosen = event.chosen_logprobs or [()] * len(event.logprobs)
        self.told.setdefault(event.index, []).extend(zip(event.logprobs, chosen, strict=True))

    def received(self) -> dict[int, Received]:
        """As `attach` takes it."""
        return {
            index: Received(len(ids), len(self.texts[index].encode()), index in self.ends)
            for index, ids in self.ids.items()
        }

    @property
    def outcome(self) -> Any:
        """What must be the same however often the connection broke."""
        ends = {index: (end.reason, end.completion_tokens, end.matched_stop) for index, end in self.ends.items()}
        return self.ids, self.texts, ends, self.told


async def uninterrupted(client: SlipstreamClient, prompt: Sequence[int], **options: Any) -> Seen:
    """What the request brings when nothing breaks."""
    seen = Seen()
    async for event in client.generate(prompt, **options):
        seen.note(event)
    return seen
