"""Which lines of the next weights the blocks of rows ask for: together each one once, whatever their number."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest

from core.models.native import extension

LINE, STEPS = 64, 5
SOURCE = """
#include "ahead.h"

// Offsets of what `block` asks for in each step, [steps][2]; returns whether it asks for anything.
extern "C" bool asked(bool known, int64_t lines, int64_t block, int64_t blocks, int64_t steps, int64_t* offsets) {
  static const char weights[1] = {};
  const slipstream::Ahead ahead(known ? weights : nullptr, lines, block, blocks);
  if (!ahead) return false;
  for (int64_t step = 0; step < steps; ++step) {
    const auto [first, second] = ahead.lines(step);
    offsets[2 * step] = first - weights;
    offsets[2 * step + 1] = second - weights;
  }
  return true;
}

// The same of `part` of `parts`, [steps][each]: `each` lines in every step.
extern "C" bool trickled(bool known, int64_t lines, int64_t block, int64_t blocks, int64_t part, int64_t parts,
                         int64_t each, int64_t steps, int64_t* offsets) {
  static const char weights[1] = {};
  const slipstream::Trickle trickle(known ? weights : nullptr, lines, block, blocks);
  if (!trickle) return false;
  const auto share = trickle.part(part, parts, steps);
  for (int64_t step = 0; step < steps; ++step)
    for (int64_t line = 0; line < each; ++line) offsets[each * step + line] = share.line(step, line) - weights;
  return true;
}
"""


@pytest.fixture(scope="module")
def ahead(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("ahead")
    (folder / "asked.cpp").write_text(SOURCE)
    include = Path(extension.__file__).parent
    command = ["c++", "-std=c++20", "-shared", "-fPIC", f"-I{include}", "asked.cpp", "-o", "asked.so"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "asked.so"))


def asked(ahead: ctypes.CDLL, lines: int, block: int, blocks: int, *, known: bool = True) -> list[set[int]]:
    """By step, the lines that `block` asks for; nothing where it asks for none."""
    offsets = (ctypes.c_int64 * (2 * STEPS))()
    ahead.asked.restype, numbers = ctypes.c_bool, [ctypes.c_int64(n) for n in (lines, block, blocks, STEPS)]
    if not ahead.asked(known, *numbers, offsets):
        return []
    return [{offset // LINE for offset in offsets[2 * step : 2 * step + 2]} for step in range(STEPS)]


@pytest.mark.parametrize("lines", [1, 2, 4])
@pytest.mark.parametrize("blocks", [2, 3, 4, 5, 40])
def test_all_blocks_together_ask_for_each_line_once(ahead: ctypes.CDLL, lines: int, blocks: int) -> None:
    parts = [part for block in range(blocks) if (part := asked(ahead, lines, block, blocks))]
    for step in range(STEPS):
        found = [line for part in parts for line in part[step]]
        assert sorted(found) == list(range(step * lines, (step + 1) * lines))


def test_one_block_and_unknown_weights_ask_for_nothing(ahead: ctypes.CDLL) -> None:
    assert asked(ahead, 4, 0, 1) == asked(ahead, 4, 0, 2, known=False) == []


def trickled(ahead: ctypes.CDLL, lines: int, block: int, blocks: int, part: int, parts: int, steps: int) -> list[int]:
    """The lines that steps of a part of a block ask for, in order, as many in each step as a lone block asks for."""
    each = max(1, 4 // parts)
    offsets = (ctypes.c_int64 * (each * steps))()
    ahead.trickled.restype = ctypes.c_bool
    numbers = [ctypes.c_int64(n) for n in (lines, block, blocks, part, parts, each, steps)]
    assert ahead.trickled(True, *numbers, offsets)
    return [offset // LINE for offset in offsets]


@pytest.mark.parametrize("lines", [1, 2, 4])
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 43, 300])
def test_all_parts_of_all_blocks_ask_for_every_line(ahead: ctypes.CDLL, lines: int, parts: int, blocks: int) -> None:
    steps = 64
    found = [
        line
        for block in range(blocks)
        for part in range(parts)
        for line in trickled(ahead, lines, block, blocks, part, parts, steps)
    ]
    assert set(range(lines * steps)) <= set(found)
    assert max(found) <= lines * steps + 4, "what lies behind is another thread's"


def test_a_lone_block_spreads_what_it_asks_for_evenly(ahead: ctypes.CDLL) -> None:
    assert [trickled(ahead, 4, 0, 1, part, 4, 3) for part in range(4)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert [trickled(ahead, 4, 0, 1, part, 2, 2) for part in range(2)] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert trickled(ahead, 4, 1, 2, 0, 4, 4) == [8, 8, 9, 9]


def test_weights_that_are_not_known_are_not_asked_for(ahead: ctypes.CDLL) -> None:
    zeros = [ctypes.c_int64(n) for n in (4, 0, 1, 0, 1, 4, 0)]
    ahead.trickled.restype = ctypes.c_bool
    assert not ahead.trickled(False, *zeros, (ctypes.c_int64 * 1)())
