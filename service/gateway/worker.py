"""State of the server that all dialects share: the model's files, the load, the subscribers. One per server."""

from __future__ import annotations

import dataclasses
import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from core.engine.api import Engine
from core.types.control import Activity
from core.types.io import ModelInfo
from core.types.sampling_params import SamplingParams
from service.calls.open_calls import OpenCalls
from service.gateway.dialect import Load, ModelFacts, ServerFacts
from service.gateway.loads import LoadMeter
from service.gateway.subscriptions import Subscriptions
from service.gateway.tokenizer_zip import TokenizerZip

NOWHERE = Path("/dev/null")
"""No host has a directory below this path. A gateway that finds none asks the worker for its tokenizer at once; for a
bare name it would first ask the internet."""

_SHARED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty")


class Worker:
    """The load meter, the tokenizer's zip, the subscriptions and the facts that the dialects of one server share."""

    def __init__(self, calls: OpenCalls, version: str) -> None:
        self.version = version
        self._config = calls.config
        self._handle = calls.handle
        self._started, self._started_at = time.monotonic(), datetime.now(UTC)
        self._checkpoint: dict[str, Any] | None = None
        self.meter = LoadMeter(lambda: self._handle.stats, calls.config.max_running)
        self.tokenizer = TokenizerZip(lambda: self._folder)
        self.subscriptions = Subscriptions(calls, self.load)
        self._calls = calls

    @property
    def _folder(self) -> Path:
        """Where the engine has its checkpoint from: of a model by name only that knows."""
        path = self._calls.engine.model_info.path
        return Path(path).resolve() if path else self._config.model_path.resolve()

    async def load(self) -> Load:
        """The load that the current caller may see: of all tenants, or of its own requests."""
        own = await self._calls.own_load()
        return self.meter.load() if own is None else self.meter.own(own)

    def model(self, info: ModelInfo) -> ModelFacts:
        """Facts of the model. Its path is real with `--gateway-tokenizer path`; else it is one that does not exist."""
        checkpoint = self._read_checkpoint()
        shown = self._folder if self._config.gateway_tokenizer == "path" else NOWHERE / info.name
        pad = checkpoint.get("pad_token_id")
        return ModelFacts(
            info=info,
            path=str(shown),
            model_type=str(checkpoint.get("model_type", "")),
            pad_token_id=pad if isinstance(pad, int) and 0 <= pad < 2**31 else 0,
            default_sampling=default_sampling(info.default_sampling),
            weight_version=self._handle.stats.weight_version,
        )

    async def live_requests(self) -> int:
        """Requests that have not ended: of all tenants, or of the current caller if it may not see the others."""
        own = await self._calls.own_load()
        return self._calls.engine.live_requests if own is None else own.live

    async def server(self, engine: Engine) -> ServerFacts:
        """Facts of the server process."""
        return ServerFacts(
            version=self.version,
            active_requests=await self.live_requests(),
            paused=self._handle.draining or engine.stats.activity is not Activity.SERVING,
            started_at=self._started_at,
            uptime=time.monotonic() - self._started,
            page_size=self._config.engine.memory.page_size,
            max_running=self._config.max_running,
            max_total_tokens=self.meter.load().max_total_tokens,
            dtype=engine.model_info.dtype,
            kv_dtype=self._config.engine.model.kv_cache_dtype,
            role=engine.model_info.role,
            engine_id=engine.model_info.engine_id,
            transfer_port=engine.model_info.transfer_port,
        )

    def _read_checkpoint(self) -> dict[str, Any]:
        """The checkpoint's config.json. The loader has read it before, so it is small and valid."""
        if self._checkpoint is None:
            self._checkpoint = json.loads((self._folder / "config.json").read_text(encoding="utf-8"))
        return self._checkpoint


def default_sampling(params: SamplingParams) -> str:
    """JSON of the checkpoint's own defaults, under the names of OpenAI's options; empty if it has none."""
    plain = SamplingParams()
    given = dataclasses.asdict(params)
    own = {name: given[name] for name in _SHARED if given[name] != getattr(plain, name)}
    return json.dumps(own) if own else ""
