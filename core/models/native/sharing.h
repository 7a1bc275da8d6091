// Who reads the same keys: requests behind a common prefix have the same slots in their tables, and attention reads those
// once for all of them (cascade attention of FlashInfer, Ye et al. 2024; Hydragen, Juravsky et al. 2024).

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "panels.h"

namespace slipstream {

// A piece of attention: consecutive tokens of one request, from `token` of the step on.
struct Piece {
  int64_t token, tokens, position;
  const int32_t* table;  // slots of the request's tokens
  int64_t sees = 0;      // up to which position, if that is behind the tokens themselves

  // Behind the last key that any of them sees.
  int64_t end() const { return std::max(position + tokens, sees); }
};

// Pieces that read the first `shared` keys together; `tokens` are all of theirs, one piece behind the other.
struct Group {
  const Piece* pieces;
  int64_t count, shared;
  const int64_t* tokens;
};

// What is planned depends on the pieces alone, never on how many threads there are, so that neither do the sums.
class Sharing {
 public:
  // Sorts `pieces` and parts them into groups, which are good until the next call. `heads` share a KV head.
  const std::vector<Group>& plan(std::vector<Piece>& pieces, int64_t heads) {
    if (anybody_shares(pieces)) std::stable_sort(pieces.begin(), pieces.end(), before);
    groups_.clear();
    tokens_.clear();
    for (const Piece& piece : pieces)
      for (int64_t t = 0; t < piece.tokens; ++t) tokens_.push_back(piece.token + t);
    const int64_t most = std::max<int64_t>(1, kRowsTogether / heads), count = static_cast<int64_t>(pieces.size());
    for (int64_t first = 0, tokens = 0; first < count;) {
      Group group{&pieces[first], 1, whole_panels(pieces[first]), &tokens_[tokens]};
      int64_t held = pieces[first].tokens;
      for (int64_t next = first + 1; next < count && held + pieces[next].tokens <= most; ++next) {
        const int64_t common = shared_keys(pieces[first], pieces[next], group.shared);
        if (common == 0 || 2 * common < group.shared) break;
        group.shared = common;
        held += pieces[next].tokens;
        ++group.count;
      }
      if (group.count == 1) group.shared = 0;
      groups_.push_back(group);
      first += group.count;
      tokens += held;
    }
    return groups_;
  }

  // Everybody alone: for layers with windows.
  const std::vector<Group>& apart(const std::vector<Piece>& pieces) {
    groups_.clear();
    tokens_.clear();
    for (const Piece& piece : pieces)
      for (int64_t t = 0; t < piece.tokens; ++t) tokens_.push_back(piece.token + t);
    const int64_t* tokens = tokens_.data();
    for (const Piece& piece : pieces) {
      groups_.push_back({&piece, 1, 0, tokens});
      tokens += piece.tokens;
    }
    return groups_;
  }

 private:
  // Rows of queries that are worth a panel of keys, and leave enough groups for the threads.
  static constexpr int64_t kRowsTogether = 128;

  // Keys before the piece, in whole panels.
  static int64_t whole_panels(const Piece& piece) { return piece.position / kPanel * kPanel; }

  // Pages are shared from the front, so whoever has another first slot shares nothing.
  bool anybody_shares(const std::vector<Piece>& pieces) {
    first_slots_.clear();
    for (const Piece& piece : pieces)
      if (piece.position >= kPanel) first_slots_.push_back(piece.table[0]);
    std::sort(first_slots_.begin(), first_slots_.end());
    return std::adjacent_find(first_slots_.begin(), first_slots_.end()) != first_slots_.end();
  }

  // By the slots at panels' beginnings: neighbours then have most in common.
  static bool before(const Piece& a, const Piece& b) {
    const int64_t both = std::min(whole_panels(a), whole_panels(b));
    for (int64_t at = 0; at < both; at += kPanel)
      if (a.table[at] != b.table[at]) return a.table[at] < b.table[at];
    return whole_panels(a) < whole_panels(b);
  }

  // How many keys, in whole panels and `most` at most, are in the same slots.
  static int64_t shared_keys(const Piece& a, const Piece& b, int64_t most) {
    const int64_t limit = std::min(most, whole_panels(b));
    int64_t common = 0;
    while (common < limit && std::memcmp(a.table + common, b.table + common, kPanel * sizeof(int32_t)) == 0)
      common += kPanel;
    return common;
  }

  std::vector<Group> groups_;
  std::vector<int64_t> tokens_;
  std::vector<int32_t> first_slots_;
};

}  // namespace slipstream
