"""Every served kind gives packed, over shuffled pages, in any mix of steps, the logits transformers gives plain."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from core.errors import ModelLoadError
from core.models.hf.mla import LatentHeads
from tests.support.checkpoints import (
    BOS_ID,
    CONFIGS,
    CONTEXT_LENGTH,
    EOS_ID,
    REFUSED_CONFIGS,
    VOCAB_SIZE,
    make_checkpoint,
)
from tests.support.fakes.paged_steps import Part
from tests.unit.core.models.reference import PackedRun, PlainModel, load

LENGTHS = {1: 44, 2: 30, 3: 12, 4: 3}

# Longer than the windows of 16; chunks end beside them, rows change places, one step wants no logits at all.
STEPS: list[tuple[list[Part], int, list[int]]] = [
    ([Part(1, 0, 21), Part(2, 0, 5)], 2, [1]),
    ([Part(1, 21, 11), Part(3, 0, 9), Part(2, 5, 1)], 2, [1, 2]),
    ([Part(1, 32, 4)], 1, []),
    ([Part(2, 6, 17), Part(4, 0, 1), Part(1, 36, 1), Part(3, 9, 1)], 2, [0, 1, 2, 3]),
    ([Part(3, 10, 1), Part(2, 23, 1), Part(4, 1, 1), Part(1, 37, 1)], 0, [0, 1, 2, 3]),
    ([Part(1, 38, 1), Part(4, 2, 1), Part(2, 24, 1)], 0, [0, 1, 2]),
    ([Part(2, 25, 5), Part(1, 39, 4), Part(3, 11, 1)], 2, [0, 1, 2]),
    ([Part(1, 43, 1)], 0, [0]),
]

Make = Callable[[str], Path]


def sequences(seed: int = 0) -> dict[int, list[int]]:
    draw = random.Random(seed)
    return {row: [draw.randrange(3, VOCAB_SIZE) for _ in range(length)] for row, length in LENGTHS.items()}


def worst_error(run: PackedRun, expected: dict[int, torch.Tensor]) -> tuple[float, bool]:
    """The largest logit error of `STEPS`, and whether every arg max was the same."""
    worst, same = 0.0, True
    for parts, num_extend, sample in STEPS:
        got = run.step(parts, num_extend, sample)
        assert got.shape == (len(sample), run.model.spec.vocab_size)
        assert got.dtype == torch.float32
        for logits, index in zip(got, sample, strict=True):
            part = parts[index]
            want = expected[part.row][part.prefix + part.extend - 1]
            worst = max(worst, (logits - want).abs().max().item())
            same = same and bool(logits.argmax() == want.argmax())
    return worst, same


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_packed_steps_equal_plain_forward(checkpoint: Make, kind: str, page_size: int) -> None:
    path, rows = checkpoint(kind), sequences()
    plain = PlainModel(path)
    run = PackedRun(load(path), rows, page_size=page_size)
    worst, same = worst_error(run, {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4, f"{kind}: {worst:.2e}"
    assert same


@pytest.mark.parametrize("kind", ["llama", "gemma3_text", "gpt_oss", "deepseek_v3"])
def test_bf16_stays_within_its_rounding(checkpoint: Make, kind: str) -> None:
    path, rows = checkpoint(kind), sequences()
    model = load(path, "bfloat16")
    assert model.spec.dtype == torch.bfloat16
    plain = PlainModel(path, torch.bfloat16)
    worst, _ = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 0.5, "logits have a standard deviation of 2.5"


def test_llama4_scales_queries_by_position_in_packed_rows(tmp_path: Path) -> None:
    """Its scale comes from `arange(T)` plus the cache's length, which in a packed row is no position at all."""
    path = make_checkpoint("llama4_text", tmp_path, no_rope_layers=[0, 0], floor_scale=6, attn_scale=0.7)
    rows = sequences()
    plain = PlainModel(path)
    worst, same = worst_error(PackedRun(load(path), rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4
    assert same


def test_padded_rows_change_nothing(checkpoint: Make) -> None:
    rows = sequences()
    run = PackedRun(load(checkpoint("mistral")), rows)
    prefill = [Part(row, 0, len(ids) - 1) for row, ids in rows.items()]
    run.step(prefill, len(prefill), [])
    decode = [Part(row, len(ids) - 1, 1) for row, ids in rows.items()]
    real = run.step(decode, 0)
    padded = run.step([*decode, Part(0, 0, 1), Part(0, 0, 1)], 0)
    assert padded.isfinite().all()
    assert torch.allclose(padded[: len(decode)], real, atol=1e-5)


def test_two_models_in_one_process_keep_apart(checkpoint: Make) -> None:
    rows = sequences()
    runs = {kind: PackedRun(load(checkpoint(kind)), rows, seed=seed) for seed, kind in enumerate(["llama", "gpt_oss"])}
    # The same weights twice, with two pools: module attributes must not be shared between instances either.
    runs["llama again"] = PackedRun(load(checkpoint("llama")), rows, seed=7, page_size=1)
    expected = {
        name: PlainModel(checkpoint(name.split()[0])).logits(rows[1][:22])[-1].argmax() for name, run in runs.items()
    }
    for run in runs.values():
        run.step([Part(1, 0, 21)], 1, [])
    for name, run in runs.items():
        assert run.step([Part(1, 21, 1)], 0)[0].argmax() == expected[name]


def test_binds_again_to_another_pool(checkpoint: Make) -> None:
    rows, model = sequences(), load(checkpoint("qwen3"))
    first = PackedRun(model, rows, seed=1)
    before = first.step([Part(1, 0, 20)], 1)
    second = PackedRun(model, rows, seed=2, page_size=16)
    assert torch.allclose(second.step([Part(1, 0, 20)], 1), before, atol=1e-5)
    first.rebind()
    assert torch.allclose(first.step([Part(1, 0, 20)], 1), before, atol=1e-6)


def test_refuses_a_pool_of_another_shape(checkpoint: Make) -> None:
    rows, model = sequences(), load(checkpoint("llama"))
    other = load(checkpoint("mistral"))
    with pytest.raises(AssertionError, match="another model"):
        model.bind(PackedRun(other, rows).paged.pool, None)  # type: ignore[arg-type]


def test_spec_says_what_the_checkpoint_says(checkpoint: Make) -> None:
    spec = load(checkpoint("gemma3_text")).spec
    assert spec.architecture == "Gemma3ForCausalLM"
    assert spec.name == checkpoint("gemma3_text").name
    assert (spec.vocab_size, spec.context_length) == (VOCAB_SIZE, CONTEXT_LENGTH)
    assert (spec.eos_token_ids, spec.bos_token_id) == ((EOS_ID,), BOS_ID)
    assert [(s.layer_id, s.num_kv_heads, s.k_dim, s.v_dim) for s in spec.kv_layers] == [
        (i, 2, 16, 16) for i in range(4)
    ]


def test_layers_that_share_kv_take_no_pool_of_their_own(checkpoint: Make) -> None:
    assert [s.layer_id for s in load(checkpoint("gemma4_text")).spec.kv_layers] == [0, 1]


@pytest.mark.parametrize("kind", ["deepseek_v3", "deepseek_v2"])
def test_latents_are_cached_once_for_all_heads(checkpoint: Make, kind: str) -> None:
    layers = load(checkpoint(kind)).spec.kv_layers
    assert {(s.num_kv_heads, s.k_dim, s.v_dim, s.v_in_k) for s in layers} == {(1, 40, 32, True)}


def test_a_latent_read_wrongly_is_served_expanded(checkpoint: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """The self-check refuses the absorbed form, and the model goes on with keys wider than its values."""
    path, rows, absorb = checkpoint("deepseek_v3"), sequences(), LatentHeads.absorb
    monkeypatch.setattr(LatentHeads, "absorb", lambda self, query: 1.1 * absorb(self, query))
    model, plain = load(path), PlainModel(path)
    assert {(s.num_kv_heads, s.k_dim, s.v_dim, s.v_in_k) for s in model.spec.kv_layers} == {(4, 24, 16, False)}
    worst, same = worst_error(PackedRun(model, rows), {row: plain.logits(ids) for row, ids in rows.items()})
    assert worst < 1e-4
    assert same


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("falcon", "rounded to 16 bits"),
        ("gpt_neox_japanese", "attention interface"),
        ("xglm", "attention interface"),
    ],
)
def test_refuses_by_name_what_cannot_be_packed(tmp_path: Path, kind: str, reason: str) -> None:
    with pytest.raises(ModelLoadError, match=rf"'{kind}'.*{reason}") as caught:
        load(make_checkpoint(kind, tmp_path, **REFUSED_CONFIGS[kind]))
    assert "\n" not in caught.value.message
