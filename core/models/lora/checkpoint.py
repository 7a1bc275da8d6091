"""From an adapter directory to matrices per module, fitted to one base model. Reads safetensors alone, never pickle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from core.errors import ModelLoadError
from core.models.hf.mla import ABSORBED
from core.models.lora.config import AdapterConfig, read_adapter_config
from core.models.lora.packed import Adapter, Delta, pack
from core.models.lora.shares import why_not_shared
from core.models.vision.families import TOWERS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

WEIGHTS_FILE = "adapter_model.safetensors"
PICKLE_FILE = "adapter_model.bin"
PREFIX = "base_model.model."
SUFFIXES = {".lora_A.weight": "a", ".lora_B.weight": "b"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)

READ_NOT_CALLED: dict[str, frozenset[str]] = {
    "out_proj": frozenset({"mamba", "mamba2", "falcon_mamba", "falcon_h1"}),
    "dt_proj": frozenset({"mamba", "falcon_mamba", "jamba"}),
}
"""Module -> model types whose code or kernels multiply by its weight themselves, without calling it. PEFT refuses an
adapter for the first module, and silently ignores one for the second."""

MAX_HEADER_BYTES = 8 << 20
"""Most bytes of names and shapes in the weights file, which are read in one call that holds the GIL."""


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """Limits on an adapter: `max_rank` of each module, `max_bytes` of the weights file."""

    max_rank: int = 64
    max_bytes: int = 1 << 30


def read_adapter(
    directory: Path, base: PreTrainedModel, dtype: torch.dtype, limits: AdapterLimits, *, pin: bool = False
) -> Adapter:
    """Read the adapter and fit it to `base`. Reads names and shapes of the base only, so any thread may call it.

    Raises ModelLoadError, which says in one line what does not fit: a module that the base lacks, a module that is no
    linear layer, a different shape or rank, or a named module without weights.
    """
    config = read_adapter_config(directory, limits.max_rank)
    found = _pairs(_tensors(directory, limits))
    wanted = _wanted(config, base)
    for name in found:
        if name not in wanted:
            raise ModelLoadError(f"the adapter has weights for {name}, which {_why_not(config, base, name)}")
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        raise ModelLoadError(f"target_modules names {missing[0]}, for which the adapter has no weights")
    if not found:
        raise ModelLoadError("target_modules names no module of the base model")
    return pack({name: _delta(name, pair, wanted[name], config, dtype) for name, pair in found.items()}, pin=pin)


def _tensors(directory: Path, limits: AdapterLimits) -> dict[str, torch.Tensor]:
    file = directory / WEIGHTS_FILE
    if not file.is_file():
        pickled = (directory / PICKLE_FILE).is_file()
        raise ModelLoadError(
            f"it has only {PICKLE_FILE}; weights are read from safetensors alone, so convert it first"
            if pickled
            else f"it has no {WEIGHTS_FILE}"
        )
    size = file.stat().st_size
    if size > limits.max_bytes:
        raise ModelLoadError(f"{WEIGHTS_FILE} has {size} bytes, at most {limits.max_bytes} are read")
    try:
        with file.open("rb") as opened:
            header = int.from_bytes(opened.read(8), "little")
        if header > min(size, MAX_HEADER_BYTES):
            raise ModelLoadError(f"{WEIGHTS_FILE} is corrupt: its header would have {header} bytes")
        return load_file(file)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        # Which of them, and what it says, is our libraries' business: this message may reach a client.
        raise ModelLoadError(f"{WEIGHTS_FILE} is corrupt or cannot be read") from error


def _pairs(tensors: Mapping[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """Matrices `a` and `b` by module name."""
    pairs: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in tensors.items():
        suffix = next((each for each in SUFFIXES if key.endswith(each)), None)
        if suffix is None or not key.startswith(PREFIX):
            raise ModelLoadError(f"tensor {key[:200]!r} is no LoRA matrix of a linear layer")
        pairs.setdefault(key[len(PREFIX) : -len(suffix)], {})[SUFFIXES[suffix]] = tensor
    for name, pair in pairs.items():
        if len(pair) != 2:
            raise ModelLoadError(f"the adapter has only one of lora_A and lora_B for {name}")
    return pairs


def _wanted(config: AdapterConfig, base: PreTrainedModel) -> dict[str, torch.nn.Linear]:
    """Linear layers that the configuration names. ModelLoadError if it names a module of another kind."""
    output = base.get_output_embeddings()
    wanted: dict[str, torch.nn.Linear] = {}
    for name, module in base.named_modules():
        if not name or not config.targets_module(name):
            continue
        if not TOWERS.isdisjoint(name.split(".")):
            raise ModelLoadError(f"target_modules names {name}, which sees images and no tokens, and is not adapted")
        if module is output:
            # It multiplies the sampled tokens alone, so places in T would name the wrong ones.
            if config.targets is not None:
                raise ModelLoadError(f"target_modules names {name}, the output matrix, which is not adapted")
        elif name.endswith(".kv_b_proj") and ABSORBED in vars(base.get_submodule(name.rpartition(".")[0])):
            # Its weight is multiplied into queries and outputs, never called: a delta would be ignored without a word.
            raise ModelLoadError(f"target_modules names {name}, which attention over latents has folded in")
        elif base.config.model_type in READ_NOT_CALLED.get(name.rpartition(".")[2], ()):
            raise ModelLoadError(f"target_modules names {name}, whose weight this model reads without calling it")
        elif why := why_not_shared(name, module, base):
            raise ModelLoadError(f"target_modules names {name}, {why}")
        elif ".experts." in name:
            raise ModelLoadError(f"target_modules names {name}, a routed expert, which does not see every token")
        elif type(module) is torch.nn.Linear:
            wanted[name] = module
        elif config.targets is not None:
            raise ModelLoadError(f"target_modules names {name}, a {type(module).__name__}; only nn.Linear is adapted")
    return wanted


def _why_not(config: AdapterConfig, base: PreTrainedModel, name: str) -> str:
    module = dict(base.named_modules()).get(name)
    if module is None:
        return "the base model does not have"
    if type(module) is not torch.nn.Linear:
        return f"is a {type(module).__name__} and no nn.Linear"
    return "its target_modules do not name"


def _delta(
    name: str, pair: Mapping[str, torch.Tensor], linear: torch.nn.Linear, config: AdapterConfig, dtype: torch.dtype
) -> Delta:
    rank = config.rank(name)
    for part, shape in (("a", (rank, linear.in_features)), ("b", (linear.out_features, rank))):
        got = tuple(pair[part].shape)
        if got != shape:
            raise ModelLoadError(f"lora_{part.upper()} of {name} has shape {got}, the base needs {shape}")
        if pair[part].dtype not in DTYPES:
            raise ModelLoadError(f"lora_{part.upper()} of {name} is not float32, bfloat16 or float16")
        if not bool(pair[part].isfinite().all()):
            raise ModelLoadError(f"lora_{part.upper()} of {name} holds values that are not finite numbers")
    # Scaled in float32 before it is rounded once: a scaling of 1/3 would otherwise cost a second rounding per token.
    return Delta(pair["a"].to(dtype), (pair["b"].float() * config.scaling(name)).to(dtype))
