// How likely drafts are to be right, by what they were found by. See core/speculation/confidence.py.

#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace slipstream_host {

constexpr double kMemory = 1.0 / 64;  // weight of the newest guess in what is known
constexpr double kHope = 0.8;         // the chance that stands before any guess was judged
constexpr int64_t kHoped = 4;         // as how many guesses that counts

struct Prospect {
  int64_t number;  // how many tokens of a guess are worth their place
  double right;    // how many of these are right, on average
};

class Confidence {
 public:
  Confidence(int64_t kinds, int64_t most) : most_(most), places_(kinds * most) {}

  // Of the guess these tokens came. Says nothing of places behind them, nor behind the first that was wrong.
  void judge(int64_t kind, const std::vector<int64_t>& guess, const std::vector<int64_t>& came) {
    const size_t both = std::min(guess.size(), came.size());
    for (size_t i = 0; i < both; ++i) {
      Place& place = places_[kind * most_ + i];
      const bool right = guess[i] == came[i];
      ++place.seen;
      place.right += std::max(kMemory, 1.0 / place.seen) * (right - place.right);
      if (!right) return;
    }
  }

  // Of a guess of `length` tokens, those that have a chance of at least `worth`.
  Prospect prospect(int64_t kind, int64_t length, double worth) const {
    double chance = 1, right = 0;
    for (int64_t i = 0; i < std::min(length, most_); ++i) {
      chance *= places_[kind * most_ + i].right;
      if (chance < worth) return {i, right};
      right += chance;
    }
    return {length, right};
  }

 private:
  // Of guesses that were right up to here.
  struct Place {
    double right = kHope;  // the part that was right here too
    int64_t seen = kHoped;
  };
  int64_t most_;
  std::vector<Place> places_;  // [kinds, most]
};

}  // namespace slipstream_host
