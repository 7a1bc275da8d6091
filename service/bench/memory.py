"""`slipstream bench memory`: what MLA latents save beside expanded heads, and a window pool beside the plain one."""

from __future__ import annotations

import json
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
import torch
from transformers.models.auto.configuration_auto import AutoConfig
from transformers.models.auto.modeling_auto import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from core.engine.measures import measure
from core.memory.kv_pool import KVLayerSpec, KVPool
from service.bench.windows import windows_by_shape, windows_measured

TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "max_position_embeddings": 256,
}
MEASURED_PAGES, PAGE_SIZE = 63, 16


@dataclass(frozen=True, slots=True)
class LatentFigures:
    """Bytes that one token takes in all layers, with expanded heads and with MLA latents."""

    expanded: float
    latent: float

    @property
    def ratio(self) -> float:
        """How many times smaller the latent is."""
        return self.expanded / self.latent


def latent_by_shape(config: Any, dtype: torch.dtype) -> LatentFigures:
    """The bytes in the pools of a model of this transformers configuration, computed; nothing is loaded."""
    heads, rope = config.num_attention_heads, config.qk_rope_head_dim
    layers = range(config.num_hidden_layers)
    expanded = [KVLayerSpec(i, heads, config.qk_nope_head_dim + rope, config.v_head_dim) for i in layers]
    latent = [KVLayerSpec(i, 1, config.kv_lora_rank + rope, config.kv_lora_rank, v_in_k=True) for i in layers]
    return LatentFigures(KVPool.bytes_per_token_for(expanded, dtype), KVPool.bytes_per_token_for(latent, dtype))


def latent_measured() -> LatentFigures:
    """Load a tiny DeepSeek-V3 with random weights as a checkpoint, and count the bytes of its pool's storage."""
    config = AutoConfig.for_model("deepseek_v3", **TINY)
    transformers_logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as name, torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(Path(name))
        spec = measure(name)
    pool = KVPool(spec.kv_layers, MEASURED_PAGES, PAGE_SIZE, spec.dtype, torch.device("cpu"))
    held = {
        storage.data_ptr(): storage.nbytes()
        for layer in spec.kv_layers
        for storage in (tensor(layer.layer_id).untyped_storage() for tensor in (pool.k, pool.v))
    }
    expanded = latent_by_shape(config, spec.dtype).expanded
    return LatentFigures(expanded, sum(held.values()) / pool.num_slots)


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object as the last line.")
def memory(as_json: bool) -> None:
    """What special layers save: MLA latents instead of expanded heads, and a pool for sliding windows.

    KV bytes per token of DeepSeek-V3-shaped models, and the most pages that Gemma-3-shaped ones hold at a context of
    eight windows.
    """
    latents, windows = _show_latents(), _show_windows()
    if as_json:
        click.echo(json.dumps({"latent": latents, "window": windows}))


def _show_latents() -> dict[str, Any]:
    found = {
        "DeepSeek-V3, bfloat16, by its shape": latent_by_shape(AutoConfig.for_model("deepseek_v3"), torch.bfloat16),
        "tiny DeepSeek-V3, float32, pool measured": latent_measured(),
    }
    click.echo("KV bytes per token in all layers")
    click.echo(f"  {'model':<42}{'expanded':>12}{'latent':>10}{'smaller':>10}")
    for name, each in found.items():
        click.echo(f"  {name:<42}{each.expanded:12.0f}{each.latent:10.0f}{each.ratio:8.1f} x")
    return {n: {"expanded": e.expanded, "latent": e.latent, "ratio": round(e.ratio, 2)} for n, e in found.items()}


def _show_windows() -> dict[str, Any]:
    found = {
        "Gemma 3 4B, by its shape": windows_by_shape(),
        "tiny Gemma 3, served with the pool off and on": windows_measured(),
    }
    click.echo(
        "Pages x layers at a context of 8 windows, 4 requests: the most held after any step, and the whole pools"
    )
    click.echo(f"  {'model':<46}{'plain':>8}{'windows':>9}{'share':>8}{'pools':>8}{'share':>8}{'other answers':>15}")
    for name, e in found.items():
        click.echo(f"  {name:<46}{e.plain:8}{e.windowed:9}{e.share:8.1%}{e.pools:8}{e.pools_share:8.1%}{e.wrong:15}")
    return {
        n: {**asdict(e), "share": round(e.share, 4), "pools_share": round(e.pools_share, 4)} for n, e in found.items()
    }
