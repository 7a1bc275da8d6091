// One token per row by inverse CDF, among those that top-k, top-p and min-p keep. See core/sampling/{draw,cutoff}.py.
//
// Weights are whole numbers and their sums exact, so the tokens are those of the torch way, whatever the order of the
// additions. What a row keeps is a threshold on the value. With a small top-k it lies among the values of the groups
// with the largest maxima, of which few are looked at. Else values are counted into buckets by their distance from the
// row's largest, and only the bucket in which the threshold lies is sorted.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <functional>
#include <vector>

#include "peaks.h"

namespace slipstream_host {

constexpr int64_t kBuckets = 512;
constexpr float kBucketsPerUnit = 14.0f;  // the weight of what is 36 below the largest is 0: beyond is one bucket

constexpr int64_t kGroup = 32;    // tokens that share a maximum where few are wanted; divides every padded width
constexpr int64_t kBlock = 128;   // tokens that are passed at once on the way to the one drawn; divides it too

struct Candidate {
  float value;
  int64_t weight;
};

struct Filter {
  int64_t top_k;  // 0 for off
  double top_p;   // 1 for off
  float floor;    // log(min_p), -inf for off

  bool ranks() const { return top_k > 0 || top_p < 1.0; }
};

struct Row {
  const float* scaled;   // [width]: logits over temperature
  const float* shares;   // [width]: their softmax
  int64_t width;
  float top;

  int64_t weight(int64_t id) const { return static_cast<int64_t>(shares[id] * 0x1p50f); }

  int64_t kept(int64_t id, float least) const { return scaled[id] >= least ? weight(id) : 0; }

  int64_t bucket(int64_t id) const {
    const float distance = (top - scaled[id]) * kBucketsPerUnit;
    return distance < kBuckets - 1 ? static_cast<int64_t>(distance) : kBuckets - 1;
  }
};

inline void sort_falling(std::vector<Candidate>& found) {
  std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
}

// What is above and in each bucket of a row.
struct Ranking {
  const Row& row;
  std::array<int64_t, kBuckets> counts{};
  std::array<int64_t, kBuckets> weights{};

  explicit Ranking(const Row& of) : row(of) {
    for (int64_t id = 0; id < row.width; ++id) {
      const int64_t place = row.bucket(id);
      ++counts[place];
      weights[place] += row.weight(id);
    }
  }

  // The candidates of a bucket, largest value first.
  std::vector<Candidate> sorted(int64_t bucket) const {
    std::vector<Candidate> found;
    found.reserve(counts[bucket]);
    for (int64_t id = 0; id < row.width; ++id) {
      if (row.bucket(id) == bucket) found.push_back({row.scaled[id], row.weight(id)});
    }
    sort_falling(found);
    return found;
  }

  // The value of the `rank`-th largest, and into `above` the weight of all that are at least as large.
  float ranked(int64_t rank, int64_t& above) const {
    int64_t bucket = 0;
    above = 0;
    for (; rank > counts[bucket]; ++bucket) rank -= counts[bucket], above += weights[bucket];
    const std::vector<Candidate> candidates = sorted(bucket);
    const float value = candidates[rank - 1].value;
    for (const Candidate& each : candidates) above += each.value >= value ? each.weight : 0;
    return value;
  }

  // The largest value for which it and what is above weigh `mass` or more.
  float massive(double mass) const {
    int64_t bucket = 0;
    int64_t above = 0;
    while (counts[bucket] == 0 || static_cast<double>(above + weights[bucket]) < mass) {
      above += weights[bucket];
      if (++bucket == kBuckets) return kLowest;
    }
    for (const Candidate& each : sorted(bucket)) {
      if (static_cast<double>(above += each.weight) >= mass) return each.value;
    }
    return kLowest;
  }
};

// All candidates that are as large as the `rank`-th largest value, and some below, largest first.
//
// The `rank` groups with the largest maxima hold that many values which are not below the least of these maxima.
inline std::vector<Candidate> leading(const Row& row, int64_t rank) {
  std::vector<float> maxima(row.width / kGroup);
  for (size_t group = 0; group < maxima.size(); ++group) {
    Floats most = load(row.scaled + group * kGroup);
    for (int64_t i = kLanes; i < kGroup; i += kLanes) {
      const Floats now = load(row.scaled + group * kGroup + i);
      most = now > most ? now : most;
    }
    maxima[group] = most[0];
    for (int64_t lane = 1; lane < kLanes; ++lane) maxima[group] = std::max(maxima[group], most[lane]);
  }
  std::vector<float> ordered = maxima;
  std::nth_element(ordered.begin(), ordered.begin() + (rank - 1), ordered.end(), std::greater<float>());
  const float least = ordered[rank - 1];
  std::vector<Candidate> found;
  for (size_t group = 0; group < maxima.size(); ++group) {
    if (maxima[group] < least) continue;
    for (int64_t id = group * kGroup; id < static_cast<int64_t>(group + 1) * kGroup; ++id) {
      if (row.scaled[id] >= least) found.push_back({row.scaled[id], row.weight(id)});
    }
  }
  sort_falling(found);
  return found;
}

// The threshold of top-k, and of top-p among what that leaves, from candidates that reach far enough.
inline float cutoff_among(const std::vector<Candidate>& candidates, const Filter& filter) {
  const float kept = candidates[filter.top_k - 1].value;
  if (filter.top_p >= 1.0) return kept;
  int64_t whole = 0, above = 0;
  for (const Candidate& each : candidates) whole += each.value >= kept ? each.weight : 0;
  const double mass = std::ceil(filter.top_p * static_cast<double>(whole));
  for (const Candidate& each : candidates) {
    if (static_cast<double>(above += each.weight) >= mass) return std::max(kept, each.value);
  }
  return kept;
}

inline float cutoff_by_buckets(const Row& row, const Filter& filter) {
  const Ranking ranking(row);
  float least = kLowest;
  int64_t whole = 0;
  if (filter.top_k > 0) {
    least = ranking.ranked(filter.top_k, whole);
  } else {
    for (const int64_t each : ranking.weights) whole += each;
  }
  if (filter.top_p >= 1.0) return least;
  return std::max(least, ranking.massive(std::ceil(filter.top_p * static_cast<double>(whole))));
}

inline float cutoff(const Row& row, const Filter& filter) {
  const float floor = row.top + filter.floor;
  if (!filter.ranks()) return floor;
  const bool few = filter.top_k > 0 && filter.top_k * kGroup * 4 <= row.width;
  return std::max(floor, few ? cutoff_among(leading(row, filter.top_k), filter) : cutoff_by_buckets(row, filter));
}

inline int64_t kept_in_block(const Row& row, int64_t first, float least) {
  int64_t sum = 0;
  for (int64_t id = first; id < first + kBlock; ++id) sum += row.kept(id, least);
  return sum;
}

inline int64_t drawn(const Row& row, const Filter& filter, double uniform) {
  const float least = cutoff(row, filter);
  int64_t whole = 0;
  for (int64_t first = 0; first < row.width; first += kBlock) whole += kept_in_block(row, first, least);
  const double scaled = std::floor(uniform * static_cast<double>(whole));
  const int64_t target = std::max<int64_t>(std::min(static_cast<int64_t>(scaled), whole - 1), 0);
  int64_t first = 0, passed = 0;
  for (int64_t sum; first < row.width; first += kBlock, passed += sum) {
    sum = kept_in_block(row, first, least);
    if (passed + sum > target) break;
  }
  for (int64_t id = first; id < row.width; ++id) {
    if ((passed += row.kept(id, least)) > target) return id;
  }
  return 0;
}

// out[i, :width] = logits[places[i], :width] / temperatures[i], and -inf behind; out is float32[count, padded].
inline void scale(uintptr_t logits, uintptr_t places, uintptr_t temperatures, uintptr_t out, int64_t count,
                  int64_t width, int64_t padded) {
  py::gil_scoped_release released;
  for (int64_t i = 0; i < count; ++i) {
    const float* from = reinterpret_cast<const float*>(logits) + reinterpret_cast<const int64_t*>(places)[i] * width;
    float* to = reinterpret_cast<float*>(out) + i * padded;
    const float temperature = reinterpret_cast<const float*>(temperatures)[i];
    for (int64_t id = 0; id < width; ++id) to[id] = from[id] / temperature;
    std::fill(to + width, to + padded, kLowest);
  }
}

// Draws of rows that sample at random, all arrays with one entry per row. `tokens[places[i]]` becomes that of row i,
// except where `non_finite[places[i]]`.
inline void draw(uintptr_t scaled, uintptr_t shares, int64_t count, int64_t padded, uintptr_t uniforms,
                 uintptr_t top_ks, uintptr_t top_ps, uintptr_t floors, uintptr_t tops, uintptr_t places,
                 uintptr_t non_finite, uintptr_t tokens) {
  py::gil_scoped_release released;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t place = reinterpret_cast<const int64_t*>(places)[i];
    if (reinterpret_cast<const bool*>(non_finite)[place]) continue;
    const Row row{reinterpret_cast<const float*>(scaled) + i * padded,
                  reinterpret_cast<const float*>(shares) + i * padded, padded,
                  reinterpret_cast<const float*>(tops)[i]};
    const Filter filter{reinterpret_cast<const int64_t*>(top_ks)[i], reinterpret_cast<const double*>(top_ps)[i],
                        reinterpret_cast<const float*>(floors)[i]};
    const double uniform = reinterpret_cast<const double*>(uniforms)[i];
    reinterpret_cast<int64_t*>(tokens)[place] = drawn(row, filter, uniform);
  }
}

inline void bind_draws(py::module_& module) {
  module.def("scale", &scale);
  module.def("draw", &draw);
}

}  // namespace slipstream_host
