// Products with panels of int8, [depth][64]: half of what bfloat16 reads. What an output is scaled by comes afterwards.
//
// Every int8 is exact in bfloat16, so nothing is lost but what quantising lost. A few rows are multiplied while the
// bytes become floats in registers; for more of them a piece of the panel is widened once, into a cache, for all rows.

#pragma once

#include <algorithm>

#include "panels.h"

namespace slipstream {

using Bytes = int8_t __attribute__((vector_size(kLanes)));

// Rows up to which widening in registers is quicker than by way of a cache.
constexpr int64_t kFewRows = 4;

// The compiler takes bytes apart one by one where it is left alone with this.
inline Floats load(const int8_t* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#elif defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
  Bytes bytes;
  std::memcpy(&bytes, from, sizeof(bytes));
  return __builtin_convertvector(__builtin_convertvector(bytes, Ints), Floats);
#endif
}

// out[M][64] = x[M] times the panel, in float32; a part of the outputs at a time, as the sums fill the registers.
template <int M, typename T>
inline void byte_rows(const T* x, int64_t stride, const int8_t* panel, int64_t depth, float* out) {
  constexpr int kParts = 4;
  for (int64_t first = 0; first < kPanel; first += kParts * kLanes) {
    Floats sums[M][kParts] = {};
    for (int64_t k = 0; k < depth; ++k) {
      const int8_t* bytes = panel + k * kPanel + first;
      __builtin_prefetch(bytes + kAhead);
      for (int p = 0; p < kParts; ++p) {
        const Floats weights = load(bytes + p * kLanes);
        for (int m = 0; m < M; ++m) sums[m][p] += weights * widen(x[m * stride + k]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < kParts; ++p) store(sums[m][p], out + m * kPanel + first + p * kLanes);
  }
}

inline void widen_panel(const int8_t* panel, int64_t depth, float* out) {
  for (int64_t i = 0; i < depth * kPanel; i += kLanes) {
    __builtin_prefetch(panel + i + kAhead);
    store(load(panel + i), out + i);
  }
}

inline void widen_panel(const int8_t* panel, int64_t depth, BFloat16* out) {
  for (int64_t k = 0; k < depth; k += 2) {
    const int8_t* bytes = panel + k * kPanel;
    __builtin_prefetch(bytes + kAhead);
    __builtin_prefetch(bytes + kPanel + kAhead);
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words even = reinterpret_cast<Words>(load(bytes + p));
      const Words odd = reinterpret_cast<Words>(load(bytes + kPanel + p));
      const Words pairs = (even >> 16) | (odd & 0xffff0000u);
      std::memcpy(static_cast<void*>(out + k * kPanel + 2 * p), &pairs, sizeof(pairs));
    }
  }
}

// out[rows][64] = x[rows][depth] times the panel; `room` holds `widened_room<T>(depth)` weights.
template <typename T>
void multiply(const T* x, int64_t stride, int64_t rows, const int8_t* panel, int64_t depth, float* out, T* room) {
  switch (rows) {
    case 1:
      return byte_rows<1>(x, stride, panel, depth, out);
    case 2:
      return byte_rows<2>(x, stride, panel, depth, out);
    case 3:
      return byte_rows<3>(x, stride, panel, depth, out);
    case kFewRows:
      return byte_rows<kFewRows>(x, stride, panel, depth, out);
  }
  constexpr int64_t kPass = kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)));
  for (int64_t from = 0; from < depth; from += kPass) {
    const int64_t count = std::min(kPass, depth - from);
    widen_panel(panel + from * kPanel, count, room);
    multiply<false>(x + from, stride, rows, room, count, out, from > 0);
  }
}

// How many weights of type T `multiply` widens at a time.
template <typename T>
constexpr int64_t widened_room(int64_t depth) {
  return std::min<int64_t>(depth, kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)))) * kPanel;
}

}  // namespace slipstream
