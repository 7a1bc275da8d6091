// Which tokens followed the same tokens before. See core/speculation/suffix_index.py, which says how and why.

#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <vector>

namespace slipstream_host {

constexpr int64_t kOrders[] = {2, 4, 8};  // how many last tokens must be the same
constexpr int64_t kNumOrders = 3;
constexpr int64_t kLongest = 8;
constexpr int64_t kBlockTokens = 64;  // tokens of a block
constexpr int64_t kNowhere = -1;
constexpr size_t kFew = 12;  // up to so many tokens are entered token by token

constexpr std::array<uint64_t, kLongest> kPowers = [] {
  std::array<uint64_t, kLongest> found{0x9E3779B97F4A7C15u};
  for (int64_t i = 1; i < kLongest; ++i) found[i] = found[i - 1] * found[0];
  return found;
}();

// One sequence that is being written.
struct Text {
  int64_t scope = 0;
  int64_t place = kNowhere;  // of its last token in the store
  int64_t taking = 0;        // which taking of its block was its own
  int64_t length = 0;        // of `tail`
  int64_t tail[kLongest];    // its last tokens
  int64_t num_keys = 0;
  uint64_t keys[kNumOrders];  // hashes of what it ends with; they enter the table with the next token
};

struct Found {
  int64_t order = 0;  // index into kOrders
  std::vector<int64_t> ids;
};

class SuffixIndex {
 public:
  explicit SuffixIndex(int64_t bytes_limit) {
    blocks_ = std::max<int64_t>(2, bytes_limit / (kBlockTokens * (4 + 16 * kNumOrders)));
    const uint64_t entries = blocks_ * kBlockTokens * kNumOrders;
    table_.resize(std::bit_floor(entries));
    mask_ = table_.size() - 1;
    tokens_.assign(blocks_ * kBlockTokens, kNowhere);
    of_.resize(blocks_);
  }

  int64_t nbytes() const {
    return tokens_.size() * sizeof(int32_t) + of_.size() * sizeof(Block) + table_.size() * sizeof(Entry);
  }

  // `text` goes on with `ids`. What it ends with is entered once something follows.
  void write(Text& text, const int64_t* ids, size_t count) {
    if (count > kFew) return write_all(text, ids, count);
    for (size_t i = 0; i < count; ++i) {
      for (int64_t order = 0; order < text.num_keys; ++order) enter(text.keys[order], text.place);
      store(text, ids[i]);
      if (text.length == kLongest) {
        std::copy(text.tail + 1, text.tail + kLongest, text.tail);
      } else {
        ++text.length;
      }
      text.tail[text.length - 1] = ids[i];
      hash(text);
    }
  }

  // As `write`, but order by order: of two entries for one slot the same one stays as in Python.
  void write_all(Text& text, const int64_t* ids, size_t count) {
    if (count == 0) return;
    const int64_t before = text.length;
    known_.assign(text.tail, text.tail + before);
    known_.insert(known_.end(), ids, ids + count);
    places_.clear();
    // Of what was said before only the newest token's place matters: what ended before it was entered then.
    const int64_t begun = before > 0 ? before - 1 : 0;
    if (before > 0) places_.push_back(text.place);
    for (size_t i = 0; i < count; ++i) {
      store(text, ids[i]);
      places_.push_back(text.place);
    }
    const int64_t all = known_.size();
    hashes_.assign(all, static_cast<uint64_t>(text.scope));
    for (int64_t back = 0, order = 0; back < kLongest; ++back) {
      for (int64_t i = back; i < all; ++i) hashes_[i] += static_cast<uint64_t>(known_[i - back]) * kPowers[back];
      if (back + 1 != kOrders[order]) continue;
      for (int64_t i = std::max(back, begun); i < all - 1; ++i) enter(hashes_[i], places_[i - begun]);
      ++order;
    }
    text.length = std::min(all, kLongest);
    std::copy(known_.end() - text.length, known_.end(), text.tail);
    hash(text);
  }

  // Up to `most` tokens that followed what `text` ends with, when that was last said. Where these are its own last
  // tokens, it is taken to go on so.
  void follow(const Text& text, int64_t most, Found& found) const {
    found.order = 0;
    found.ids.clear();
    for (int64_t order = text.num_keys - 1; order >= 0; --order) {
      const Entry& entry = table_[text.keys[order] & mask_];
      if (entry.key != text.keys[order]) continue;
      const int64_t last = read(entry.place, most, text.scope, found.ids);
      const int64_t period = found.ids.size();
      if (period == 0) continue;
      found.order = order;
      if (last != text.place) return;
      for (int64_t i = period; i < most; ++i) found.ids.push_back(found.ids[i - period]);
      return;
    }
  }

 private:
  struct Entry {
    uint64_t key = 0;
    int64_t place = kNowhere;
  };
  struct Block {
    int64_t scope = 0;
    int64_t next = kNowhere;  // the block that goes on with its text
    int64_t taking = 0;       // the number of the taking that it is from
  };

  // Of the last tokens, for each order that the text is long enough for. What two scopes say alike differs.
  static void hash(Text& text) {
    uint64_t total = static_cast<uint64_t>(text.scope);
    text.num_keys = 0;
    for (int64_t back = 0; back < text.length; ++back) {
      total += static_cast<uint64_t>(text.tail[text.length - 1 - back]) * kPowers[back];
      if (back + 1 == kOrders[text.num_keys]) text.keys[text.num_keys++] = total;
    }
  }

  void enter(uint64_t key, int64_t place) { table_[key & mask_] = {key, place}; }

  void store(Text& text, int64_t token) {
    text.place = behind(text);
    tokens_[text.place] = static_cast<int32_t>(token);
  }

  // The place of the next token; begins a new block where the last one is full, or has another text by now.
  int64_t behind(Text& text) {
    const int64_t old = text.place / kBlockTokens;
    const bool owns = text.place != kNowhere && of_[old].taking == text.taking;
    if (owns && (text.place + 1) % kBlockTokens) return text.place + 1;
    const int64_t block = takings_++ % blocks_;
    std::fill_n(tokens_.begin() + block * kBlockTokens, kBlockTokens, static_cast<int32_t>(kNowhere));
    of_[block] = {text.scope, kNowhere, takings_};
    text.taking = takings_;
    if (owns) of_[old].next = block;
    return block * kBlockTokens;
  }

  // Adds up to `most` tokens behind `place`, through the blocks of its text; returns the place of the last of them.
  int64_t read(int64_t place, int64_t most, int64_t scope, std::vector<int64_t>& found) const {
    int64_t at = place + 1, block = place / kBlockTokens, last = place;
    while (block != kNowhere && of_[block].scope == scope) {
      const int64_t end = (block + 1) * kBlockTokens;
      for (; at < end && static_cast<int64_t>(found.size()) < most && tokens_[at] != kNowhere; ++at) {
        found.push_back(tokens_[at]);
        last = at;
      }
      if (static_cast<int64_t>(found.size()) == most || (last + 1) % kBlockTokens) break;
      block = of_[block].next;
      at = block * kBlockTokens;
    }
    return last;
  }

  int64_t blocks_;
  int64_t takings_ = 0;  // blocks that were taken so far, again or not
  uint64_t mask_;
  std::vector<int32_t> tokens_;  // [blocks, kBlockTokens]
  std::vector<Block> of_;        // [blocks]
  std::vector<Entry> table_;     // by the lowest digits of the key
  std::vector<int64_t> known_, places_;
  std::vector<uint64_t> hashes_;
};

}  // namespace slipstream_host
