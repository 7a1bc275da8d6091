// One token per row by inverse CDF, among those that top-k, top-p and min-p keep. See core/sampling/{draw,cutoff}.py.
//
// Weights are whole numbers whose sums are exact in double, so the tokens are those of the torch way, whatever the order
// of the additions. What a row keeps is a threshold on the value. Values are counted into buckets by their distance from
// the row's largest; only the bucket in which a threshold lies is sorted.

#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <vector>

#include "peaks.h"

namespace slipstream_host {

constexpr int64_t kBuckets = 512;
constexpr float kBucketsPerUnit = 14.0f;  // the weight of what is 36 below the largest is 0: beyond is one bucket

struct Candidate {
  float value;
  double weight;
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

  double weight(int64_t id) const { return std::floor(shares[id] * 0x1p50f); }

  int64_t bucket(int64_t id) const {
    const float distance = (top - scaled[id]) * kBucketsPerUnit;
    return distance < kBuckets - 1 ? static_cast<int64_t>(distance) : kBuckets - 1;
  }

  double total() const {
    double sum = 0.0;
    for (int64_t id = 0; id < width; ++id) sum += weight(id);
    return sum;
  }
};

// What is above and in each bucket of a row.
struct Ranking {
  const Row& row;
  std::array<int64_t, kBuckets> counts{};
  std::array<double, kBuckets> weights{};

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
    std::sort(found.begin(), found.end(), [](const Candidate& a, const Candidate& b) { return a.value > b.value; });
    return found;
  }

  // The value of the `rank`-th largest, and into `above` the weight of all that are at least as large.
  float ranked(int64_t rank, double& above) const {
    int64_t bucket = 0;
    above = 0.0;
    for (; rank > counts[bucket]; ++bucket) rank -= counts[bucket], above += weights[bucket];
    const std::vector<Candidate> candidates = sorted(bucket);
    const float value = candidates[rank - 1].value;
    for (const Candidate& each : candidates) above += each.value >= value ? each.weight : 0.0;
    return value;
  }

  // The largest value for which it and what is above weigh `mass` or more.
  float massive(double mass) const {
    int64_t bucket = 0;
    double above = 0.0;
    while (counts[bucket] == 0 || above + weights[bucket] < mass) {
      above += weights[bucket];
      if (++bucket == kBuckets) return kLowest;
    }
    for (const Candidate& each : sorted(bucket)) {
      if ((above += each.weight) >= mass) return each.value;
    }
    return kLowest;
  }
};

inline float cutoff(const Row& row, const Filter& filter) {
  float least = row.top + filter.floor;
  if (!filter.ranks()) return least;
  const Ranking ranking(row);
  double whole = 0.0;
  if (filter.top_k > 0) {
    least = std::max(least, ranking.ranked(filter.top_k, whole));
  } else {
    for (const double each : ranking.weights) whole += each;
  }
  if (filter.top_p < 1.0) least = std::max(least, ranking.massive(std::ceil(filter.top_p * whole)));
  return least;
}

inline int64_t drawn(const Row& row, const Filter& filter, double uniform) {
  const float least = cutoff(row, filter);
  double whole = 0.0;
  for (int64_t id = 0; id < row.width; ++id) whole += row.scaled[id] >= least ? row.weight(id) : 0.0;
  const double target = std::max(std::min(std::floor(uniform * whole), whole - 1.0), 0.0);
  double passed = 0.0;
  for (int64_t id = 0; id < row.width; ++id) {
    if (row.scaled[id] >= least && (passed += row.weight(id)) > target) return id;
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
