"""Families beside those of the other files here say with drafts what they say without, whatever drafts for them.

In float64, as in `test_speculation`: sums in another order then move a draw by 1e-16.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from core.batch.result import StepResult
from core.batch.spec_plan import Aim
from core.config import EngineConfig, ModelConfig, SpeculationConfig
from core.engine.speculation import Speculation
from core.models.base import Model
from core.models.loader import load_model
from core.types.request import Req
from tests.proofs.equivalence.test_model_drafts import FREE
from tests.proofs.equivalence.test_speculation import (
    CONTEXT,
    CPU,
    OPTIONS,
    Player,
    Seen,
    Setting,
    requests,
    same_but_for_rounding,
)
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.support.fakes.adversaries import KnowingDrafter, always_right, like_a_coin
from tests.support.fakes.fixed_depth import FixedDepth

FEW = 24
"""Tokens of a vocabulary from which an untrained model is right of another now and then."""

SOME = ("greedy", "temperature", "filters", "penalties", "greedy logprobs")


@dataclass(frozen=True, slots=True)
class Deep(Setting):
    """With up to `drafts` drafts for a token."""

    drafts: int = 3

    def config(self) -> EngineConfig:
        return replace(Setting.config(self), speculation=SpeculationConfig(self.method, self.drafts))


SHAPES = {
    "one draft": Deep(page_size=1, chunk=16, drafts=1),
    "three": Deep(page_size=4, chunk=512, overlap=False, drafts=3),
    "eight": Deep(page_size=16, chunk=32, drafts=8),
    "eight beside small chunks": Deep(page_size=4, chunk=11, rows=6, drafts=8),
    "short of pages": Deep(page_size=4, chunk=16, tokens=112, rows=6, drafts=8),
}


class Wavering:
    """A `Depth` that asks for another number of drafts in each step."""

    def __init__(self, most: int, seed: int) -> None:
        self._most, self._rng = most, np.random.default_rng(seed)

    def aim(self, rows: int) -> Aim:
        return Aim(int(self._rng.integers(self._most + 1)))

    def observe(self, result: StepResult) -> None:
        """Changes nothing."""


@pytest.fixture(autouse=True)
def _doubles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.models.hf.module_tree.dtype_of", lambda *_: torch.float64)
    # The kernel that multiplies the experts of several tokens at once knows no float64.
    monkeypatch.setattr("transformers.integrations.moe._can_use_grouped_mm", lambda *_, **__: False)


def load(path: Path) -> Model:
    return load_model(ModelConfig(str(path), native="off", context_length=CONTEXT), CPU)


def among(vocab: int, seed: int, names: tuple[str, ...] = tuple(OPTIONS)) -> list[Req]:
    """Requests that name no token outside of the vocabulary; half of them begin alike."""
    head = np.random.default_rng(seed).integers(3, vocab, 21)
    made = requests(vocab, seed, names)
    for req in made[::2]:
        req.prompt = np.concatenate([head, req.prompt[:20]])
    return [req for req in made if max([0, *req.params.stop_token_ids, *req.params.logit_bias]) < vocab]


def follow(plain: list[Seen], reqs: list[Req]) -> list[list[int]]:
    return [[*req.prompt.tolist(), *seen.tokens] for req, seen in zip(reqs, plain, strict=True)]


FAMILIES = (
    "qwen2",
    "gemma4_text",
    "deepseek_v2",
    "deepseek_v3",
    "mixtral",
    "cohere2",
    "llama4_text",
    "gptj",
    "glm4_moe",
)


@pytest.mark.parametrize(("kind", "name"), list(zip(FAMILIES, itertools.cycle(SHAPES), strict=False)))
def test_no_draft_changes_an_output(kind: str, name: str, checkpoint_of: Callable[[str], Path], seed: int) -> None:
    model, shape = load(checkpoint_of(kind)), SHAPES[name]
    reqs = lambda: among(VOCAB_SIZE, seed)  # noqa: E731
    plain = Player(shape, model, None).play(asked := reqs())
    for says, depth in ((like_a_coin(seed), FixedDepth(shape.drafts)), (always_right, Wavering(shape.drafts, seed))):
        drafter = KnowingDrafter(follow(plain, asked), says, VOCAB_SIZE)
        drafted = Player(shape, model, Speculation(drafter, shape.drafts, depth)).play(reqs())
        same_but_for_rounding(plain, drafted, reqs())
        assert drafter.accepted > 0


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("core.engine.build.AdaptiveDepth", lambda most, times: FixedDepth(most))


SELVES = ("gemma3_text", "gemma4_text", "deepseek_v3", "llama4_text", "gpt2")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(
    ("kind", "shape"), list(zip(SELVES, itertools.cycle(["eight", "short of pages"]), strict=False))
)
def test_a_model_is_always_right_of_itself(
    kind: str, shape: str, checkpoint_of: Callable[[str], Path], seed: int
) -> None:
    """Whatever its layers are: windows, shared keys, latents, learned positions."""
    path, setting = checkpoint_of(kind), SHAPES[shape]
    reqs = lambda: among(VOCAB_SIZE, seed, FREE)  # noqa: E731
    plain = Player(setting, load(path), None).play(reqs())
    player = Player(replace(setting, method=f"draft:{path}"), load(path), None)
    same_but_for_rounding(plain, player.play(reqs()), reqs())
    assert player.drafts.tokens == player.drafts.accepted > 20


PAIRS = [("mamba2", "gpt2"), ("qwen3_next", "mistral"), ("mistral", "gemma3_text")]


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize(("target", "draft"), PAIRS)
def test_one_family_drafts_for_another(target: str, draft: str, tmp_path: Path, seed: int) -> None:
    model, other = (make_checkpoint(kind, tmp_path / kind, vocab_size=FEW) for kind in (target, draft))
    setting, reqs = SHAPES["short of pages"], lambda: among(FEW, seed, SOME)
    plain = Player(setting, load(model), None).play(reqs())
    player = Player(replace(setting, method=f"draft:{other}"), load(model), None)
    same_but_for_rounding(plain, player.play(reqs()), reqs())
    assert player.drafts.tokens > 20


def make_head(folder: Path, vocab: int, hidden: int, layers: tuple[int, ...], seed: int) -> Path:
    """An EAGLE-3 head with random weights, which shares the embedding of its target."""
    folder.mkdir()
    heads, kv_heads, dim, inner = 4, 2, 16, 96
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "vocab_size": vocab,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": layers},
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, len(layers) * hidden),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (kv_heads * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
        "embed_tokens.weight": (vocab, hidden),
    }
    generator = torch.Generator().manual_seed(seed)
    weights = {name: torch.randn(*shape, generator=generator) * 0.2 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors")
    return folder


HEADED = ("gemma4_text", "deepseek_v2", "bamba")


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("kind", HEADED)
def test_a_head_drafts_for_any_family(kind: str, tmp_path: Path, seed: int) -> None:
    path = make_checkpoint(kind, tmp_path / kind, vocab_size=FEW)
    layers = load(path).spec.state_of_layers
    head = make_head(tmp_path / "head", FEW, 64, (1, layers), seed)
    setting, reqs = SHAPES["short of pages"], lambda: among(FEW, seed, SOME)
    plain = Player(setting, load(path), None).play(reqs())
    player = Player(replace(setting, method=f"eagle:{head}"), load(path), None)
    same_but_for_rounding(plain, player.play(reqs()), reqs())
    assert player.drafts.tokens > 20
