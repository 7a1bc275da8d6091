// Asking memory for weights before they are multiplied with.

#pragma once

#include <cstdint>
#include <utility>

namespace slipstream {

// Asks for weights some bytes behind those that are multiplied. Xeons with AMX have more lines under way to the second
// cache than to the first: asked in two steps, two cores get 43 GB/s out of the third where they got 32.
inline void ask_ahead(const void* weights) {
#if defined(__AMX_BF16__)
  __builtin_prefetch(static_cast<const char*>(weights) + 8192, 0, 2);
  __builtin_prefetch(static_cast<const char*>(weights) + 1024, 0, 3);
#else
  __builtin_prefetch(static_cast<const char*>(weights) + 8192, 0, 3);
#endif
}

// Weights that a thread reads next, asked for a few lines at a time while rows go through those that are in a cache: else
// memory waits while a core multiplies, and the core while the first rows bring the next weights. Two cores of a Zen 4
// multiplied 8 to 16 rows 1.1 to 1.4 times as fast so.
class Ahead {
 public:
  // The part of `block` among `blocks` blocks of rows, of `lines` lines at `weights` for each step; none if that is null.
  Ahead(const void* weights, int64_t lines, int64_t block, int64_t blocks) : stride_(lines * kLine) {
    const int64_t each = lines > blocks ? 2 : 1, first = block * each;
    if (weights == nullptr || blocks == 1 || first >= lines) return;
    first_ = static_cast<const char*>(weights) + first * kLine;
    second_ = first_ + (each - 1) * kLine;
  }

  explicit operator bool() const { return first_ != nullptr; }

  // The two lines, or one twice, to ask for in a step: one input of float32 or two of bfloat16.
  std::pair<const char*, const char*> lines(int64_t step) const {
    return {first_ + step * stride_, second_ + step * stride_};
  }

  // Asks for them.
  void ask(int64_t step) const {
    const auto [first, second] = lines(step);
    __builtin_prefetch(first, 0, 2);
    __builtin_prefetch(second, 0, 2);
  }

 private:
  static constexpr int64_t kLine = 64;
  int64_t stride_;
  const char *first_ = nullptr, *second_ = nullptr;
};

}  // namespace slipstream
