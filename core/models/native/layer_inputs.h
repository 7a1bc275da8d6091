// Inputs of each layer (per-layer embeddings: Gemma 3n, 2025; Gemma 4): a token has a small vector for every layer, of its id
// and of its embedding, and behind the MLP a gate of the states lets it in.

#pragma once

#include "activations.h"
#include "linear.h"
#include "norms.h"
#include "workshop.h"

namespace slipstream {

// What one layer does with its own.
template <typename T>
class LayerInput {
 public:
  explicit LayerInput(const LayerInputParts& parts)
      : gate_(std::get<0>(parts)),
        out_(std::get<1>(parts)),
        behind_(std::get<2>(parts)),
        activation_(activation_of(std::get<3>(parts))) {}

  const Linear<T>& out() const { return out_; }
  const Norm& behind() const { return behind_; }

  // [tokens][out().depth()], from the states x[tokens] and this layer's inputs, the first at `inputs` and the next `stride`
  // elements on.
  T* inner(Workshop& shop, const T* x, const T* inputs, int64_t stride, int64_t tokens) const {
    T* inner = shop.buffer<T>(11, tokens, out_.depth());
    gate_.apply(shop.team, shop.scratch, x, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      alignas(64) float by[kPanel] = {};
      for (int64_t i = 0; i < count; ++i) by[i] = widen(inputs[row * stride + first + i]);
      activate(activation_, found, by, inner + row * out_.depth() + first, std::min(kPanel, out_.depth() - first));
    });
    return inner;
  }

 private:
  Linear<T> gate_, out_;
  Norm behind_;
  Activation activation_;
};

// All layers' inputs of a step's tokens. It rounds where tensors of T would be.
template <typename T>
class LayerInputs {
 public:
  explicit LayerInputs(const LayerInputsParts& parts)
      : table_(std::get<0>(parts)),
        multiplier_(static_cast<float>(std::get<1>(parts))),
        matrix_(std::get<2>(parts)),
        factor_(static_cast<float>(std::get<3>(parts))),
        norm_(std::get<4>(parts)),
        both_(static_cast<float>(std::get<5>(parts))) {
    TORCH_CHECK(table_.is_contiguous() && table_.scalar_type() == c10::CppTypeToScalarType<T>::value &&
                    table_.size(1) == matrix_.outputs(),
                "an input of each layer for every token id");
  }

  // Elements that a token has for all layers.
  int64_t stride() const { return table_.size(1); }

  // [tokens][stride()], from ids and embeddings x[tokens].
  T* of(Workshop& shop, const Tensor& ids, const T* x, int64_t tokens) const {
    T* out = shop.buffer<T>(10, tokens, stride());
    matrix_.write(shop.team, shop.scratch, x, tokens, out, stride());
    const int64_t* id = ids.const_data_ptr<int64_t>();
    for (int64_t t = 0; t < tokens; ++t)
      TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < table_.size(0), "no layer has an input for token id ", id[t]);
    const T* table = table_.const_data_ptr<T>();
    shop.in_blocks(tokens, kTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) add(table + id[t] * stride(), out + t * stride());
    });
    return out;
  }

 private:
  static constexpr int64_t kTokens = 4;

  // Norms what was made of an embedding, and adds what its id has.
  void add(const T* own, T* row) const {
    for (int64_t i = 0; i < stride(); ++i) narrow(widen(row[i]) * factor_, row[i]);
    norm_.apply(row, row, stride());
    for (int64_t i = 0; i < stride(); ++i) {
      T scaled, sum;
      narrow(widen(own[i]) * multiplier_, scaled);
      narrow(widen(row[i]) + widen(scaled), sum);
      narrow(widen(sum) * both_, row[i]);
    }
  }

  Tensor table_;
  float multiplier_;
  Linear<T> matrix_;
  float factor_;
  Norm norm_;
  float both_;
};

}  // namespace slipstream
