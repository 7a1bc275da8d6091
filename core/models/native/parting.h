// Into how many parts the KV heads of a step's groups are dealt to threads.
//
// Heads of a token lie side by side, and memory is read in order only where one thread takes neighbours: two streams of
// 8,192 keys took 1.5 times as long a head at a time. So heads part only as far as threads would else wait for each other.

#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <vector>

#include "sharing.h"

namespace slipstream {

// Groups from which on there is enough to do for every thread, whatever their lengths are.
constexpr int64_t kGroupsForEach = 4;
constexpr int64_t kMostThreads = 64;

// What a group's attention takes: keys are packed once for each piece, as dear as some rows, and multiplied with every row.
template <typename FirstKey>
double work_of(const Group& group, const FirstKey& first_key) {
  constexpr double kPacked = 8.0;
  double work = 0.0, tokens = 0.0;
  for (int64_t i = 0; i < group.count; ++i) {
    const Piece& piece = group.pieces[i];
    const int64_t from = std::max(group.shared, first_key(piece.position));
    work += (kPacked + static_cast<double>(piece.tokens)) * static_cast<double>(piece.position + piece.tokens - from);
    tokens += static_cast<double>(piece.tokens);
  }
  return work + (kPacked + tokens) * static_cast<double>(group.shared);
}

// When the last of `threads` ends, if each takes the next chunk as soon as it is free.
inline double end_of(const double* works, size_t count, int64_t parts, int64_t threads) {
  std::array<double, kMostThreads> busy{};
  const auto end = busy.begin() + threads;
  for (size_t group = 0; group < count; ++group)
    for (int64_t part = 0; part < parts; ++part)
      *std::min_element(busy.begin(), end) += works[group] / static_cast<double>(parts);
  return *std::max_element(busy.begin(), end);
}

// The divisor of `kv_heads` with which all threads end first, and the least of such.
template <typename FirstKey>
int64_t parts_of(const std::vector<Group>& groups, int64_t kv_heads, int64_t threads, const FirstKey& first_key) {
  // What heads that do not read their neighbours' memory take, measured.
  constexpr double kApart = 1.4;
  threads = std::min(threads, kMostThreads);
  if (groups.size() >= static_cast<size_t>(kGroupsForEach * threads)) return 1;
  std::array<double, kGroupsForEach * kMostThreads> works;
  for (size_t group = 0; group < groups.size(); ++group) works[group] = work_of(groups[group], first_key);
  int64_t best = 1;
  double earliest = end_of(works.data(), groups.size(), 1, threads);
  for (int64_t parts = 2; parts <= kv_heads; ++parts) {
    if (kv_heads % parts != 0) continue;
    const double end = kApart * end_of(works.data(), groups.size(), parts, threads);
    if (end >= earliest) continue;
    earliest = end;
    best = parts;
  }
  return best;
}

}  // namespace slipstream
