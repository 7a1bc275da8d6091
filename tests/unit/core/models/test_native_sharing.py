"""Native attention reads what requests have in common once for all of them, and each gets what it gets alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from core.config import ModelConfig
from core.models.loader import load_model
from core.models.native.family import UpgradingModel
from tests.support.fakes.paged_steps import Part
from tests.support.native_cases import checkpoint_of
from tests.unit.core.models.reference import CPU, PackedRun, PlainModel

pytestmark = pytest.mark.usefixtures("native_code")

FIRST, BRANCH, SECOND = 200, 64, 140
"""Tokens of a system prompt, where another one parts from it, and how long that is."""
BEHIND_FIRST, BEHIND_SECOND, BETWEEN = range(2, 12), range(13, 17), range(17, 20)
"""Rows that share the prompt of row 1, of row 12 (which shares its beginning with row 1), and nothing."""
GROUPS: dict[str, dict[str, Any]] = {
    "one head": {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16},
    "four heads to a KV head": {"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 16},
    "heads of eighty": {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 80},
}
OTHERS = {"latents": "youtu", "distances": "bloom"}
"""Keys of other kinds -> the case that has them."""


def sequences(seed: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        return torch.randint(10, 120, (count,), generator=generator).tolist()

    first = draw(FIRST)
    second = first[:BRANCH] + draw(SECOND - BRANCH)
    rows = {1: first + draw(3), 12: second + draw(2)}
    rows |= {row: first + draw(3 + row % 5) for row in BEHIND_FIRST}
    rows |= {row: second + draw(4) for row in BEHIND_SECOND}
    return rows | {row: draw(20 + 60 * (row % 3)) for row in BETWEEN}


class SharedRun(PackedRun):
    """Rows whose table names the pages of the row that had their beginning before them."""

    def __init__(self, model: UpgradingModel, rows: dict[int, list[int]]) -> None:
        super().__init__(model, rows, max_len=FIRST + 20)
        table = self.paged.table
        table[12, :BRANCH] = table[1, :BRANCH]
        for row in BEHIND_FIRST:
            table[row, :FIRST] = table[1, :FIRST]
        for row in BEHIND_SECOND:
            table[row, :SECOND] = table[12, :SECOND]


def last(rows: dict[int, list[int]], row: int, back: int = 1) -> Part:
    """Decode of the token of `row` that is `back` from its end."""
    return Part(row, len(rows[row]) - back, 1)


def steps(rows: dict[int, list[int]]) -> list[tuple[list[Part], int]]:
    """The prompts; what is behind them, in turns, beside a decode row; all decode, in turns; two of them."""
    own = [(row, FIRST) for row in BEHIND_FIRST] + [(row, SECOND) for row in BEHIND_SECOND] + [(r, 0) for r in BETWEEN]
    mixed = sorted(own, key=lambda each: (each[0] * 7) % 19)
    everyone = sorted([1, 12, *(row for row, _ in own)], key=lambda row: (row * 5) % 23)
    return [
        ([Part(1, 0, FIRST + 1)], 1),
        ([Part(12, BRANCH, len(rows[12]) - BRANCH - 1), last(rows, 1, 2)], 1),
        ([Part(row, done, len(rows[row]) - done - 1) for row, done in mixed], len(mixed)),
        ([last(rows, row) for row in everyone], 0),
        ([last(rows, 3), last(rows, 7)], 0),
    ]


def load(path: Path, dtype: str) -> UpgradingModel:
    model = load_model(ModelConfig(str(path), dtype=dtype, native="wait"), CPU)
    assert isinstance(model, UpgradingModel) and model.native
    return model


@pytest.mark.parametrize("shape", [*GROUPS, *OTHERS])
def test_shared_prefixes_give_what_transformers_gives(
    shaped: Callable[..., Path], shape: str, tmp_path: Path, seed: int
) -> None:
    path = shaped(**GROUPS[shape]) if shape in GROUPS else checkpoint_of(OTHERS[shape], tmp_path / "other")
    rows = sequences(seed)
    plain = PlainModel(path)
    expected = {row: plain.logits(ids) for row, ids in rows.items()}
    run = SharedRun(load(path, "float32"), rows)
    for parts, num_extend in steps(rows):
        want = torch.stack([expected[part.row][part.prefix + part.extend - 1] for part in parts])
        torch.testing.assert_close(run.step(parts, num_extend), want, atol=1e-4, rtol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 0.0), ("bfloat16", 0.05)])
def test_company_behind_a_prefix_changes_nothing(
    shaped: Callable[..., Path], dtype: str, tolerance: float, seed: int
) -> None:
    """In float32 not a bit: the sums are taken in the same order."""
    path, rows = shaped(**GROUPS["four heads to a KV head"]), sequences(seed)
    run = SharedRun(load(path, dtype), rows)
    *before, (everyone, _), _ = steps(rows)
    for parts, num_extend in before:
        run.step(parts, num_extend)
    together = run.step(everyone, 0).clone()
    alone = torch.cat([run.step([part], 0) for part in everyone])
    assert float((together - alone).abs().max()) <= tolerance * float(alone.abs().max())


@pytest.mark.parametrize("parting", [BRANCH, BRANCH + 12], ids=["between panels", "within a panel"])
def test_a_copy_of_a_prefix_is_not_taken_for_the_prefix(shaped: Callable[..., Path], parting: int, seed: int) -> None:
    """Slots decide, not tokens: behind equal first slots come others, of which one request must not see the other's."""
    path, rows = shaped(**GROUPS["one head"]), sequences(seed)
    rows = {1: rows[1], 2: rows[2]}
    model = load(path, "float32")
    run = PackedRun(model, rows, max_len=FIRST + 20)
    run.paged.table[2, :parting] = run.paged.table[1, :parting]
    run.paged.table[2, parting + 4 : FIRST] = run.paged.table[1, parting + 4 : FIRST]
    run.step([Part(1, 0, FIRST + 1)], 1)
    run.step([Part(2, parting, len(rows[2]) - parting - 1)], 1)
    parts = [Part(1, FIRST + 1, 1), last(rows, 2)]
    plain = PlainModel(path)
    want = torch.stack([plain.logits(rows[part.row])[part.prefix] for part in parts])
    torch.testing.assert_close(run.step(parts, 0), want, atol=1e-4, rtol=0)
    # What only one of them has in its own slots is now different, and only that one may notice.
    layer = run.model.spec.kv_layers[0].layer_id
    before = run.step(parts, 0).clone()
    run.paged.pool.v(layer)[run.paged.table[2, parting]] = 7.0
    after = run.step(parts, 0)
    assert torch.equal(after[0], before[0]) and not torch.equal(after[1], before[1])
