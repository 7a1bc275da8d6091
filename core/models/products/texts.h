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
      longest_ = std::max(longest_, end - begin);
    }
  }

  // What `distances` [H, 2N - 1] adds to scaled scores, from a key N - 1 places before its query to one as far behind it, as
  // attention takes it: in `room`.
  Weighing weighing(float scale, const MaybeTensor& distances, Scratch& room) const {
    Weighing found{scale, 0.0f, 0, 0, nullptr, true};
    if (!distances) return found;
    const int64_t heads = distances->size(0), width = distances->size(1), most = width / 2 + 1;
    TORCH_CHECK(longest_ <= most, "distances of ", most, " tokens do not do for a text of ", longest_);
    found.origin = longest_ - 1;
    found.stride = 2 * longest_ - 1 + kPanel;
    float* to = room.take<float>(1, heads * found.stride);
    const float* from = distances->const_data_ptr<float>() + most - longest_;
    for (int64_t head = 0; head < heads; ++head, to += found.stride, from += width) {
      for (int64_t i = 0; i < 2 * longest_ - 1; ++i) to[i] = from[i] / scale;
      std::fill_n(to + 2 * longest_ - 1, kPanel, 0.0f);
    }
    found.distances = to - heads * found.stride;
    return found;
  }

  // q and out [T, H, D], keys and values [T, K, D]. Other tokens' places in out stay as they are.
  template <typename T>
  void attend(Team& team, std::vector<Scratch>& scratch, const Shape& shape, const Weighing& weighing, const T* q,
              const Stored<T>& stored, T* out) const {
    team.run(static_cast<int64_t>(pieces_.size()) * shape.kv_heads, [&](int64_t chunk, int64_t worker) {
      const Piece& piece = pieces_[chunk / shape.kv_heads];
      const int64_t head = chunk % shape.kv_heads, width = shape.q_width();
      const Block<T> block{q, out, width, width, rows_.data() + piece.from, piece.count, piece.from - piece.begin};
      const Pages<T> pages{stored, slots_.data() + piece.begin};
      BlockAttention<T, T, NumberPanels<T, T>> attention(shape, weighing, block, pages, head, head + 1, scratch[worker], 0);
      attention.begin();
      attention.read(0, piece.end - piece.begin);
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
  int64_t longest_ = 0;
};

}  // namespace slipstream
