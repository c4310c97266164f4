// Samples tokens from logits as baton/engine/sampler.py does, without sorting the vocabulary.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>

#include "thread_pool.h"
#include "vectors.h"

namespace baton {

// A row's sampling parameters. Temperature 0 means greedy; `top_k` 0 and `top_p` 1 filter nothing.
// Its tokens so far are [history_start, history_end) of `history`, the answer's [answer_start,
// history_end); its biases are [bias_start, bias_end). The random draw is determined by seed and
// position.
struct SamplingRow {
  double temperature, top_p, min_p, repetition, presence, frequency;
  uint64_t seed;
  int64_t position, top_k, history_start, answer_start, history_end, bias_start, bias_end;
};

// The concatenated histories and logit biases of all rows.
struct TokenLists {
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
using Double8 = double __attribute__((vector_size(64)));
using Int64x8 = int64_t __attribute__((vector_size(64)));
constexpr long kDouble8Lanes = 8;

inline Double8 load_double8(const double* from) {
  Double8 numbers;
  std::memcpy(&numbers, from, sizeof numbers);
  return numbers;
}
inline void store_double8(double* to, Double8 numbers) {
  std::memcpy(to, &numbers, sizeof numbers);
}
inline double reduce_sum(Double8 x) {
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// e to the power of x <= 0, within two units in the last place; 0 for subnormal results and NaN.
// x is split into n ln 2 + r with |r| <= ln 2 / 2, and the Taylor series of r is summed up to the
// 13th power; the remainder is below 2^-57.
inline Double8 exp_nonpositive(Double8 x) {
  constexpr double kRound = 0x1.8p52;  // adding it rounds to an integer
  const Double8 held = x > -708.0 ? x : Double8{} - 708.0;
  const Double8 shifted = held * 1.44269504088896340736 + kRound, n = shifted - kRound;
  // ln 2 in two parts: the first has so few digits that its product with n is exact.
  const Double8 r = (held - n * 6.93147180369123816490e-01) - n * 1.90821492927058770002e-10;
  Double8 sum = Double8{} + 1.0 / 6227020800;
  for (const double inverse_factorial :
       {1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040,
        1.0 / 720, 1.0 / 120, 1.0 / 24, 1.0 / 6, 0.5, 1.0, 1.0})
    sum = sum * r + inverse_factorial;
  const Int64x8 exponent = ((Int64x8)shifted + 1023) << 52;  // only the last bits of n remain
  return x > -708.0 ? sum * (Double8)exponent : Double8{};
}

// Returns the maximum; minus infinity if there are only NaNs.
inline float max_logit(const float* logits, long size) {
  constexpr long kTogether = 4;  // independent vectors, so that none waits for the previous one
  Vec most[kTogether];
  for (Vec& one : most) one = broadcast(-INFINITY);
  long i = 0;
  for (; i + kTogether * kLanes <= size; i += kTogether * kLanes)
    for (long v = 0; v < kTogether; ++v)
      most[v] = max_lanes(load(logits + i + v * kLanes), most[v]);
  for (; i < size; i += kLanes) {
    const Lanes inside = lanes(size - i);
    most[0] = max_lanes(blend(inside, load(logits + i, inside), most[0]), most[0]);
  }
  return reduce_max(max_lanes(max_lanes(most[0], most[1]), max_lanes(most[2], most[3])));
}

// Returns the index of the maximum, the first of equals.
inline long argmax(const float* logits, long size) {
  constexpr long kPart = 2048;  // only the part with the maximum is searched again
  float best = -INFINITY;
  long first = 0;
  for (long part = 0; part < size; part += kPart) {
    const float here = max_logit(logits + part, std::min(kPart, size - part));
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
        buckets_(2 * kBuckets) {
    history_tokens_.reserve(size);
    bucket_tokens_.reserve(size);
  }

  long sample(const float* logits, const SamplingRow& row, const TokenLists& lists) {
    const bool adjusted = row.history_end > row.history_start || row.bias_end > row.bias_start;
    if (row.temperature == 0 && !adjusted) return argmax(logits, size_);
    std::copy_n(logits, size_, weights_.begin());
    double best = max_logit(logits, size_);
    if (adjusted) {
      apply_penalties(row, lists.history);
      for (long i = row.bias_start; i < row.bias_end; ++i)
        if (is_token(lists.bias_tokens[i])) weights_[lists.bias_tokens[i]] += lists.biases[i];
      best = -INFINITY;
      for (long i = 0; i < size_; ++i) best = std::max(best, weights_[i]);
    }
    if (row.temperature == 0) {
      const long found = std::find(weights_.begin(), weights_.end(), best) - weights_.begin();
      return found < size_ ? found : 0;
    }
    if (!(best > -INFINITY)) return 0;  // the mask allows no token; the caller ignores the result
    compute_weights(row.temperature, best, row.min_p);
    if ((row.top_k > 0 && row.top_k < size_) || row.top_p < 1) {
      fill_buckets();
      const long most = row.top_k > 0 ? row.top_k : size_;
      Cutoff last = find_cutoff(most, INFINITY);
      if (row.top_p < 1) last = find_cutoff(most, row.top_p * last.mass);
      apply_cutoff(last);
    }
    return draw(uniform(row.seed, row.position));
  }

 private:
  static constexpr long kBlock = 512;    // weights per partial sum
  static constexpr long kBuckets = 4096;   // 64 for each power of two, down to 2^-64
  static constexpr int kBucketShift = 46;  // low bits of a weight that don't matter for its bucket
  static constexpr int64_t kOne = 0x3ff0000000000000;  // the bits of 1

  struct Bucket {
    long count;
    double sum;
  };

  // The last token that is kept, by weight and then by token id, and the total weight of all that
  // are kept.
  struct Cutoff {
    double weight = 2;
    long token = -1;
    double mass = 0;
  };

  bool is_token(int64_t id) const { return id >= 0 && id < size_; }

  // Applies the penalties. Repetition counts prompt and answer (Keskar et al. 2019); presence and
  // frequency count the answer only, and are multiplied in FP32, as in torch.
  void apply_penalties(const SamplingRow& row, const int64_t* history) {
    for (long i = row.history_start; i < row.history_end; ++i) {
      if (!is_token(history[i])) continue;
      int32_t& count = counts_[history[i]];
      if (count == 0) history_tokens_.push_back(history[i]);
      count = std::max(count, 1) + (i >= row.answer_start);  // occurrences in the answer, plus 1
    }
    for (const long token : history_tokens_) {
      const float count = static_cast<float>(counts_[token] - 1);
      double& score = weights_[token];
      score = score > 0 ? score / row.repetition : score * row.repetition;
      score -= static_cast<float>(row.frequency) * count;
      score -= count > 0 ? static_cast<float>(row.presence) : 0.0f;
      counts_[token] = 0;
    }
    history_tokens_.clear();
  }

  // Turns scores into softmax weights, not normalised: 1 for the greatest; 0 below `least` and
  // beyond the vocabulary.
  void compute_weights(double temperature, double best, double least) {
    const double by = 1 / temperature, most = best * by;
    std::fill(weights_.begin() + size_, weights_.end(), -INFINITY);
    transform_weights([&](Double8 scores, long) {
      const Double8 weights = exp_nonpositive(scores * by - most);
      return weights >= least ? weights : Double8{};
    });
  }

  // Replaces all weights, eight at a time, by transform(weights, first index), and sums up each
  // block.
  template <class Transform>
  void transform_weights(Transform transform) {
    double* weights = weights_.data();
    for (size_t block = 0; block < blocks_.size(); ++block) {
      Double8 sum{};
      for (long i = block * kBlock; i < static_cast<long>(block + 1) * kBlock; i += kDouble8Lanes) {
        const Double8 transformed = transform(load_double8(weights + i), i);
        store_double8(weights + i, transformed);
        sum += transformed;
      }
      blocks_[block] = reduce_sum(sum);
    }
  }

  double sum() const {
    double sum = 0;
    for (const double block : blocks_) sum += block;
    return sum;
  }

  // Returns a weight's bucket: the greater the weight, the lower its index.
  static long bucket_of(double weight) {
    int64_t bits;
    std::memcpy(&bits, &weight, sizeof bits);
    return std::min<int64_t>(kBuckets - 1, (kOne - bits) >> kBucketShift);
  }

  void fill_buckets() {
    // Even and odd tokens are counted separately, so that neighbours don't wait for each other.
    std::fill(buckets_.begin(), buckets_.end(), Bucket{0, 0});
    for (long i = 0; i < size_; ++i) {
      if (weights_[i] == 0) continue;
      Bucket& bucket = buckets_[2 * bucket_of(weights_[i]) + i % 2];
      ++bucket.count;
      bucket.sum += weights_[i];
    }
    for (long i = 0; i < kBuckets; ++i)
      buckets_[i] = {buckets_[2 * i].count + buckets_[2 * i + 1].count,
                     buckets_[2 * i].sum + buckets_[2 * i + 1].sum};
  }

  auto by_weight() const {
    return [this](int32_t a, int32_t b) {
      return weights_[a] != weights_[b] ? weights_[a] > weights_[b] : a < b;
    };
  }

  // Keeps the heaviest tokens (of equals, those with lower ids) until there are `most`, or their
  // weights add up to `enough`. Only the bucket that is kept in part is searched.
  Cutoff find_cutoff(long most, double enough) {
    Cutoff last;
    long count = 0;
    for (long bucket = 0; bucket < kBuckets && count < most && last.mass < enough; ++bucket) {
      const auto [num_tokens, sum] = buckets_[bucket];
      if (num_tokens == 0) continue;
      if (count + num_tokens <= most && last.mass + sum < enough) {
        count += num_tokens;
        last = {lower_bound_of(bucket), size_, last.mass + sum};
        continue;
      }
      collect_bucket(bucket);
      const long kept = cut_bucket(most - count, enough - last.mass, last.mass);
      const long last_token =
          *std::max_element(bucket_tokens_.begin(), bucket_tokens_.begin() + kept, by_weight());
      return {weights_[last_token], last_token, last.mass};
    }
    return last;
  }

  // Returns how many of `bucket_tokens_` are kept, moves these to the front and adds their weight
  // to `mass`. Works like a binary search: a half that fits the limits is kept as a whole.
  long cut_bucket(long most, double enough, double& mass) {
    auto first = bucket_tokens_.begin(), end = bucket_tokens_.end();
    double weight = 0;
    while (end - first > 1) {
      const auto middle = first + (end - first) / 2;
      std::nth_element(first, middle, end, by_weight());
      double half = 0;
      for (auto entry = first; entry != middle; ++entry) half += weights_[*entry];
      if (middle - bucket_tokens_.begin() <= most && weight + half < enough) {
        weight += half;
        first = middle;
      } else {
        end = middle;
      }
    }
    if (first - bucket_tokens_.begin() < most && weight < enough) weight += weights_[*first++];
    mass += weight;
    return first - bucket_tokens_.begin();
  }

  // Returns the lower bound of a bucket's weights; all later buckets are below it.
  static double lower_bound_of(long bucket) {
    const int64_t bits = kOne - ((bucket + 1) << kBucketShift) + 1;
    double weight;
    std::memcpy(&weight, &bits, sizeof weight);
    return bucket == kBuckets - 1 ? std::numeric_limits<double>::min() : weight;
  }

  void collect_bucket(long bucket) {
    const double least = lower_bound_of(bucket), above = bucket ? lower_bound_of(bucket - 1) : 2;
    bucket_tokens_.clear();
    for (long first = 0; first < size_; first += kDouble8Lanes) {
      const Double8 weights = load_double8(weights_.data() + first);
      const Int64x8 inside = (weights >= least) & (weights < above);
      for (long i = 0; i < kDouble8Lanes; ++i)
        if (inside[i]) bucket_tokens_.push_back(first + i);
    }
  }

  void apply_cutoff(const Cutoff& last) {
    const Int64x8 places{0, 1, 2, 3, 4, 5, 6, 7};
    transform_weights([&](Double8 weights, long first) {
      const Int64x8 kept =
          (weights > last.weight) | ((weights == last.weight) & (places + first <= last.token));
      return kept ? weights : Double8{};
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
  std::vector<int32_t> history_tokens_, bucket_tokens_;
  std::vector<Bucket> buckets_;
};

// Samples batches. Rows are divided among the threads of a pool.
class Samplers {
 public:
  Samplers(ThreadPool& threads, long size)
      : threads_(threads), size_(size), samplers_(threads.max_size()) {}

  // `rows` has an entry for each of `count` rows of logits [count][size]; null: all are greedy.
  void sample(const float* logits, long count, const SamplingRow* rows, const TokenLists& lists,
              int64_t* tokens) {
    const double seconds = double(count) * size_ * (rows ? 1e-9 : 1e-10);
    ThreadPool& threads = seconds < kWorthWaking || count == 1 ? single_thread_ : threads_;
    if (rows)
      for (int thread = 0; thread < threads.size(); ++thread)
        if (!samplers_[thread]) samplers_[thread] = std::make_unique<Sampler>(size_);
    threads.run([&](int thread) {
      threads.parallel_for(count, [&](long row) {
        const float* row_logits = logits + row * size_;
        tokens[row] = rows ? samplers_[thread]->sample(row_logits, rows[row], lists)
                           : argmax(row_logits, size_);
      });
    });
  }

 private:
  ThreadPool& threads_;
  ThreadPool single_thread_{1};
  const long size_;
  std::vector<std::unique_ptr<Sampler>> samplers_;
};

}  // namespace baton
