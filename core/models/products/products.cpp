// Matrices of a module tree in panels, where torch computes what is between them: those of linear layers, and those of
// experts, each applied to the rows that chose it. Beside them activations, what stands right behind a matrix, and attention
// of texts that are whole.
//
// All of a model share one team of threads and its buffers. They are applied one after the other.

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "../native/activations.h"
#include "../native/linear.h"
#include "epilogue.h"
#include "texts.h"

namespace {

using namespace slipstream;
namespace py = pybind11;

// Multiplications of a product that takes a few microseconds: giving the interpreter away and getting it back beside a
// busy thread takes longer.
constexpr int64_t kBrief = 1 << 17;

// The threads of a model, and what they compute with.
struct Crew {
  // `invariant`: a row gets the same bits among any number of rows (`scratch.h`).
  Crew(int64_t threads, bool invariant) : team(threads), scratch(threads, Scratch(invariant)) {}

  void rest() { team.rest(); }

  Team team;
  std::vector<Scratch> scratch;
  Scratch buffers;
  // Held while the team works: it takes one caller at a time.
  std::mutex busy;
};

using SharedCrew = std::shared_ptr<Crew>;

// Packing goes on beside the interpreter. Not by a call guard of `py::init`: that one is still held when pybind11
// enters what was made in its table of all instances, which any other thread may be changing then.
using Released = py::gil_scoped_release;

// The interpreter is out of the way, unless the work is not worth it, and nobody else has the crew.
class AtWork {
 public:
  AtWork(Crew& crew, int64_t multiplications) {
    if (multiplications > kBrief) released_.emplace();
    lock_ = std::unique_lock(crew.busy);
  }

 private:
  std::optional<py::gil_scoped_release> released_;
  std::unique_lock<std::mutex> lock_;
};

int64_t rows_of(const Tensor& x, int64_t inputs) {
  TORCH_CHECK(x.dim() > 0 && x.size(-1) == inputs, "rows of ", inputs, " elements are multiplied, and ", x.sizes(),
              " came");
  return x.numel() / std::max<int64_t>(1, inputs);
}

// Row `at(i)` of x [..., K] as row i of `count`, filled up to `depth`, in a buffer with room for what products touch.
template <typename T, typename At>
const T* lined_up(Crew& crew, const T* from, int64_t inputs, int64_t count, int64_t depth, const At& at) {
  T* to = crew.buffers.take<T>(0, (count + kRows) * depth);
  constexpr int64_t kCopied = 16;
  crew.team.run((count + kCopied - 1) / kCopied, [&](int64_t block, int64_t) {
    for (int64_t row = block * kCopied; row < std::min(count, (block + 1) * kCopied); ++row) {
      std::copy_n(from + at(row) * inputs, inputs, to + row * depth);
      std::fill(to + row * depth + inputs, to + (row + 1) * depth, T(0.0f));
    }
  });
  return to;
}

class Product {
 public:
  virtual ~Product() = default;
  virtual Tensor apply(const Tensor& x) = 0;
  // What `epilogue` makes of it, and of `residual`, which is as wide, or none.
  virtual Tensor joined(const Tensor& x, const Epilogue& epilogue, const MaybeTensor& residual) = 0;
};

template <typename T>
class ProductOf final : public Product {
 public:
  ProductOf(SharedCrew crew, const Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias)
      : crew_(std::move(crew)), inputs_(weight.size(1)), linear_(weight, scale, bias, std::nullopt) {}

  Tensor apply(const Tensor& x) override {
    return made(x, [&](const T* from, int64_t rows, T* out) {
      linear_.write(crew_->team, crew_->scratch, from, rows, out, linear_.outputs());
    });
  }

  Tensor joined(const Tensor& x, const Epilogue& epilogue, const MaybeTensor& residual) override {
    const int64_t outputs = linear_.outputs();
    epilogue.check(outputs);
    TORCH_CHECK(!residual || (residual->size(-1) == outputs && residual->numel() == rows_of(x, inputs_) * outputs &&
                              residual->scalar_type() == x.scalar_type()),
                "nothing as wide as ", outputs, " outputs is added to them");
    const MaybeTensor added = residual ? MaybeTensor(residual->contiguous()) : std::nullopt;
    const T* add = added ? added->template const_data_ptr<T>() : nullptr;
    return made(x, [&](const T* from, int64_t rows, T* out) {
      linear_.write(crew_->team, crew_->scratch, from, rows, out, outputs,
                    [&](int64_t row, int64_t first, float* found, int64_t count) {
                      epilogue.apply(found, first, count, add == nullptr ? nullptr : add + row * outputs + first);
                    });
      epilogue.norm(crew_->team, out, rows, outputs);
    });
  }

 private:
  // [..., N] that `write` fills, from the rows of x [..., K] as products read them.
  template <typename Write>
  Tensor made(const Tensor& x, const Write& write) {
    TORCH_CHECK(x.scalar_type() == c10::CppTypeToScalarType<T>::value, "weights are not of type ", x.dtype());
    const int64_t rows = rows_of(x, inputs_), outputs = linear_.outputs(), depth = linear_.depth();
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = outputs;
    const Tensor given = x.contiguous();
    Tensor made = at::empty(shape, x.options());
    const T* from = given.const_data_ptr<T>();
    T* out = made.mutable_data_ptr<T>();
    const AtWork working(*crew_, rows * outputs * depth);
    // Tiles read rows behind the last.
    if (depth != inputs_ || (sizeof(T) == 2 && rows % kRows != 0))
      from = lined_up(*crew_, from, inputs_, rows, depth, [](int64_t row) { return row; });
    write(from, rows, out);
    return made;
  }

  SharedCrew crew_;
  int64_t inputs_;
  Linear<T> linear_;
};

// A matrix and what stands right behind it.
class Joined {
 public:
  Joined(std::shared_ptr<Product> product, const std::string& activation, const std::optional<NormParts>& norm,
         const MaybeTensor& scale, const MaybeTensor& shift)
      : product_(std::move(product)), epilogue_(activation, norm, scale, shift) {}

  Tensor apply(const Tensor& x, const MaybeTensor& residual) { return product_->joined(x, epilogue_, residual); }

 private:
  std::shared_ptr<Product> product_;
  Epilogue epilogue_;
};

// `halves`: whether it multiplies bfloat16, else float32; int8 weights do not say.
std::shared_ptr<Product> make_product(SharedCrew crew, bool halves, const Tensor& weight, const MaybeTensor& scale,
                                      const MaybeTensor& bias) {
  const Released packing;
  if (halves) return std::make_shared<ProductOf<BFloat16>>(crew, weight, scale, bias);
  return std::make_shared<ProductOf<float>>(crew, weight, scale, bias);
}

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

template <typename T>
void attend_as(Crew& crew, const Shape& shape, const Weighing& weighing, const Tensor& q, const Tensor& k, const Tensor& v,
               const Texts& texts, Tensor& out) {
  // Attention never writes what it reads.
  const Stored<T> stored{const_cast<T*>(k.const_data_ptr<T>()), const_cast<T*>(v.const_data_ptr<T>())};
  texts.attend(crew.team, crew.scratch, shape, weighing, q.const_data_ptr<T>(), stored, out.mutable_data_ptr<T>());
}

// Writes to out [1, T, H, D] what the tokens of `places`, texts from one to the other, see of their own text. q [1, H, T, D],
// k and v [1, K, T, D]; `distances` as `Texts::weighing` has them, or none.
void attend_to_texts(const SharedCrew& crew, const Tensor& q, const Tensor& k, const Tensor& v,
                     const std::vector<std::pair<int64_t, int64_t>>& places, double scale, Tensor out,
                     const MaybeTensor& distances) {
  TORCH_CHECK(q.dim() == 4 && q.size(0) == 1 && k.sizes() == v.sizes() && k.dim() == 4 && k.size(3) == q.size(3) &&
                  q.size(2) == k.size(2) && q.size(1) % k.size(1) == 0,
              "queries ", q.sizes(), " do not go with keys ", k.sizes(), " and values ", v.sizes());
  const Shape shape{q.size(1), k.size(1), q.size(3)};
  const Tensor queries = q.transpose(1, 2).contiguous(), keys = k.transpose(1, 2).contiguous(),
               values = v.transpose(1, 2).contiguous();
  TORCH_CHECK(out.sizes() == queries.sizes() && out.is_contiguous() && out.scalar_type() == q.scalar_type(),
              "there is no room for what they see");
  TORCH_CHECK(!distances || (distances->dim() == 2 && distances->size(0) == q.size(1) && distances->size(1) % 2 == 1 &&
                             distances->is_contiguous() && distances->scalar_type() == at::kFloat),
              "there is no row of distances for each head");
  const Texts texts(places, q.size(2));
  const AtWork working(*crew, q.numel() * kPanel);
  const Weighing weighing = texts.weighing(static_cast<float>(scale), distances, crew->buffers);
  if (q.scalar_type() == at::kFloat) {
    attend_as<float>(*crew, shape, weighing, queries, keys, values, texts, out);
  } else {
    attend_as<BFloat16>(*crew, shape, weighing, queries, keys, values, texts, out);
  }
}

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
      .def("__call__", &Product::apply);
  py::class_<Joined>(module, "Joined")
      .def(py::init<std::shared_ptr<Product>, const std::string&, const std::optional<NormParts>&, const MaybeTensor&,
                    const MaybeTensor&>(),
           py::arg("product"), py::arg("activation") = "", py::arg("norm") = py::none(), py::arg("scale") = py::none(),
           py::arg("shift") = py::none())
      .def("__call__", &Joined::apply, py::arg("x"), py::arg("residual") = py::none());
  py::class_<Experts>(module, "Experts").def(py::init(&make_experts)).def("__call__", &Experts::apply);
}
