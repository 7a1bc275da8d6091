"""The "native" family: transformers serves from the first second, and compiled code takes over once it is ready.

Weights, probes, refusals and the load-time proof are those of the transformers backend. The native decoder is made from
the proved model, is checked against the same reference, and replaces it between two steps: both use KV pages in the
same way. If the native decoder cannot be used, the reason is logged, and only speed is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from transformers import PreTrainedModel

from core.attention.base import AttentionBackend
from core.batch.forward_batch import ForwardBatch
from core.config import ModelConfig
from core.memory.companion import DeviceCompanion
from core.memory.kv_format import PLAIN, KVFormat
from core.memory.kv_formats import KV_FORMATS
from core.memory.kv_pool import KVPool
from core.models.base import NO_COMPANIONS, Model, ModelSpec, Progress
from core.models.config import CheckpointConfig
from core.models.fused.layers import wanted
from core.models.hf.backend import TransformersModel, load_transformers
from core.models.hf.products import Products
from core.models.hf.self_check import Reference, coded_reference, run_self_check
from core.models.mapped import own
from core.models.native.decoder import STORED, NativeDecoder
from core.models.native.extension import is_built, load_extension
from core.models.native.images import ImageSteps
from core.models.native.reading import NotDense
from core.models.native.weights import check_dense, tables_of
from core.models.products.family import with_products
from core.models.vision.tower import towers_of
from core.native.kept_library import ExtensionUnavailable
from core.native.library import beside

logger = logging.getLogger(__name__)


def load_native(checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress) -> Model:
    """As `load_transformers`, with native code where `config.native` allows it and the model is dense.

    On a GPU that is a fused decoder.
    """
    model = load_transformers(checkpoint, config, device, progress)
    if config.native == "off":
        own(model.module, checkpoint.path)
        return model
    if wanted(device):
        from core.models.fused.upgrade import with_fused

        return with_fused(model, config.deterministic)
    if config.kv_cache_dtype not in STORED:
        logger.info("served by transformers: native decoders read no keys in %s", config.kv_cache_dtype)
        own(model.module, checkpoint.path)
        with_products(model, config, progress)
        return model
    try:
        check_dense(model.module, model.spec)
    except NotDense as reason:
        logger.info("served by transformers, not by native code: %s", reason)
        own(model.module, checkpoint.path)
        with_products(model, config, progress)
        return model
    # Of the large matrices those that are read as they are; others are packed.
    for part in (*tables_of(model.module), *towers_of(model.module)):
        own(part, checkpoint.path)
    upgraded = UpgradingModel(model, config.deterministic, KV_FORMATS[config.kv_cache_dtype], checkpoint.path)
    if config.native == "wait" or is_built():
        progress("native", 0.0)
        upgraded.upgrade()
        progress("native", 1.0)
        if not upgraded.native:
            with_products(model, config, progress)
    else:
        logger.info("compiling native code beside serving; transformers computes until then")
        beside(upgraded.upgrade)
    return upgraded


class UpgradingModel:
    """A transformers model until `upgrade` has finished, then the native decoder made from it.

    `upgrade` runs on any thread; the forward thread switches to the new model at the beginning of a step.
    """

    def __init__(
        self,
        model: TransformersModel,
        invariant: bool = False,
        format: KVFormat = PLAIN,
        directory: Path | None = None,
    ) -> None:
        """`format`: of the pools that steps will read. `directory`: of the files in which its matrices may lie.

        Runs the model, so not while it serves.
        """
        self._current: Model = model
        self._directory, self._stays = directory, False
        self._invariant = invariant
        self._spec = model.spec
        self._reference: Reference | None = model.reference
        self._coded: tuple[KVFormat, Reference] | None = None
        """Codes that keys are stored as, and what the model makes of them."""
        if format.codes is not None and model.reference is not None:
            self._coded = format, coded_reference(model, model.reference, format)
        self._module: PreTrainedModel | None = model.module
        self.tower = model.tower
        """What sees images in it; None if nothing does."""
        self._images: ImageSteps | None = None
        self._next: NativeDecoder | None = None
        self.native = False
        """Whether the next step is computed by native code."""
        self._bound: tuple[KVPool, AttentionBackend, Mapping[str, DeviceCompanion]] | None = None

    @property
    def spec(self) -> ModelSpec:
        """Measures of the model, the same before and after the upgrade."""
        return self._spec

    @property
    def products(self) -> Products | None:
        """Compiled products of a module tree that goes on for good."""
        return self._current.products if isinstance(self._current, TransformersModel) else None

    @property
    def invariant(self) -> bool:
        """Whether the next step, and all behind it, give a token the same logits whatever else is in them."""
        return self.native and self._invariant and self._spec.vision is None

    def bind(
        self, kv_pool: KVPool, attention: AttentionBackend, companions: Mapping[str, DeviceCompanion] = NO_COMPANIONS
    ) -> None:
        """Bind the current model, and remember the arguments for the native decoder."""
        self._bound = (kv_pool, attention, companions)
        self._current.bind(*self._bound)

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        """float32[S, vocab_size]: logits of the current model; switches to the native decoder first, if it is ready."""
        if self._stays:
            self._stays = False
            self._own()
        if self._next is not None:
            assert self._bound is not None, "bind() comes first"
            self._next.bind(*self._bound)
            # Nothing refers to the module tree after this, except to what sees in it: its matrices are gone, packed
            # ones stand in their place.
            self._current, self._next = self._next, None
            if self._images is not None:
                self._images.keep_tower()
        return self._current.forward(batch)

    def upgrade(self) -> None:
        """Compile or load native code, pack the weights, check the logits. Logs the outcome and never raises."""
        began = time.monotonic()
        assert self._module is not None and self._reference is not None, "upgraded once"
        try:
            if self.tower is not None:
                self._images = ImageSteps(self._module, self.tower)
            decoder = NativeDecoder(
                load_extension(), self._module, self._spec, torch.get_num_threads(), self._invariant, self._images
            )
            result = run_self_check(decoder, self._reference)
            if result.passed and self._coded is not None:
                format, coded = self._coded
                result = run_self_check(decoder, coded, format=format)
        except (ExtensionUnavailable, NotDense) as reason:
            logger.warning("no native code, transformers goes on: %s", reason)
        except BaseException:  # a thread of its own: nothing above it would tell of a panic
            logger.exception("no native code, transformers goes on: it failed")
        else:
            if result.passed:
                logger.info("native code computes from now on (ready after %.1f s)", time.monotonic() - began)
                self._next, self.native = decoder, True
            else:
                logger.warning("no native code, transformers goes on: its logits differ by %.2g", result.error)
        self._stays = not self.native
        self._module = self._reference = self._coded = None

    def _own(self) -> None:
        """The modules go on for good: what was to be packed leaves its files."""
        assert isinstance(self._current, TransformersModel)
        if self._directory is not None:
            own(self._current.module, self._directory)
