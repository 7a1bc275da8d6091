// Rotary position embeddings: the first elements of a head are pairs, each turned by its angle at the token's position.

#pragma once

#include "parts.h"
#include "vectors.h"

namespace slipstream {

class Rotary {
 public:
  explicit Rotary(const RotaryParts& parts)
      : cos_(std::get<0>(parts)), sin_(std::get<1>(parts)), neighbours_(std::get<2>(parts)), half_(cos_.size(1)) {
    TORCH_CHECK(cos_.scalar_type() == at::kFloat && cos_.is_contiguous(), "angles are float32");
    TORCH_CHECK(sin_.scalar_type() == at::kFloat && sin_.is_contiguous() && sin_.sizes() == cos_.sizes());
  }

  // The angles of one token, R / 2 of them.
  struct Angles {
    const float *cos, *sin;
  };

  Angles at(int64_t position) const {
    return {cos_.const_data_ptr<float>() + position * half_, sin_.const_data_ptr<float>() + position * half_};
  }
  // Of a token for which a step brings others, [T, R / 2].
  Angles of(const std::pair<Tensor, Tensor>& given, int64_t token) const {
    const auto& [cos, sin] = given;
    TORCH_CHECK(cos.size(1) == half_ && cos.is_contiguous() && sin.sizes() == cos.sizes() && sin.is_contiguous() &&
                    cos.scalar_type() == at::kFloat && sin.scalar_type() == at::kFloat,
                "a step brings angles ", cos.sizes(), ", and pairs are ", half_);
    return {cos.const_data_ptr<float>() + token * half_, sin.const_data_ptr<float>() + token * half_};
  }

  template <typename T>
  void turn(T* head, const Angles& by) const {
    if (neighbours_) {
      turn_neighbours(head, by.cos, by.sin);
    } else {
      turn_halves(head, by.cos, by.sin);
    }
  }

  template <typename T>
  void turn(T* head, int64_t position) const {
    turn(head, at(position));
  }

 private:
  template <typename T>
  void turn_halves(T* head, const float* cos, const float* sin) const {
    T *low = head, *high = head + half_;
    int64_t i = 0;
    for (; i + kLanes <= half_; i += kLanes) {
      const Floats a = load(low + i), b = load(high + i), c = load(cos + i), s = load(sin + i);
      store(a * c - b * s, low + i);
      store(b * c + a * s, high + i);
    }
    for (; i < half_; ++i) {
      const float a = widen(low[i]), b = widen(high[i]);
      narrow(a * cos[i] - b * sin[i], low[i]);
      narrow(b * cos[i] + a * sin[i], high[i]);
    }
  }

  template <typename T>
  void turn_neighbours(T* head, const float* cos, const float* sin) const {
    for (int64_t i = 0; i < half_; ++i) {
      const float a = widen(head[2 * i]), b = widen(head[2 * i + 1]);
      narrow(a * cos[i] - b * sin[i], head[2 * i]);
      narrow(b * cos[i] + a * sin[i], head[2 * i + 1]);
    }
  }

  Tensor cos_, sin_;
  bool neighbours_;
  int64_t half_;
};

}  // namespace slipstream
