// Causal attention over the paged KV pool, for decodes and prefill chunks alike.
#pragma once

#include <cmath>
#include <cstring>
#include <memory>

#include "paged_kv.h"
#include "thread_pool.h"
#include "matmul_tile.h"
#include "tiles.h"

namespace baton {

constexpr long kQueryRows = 256;  // rows of a tile: enough to amortise transposing the keys
// Rows whose scores are computed and used while they are in the L1 cache: whole groups of rows that
// are multiplied at once.
constexpr long kScoredRows = kHasTiles ? 2 * kTileRows : 8 * kRowsAtOnce;

template <class T>
struct AlignedBuffer {
  explicit AlignedBuffer(long count)
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

// Tokens [first, first + count) of a row, and KV heads [head, head + num_heads), each with the
// queries of its group.
struct QueryTile {
  long row, first, count, head, num_heads, end;  // `end`: number of keys its last token attends to
};

// Cuts a step into tiles. A tile of many tokens has one KV head, since each key that is transposed
// serves them all. A tile of few tokens (a decode) has as many heads as possible while every thread
// gets work, since a token's heads are adjacent in memory. The tiles don't affect the result.
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
  // Tiles with the most work come first, so that no long tile begins when the others are done.
  std::stable_sort(tiles.begin(), tiles.end(), [](const QueryTile& a, const QueryTile& b) {
    return a.count * a.num_heads * a.end > b.count * b.num_heads * b.end;
  });
  return tiles;
}

constexpr long kNoWindow = 1L << 40;

// What distinguishes a layer's attention, and a row's: a token attends to its own and the `window` - 1
// tokens before it, and to the context's first `sink_tokens`; `sinks` [heads] are scores that take
// part in the softmax without a value (null: none), and have nothing to do with sink tokens.
template <class T>
struct AttentionRule {
  long window = kNoWindow;
  const T* sinks = nullptr;
  long sink_tokens = 0;

  // Returns the layer's rule for a row with a window of its own.
  AttentionRule of_row(const Batch& batch, long row) const {
    if (!batch.windows) return *this;
    return {std::min(window, long(batch.windows[2 * row + 1])), sinks,
            long(batch.windows[2 * row])};
  }
};

// The keys that a tile's tokens attend to: those before `sink_end`, and [lowest, end). They are read
// in tiles of 64 keys counted from the beginning of the context. Without windows of rows, `sink_end`
// is zero.
template <bool HasWindows>
struct KeySet {
  long sink_end, lowest, end;

  template <class T>
  KeySet(const Batch& batch, const QueryTile& tile, const AttentionRule<T>& rule)
      : sink_end(HasWindows ? std::min(rule.sink_tokens, tile.end) : 0),
        lowest(std::max(0L, batch.starts[tile.row] + tile.first - rule.window + 1)),
        end(tile.end) {}

  // Returns the first key of the first tile that is read.
  long first_tile() const { return tile_from(0); }

  // Returns the first key of the tile that is read after the one that begins at `key`; from `end` on
  // there is none.
  long tile_after(long key) const { return tile_from(key + kColumns); }

 private:
  long tile_from(long key) const {
    return HasWindows && key < sink_end ? key : std::max(key, lowest / kColumns * kColumns);
  }
};

// Softmax runs online in FP32 (Milakov and Gimelshein 2018), over tiles of 64 keys counted from
// the beginning of the context, so a query's sums and their order depend only on its own position.
// The sum of a row's weights is kept in sixteen lanes, which are added at the end.
// Keys that none of a tile's tokens attend to are taken as zeros, whatever is in the pool there, or
// are not read at all.
template <class T>
class Attention {
 public:
  Attention(long heads, long kv_heads, long head_dim, float scale)
      : heads_(heads),
        kv_heads_(kv_heads),
        dim_(head_dim),
        width_(ceil_div(head_dim, kColumns) * kColumns),
        depth_(head_dim / kPerUnit),
        stride_(kByTiles<T> ? whole_tiles(depth_) * kPerUnit : head_dim),
        group_(heads / kv_heads),
        scale_(scale * Format<T>::kLogarithm),
        queries_((rows() + kTileRows) * stride_),
        keys_(whole_tiles(depth_) * kColumns),
        values_(kColumns / kPerUnit * width_),
        query_columns_(kByTiles<T> ? kv_heads * whole_tiles(depth_) * kTileRows : 0),
        scores_(kScoredRows * kColumns),
        weights_(kScoredRows * kColumns),
        sums_(rows() * width_),
        row_max_(rows()),
        row_sums_(rows() * kLanes),
        prefetches_(kv_heads * kColumns) {}

  // Computes one tile. `qkv` [num_tokens][(heads + 2 kv_heads) * head_dim] has the queries; `to` is
  // [num_tokens][heads * head_dim]. `next` is the tile whose keys are prefetched at the end of this
  // one, or null.
  void attend(const Batch& batch, const QueryTile& tile, const QueryTile* next,
              const Pages<T>& pages, const AttentionRule<T>& rule, const T* qkv, T* to) {
    if (batch.windows) return attend_in_window(batch, tile, next, pages, rule, qkv, to);
    attend_keys<false>(batch, tile, next, pages, rule, qkv, to);
  }

 private:
  static constexpr long kPerUnit = Format<T>::kPerUnit;

  // The offset of a head from the first head of its tile, and of its values from its keys.
  struct HeadOffsets {
    long head, values;
  };

  // How much a score may exceed row_max_ before the sums are rescaled. Weights are 2^8 then at most
  // (in FP32 e^8), which costs no precision, and most rescaling is saved.
  static constexpr float kMostAbove = 8;

  // The keys [first, last) of 64 that a token attends to; those of the next token are one later.
  // Beside them, it attends to the keys before visible_sinks_ among the first `last`.
  struct KeyRange {
    long first, last;

    KeyRange after(long tokens) const { return {first + tokens, last + tokens}; }
  };

  // Maximum number of a tile's queries, which are [num_heads][count][group].
  long rows() const { return std::max(kQueryRows, group_); }

  // Not inlined, so that batches without windows have the same code as if there were none.
  [[gnu::noinline]] void attend_in_window(const Batch& batch, const QueryTile& tile,
                                          const QueryTile* next, const Pages<T>& pages,
                                          const AttentionRule<T>& rule, const T* qkv, T* to) {
    attend_keys<true>(batch, tile, next, pages, rule, qkv, to);
  }

  template <bool HasWindows>
  void attend_keys(const Batch& batch, const QueryTile& tile, const QueryTile* next,
                   const Pages<T>& pages, const AttentionRule<T>& layer, const T* qkv, T* to) {
    const AttentionRule<T> rule = HasWindows ? layer.of_row(batch, tile.row) : layer;
    const long first = batch.offsets[tile.row] + tile.first;
    const long start = batch.starts[tile.row] + tile.first;
    begin(tile, rule, qkv + first * (heads_ + 2 * kv_heads_) * dim_);
    const KeySet<HasWindows> keys(batch, tile, rule);
    locate(batch, tile, keys.first_tile(), keys, pages, key_addresses_);
    for (long key = keys.first_tile(), after; key < tile.end; key = after) {
      after = keys.tile_after(key);
      if (after < tile.end || !next) {
        locate(batch, tile, after, keys, pages, next_key_addresses_);
      } else {
        const AttentionRule<T> its_rule = HasWindows ? layer.of_row(batch, next->row) : layer;
        const KeySet<HasWindows> others(batch, *next, its_rule);
        locate(batch, *next, others.first_tile(), others, pages, next_key_addresses_);
      }
      // Tokens before `from`, and from `until` on, attend to none of these keys.
      const long from = std::max(0L, key - start);
      const long last = std::min(tile.count, key + kColumns - start + rule.window - 1);
      const long until = HasWindows && key < keys.sink_end ? tile.count : last;
      if (HasWindows) visible_sinks_ = keys.sink_end - key;
      list_prefetches(tile.num_heads);
      for (long head = 0; head < tile.num_heads; ++head) {
        head_prefetches_ = prefetches_.data() + head * kColumns;
        accumulate((head * tile.count + from) * group_, (until - from) * group_,
                   {head * dim_, pages.block_tokens * kv_heads_ * dim_},
                   {start + from + 1 - rule.window - key, start + from + 1 - key});
      }
      if (after < tile.end) std::copy_n(next_key_addresses_, kColumns, key_addresses_);
    }
    if (HasWindows) visible_sinks_ = 0;
    finish(tile, to + first * heads_ * dim_);
  }

  // A sink counts as a key that was seen before all others, and whose value is zero.
  void begin(const QueryTile& tile, const AttentionRule<T>& rule, const T* qkv) {
    const long num_rows = tile.num_heads * tile.count * group_;
    const long together = stride_ == dim_ ? group_ : 1;  // queries that are adjacent in both places
    for (long row = 0; row < num_rows; row += together) {
      const long pair = row / group_, head = (tile.head + pair / tile.count) * group_ + row % group_;
      std::memcpy(queries_ + row * stride_,
                  qkv + (pair % tile.count * (heads_ + 2 * kv_heads_) + head) * dim_,
                  sizeof(T) * together * dim_);
    }
    rows_of_head_ = tile.count * group_;
    if (kByTiles<T> && rows_of_head_ <= kTileRows) transpose_queries(tile.num_heads);
    std::fill_n(static_cast<float*>(row_max_), num_rows, -INFINITY);
    std::fill_n(static_cast<float*>(row_sums_), num_rows * kLanes, 0.0f);
    for (long row = 0; rule.sinks && row < num_rows; ++row) {
      row_max_[row] = first_lane(Format<T>::load(rule.sinks + head_of(tile, row), lanes(1))) *
                      Format<T>::kLogarithm;
      row_sums_[row * kLanes] = 1;
    }
    std::fill_n(static_cast<float*>(sums_), num_rows * width_, 0.0f);
  }

  // Returns the query head of a tile's row.
  long head_of(const QueryTile& tile, long row) const {
    return (tile.head + row / group_ / tile.count) * group_ + row % group_;
  }

  // Finds the addresses of 64 keys of a tile's context from `first` on; null for those that are not
  // among `keys`.
  template <bool HasWindows>
  static void locate(const Batch& batch, const QueryTile& tile, long first,
                     const KeySet<HasWindows>& keys, const Pages<T>& pages, const T** addresses) {
    const int64_t* table = batch.table(tile.row, pages.group);
    const bool has_sinks = HasWindows && first < keys.sink_end;
    const long lowest = has_sinks ? first : keys.lowest, end = keys.end;
    long block = first / pages.block_tokens, offset = first % pages.block_tokens;
    for (long i = 0; i < kColumns; ++i) {
      const bool is_read = first + i >= lowest && first + i < end;
      addresses[i] = is_read ? pages.keys(table[block], offset, tile.head) : nullptr;
      if (++offset == pages.block_tokens) {
        offset = 0;
        ++block;
      }
    }
    if (has_sinks)
      for (long key = keys.sink_end; key < std::min(keys.lowest, first + kColumns); ++key)
        addresses[key - first] = nullptr;
  }

  // Lists the addresses that are prefetched while the heads are computed one after the other. Each
  // head prefetches as much as it reads, but in memory order: all heads of a key together. Where
  // there is no key, an address that is cached already is used.
  void list_prefetches(long num_heads) {
    const T** to = prefetches_.data();
    for (long key = 0; key < kColumns; ++key) {
      const T* place =
          next_key_addresses_[key] ? next_key_addresses_[key] : static_cast<const T*>(queries_);
      for (long head = 0; head < num_heads; ++head) *to++ = place + head * dim_;
    }
  }

  // Adds the current tile of keys to `count` rows; their first token attends to `visible` of them.
  void accumulate(long first, long count, HeadOffsets offsets, KeyRange visible) {
    if constexpr (kByTiles<T>) return accumulate_many(first, count, offsets, visible);
    switch (count) {
      case 1:
        return accumulate_few<1>(first, offsets, visible);
      case 2:
        return accumulate_few<2>(first, offsets, visible);
      case 3:
        return accumulate_few<3>(first, offsets, visible);
      case 4:
        return accumulate_few<4>(first, offsets, visible);
      default:
        return accumulate_many(first, count, offsets, visible);
    }
  }

  void accumulate_many(long first, long count, HeadOffsets offsets, KeyRange visible) {
    const bool few = kByTiles<T> && rows_of_head_ <= kTileRows;  // fewer than kScoredRows
    if (few) score_keys(first, count, offsets);
    else read_keys(offsets);
    read_values(offsets);
    for (long from = 0; from < count; from += kScoredRows) {
      const long some = std::min(kScoredRows, count - from), row = first + from;
      if (!few)
        multiply_rows(some, queries_ + row * stride_, stride_, keys_, kColumns, depth_, scores_,
                      kColumns, true);
      KeyRange own = visible.after(from / group_);
      for (long i = 0, next = group_ - from % group_; i < some; ++i, --next) {
        if (next == 0) own = own.after(1), next = group_;
        update_softmax(row + i, scores_ + i * kColumns, weights_ + i * kColumns, own);
      }
      for (long column = 0; column < width_; column += kColumns)
        multiply_rows(some, weights_, kColumns, values_ + column, width_, kColumns / kPerUnit,
                      sums_ + row * width_ + column, width_, false);
    }
  }

  // to[count][64] = rows[count][stride] * columns[depth][64], added to what is there unless `fresh`.
  static void multiply_rows(long count, const T* rows, long stride, const Unit* columns,
                            long column_stride, long depth, float* to, long to_stride,
                            bool fresh) {
    const Unit* units = reinterpret_cast<const Unit*>(rows);
    if (kByTiles<T>)
      multiply_tiles(count, adjacent_rows(units, stride / kPerUnit),
                     adjacent_columns(columns, column_stride), ceil_div(depth, kTileUnits), to,
                     to_stride, fresh);
    else
      multiply<T>(count, units, stride / kPerUnit, columns, column_stride, depth, to, to_stride,
                  fresh);
  }

  // Finds the current keys of a head, and the values; null where there is no key.
  void find(HeadOffsets offsets, const T** keys, const T** values) const {
    for (long i = 0; i < kColumns; ++i) {
      const T* key = key_addresses_[i] ? key_addresses_[i] + offsets.head : nullptr;
      if (keys) keys[i] = key;
      if (values) values[i] = key ? key + offsets.values : nullptr;
    }
  }

  // Transposes the current keys; meanwhile the addresses in prefetches_ are prefetched.
  void read_keys(HeadOffsets offsets) {
    const T* keys[kColumns];
    find(offsets, keys, nullptr);
    transpose_rows(reinterpret_cast<const Unit* const*>(keys), depth_, keys_,
                   reinterpret_cast<const Unit* const*>(head_prefetches_));
    if (kByTiles<T>)  // score_keys() may have left keys there
      std::fill(keys_ + depth_ * kColumns, keys_ + whole_tiles(depth_) * kColumns, 0);
  }

  // Copies the current values; meanwhile those that belong to prefetches_ are prefetched.
  void read_values(HeadOffsets offsets) {
    const T* values[kColumns];
    find(offsets, nullptr, values);
    for (long i = 0; i < kColumns; i += kPerUnit)
      for (long at = 0; at < dim_; at += kLanes * kPerUnit) {
        interleave_values(values + i, at, values_ + i / kPerUnit * width_ + at);
        for (long next = i; next < i + kPerUnit; ++next)
          prefetch<kSecondLevel>(head_prefetches_[next] + offsets.values + at);
      }
  }

  // Transposes the queries of each head, of which there are sixteen at most, to
  // query_columns_ [num_heads][depth][16].
  void transpose_queries(long num_heads) {
    for (long head = 0; head < num_heads; ++head)
      for (long step = 0; step < depth_; step += kTileUnits) {
        Words block[kLanes];
        for (long row = 0; row < kLanes; ++row) {
          const T* query = queries_ + (head * rows_of_head_ + row) * stride_;
          const Unit* units = reinterpret_cast<const Unit*>(query) + step;
          block[row] = row < rows_of_head_ ? load_words(units) : zero_words();
        }
        transpose(block);
        Unit* to = query_columns_ + (head * whole_tiles(depth_) + step) * kTileRows;
        for (long unit = 0; unit < kTileUnits; ++unit)
          store_words(to + unit * kTileRows, block[unit]);
      }
  }

  // Computes the scores of a head's few queries by tiles. The keys take the place of the rows,
  // because transposing the queries and their scores is less work than transposing the keys. A
  // product of two numbers, and so each sum, has the same bits either way.
  void score_keys(long first, long count, HeadOffsets offsets) {
    const long head = first / rows_of_head_, size = stride_ / kPerUnit;
    const T* keys[kColumns];
    find(offsets, keys, nullptr);
    for (long key = 0; key < kColumns; ++key)
      for (long step = 0; step < depth_; step += kTileUnits) {
        const Unit* units = reinterpret_cast<const Unit*>(keys[key]) + step;
        store_words(keys_ + key * size + step,
                    keys[key] ? load_words(units, lanes(depth_ - step)) : zero_words());
        prefetch<kSecondLevel>(reinterpret_cast<const Unit*>(head_prefetches_[key]) + step);
      }
    alignas(64) float transposed[kColumns * kTileRows];
    for (long key = 0; key < kColumns; key += 2 * kTileRows)
      multiply_tiles_at_once<2, 1>(adjacent_rows(keys_ + key * size, size),
                                   adjacent_columns(query_columns_ + head * size * kTileRows,
                                                    kTileRows),
                                   size / kTileUnits, transposed + key * kTileRows, kTileRows, true);
    for (long key = 0; key < kColumns; key += kLanes) {
      Words block[kLanes];
      for (long i = 0; i < kLanes; ++i) block[i] = load_words(transposed + (key + i) * kTileRows);
      transpose(block);
      for (long row = first; row < first + count; ++row)
        store_words(scores_ + (row - first) * kColumns + key, block[row - head * rows_of_head_]);
    }
  }

  // Copies values to values_ [64 / kPerUnit][width], where a unit has adjacent tokens. In BF16
  // sixteen pairs are in the order of the unpack instructions; finish() reorders the sums.
  void interleave_values(const T* const* rows, long at, Unit* to) {
    if constexpr (kPerUnit == 1) {
      const Lanes inside = lanes(dim_ - at);
      store_words(to, rows[0] ? as_words(load(rows[0] + at, inside)) : zero_words());
    } else {
      const auto halves = [&](const T* row) {
        return row ? load_halves(&row[at].bits, dim_ - at) : zero_words();
      };
      const Words first = halves(rows[0]), second = halves(rows[1]);
      store_words(to, unpack_low(first, second));
      store_words(to + kLanes, unpack_high(first, second));
    }
  }

  // Gives the same bits as accumulate_many(), for R rows, whose sums stay in registers if there are
  // enough registers. Keys and values pass through registers, too, and are not stored in buffers.
  template <long R>
  void accumulate_few(long first, HeadOffsets offsets, KeyRange visible) {
    if (vectors_at_once(R) * kLanes < kColumns) return accumulate_many(first, R, offsets, visible);
    // Successive blocks have different sums, so that none waits for the previous one.
    for (long step = 0; step < depth_; step += kLanes)
      for (long i = 0; i < kColumns; i += kLanes) accumulate_scores<R>(first, offsets, i, step);
    for (long row = 0; row < R; ++row)
      update_softmax(first + row, scores_ + row * kColumns, weights_ + row * kColumns,
                     visible.after(row / group_));
    for (long column = 0; column < width_; column += kColumns)
      accumulate_values<R>(first, offsets, column);
  }

  // Adds to the scores of keys [key, key + 16) over units of depth [step, step + 16).
  template <long R>
  void accumulate_scores(long first, HeadOffsets offsets, long key, long step) {
    const Unit* queries = reinterpret_cast<const Unit*>(queries_ + first * dim_) + step;
    float* scores = scores_ + key;
    const Lanes inside = lanes(depth_ - step);
    Words block[kLanes];
#pragma GCC unroll 16
    for (long k = 0; k < kLanes; ++k) {
      const T *own = key_addresses_[key + k], *prefetch_at = head_prefetches_[key + k];
      const long at = offsets.head + step * kPerUnit;
      block[k] = own ? load_words(reinterpret_cast<const Unit*>(own + at), inside) : zero_words();
      prefetch<kFirstLevel>(prefetch_at + step * kPerUnit);
    }
    transpose(block);
    Vec sum[R];
#pragma GCC unroll 4
    for (long r = 0; r < R; ++r) sum[r] = step == 0 ? zeros() : load(scores + r * kColumns);
#pragma GCC unroll 16
    for (long s = 0; s < kLanes; ++s) {
      if (s >= depth_ - step) break;
#pragma GCC unroll 4
      for (long r = 0; r < R; ++r)
        sum[r] = Format<T>::multiply_add(sum[r], broadcast_word(queries[r * depth_ + s]), block[s]);
    }
#pragma GCC unroll 4
    for (long r = 0; r < R; ++r) store(scores + r * kColumns, sum[r]);
  }

  // Adds to the sums of elements [column, column + 64).
  template <long R>
  void accumulate_values(long first, HeadOffsets offsets, long column) {
    constexpr long kVectors = kColumns / kLanes;
    float* sums = sums_ + first * width_ + column;
    const Unit* weights = reinterpret_cast<const Unit*>(static_cast<const T*>(weights_));
    Vec sum[R][kVectors];
#pragma GCC unroll 4
    for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) sum[r][v] = load(sums + r * width_ + v * kLanes);
    for (long i = 0; i < kColumns; i += kPerUnit) {
      const T* values[kPerUnit];
      for (long k = 0; k < kPerUnit; ++k) {
        const T *own = key_addresses_[i + k], *prefetch_at = head_prefetches_[i + k];
        const long at = offsets.values + column;
        values[k] = own ? own + offsets.values + offsets.head : nullptr;
        for (long next = 0; next < kColumns * static_cast<long>(sizeof(T)); next += 64)
          prefetch<kFirstLevel>(reinterpret_cast<const char*>(prefetch_at + at) + next);
      }
      Unit interleaved[kColumns];
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; v += kPerUnit)
        interleave_values(values, column + v * kLanes, interleaved + v * kLanes);
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) {
        const Words value = load_words(interleaved + v * kLanes);
#pragma GCC unroll 4
        for (long r = 0; r < R; ++r)
          sum[r][v] = Format<T>::multiply_add(
              sum[r][v], broadcast_word(weights[r * (kColumns / kPerUnit) + i / kPerUnit]), value);
      }
    }
#pragma GCC unroll 4
    for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) store(sums + r * width_ + v * kLanes, sum[r][v]);
  }

  // Turns a row's scores [64] into weights. If a score exceeds row_max_ by more than kMostAbove,
  // earlier sums are rescaled.
  void update_softmax(long row, const float* scores, T* weights, KeyRange visible) {
    if (visible.first <= 0 && visible.last >= kColumns)
      update_softmax<true, false>(row, scores, weights, visible);
    else if (visible.first <= 0 || visible_sinks_ <= 0)
      update_softmax<false, false>(row, scores, weights, visible);
    else update_softmax_with_sinks(row, scores, weights, visible);
  }

  // Not inlined, so that rows without sink tokens have the same code as if there were none.
  [[gnu::noinline]] void update_softmax_with_sinks(long row, const float* scores, T* weights,
                                                   KeyRange visible) {
    update_softmax<false, true>(row, scores, weights, visible);
  }

  // The powers of scores that aren't visible are computed, too, and not used: minus infinity in
  // their place would have a power that some processors compute slowly.
  template <bool AllVisible, bool HasSinks>
  void update_softmax(long row, const float* scores, T* weights, KeyRange visible) {
    const auto visible_or = [&](Vec other, Vec own, long v) {
      if (AllVisible) return own;
      own = blend(lanes(visible.last - v * kLanes), own, other);
      if (visible.first <= v * kLanes) return own;
      const Vec before = HasSinks ? blend(lanes(visible_sinks_ - v * kLanes), own, other) : other;
      return blend(lanes(visible.first - v * kLanes), before, own);
    };
    const Vec scale = broadcast(scale_), none = broadcast(-INFINITY);
    Vec scaled[kColumns / kLanes], highest = none;
    for (long v = 0; v < kColumns / kLanes; ++v) {
      scaled[v] = load(scores + v * kLanes) * scale;
      highest = max_lanes(highest, visible_or(none, scaled[v], v));
    }
    if (any_above(highest, broadcast(row_max_[row] + kMostAbove)))
      rescale(row, reduce_max(highest));
    const Vec most = broadcast(row_max_[row]);
    Vec total = load(row_sums_ + row * kLanes);
    for (long v = 0; v < kColumns / kLanes; v += 2) {
      const Vec one = visible_or(zeros(), Format<T>::small_power(scaled[v] - most), v);
      const Vec other = visible_or(zeros(), Format<T>::small_power(scaled[v + 1] - most), v + 1);
      Format<T>::store_two(weights + v * kLanes, one, other);
      total = total + one + other;
    }
    store(row_sums_ + row * kLanes, total);
  }

  void rescale(long row, float best) {
    const Vec by = Format<T>::power(broadcast(row_max_[row] - best));
    for (long i = 0; i < width_; i += kLanes) {
      float* place = sums_ + row * width_ + i;
      store(place, load(place) * by);
    }
    float* sums = row_sums_ + row * kLanes;
    store(sums, load(sums) * by);
    row_max_[row] = best;
  }

  void finish(const QueryTile& tile, T* to) {
    for (long row = 0; row < tile.num_heads * tile.count * group_; ++row) {
      T* place = to + (row / group_ % tile.count * heads_ + head_of(tile, row)) * dim_;
      const Vec total = broadcast(reduce_sum(load(row_sums_ + row * kLanes)));
      for (long i = 0; i < dim_; i += kLanes)
        Format<T>::store(place + i, lanes(dim_ - i), sums_at(row, i) / total);
    }
  }

  // Returns sixteen sums of a row in the order of the head's elements.
  Vec sums_at(long row, long i) const {
    const float* sums = sums_ + row * width_;
    if constexpr (kPerUnit == 1) return load(sums + i);
    const float* both = sums + i / (2 * kLanes) * (2 * kLanes);
    const Vec low = load(both), high = load(both + kLanes);
    return i % (2 * kLanes) == 0 ? interleave_fours<0>(low, high) : interleave_fours<2>(low, high);
  }

  const long heads_, kv_heads_, dim_, width_, depth_, stride_, group_;
  const float scale_;
  const T* key_addresses_[kColumns];
  const T* next_key_addresses_[kColumns];
  AlignedBuffer<T> queries_;
  AlignedBuffer<Unit> keys_, values_, query_columns_;
  AlignedBuffer<float> scores_;
  AlignedBuffer<T> weights_;
  AlignedBuffer<float> sums_, row_max_, row_sums_;
  long rows_of_head_ = 0;                      // of the current tile
  long visible_sinks_ = 0;                     // in the current tile of keys
  std::vector<const T*> prefetches_;           // [num_heads][64]
  const T* const* head_prefetches_ = nullptr;  // the current head's part of prefetches_
};

}  // namespace baton
