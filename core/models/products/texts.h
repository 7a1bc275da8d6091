// Attention of texts that lie one behind the other: each token sees all tokens of its own text, which are the step's.

#pragma once

#include <ATen/ATen.h>

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

#include "../native/attention.h"
#include "../native/team.h"

namespace slipstream {

// Texts of a step. Keys are where their tokens are, so the table of their slots only counts.
class Texts {
 public:
  // Queries of one text that go through its keys together.
  static constexpr int64_t kQueries = 128;

  // `texts`: the first token of each, and the place behind its last one, among `tokens`.
  Texts(const std::vector<std::pair<int64_t, int64_t>>& texts, int64_t tokens) : slots_(tokens), rows_(tokens) {
    std::iota(slots_.begin(), slots_.end(), 0);
    std::iota(rows_.begin(), rows_.end(), 0);
    for (const auto& [begin, end] : texts) {
      TORCH_CHECK_INDEX(0 <= begin && begin < end && end <= tokens, "no text is from ", begin, " to ", end);
      for (int64_t from = begin; from < end; from += kQueries)
        pieces_.push_back({begin, end, from, std::min(kQueries, end - from)});
    }
  }

  // q and out [T, H, D], keys and values [T, K, D]. Other tokens' places in out stay as they are.
  template <typename T>
  void attend(Team& team, std::vector<Scratch>& scratch, const Shape& shape, float scale, const T* q,
              const Stored<T>& stored, T* out) const {
    const Weighing weighing{scale, 0.0f, 0, 0, nullptr};
    team.run(static_cast<int64_t>(pieces_.size()) * shape.kv_heads, [&](int64_t chunk, int64_t worker) {
      const Piece& piece = pieces_[chunk / shape.kv_heads];
      const int64_t head = chunk % shape.kv_heads, length = piece.end - piece.begin;
      // From behind its text a token sees all of it.
      const Block<T> block{q, out, shape.q_width(), shape.q_width(), rows_.data() + piece.from, piece.count, length};
      const Pages<T> pages{stored, slots_.data() + piece.begin};
      BlockAttention<T, T, NumberPanels<T, T>> attention(shape, weighing, block, pages, head, head + 1, scratch[worker], 0);
      attention.begin();
      attention.read(0, length);
      attention.finish();
    });
  }

 private:
  // Tokens `begin` to `end` are the text, and `from` on `count` the queries.
  struct Piece {
    int64_t begin, end, from, count;
  };

  std::vector<int32_t> slots_;
  std::vector<int64_t> rows_;
  std::vector<Piece> pieces_;
};

}  // namespace slipstream
