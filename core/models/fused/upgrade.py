"""The decoder that serves on a GPU: a fused one where a model is dense and its logits are right, or transformers."""

from __future__ import annotations

import logging

from core.attention.registry import build_attention
from core.models.base import Model
from core.models.fused.decoder import FusedDecoder
from core.models.hf.backend import TransformersModel
from core.models.hf.self_check import run_self_check
from core.models.native.reading import NotDense

logger = logging.getLogger(__name__)


def with_fused(model: TransformersModel, invariant: bool = False) -> Model:
    """A fused decoder made from `model` and proved by the reference that proved it; `model` itself where there is none.

    Both share all weights. `invariant`: as in `FusedDecoder`. The log says why there is none. Never raises.
    """
    assert model.reference is not None, "proved at load"
    device = model.module.device
    try:
        decoder = FusedDecoder(model.module, model.spec, invariant)
        # Proved with the kernels that will serve: it stores keys and values by itself, for them to find.
        result = run_self_check(decoder, model.reference, build_attention("auto", device, invariant=invariant))
    except NotDense as reason:
        logger.info("no fused decoder, the layers of transformers go on: %s", reason)
    except Exception:  # a compiler that fails, or memory that runs out: speed is lost, and nothing else
        logger.exception("no fused decoder, the layers of transformers go on: it failed")
    else:
        if result.passed:
            logger.info("a fused decoder computes: %d dense layers", len(model.spec.kv_layers))
            decoder.reference = model.reference
            return decoder
        logger.warning("no fused decoder, the layers of transformers go on: its logits differ by %.2g", result.error)
    return model
