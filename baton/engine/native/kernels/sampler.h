// Samples tokens from logits as baton/engine/sampler.py does, without sorting the vocabulary.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "team.h"
#include "vectors.h"

namespace baton {

// A row's sampling parameters. Temperature 0 means greedy; `top_k` 0 and `top_p` 1 filter nothing.
// Its tokens so far are [seen, end) of `history`, the answer's [answer, end); its biases are [bias,
// bias_end). The random draw is determined by seed and position.
struct Dials {
  double temperature, top_p, min_p, repetition, presence, frequency;
  uint64_t seed;
  int64_t position, top_k, seen, answer, end, bias, bias_end;
};

// The concatenated histories and logit biases of all rows.
struct Lists {
  const int64_t* history;
  const int64_t* bias_tokens;
  const double* biases;
};

// A draw in [0, 1) with 53 bits: Philox4x32-10 (Salmon et al., SC'11), as baton/core/philox.py.
inline double uniform(uint64_t seed, uint64_t position) {
  uint32_t c[4] = {static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
  uint32_t key[2] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * c[0], b = uint64_t{0xCD9E8D57} * c[2];
    const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ key[0],
                              static_cast<uint32_t>(b),
                              static_cast<uint32_t>(a >> 32) ^ c[3] ^ key[1],
                              static_cast<uint32_t>(a)};
    std::memcpy(c, next, sizeof c);
    key[0] += 0x9E3779B9;
    key[1] += 0xBB67AE85;
  }
  return ((c[0] >> 5) * 67108864.0 + (c[1] >> 6)) / 9007199254740992.0;
}

// Eight FP64 numbers as a compiler vector: the same operations on any processor.
using Eight = double __attribute__((vector_size(64)));
using EightBits = int64_t __attribute__((vector_size(64)));
constexpr long kEight = 8;

inline Eight load_eight(const double* from) {
  Eight numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}
inline void store_eight(double* to, Eight numbers) { std::memcpy(to, &numbers, sizeof numbers); }
inline double sum_of_eight(Eight x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// e to the power of x <= 0, within two units in the last place; 0 for subnormal results and NaN.
// x is split into n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of r is summed up to the
// 13th power; the remainder is below 2^-57.
inline Eight power_below_one(Eight x) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer
  const Eight held = x > -708.0 ? x : Eight{} - 708.0;
  const Eight shifted = held * 1.44269504088896340736 + kRound, n = shifted - kRound;
  // ln 2 in two parts: the first has so few digits that its product with n is exact.
  const Eight r = (held - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  Eight sum = Eight{} + 1.0 / 6227020800;
  for (const double inverse_factorial :
       {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    sum = sum * r + inverse_factorial;
  const EightBits exponent = ((EightBits)shifted + 1023) << 52;  // only the last bits of n remain
  return x > -708.0 ? sum * (Eight)exponent : Eight{};
}

// Returns the maximum; minus infinity if there are only NaNs.
inline float greatest(const float* logits, long size) {
  constexpr long kTogether = 4;  // independent vectors, so that none waits for the previous one
  Vec most[kTogether];
  for (Vec& one : most) one = every(-INFINITY);
  long i = 0;
  for (; i + kTogether * kLanes <= size; i += kTogether * kLanes)
    for (long v = 0; v < kTogether; ++v)
      most[v] = greater(load(logits + i + v * kLanes), most[v]);
  for (; i < size; i += kLanes) {
    const Lanes inside = lanes(size - i);
    most[0] = greater(pick(inside, load(logits + i, inside), most[0]), most[0]);
  }
  return most_of(greater(greater(most[0], most[1]), greater(most[2], most[3])));
}

// Returns the index of the maximum, the first of equals.
inline long likeliest(const float* logits, long size) {
  constexpr long kPart = 2048;  // only the part with the maximum is searched again
  float best = -INFINITY;
  long first = 0;
  for (long part = 0; part < size; part += kPart) {
    const float here = greatest(logits + part, std::min(kPart, size - part));
    if (here > best) {
      best = here;
      first = part;
    }
  }
  const float *from = logits + first, *end = logits + std::min(size, first + kPart);
  const float* found = std::find(from, end, best);
  return found == end ? 0 : found - logits;
}

// The sampler of one thread, with buffers for a vocabulary of `size`: sampling allocates no memory.
class Sampler {
 public:
  explicit Sampler(long size)
      : size_(size),
        weights_(ceil_div(size, kBlock) * kBlock),
        blocks_(ceil_div(size, kBlock)),
        counts_(size),
        groups_(2 * kGroups) {
    seen_.reserve(size);
    members_.reserve(size);
  }

  long choose(const float* logits, const Dials& dials, const Lists& lists) {
    const bool adjusted = dials.end > dials.seen || dials.bias_end > dials.bias;
    if (dials.temperature == 0 && !adjusted) return likeliest(logits, size_);
    std::copy_n(logits, size_, weights_.begin());
    double best = greatest(logits, size_);
    if (adjusted) {
      penalise(dials, lists.history);
      for (long i = dials.bias; i < dials.bias_end; ++i)
        if (is_token(lists.bias_tokens[i])) weights_[lists.bias_tokens[i]] += lists.biases[i];
      best = -INFINITY;
      for (long i = 0; i < size_; ++i) best = std::max(best, weights_[i]);
    }
    if (dials.temperature == 0) {
      const long found = std::find(weights_.begin(), weights_.end(), best) - weights_.begin();
      return found < size_ ? found : 0;
    }
    if (!(best > -INFINITY)) return 0;  // the mask allows no token; the caller ignores the result
    weigh(dials.temperature, best, dials.min_p);
    if ((dials.top_k > 0 && dials.top_k < size_) || dials.top_p < 1) {
      group();
      const long most = dials.top_k > 0 ? dials.top_k : size_;
      Cut last = cut(most, INFINITY);
      if (dials.top_p < 1) last = cut(most, dials.top_p * last.mass);
      keep(last);
    }
    return draw(uniform(dials.seed, dials.position));
  }

 private:
  static constexpr long kBlock = 512;    // weights per partial sum
  static constexpr long kGroups = 4096;  // 64 for each power of two, down to 2^-64
  static constexpr int kGroupBits = 46;  // low bits of a weight that don't matter for its group
  static constexpr int64_t kOne = 0x3ff0000000000000;  // the bits of 1

  struct Group {
    long count;
    double sum;
  };

  // The last token that is kept, by weight and then by token id, and the total weight of all that
  // are kept.
  struct Cut {
    double weight = 2;
    long token = -1;
    double mass = 0;
  };

  bool is_token(int64_t id) const { return id >= 0 && id < size_; }

  // Applies the penalties. Repetition counts prompt and answer (Keskar et al. 2019); presence and
  // frequency count the answer only, and are multiplied in FP32, as in torch.
  void penalise(const Dials& dials, const int64_t* history) {
    for (long i = dials.seen; i < dials.end; ++i) {
      if (!is_token(history[i])) continue;
      int32_t& count = counts_[history[i]];
      if (count == 0) seen_.push_back(history[i]);
      count = std::max(count, 1) + (i >= dials.answer);  // occurrences in the answer, plus 1
    }
    for (const long token : seen_) {
      const float count = static_cast<float>(counts_[token] - 1);
      double& score = weights_[token];
      score = score > 0 ? score / dials.repetition : score * dials.repetition;
      score -= static_cast<float>(dials.frequency) * count;
      score -= count > 0 ? static_cast<float>(dials.presence) : 0.0f;
      counts_[token] = 0;
    }
    seen_.clear();
  }

  // Turns scores into weights: 1 for the greatest; 0 below `least` and beyond the vocabulary.
  void weigh(double temperature, double best, double least) {
    const double by = 1 / temperature, most = best * by;
    std::fill(weights_.begin() + size_, weights_.end(), -INFINITY);
    each_eight([&](Eight scores, long) {
      const Eight weights = power_below_one(scores * by - most);
      return weights >= least ? weights : Eight{};
    });
  }

  // Replaces all weights, eight at a time, by become(weights, first index), and sums up each block.
  template <class Become>
  void each_eight(Become become) {
    double* weights = weights_.data();
    for (size_t block = 0; block < blocks_.size(); ++block) {
      Eight sum{};
      for (long i = block * kBlock; i < static_cast<long>(block + 1) * kBlock; i += kEight) {
        const Eight became = become(load_eight(weights + i), i);
        store_eight(weights + i, became);
        sum += became;
      }
      blocks_[block] = sum_of_eight(sum);
    }
  }

  double sum() const {
    double sum = 0;
    for (const double block : blocks_) sum += block;
    return sum;
  }

  // Returns a weight's group: the greater the weight, the lower its index.
  static long group_of(double weight) {
    int64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min<int64_t>(kGroups - 1, (kOne - bits) >> kGroupBits);
  }

  void group() {
    // Even and odd tokens are counted separately, so that neighbours don't wait for each other.
    std::fill(groups_.begin(), groups_.end(), Group{0, 0});
    for (long i = 0; i < size_; ++i) {
      if (weights_[i] == 0) continue;
      Group& group = groups_[2 * group_of(weights_[i]) + i % 2];
      ++group.count;
      group.sum += weights_[i];
    }
    for (long i = 0; i < kGroups; ++i)
      groups_[i] = {groups_[2 * i].count + groups_[2 * i + 1].count,
                    groups_[2 * i].sum + groups_[2 * i + 1].sum};
  }

  auto before() const {
    return [this](int32_t a, int32_t b) {
      return weights_[a] != weights_[b] ? weights_[a] > weights_[b] : a < b;
    };
  }

  // Keeps the heaviest tokens (of equals, those with lower ids) until there are `most`, or their
  // weights add up to `enough`. Only the group that is kept in part is searched.
  Cut cut(long most, double enough) {
    Cut last;
    long count = 0;
    for (long group = 0; group < kGroups && count < most && last.mass < enough; ++group) {
      const auto [members, sum] = groups_[group];
      if (members == 0) continue;
      if (count + members <= most && last.mass + sum < enough) {
        count += members;
        last = {least_of(group), size_, last.mass + sum};
        continue;
      }
      gather(group);
      const long kept = cut_members(most - count, enough - last.mass, last.mass);
      const long border = *std::max_element(members_.begin(), members_.begin() + kept, before());
      return {weights_[border], border, last.mass};
    }
    return last;
  }

  // Returns how many of `members_` are kept, moves these to the front and adds their weight to
  // `mass`. Works like a binary search: a half that fits the limits is kept as a whole.
  long cut_members(long most, double enough, double& mass) {
    auto first = members_.begin(), end = members_.end();
    double weight = 0;
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, before());
      double half = 0;
      for (auto member = first; member != middle; ++member) half += weights_[*member];
      if (middle - members_.begin() <= most && weight + half < enough) {
        weight += half;
        first = middle;
      } else {
        end = middle;
      }
    }
    if (first - members_.begin() < most && weight < enough) weight += weights_[*first++];
    mass += weight;
    return first - members_.begin();
  }

  // Returns the lower bound of a group's weights; all later groups are below it.
  static double least_of(long group) {
    const int64_t bits = kOne - ((group + 1) << kGroupBits) + 1;
    double weight;
    std::memcpy(&weight, &bits, sizeof weight);
    return group == kGroups - 1 ? std::numeric_limits<double>::min() : weight;
  }

  void gather(long group) {
    const double least = least_of(group), above = group ? least_of(group - 1) : 2;
    members_.clear();
    for (long first = 0; first < size_; first += kEight) {
      const Eight weights = load_eight(weights_.data() + first);
      const EightBits inside = (weights >= least) & (weights < above);
      for (long i = 0; i < kEight; ++i)
        if (inside[i]) members_.push_back(first + i);
    }
  }

  void keep(const Cut& last) {
    const EightBits places{0, 1, 2, 3, 4, 5, 6, 7};
    each_eight([&](Eight weights, long first) {
      const EightBits kept =
          (weights > last.weight) | ((weights == last.weight) & (places + first <= last.token));
      return kept ? weights : Eight{};
    });
  }

  // Inverts the cumulative distribution, in the vocabulary's order.
  long draw(double part) const {
    const double wanted = part * sum();
    double reached = 0;
    long last = 0;
    for (size_t block = 0; block < blocks_.size(); ++block) {
      if (blocks_[block] == 0) continue;
      last = block;
      if (reached + blocks_[block] > wanted) break;
      reached += blocks_[block];
    }
    const long first = last * kBlock, end = std::min(size_, first + kBlock);
    long possible = first;
    double here = 0;
    for (long i = first; i < end; ++i) {
      if (weights_[i] == 0) continue;
      possible = i;
      here += weights_[i];
      if (reached + here > wanted) break;
    }
    return possible;  // the last possible token, if rounding puts the draw beyond the end
  }

  const long size_;
  std::vector<double> weights_, blocks_;
  std::vector<int32_t> counts_;  // by token; all zeros between two rows
  std::vector<int32_t> seen_, members_;
  std::vector<Group> groups_;
};

// Samples batches. Rows are divided among the threads of a team.
class Samplers {
 public:
  Samplers(Team& team, long size) : team_(team), size_(size), samplers_(team.size()) {}

  // `dials` has an entry for each of `count` rows of logits [count][size]; null: all are greedy.
  void choose(const float* logits, long count, const Dials* dials, const Lists& lists,
              int64_t* tokens) {
    const double seconds = double(count) * size_ * (dials ? 1e-9 : 1e-10);
    Team& team = seconds < kWorthWaking || count == 1 ? alone_ : team_;
    if (dials)
      for (int thread = 0; thread < team.size(); ++thread)
        if (!samplers_[thread]) samplers_[thread] = std::make_unique<Sampler>(size_);
    team.run([&](int thread) {
      team.each(count, [&](long row) {
        const float* own = logits + row * size_;
        tokens[row] = dials ? samplers_[thread]->choose(own, dials[row], lists)
                            : likeliest(own, size_);
      });
    });
  }

 private:
  Team& team_;
  Team alone_{1};
  const long size_;
  std::vector<std::unique_ptr<Sampler>> samplers_;
};

}  // namespace baton
