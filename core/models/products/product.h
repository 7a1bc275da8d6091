// A matrix in panels that stands for a module of torch, and what it shares with all others of the model.

#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "../native/linear.h"
#include "epilogue.h"

namespace slipstream {

namespace py = pybind11;

// Multiplications of a product that takes a few microseconds: giving the interpreter away and getting it back beside a
// busy thread takes longer.
constexpr int64_t kBrief = 1 << 17;

// The threads of a model, and what they compute with.
struct Crew {
  // `invariant`: a row gets the same bits among any number of rows (`scratch.h`).
  Crew(int64_t threads, bool invariant) : team(threads), scratch(threads, Scratch(invariant)) {}

  void rest() { team.rest(); }

  // [.., width] of the type of x [.., K], kept from step to step: memory that is new each time is mapped page by page.
  Tensor room(size_t place, const Tensor& x, int64_t width) {
    std::vector<int64_t> shape = x.sizes().vec();
    shape.back() = width;
    const int64_t bytes = x.numel() / std::max<int64_t>(1, x.size(-1)) * width * x.element_size();
    if (rooms.size() <= place) rooms.resize(place + 1);
    if (!rooms[place].defined() || rooms[place].numel() < bytes) rooms[place] = at::empty({bytes}, at::kByte);
    return rooms[place].narrow(0, 0, bytes).view(x.scalar_type()).view(shape);
  }

  Team team;
  std::vector<Scratch> scratch;
  Scratch buffers;
  std::vector<Tensor> rooms;
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

inline int64_t rows_of(const Tensor& x, int64_t inputs) {
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

// A matrix of a model. Its crew is the caller's, who has it by an `AtWork`.
class Product {
 public:
  explicit Product(SharedCrew crew) : crew_(std::move(crew)) {}
  virtual ~Product() = default;

  Crew& crew() const { return *crew_; }

  virtual int64_t outputs() const = 0;
  // Multiplications for rows of x [..., K].
  virtual int64_t work(const Tensor& x) const = 0;
  // Outputs of x [..., K] to `out` [..., N], dense.
  virtual void write(const Tensor& x, const Tensor& out) const = 0;
  // What `epilogue` makes of them, and of `residual`, which is as wide, or none.
  virtual void write_joined(const Tensor& x, const Epilogue& epilogue, const MaybeTensor& residual,
                            const Tensor& out) const = 0;

  Tensor empty(const Tensor& x) const {
    std::vector<int64_t> shape = x.sizes().vec();
    TORCH_CHECK(!shape.empty(), "rows are multiplied");
    shape.back() = outputs();
    return at::empty(shape, x.options());
  }

  Tensor apply(const Tensor& x) const {
    const Tensor out = empty(x);
    write(x, out);
    return out;
  }

  Tensor joined(const Tensor& x, const Epilogue& epilogue, const MaybeTensor& residual) const {
    const Tensor out = empty(x);
    write_joined(x, epilogue, residual, out);
    return out;
  }

 private:
  SharedCrew crew_;
};

template <typename T>
class ProductOf final : public Product {
 public:
  ProductOf(SharedCrew crew, const Tensor& weight, const MaybeTensor& scale, const MaybeTensor& bias)
      : Product(std::move(crew)), inputs_(weight.size(1)), linear_(weight, scale, bias, std::nullopt) {}

  int64_t outputs() const override { return linear_.outputs(); }

  int64_t work(const Tensor& x) const override { return rows_of(x, inputs_) * linear_.outputs() * linear_.depth(); }

  void write(const Tensor& x, const Tensor& out) const override {
    fill(x, out, [&](const T* from, int64_t rows, T* to) {
      linear_.write(crew().team, crew().scratch, from, rows, to, linear_.outputs());
    });
  }

  void write_joined(const Tensor& x, const Epilogue& epilogue, const MaybeTensor& residual,
                    const Tensor& out) const override {
    const int64_t outputs = linear_.outputs();
    epilogue.check(outputs);
    TORCH_CHECK(!residual || (residual->size(-1) == outputs && residual->numel() == rows_of(x, inputs_) * outputs &&
                              residual->scalar_type() == x.scalar_type()),
                "nothing as wide as ", outputs, " outputs is added to them");
    const MaybeTensor added = residual ? MaybeTensor(residual->contiguous()) : std::nullopt;
    const T* add = added ? added->template const_data_ptr<T>() : nullptr;
    fill(x, out, [&](const T* from, int64_t rows, T* to) {
      linear_.write(crew().team, crew().scratch, from, rows, to, outputs,
                    [&](int64_t row, int64_t first, float* found, int64_t count) {
                      epilogue.apply(found, first, count, add == nullptr ? nullptr : add + row * outputs + first);
                    });
      epilogue.norm(crew().team, to, to, rows, outputs);
    });
  }

 private:
  // Has `make` fill `out` from the rows of x [..., K] as products read them.
  template <typename Make>
  void fill(const Tensor& x, const Tensor& out, const Make& make) const {
    TORCH_CHECK(x.scalar_type() == c10::CppTypeToScalarType<T>::value, "weights are not of type ", x.dtype());
    const int64_t rows = rows_of(x, inputs_), depth = linear_.depth();
    const Tensor given = x.contiguous();
    const T* from = given.const_data_ptr<T>();
    // Tiles read rows behind the last.
    if (depth != inputs_ || (sizeof(T) == 2 && rows % kRows != 0))
      from = lined_up(crew(), from, inputs_, rows, depth, [](int64_t row) { return row; });
    make(from, rows, out.mutable_data_ptr<T>());
  }

  int64_t inputs_;
  Linear<T> linear_;
};

// `halves`: whether it multiplies bfloat16, else float32; int8 weights do not say.
inline std::shared_ptr<Product> make_product(SharedCrew crew, bool halves, const Tensor& weight, const MaybeTensor& scale,
                                      const MaybeTensor& bias) {
  const Released packing;
  if (halves) return std::make_shared<ProductOf<BFloat16>>(crew, weight, scale, bias);
  return std::make_shared<ProductOf<float>>(crew, weight, scale, bias);
}

// A matrix and what stands right behind it.
class Joined {
 public:
  Joined(std::shared_ptr<Product> product, const std::string& activation, const std::optional<NormParts>& norm,
         const MaybeTensor& scale, const MaybeTensor& shift)
      : product_(std::move(product)), epilogue_(activation, norm, scale, shift) {}

  Tensor apply(const Tensor& x, const MaybeTensor& residual) const { return product_->joined(x, epilogue_, residual); }

  const Product& product() const { return *product_; }

 private:
  std::shared_ptr<Product> product_;
  Epilogue epilogue_;
};

}  // namespace slipstream
