"""Reads a checkpoint into the module tree that transformers has for it, with every weight accounted for."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from core.config import ModelConfig
from core.errors import ModelLoadError
from core.models.base import Progress
from core.models.config import CheckpointConfig
from core.models.hf.head_layers import head_layers
from core.models.hf.shards import check_shards, load_options
from core.models.mapped import SMALL, own
from core.models.quantized.registry import method_name, quant_method

GROUPED_BYTES = 16
"""Of a row, so many or a multiple of it."""
MAX_NAMED_WEIGHTS = 3
"""How many missing or unexpected weights an error names."""


def read_configuration(checkpoint: CheckpointConfig) -> PreTrainedConfig:
    """What transformers makes of config.json. Raises ModelLoadError."""
    try:
        # Never the code that `auto_map` in a configuration may point to.
        found: PreTrainedConfig = AutoConfig.from_pretrained(
            checkpoint.path, trust_remote_code=False, local_files_only=True
        )
        return found
    except Exception as error:
        raise ModelLoadError(f"{checkpoint.path / 'config.json'} is not usable: {one_line(error)}") from error


def dtype_of(checkpoint: CheckpointConfig, config: ModelConfig, device: torch.device) -> torch.dtype:
    """The configured dtype. `auto` is float32 on the CPU, which every CPU computes, else the checkpoint's."""
    name = config.dtype
    method = quant_method(checkpoint)
    if name == "auto":
        anything = device.type == "cpu" and not (method and method.auto_dtype_is_saved and checkpoint.dtype)
        name = "float32" if anything else checkpoint.dtype or "bfloat16"
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def load_module(
    checkpoint: CheckpointConfig,
    config: ModelConfig,
    device: torch.device,
    progress: Progress,
    auto: Any = AutoModelForCausalLM,
    beside: Sequence[str] = (),
    **options: Any,
) -> PreTrainedModel:
    """The module tree that `auto` makes of the checkpoint, on `device`, every weight accounted for.

    `beside`: what names of weights begin with that are not its own, or that it can do without. `options`: further
    arguments of `from_pretrained`. Raises ModelLoadError, which names the model type and what is wrong, in one line.
    """
    progress("weights", 0.0)
    method = quant_method(checkpoint)
    shards = load_options(read_configuration(checkpoint), config.tensor_parallel)
    options = {**options, **(method.load_options() if method else {}), **shards}
    transformers_logging.disable_progress_bar()
    try:
        with _unprinted():
            loaded: Any = auto.from_pretrained(
                checkpoint.path,
                dtype=dtype_of(checkpoint, config, device),
                trust_remote_code=False,
                local_files_only=True,
                use_safetensors=True,
                attn_implementation="eager",
                output_loading_info=True,
                **options,
            )
        model, info = loaded
        _refuse_guessed_weights(checkpoint, info, (*head_layers(model.config.get_text_config()), *beside))
        check_shards(model, config.tensor_parallel)
        ready: PreTrainedModel = model.eval().requires_grad_(False).to(device)
        own(ready, checkpoint.path, SMALL)
        _settle_experts(ready)
    except ModelLoadError:
        raise
    except Exception as error:
        packed = "" if checkpoint.quantization is None else f" with {method_name(checkpoint.quantization)} weights"
        raise ModelLoadError(
            f"{checkpoint.path} cannot be loaded as {checkpoint.model_type!r}{packed}: {one_line(error)}"
        ) from error
    progress("weights", 1.0)
    return ready


def _settle_experts(model: PreTrainedModel) -> None:
    """Have experts multiplied one by one where torch's grouped product takes no rows of their size."""
    sizes = {
        each.shape[-1] * each.element_size()
        for name, each in model.named_parameters()
        if ".experts." in name and each.dim() == 3
    }
    if any(size % GROUPED_BYTES for size in sizes):
        model.set_experts_implementation("eager")


@contextmanager
def _unprinted() -> Iterator[None]:
    """Without what transformers prints of every load.

    One is a table of weights that do not fit: they are refused by name, or left out. The other is a list of layers
    that are not sharded, of models that no rank shards.
    """
    reporters = [
        logging.getLogger(f"transformers.{name}") for name in ("modeling_utils", "distributed.tensor_parallel")
    ]
    before = [each.level for each in reporters]
    for each in reporters:
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, level in zip(reporters, before, strict=True):
            each.setLevel(level)


def _refuse_guessed_weights(checkpoint: CheckpointConfig, info: dict[str, Any], heads: tuple[str, ...]) -> None:
    """Raise ModelLoadError for weights that are missing or have no place: transformers would invent or drop them.

    What begins as one of `heads` is not the model's.
    """
    for problem in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        names = sorted(str(name[0] if isinstance(name, tuple) else name) for name in info.get(problem) or ())
        names = [name for name in names if not name.startswith(heads)]
        if names:
            listed = ", ".join(names[:MAX_NAMED_WEIGHTS]) + (", …" if len(names) > MAX_NAMED_WEIGHTS else "")
            word = problem.removesuffix("_keys")
            raise ModelLoadError(f"{checkpoint.path} does not fit {checkpoint.model_type!r}: {word} weights {listed}")
    errors = [*(info.get("error_msgs") or ()), *(info.get("conversion_errors") or {}).values()]
    if errors:
        raise ModelLoadError(f"{checkpoint.path} does not fit {checkpoint.model_type!r}: {one_line(errors[0])}")


def one_line(error: object) -> str:
    """The first line of an error that a library wrote for a terminal."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
