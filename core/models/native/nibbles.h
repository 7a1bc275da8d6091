// Products with panels of four-bit weights in groups of inputs: a quarter of what bfloat16 reads.
//
// A word of 32 bits has eight inputs of one output, the first in its lowest bits; a panel is [depth / 8][64] words. A weight
// is (q - zero) scale of its group, so a group adds scale (sum of x q - zero times sum of x) to an output: q is exact in
// every type, and scales are applied to sums, in float32. A few rows are multiplied while words become floats in registers;
// for more of them a group is widened once, into a cache, for all rows. Both add the same numbers in the same order.

#pragma once

#include <algorithm>

#include "bytes.h"
#include "panels.h"

namespace slipstream {

// Inputs in one word.
constexpr int64_t kPerWord = 8;
// Rows up to which widening in registers is quicker than by way of a cache.
constexpr int64_t kFewNibbleRows = 4;
// The zero of weights that have none of their own.
constexpr float kMiddle = 8.0f;

// What the groups of one panel are scaled by, [groups][64] each; scales are float or BFloat16, zeros int8, float or absent.
struct PanelGroups {
  int64_t size;
  const float* scale;
  const BFloat16* half_scale;
  const int8_t* zero;
  const float* wide_zero;

  Floats scale_at(int64_t place) const { return half_scale ? load(half_scale + place) : load(scale + place); }
  Floats zero_at(int64_t place) const {
    if (zero) return load(zero + place);
    return wide_zero ? load(wide_zero + place) : Floats{} + kMiddle;
  }
};

// out[lanes] += what they get of a group: `products` are sums of x q, `sum` is that of x.
inline void add_group(Floats scale, Floats zero, Floats products, float sum, float* out) {
  const Floats centred = products - zero * sum;
  store(load(out) + scale * centred, out);
}

// What an input is multiplied with beforehand, by its place in a word: its nibble is then taken where it lies, as many
// times too large. The highest is moved down, for it would be a sign.
inline float nibble_factor(int64_t place) {
  constexpr float kFactors[] = {1.0f, 0x1p-4f, 0x1p-8f, 0x1p-12f, 0x1p-16f, 0x1p-20f, 0x1p-24f, 1.0f};
  return kFactors[place];
}

template <int kPlace>
inline Floats nibble_at(Words words) {
  if constexpr (kPlace == kPerWord - 1) return __builtin_convertvector(reinterpret_cast<Ints>(words >> 28), Floats);
  return __builtin_convertvector(reinterpret_cast<Ints>(words & (15u << (4 * kPlace))), Floats);
}

inline Words load_words(const uint32_t* from) {
  Words words;
  std::memcpy(&words, from, sizeof(words));
  return words;
}

// sums[M][kParts] += input `kPlace` of eight, for all parts.
template <int M, int kParts, int kPlace>
inline void add_input(const float* x, int64_t stride, const uint32_t* words, Floats (&sums)[M][kParts]) {
  Floats values[M];
  for (int m = 0; m < M; ++m) values[m] = x[m * stride + kPlace] - Floats{};
  for (int p = 0; p < kParts; ++p) {
    const Floats weights = nibble_at<kPlace>(load_words(words + p * kLanes));
    for (int m = 0; m < M; ++m) sums[m][p] += weights * values[m];
  }
  if constexpr (kPlace + 1 < kPerWord) add_input<M, kParts, kPlace + 1>(x, stride, words, sums);
}

// Vectors of outputs at a time, so that their sums stay in registers and are not waited for.
template <int M>
constexpr int nibble_parts() {
#if defined(__AVX512F__)
  return 4;
#else
  return M == 1 ? 8 : M == 4 ? 2 : 4;
#endif
}

// out[M][64] = x[M] times the panel; x [M][stride] are floats by their factors, `sums` [M][groups] are those of x.
template <int M>
inline void nibble_rows(const float* x, int64_t stride, const float* sums, int64_t count, const uint32_t* panel,
                        int64_t depth, const PanelGroups& groups, float* out) {
  constexpr int kParts = nibble_parts<M>();
  std::fill_n(out, M * kPanel, 0.0f);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t from = group * groups.size, to = std::min(depth, from + groups.size);
    for (int64_t first = 0; first < kPanel; first += kParts * kLanes) {
      Floats products[M][kParts] = {};
      const uint32_t* words = panel + from / kPerWord * kPanel + first;
      for (int64_t k = from; k < to; k += kPerWord, words += kPanel) {
        for (int64_t line = 0; line < kParts * kLanes; line += 16)
          __builtin_prefetch(reinterpret_cast<const char*>(words + line) + kAhead);
        add_input<M, kParts, 0>(x + k, stride, words, products);
      }
      for (int p = 0; p < kParts; ++p) {
        const int64_t output = first + p * kLanes, place = group * kPanel + output;
        const Floats scale = groups.scale_at(place), zero = groups.zero_at(place);
        for (int m = 0; m < M; ++m)
          add_group(scale, zero, products[m][p], sums[m * count + group], out + m * kPanel + output);
      }
    }
  }
}

inline Floats nibble(Words words, int64_t place) {
  return __builtin_convertvector(reinterpret_cast<Ints>(words >> static_cast<uint32_t>(4 * place) & 15u), Floats);
}

inline void widen_nibbles(const uint32_t* panel, int64_t depth, float* out) {
  for (int64_t k = 0; k < depth; k += kPerWord)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words words = load_words(panel + k / kPerWord * kPanel + p);
      for (int64_t place = 0; place < kPerWord; ++place) store(nibble(words, place), out + (k + place) * kPanel + p);
    }
}

inline void widen_nibbles(const uint32_t* panel, int64_t depth, BFloat16* out) {
  for (int64_t k = 0; k < depth; k += kPerWord)
    for (int64_t p = 0; p < kPanel; p += kLanes) {
      const Words words = load_words(panel + k / kPerWord * kPanel + p);
      for (int64_t place = 0; place < kPerWord; place += 2) {
        const Words even = reinterpret_cast<Words>(nibble(words, place));
        const Words pairs = even >> 16 | reinterpret_cast<Words>(nibble(words, place + 1));
        std::memcpy(static_cast<void*>(out + (k + place) * kPanel + 2 * p), &pairs, sizeof(pairs));
      }
    }
}

// out[rows][64] = x[rows][depth] times the panel. `room` holds `widened_room<T>(groups.size)` weights, `products` as many
// floats as out.
template <typename T>
void multiply_groups(const T* x, int64_t stride, int64_t rows, const float* sums, int64_t count, const uint32_t* panel,
                     int64_t depth, const PanelGroups& groups, T* room, float* products, float* out) {
  constexpr int64_t kPass = kPassBytes / (kPanel * static_cast<int64_t>(sizeof(T)));
  std::fill_n(out, rows * kPanel, 0.0f);
  for (int64_t group = 0; group < count; ++group) {
    const int64_t begin = group * groups.size, end = std::min(depth, begin + groups.size);
    for (int64_t from = begin; from < end; from += kPass) {
      const int64_t taken = std::min(kPass, end - from);
      widen_nibbles(panel + from / kPerWord * kPanel, taken, room);
      multiply<false>(x + from, stride, rows, room, taken, products, from > begin);
    }
    for (int64_t first = 0; first < kPanel; first += kLanes) {
      const int64_t place = group * kPanel + first;
      const Floats scale = groups.scale_at(place), zero = groups.zero_at(place);
      for (int64_t row = 0; row < rows; ++row)
        add_group(scale, zero, load(products + row * kPanel + first), sums[row * count + group],
                  out + row * kPanel + first);
    }
  }
}

}  // namespace slipstream
