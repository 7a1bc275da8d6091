"""Which engines give a request the same bits whatever else they serve, and which are refused by name (decision 57).

A sum of floats depends on the order of its terms. Compiled decoders on the CPU and fused ones on a GPU have kernels
that add in an order which only the token and its place decide. What others compute with, products of torch first of
all, picks an order by how many rows come together: the last bits of a request would tell of its company.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from core.attention.base import AttentionBackend
from core.config import EngineConfig
from core.errors import ConfigError
from core.memory.kv_formats import KV_FORMATS
from core.models.base import Model, ModelSpec
from core.models.invariance_proof import prove_invariance


@dataclass(frozen=True, slots=True)
class _Refused:
    """A setting that takes away what the promise rests on."""

    setting: str
    why: str
    """And what to do, as the end of a sentence."""
    asked: Callable[[EngineConfig, torch.device], bool]


REFUSED: Final = (
    _Refused(
        "native=off",
        "products of torch sum a token in an order that goes by how many there are; leave native at auto",
        lambda config, device: config.model.native == "off",
    ),
    _Refused(
        "adapters",
        "their products go by how many tokens of a step have one; serve them without --deterministic",
        lambda config, device: config.lora.enabled,
    ),
    _Refused(
        "speculative=mtp",
        "its heads keep the modules of transformers, whose sums go by the batch; ngram and draft:DIR do not",
        lambda config, device: config.speculation.method == "mtp",
    ),
    _Refused(
        "kv_cache_dtype",
        "on a CPU compiled code reads keys as they are computed, or int8; name one of these",
        lambda config, device: device.type == "cpu" and config.model.kv_cache_dtype not in ("auto", "int8"),
    ),
    _Refused(
        "attention_backend",
        "on a GPU only triton splits keys at places of their own; leave it at auto",
        lambda config, device: device.type != "cpu" and config.executor.attention_backend not in ("auto", "triton"),
    ),
)


def settled(config: EngineConfig, device: torch.device) -> EngineConfig:
    """`config` as an engine on `device` is built from it: with compiled code before its first step, if deterministic.

    Raises ConfigError, in one line, for a setting that a deterministic engine cannot have.
    """
    if not config.model.deterministic:
        return config
    for refused in REFUSED:
        if refused.asked(config, device):
            raise ConfigError(f"deterministic is not possible with {refused.setting}: {refused.why}")
    return dataclasses.replace(config, model=dataclasses.replace(config.model, native="wait"))


def prove_deterministic(config: EngineConfig, model: Model, attention: AttentionBackend, device: torch.device) -> None:
    """Check what computes `model`, and that it keeps the promise on this machine. Does nothing unless it is asked for.

    Leaves a small pool bound. Raises ConfigError, in one line, with the model's name and what to do.
    """
    if not config.model.deterministic:
        return
    served: Any = model
    if not getattr(served, "invariant", False):
        raise ConfigError(
            f"deterministic is not possible: {model.spec.architecture} is {_computed(model.spec)} here, whose sums go "
            "by the batch (slipstream check without --deterministic tells more); serve it without"
        )
    prove_invariance(model, attention, device, KV_FORMATS[config.model.kv_cache_dtype])


def _computed(spec: ModelSpec) -> str:
    """What computes a model without the promise, as a part of a sentence."""
    if spec.whole_prompts:
        return "an encoder"
    if spec.vision is not None:
        return "a model that sees images"
    return "an encoder-decoder" if spec.encoder is not None else "computed by the modules of transformers"
