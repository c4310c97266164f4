// Causal attention over the paged pool, the same for one token and for a chunk of a prompt.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>

#include "pages.h"
#include "team.h"
#include "tile.h"

namespace baton {

constexpr long kQueryRows = 256;  // of a tile: so many that standing up the keys costs little

template <class T>
struct Aligned {
  explicit Aligned(long count)
      : data(static_cast<T*>(std::aligned_alloc(64, ceil_div(count * sizeof(T), 64) * 64))) {
    if (!data) throw std::bad_alloc();
    std::memset(data.get(), 0, count * sizeof(T));
  }
  operator T*() const { return data.get(); }

  struct Free {
    void operator()(void* held) const { std::free(held); }
  };
  std::unique_ptr<T, Free> data;
};

// Some tokens of a row, and KV heads [head, head + num_heads), each with the queries of its group.
struct QueryTile {
  long row, first, count, head, num_heads, end;  // `end`: keys that its last token sees
};

// Many tokens are taken one KV head at a time, since each key that is stood up serves them all; few
// (a decode) with as many heads as leave work for every thread, since a token's heads lie side by
// side. How a step is cut changes nothing of its result.
inline std::vector<QueryTile> query_tiles(const Batch& batch, long group, long kv_heads,
                                          long threads) {
  const long most = std::max(1L, kQueryRows / group);
  const long wanted = threads > 1 ? 2 * threads : 1;
  std::vector<QueryTile> tiles;
  for (long row = 0; row < batch.num_rows; ++row)
    for (long first = 0; first < batch.count(row); first += most) {
      const long count = std::min(most, batch.count(row) - first);
      const long room = std::max(1L, kQueryRows / (count * group));
      const long shared = ceil_div(kv_heads, std::min(kv_heads, ceil_div(wanted, batch.num_rows)));
      const long together = std::min(room, shared);
      for (long head = 0; head < kv_heads; head += together)
        tiles.push_back({row, first, count, head, std::min(together, kv_heads - head),
                         batch.starts[row] + first + count});
    }
  // Those with most work first, so that none begins when the others are done.
  std::stable_sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return a.count * a.num_heads * a.end > b.count * b.num_heads * b.end;
  });
  return tiles;
}

// Softmax runs online in FP32 (Milakov and Gimelshein 2018), over tiles of 64 keys counted from
// the context's beginning: what a query adds up, and in which order, depends on its own position
// alone. Keys beyond a tile's end are zeros, never what lies in the pool there.
template <class T>
class Attention {
 public:
  Attention(long heads, long kv_heads, long head_dim)
      : heads_(heads),
        kv_heads_(kv_heads),
        dim_(head_dim),
        width_(ceil_div(head_dim, kColumns) * kColumns),
        depth_(head_dim / kPerUnit),
        group_(heads / kv_heads),
        scale_(1.0f / std::sqrt(static_cast<float>(head_dim))),
        queries_(rows() * dim_),
        keys_(depth_ * kColumns),
        values_(kColumns / kPerUnit * width_),
        scores_(rows() * kColumns),
        weights_(rows() * kColumns),
        sums_(rows() * width_),
        best_(rows()),
        total_(rows()) {}

  // `qkv` [num_tokens][(heads + 2 kv_heads) * head_dim] has the queries; `to` [num_tokens][heads *
  // head_dim].
  void attend(const Batch& batch, const QueryTile& tile, const Pages<T>& pages, const T* qkv,
              T* to) {
    const long first = batch.offsets[tile.row] + tile.first;
    const long start = batch.starts[tile.row] + tile.first;
    begin(tile, qkv + first * (heads_ + 2 * kv_heads_) * dim_);
    const int64_t* table = batch.table(tile.row);
    locate(table, 0, tile.end, tile.head, pages, places_);
    for (long key = 0; key < tile.end; key += kColumns) {
      locate(table, key + kColumns, tile.end, tile.head, pages, coming_);
      // Tokens before this one see none of these keys.
      const long from = std::max(0L, key - start);
      for (long head = 0; head < tile.num_heads; ++head) {
        read(head * dim_, pages.block_tokens * kv_heads_ * dim_);
        add_tile((head * tile.count + from) * group_, (tile.count - from) * group_,
                 start + from + 1 - key);
      }
      std::copy_n(coming_, kColumns, places_);
    }
    finish(tile, to + first * heads_ * dim_);
  }

 private:
  static constexpr long kPerUnit = Format<T>::kPerUnit;

  // Of a tile's queries: [num_heads][count][group].
  long rows() const { return std::max(kQueryRows, group_); }

  void begin(const QueryTile& tile, const T* qkv) {
    const long num_rows = tile.num_heads * tile.count * group_, size = group_ * dim_;
    for (long head = 0; head < tile.num_heads; ++head)
      for (long i = 0; i < tile.count; ++i)
        std::memcpy(queries_ + (head * tile.count + i) * size,
                    qkv + i * (heads_ + 2 * kv_heads_) * dim_ + (tile.head + head) * size,
                    sizeof(T) * size);
    std::fill_n(static_cast<float*>(best_), num_rows, -INFINITY);
    std::fill_n(static_cast<float*>(total_), num_rows, 0.0f);
    std::fill_n(static_cast<float*>(sums_), num_rows * width_, 0.0f);
  }

  // Where the keys [first, first + 64) of a head lie; null from `end` on.
  static void locate(const int64_t* table, long first, long end, long head, const Pages<T>& pages,
                     const T** places) {
    long block = first / pages.block_tokens, offset = first % pages.block_tokens;
    for (long i = 0; i < kColumns; ++i) {
      places[i] = first + i < end ? pages.keys(table[block], offset, head) : nullptr;
      if (++offset == pages.block_tokens) {
        offset = 0;
        ++block;
      }
    }
  }

  // Stands up the keys that lie `along` from those located, and lays down the values behind them;
  // the next ones are fetched meanwhile.
  void read(long along, long part) {
    const T *keys[kColumns], *values[kColumns], *coming[kColumns];
    for (long i = 0; i < kColumns; ++i) {
      keys[i] = places_[i] ? places_[i] + along : nullptr;
      values[i] = keys[i] ? keys[i] + part : nullptr;
      coming[i] = coming_[i] ? coming_[i] + along : nullptr;
    }
    stand_up(reinterpret_cast<const Unit* const*>(keys), depth_, keys_,
             reinterpret_cast<const Unit* const*>(coming));
    for (long i = 0; i < kColumns; i += kPerUnit)
      for (long at = 0; at < dim_; at += kLanes * kPerUnit) {
        lay_down(values + i, at, values_ + i / kPerUnit * width_ + at);
        for (long next = i; next < i + kPerUnit; ++next)
          if (coming[next]) _mm_prefetch(coming[next] + part + at, _MM_HINT_T1);
      }
  }

  // A unit of values_ [64 / kPerUnit][width] has neighbouring tokens. In BF16 sixteen pairs lie as
  // two vectors fall apart when they are unpacked; finish() puts the sums in order.
  void lay_down(const T* const* rows, long at, Unit* to) {
    if constexpr (kPerUnit == 1) {
      const Lanes inside = lanes(dim_ - at);
      _mm512_storeu_si512(to, rows[0] ? _mm512_maskz_loadu_epi32(inside, rows[0] + at)
                                      : _mm512_setzero_si512());
    } else {
      const auto inside = static_cast<__mmask32>(lanes(dim_ - at) |
                                                 uint32_t(lanes(dim_ - at - kLanes)) << kLanes);
      const auto load = [&](const T* row) {
        return row ? _mm512_maskz_loadu_epi16(inside, row + at) : _mm512_setzero_si512();
      };
      const __m512i first = load(rows[0]), second = load(rows[1]);
      _mm512_storeu_si512(to, _mm512_unpacklo_epi16(first, second));
      _mm512_storeu_si512(to + kLanes, _mm512_unpackhi_epi16(first, second));
    }
  }

  // `count` rows against the tile at hand; the first of their tokens sees `visible` of its keys.
  void add_tile(long first, long count, long visible) {
    multiply<T>(count, reinterpret_cast<const Unit*>(queries_ + first * dim_), depth_, keys_,
                kColumns, depth_, scores_ + first * kColumns, kColumns, true);
    for (long row = 0; row < count; ++row) weigh(first + row, visible + row / group_);
    for (long column = 0; column < width_; column += kColumns)
      multiply<T>(count, reinterpret_cast<const Unit*>(weights_ + first * kColumns),
                  kColumns / kPerUnit, values_ + column, width_, kColumns / kPerUnit,
                  sums_ + first * width_ + column, width_, false);
  }

  // A row's scores become weights; what it has summed shrinks where a score beats all before.
  void weigh(long row, long visible) {
    const Vec scale = _mm512_set1_ps(scale_), none = _mm512_set1_ps(-INFINITY);
    const float* scores = scores_ + row * kColumns;
    Vec scaled[kColumns / kLanes], highest = none;
    for (long v = 0; v < kColumns / kLanes; ++v) {
      const Vec own = _mm512_loadu_ps(scores + v * kLanes);
      scaled[v] = _mm512_mask_mul_ps(none, lanes(visible - v * kLanes), own, scale);
      highest = _mm512_max_ps(highest, scaled[v]);
    }
    const float best = _mm512_reduce_max_ps(highest);
    if (best > best_[row]) shrink(row, best);
    const Vec most = _mm512_set1_ps(best_[row]);
    Vec total = _mm512_setzero_ps();
    for (long v = 0; v < kColumns / kLanes; ++v) {
      const Vec own = exponential(_mm512_sub_ps(scaled[v], most));
      const Vec weight = _mm512_maskz_mov_ps(lanes(visible - v * kLanes), own);
      Format<T>::store(weights_ + row * kColumns + v * kLanes, 0xffff, weight);
      total = _mm512_add_ps(total, weight);
    }
    total_[row] += _mm512_reduce_add_ps(total);
  }

  void shrink(long row, float best) {
    const Vec by = exponential(_mm512_set1_ps(best_[row] - best));
    for (long i = 0; i < width_; i += kLanes) {
      float* place = sums_ + row * width_ + i;
      _mm512_storeu_ps(place, _mm512_mul_ps(_mm512_loadu_ps(place), by));
    }
    total_[row] *= _mm512_cvtss_f32(by);
    best_[row] = best;
  }

  void finish(const QueryTile& tile, T* to) {
    for (long row = 0; row < tile.num_heads * tile.count * group_; ++row) {
      const long pair = row / group_, head = tile.head + pair / tile.count;
      T* place = to + (pair % tile.count * heads_ + head * group_ + row % group_) * dim_;
      const Vec total = _mm512_set1_ps(total_[row]);
      for (long i = 0; i < dim_; i += kLanes)
        Format<T>::store(place + i, lanes(dim_ - i), _mm512_div_ps(sums_at(row, i), total));
    }
  }

  // Sixteen sums of a row in the order of a head's elements.
  Vec sums_at(long row, long i) const {
    const float* sums = sums_ + row * width_;
    if constexpr (kPerUnit == 1) return _mm512_loadu_ps(sums + i);
    const float* both = sums + i / (2 * kLanes) * (2 * kLanes);
    const Vec low = _mm512_loadu_ps(both), high = _mm512_loadu_ps(both + kLanes);
    return i % (2 * kLanes) == 0 ? interleave<0>(low, high) : interleave<2>(low, high);
  }

  // Lane groups q and q + 1 of both, in turns.
  template <int q>
  static Vec interleave(Vec low, Vec high) {
    const Vec apart = _mm512_shuffle_f32x4(low, high, q | (q + 1) << 2 | q << 4 | (q + 1) << 6);
    return _mm512_shuffle_f32x4(apart, apart, 0 | 2 << 2 | 1 << 4 | 3 << 6);
  }

  const long heads_, kv_heads_, dim_, width_, depth_, group_;
  const float scale_;
  const T* places_[kColumns];
  const T* coming_[kColumns];
  Aligned<T> queries_;
  Aligned<Unit> keys_, values_;
  Aligned<float> scores_;
  Aligned<T> weights_;
  Aligned<float> sums_, best_, total_;
};

}  // namespace baton
