// One packed step of a dense decoder (Llama, Qwen2, Qwen3, Mistral) on the CPU, from token ids to logits, in one call.
//
// The interpreter is out of the way for the whole step, so the loop thread runs beside it; what lies between two matrix
// products is one pass over memory each; KV is written to and read from its pages in place. The products are oneDNN's,
// over weights that it packed beforehand, as inductor's freezing does.
//
// Shapes: T tokens of B requests in one row (the first `num_extend` requests are prefill segments, the others one token
// each), S places whose logits are wanted. Hidden C, heads H of D, KV heads K, G = H / K.

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <optional>
#include <vector>

#include "kernels.h"

namespace {

using namespace slipstream;
using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Calls `work` with a zero of the C++ type for `type`.
template <typename Work>
void by_type(at::ScalarType type, const Work& work) {
  TORCH_CHECK(type == at::kFloat || type == at::kBFloat16, "weights are float32 or bfloat16, not ", type);
  if (type == at::kFloat) {
    work(float{});
  } else {
    work(BFloat16{});
  }
}

// A weight [N, K], packed once for oneDNN, and its bias [N] if it has one.
struct Linear {
  Tensor weight;
  MaybeTensor bias;
  bool packed = false;

  Tensor operator()(const Tensor& x) const {
    if (!packed) return bias ? at::linear(x, weight, *bias) : at::linear(x, weight);
    static const auto op = c10::Dispatcher::singleton()
                               .findSchemaOrThrow("mkldnn::_linear_pointwise", "")
                               .typed<Tensor(const Tensor&, const Tensor&, const MaybeTensor&, c10::string_view,
                                             c10::List<std::optional<at::Scalar>>, std::optional<c10::string_view>)>();
    return op.call(x, weight, bias, "none", c10::List<std::optional<at::Scalar>>(), "");
  }
};

struct Layer {
  Tensor attention_norm, mlp_norm;
  MaybeTensor q_norm, k_norm;
  Linear qkv, out, gate_up, down;
};

class Decoder {
 public:
  Decoder(Shape shape, Tensor embedding, Tensor cos, Tensor sin, Tensor final_norm, Linear head)
      : shape_(shape),
        embedding_(std::move(embedding)),
        cos_(std::move(cos)),
        sin_(std::move(sin)),
        final_norm_(std::move(final_norm)),
        head_(std::move(head)) {}

  void add_layer(Layer layer) { layers_.push_back(std::move(layer)); }

  // ids, positions, slots int64[T]; rows, prefixes, extends int64[B]; wanted int64[S]; table int32[R, width]; keys and
  // values by layer [slots, K, D]. Returns float32 logits [S, V], and hidden [T, C] after the final norm if asked for.
  std::vector<Tensor> forward(const Tensor& ids, const Tensor& positions, const Tensor& slots, const Tensor& rows,
                              const Tensor& prefixes, const Tensor& extends, int64_t num_extend, const Tensor& wanted,
                              const Tensor& table, const std::vector<Tensor>& keys, const std::vector<Tensor>& values,
                              bool wants_hidden) {
    c10::InferenceMode guard;
    Step step{positions, slots, rows, prefixes, extends, num_extend, table};
    Tensor x = embedding_.index_select(0, ids), delta, normed = at::empty_like(x);
    for (size_t i = 0; i < layers_.size(); ++i) {
      const Layer& layer = layers_[i];
      norm(x, delta, layer.attention_norm, normed);
      Tensor qkv = layer.qkv(normed);
      Tensor attended = attend(layer, step, qkv, keys[i], values[i]);
      if (i + 1 == layers_.size() && !wants_hidden) {
        // Nobody reads the other tokens any more: their KV is stored, and that was all they were for.
        attended = attended.index_select(0, wanted);
        x = x.index_select(0, wanted);
        normed = at::empty_like(x);
      }
      delta = layer.out(attended);
      norm(x, delta, layer.mlp_norm, normed);
      delta = layer.down(gated(layer.gate_up(normed)));
    }
    norm(x, delta, final_norm_, normed);
    if (!wants_hidden) return {head_(normed).to(at::kFloat)};
    return {head_(normed.index_select(0, wanted)).to(at::kFloat), normed};
  }

 private:
  struct Step {
    const Tensor &positions, &slots, &rows, &prefixes, &extends;
    int64_t num_extend;
    const Tensor& table;
    std::vector<MaybeTensor> places{}, masks{};  // by prefill segment, made by the first layer
  };

  void norm(Tensor& x, const Tensor& delta, const Tensor& weight, Tensor& out) const {
    by_type(x.scalar_type(), [&](auto zero) {
      using scalar_t = decltype(zero);
      add_norm<scalar_t>(x.mutable_data_ptr<scalar_t>(), delta.defined() ? delta.const_data_ptr<scalar_t>() : nullptr,
                         weight.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), x.size(0), x.size(1),
                         static_cast<float>(shape_.eps));
    });
  }

  Tensor gated(const Tensor& gate_up) const {
    Tensor out = at::empty({gate_up.size(0), gate_up.size(1) / 2}, gate_up.options());
    by_type(out.scalar_type(), [&](auto zero) {
      using scalar_t = decltype(zero);
      silu_mul<scalar_t>(gate_up.const_data_ptr<scalar_t>(), out.mutable_data_ptr<scalar_t>(), out.size(0),
                         out.size(1));
    });
    return out;
  }

  // [T, H D] from qkv [T, (H + 2 K) D], which it turns in place.
  Tensor attend(const Layer& layer, Step& step, Tensor& qkv, const Tensor& keys, const Tensor& values) const {
    const int64_t tokens = qkv.size(0), width = shape_.heads * shape_.dim;
    Tensor out = at::empty({tokens, width}, qkv.options());
    int64_t decoded_from = 0;
    by_type(qkv.scalar_type(), [&](auto zero) {
      using scalar_t = decltype(zero);
      const auto data = [](const MaybeTensor& t) { return t ? t->const_data_ptr<scalar_t>() : nullptr; };
      rotate_and_store<scalar_t>(qkv.mutable_data_ptr<scalar_t>(), data(layer.q_norm), data(layer.k_norm), shape_,
                                 step.positions.const_data_ptr<int64_t>(), step.slots.const_data_ptr<int64_t>(),
                                 cos_.const_data_ptr<float>(), sin_.const_data_ptr<float>(),
                                 keys.mutable_data_ptr<scalar_t>(), values.mutable_data_ptr<scalar_t>(), tokens);
      decoded_from = attend_segments(step, qkv, keys, values, out);
      attend_rows<scalar_t>(step, qkv, keys, values, out, decoded_from);
    });
    return out;
  }

  // Attends for every prefill segment; returns the number of their tokens.
  int64_t attend_segments(Step& step, const Tensor& qkv, const Tensor& keys, const Tensor& values, Tensor& out) const {
    const int64_t* prefixes = step.prefixes.const_data_ptr<int64_t>();
    const int64_t* extends = step.extends.const_data_ptr<int64_t>();
    step.places.resize(step.num_extend);
    step.masks.resize(step.num_extend);
    int64_t at_token = 0;
    for (int64_t b = 0; b < step.num_extend; ++b) {
      const int64_t count = extends[b], length = prefixes[b] + count;
      Tensor mine = qkv.narrow(0, at_token, count).view({count, shape_.heads + 2 * shape_.kv_heads, shape_.dim});
      Tensor q = mine.narrow(1, 0, shape_.heads), k, v;
      if (prefixes[b] == 0) {
        k = mine.narrow(1, shape_.heads, shape_.kv_heads);
        v = mine.narrow(1, shape_.heads + shape_.kv_heads, shape_.kv_heads);
      } else {
        if (!step.places[b]) {
          const int64_t row = step.rows.const_data_ptr<int64_t>()[b];
          step.places[b] = step.table.select(0, row).narrow(0, 0, length).to(at::kLong);
          step.masks[b] = at::ones({count, length}, qkv.options().dtype(at::kBool)).tril(prefixes[b]);
        }
        k = keys.index_select(0, *step.places[b]);
        v = values.index_select(0, *step.places[b]);
      }
      Tensor attended = at::scaled_dot_product_attention(
          q.transpose(0, 1).unsqueeze(0), k.transpose(0, 1).unsqueeze(0), v.transpose(0, 1).unsqueeze(0),
          step.masks[b], 0.0, !step.masks[b], shape_.scale, shape_.heads != shape_.kv_heads);
      out.narrow(0, at_token, count).view({count, shape_.heads, shape_.dim}).copy_(attended[0].transpose(0, 1));
      at_token += count;
    }
    return at_token;
  }

  // Attends for the rows of one token each, which begin at token `from`: one piece of work per row and KV head.
  template <typename scalar_t>
  void attend_rows(const Step& step, const Tensor& qkv, const Tensor& keys, const Tensor& values, Tensor& out,
                   int64_t from) const {
    const int64_t count = qkv.size(0) - from, group = shape_.heads / shape_.kv_heads;
    const int64_t* rows = step.rows.const_data_ptr<int64_t>() + step.num_extend;
    const int64_t* prefixes = step.prefixes.const_data_ptr<int64_t>() + step.num_extend;
    const scalar_t* queries = qkv.const_data_ptr<scalar_t>();
    const scalar_t* k = keys.const_data_ptr<scalar_t>();
    const scalar_t* v = values.const_data_ptr<scalar_t>();
    const int32_t* table = step.table.const_data_ptr<int32_t>();
    scalar_t* to = out.mutable_data_ptr<scalar_t>();
    const int64_t width = qkv.size(1), table_width = step.table.size(1);
    at::parallel_for(0, count * shape_.kv_heads, 1, [&](int64_t begin, int64_t end) {
      std::vector<float> scratch;
      for (int64_t work = begin; work < end; ++work) {
        const int64_t b = work / shape_.kv_heads, head = work % shape_.kv_heads, first = head * group * shape_.dim;
        attend_one<scalar_t>(queries + (from + b) * width + first, k, v, table + rows[b] * table_width,
                             prefixes[b] + 1, shape_, head, to + (from + b) * out.size(1) + first, scratch);
      }
    });
  }

  Shape shape_;
  Tensor embedding_, cos_, sin_, final_norm_;
  Linear head_;
  std::vector<Layer> layers_;
};

Linear make_linear(Tensor weight, MaybeTensor bias, bool packed) {
  return Linear{std::move(weight), std::move(bias), packed};
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::class_<Linear>(module, "Linear").def(py::init(&make_linear));
  py::class_<Decoder>(module, "Decoder")
      .def(py::init([](int64_t heads, int64_t kv_heads, int64_t dim, double eps, double scale, Tensor embedding,
                       Tensor cos, Tensor sin, Tensor final_norm, Linear head) {
        return Decoder(Shape{heads, kv_heads, dim, eps, scale}, std::move(embedding), std::move(cos), std::move(sin),
                       std::move(final_norm), std::move(head));
      }))
      .def("add_layer",
           [](Decoder& self, Tensor attention_norm, Tensor mlp_norm, MaybeTensor q_norm,
              MaybeTensor k_norm, Linear qkv, Linear out, Linear gate_up, Linear down) {
             self.add_layer(Layer{std::move(attention_norm), std::move(mlp_norm), std::move(q_norm),
                                  std::move(k_norm), std::move(qkv), std::move(out), std::move(gate_up),
                                  std::move(down)});
           })
      .def("forward", &Decoder::forward, py::call_guard<py::gil_scoped_release>());
}
