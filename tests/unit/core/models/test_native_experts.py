"""Mixtures of experts in native code: routers as transformers has them, rows that do not depend on their company."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native.families import FAMILIES
from core.models.native.mixtures import plain_weights, read_gating, read_router, router_product
from core.models.native.parts import Matrix
from core.models.native.reading import NotDense
from tests.support.fakes.paged_steps import Part
from tests.support.native_cases import CASES, checkpoint_of
from tests.support.tiles import same_bits
from tests.unit.core.models.reference import CPU, PackedRun
from tests.unit.core.models.test_native_shapes import LONG, OTHER, logits, sequences

MIXTURES = {
    "qwen3_moe": ("softmax", True),
    "olmoe": ("softmax", False),
    "gpt_oss": ("softmax", True),
    "glm4_moe": ("sigmoid", True),
    "phimoe": ("sparsemixer", False),
}
"""How scores are made, and whether weights are made to sum to 1; a softmax of all that is then is one of the chosen."""


def mixture(case: str, dtype: torch.dtype = torch.float32, **others: int) -> Any:
    """The MLP of the last layer of a random model."""
    torch.manual_seed(3)
    config = AutoConfig.for_model(case, **CASES[case] | others)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).base_model.layers[-1].mlp


def routed(mlp: Any, case: str, dtype: torch.dtype) -> tuple[Any, Any]:
    module = getattr(mlp, FAMILIES[case].mixture.router)
    weight = router_product(module, CASES[case]["hidden_size"])
    return module, read_router(module, Matrix(weight.weight, None, weight.bias), dtype, None)


@pytest.mark.parametrize("case", MIXTURES)
def test_a_router_is_known_by_what_it_chooses(case: str) -> None:
    _, router = routed(mixture(case), case, torch.float32)
    assert (router.scoring, router.renormalises) == MIXTURES[case]


@pytest.mark.parametrize(("case", "rounds"), [("qwen3_moe", True), ("glm4_moe", False)])
def test_logits_are_rounded_where_the_router_rounds_them(case: str, rounds: bool) -> None:
    mlp = mixture(case, torch.bfloat16)
    if not rounds:
        mlp.gate.weight.data = mlp.gate.weight.data.float()  # as its checkpoints are loaded
    assert routed(mlp, case, torch.bfloat16)[1].rounds is rounds


def test_experts_are_chosen_from_the_best_groups_with_what_corrects_their_scores() -> None:
    mlp = mixture("glm4_moe")
    mlp.gate.e_score_correction_bias[:] = torch.tensor([0.3, -0.2, 0.0, 0.1, 0.4, -0.4, 0.2, -0.1])
    module, router = routed(mlp, "glm4_moe", torch.float32)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7)) * 20
    found, weights, experts = module(x)
    wanted = torch.zeros(64, 8).scatter_(1, experts, weights)
    torch.testing.assert_close(plain_weights(router, found), wanted)


@pytest.mark.parametrize(("method", "groups"), [("greedy", 1), ("group_limited_greedy", 4)])
def test_groups_that_a_router_does_not_look_at_are_none(method: str, groups: int) -> None:
    mlp = mixture("deepseek_v2")
    mlp.gate.topk_method = method
    found = None
    with suppress(NotDense):
        found = routed(mlp, "deepseek_v2", torch.float32)[1].groups
    assert found == groups


def test_a_group_may_be_one_expert() -> None:
    """DeepSeek-V3 would add up the best two of a group, and there is one."""
    module, router = routed(mixture("deepseek_v2", n_group=8, topk_group=3), "deepseek_v2", torch.float32)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(7)) * 20
    found, weights, experts = module(x)
    assert router.groups == 8
    torch.testing.assert_close(plain_weights(router, found), torch.zeros(64, 8).scatter_(1, experts, weights))


def test_a_router_of_another_kind_is_refused() -> None:
    mlp = mixture("qwen3_moe")
    forward = mlp.gate.forward
    mlp.gate.forward = lambda states: (*forward(states)[:2], forward(states)[2].flip(0))
    with pytest.raises(NotDense, match="chooses experts in another way"):
        routed(mlp, "qwen3_moe", torch.float32)


def test_a_gate_of_another_kind_is_refused() -> None:
    experts = mixture("gpt_oss").experts
    assert read_gating(experts).clamp is not None and not read_gating(experts).parted
    experts.alpha = 2.0 * experts.alpha
    assert read_gating(experts).clamp.alpha == experts.alpha
    experts._apply_gate = lambda both: both[:, ::2].square()
    with pytest.raises(NotDense, match="gate of another kind"):
        read_gating(experts)


@pytest.mark.usefixtures("native_code")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["qwen2_moe", "gpt_oss"])
def test_a_row_is_the_same_to_the_bit_alone_and_beside_others(case: str, dtype: str, tmp_path: Path) -> None:
    """One token sums its experts while they are at hand, several are sorted by expert first."""
    rows = sequences()
    config = ModelConfig(str(checkpoint_of(case, tmp_path)), dtype=dtype, native="wait", **same_bits(dtype))
    model = load_model(config, CPU)
    run = PackedRun(model, rows, max_len=LONG + 2)
    everyone = [Part(1, LONG - 1, 1), Part(2, OTHER - 1, 1), *(Part(r, len(rows[r]) - 1, 1) for r in range(3, 9))]
    run.step([Part(p.row, 0, p.prefix) for p in everyone], len(everyone))
    together = run.step(everyone, 0).clone()
    for place, part in enumerate(everyone):
        assert torch.equal(run.step([part], 0)[0], together[place])
    assert torch.equal(run.step(everyone[:2], 0), together[:2])


@pytest.mark.usefixtures("native_code")
def test_threads_do_not_change_a_bit_of_a_mixture(tmp_path: Path) -> None:
    path = checkpoint_of("qwen2_moe", tmp_path)
    for one, other in zip(logits(path, 1), logits(path, 4), strict=True):
        assert torch.equal(one, other)
