// Matrix products over weights packed into panels of 64 outputs, read front to back exactly once per block of rows.
//
// A panel of bfloat16 holds, for each pair of inputs, the 64 outputs' two weights side by side: [depth / 2][64][2]. The
// same bytes are what AVX-512's vdpbf16ps multiplies a broadcast pair with, and, in pieces of 16 by 16, what AMX takes
// as a tile. A panel of float32 is [depth][64]. Outputs beyond the last, and inputs beyond depth, are zero weights.

#pragma once

#if defined(__x86_64__)
#include <immintrin.h>
#endif
#if defined(__AMX_BF16__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <algorithm>
#include <type_traits>

#include "ahead.h"
#include "vectors.h"

namespace slipstream {

constexpr int64_t kPanel = 64;
// Rows of inputs and outputs are readable and writable up to a multiple of this; what is there is never used.
constexpr int64_t kRows = 32;
// Inputs of a row, their stride and a panel's depth are multiples of this, filled up with zeros.
constexpr int64_t kDepth = 32;

// Rows whose sums stay in registers.
#if defined(__AVX2__) && defined(__FMA__)
constexpr int kBlockRows = 6;
#else
constexpr int kBlockRows = 2;
#endif
// Inputs of one pass over a panel, so that it stays in a cache while all rows go by: in the second, where it is read once for
// a block of rows, else in the first. Up to `kOnePassRows` rows go over it all at once.
#if defined(__AVX512F__)
constexpr int64_t kPassBytes = 1 << 18, kLongPassBytes = kPassBytes, kOnePassRows = kBlockRows;
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int64_t kPassBytes = 1 << 14, kLongPassBytes = 1 << 17, kOnePassRows = 0;
#else
constexpr int64_t kPassBytes = 1 << 14, kLongPassBytes = 1 << 17, kOnePassRows = kBlockRows;
#endif
// From so many rows of float32 on passes are long: what those read of the second cache is nothing beside what they multiply, and
// sums come and go with each pass.
constexpr int64_t kLongPassRows = 128;
// Lines of a panel that a step reads: one input of float32 or two of bfloat16.
constexpr int64_t kPanelLines = 4;

// Where the sums of rows go, `stride` floats apart, and what they get once they are whole: `bias` [64], or null.
struct Outputs {
  float* to;
  int64_t stride;
  const float* bias;

  Outputs(float* to, int64_t stride = kPanel, const float* bias = nullptr) : to(to), stride(stride), bias(bias) {}

  // From a row on, and from one of the 64 outputs on.
  Outputs at(int64_t row, int64_t output) const {
    return {to + row * stride + output, stride, bias == nullptr ? nullptr : bias + output};
  }
  // Of a pass behind which others come.
  Outputs unfinished() const { return {to, stride}; }
};

// How weights are asked for that come next: by all of a pass, where it takes all parts of a panel in turn.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)
using Asking = Trickle;
constexpr bool kFetches = false;
#else
using Asking = Ahead;
constexpr bool kFetches = true;
#endif

// Where weight (output, input) of a panel is.
template <typename T>
constexpr int64_t panel_place(int64_t output, int64_t input) {
  if constexpr (sizeof(T) == 2) {
    return (input / 2 * kPanel + output) * 2 + input % 2;
  } else {
    return input * kPanel + output;
  }
}

// out[M][64] = (add ? out : 0) + x[M] times the panel, in float32. Each sum is made input by input, whatever M is.
#if defined(__AVX2__) && defined(__FMA__) && !defined(__AVX512F__)

// Sixteen registers of eight floats. The compiler does not spread vectors of sixteen over them without going through
// memory, so a panel is taken in parts that leave room for the sums. An input's weights are held while its rows go by,
// which takes fewer registers, and so more rows, than to hold the rows: 1.3 times as quick.
template <int M>
constexpr int kEights = M == 1 ? 8 : M <= 3 ? 4 : 2;

template <int M>
struct Sums {
  __m256 of[M][kEights<M>];

  void begin(const Outputs& out, bool add) {
    SLIPSTREAM_IN_REGISTERS
    for (int m = 0; m < M; ++m)
      SLIPSTREAM_IN_REGISTERS
      for (int e = 0; e < kEights<M>; ++e)
        of[m][e] = add ? _mm256_loadu_ps(out.to + m * out.stride + e * 8) : _mm256_setzero_ps();
  }
  // Adds one input of each row, which lie `stride` apart, times its weights.
  void add(const float* x, int64_t stride, const __m256 (&weights)[kEights<M>]) {
    SLIPSTREAM_IN_REGISTERS
    for (int m = 0; m < M; ++m) {
      const __m256 value = _mm256_broadcast_ss(x + m * stride);
      SLIPSTREAM_IN_REGISTERS
      for (int e = 0; e < kEights<M>; ++e) of[m][e] = _mm256_fmadd_ps(weights[e], value, of[m][e]);
    }
  }
  void end(const Outputs& out) {
    if (out.bias != nullptr) {
      __m256 bias[kEights<M>];
      for (int e = 0; e < kEights<M>; ++e) bias[e] = _mm256_loadu_ps(out.bias + e * 8);
      SLIPSTREAM_IN_REGISTERS
      for (int m = 0; m < M; ++m)
        SLIPSTREAM_IN_REGISTERS
        for (int e = 0; e < kEights<M>; ++e) of[m][e] = _mm256_add_ps(of[m][e], bias[e]);
    }
    SLIPSTREAM_IN_REGISTERS
    for (int m = 0; m < M; ++m)
      SLIPSTREAM_IN_REGISTERS
      for (int e = 0; e < kEights<M>; ++e) _mm256_storeu_ps(out.to + m * out.stride + e * 8, of[m][e]);
  }
};

// Adds one input of float32, or two of bfloat16, of which the weights lie at `from`.
template <int M>
inline void add_inputs(const float* x, int64_t stride, const float* from, Sums<M>& sums) {
  __m256 weights[kEights<M>];
  for (int e = 0; e < kEights<M>; ++e) weights[e] = _mm256_loadu_ps(from + e * 8);
  sums.add(x, stride, weights);
}

template <int M>
inline void add_inputs(const float* x, int64_t stride, const BFloat16* from, Sums<M>& sums) {
  const __m256i high = _mm256_set1_epi32(static_cast<int32_t>(0xffff0000u));
  const __m256i* pairs = reinterpret_cast<const __m256i*>(from);
  __m256 weights[kEights<M>];
  for (int e = 0; e < kEights<M>; ++e)
    weights[e] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_loadu_si256(pairs + e), 16));
  sums.add(x, stride, weights);
  for (int e = 0; e < kEights<M>; ++e)
    weights[e] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_loadu_si256(pairs + e), high));
  sums.add(x + 1, stride, weights);
}

// Rows of bfloat16 become floats once for all parts of a panel.
template <int M>
struct WideRows {
  alignas(32) float of[M][kPassBytes / (kPanel * sizeof(BFloat16))];

  static constexpr int64_t stride() { return sizeof(of[0]) / sizeof(float); }

  WideRows(const BFloat16* x, int64_t stride, int64_t depth) {
    for (int m = 0; m < M; ++m)
      for (int64_t k = 0; k < depth; k += kLanes) store(load(x + m * stride + k), of[m] + k);
  }
};

// Rows of M whose sums are made together: eight sums of four rows would wait for each other.
template <int M>
constexpr int kTogether = M == 4 ? 2 : M;

template <int M, bool kAhead, typename T>
inline void panel_floats(const float* x, int64_t stride, const T* panel, int64_t depth, const Outputs& out, bool add,
                         const Asking& asking) {
  constexpr int kRowsAtOnce = kTogether<M>;
  constexpr int64_t kInputs = 4 / sizeof(T), kStep = kEights<kRowsAtOnce> * 8, kParts = M / kRowsAtOnce * kPanel / kStep;
  for (int64_t at = 0; at < kParts; ++at) {
    const int64_t row = at * kStep / kPanel * kRowsAtOnce, part = at * kStep % kPanel;
    const Asking::Part share = asking.part(at, kParts, depth / kInputs);
    const Outputs mine = out.at(row, part);
    Sums<kRowsAtOnce> sums;
    sums.begin(mine, add);
    for (int64_t k = 0; k < depth; k += kInputs) {
      if constexpr (kAhead) share.template ask<kPanelLines / kParts>(k / kInputs);
      add_inputs<kRowsAtOnce>(x + row * stride + k, stride, panel + k * kPanel + part * kInputs, sums);
    }
    sums.end(mine);
  }
}

template <int M, bool, bool kAhead>
inline void panel_rows(const float* x, int64_t stride, const float* panel, int64_t depth, const Outputs& out, bool add,
                       const Asking& asking) {
  panel_floats<M, kAhead>(x, stride, panel, depth, out, add, asking);
}

template <int M, bool, bool kAhead>
inline void panel_rows(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t depth, const Outputs& out, bool add,
                       const Asking& asking) {
  const WideRows<M> wide(x, stride, depth);
  panel_floats<M, kAhead>(wide.of[0], wide.stride(), panel, depth, out, add, asking);
}

#else

// Sums of all 64 outputs of M rows where they go.
template <int M, typename Vector>
inline void put(Vector (&sums)[M][kPanel / kLanes], const Outputs& out) {
  constexpr int kParts = kPanel / kLanes;
  if (out.bias != nullptr) {
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p) {
      const Vector bias = (Vector)load(out.bias + p * kLanes);
      SLIPSTREAM_IN_REGISTERS
      for (int m = 0; m < M; ++m) sums[m][p] += bias;
    }
  }
  SLIPSTREAM_IN_REGISTERS
  for (int m = 0; m < M; ++m)
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p) store((Floats)sums[m][p], out.to + m * out.stride + p * kLanes);
}

template <int M, bool kFetch, bool kAhead>
inline void panel_rows(const float* x, int64_t stride, const float* panel, int64_t depth, const Outputs& out, bool add,
                       const Ahead& ahead) {
  constexpr int kParts = kPanel / kLanes;
  Floats sums[M][kParts];
  SLIPSTREAM_IN_REGISTERS
  for (int m = 0; m < M; ++m)
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p) sums[m][p] = add ? load(out.to + m * out.stride + p * kLanes) : Floats{};
  for (int64_t k = 0; k < depth; ++k) {
    if constexpr (kAhead) ahead.ask(k);
    Floats weights[kParts];
    for (int p = 0; p < kParts; ++p) {
      weights[p] = load(panel + k * kPanel + p * kLanes);
      if constexpr (kFetch) ask_ahead(panel + k * kPanel + p * kLanes);
    }
    for (int m = 0; m < M; ++m)
      for (int p = 0; p < kParts; ++p) sums[m][p] = multiply_add(weights[p], x[m * stride + k], sums[m][p]);
  }
  put<M>(sums, out);
}

#if defined(__AVX512BF16__)

template <int M, bool kFetch, bool kAhead>
inline void panel_rows(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t depth, const Outputs& out, bool add,
                       const Ahead& ahead) {
  constexpr int kParts = kPanel / kLanes;
  __m512 sums[M][kParts];
  SLIPSTREAM_IN_REGISTERS
  for (int m = 0; m < M; ++m)
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p)
      sums[m][p] = add ? _mm512_loadu_ps(out.to + m * out.stride + p * kLanes) : _mm512_setzero_ps();
  const char* weight = reinterpret_cast<const char*>(panel);
  for (int64_t k = 0; k < depth; k += 2, weight += 256) {
    if constexpr (kAhead) ahead.ask(k / 2);
    __m512bh weights[kParts];
    for (int p = 0; p < kParts; ++p) {
      weights[p] = (__m512bh)_mm512_loadu_si512(weight + p * 64);
      if constexpr (kFetch) ask_ahead(weight + p * 64);
    }
    for (int m = 0; m < M; ++m) {
      int32_t pair;
      std::memcpy(&pair, x + m * stride + k, sizeof(pair));
      const __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
      for (int p = 0; p < kParts; ++p) sums[m][p] = _mm512_dpbf16_ps(sums[m][p], weights[p], both);
    }
  }
  put<M>(sums, out);
}

#else

template <int M, bool kFetch, bool kAhead>
inline void panel_rows(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t depth, const Outputs& out, bool add,
                       const Ahead& ahead) {
  constexpr int kParts = kPanel / kLanes;
  Floats sums[M][kParts];
  SLIPSTREAM_IN_REGISTERS
  for (int m = 0; m < M; ++m)
    SLIPSTREAM_IN_REGISTERS
    for (int p = 0; p < kParts; ++p) sums[m][p] = add ? load(out.to + m * out.stride + p * kLanes) : Floats{};
  for (int64_t k = 0; k < depth; k += 2) {
    if constexpr (kAhead) ahead.ask(k / 2);
    for (int p = 0; p < kParts; ++p) {
      Words pairs;
      std::memcpy(&pairs, panel + k * kPanel + p * 2 * kLanes, sizeof(pairs));
      const Floats even = reinterpret_cast<Floats>(pairs << 16), odd = reinterpret_cast<Floats>(pairs & 0xffff0000u);
      for (int m = 0; m < M; ++m)
        sums[m][p] += multiply_add(odd, widen(x[m * stride + k + 1]), even * widen(x[m * stride + k]));
    }
  }
  put<M>(sums, out);
}

#endif

#endif

#if defined(__AMX_BF16__) && defined(__linux__)

// Rows from which AMX is worth filling its tiles of 16: fewer where weights come from memory, which takes longest anyway.
constexpr int64_t kTileRows = 3, kCachedTileRows = 9;

// Linux lets a process use AMX only after it asked.
inline bool tiles_allowed() {
  static const bool allowed = [] {
    constexpr int kRequest = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
  }();
  return allowed;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

constexpr int64_t kPanelBytes = kPanel * 4, kOutBytes = kPanel * 4;

// The hardware does not see tile loads coming. What comes after the panel's end is the next panel, mostly.
inline void fetch_ahead(const BFloat16* weights) {
  const char* ahead = reinterpret_cast<const char*>(weights) + 8192;
  for (int64_t line = 0; line < 32 * kPanel * 2; line += 64) _mm_prefetch(ahead + line, _MM_HINT_T0);
}

// 16 rows by 64 outputs.
template <bool kFetch>
inline void tile_row(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t depth, float* out, bool add) {
  if (add) {
    _tile_loadd(0, out, kOutBytes);
    _tile_loadd(1, out + 16, kOutBytes);
    _tile_loadd(2, out + 32, kOutBytes);
    _tile_loadd(3, out + 48, kOutBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += 32) {
    const BFloat16* weights = panel + k * kPanel;
    if constexpr (kFetch) fetch_ahead(weights);
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(5, weights, kPanelBytes);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(6, weights + 32, kPanelBytes);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(7, weights + 64, kPanelBytes);
    _tile_dpbf16ps(2, 4, 7);
    _tile_loadd(5, weights + 96, kPanelBytes);
    _tile_dpbf16ps(3, 4, 5);
  }
  _tile_stored(0, out, kOutBytes);
  _tile_stored(1, out + 16, kOutBytes);
  _tile_stored(2, out + 32, kOutBytes);
  _tile_stored(3, out + 48, kOutBytes);
}

// 32 rows by 32 outputs: each tile that is loaded is used twice.
template <bool kFetch>
inline void tile_square(const BFloat16* x, int64_t stride, const BFloat16* panel, int64_t depth, float* out, bool add) {
  float* below = out + 16 * kPanel;
  if (add) {
    _tile_loadd(0, out, kOutBytes);
    _tile_loadd(1, out + 16, kOutBytes);
    _tile_loadd(2, below, kOutBytes);
    _tile_loadd(3, below + 16, kOutBytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += 32) {
    const BFloat16* weights = panel + k * kPanel;
    if constexpr (kFetch) fetch_ahead(weights);
    _tile_loadd(4, x + k, stride * 2);
    _tile_loadd(6, weights, kPanelBytes);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights + 32, kPanelBytes);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, x + 16 * stride + k, stride * 2);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, out, kOutBytes);
  _tile_stored(1, out + 16, kOutBytes);
  _tile_stored(2, below, kOutBytes);
  _tile_stored(3, below + 16, kOutBytes);
}

// A tile adds the even inputs of 32 and the odd ones apart, vectors one pair behind the other: the same row gets other
// bits by the other way. So where rows shall be `invariant`, all of them go through tiles, however few they are.
template <bool kFetch>
inline bool multiply_by_tiles(const BFloat16* x, int64_t stride, int64_t rows, const BFloat16* panel, int64_t depth,
                              float* out, bool add, bool invariant) {
  const int64_t least = invariant ? 1 : kFetch ? kTileRows : kCachedTileRows;
  if (rows < least || !tiles_allowed()) return false;
  const TileConfig config;
  _tile_loadconfig(&config);
  int64_t row = 0;
  for (; row + 16 < rows; row += 32) {
    // The first rows bring the panel, for both halves; the others find it in the cache.
    if (kFetch && row == 0) {
      tile_square<true>(x, stride, panel, depth, out, add);
    } else {
      tile_square<false>(x + row * stride, stride, panel, depth, out + row * kPanel, add);
    }
    tile_square<false>(x + row * stride, stride, panel + 64, depth, out + row * kPanel + 32, add);
  }
  if (row < rows) tile_row<kFetch>(x + row * stride, stride, panel, depth, out + row * kPanel, add);
  _tile_release();
  return true;
}

// Whether so many rows would go through tiles with a panel in a cache.
inline bool tiles_take(int64_t rows, bool invariant) {
  return (invariant || rows >= kCachedTileRows) && tiles_allowed();
}

#else

inline bool tiles_allowed() { return false; }
inline bool tiles_take(int64_t, bool) { return false; }

template <bool kFetch>
inline bool multiply_by_tiles(const BFloat16*, int64_t, int64_t, const BFloat16*, int64_t, float*, bool, bool) {
  return false;
}

#endif

template <bool kFetch>
inline bool multiply_by_tiles(const float*, int64_t, int64_t, const float*, int64_t, float*, bool, bool) {
  return false;
}

// Calls work(std::integral_constant<int, count>) for a count from 1 to `kMost`.
template <int kMost, typename Work>
inline void of_so_many(int64_t count, const Work& work) {
  if (count == kMost) return work(std::integral_constant<int, kMost>());
  if constexpr (kMost > 1) of_so_many<kMost - 1>(count, work);
}

// Calls work(first row, which block, of how many, how many rows as a constant) for blocks of about the same size: in one of
// a single row the sums wait for each other, and the weights are read for little.
template <typename Work>
inline void in_row_blocks(int64_t rows, const Work& work) {
  for (int64_t row = 0, block = 0, blocks = (rows + kBlockRows - 1) / kBlockRows; block < blocks; ++block) {
    const int64_t left = blocks - block, taken = (rows - row + left - 1) / left;
    of_so_many<kBlockRows>(taken, [&](auto constant) { work(row, block, blocks, constant); });
    row += taken;
  }
}

// out [rows], of 64 each, = (add ? out : 0) + x[rows][depth] times weights that one pass holds. `kFetch`: they come from memory, not
// from a cache. `lines` of `next` for each step of them are asked for.
template <bool kFetch, typename T>
void multiply_pass(const T* x, int64_t stride, int64_t rows, const T* weights, int64_t depth, const Outputs& out,
                   bool add, const void* next, int64_t lines) {
  in_row_blocks(rows, [&](int64_t row, int64_t block, int64_t blocks, auto taken) {
    const Asking ahead(next, lines, block, blocks);
    const T* read = x + row * stride;
    const Outputs to = out.at(row, 0);
    // The first rows bring the weights for all others.
    const bool fetches = kFetches && kFetch && row == 0;
    if (fetches && ahead) return panel_rows<taken, kFetch, true>(read, stride, weights, depth, to, add, ahead);
    if (fetches) return panel_rows<taken, kFetch, false>(read, stride, weights, depth, to, add, ahead);
    if (ahead) return panel_rows<taken, false, true>(read, stride, weights, depth, to, add, ahead);
    panel_rows<taken, false, false>(read, stride, weights, depth, to, add, ahead);
  });
}

// Inputs of one pass for so many rows.
template <typename T>
int64_t pass_of(int64_t rows, int64_t depth) {
  constexpr int64_t kInput = kPanel * sizeof(T);
  if (rows <= kOnePassRows) return depth;
  return (std::is_same_v<T, float> && rows >= kLongPassRows ? kLongPassBytes : kPassBytes) / kInput;
}

// out [rows], of 64 each, = (add ? out : 0) + x[rows][depth] times the panel; `next` is what the caller multiplies with after
// it, or null. `invariant`: a row gets the same bits among any number of rows, also where there are tiles. Those make rows of
// 64 sums and no more, of bfloat16.
template <bool kFetch, typename T>
void multiply(const T* x, int64_t stride, int64_t rows, const T* panel, int64_t depth, const Outputs& out, bool add,
              bool invariant, const void* next = nullptr) {
  if (multiply_by_tiles<kFetch>(x, stride, rows, panel, depth, out.to, add, invariant)) return;
  const int64_t pass = pass_of<T>(rows, depth);
  for (int64_t from = 0; from < depth; from += pass, add = true) {
    const int64_t count = std::min(pass, depth - from);
    const T* weights = panel + from * kPanel;
    const bool last = from + count == depth;
    // What is in a cache need not be asked for.
    const void* behind = kFetch && !last ? weights + count * kPanel : next;
    multiply_pass<kFetch>(x + from, stride, rows, weights, count, last ? out : out.unfinished(), add, behind, kPanelLines);
  }
}

}  // namespace slipstream
