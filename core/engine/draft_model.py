"""Loads a draft model, `draft:DIR`, and checks that it can draft for the model that is served."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from core.attention.registry import build_attention
from core.config import EngineConfig
from core.device.streams import DeviceStreams
from core.engine.build_pools import Pools
from core.errors import StartupError
from core.memory.draft_pool import DraftLayers
from core.models.base import Model, ModelSpec
from core.models.loader import check_checkpoint, load_model
from core.native.host import HostCode
from core.speculation.drafter import Drafter
from core.speculation.model_drafter import ModelDrafter
from core.text.tokenizer import Tokenizer

TOKENIZER: Final = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class DraftModelSource:
    """A `Source` of drafts: a model that is loaded already."""

    model: Model
    most: int
    attention: str
    """Name of the attention backend."""

    @property
    def keeps(self) -> DraftLayers:
        """Keys and values of all its layers. A spare slot for each token that it reads ahead of the pages."""
        spec = self.model.spec
        return DraftLayers(spec.kv_layers, spec.dtype, self.most)

    def drafter(self, pools: Pools, streams: DeviceStreams, code: HostCode) -> Drafter:
        """The drafter, with a backend of its own: what a backend plans is for one model at a time."""
        assert pools.drafts is not None, "the pools were built with what this keeps"
        self.model.bind(pools.drafts.kv, build_attention(self.attention, streams.device))
        return ModelDrafter(self.model, pools.drafts, pools.requests)


def draft_model_source(config: EngineConfig, model: Model, streams: DeviceStreams) -> DraftModelSource:
    """The draft model that `config` names.

    Raises ModelLoadError where its checkpoint cannot be served, and StartupError where it cannot draft for `model`.
    """
    method = config.speculation.method
    directory = method.partition(":")[2]
    stated = check_checkpoint(directory).context_length
    loaded = load_model(
        replace(
            config.model,
            path=directory,
            # Its own context may be shorter; beyond it nothing is drafted.
            context_length=None if stated is not None else config.model.context_length,
            quantization="none",
            # Drafts are worth no codes: their pool is small, and a wrong one costs a step's time.
            kv_cache_dtype="auto",
        ),
        streams.device,
    )
    reason = why_not(loaded.spec, model.spec) or why_other_words(directory, config.model.path)
    if reason is not None:
        raise StartupError(f"speculative={method} is not possible: {reason}")
    return DraftModelSource(loaded, config.speculation.max_drafts, config.executor.attention_backend)


def why_not(draft: ModelSpec, target: ModelSpec) -> str | None:
    """Why a model cannot draft for another, as the end of a sentence; None if it can."""
    if draft.encoder is not None:
        return "an encoder-decoder does not draft"
    if draft.state_layers:
        return "a draft model with recurrent layers cannot go back behind a wrong draft"
    if draft.vocab_size != target.vocab_size:
        return f"the draft model has {draft.vocab_size} tokens, and the model {target.vocab_size}"
    return None


def why_other_words(draft: str, target: str) -> str | None:
    """Why ids of one checkpoint directory mean something else in another, as the end of a sentence; None if not.

    Where a directory has no tokenizer of the fast kind, nothing is known.
    """
    if not all((Path(each) / TOKENIZER).is_file() for each in (draft, target)):
        return None
    mine, others = (Tokenizer.load(each).backend for each in (draft, target))
    if mine is None or others is None or mine.get_vocab() == others.get_vocab():
        return None
    return "the tokenizer of the draft model has other tokens than that of the model"
