"""Other weights over the pools that are there: loaded and proved beside serving, put in place while nothing runs.

Everything here blocks, for seconds to minutes, and is called on a thread of its own. `install`, `give_back` and `wake`
change what steps read, so they are called only while no step is in flight (`core.engine.control`).
"""

from __future__ import annotations

import dataclasses
import gc
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Final

import torch

from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.given_back import GivenBack
from core.device.streams import DeviceStreams
from core.engine.adapters.build import adapter_reader
from core.engine.adapters.loader import Read
from core.engine.build_pools import Pools
from core.engine.determinism import prove_deterministic
from core.engine.eagle import at_any_path
from core.engine.math_threads import use_threads
from core.engine.speculation import Speculation, build_source, build_speculation
from core.errors import ModelLoadError, StartupError
from core.executor.device_state import DeviceState
from core.executor.step import StepRunner
from core.memory.companion import DeviceCompanion
from core.memory.kv_formats import KV_FORMATS
from core.models.attention_proof import prove_attention, prove_codes
from core.models.base import LabelHead, Model, ModelSpec
from core.models.loader import load_head, load_model
from core.models.lora.slots import LORA, AdapterSlots
from core.models.same_configuration import configuration, why_not_same
from core.native.host import HostCode
from core.relay.future_map import FutureMap

logger = logging.getLogger(__name__)

READS_THE_MODEL: Final = ("mtp", "eagle")
"""Methods of speculation whose drafters read states or weights of the model that they draft for."""
OWN: Final = ("name", "sampling_defaults")
"""Of a `ModelSpec`, what may differ between weights that take each other's place."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that was proved, what drafts for it, and what judges texts on top of it."""

    model: Model
    speculation: Speculation | None = None
    head: LabelHead | None = None


class Renewal:
    """What serves, and how other weights take its place. Used by one thread at a time."""

    def __init__(
        self,
        config: EngineConfig,
        streams: DeviceStreams,
        pools: Pools,
        code: HostCode,
        serving: Loaded,
    ) -> None:
        """`serving`: what the engine begins with."""
        self._config, self._streams, self._pools, self._code = config, streams, pools, code
        self._serving = serving
        self._configured = configuration(Path(config.model.path))
        """What the model was built by, as it was then: an emulated one has none."""
        self._state: DeviceState | None = None
        self._given_back: tuple[GivenBack, ...] = ()

    def began(self, runner: StepRunner) -> StepRunner:
        """Note what the first `runner` reads and writes, and return it."""
        self._state = runner.state
        return runner

    @property
    def serving(self) -> Loaded:
        """What the next step is computed by."""
        return self._serving

    def load(self, directory: Path) -> Loaded:
        """Read and prove the checkpoint in `directory`, with everything that drafts for it.

        Raises ModelLoadError where it cannot be read or does not fit the pools, StartupError where the attention that
        serves cannot compute it. Nothing that serves has changed either way.
        """
        config = dataclasses.replace(self._config, model=dataclasses.replace(self._config.model, path=str(directory)))
        device = self._streams.device
        reads_padding = self._serving.head is not None or self._serving.model.spec.whole_prompts
        if (reason := why_not_same(self._configured, directory, reads_padding=reads_padding)) is not None:
            raise ModelLoadError(f"it is no other weights of the model that is served: its config.json has {reason}")
        # As at the start of the engine: the number is kept for each thread.
        use_threads(config)
        model = load_model(config.model, device, keeps_modules=keeps_modules(config))
        reason = why_not_in_place(self._serving.model.spec, model.spec) or self._why_not_adapted(model)
        if reason is not None:
            raise ModelLoadError(f"it does not fit the model that is served: {reason}")
        attention = build_attention(config.executor.attention_backend, device)
        prove_attention(model, attention)
        prove_codes(model, attention, KV_FORMATS[config.model.kv_cache_dtype])
        prove_deterministic(config, model, attention, device)
        head = load_head(config.model, model, device)
        return Loaded(model, self._speculation(config, model), head)

    def _why_not_adapted(self, model: Model) -> str | None:
        """Why the adapters that there are, or may come, have no place in it; None where they have."""
        adapters = self._pools.companions.get(LORA)
        return adapters.why_not_over(module_of(model)) if isinstance(adapters, AdapterSlots) else None

    def _speculation(self, config: EngineConfig, model: Model) -> Speculation | None:
        """What drafts now, or made anew where it reads the model."""
        drafts = self._serving.speculation
        if drafts is None or config.speculation.method.partition(":")[0] not in READS_THE_MODEL:
            return drafts
        config = at_any_path(config)
        source = build_source(config, model, self._streams, None)
        if source is None:
            raise StartupError(f"speculative={config.speculation.method} makes no drafts for it")
        made = build_speculation(config, source, self._pools, self._streams, model.spec, self._code)
        return dataclasses.replace(made, depth=drafts.depth)

    def replace(self, loaded: Loaded) -> None:
        """Have the next `install` or `wake` take `loaded`. What served before is let go once no runner reads it."""
        self._serving = loaded
        # What sleeps are weights of the model of before.
        self._given_back = self._given_back[:1]

    def exchange(self, loaded: Loaded) -> StepRunner:
        """`replace` by `loaded` and `install`. Where that fails, `install` brings back what served before."""
        before = self._serving
        self.replace(loaded)
        try:
            return self.install()
        except BaseException:
            self.replace(before)
            raise

    def let_go(self) -> None:
        """Give back what weights took that nothing refers to any more."""
        release_garbage(self._streams.device)

    def install(self) -> StepRunner:
        """Put what serves over the pools, and capture its steps anew. Raises what a device raises without memory."""
        state, loaded = self._state, self._serving
        assert state is not None, "began() comes first"
        attention = build_attention(self._config.executor.attention_backend, self._streams.device)
        companions = _moved(state.companions, loaded.model)
        loaded.model.bind(self._pools.kv, attention, companions)
        speculation = loaded.speculation
        columns = () if speculation is None else speculation.columns
        self._state = dataclasses.replace(
            state,
            future_map=FutureMap(self._pools.requests, self._streams, state.checks, columns),
            model=loaded.model,
            head=loaded.head,
            companions=companions,
            attention=attention,
            verification=None if speculation is None else speculation.verification,
        )
        return StepRunner(self._state)

    def reader(self) -> Read | None:
        """How adapters are read for the model that serves; None where there can be none."""
        config = self._config.lora
        return adapter_reader(config, self._serving.model, self._streams.device) if config.enabled else None

    def give_back(self) -> int:
        """Give the memory of the pools back to the device, and on an accelerator that of the weights; returns bytes.

        No request may hold a row. What was computed is gone; weights wait in host memory.
        """
        assert not self._given_back, "it sleeps already"
        release_garbage(self._streams.device)
        self._streams.synchronize()
        module = getattr(self._serving.model, "module", None)
        weights = [] if module is None else [*module.parameters(), *module.buffers()]
        pools = GivenBack(self._storage())
        self._given_back = (pools, GivenBack(weights, keep=True))
        return sum(each.nbytes for each in self._given_back)

    def wake(self) -> StepRunner:
        """Take the memory again and `install`. Raises what the device raises where it is short; it sleeps on then."""
        for each in self._given_back:
            each.restore()
        self._streams.synchronize()
        runner = self.install()
        self._given_back = ()
        return runner

    def _storage(self) -> Iterable[torch.Tensor]:
        yield from self._pools.kv.storage
        for companion in self._pools.companions.values():
            yield from companion.storage
        if self._pools.drafts is not None:
            yield from self._pools.drafts.kv.storage


def keeps_modules(config: EngineConfig) -> bool:
    """Whether steps go through the module tree: adapters hook it, and heads of a checkpoint are modules beside it."""
    return config.lora.enabled or config.speculation.method == "mtp"


def why_not_in_place(serving: ModelSpec, loaded: ModelSpec) -> str | None:
    """What differs that pools, sampler or scheduler are built for; None where `loaded` can take the place."""
    for field in dataclasses.fields(ModelSpec):
        has, brings = getattr(serving, field.name), getattr(loaded, field.name)
        if field.name in OWN or has == brings:
            continue
        if isinstance(has, tuple) and isinstance(brings, tuple) and has and brings and is_dataclass(has[0]):
            if len(has) != len(brings):
                return f"it has {len(brings)} {field.name}, the served one {len(has)}"
            has, brings = next((a, b) for a, b in zip(has, brings, strict=True) if a != b)
        return f"its {field.name} differs: {brings}, where the served one has {has}"
    return None


def _moved(companions: Mapping[str, DeviceCompanion], model: Model) -> Mapping[str, DeviceCompanion]:
    """The companions, with the adapters that there are over the modules of `model`."""
    adapters = companions.get(LORA)
    if adapters is None:
        return companions
    assert isinstance(adapters, AdapterSlots), type(adapters)
    return {**companions, LORA: adapters.over(module_of(model))}


def module_of(model: Model) -> torch.nn.Module:
    """The modules of a model that adapters hook."""
    module: torch.nn.Module = model.module  # type: ignore[attr-defined]  # of models that go through transformers
    return module


def release_garbage(device: torch.device) -> None:
    """Let go of weights that nothing refers to any more, and give what they took back to the device.

    Module trees are circles, and what was frozen when the engine started is not walked.
    """
    gc.unfreeze()
    gc.collect()
    gc.freeze()
    if device.type == "cuda":
        torch.cuda.empty_cache()
