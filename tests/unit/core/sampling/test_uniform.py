"""The hash behind each draw: stateless, uniform, and independent along seeds and along positions."""

from __future__ import annotations

import numpy as np
import pytest

from core.sampling import uniform
from core.sampling.uniform import derive_seed, origin

N = 1 << 16


def uniforms(seeds: np.ndarray, positions: np.ndarray, prompt_len: int = 0) -> np.ndarray:
    """The numbers of output `positions` behind prompts of `prompt_len` tokens."""
    origins = np.array([origin(seed, prompt_len) for seed in seeds.tolist()], np.int64)
    return uniform.uniforms(origins, positions + prompt_len)


def _grid(axis: str) -> np.ndarray:
    counter = np.arange(N, dtype=np.int64)
    fixed = np.full(N, 7, np.int64)
    return uniforms(counter, fixed) if axis == "seed" else uniforms(fixed, counter)


def test_value_depends_on_seed_and_position_only() -> None:
    seeds = np.array([3, 3, 2**63 - 1, 0], np.int64)
    positions = np.array([0, 1, 5, 9], np.int64)
    together = uniforms(seeds, positions)
    alone = [uniforms(seeds[i : i + 1], positions[i : i + 1])[0] for i in range(4)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4
    assert uniforms(seeds[::-1], positions[::-1]).tolist() == alone[::-1]
    for prompt_len in (1, 7, 131_072):
        assert uniforms(seeds, positions, prompt_len).tolist() == alone


def test_values_are_pinned() -> None:
    """A client's seed must give the same text after an upgrade; change these only with a note in the changelog."""
    found = uniforms(np.array([0, 1, 42, 2**63 - 1]), np.array([0, 0, 100, 3]))
    assert found.tolist() == [
        0.6524484863740322,
        0.36818951565166946,
        0.673550727720063,
        0.027741299772987005,
    ]


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_uniform_over_the_unit_interval(axis: str) -> None:
    found = _grid(axis)
    assert found.min() >= 0.0 and found.max() < 1.0
    counts, _ = np.histogram(found, bins=256, range=(0, 1))
    chi_square = ((counts - N / 256) ** 2 / (N / 256)).sum()
    # 255 degrees of freedom: mean 255, standard deviation 22.6; five of those either way.
    assert 255 - 113 < chi_square < 255 + 113


@pytest.mark.parametrize("axis", ["seed", "position"])
def test_neighbours_are_uncorrelated(axis: str) -> None:
    found = _grid(axis) - 0.5
    for lag in (1, 2, 3, 64):
        correlation = 12 * (found[lag:] * found[:-lag]).mean()
        assert abs(correlation) < 5 / np.sqrt(N), (axis, lag)


def test_every_bit_is_balanced() -> None:
    words = (_grid("seed") * 2**53).astype(np.uint64)
    for bit in range(53):
        share = ((words >> np.uint64(bit)) & np.uint64(1)).mean()
        assert abs(share - 0.5) < 5 * 0.5 / np.sqrt(N), bit


def test_seed_and_position_are_not_interchangeable() -> None:
    a, b = np.arange(1, 1000, dtype=np.int64), np.arange(1000, 1999, dtype=np.int64)
    assert not np.isin(uniforms(a, b), uniforms(b, a)).any()


def test_derived_seeds() -> None:
    assert derive_seed(12345, 0) == 12345
    found = {derive_seed(seed, index) for seed in range(64) for index in range(64)}
    assert len(found) == 64 * 64
    assert all(0 <= value < 2**63 for value in found)
    # Outputs of one request must not be shifted copies of each other.
    columns = [uniforms(np.full(4096, derive_seed(5, i)), np.arange(4096)) for i in range(4)]
    for i in range(4):
        for j in range(i):
            assert not np.isin(columns[i], columns[j]).any()
            assert abs(12 * ((columns[i] - 0.5) * (columns[j] - 0.5)).mean()) < 5 / np.sqrt(4096)


@pytest.mark.parametrize(("request_seed", "index"), [(-1, 0), (2**63, 0), (1, -1)])
def test_out_of_range_is_a_bug(request_seed: int, index: int) -> None:
    with pytest.raises(AssertionError):
        derive_seed(request_seed, index)


def test_empty() -> None:
    none = np.empty(0, np.int64)
    assert uniforms(none, none).shape == (0,)
