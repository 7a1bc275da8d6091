// Products with panels of int8, [depth][64]: half of what bfloat16 reads. What an output is scaled by comes afterwards.
//
// Every int8 is exact in bfloat16, so nothing is lost but what quantising lost. A few rows are multiplied while the
// bytes become floats in registers; for more of them a piece of the panel is widened once, into a cache, for all rows.
// Rows of bfloat16 then add pairs of inputs, and so other bits than a few of them, which add floats. Where rows shall be
// invariant, a few add pairs too.

#pragma once

#include <algorithm>

#include "panels.h"

namespace slipstream {

using Bytes = int8_t __attribute__((vector_size(kLanes)));

// Rows up to which widening in registers is quicker than by way of a cache.
constexpr int kFewRows = 4;

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
      ask_ahead(bytes);
      for (int p = 0; p < kParts; ++p) {
        const Floats weights = load(bytes + p * kLanes);
        for (int m = 0; m < M; ++m) sums[m][p] = multiply_add(weights, widen(x[m * stride + k]), sums[m][p]);
      }
    }
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < kParts; ++p) store(sums[m][p], out + m * kPanel + first + p * kLanes);
  }
}

inline void widen_panel(const int8_t* panel, int64_t depth, float* out) {
  for (int64_t i = 0; i < depth * kPanel; i += kLanes) {
    ask_ahead(panel + i);
    store(load(panel + i), out + i);
  }
}

// The bytes of two inputs as bfloat16, side by side.
inline Words byte_pairs(const int8_t* even, const int8_t* odd) {
  return reinterpret_cast<Words>(load(even)) >> 16 | (reinterpret_cast<Words>(load(odd)) & 0xffff0000u);
}

inline void widen_panel(const int8_t* panel, int64_t depth, BFloat16* out) {
  for (int64_t k = 0; k < depth; k += 2) {
    const int8_t* bytes = panel + k * kPanel;
    ask_ahead(bytes);
    ask_ahead(bytes + kPanel);
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words pairs = byte_pairs(bytes + p, bytes + kPanel + p);
      std::memcpy(static_cast<void*>(out + k * kPanel + 2 * p), &pairs, sizeof(pairs));
    }
  }
}

#if defined(__AVX512BF16__)

constexpr bool kBytePairs = true;

// As `byte_rows`, in the order of rows that a panel is widened for.
template <int M>
inline void byte_pair_rows(const BFloat16* x, int64_t stride, const int8_t* panel, int64_t depth, float* out) {
  constexpr int kParts = kPanel / kLanes;
  __m512 sums[M][kParts] = {};
  for (int64_t k = 0; k < depth; k += 2) {
    const int8_t* bytes = panel + k * kPanel;
    ask_ahead(bytes);
    ask_ahead(bytes + kPanel);
    __m512bh weights[kParts];
    for (int p = 0; p < kParts; ++p)
      weights[p] = (__m512bh)byte_pairs(bytes + p * kLanes, bytes + kPanel + p * kLanes);
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * stride + k, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < kParts; ++p) sums[m][p] = _mm512_dpbf16_ps(sums[m][p], weights[p], both);
    }
  }
  for (int m = 0; m < M; ++m)
    for (int p = 0; p < kParts; ++p) _mm512_storeu_ps(out + m * kPanel + p * kLanes, sums[m][p]);
}

#else

constexpr bool kBytePairs = false;

template <int M>
void byte_pair_rows(const BFloat16*, int64_t, const int8_t*, int64_t, float*);

#endif

// A few rows, while the bytes are widened in registers; whether that was possible, `invariant` as in `panels.h`.
template <typename T>
bool multiply_few(const T* x, int64_t stride, int64_t rows, const int8_t* panel, int64_t depth, float* out,
                  bool invariant) {
  if (rows > kFewRows) return false;
  if constexpr (sizeof(T) == 2) {
    if (invariant && (!kBytePairs || tiles_allowed())) return false;
    if constexpr (kBytePairs)
      if (invariant) {
        of_so_many<kFewRows>(rows, [&](auto count) { byte_pair_rows<count>(x, stride, panel, depth, out); });
        return true;
      }
  }
  of_so_many<kFewRows>(rows, [&](auto count) { byte_rows<count>(x, stride, panel, depth, out); });
  return true;
}

// out[rows][64] = x[rows][depth] times the panel; `room` holds `widened_room<T>(depth)` weights; `next` as in `panels.h`.
template <typename T>
void multiply(const T* x, int64_t stride, int64_t rows, const int8_t* panel, int64_t depth, float* out, T* room,
              bool invariant, const void* next) {
  if (multiply_few(x, stride, rows, panel, depth, out, invariant)) return;
  constexpr int64_t kPass = kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)));
  for (int64_t from = 0; from < depth; from += kPass) {
    const int64_t count = std::min(kPass, depth - from);
    widen_panel(panel + from * kPanel, count, room);
    const void* behind = from + count < depth ? panel + (from + count) * kPanel : next;
    if (multiply_by_tiles<false>(x + from, stride, rows, room, count, out, from > 0, invariant)) continue;
    multiply_pass<false>(x + from, stride, rows, room, count, out, from > 0, behind, kPanelLines / sizeof(T));
  }
}

// How many weights of type T `multiply` widens at a time.
template <typename T>
constexpr int64_t widened_room(int64_t depth) {
  return std::min<int64_t>(depth, kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)))) * kPanel;
}

}  // namespace slipstream
