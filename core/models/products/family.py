"""The "transformers" family: the module tree of transformers, whose matrices compiled code multiplies once it is ready.

The products are packed and proved on a copy of the tree that shares its tensors, by the reference and the self-check
that proved the tree itself. The forward thread puts them in place between two steps; until then, and where they cannot
be had, torch computes them, and only speed is lost.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import nn
from transformers import PreTrainedModel

from core.config import ModelConfig
from core.models.base import Progress
from core.models.config import CheckpointConfig
from core.models.hf.backend import TransformersModel, load_transformers
from core.models.hf.products import Attend, Products
from core.models.hf.self_check import CheckResult
from core.models.mapped import own
from core.models.products.extension import is_built, load_extension
from core.models.products.joined import joined_in
from core.models.products.layers import layers_in
from core.models.products.packing import DTYPES, Forward, matrices_of, put_in_place
from core.models.products.reads import alone_with_weights
from core.native.kept_library import ExtensionUnavailable
from core.native.library import beside

logger = logging.getLogger(__name__)

FEW_TOKENS = 16
"""Up to that many tokens of a step, operations between products take less time than waking torch's threads for them."""
SHORT_TEXT = 64
"""And up to that many of the longest text that torch attends to alone: its threads spin behind each operation, on the
cores that products want, and there are hundreds. 128 queries of 3 to 30 tokens took MiniLM 1.04 to 1.10 times as long
with them, texts of 100 to 400 tokens 0.88 times while torch attended to them. Where it attends to none, long texts take
MobileBERT 1.3 to 1.5 times as long with them.

Threads that sleep (`OMP_WAIT_POLICY=passive`) would leave those cores alone, but T5, which torch computes, takes 1.25
to 1.55 times as long with such."""
MOST: Final = 0.75
"""Neither where torch multiplies more than the rest of the matrices by itself: its threads are then what computes."""


def load_packed(
    checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device, progress: Progress
) -> TransformersModel:
    """As `load_transformers`, with compiled products where `config.native` allows them."""
    model = load_transformers(checkpoint, config, device, progress)
    own(model.module, checkpoint.path)
    with_products(model, config, progress)
    return model


def with_products(model: Proved, config: ModelConfig, progress: Progress, *, joins: bool = False) -> None:
    """Give `model` compiled products: now if they are compiled already or waited for, else beside serving.

    `joins`: also what stands right behind a matrix, in modules of their own, so that nothing may hook the matrix alone.
    """
    if (
        config.native == "off"
        or config.is_shared
        or model.module.device.type != "cpu"
        or model.module.dtype not in DTYPES
    ):
        return
    try:
        products = PackedProducts(model, torch.get_num_threads(), joins)
    except Exception as error:  # a module tree that cannot be copied
        logger.info("products stay torch's: %s", error)
        return
    model.products = products
    if config.native == "wait" or is_built():
        progress("native", 0.0)
        products.prepare()
        progress("native", 1.0)
    else:
        logger.info("compiling products beside serving; torch computes them until then")
        beside(products.prepare)


class Proved(Protocol):
    """A model around a module tree of transformers, which knows what it was proved by."""

    products: Products | None

    @property
    def module(self) -> PreTrainedModel:
        """The module tree."""
        ...

    def twin(self) -> Proved:
        """The same over a copy of the tree that shares its tensors; it may run on a thread of its own."""
        ...

    def check(self) -> CheckResult:
        """Run it as it was run when it was proved, and compare."""
        ...

    def attend_by(self, attend: Attend) -> None:
        """Have `attend` compute attention of whole texts, if the model has any. Forward thread only."""
        ...


class PackedProducts:
    """Those of one model. `prepare` runs on any thread, everything else on the forward thread."""

    def __init__(self, model: Proved, threads: int, joins: bool) -> None:
        self._model, self._joins = model, joins
        self._twin: Proved | None = model.twin()
        self._threads = threads
        self._torch_threads = threads
        self._crew: Any = None
        self._attend: Any = None
        self._names: dict[str, tuple[str, ...]] = {}
        self._ready: dict[str, Forward] | None = None
        self._mostly = False
        self.packed = 0
        """How many modules the next step computes by compiled code."""

    def begin(self, tokens: int, longest: int | None = None) -> None:
        """Call before the model runs over `tokens` of them; `longest`: of the longest text that torch
        attends to, where it attends to each alone."""
        if self._ready is not None:
            self.packed = put_in_place(self._model.module, self._ready, self._names)
            self._model.attend_by(self._attend)
            self._ready = None
        if self.packed:
            brief = tokens <= FEW_TOKENS or (longest is not None and longest <= SHORT_TEXT)
            self._use_torch_threads(1 if brief and self._mostly else self._threads)

    def end(self) -> None:
        """Call after it: nothing is multiplied for a while."""
        if self.packed:
            self._crew.rest()

    def _use_torch_threads(self, count: int) -> None:
        if count != self._torch_threads:
            torch.set_num_threads(count)
            self._torch_threads = count

    def prepare(self) -> None:
        """Compile or load the code, pack the matrices, check the logits. Logs the outcome and never raises."""
        began = time.monotonic()
        assert self._twin is not None, "prepared once"
        try:
            forwards, result = self._packed(load_extension(), self._twin)
        except ExtensionUnavailable as reason:
            logger.warning("no compiled products, torch goes on: %s", reason)
        except BaseException:  # a thread of its own: nothing above it would tell of a panic
            logger.exception("no compiled products, torch goes on: it failed")
        else:
            if not forwards:
                logger.info("no compiled products, torch goes on: the model has no matrices that they are for")
            elif result.passed:
                logger.info("%d products are compiled from now on (%.1f s)", len(forwards), time.monotonic() - began)
                self.packed, self._ready = len(forwards), forwards
            else:
                logger.warning("no compiled products, torch goes on: logits differ by %.2g", result.error)
        self._twin = None

    def _packed(self, extension: Any, twin: Proved) -> tuple[dict[str, Forward], CheckResult]:
        found = matrices_of(twin.module)
        owners = {
            name: (each.module, tuple(getattr(each.module, part) for part in each.names))
            for name, each in found.items()
        }
        alone = alone_with_weights(owners, twin.check)
        self._crew = extension.Crew(self._threads, False)
        forwards = {name: each.pack(extension, self._crew) for name, each in found.items() if name in alone}
        self._mostly = _share_of(twin.module, [owners[name][1] for name in forwards]) >= MOST
        self._names = {name: found[name].names for name in forwards}
        put_in_place(twin.module, forwards, self._names)
        self._attend = partial(extension.attend, self._crew)
        twin.attend_by(self._attend)
        if self._joins:
            layers = layers_in(twin.module, forwards, extension, twin.check)
            wider = layers | joined_in(twin.module, forwards, extension)
            forwards |= wider
            self._names |= dict.fromkeys(wider, ())
            put_in_place(twin.module, wider, self._names)
        result = twin.check()
        self._crew.rest()
        return forwards, result


def _share_of(model: nn.Module, packed: Iterable[tuple[torch.Tensor, ...]]) -> float:
    """Of the elements of all matrices that tokens are multiplied by, how many are in `packed`."""
    every = sum(
        each.numel()
        for module in model.modules()
        if not isinstance(module, nn.Embedding)
        for each in module.parameters(recurse=False)
        if each.dim() > 1
    )
    return sum(each.numel() for matrices in packed for each in matrices) / max(every, 1)
