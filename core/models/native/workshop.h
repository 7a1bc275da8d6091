// What the blocks of a decoder compute with: threads, and buffers that are kept from step to step.

#pragma once

#include <algorithm>
#include <vector>

#include "panels.h"
#include "scratch.h"
#include "team.h"

namespace slipstream {

// What all blocks compute with. Buffers are by place: see `decoder.cpp`.
struct Workshop {
  Workshop(int64_t threads, bool invariant) : team(threads), scratch(threads, Scratch(invariant)) {}

  // [rows][stride] at buffer `place`, rows filled up to what products may touch.
  template <typename T>
  T* buffer(int64_t place, int64_t rows, int64_t stride) {
    return buffers.take<T>(place, round_up(rows, kRows) * stride);
  }

  // Calls work(from, to) over all of `count`; by this thread alone where waking others would take longer.
  template <typename Work>
  void in_blocks(int64_t count, int64_t size, const Work& work) {
    const int64_t blocks = (count + size - 1) / size;
    team.run(blocks, [&](int64_t block, int64_t) { work(block * size, std::min(count, (block + 1) * size)); });
  }

  Team team;
  std::vector<Scratch> scratch;
  Scratch buffers;
};

}  // namespace slipstream
