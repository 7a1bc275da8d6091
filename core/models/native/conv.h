// A causal convolution of every channel by itself, over its newest inputs, which are a state between steps.

#pragma once

#include <algorithm>

#include "parts.h"
#include "scratch.h"
#include "states.h"
#include "vectors.h"

namespace slipstream {

// As a tensor of T between two operations would have it.
template <typename T>
inline Floats rounded(Floats wide) {
  if constexpr (sizeof(T) == sizeof(float)) return wide;
  T narrow[kLanes];
  store(wide, narrow);
  return load(narrow);
}

template <typename T>
class CausalConv {
 public:
  explicit CausalConv(const ConvParts& parts)
      : weight_(std::get<0>(parts).to(at::kFloat).t().contiguous()), taps_(weight_.size(0)), channels_(weight_.size(1)) {
    TORCH_CHECK(taps_ <= kMostTaps, "a convolution has ", taps_, " taps");
    TORCH_CHECK(channels_ % kLanes == 0, "a convolution has ", channels_, " channels");
    if (std::get<1>(parts)) bias_ = std::get<1>(parts)->to(at::kFloat).contiguous();
  }

  int64_t channels() const { return channels_; }

  // Goes through channels `first` to `last`, whole vectors, of one request: write(token, channel, sums) for as many
  // channels as lanes, from what read(token, channel) gives. states: [slots][channels][taps], the newest input last.
  template <typename Read, typename Write>
  void run(const Course& course, T* states, int64_t first, int64_t last, Scratch& scratch, const Read& read,
           const Write& write) const {
    const int64_t width = last - first;
    float* window = scratch.take<float>(0, taps_ * width);
    for (const Stretch& stretch : course) {
      enter(states + (stretch.from * channels_ + first) * taps_, width, window);
      // Rows of the window from the oldest input on; the row of the oldest takes the next one.
      float* rows[kMostTaps];
      for (int64_t tap = 0; tap < taps_; ++tap) rows[tap] = window + tap * width;
      for (int64_t token = stretch.token; token < stretch.token + stretch.tokens; ++token) {
        std::rotate(rows, rows + 1, rows + taps_);
        for (int64_t c = 0; c < width; c += kLanes) {
          store(rounded<T>(read(token, first + c)), rows[taps_ - 1] + c);
          write(token, first + c, sums(rows, first, c));
        }
      }
      leave(rows, width, states + (stretch.to * channels_ + first) * taps_);
    }
  }

 private:
  static constexpr int64_t kMostTaps = 16;

  Floats sums(float* const* rows, int64_t first, int64_t c) const {
    const float* weight = weight_.const_data_ptr<float>() + first + c;
    Floats sum = bias_ ? load(bias_->const_data_ptr<float>() + first + c) : Floats{};
    for (int64_t tap = 0; tap < taps_; ++tap) sum += load(rows[tap] + c) * load(weight + tap * channels_);
    return sum;
  }

  void enter(const T* state, int64_t width, float* window) const {
    for (int64_t c = 0; c < width; ++c)
      for (int64_t tap = 0; tap < taps_; ++tap) window[tap * width + c] = widen(state[c * taps_ + tap]);
  }

  void leave(float* const* rows, int64_t width, T* state) const {
    for (int64_t c = 0; c < width; ++c)
      for (int64_t tap = 0; tap < taps_; ++tap) narrow(rows[tap][c], state[c * taps_ + tap]);
  }

  Tensor weight_;
  int64_t taps_, channels_;
  MaybeTensor bias_;
};

}  // namespace slipstream
