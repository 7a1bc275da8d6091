// Matrices of a module tree in panels, where torch computes what is between them: those of linear layers, and those of
// experts, each applied to the rows that chose it. Beside them activations, what stands right behind a matrix, and attention
// of texts that are whole.
//
// All of a model share one team of threads and its buffers. They are applied one after the other.

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <vector>

#include "../native/activations.h"
#include "encoder_layer.h"
#include "product.h"

namespace {

using namespace slipstream;

class Experts {
 public:
  virtual ~Experts() = default;
  virtual Tensor apply(const Tensor& x, const Tensor& chosen) = 0;
};

template <typename T>
class ExpertsOf final : public Experts {
 public:
  ExpertsOf(SharedCrew crew, const Tensor& weights, const MaybeTensor& biases, bool transposed)
      : crew_(std::move(crew)), inputs_(weights.size(transposed ? 1 : 2)), outputs_(weights.size(transposed ? 2 : 1)) {
    for (int64_t expert = 0; expert < weights.size(0); ++expert) {
      const Tensor weight = transposed ? weights[expert].t() : weights[expert];
      linears_.emplace_back(weight, std::nullopt, biases ? MaybeTensor((*biases)[expert]) : std::nullopt,
                            std::nullopt);
    }
  }

  Tensor apply(const Tensor& x, const Tensor& chosen) override {
    TORCH_CHECK(x.scalar_type() == c10::CppTypeToScalarType<T>::value, "weights are not of type ", x.dtype());
    const int64_t rows = rows_of(x, inputs_), count = chosen.numel(), depth = linears_[0].depth();
    TORCH_CHECK(rows > 0 && count % rows == 0, count, " choices do not belong to ", rows, " rows");
    const int64_t each = count / rows;
    const Tensor given = x.contiguous(), choices = chosen.to(at::kLong).contiguous();
    Tensor made = at::empty({count, outputs_}, x.options());
    const T* from = given.const_data_ptr<T>();
    T* out = made.mutable_data_ptr<T>();
    const AtWork working(*crew_, count * outputs_ * depth);
    sort(choices.const_data_ptr<int64_t>(), count);
    const auto at = [&](int64_t row) { return order_[row] / each; };
    const T* lined = lined_up(*crew_, from, inputs_, count, depth, at);
    for (size_t expert = 0; expert < linears_.size(); ++expert) {
      const int64_t first = starts_[expert], mine = starts_[expert + 1] - first;
      if (mine == 0) continue;
      linears_[expert].apply(crew_->team, crew_->scratch, lined + first * depth, mine,
                             [&](int64_t row, int64_t place, float* found, int64_t width) {
                               T* to = out + order_[first + row] * outputs_ + place;
                               for (int64_t i = 0; i < width; ++i) narrow(found[i], to[i]);
                             });
    }
    return made;
  }

 private:
  // Choices by expert, each expert's in their own order: `order_`, of which `starts_` says where each begins.
  void sort(const int64_t* choices, int64_t count) {
    const int64_t experts = static_cast<int64_t>(linears_.size());
    starts_.assign(experts + 1, 0);
    order_.resize(count);
    for (int64_t i = 0; i < count; ++i) {
      TORCH_CHECK_INDEX(choices[i] >= 0 && choices[i] < experts, "there is no expert ", choices[i]);
      ++starts_[choices[i] + 1];
    }
    for (int64_t expert = 0; expert < experts; ++expert) starts_[expert + 1] += starts_[expert];
    std::vector<int64_t> next(starts_.begin(), starts_.end() - 1);
    for (int64_t i = 0; i < count; ++i) order_[next[choices[i]]++] = i;
  }

  SharedCrew crew_;
  int64_t inputs_, outputs_;
  std::vector<Linear<T>> linears_;
  std::vector<int64_t> starts_, order_;
};

std::unique_ptr<Experts> make_experts(SharedCrew crew, const Tensor& weights, const MaybeTensor& biases,
                                      bool transposed) {
  const Released packing;
  if (weights.scalar_type() == at::kFloat) return std::make_unique<ExpertsOf<float>>(crew, weights, biases, transposed);
  TORCH_CHECK(weights.scalar_type() == at::kBFloat16, "weights are float32 or bfloat16");
  return std::make_unique<ExpertsOf<BFloat16>>(crew, weights, biases, transposed);
}

// An activation, element by element.
class Activated {
 public:
  Activated(SharedCrew crew, const std::string& name) : crew_(std::move(crew)), kind_(activation_of(name)) {}

  Tensor apply(const Tensor& x) {
    if (x.scalar_type() == at::kFloat) return as<float>(x);
    TORCH_CHECK(x.scalar_type() == at::kBFloat16, "activations are of float32 or bfloat16");
    return as<BFloat16>(x);
  }

 private:
  // Elements of a chunk: what the first cache holds.
  static constexpr int64_t kChunk = 2048;

  template <typename T>
  Tensor as(const Tensor& x) {
    const Tensor given = x.contiguous();
    Tensor made = at::empty_like(given);
    const int64_t count = given.numel();
    const T* from = given.const_data_ptr<T>();
    T* to = made.mutable_data_ptr<T>();
    const AtWork working(*crew_, count * kPanel);
    crew_->team.run((count + kChunk - 1) / kChunk, [&](int64_t chunk, int64_t) {
      const int64_t first = chunk * kChunk, mine = std::min(kChunk, count - first);
      alignas(64) float wide[kChunk];
      alignas(64) T found[kLanes];
      for (int64_t i = 0; i < mine; ++i) wide[i] = widen(from[first + i]);
      const int64_t whole = mine / kLanes * kLanes;
      activate(kind_, wide, nullptr, to + first, whole);
      if (whole == mine) return;
      std::fill(wide + mine, wide + whole + kLanes, 0.0f);
      activate(kind_, wide + whole, nullptr, found, kLanes);
      std::copy_n(found, mine - whole, to + first + whole);
    });
    return made;
  }

  SharedCrew crew_;
  Activation kind_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  py::class_<Crew, SharedCrew>(module, "Crew").def(py::init<int64_t, bool>()).def("rest", &Crew::rest);
  module.def("attend", &attend_to_texts, py::arg("crew"), py::arg("query"), py::arg("key"), py::arg("value"),
             py::arg("places"), py::arg("scale"), py::arg("out"), py::arg("distances") = py::none());
  py::class_<Activated>(module, "Activated")
      .def(py::init<SharedCrew, const std::string&>())
      .def("__call__", &Activated::apply);
  py::class_<Product, std::shared_ptr<Product>>(module, "Product")
      .def(py::init(&make_product))
      .def("__call__", [](const Product& product, const Tensor& x) {
        const AtWork working(product.crew(), product.work(x));
        return product.apply(x);
      });
  py::class_<Joined>(module, "Joined")
      .def(py::init<std::shared_ptr<Product>, const std::string&, const std::optional<NormParts>&, const MaybeTensor&,
                    const MaybeTensor&>(),
           py::arg("product"), py::arg("activation") = "", py::arg("norm") = py::none(), py::arg("scale") = py::none(),
           py::arg("shift") = py::none())
      .def(
          "__call__",
          [](const Joined& joined, const Tensor& x, const MaybeTensor& residual) {
            const AtWork working(joined.product().crew(), joined.product().work(x));
            return joined.apply(x, residual);
          },
          py::arg("x"), py::arg("residual") = py::none());
  py::class_<EncoderLayer>(module, "EncoderLayer")
      .def(py::init<const std::vector<std::shared_ptr<Product>>&, const std::string&, const NormParts&, const NormParts&,
                    bool, int64_t, int64_t, double, const MaybeTensor&>(),
           py::arg("products"), py::arg("activation"), py::arg("first"), py::arg("second"), py::arg("norms_before"),
           py::arg("heads"), py::arg("kv_heads"), py::arg("scale"), py::arg("distances"))
      .def("__call__", [](const EncoderLayer& layer, const Tensor& x, const Places& places) {
        const AtWork working(layer.crew(), x.numel() * kPanel * kPanel);
        return layer.apply(x, places);
      });
  py::class_<Experts>(module, "Experts").def(py::init(&make_experts)).def("__call__", &Experts::apply);
}
