"""Into how many parts heads are dealt: as few as keep all threads busy, since neighbours lie side by side in memory."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from torch.utils import cpp_extension

from core.models.native import extension

HEADS = 8
SOURCE = """
#include "parting.h"

// Groups of one piece each, and the first group of `together` pieces behind keys that they share.
extern "C" int64_t parts(int64_t count, int64_t together, const int64_t* positions, int64_t tokens, int64_t shared,
                         int64_t heads, int64_t threads, int64_t window) {
  using namespace slipstream;
  std::vector<Piece> pieces;
  for (int64_t i = 0; i < count; ++i) pieces.push_back({i, tokens, positions[i], nullptr});
  std::vector<Group> groups;
  for (int64_t i = 0; i < count; i += groups.size() == 1 ? together : 1)
    groups.push_back({&pieces[i], groups.empty() ? together : 1, groups.empty() ? shared : 0, nullptr});
  return parts_of(groups, heads, threads, [=](int64_t position) {
    return window > 0 ? std::max<int64_t>(0, position + 1 - window) : 0;
  });
}
"""


@pytest.fixture(scope="module")
def parting(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    folder = tmp_path_factory.mktemp("parting")
    (folder / "parts.cpp").write_text(SOURCE)
    include = [f"-I{path}" for path in (Path(extension.__file__).parent, *cpp_extension.include_paths())]
    command = ["c++", "-std=c++20", "-Wno-psabi", "-shared", "-fPIC", *include, "parts.cpp", "-o", "parts.so"]
    subprocess.run(command, check=True, cwd=folder)
    return ctypes.CDLL(str(folder / "parts.so"))


def parts(
    parting: ctypes.CDLL,
    positions: Sequence[int],
    threads: int,
    *,
    tokens: int = 1,
    together: int = 1,
    shared: int = 0,
    heads: int = HEADS,
    window: int = 0,
) -> int:
    given = (ctypes.c_int64 * len(positions))(*positions)
    parting.parts.restype, number = ctypes.c_int64, ctypes.c_int64
    found = parting.parts(
        number(len(positions)),
        number(together),
        given,
        *map(number, (tokens, shared, heads, threads, window)),
    )
    assert isinstance(found, int)
    return found


@pytest.mark.parametrize(("threads", "wanted"), [(1, 1), (2, 2), (3, 8), (4, 4), (8, 8), (16, 8), (200, 8)])
def test_one_stream_parts_as_far_as_threads_have_something_to_do(
    parting: ctypes.CDLL, threads: int, wanted: int
) -> None:
    assert parts(parting, [8000], threads) == wanted
    assert parts(parting, [0], threads, tokens=512) == wanted


@pytest.mark.parametrize("streams", [2, 3, 4, 5, 8, 300])
def test_equal_streams_stay_whole_where_each_thread_has_one(parting: ctypes.CDLL, streams: int) -> None:
    assert parts(parting, [8000] * streams, 2) == 1


def test_a_long_stream_beside_a_short_one_parts(parting: ctypes.CDLL) -> None:
    assert parts(parting, [8000, 100], 2) == 2
    assert parts(parting, [100, 8000], 2) == 2
    assert parts(parting, [8000, 8000, 8000], 8, heads=4) == 2


def test_keys_that_left_a_window_are_no_work(parting: ctypes.CDLL) -> None:
    assert parts(parting, [8000, 100], 2, window=64) == 1
    assert parts(parting, [8000, 10], 2, window=64) == 2


def test_shared_keys_are_read_once(parting: ctypes.CDLL) -> None:
    """Three streams behind a prefix take as long as one beside them, which each would take alone."""
    assert parts(parting, [8000] * 3 + [8000], 2, together=3, shared=7900) == 1
    assert parts(parting, [8000] * 3 + [700], 2, together=3, shared=7900) == 2
    assert parts(parting, [8000] * 3 + [3000], 2, together=3, shared=0) == 2


def test_only_divisors_of_the_heads(parting: ctypes.CDLL) -> None:
    assert parts(parting, [8000], 2, heads=7) == 7
    assert parts(parting, [8000], 4, heads=6) == 3
    assert parts(parting, [8000], 2, heads=1) == 1
