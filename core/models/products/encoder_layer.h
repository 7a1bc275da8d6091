// A layer of an encoder over texts that are whole, in one call, and its attention for layers that are not.

#pragma once

#include <ATen/ATen.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "product.h"
#include "texts.h"

namespace slipstream {

// The first token of each text, and the place behind its last one.
using Places = std::vector<std::pair<int64_t, int64_t>>;

template <typename T>
void attend_as(Crew& crew, const Shape& shape, const Weighing& weighing, const Tensor& q, const Tensor& k, const Tensor& v,
               const Texts& texts, Tensor& out) {
  // Attention never writes what it reads.
  const Stored<T> stored{const_cast<T*>(k.const_data_ptr<T>()), const_cast<T*>(v.const_data_ptr<T>())};
  texts.attend(crew.team, crew.scratch, shape, weighing, q.const_data_ptr<T>(), stored, out.mutable_data_ptr<T>());
}

// Of q [.., T, H, D], k and v [.., T, K, D], which are dense.
inline void attend(Crew& crew, const Shape& shape, const Weighing& weighing, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Texts& texts, Tensor& out) {
  if (q.scalar_type() == at::kFloat) {
    attend_as<float>(crew, shape, weighing, q, k, v, texts, out);
  } else {
    attend_as<BFloat16>(crew, shape, weighing, q, k, v, texts, out);
  }
}

inline void check_distances(const MaybeTensor& distances, int64_t heads) {
  TORCH_CHECK(!distances || (distances->dim() == 2 && distances->size(0) == heads && distances->size(1) % 2 == 1 &&
                             distances->is_contiguous() && distances->scalar_type() == at::kFloat),
              "there is no row of distances for each head");
}

// Writes to out [1, T, H, D] what the tokens of `places`, texts from one to the other, see of their own text. q [1, H, T, D],
// k and v [1, K, T, D]; `distances` as `Texts::weighing` has them, or none.
inline void attend_to_texts(const SharedCrew& crew, const Tensor& q, const Tensor& k, const Tensor& v,
                            const Places& places, double scale, Tensor out, const MaybeTensor& distances) {
  TORCH_CHECK(q.dim() == 4 && q.size(0) == 1 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(3) == q.size(3) &&
                  q.size(2) == k.size(2) && q.size(1) % k.size(1) == 0,
              "queries ", q.sizes(), " do not go with keys ", k.sizes(), " and values ", v.sizes());
  const Shape shape{q.size(1), k.size(1), q.size(3)};
  const Tensor queries = q.transpose(1, 2).contiguous(), keys = k.transpose(1, 2).contiguous(),
               values = v.transpose(1, 2).contiguous();
  TORCH_CHECK(out.sizes() == queries.sizes() && out.is_contiguous() && out.scalar_type() == q.scalar_type(),
              "there is no room for what they see");
  check_distances(distances, q.size(1));
  const Texts texts(places, q.size(2));
  const AtWork working(*crew, q.numel() * kPanel);
  const Weighing weighing = texts.weighing(static_cast<float>(scale), distances, crew->buffers);
  attend(*crew, shape, weighing, queries, keys, values, texts, out);
}

// Attention and an MLP without a gate, each with its residual, and a norm before it or behind the sum.
class EncoderLayer {
 public:
  // `products`: of queries, keys, values, what attention found, into the MLP and out of it; of one crew. `distances` as
  // `attend_to_texts` takes them.
  EncoderLayer(const std::vector<std::shared_ptr<Product>>& products, const std::string& activation, const NormParts& first,
               const NormParts& second, bool norms_before, int64_t heads, int64_t kv_heads, double scale,
               const MaybeTensor& distances)
      : products_(products),
        norms_{norm_of(first), norm_of(second)},
        activation_(activation, std::nullopt, std::nullopt, std::nullopt),
        norms_before_(norms_before),
        heads_(heads),
        kv_heads_(kv_heads),
        scale_(static_cast<float>(scale)),
        distances_(distances) {
    TORCH_CHECK(products_.size() == kProducts, "a layer has ", kProducts, " products");
    TORCH_CHECK(kv_heads_ > 0 && heads_ % kv_heads_ == 0, heads_, " heads do not share ", kv_heads_);
    check_distances(distances_, heads_);
  }

  Crew& crew() const { return products_[0]->crew(); }

  // [1, T, H] of x [1, T, H], of which each text sees itself.
  Tensor apply(const Tensor& x, const Places& places) const {
    TORCH_CHECK(x.dim() == 3 && x.size(0) == 1, "a layer takes a row of tokens, and ", x.sizes(), " came");
    const Texts texts(places, x.size(1));
    const Tensor in = norms_before_ ? normed(x, 0) : x;
    Tensor rooms[kProducts - 1];
    for (size_t i = 0; i < kProducts - 1; ++i) rooms[i] = crew().room(i, x, products_[i]->outputs());
    const auto& [queries, keys, values, between, inner] = rooms;
    for (size_t i = 0; i < 3; ++i) products_[i]->write(in, rooms[i]);
    products_[3]->write_joined(seen_of(queries, keys, values, texts), behind(0), x, between);
    products_[4]->write_joined(norms_before_ ? normed(between, 1) : between, activation_, std::nullopt, inner);
    return products_[5]->joined(inner, behind(1), between);
  }

 private:
  static constexpr size_t kProducts = 6;

  static Epilogue norm_of(const NormParts& parts) { return Epilogue("", parts, std::nullopt, std::nullopt); }

  const Epilogue& behind(int norm) const { return norms_before_ ? nothing_ : norms_[norm]; }

  Tensor normed(const Tensor& x, int norm) const {
    const Tensor given = x.contiguous();
    norms_[norm].check(x.size(2));
    const Tensor found = crew().room(kProducts, x, x.size(2));
    if (x.scalar_type() == at::kFloat) {
      norms_[norm].norm(crew().team, given.const_data_ptr<float>(), found.mutable_data_ptr<float>(), x.size(1), x.size(2));
    } else {
      norms_[norm].norm(crew().team, given.const_data_ptr<BFloat16>(), found.mutable_data_ptr<BFloat16>(), x.size(1),
                        x.size(2));
    }
    return found;
  }

  Tensor seen_of(const Tensor& q, const Tensor& k, const Tensor& v, const Texts& texts) const {
    const Shape shape{heads_, kv_heads_, q.size(2) / heads_};
    TORCH_CHECK(q.size(2) == shape.q_width() && k.size(2) == shape.kv_width() && v.size(2) == shape.kv_width(),
                "heads do not share queries ", q.sizes(), ", keys ", k.sizes(), " and values ", v.sizes());
    Tensor seen = crew().room(kProducts - 1, q, q.size(2));
    attend(crew(), shape, texts.weighing(scale_, distances_, crew().buffers), q, k, v, texts, seen);
    return seen;
  }

  std::vector<std::shared_ptr<Product>> products_;
  Epilogue norms_[2], activation_, nothing_{"", std::nullopt, std::nullopt, std::nullopt};
  bool norms_before_;
  int64_t heads_, kv_heads_;
  float scale_;
  MaybeTensor distances_;
};

}  // namespace slipstream
