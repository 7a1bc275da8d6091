// One packed step of a decoder on the CPU, from token ids to logits, in one call. What its layers are made of is declared
// (`parts.h`, `blocks.h`): which model that is, nothing here knows.
//
// The interpreter is out of the way for the whole step, so the loop thread runs beside it. Every product streams its
// weights once for all rows and does what follows it (bias, gate, residual) while its outputs are still at hand; KV is
// written to and read from its pages in place; buffers between phases are kept from step to step.
//
// Shapes: T tokens of B requests in one row, as many of each as `extends` says, S places whose logits are wanted. Buffers:
// 0 the states, 1 normed, 2 inside the MLP, 3 inside a mixer (queries, keys and values), 4 mixed (attended), 5 and 6 a
// draft head's inputs, 7 what is normed before it is added, 8 and 9 queries of latent attention, 10 and 11 inputs of layers and
// what one makes of them, 12 and 13 what a router and experts beside an MLP read.

#include <ATen/ATen.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <variant>
#include <vector>

#include "beside.h"
#include "blocks.h"
#include "delta.h"
#include "experts.h"
#include "latents.h"
#include "layer_inputs.h"
#include "mamba1.h"
#include "mamba2.h"
#include "narrowing.h"
#include "short_conv.h"

namespace {

using namespace slipstream;

// What embeddings and logits are multiplied by, what logits are bent to stay below (0: nothing), what is added to embeddings by
// position, [positions, C], or nothing, and inputs of each layer, if they have any.
using Outside =
    std::tuple<double, double, double, MaybeTensor, std::optional<LayerInputsParts>, std::optional<NormParts>>;

class Decoder {
 public:
  virtual ~Decoder() = default;
  virtual void add_layer(const LayerParts& parts) = 0;
  // Makes it a draft head, whose only layer reads embedding and feature side by side; see `core/models/native/head.py`.
  virtual void fuse(const NormParts& embedding_norm, const Matrix& fusion) = 0;
  virtual std::vector<Tensor> forward(const Step& step) = 0;
};

template <typename T>
class DecoderOf final : public Decoder {
 public:
  DecoderOf(int64_t threads, bool invariant, Tensor embedding, const NormParts& final_norm, const Matrix& head,
            const Outside& outside)
      : embedding_(std::move(embedding)),
        final_norm_(final_norm),
        head_(head),
        hidden_(embedding_.size(1)),
        stride_(round_up(hidden_, kDepth)),
        embedding_multiplier_(static_cast<float>(std::get<0>(outside))),
        logit_multiplier_(static_cast<float>(std::get<1>(outside))),
        logit_cap_(static_cast<float>(std::get<2>(outside))),
        places_(std::get<3>(outside)),
        shop_(threads, invariant) {
    if (std::get<4>(outside)) inputs_.emplace(*std::get<4>(outside));
    if (std::get<5>(outside)) first_norm_.emplace(*std::get<5>(outside));
  }

  void add_layer(const LayerParts& parts) override {
    const auto& [before_mixers, after_mixers, before_mlp, after_mlp, mixers, mlp, parallel, factor, input, scale] = parts;
    TORCH_CHECK(mixers.size() < 2 || (before_mixers && !parallel), "mixers of one layer read what none of them changes");
    Layer layer{norm_of(before_mixers), norm_of(after_mixers), norm_of(before_mlp), norm_of(after_mlp), {}, {}, parallel,
                static_cast<float>(factor), {}, static_cast<float>(scale), layers_.size()};
    for (const MixerParts& mixer : mixers) {
      layer.mixers.push_back(std::visit([&](const auto& each) { return mixer_of(each); }, mixer));
      const Mixer<T>& made = *layer.mixers.back();
      window_ = std::max(window_, made.window());
      group_ = std::max(group_, made.group());
      if (made.keeps()) kept_ = layers_.size() + 1;
    }
    if (mlp) layer.mlp.emplace(std::visit([](const auto& each) { return feed_forward_of(each); }, *mlp));
    TORCH_CHECK(!input || inputs_, "no layer has inputs");
    if (input) layer.input.emplace(*input);
    layers_.push_back(std::move(layer));
  }

  void fuse(const NormParts& embedding_norm, const Matrix& fusion) override {
    embedding_norm_.emplace(embedding_norm);
    fusion_.emplace(fusion);
  }

  std::vector<Tensor> forward(const Step& step) override {
    c10::InferenceMode guard;
    planner_.begin(step, group_, window_);
    Rows rows = begin(step);
    Tensor states = at::empty({rows.tokens, static_cast<int64_t>(step.layers.size()) * hidden_}, embedding_.options());
    // The first layer behind which nobody asks for the states of all tokens.
    size_t asked = step.wants_hidden ? layers_.size() : 0;
    for (const int64_t layer : step.layers) asked = std::max(asked, static_cast<size_t>(layer));
    asked = std::max(asked, deepened(step));
    const bool fits = kept_ < layers_.size() && step.wanted.size(0) < rows.tokens && Narrowed::fits(step);
    std::optional<Narrowed> narrowed;
    for (size_t i = 0; i < layers_.size(); ++i) {
      keep_states(step, i, rows, states);
      if (fits && !narrowed && i >= std::max(kept_, asked)) {
        narrowed.emplace(step);
        keep_wanted(step.wanted, rows);
        planner_.begin(narrowed->of(step), group_, window_);
      }
      if (narrowed) {
        if (rows.tokens > 0) run_layer(layers_[i], narrowed->of(step), rows, false);
      } else {
        // Nobody reads the other tokens behind the last mixer: their KV is stored, and that was all they were for.
        run_layer(layers_[i], step, rows, i + 1 == layers_.size() && i >= asked);
        if (i < deepened(step)) deepen(*std::get<4>(*step.images), i, rows);
      }
    }
    keep_states(step, layers_.size(), rows, states);
    norm(rows.x, &final_norm_, rows.normed, rows.tokens);
    std::vector<Tensor> found = finish(step, rows.normed, rows.tokens);
    if (!step.layers.empty()) found.push_back(std::move(states));
    return found;
  }

 private:
  using FeedForward = std::variant<Mlp<T>, Experts<T>, Beside<T>>;

  struct Layer {
    std::optional<Norm> before_mixers, after_mixers, before_mlp, after_mlp;
    std::vector<std::unique_ptr<Mixer<T>>> mixers;
    std::optional<FeedForward> mlp;
    bool parallel;
    float multiplier;
    std::optional<LayerInput<T>> input;
    float scale;
    size_t number;
  };

  // Of each token: the states x[stride_], what is normed of them, what a draft head reads, and its inputs of all layers.
  struct Rows {
    T *x, *normed, *both, *inputs;
    int64_t tokens;
  };

  static constexpr int64_t kNormRows = 8;
  static constexpr size_t kKeptBytes = 1 << 26;

  std::unique_ptr<Mixer<T>> mixer_of(const AttentionParts& parts) {
    const std::optional<int64_t>& keys_of = std::get<14>(parts);
    TORCH_CHECK(!keys_of || static_cast<size_t>(*keys_of) < attentions_, "keys are read before they are made");
    return std::make_unique<Attention<T>>(parts, keys_of ? *keys_of : attentions_++);
  }
  std::unique_ptr<Mixer<T>> mixer_of(const LatentParts& parts) {
    return std::make_unique<Latents<T>>(parts, attentions_++);
  }
  std::unique_ptr<Mixer<T>> mixer_of(const ShortConvParts& parts) {
    return std::make_unique<ShortConv<T>>(parts, recurrences_++);
  }
  std::unique_ptr<Mixer<T>> mixer_of(const Mamba2Parts& parts) {
    return std::make_unique<Mamba2<T>>(parts, recurrences_++);
  }
  std::unique_ptr<Mixer<T>> mixer_of(const Mamba1Parts& parts) {
    return std::make_unique<Mamba1<T>>(parts, recurrences_++);
  }
  std::unique_ptr<Mixer<T>> mixer_of(const DeltaNetParts& parts) {
    return std::make_unique<DeltaNet<T>>(parts, recurrences_++);
  }

  static std::optional<Norm> norm_of(const std::optional<NormParts>& parts) {
    return parts ? std::optional<Norm>(*parts) : std::nullopt;
  }

  static FeedForward feed_forward_of(const MlpParts& parts) { return Mlp<T>(parts); }
  static FeedForward feed_forward_of(const ExpertsParts& parts) { return Experts<T>(parts); }
  static FeedForward feed_forward_of(const BesideParts& parts) { return Beside<T>(parts); }

  static const Norm* address(const std::optional<Norm>& norm) { return norm ? &*norm : nullptr; }

  T* buffer(int64_t place, int64_t rows, int64_t stride) { return shop_.buffer<T>(place, rows, stride); }

  Rows begin(const Step& step) {
    const int64_t tokens = step.ids.size(0);
    T* x = step.images && std::get<0>(*step.images) ? given(*std::get<0>(*step.images), tokens)
                                                    : embed(step.ids, step.positions);
    T* inputs = inputs_ ? inputs_->of(shop_, step.ids, x, tokens) : nullptr;
    T* both = fusion_ ? beside(x, step, tokens) : nullptr;
    return {x, buffer(1, tokens, stride_), both, inputs, tokens};
  }

  // Behind how many layers images add to states (DeepStack, Meng et al. 2024; Qwen3-VL, 2025).
  static size_t deepened(const Step& step) {
    return step.images && std::get<4>(*step.images) ? std::get<4>(*step.images)->second.size(0) : 0;
  }

  // The same behind layer `number`.
  void deepen(const std::pair<Tensor, Tensor>& deep, size_t number, Rows& rows) const {
    const auto& [places, added] = deep;
    TORCH_CHECK(added.dim() == 3 && added.size(1) == places.size(0) && added.size(2) == hidden_ && added.is_contiguous() &&
                    added.scalar_type() == embedding_.scalar_type(),
                "a row is added to each token of an image");
    const int64_t* place = places.const_data_ptr<int64_t>();
    const T* from = added.const_data_ptr<T>() + static_cast<int64_t>(number) * places.size(0) * hidden_;
    for (int64_t i = 0; i < places.size(0); ++i) {
      TORCH_CHECK_INDEX(place[i] >= 0 && place[i] < rows.tokens, "token ", place[i], " is not in the step");
      add_row(rows.x + place[i] * stride_, from + i * hidden_, hidden_, 1.0f);
    }
  }

  // Changes the states; leaves the wanted tokens only if it `narrows`.
  void run_layer(const Layer& layer, const Step& step, Rows& rows, bool narrows) {
    const T* read = norm(rows.x, address(layer.before_mixers), rows.normed, rows.tokens);
    if (rows.both) set_behind(read, rows.both, rows.tokens);
    const T* given = rows.both ? rows.both : read;
    for (size_t i = 0; i + 1 < layer.mixers.size(); ++i) {
      const Mixer<T>& mixer = *layer.mixers[i];
      const T* mixed = mixer.mix(shop_, planner_, step, given, rows.tokens);
      add_product(mixer.out(), mixed, layer.after_mixers, layer.multiplier, rows);
    }
    const Mixer<T>* mixer = layer.mixers.empty() ? nullptr : layer.mixers.back().get();
    T* mixed = mixer ? mixer->mix(shop_, planner_, step, given, rows.tokens) : nullptr;
    if (narrows) {
      if (mixer) keep_wanted(step.wanted, mixed, mixer->out().depth());
      if (layer.parallel && read != rows.x) keep_wanted(step.wanted, rows.normed, stride_);
      keep_wanted(step.wanted, rows);
    }
    const auto add_mixed = [&] {
      if (mixer) add_product(mixer->out(), mixed, layer.after_mixers, layer.multiplier, rows);
    };
    if (!layer.mlp || !layer.parallel) add_mixed();
    if (layer.mlp) {
      if (!layer.parallel || layer.before_mlp) read = norm(rows.x, address(layer.before_mlp), rows.normed, rows.tokens);
      const auto first = [&] {
        if (layer.parallel) add_mixed();
      };
      std::visit([&](const auto& mlp) { add_mlp(mlp, layer, read, rows, first); }, *layer.mlp);
    }
    if (layer.input) add_input(*layer.input, layer.number, rows);
    if (layer.scale != 1.0f) multiply(layer.scale, rows);
  }

  // What an MLP makes of read[tokens] is added to the states, behind what `first` adds.
  template <typename First>
  void add_mlp(const Mlp<T>& mlp, const Layer& layer, const T* read, Rows& rows, const First& first) {
    const T* inner = mlp.inner(shop_, read, rows.tokens);
    first();
    add_product(mlp.down(), inner, layer.after_mlp, layer.multiplier, rows);
  }

  template <typename First>
  void add_mlp(const Experts<T>& experts, const Layer& layer, const T* read, Rows& rows, const First& first) {
    experts.begin(shop_, work_, read, read, rows.tokens);
    first();
    add([&](const auto& sink) { experts.apply(shop_, work_, rows.tokens, sink); }, layer.after_mlp, layer.multiplier,
        rows);
  }

  template <typename First>
  void add_mlp(const Beside<T>& both, const Layer& layer, const T* read, Rows& rows, const First& first) {
    T* delta = buffer(7, rows.tokens, stride_);
    both.write(shop_, work_, rows.x, read, rows.tokens, stride_, delta);
    first();
    add_delta(delta, *layer.after_mlp, layer.multiplier, rows);
  }

  void add_input(const LayerInput<T>& input, size_t number, Rows& rows) {
    const int64_t stride = inputs_->stride(), width = stride / static_cast<int64_t>(layers_.size());
    const T* inner = input.inner(shop_, rows.x, rows.inputs + static_cast<int64_t>(number) * width, stride, rows.tokens);
    add_normed([&](const auto& sink) { input.out().apply(shop_.team, shop_.scratch, inner, rows.tokens, sink); },
               input.behind(), 1.0f, rows);
  }

  void multiply(float by, Rows& rows) {
    for (T* row = rows.x; row < rows.x + rows.tokens * stride_; row += stride_)
      for (int64_t i = 0; i < hidden_; ++i) narrow(widen(row[i]) * by, row[i]);
  }

  T* embed(const Tensor& ids, const Tensor& positions) {
    const int64_t tokens = ids.size(0), *id = ids.const_data_ptr<int64_t>();
    const int64_t* position = positions.const_data_ptr<int64_t>();
    const T* places = places_ ? places_->const_data_ptr<T>() : nullptr;
    const T* table = embedding_.const_data_ptr<T>();
    T* x = buffer(0, tokens, stride_);
    for (int64_t t = 0; t < tokens; ++t) {
      TORCH_CHECK_INDEX(id[t] >= 0 && id[t] < embedding_.size(0), "token id ", id[t], " is not in the vocabulary");
      std::copy_n(table + id[t] * hidden_, hidden_, x + t * stride_);
      if (embedding_multiplier_ != 1.0f)
        for (T* each = x + t * stride_; each < x + t * stride_ + hidden_; ++each)
          narrow(widen(*each) * embedding_multiplier_, *each);
      if (places != nullptr) add_place(places + position[t] * hidden_, position[t], x + t * stride_);
      if (first_norm_) first_norm_->apply(x + t * stride_, x + t * stride_, hidden_);
      std::fill(x + t * stride_ + hidden_, x + (t + 1) * stride_, T(0.0f));
    }
    return x;
  }

  // Embeddings as they come.
  T* given(const Tensor& embeddings, int64_t tokens) {
    TORCH_CHECK(embeddings.dim() == 2 && embeddings.size(0) == tokens && embeddings.size(1) == hidden_ &&
                    embeddings.is_contiguous() && embeddings.scalar_type() == embedding_.scalar_type(),
                "an embedding for each token");
    const T* from = embeddings.const_data_ptr<T>();
    T* x = buffer(0, tokens, stride_);
    for (int64_t t = 0; t < tokens; ++t) {
      std::copy_n(from + t * hidden_, hidden_, x + t * stride_);
      std::fill(x + t * stride_ + hidden_, x + (t + 1) * stride_, T(0.0f));
    }
    return x;
  }

  void add_place(const T* place, int64_t position, T* x) const {
    TORCH_CHECK_INDEX(position >= 0 && position < places_->size(0), "nothing is known of position ", position);
    for (int64_t i = 0; i < hidden_; ++i) narrow(widen(x[i]) + widen(place[i]), x[i]);
  }

  // Puts what layer `number` reads in its place, or places, of the states that are wanted.
  void keep_states(const Step& step, size_t number, const Rows& rows, const Tensor& states) {
    const int64_t count = static_cast<int64_t>(step.layers.size());
    for (int64_t place = 0; place < count; ++place) {
      if (step.layers[place] != static_cast<int64_t>(number)) continue;
      T* to = states.mutable_data_ptr<T>() + place * hidden_;
      for (int64_t t = 0; t < rows.tokens; ++t)
        std::copy_n(rows.x + t * stride_, hidden_, to + t * count * hidden_);
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
      embedding_norm_->apply(x + t * stride_, both + t * stride, hidden_);
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
    fusion_->write(shop_.team, shop_.scratch, raw, tokens, x, stride_);
    return both;
  }

  void set_behind(const T* normed, T* both, int64_t tokens) {
    const int64_t stride = round_up(2 * hidden_, kDepth);
    for (int64_t t = 0; t < tokens; ++t)
      std::copy_n(normed + t * stride_, hidden_, both + t * stride + hidden_);
  }

  // Rows to read on: `out`, or x where there is no norm.
  const T* norm(const T* x, const Norm* by, T* out, int64_t tokens) {
    if (by == nullptr) return x;
    shop_.in_blocks(tokens, kNormRows, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t) {
        by->apply(x + t * stride_, out + t * stride_, hidden_);
        std::fill(out + t * stride_ + hidden_, out + (t + 1) * stride_, T(0.0f));
      }
    });
    return out;
  }

  // The states += multiplier times matrix of from, with its bias, normed if there is a norm behind it.
  void add_product(const Linear<T>& matrix, const T* from, const std::optional<Norm>& behind, float multiplier,
                   Rows& rows) {
    add([&](const auto& sink) { matrix.apply(shop_.team, shop_.scratch, from, rows.tokens, sink); }, behind, multiplier,
        rows);
  }

  // The states += multiplier times what `apply` gives a sink as `Linear::apply` does, normed if there is a norm behind it.
  template <typename Apply>
  void add(const Apply& apply, const std::optional<Norm>& behind, float multiplier, Rows& rows) {
    if (behind) return add_normed(apply, *behind, multiplier, rows);
    apply([&](int64_t row, int64_t first, float* found, int64_t count) {
      if (multiplier != 1.0f)
        for (int64_t i = 0; i < count; ++i) found[i] *= multiplier;
      add_rounded(rows.x + row * stride_ + first, found, count);
    });
  }

  template <typename Apply>
  void add_normed(const Apply& apply, const Norm& behind, float multiplier, Rows& rows) {
    T* delta = buffer(7, rows.tokens, stride_);
    apply([&](int64_t row, int64_t first, float* found, int64_t count) {
      for (int64_t i = 0; i < count; ++i) narrow(found[i], delta[row * stride_ + first + i]);
    });
    add_delta(delta, behind, multiplier, rows);
  }

  // The states += multiplier times delta[tokens][stride_], normed.
  void add_delta(T* delta, const Norm& behind, float multiplier, Rows& rows) {
    shop_.in_blocks(rows.tokens, kNormRows, [&](int64_t from_row, int64_t to) {
      for (int64_t t = from_row; t < to; ++t) {
        behind.apply(delta + t * stride_, delta + t * stride_, hidden_);
        add_row(rows.x + t * stride_, delta + t * stride_, hidden_, multiplier);
      }
    });
  }

  void keep_wanted(const Tensor& wanted, Rows& rows) {
    keep_wanted(wanted, rows.x, stride_);
    if (rows.inputs) keep_wanted(wanted, rows.inputs, inputs_->stride());
    rows.tokens = wanted.size(0);
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
    Tensor logits = logits_of(rows);
    float* to = logits.mutable_data_ptr<float>();
    head_.apply(shop_.team, shop_.scratch, normed, rows, [&](int64_t row, int64_t first, float* values, int64_t count) {
      float* out = to + row * vocabulary + first;
      std::copy_n(values, count, out);
      if (logit_multiplier_ != 1.0f)
        for (int64_t i = 0; i < count; ++i) out[i] *= logit_multiplier_;
      if (logit_cap_ > 0.0f)
        for (int64_t i = 0; i < count; ++i) out[i] = logit_cap_ * std::tanh(out[i] / logit_cap_);
    });
    shop_.team.rest();
    found.insert(found.begin(), std::move(logits));
    return found;
  }

  // [rows, V], in memory of an earlier step where nothing holds on to it: to be given that many fresh pages by the system
  // takes a twentieth of a step of many requests.
  Tensor logits_of(int64_t rows) {
    if (logits_.defined() && logits_.size(0) >= rows && logits_.storage().use_count() == 1)
      return logits_.narrow(0, 0, rows);
    Tensor fresh = at::empty({rows, head_.outputs()}, embedding_.options().dtype(at::kFloat));
    if (fresh.nbytes() <= kKeptBytes) logits_ = fresh.alias();
    return fresh;
  }

  Tensor embedding_, logits_;
  Norm final_norm_;
  Linear<T> head_;
  std::optional<Norm> embedding_norm_;  // of what a draft head reads
  std::optional<Norm> first_norm_;
  std::optional<Linear<T>> fusion_;
  // The longest window, most heads of queries to one of keys, and how many layers there are up to the last that keeps anything.
  int64_t hidden_, stride_, window_ = 0, group_ = 0;
  size_t kept_ = 0;
  float embedding_multiplier_, logit_multiplier_, logit_cap_;
  MaybeTensor places_;
  std::optional<LayerInputs<T>> inputs_;
  Workshop shop_;
  typename Experts<T>::Work work_;
  std::vector<Layer> layers_;
  size_t attentions_ = 0, recurrences_ = 0;
  Planner planner_;
};

// `invariant`: a token gets the same bits in any step (`scratch.h`).
std::unique_ptr<Decoder> make_decoder(int64_t threads, bool invariant, Tensor embedding, const NormParts& final_norm,
                                      const Matrix& head, const Outside& outside) {
  // Not a call guard of `py::init`: that one is still held when pybind11 enters the decoder in its table of all
  // instances, which any other thread may be changing then.
  const pybind11::gil_scoped_release packing;
  if (embedding.scalar_type() == at::kFloat)
    return std::make_unique<DecoderOf<float>>(threads, invariant, embedding, final_norm, head, outside);
  TORCH_CHECK(embedding.scalar_type() == at::kBFloat16, "weights are float32 or bfloat16");
  return std::make_unique<DecoderOf<BFloat16>>(threads, invariant, embedding, final_norm, head, outside);
}

// ids, positions, slots int64[T]; rows, prefixes, extends int64[B]; wanted int64[S] ascending; table int32[R, width];
// keys and values by layer that attends [slots, K, D], of the window pool for those that are in it: page_map int32[pages] then says
// which of its pages stands for which, of page_size tokens each; features [T, C or F] of a draft head; states where a layer is recurrent; scales [slots, K] where keys and values are codes; what the step has of images, if anything. Returns float32 logits [S, V], hidden
// [T, C] after the final norm if asked, and [T, n C] if there are n `layers`: what each of them reads, the number of all
// layers being what the last one leaves.
std::vector<Tensor> forward(Decoder& self, const Tensor& ids, const Tensor& positions, const Tensor& slots,
                            const Tensor& rows, const Tensor& prefixes, const Tensor& extends,
                            const Tensor& wanted, const Tensor& table, const std::vector<Tensor>& keys,
                            const std::vector<Tensor>& values, bool wants_hidden,
                            const std::vector<int64_t>& layers, const MaybeTensor& features, const MaybeTensor& page_map,
                            int64_t page_size, const std::optional<StepStates>& states,
                            const std::vector<Tensor>& key_scales, const std::vector<Tensor>& value_scales,
                            const std::optional<StepImages>& images) {
  return self.forward({ids, positions, slots, rows, prefixes, extends, wanted, table, keys, values, wants_hidden, layers,
                       features, page_map, page_size, states, key_scales, value_scales, images});
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  namespace py = pybind11;
  py::class_<Decoder>(module, "Decoder")
      .def(py::init(&make_decoder))
      .def("add_layer", &Decoder::add_layer, py::call_guard<py::gil_scoped_release>())
      .def("fuse", &Decoder::fuse, py::call_guard<py::gil_scoped_release>())
      .def("forward", &forward, py::call_guard<py::gil_scoped_release>());
}
