// An MLP with a mixture of experts beside it (Gemma 4, 2026): experts read the states by a norm of their own, their router by
// another, and each side is normed before both are added.

#pragma once

#include "blocks.h"
#include "experts.h"
#include "norms.h"

namespace slipstream {

template <typename T>
class Beside {
 public:
  explicit Beside(const BesideParts& parts)
      : mlp_(std::get<0>(parts)),
        experts_(std::get<1>(parts)),
        behind_mlp_(std::get<2>(parts)),
        before_router_(std::get<3>(parts)),
        before_experts_(std::get<4>(parts)),
        behind_experts_(std::get<5>(parts)) {}

  // Writes the sum of both to out[tokens][stride], from the states x[tokens][stride] and the MLP's norm of them, `read`.
  void write(Workshop& shop, typename Experts<T>::Work& work, const T* x, const T* read, int64_t tokens, int64_t stride,
             T* out) const {
    const int64_t width = mlp_.down().outputs();
    T *asked = shop.buffer<T>(12, tokens, stride), *given = shop.buffer<T>(13, tokens, stride);
    mlp_.down().write(shop.team, shop.scratch, mlp_.inner(shop, read, tokens), tokens, out, stride);
    shop.in_blocks(tokens, kTokens, [&](int64_t from, int64_t to) {
      for (int64_t row = from * stride; row < to * stride; row += stride) {
        behind_mlp_.apply(out + row, out + row, width);
        before_router_.apply(x + row, asked + row, width);
        before_experts_.apply(x + row, given + row, width);
        std::fill(asked + row + width, asked + row + stride, T(0.0f));
        std::fill(given + row + width, given + row + stride, T(0.0f));
      }
    });
    experts_.begin(shop, work, asked, given, tokens);
    experts_.apply(shop, work, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i) narrow(found[i], asked[row * stride + first + i]);
    });
    shop.in_blocks(tokens, kTokens, [&](int64_t from, int64_t to) {
      for (int64_t row = from * stride; row < to * stride; row += stride) {
        behind_experts_.apply(asked + row, asked + row, width);
        add_row(out + row, asked + row, width, 1.0f);
      }
    });
  }

 private:
  static constexpr int64_t kTokens = 4;

  Mlp<T> mlp_;
  Experts<T> experts_;
  Norm behind_mlp_, before_router_, before_experts_, behind_experts_;
};

}  // namespace slipstream
