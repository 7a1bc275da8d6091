// Norms of rows and of heads, in float32: by the root of the mean square, or by mean and variance.

#pragma once

#include <algorithm>

#include "parts.h"
#include "vectors.h"

namespace slipstream {

// A weight that a family adds 1 to has it added already, in float32.
class Norm {
 public:
  explicit Norm(const NormParts& parts)
      : weight_(std::get<0>(parts).to(at::kFloat).contiguous()),
        eps_(static_cast<float>(std::get<2>(parts))),
        centred_(std::get<3>(parts)),
        width_(std::get<4>(parts)) {
    TORCH_CHECK(width_ > 0 && weight_.numel() % width_ == 0, "a norm's weight is for whole groups");
    if (std::get<1>(parts)) bias_ = std::get<1>(parts)->to(at::kFloat).contiguous();
    TORCH_CHECK(!bias_ || bias_->numel() == weight_.numel(), "a norm has one bias for each weight");
  }

  // x[count], group by group; `out` may be x. Weights begin anew where they end.
  template <typename T>
  void apply(const T* x, T* out, int64_t count) const {
    const float* weight = weight_.const_data_ptr<float>();
    const float* bias = bias_ ? bias_->const_data_ptr<float>() : nullptr;
    for (int64_t at = 0; at < count; at += width_) {
      const int64_t place = at % weight_.numel();
      if (centred_) {
        layer_norm(x + at, weight + place, bias ? bias + place : nullptr, out + at, width_, eps_);
      } else {
        rms_norm(x + at, weight + place, out + at, width_, eps_);
      }
    }
  }

 private:
  template <typename T>
  static void rms_norm(const T* x, const float* weight, T* out, int64_t width, float eps) {
    const float factor = 1.0f / std::sqrt(dot(x, x, width) / static_cast<float>(width) + eps);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) store(load(x + i) * factor * load(weight + i), out + i);
    for (; i < width; ++i) narrow(widen(x[i]) * factor * weight[i], out[i]);
  }

  template <typename T>
  static void layer_norm(const T* x, const float* weight, const float* bias, T* out, int64_t width, float eps) {
    const float mean = sum(x, width, 0.0f, false) / static_cast<float>(width);
    const float factor = 1.0f / std::sqrt(sum(x, width, mean, true) / static_cast<float>(width) + eps);
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Floats normed = (load(x + i) - mean) * factor * load(weight + i);
      store(bias ? normed + load(bias + i) : normed, out + i);
    }
    for (; i < width; ++i) narrow((widen(x[i]) - mean) * factor * weight[i] + (bias ? bias[i] : 0.0f), out[i]);
  }

  // Of x - mean, or of its squares.
  template <typename T>
  static float sum(const T* x, int64_t width, float mean, bool squares) {
    Floats sums{};
    int64_t i = 0;
    for (; i + kLanes <= width; i += kLanes) {
      const Floats off = load(x + i) - mean;
      sums += squares ? off * off : off;
    }
    float total = sum_of(sums);
    for (; i < width; ++i) {
      const float off = widen(x[i]) - mean;
      total += squares ? off * off : off;
    }
    return total;
  }

  Tensor weight_;
  MaybeTensor bias_;
  float eps_;
  bool centred_;
  int64_t width_;
};

}  // namespace slipstream
