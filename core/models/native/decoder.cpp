// One packed step of a dense decoder (Llama, Qwen2, Qwen3, Mistral) on the CPU, from token ids to logits, in one call.
//
// The interpreter is out of the way for the whole step, so the loop thread runs beside it. Every product streams its
// weights once for all rows and does what follows it (bias, gate, residual) while its outputs are still at hand; KV is
// written to and read from its pages in place; buffers between phases are kept from step to step.
//
// Shapes: T tokens of B requests in one row, as many of each as `extends` says, S places whose logits are wanted.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "attention.h"
#include "kernels.h"
#include "linear.h"
#include "team.h"

namespace {

using namespace slipstream;
using at::Tensor;

// Weight [N, K], scale [N] if that is int8, bias [N] if there is one.
using Matrix = std::tuple<Tensor, MaybeTensor, MaybeTensor>;

// What a step is computed for; see `Decoder::forward`.
struct Step {
  const Tensor &ids, &positions, &slots, &rows, &prefixes, &extends;
  const Tensor &wanted, &table;
  const std::vector<Tensor>&keys, &values;
  bool wants_hidden;
  const std::vector<int64_t>& layers;
  const MaybeTensor& features;
};

class Decoder {
 public:
  virtual ~Decoder() = default;
  // Matrices and norms of one layer, by name of the argument; see `core/models/native/weights.py`.
  virtual void add_layer(Tensor attention_norm, Tensor mlp_norm, MaybeTensor q_norm, MaybeTensor k_norm,
                         const Matrix& qkv, const Matrix& out, const Matrix& gate_up, const Matrix& down) = 0;
  // Makes it a draft head, whose only layer reads embedding and feature side by side; see `core/models/native/head.py`.
  virtual void fuse(Tensor embedding_norm, const Matrix& fusion) = 0;
  virtual std::vector<Tensor> forward(const Step& step) = 0;
};

template <typename T>
class DecoderOf final : public Decoder {
 public:
  DecoderOf(Shape shape, int64_t threads, Tensor embedding, Tensor cos, Tensor sin, Tensor final_norm,
            const Matrix& head)
      : shape_(shape),
        embedding_(std::move(embedding)),
        cos_(std::move(cos)),
        sin_(std::move(sin)),
        final_norm_(std::move(final_norm)),
        head_(linear(head)),
        hidden_(embedding_.size(1)),
        stride_(round_up(hidden_, kDepth)),
        team_(threads),
        scratch_(threads) {}

  void add_layer(Tensor attention_norm, Tensor mlp_norm, MaybeTensor q_norm, MaybeTensor k_norm, const Matrix& qkv,
                 const Matrix& out, const Matrix& gate_up, const Matrix& down) override {
    const auto& [weight, scale, bias] = gate_up;
    layers_.push_back({std::move(attention_norm), std::move(mlp_norm), std::move(q_norm), std::move(k_norm), linear(qkv),
                       linear(out), Linear<T>(paired(weight), paired(scale), paired(bias)), linear(down)});
  }

  void fuse(Tensor embedding_norm, const Matrix& fusion) override {
    embedding_norm_ = std::move(embedding_norm);
    fusion_.emplace(linear(fusion));
  }

  std::vector<Tensor> forward(const Step& step) override {
    c10::InferenceMode guard;
    int64_t tokens = step.ids.size(0);
    plan(step, tokens);
    Tensor states = at::empty({tokens, static_cast<int64_t>(step.layers.size()) * hidden_}, embedding_.options());
    T* x = embed(step.ids);
    T* both = fusion_ ? beside(x, step, tokens) : nullptr;
    T* normed = buffer(1, tokens, stride_);
    bool last_wanted = false;
    for (const int64_t layer : step.layers) last_wanted |= layer == static_cast<int64_t>(layers_.size());
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      keep_states(step, i, x, tokens, states);
      norm(x, layer.attention_norm, normed, tokens);
      if (both) set_behind(normed, both, tokens);
      T* attended = attend(layer, step, both ? both : normed, tokens, step.keys[i], step.values[i]);
      if (i + 1 == layers_.size() && !step.wants_hidden && !last_wanted) {
        // Nobody reads the other tokens any more: their KV is stored, and that was all they were for.
        keep_wanted(step.wanted, x, stride_);
        keep_wanted(step.wanted, attended, layer.out.depth());
        tokens = step.wanted.size(0);
      }
      add(layer.out, attended, x, tokens);
      norm(x, layer.mlp_norm, normed, tokens);
      add(layer.down, gated(layer, normed, tokens), x, tokens);
    }
    keep_states(step, layers_.size(), x, tokens, states);
    norm(x, final_norm_, normed, tokens);
    std::vector<Tensor> found = finish(step, normed, tokens);
    if (!step.layers.empty()) found.push_back(std::move(states));
    return found;
  }

 private:
  struct Layer {
    Tensor attention_norm, mlp_norm;
    MaybeTensor q_norm, k_norm;
    Linear<T> qkv, out, gate_up, down;
  };

  static constexpr int64_t kBlockTokens = 64, kNormRows = 8, kTurnTokens = 4;

  static Linear<T> linear(const Matrix& matrix) {
    const auto& [weight, scale, bias] = matrix;
    return Linear<T>(weight, scale, bias);
  }

  // gate and up [2 I, C], row by row in turns of half a panel, so that one panel holds both sides of its 32 products.
  static Tensor paired(const Tensor& gate_up) {
    const int64_t half = kPanel / 2, inner = gate_up.size(0) / 2, padded = round_up(inner, half);
    Tensor out = at::zeros({padded / half, 2, half, gate_up.size(1)}, gate_up.options());
    Tensor flat = at::zeros({2, padded, gate_up.size(1)}, gate_up.options());
    flat.narrow(1, 0, inner).copy_(gate_up.view({2, inner, gate_up.size(1)}));
    out.copy_(flat.view({2, padded / half, half, gate_up.size(1)}).transpose(0, 1));
    return out.view({2 * padded, gate_up.size(1)});
  }

  static MaybeTensor paired(const MaybeTensor& by_output) {
    if (!by_output) return std::nullopt;
    return paired(by_output->unsqueeze(1)).squeeze(1);
  }

  // [rows][stride] at buffer `place`, rows filled up to what products may touch.
  T* buffer(int64_t place, int64_t rows, int64_t stride) {
    return buffers_.take<T>(place, round_up(rows, kRows) * stride);
  }

  // Which pieces attention falls into, and who reads the same keys.
  void plan(const Step& step, int64_t tokens) {
    const int64_t* prefixes = step.prefixes.const_data_ptr<int64_t>();
    const int64_t* extends = step.extends.const_data_ptr<int64_t>();
    pieces_.clear();
    const int64_t* rows = step.rows.const_data_ptr<int64_t>();
    const int32_t* table = step.table.const_data_ptr<int32_t>();
    int64_t token = 0;
    for (int64_t place = 0; place < step.rows.size(0); ++place) {
      for (int64_t done = 0; done < extends[place]; done += kBlockTokens)
        pieces_.push_back({token + done, std::min(kBlockTokens, extends[place] - done), prefixes[place] + done,
                           table + rows[place] * step.table.size(1)});
      token += extends[place];
    }
    TORCH_CHECK(token == tokens, "the requests of a step have ", token, " tokens, and ", tokens, " ids came");
    groups_ = &sharing_.plan(pieces_, shape_.group());
  }

  T* embed(const Tensor& ids) {
    const int64_t tokens = ids.size(0), *id = ids.const_data_ptr<int64_t>();
    const T* table = embedding_.const_data_ptr<T>();
    T* x = buffer(0, tokens, stride_);
    for (int64_t t = 0; t < tokens; ++t) {
      TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < embedding_.size(0), "token id ", id[t], " is not in the vocabulary");
      std::copy_n(table + id[t] * hidden_, hidden_, x + t * stride_);
      std::fill(x + t * stride_ + hidden_, x + (t + 1) * stride_, T(0.0f));
    }
    return x;
  }

  // Puts what layer `number` reads in its place, or places, of the states that are wanted.
  void keep_states(const Step& step, size_t number, const T* x, int64_t tokens, const Tensor& states) {
    const int64_t count = static_cast<int64_t>(step.layers.size());
    for (int64_t place = 0; place < count; ++place) {
      if (step.layers[place] != static_cast<int64_t>(number)) continue;
      T* to = states.mutable_data_ptr<T>() + place * hidden_;
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(x + t * stride_, hidden_, to + t * count * hidden_);
    }
  }

  // [tokens][2 hidden, filled up], its first halves the normed embeddings from x. Leaves the features in x: fused from
  // [tokens, F], or as they came where they are as wide as hidden.
  T* beside(T* x, const Step& step, int64_t tokens) {
    TORCH_CHECK(step.features && step.features->size(0) == tokens && step.features->is_contiguous(), "a feature each");
    const int64_t stride = round_up(2 * hidden_, kDepth), width = step.features->size(1);
    const T* from = step.features->template const_data_ptr<T>();
    T* both = buffer(5, tokens, stride);
    for (int64_t t = 0; t < tokens; ++t) {
      rms_norm(x + t * stride_, embedding_norm_.const_data_ptr<T>(), both + t * stride, hidden_,
               static_cast<float>(shape_.eps));
      std::fill(both + t * stride + 2 * hidden_, both + (t + 1) * stride, T(0.0f));
    }
    if (width == hidden_) {
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(from + t * hidden_, hidden_, x + t * stride_);
      return both;
    }
    const int64_t depth = fusion_->depth();
    T* raw = buffer(6, tokens, depth);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(from + t * width, width, raw + t * depth);
      std::fill(raw + t * depth + width, raw + (t + 1) * depth, T(0.0f));
    }
    fusion_->apply(team_, scratch_, raw, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i) narrow(found[i], x[row * stride_ + first + i]);
    });
    return both;
  }

  void set_behind(const T* normed, T* both, int64_t tokens) {
    const int64_t stride = round_up(2 * hidden_, kDepth);
    for (int64_t t = 0; t < tokens; ++t)
      std::copy_n(normed + t * stride_, hidden_, both + t * stride + hidden_);
  }

  void norm(const T* x, const Tensor& weight, T* out, int64_t tokens) {
    const T* by = weight.const_data_ptr<T>();
    const auto rows = [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        rms_norm(x + t * stride_, by, out + t * stride_, hidden_, static_cast<float>(shape_.eps));
        std::fill(out + t * stride_ + hidden_, out + (t + 1) * stride_, T(0.0f));
      }
    };
    in_blocks(tokens, kNormRows, rows);
  }

  // x[tokens] += matrix of from, with its bias.
  void add(const Linear<T>& matrix, const T* from, T* x, int64_t tokens) {
    matrix.apply(team_, scratch_, from, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      add_rounded(x + row * stride_ + first, found, count);
    });
  }

  T* gated(const Layer& layer, const T* normed, int64_t tokens) {
    const int64_t half = kPanel / 2, stride = layer.down.depth();
    T* out = buffer(2, tokens, stride);
    layer.gate_up.apply(team_, scratch_, normed, tokens, [&](int64_t row, int64_t first, float* found, int64_t) {
      silu_mul(found, found + half, out + row * stride + first / 2, half);
    });
    return out;
  }

  // [tokens][out.depth()] from normed.
  T* attend(const Layer& layer, const Step& step, const T* normed, int64_t tokens, const Tensor& keys,
            const Tensor& values) {
    const int64_t width = shape_.qkv_width(), stride = layer.out.depth();
    T* qkv = buffer(3, tokens, width);
    T* out = buffer(4, tokens, stride);
    layer.qkv.apply(team_, scratch_, normed, tokens, [&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i) narrow(found[i], qkv[row * width + first + i]);
    });
    T *k = keys.mutable_data_ptr<T>(), *v = values.mutable_data_ptr<T>();
    turn(layer, step, qkv, k, v, tokens);
    if (stride > shape_.q_width())
      for (int64_t t = 0; t < tokens; ++t)
        std::fill(out + t * stride + shape_.q_width(), out + (t + 1) * stride, T(0.0f));
    // Heads of a token are side by side in memory: they part only if there is not enough to do otherwise.
    const int64_t groups = static_cast<int64_t>(groups_->size());
    const int64_t parts = groups < 2 * team_.size() ? shape_.kv_heads : 1, heads = shape_.kv_heads / parts;
    const Block<T> block{qkv, out, width, stride, nullptr, 0, 0};
    team_.run(groups * parts, [&](int64_t chunk, int64_t worker) {
      const int64_t head = chunk % parts * heads;
      slipstream::attend(shape_, (*groups_)[chunk / parts], block, k, v, head, head + heads, scratch_[worker]);
    });
    return out;
  }

  void turn(const Layer& layer, const Step& step, T* qkv, T* keys, T* values, int64_t tokens) {
    const int64_t half = shape_.dim / 2;
    const int64_t* positions = step.positions.const_data_ptr<int64_t>();
    const int64_t* slots = step.slots.const_data_ptr<int64_t>();
    const float *cos = cos_.const_data_ptr<float>(), *sin = sin_.const_data_ptr<float>();
    const T* q_norm = layer.q_norm ? layer.q_norm->template const_data_ptr<T>() : nullptr;
    const T* k_norm = layer.k_norm ? layer.k_norm->template const_data_ptr<T>() : nullptr;
    in_blocks(tokens, kTurnTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t)
        rotate_and_store(qkv + t * shape_.qkv_width(), q_norm, k_norm, shape_, cos + positions[t] * half,
                         sin + positions[t] * half, keys + slots[t] * shape_.kv_width(),
                         values + slots[t] * shape_.kv_width());
    });
  }

  // Calls work(from, to) over all of `count`; by this thread alone where waking others would take longer.
  template <typename Work>
  void in_blocks(int64_t count, int64_t size, const Work& work) {
    const int64_t blocks = (count + size - 1) / size;
    team_.run(blocks, [&](int64_t block, int64_t) { work(block * size, std::min(count, (block + 1) * size)); });
  }

  // Moves the wanted rows to the front; they ascend, so nothing is overwritten too early.
  static void keep_wanted(const Tensor& wanted, T* rows, int64_t stride) {
    const int64_t* from = wanted.const_data_ptr<int64_t>();
    for (int64_t to = 0; to < wanted.size(0); ++to) {
      TORCH_CHECK(from[to] >= to && (to == 0 || from[to] > from[to - 1]), "wanted places ascend");
      if (from[to] != to) std::copy_n(rows + from[to] * stride, stride, rows + to * stride);
    }
  }

  std::vector<Tensor> finish(const Step& step, T* normed, int64_t tokens) {
    std::vector<Tensor> found;
    if (step.wants_hidden) {
      Tensor hidden = at::empty({tokens, hidden_}, embedding_.options());
      T* to = hidden.mutable_data_ptr<T>();
      for (int64_t t = 0; t < tokens; ++t) std::copy_n(normed + t * stride_, hidden_, to + t * hidden_);
      found.push_back(std::move(hidden));
    }
    // Unless the last layer has left no others.
    if (tokens != step.wanted.size(0)) keep_wanted(step.wanted, normed, stride_);
    const int64_t rows = step.wanted.size(0), vocabulary = head_.outputs();
    Tensor logits = at::empty({rows, vocabulary}, embedding_.options().dtype(at::kFloat));
    float* to = logits.mutable_data_ptr<float>();
    head_.apply(team_, scratch_, normed, rows, [&](int64_t row, int64_t first, float* values, int64_t count) {
      std::copy_n(values, count, to + row * vocabulary + first);
    });
    team_.rest();
    found.insert(found.begin(), std::move(logits));
    return found;
  }

  Shape shape_;
  Tensor embedding_, cos_, sin_, final_norm_;
  Linear<T> head_;
  Tensor embedding_norm_;
  std::optional<Linear<T>> fusion_;
  int64_t hidden_, stride_;
  Team team_;
  std::vector<Scratch> scratch_;
  Scratch buffers_;
  std::vector<Layer> layers_;
  std::vector<Piece> pieces_;
  Sharing sharing_;
  const std::vector<Group>* groups_ = nullptr;
};

std::unique_ptr<Decoder> make_decoder(int64_t heads, int64_t kv_heads, int64_t dim, double eps, double scale,
                                      int64_t threads, Tensor embedding, Tensor cos, Tensor sin, Tensor final_norm,
                                      const Matrix& head) {
  const Shape shape{heads, kv_heads, dim, eps, scale};
  if (embedding.scalar_type() == at::kFloat)
    return std::make_unique<DecoderOf<float>>(shape, threads, embedding, cos, sin, final_norm, head);
  TORCH_CHECK(embedding.scalar_type() == at::kBFloat16, "weights are float32 or bfloat16");
  return std::make_unique<DecoderOf<BFloat16>>(shape, threads, embedding, cos, sin, final_norm, head);
}

// ids, positions, slots int64[T]; rows, prefixes, extends int64[B]; wanted int64[S] ascending; table int32[R, width];
// keys and values by layer [slots, K, D]; features [T, C or F] of a draft head. Returns float32 logits [S, V], hidden
// [T, C] after the final norm if asked, and [T, n C] if there are n `layers`: what each of them reads, the number of all
// layers being what the last one leaves.
std::vector<Tensor> forward(Decoder& self, const Tensor& ids, const Tensor& positions, const Tensor& slots,
                            const Tensor& rows, const Tensor& prefixes, const Tensor& extends,
                            const Tensor& wanted, const Tensor& table, const std::vector<Tensor>& keys,
                            const std::vector<Tensor>& values, bool wants_hidden,
                            const std::vector<int64_t>& layers, const MaybeTensor& features) {
  return self.forward(
      {ids, positions, slots, rows, prefixes, extends, wanted, table, keys, values, wants_hidden, layers, features});
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::class_<Decoder>(module, "Decoder")
      .def(py::init(&make_decoder), py::call_guard<py::gil_scoped_release>())
      .def("add_layer", &Decoder::add_layer, py::call_guard<py::gil_scoped_release>())
      .def("fuse", &Decoder::fuse, py::call_guard<py::gil_scoped_release>())
      .def("forward", &forward, py::call_guard<py::gil_scoped_release>());
}
