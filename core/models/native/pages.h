// Pages of keys and values as attention walks through them: where each token's are, by the table of slots.

#pragma once

#include <algorithm>

#include "kernels.h"
#include "stored.h"

namespace slipstream {

// One layer's pages, and where the tokens of one request are in them.
template <typename S>
struct Pages {
  const Stored<S>& stored;
  const int32_t* table;  // [tokens]
};

// Heads `first` to `first + heads` of keys that are read from `first_key` to `end`.
template <typename S>
class Walk {
 public:
  Walk(const Shape& shape, const Pages<S>& pages, int64_t first, int64_t heads)
      : shape_(shape), pages_(pages), first_(first), heads_(heads) {}

  void begin(int64_t first_key, int64_t end) {
    first_key_ = first_key;
    end_ = end;
  }

  const Stored<S>& stored() const { return pages_.stored; }

  // What is at `token` in one of a layer's two tensors, from the first head on. In the places of tokens that left the window
  // of all queries stands the first that has not: their own slots may be anybody's, and weights hide all of them.
  const S* find(const S* base, int64_t token) const {
    return base + slot(token) * shape_.kv_width() + first_ * shape_.dim;
  }

  // The same of scales.
  const uint8_t* find_scale(const uint8_t* base, int64_t token) const {
    return base + slot(token) * shape_.kv_heads + first_;
  }

  // Asks for some later tokens: pages lie anywhere, and nothing else knows which comes next.
  void fetch(const S* base, int64_t from) const {
    const int64_t bytes = heads_ * shape_.dim * static_cast<int64_t>(sizeof(S));
    for (int64_t token = from; token < std::min(end_, from + kLanes); ++token) {
      const char* here = reinterpret_cast<const char*>(find(base, token));
      for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(here + at);
    }
  }

 private:
  int64_t slot(int64_t token) const { return pages_.table[std::max(token, first_key_)]; }

  const Shape& shape_;
  const Pages<S>& pages_;
  int64_t first_, heads_, first_key_ = 0, end_ = 0;
};

}  // namespace slipstream
