// The largest logit of each row. See core/sampling/compiled.py.

#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <limits>

namespace slipstream_host {

namespace py = pybind11;

#if defined(__AVX512F__)
constexpr int64_t kLanes = 16;
#else
constexpr int64_t kLanes = 8;
#endif
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Flags = int32_t __attribute__((vector_size(4 * kLanes)));

constexpr float kLowest = -std::numeric_limits<float>::infinity();

// More logits than that are looked at without the interpreter. Below, getting it back can take longer than the work.
constexpr int64_t kManyLogits = 1 << 17;

inline Floats load(const float* from) {
  Floats loaded;
  std::memcpy(&loaded, from, sizeof(loaded));
  return loaded;
}

struct Peak {
  float top;
  int64_t id;    // the first of `top`; 0 where the row is not finite
  bool finite;   // no NaN, no +inf, and something above -inf
};

inline Peak peak_of(const float* row, int64_t width) {
  Floats best;
  for (int64_t lane = 0; lane < kLanes; ++lane) best[lane] = kLowest;
  Flags ordered = best == best;
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) {
    const Floats now = load(row + i);
    best = now > best ? now : best;
    ordered &= now == now;
  }
  float top = kLowest;
  bool finite = true;
  for (int64_t lane = 0; lane < kLanes; ++lane) {
    top = best[lane] > top ? best[lane] : top;
    finite &= ordered[lane] != 0;
  }
  for (; i < width; ++i) {
    top = row[i] > top ? row[i] : top;
    finite &= row[i] == row[i];
  }
  finite &= top > kLowest && top < -kLowest;
  if (!finite) return {top, 0, false};
  int64_t id = 0;
  for (; id + kLanes <= width; id += kLanes) {
    const Flags found = load(row + id) == top;
    bool any = false;
    for (int64_t lane = 0; lane < kLanes; ++lane) any |= found[lane] != 0;
    if (any) break;
  }
  while (row[id] != top) ++id;
  return {top, id, true};
}

// (float32[S] largest logits, int64[S] their first ids, bool[S] rows that are not finite) of float32[S, V].
inline py::tuple peaks(uintptr_t logits, int64_t count, int64_t width) {
  py::array_t<float> tops(count);
  py::array_t<int64_t> ids(count);
  py::array_t<bool> non_finite(count);
  float* top = tops.mutable_data();
  int64_t* id = ids.mutable_data();
  bool* bad = non_finite.mutable_data();
  const auto look = [&] {
    for (int64_t i = 0; i < count; ++i) {
      const Peak found = peak_of(reinterpret_cast<const float*>(logits) + i * width, width);
      top[i] = found.top, id[i] = found.id, bad[i] = !found.finite;
    }
  };
  if (count * width > kManyLogits) {
    py::gil_scoped_release released;
    look();
  } else {
    look();
  }
  return py::make_tuple(tops, ids, non_finite);
}

inline void bind_peaks(py::module_& module) { module.def("peaks", &peaks); }

}  // namespace slipstream_host
