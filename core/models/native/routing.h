// Which experts a token goes to and with what weights, and the tokens of a step sorted by expert.

#pragma once

#include <algorithm>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "blocks.h"

namespace slipstream {

// What a logit becomes before experts are chosen; "chosen": weights are a softmax over those that were chosen.
// "sparsemixer": one expert after the other, with a softmax over those that are nearly as good (Liu et al. 2024).
enum class Scoring { kSoftmax, kSigmoid, kChosen, kSparsemixer };

inline Scoring scoring_of(const std::string& name) {
  if (name == "softmax") return Scoring::kSoftmax;
  if (name == "sigmoid") return Scoring::kSigmoid;
  if (name == "chosen") return Scoring::kChosen;
  if (name == "sparsemixer") return Scoring::kSparsemixer;
  throw std::invalid_argument("there is no scoring " + name);
}

// Each token has `top_k` entries, ascending by expert. Sorted by expert, and by token within one, an entry is a row of
// what that expert computes.
struct Routing {
  int64_t top_k = 0;
  std::vector<int64_t> experts;  // [tokens][top_k]
  std::vector<float> weights;    // [tokens][top_k]
  std::vector<int64_t> rows;     // [tokens][top_k], of all that is sorted
  std::vector<int64_t> tokens;   // by row
  std::vector<int64_t> begins;   // [experts + 1], in rows

  void sort(int64_t number) {
    begins.assign(number + 1, 0);
    for (const int64_t expert : experts) ++begins[expert + 1];
    std::partial_sum(begins.begin(), begins.end(), begins.begin());
    next_.assign(begins.begin(), begins.end() - 1);
    rows.resize(experts.size());
    tokens.resize(experts.size());
    for (size_t entry = 0; entry < experts.size(); ++entry) {
      rows[entry] = next_[experts[entry]]++;
      tokens[rows[entry]] = static_cast<int64_t>(entry) / top_k;
    }
  }

 private:
  std::vector<int64_t> next_;
};

template <typename T>
class Router {
 public:
  explicit Router(const RouterParts& parts)
      : scoring_(scoring_of(std::get<2>(parts))),
        top_k_(std::get<3>(parts)),
        groups_(std::get<4>(parts)),
        kept_groups_(std::get<5>(parts)),
        best_of_group_(std::get<6>(parts)),
        renormalises_(std::get<7>(parts)),
        factor_(static_cast<float>(std::get<8>(parts))),
        jitter_(static_cast<float>(std::get<9>(parts))),
        rounds_(std::get<10>(parts)) {
    if (std::get<11>(parts)) scales_ = std::get<11>(parts)->to(at::kFloat).contiguous().view({-1});
    const Matrix& matrix = std::get<0>(parts);
    const Tensor& weight = std::get<0>(matrix);
    experts_ = weight.size(0);
    hidden_ = weight.size(1);
    if (std::get<1>(parts)) correction_ = std::get<1>(parts)->to(at::kFloat).contiguous().view({-1});
    if (weight.scalar_type() == at::kFloat && sizeof(T) < sizeof(float)) {
      wide_.emplace(matrix);
    } else {
      plain_.emplace(matrix);
    }
    TORCH_CHECK(top_k_ >= 1 && top_k_ <= experts_, "a token has ", top_k_, " of ", experts_, " experts");
    TORCH_CHECK(groups_ >= 1 && experts_ % groups_ == 0, experts_, " experts make no ", groups_, " groups");
    TORCH_CHECK(!correction_ || correction_->numel() == experts_, "a correction for every expert");
    TORCH_CHECK(!scales_ || scales_->numel() == experts_, "a scale for every expert");
  }

  int64_t experts() const { return experts_; }

  // Fills `routing` for x[tokens][C, filled up].
  void route(Workshop& shop, Scratch& room, const T* x, int64_t tokens, Routing& routing) const {
    float* scores = room.take<float>(0, tokens * 2 * experts_);
    score(shop, room, x, tokens, scores);
    routing.top_k = top_k_;
    routing.experts.resize(tokens * top_k_);
    routing.weights.resize(tokens * top_k_);
    shop.in_blocks(tokens, kTokens, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; ++t)
        choose(scores + t * 2 * experts_, &routing.experts[t * top_k_], &routing.weights[t * top_k_]);
    });
    routing.sort(experts_);
  }

 private:
  static constexpr int64_t kTokens = 16;
  static constexpr float kNone = -std::numeric_limits<float>::infinity();

  // Logits at scores[tokens][2][experts_], the second half left free.
  void score(Workshop& shop, Scratch& room, const T* x, int64_t tokens, float* scores) const {
    const auto keep = [&](int64_t row, int64_t first, float* found, int64_t count) {
      float* to = scores + row * 2 * experts_ + first;
      for (int64_t i = 0; i < count; ++i) to[i] = rounds_ ? rounded(found[i]) : found[i];
    };
    if (plain_) return plain_->apply(shop.team, shop.scratch, x, tokens, keep);
    const int64_t stride = wide_->depth();
    float* wide = room.take<float>(1, round_up(tokens, kRows) * stride);
    for (int64_t i = 0; i < tokens * stride; ++i) wide[i] = widen(x[i]);
    wide_->apply(shop.team, shop.scratch, wide, tokens, keep);
  }

  static float rounded(float value) {
    T narrowed;
    narrow(value, narrowed);
    return widen(narrowed);
  }

  // From logits at scores[0 to E), with as many floats behind them to work in.
  void choose(float* scores, int64_t* experts, float* weights) const {
    float* wanted = scores + experts_;
    make_scores(scores);
    const float* correction = correction_ ? correction_->const_data_ptr<float>() : nullptr;
    for (int64_t e = 0; e < experts_; ++e) wanted[e] = correction ? scores[e] + correction[e] : scores[e];
    if (groups_ > 1) leave_groups(wanted);
    for (int64_t i = 0; i < top_k_; ++i) {
      const int64_t best = std::max_element(wanted, wanted + experts_) - wanted;
      weights[i] = scoring_ == Scoring::kSparsemixer ? mixed(scores, wanted, best) : scores[best];
      experts[i] = best;
      wanted[best] = kNone;
    }
    weigh(experts, weights);
    for (int64_t i = 1; i < top_k_; ++i)
      for (int64_t j = i; j > 0 && experts[j] < experts[j - 1]; --j) {
        std::swap(experts[j], experts[j - 1]);
        std::swap(weights[j], weights[j - 1]);
      }
  }

  void make_scores(float* logits) const {
    if (scoring_ == Scoring::kSoftmax) soften(logits, experts_);
    if (scoring_ == Scoring::kSigmoid)
      for (int64_t e = 0; e < experts_; ++e) logits[e] = 1.0f / (1.0f + std::exp(-logits[e]));
  }

  static void soften(float* values, int64_t count) {
    const float top = *std::max_element(values, values + count);
    float total = 0.0f;
    for (int64_t i = 0; i < count; ++i) total += values[i] = std::exp(values[i] - top);
    for (int64_t i = 0; i < count; ++i) values[i] /= total;
  }

  // Takes the experts of all but the best groups out of the choice.
  void leave_groups(float* wanted) const {
    const int64_t size = experts_ / groups_, best = std::min(best_of_group_, size);
    float values[kMostGroups], sorted[kMostOfGroup];
    TORCH_CHECK(groups_ <= kMostGroups && size <= kMostOfGroup, "too many experts in groups");
    for (int64_t g = 0; g < groups_; ++g) {
      std::copy_n(wanted + g * size, size, sorted);
      std::partial_sort(sorted, sorted + best, sorted + size, std::greater<float>());
      values[g] = std::accumulate(sorted, sorted + best, 0.0f);
    }
    bool kept[kMostGroups] = {};
    for (int64_t i = 0; i < kept_groups_; ++i) {
      const int64_t group = std::max_element(values, values + groups_) - values;
      kept[group] = true;
      values[group] = kNone;
    }
    for (int64_t g = 0; g < groups_; ++g)
      if (!kept[g]) std::fill_n(wanted + g * size, size, kNone);
  }

  // The best expert's share of those that are left and nearly as good.
  float mixed(const float* logits, const float* wanted, int64_t best) const {
    const float top = logits[best];
    float total = 0.0f;
    for (int64_t e = 0; e < experts_; ++e) {
      if (wanted[e] == kNone || (top - logits[e]) / std::max(std::abs(logits[e]), top) > 2.0f * jitter_) continue;
      total += std::exp(logits[e] - top);
    }
    return 1.0f / total;
  }

  void weigh(const int64_t* experts, float* weights) const {
    if (scoring_ == Scoring::kChosen) soften(weights, top_k_);
    if (renormalises_) {
      const float total = std::accumulate(weights, weights + top_k_, 0.0f) + 1e-20f;
      for (int64_t i = 0; i < top_k_; ++i) weights[i] /= total;
    }
    const float* scales = scales_ ? scales_->const_data_ptr<float>() : nullptr;
    for (int64_t i = 0; i < top_k_; ++i) weights[i] *= scales ? factor_ * scales[experts[i]] : factor_;
  }

  static constexpr int64_t kMostGroups = 64, kMostOfGroup = 1024;

  Scoring scoring_;
  int64_t experts_, hidden_, top_k_, groups_, kept_groups_, best_of_group_;
  bool renormalises_;
  float factor_, jitter_;
  bool rounds_;
  MaybeTensor correction_, scales_;
  std::optional<Linear<T>> plain_;
  std::optional<Linear<float>> wide_;
};

}  // namespace slipstream
