// Products with a weight matrix, which is packed so that a tile reads it sequentially.
#pragma once

#include <type_traits>

#include "quantize.h"
#include "thread_pool.h"
#include "tiles.h"

namespace baton {

constexpr long kRowBlock = 192;    // rows that share a panel while it is in the cache
constexpr long kSharedUnits = 256 * 1024;  // 1 MiB: more rows don't fit into an L2 cache
constexpr long kHalf = kColumns / 2;

// Prefetch distances, in units: 4 KiB for few rows (memory-bound), and a block of depth for more
// rows, which compute on one block while the next is fetched to the L2 cache (the current block
// fills the L1 cache).
constexpr long kAheadOfFew = 16 * kColumns;
constexpr long kAheadOfMany = kDepthBlock * kColumns;
constexpr long kAheadOfFewTiles = 2 * kTileUnits * kColumns;

// Products by tiles share a panel among this many rows, if they fit into this many packed units,
// 1 MiB: half of the L2 cache of every processor that has AMX. Weights that must be decoded are
// decoded 512 deep at a time.
constexpr long kTileRowBlock = 512;
constexpr long kPackedUnits = 256 * 1024;
constexpr long kTileSteps = 16;

// W[outs][ins] as panels of 64 outputs, each [ins / kPerUnit][64] units; the last one is padded
// with zeros. For products by tiles a panel consists of two halves of 32 outputs, each
// [steps of sixteen units][2 tiles][16 units][16]: a tile is contiguous, and so is a half, since
// tiles at a power of two from each other would compete for a part of the L1 cache. A panel of a
// `gated` pair (gate above up, `outs` rows each) has 32 rows of the gate and the same 32 rows of up. If weights are quantized, a panel consists of codes and scales.
template <class T>
struct Matrix {
  const void* packed;
  long outs, ins;
  bool gated = false;
  Coding coding = kPlain;

  long num_panels() const { return ceil_div(outs, gated ? kHalf : kColumns); }
  long depth() const { return ins / Format<T>::kPerUnit; }
  long panel_bytes() const {
    if (coding == kInt8) return baton::panel_bytes<Int8>(ins / 2);
    if (coding == kInt4) return baton::panel_bytes<Int4>(ins / 2);
    const long units = kByTiles<T> ? whole_tiles(depth()) : depth();
    return units * kColumns * static_cast<long>(sizeof(Unit));
  }
  long bytes() const { return num_panels() * panel_bytes(); }
  const uint8_t* panel(long index) const {
    return static_cast<const uint8_t*>(packed) + index * panel_bytes();
  }
  // Returns the row of W at this place, or -1 for padding.
  long row_at(long panel, long column) const {
    if (!gated) return panel * kColumns + column < outs ? panel * kColumns + column : -1;
    const long row = panel * kHalf + column % kHalf;
    if (row >= outs) return -1;
    return column < kHalf ? row : outs + row;
  }
};

// The source of a matrix: parts [counts[i]][ins], stacked along the rows, each of its own kind and at
// its own address.
struct WeightSource {
  const void* const* parts;
  const int64_t *counts, *kinds;

  WeightRow row(long row, long ins) const {
    long part = 0;
    for (; row >= counts[part]; ++part) row -= counts[part];
    const Kind kind = static_cast<Kind>(kinds[part]);
    return {static_cast<const char*>(parts[part]) + row * row_bytes(kind, ins), kind};
  }
};

// The tiles of a packed panel of `steps` steps.
constexpr long kTileSize = kTileUnits * kTileUnits;
inline TileColumns packed_columns(const Unit* panel, long steps, long half) {
  return {panel + half * steps * 2 * kTileSize, kTileUnits, 2 * kTileSize, kTileSize};
}

// Packs 64 rows of `depth` units as tiles; a null row gives zeros.
inline void pack_tiles(const Unit* const rows[kColumns], long depth, Unit* to) {
  const long steps = ceil_div(depth, kTileUnits);
  for (long tile = 0; tile < kColumns / kTileUnits; ++tile)
    for (long step = 0; step < steps; ++step) {
      const Lanes inside = lanes(depth - step * kTileUnits);
      Words block[kLanes];
      for (long r = 0; r < kLanes; ++r) {
        const Unit* row = rows[tile * kTileUnits + r];
        block[r] = row ? load_words(row + step * kTileUnits, inside) : zero_words();
      }
      transpose(block);
      Unit* place = to + ((tile / 2 * steps + step) * 2 + tile % 2) * kTileSize;
      for (long unit = 0; unit < kTileUnits; ++unit)
        store_words(place + unit * kTileUnits, block[unit]);
    }
}

// Packs one panel of rows in T, or in blocks for Int4. Returns an error if weights can't be quantized,
// else null.
template <class T>
const char* pack_panel(const WeightRow rows[kColumns], const Matrix<T>& matrix, uint8_t* to) {
  if (matrix.coding == kInt8) return encode_panel<Int8, T>(rows, matrix.ins, to);
  if (matrix.coding == kInt4) return encode_panel<Int4, T>(rows, matrix.ins, to);
  const Unit* units[kColumns];
  for (long column = 0; column < kColumns; ++column)
    units[column] = static_cast<const Unit*>(rows[column].at);
  if (kByTiles<T>) pack_tiles(units, matrix.depth(), reinterpret_cast<Unit*>(to));
  else transpose_rows(units, matrix.depth(), reinterpret_cast<Unit*>(to));
  return nullptr;
}

// Packs a matrix. `scratch` is this thread's own, [64][ins], for rows in another format. Returns an
// error as pack_panel() does.
template <class T>
const char* pack(ThreadPool& threads, const WeightSource& from, const Matrix<T>& matrix, T* scratch,
                 void* to) {
  const char* error = nullptr;
  threads.parallel_for(matrix.num_panels(), [&](long panel) {
    WeightRow rows[kColumns];
    for (long column = 0; column < kColumns; ++column) {
      const long index = matrix.row_at(panel, column);
      if (index < 0) continue;
      WeightRow& row = rows[column] = from.row(index, matrix.ins);
      if (row.kind != Format<T>::kKind && row.kind != kQ4_1Blocks)
        row.at = convert(row.at, row.kind, matrix.ins, scratch + column * matrix.ins);
    }
    const char* found =
        pack_panel(rows, matrix, static_cast<uint8_t*>(to) + panel * matrix.panel_bytes());
    if (found) error = found;
  });
  return error;
}

// Unpacks (and decodes) a row of W, from a matrix that is not gated. Used for embeddings that are
// tied to the head.
template <class T>
void unpack_row(const Matrix<T>& matrix, long row, T* to) {
  const uint8_t* panel = matrix.panel(row / kColumns);
  const long column = row % kColumns;
  if (matrix.coding == kInt8) return decode_row<Int8>(panel, column, matrix.ins, to);
  if (matrix.coding == kInt4) return decode_row<Int4>(panel, column, matrix.ins, to);
  const Unit* from = reinterpret_cast<const Unit*>(panel) + column;
  long stride = kColumns, step_stride = kTileUnits * kColumns;
  if (kByTiles<T>) {
    const long tile = column / kTileUnits, steps = ceil_div(matrix.depth(), kTileUnits);
    const TileColumns tiles = packed_columns(reinterpret_cast<const Unit*>(panel), steps, tile / 2);
    from = tiles.from_tile(tile % 2).first + column % kTileUnits;
    stride = tiles.unit_stride, step_stride = tiles.step_stride;
  }
  for (long unit = 0; unit < matrix.depth(); ++unit)
    reinterpret_cast<Unit*>(to)[unit] =
        from[unit / kTileUnits * step_stride + unit % kTileUnits * stride];
}

// Computes sums[num_rows][64] for a panel. `columns` must hold a block of depth; `group_sums` are
// those of the rows, for Int4.
template <class T>
void multiply_panel(long num_rows, const Unit* rows, const Matrix<T>& matrix, const uint8_t* panel,
                    const float* group_sums, float* sums, Unit* columns) {
  const long depth = matrix.depth();
  if (matrix.coding == kInt8)
    return multiply_coded<T, Int8>(num_rows, rows, panel, depth, group_sums, sums, columns);
  if (matrix.coding == kInt4)
    return multiply_coded<T, Int4>(num_rows, rows, panel, depth, group_sums, sums, columns);
  const Unit* units = reinterpret_cast<const Unit*>(panel);
  if (num_rows <= kRowsAtOnce && vectors_at_once(num_rows) * kLanes == kColumns)
    return multiply<T, kAheadOfFew>(num_rows, rows, depth, units, kColumns, depth, sums, kColumns,
                                    true);
  for (long step = 0; step < depth; step += kDepthBlock)
    multiply<T, kAheadOfMany>(num_rows, rows + step, depth, units + step * kColumns, kColumns,
                              std::min(kDepthBlock, depth - step), sums, kColumns, step == 0);
}

// Int4 stays with vectors, because a tile can't scale its sums every 32 of depth.
template <class T>
bool multiplies_by_tiles(const Matrix<T>& matrix) {
  return kByTiles<T> && matrix.coding != kInt4;
}

// The largest number of rows of `depth` units that share a panel.
inline long tile_row_block(long depth) {
  constexpr long kTogether = 2 * kTileRows;
  const long fit = kPackedUnits / whole_tiles(depth) / kTogether * kTogether;
  return std::clamp(fit, kTogether, kTileRowBlock);
}

// The parts of a thread's scratch memory: sums, decoded weights, and what is computed once for a block
// of rows: the rows packed for tiles, or the sums of their Int4 groups.
struct MatmulScratch {
  static constexpr long kSums = (kHasTiles ? kTileRowBlock : kRowBlock) * kColumns;
  static constexpr long kWeights =
      (kHasTiles ? std::max(kDepthBlock, kTileSteps * kTileUnits) : kDepthBlock) * kColumns;

  explicit MatmulScratch(float* scratch)
      : sums(scratch),
        columns(reinterpret_cast<Unit*>(scratch + kSums)),
        rows(columns + kWeights) {}

  float* sums;
  Unit *columns, *rows;
};

// Returns the size of a thread's scratch memory for up to num_rows rows of up to `ins` inputs.
template <class T>
long scratch_size(long num_rows, long ins) {
  constexpr long kParts = MatmulScratch::kSums + MatmulScratch::kWeights;
  const long depth = ceil_div(ins, Format<T>::kPerUnit);
  if (!kByTiles<T>) return kParts + std::min(num_rows, kRowBlock) * num_groups<T>(depth);
  return kParts + std::min(whole_tiles(num_rows) * whole_tiles(depth),
                           std::max(kPackedUnits, 2 * kTileRows * whole_tiles(depth)));
}

// Decodes `count` units of depth of an Int8 panel from unit `first` on, and fills the last step up
// with zeros.
inline const Unit* decode_int8_steps(const uint8_t* panel, long first, long count, Unit* to) {
  const uint8_t* line = panel + Int8::kHeaderBytes + first * Int8::kLineBytes;
  decode_int8<Bf16>(line, count, to);
  if (const long rest = count % kTileUnits)
    std::memset(to + count * kColumns, 0, sizeof(Unit) * (kTileUnits - rest) * kColumns);
  return to;
}

// A panel is prefetched while it is used by few rows, and the next one while the current one is used
// by many. The products with a panel are a call for each of its halves and each two tiles of rows.
inline TilePrefetch prefetch_panel(const Unit* panel, long steps, long num_rows) {
  constexpr long kLines = kTileUnits * kColumns / kLanes;  // of a step
  if (num_rows <= kTileRows) return {panel + kAheadOfFewTiles, kLines / 2, true};
  const long calls = 2 * ceil_div(num_rows, 2 * kTileRows);
  return {panel + steps * kLines * kLanes, ceil_div(kLines, calls), false};
}

// Computes sums[num_rows][64] for a panel by tiles, from packed rows, and calls finish(row, sums) for
// each row as soon as its sums are complete.
template <class T, class Finish>
void multiply_panel_by_tiles(long num_rows, const Unit* packed, const Matrix<T>& matrix,
                             const uint8_t* panel, const MatmulScratch& scratch, Finish&& finish) {
  constexpr long kTogether = 2 * kTileRows;
  const long depth = matrix.depth(), steps = ceil_div(depth, kTileUnits);
  const bool plain = matrix.coding == kPlain;
  const Unit* units = reinterpret_cast<const Unit*>(panel);
  const TileRows rows = packed_rows(packed, steps);
  TilePrefetch ahead = plain ? prefetch_panel(units, steps, num_rows) : TilePrefetch{};
  for (long step = 0, count; step < steps; step += count) {
    count = plain ? steps : std::min(kTileSteps, steps - step);
    const long first = step * kTileUnits;
    const Unit* decoded = plain ? nullptr
                                : decode_int8_steps(panel, first,
                                                    std::min(count * kTileUnits, depth - first),
                                                    scratch.columns);
    for (long row = 0; row < num_rows; row += kTogether) {
      const long some = std::min(kTogether, num_rows - row);
      // Sums that are complete after one pass all use the same place, which stays in the L1 cache.
      float* sums = scratch.sums + (count < steps ? row * kColumns : 0);
      const TileRows own = rows.from_row(row).from_step(step);
      for (long half = 0; half < 2; ++half, ahead = ahead.after(count)) {
        const TileColumns columns =
            plain ? packed_columns(units, steps, half)
                  : adjacent_columns(decoded + half * kHalf, kColumns);
        multiply_half(some, own, columns, count, sums + half * kHalf, step == 0, ahead);
      }
      if (step + count < steps) continue;
      if (!plain) scale_int8(panel, some, sums);
      for (long i = 0; i < some; ++i) finish(row + i, sums + i * kColumns);
    }
  }
}

// How the products with a matrix are divided into tasks, each with a panel and a block of rows.
template <class T>
struct Tasks {
  Tasks(long num_rows, const Matrix<T>& matrix, long threads = 1)
      : num_rows(num_rows),
        panels(matrix.num_panels()),
        by_tiles(multiplies_by_tiles(matrix)),
        by_rows(by_tiles || matrix.coding == kInt4 || num_rows * matrix.depth() > kSharedUnits),
        row_block(by_tiles ? equal_blocks(matrix.depth(), threads) : kRowBlock),
        blocks(ceil_div(num_rows, row_block)) {}

  long count() const { return panels * blocks; }
  long block(long task) const { return by_rows ? task / panels : task % blocks; }
  long panel(long task) const { return by_rows ? task % panels : task / blocks; }
  long first_row(long task) const { return block(task) * row_block; }
  long rows(long task) const { return std::min(row_block, num_rows - first_row(task)); }

  const long num_rows, panels;
  // By rows, all panels use a block of rows before the next one: the block stays in the L2 cache,
  // where all rows together would not, and its Int4 groups are summed only once. Otherwise all blocks
  // use a panel before the next one.
  const bool by_tiles, by_rows;
  const long row_block, blocks;

 private:
  // Cuts the rows into blocks of about the same size: no larger than tile_row_block(), and so many
  // that every thread gets work, if there are enough rows.
  long equal_blocks(long depth, long threads) const {
    const long fewest = ceil_div(num_rows, tile_row_block(depth));
    const long wanted = threads > 1 ? ceil_div(2 * threads, panels) : 1;
    const long size = ceil_div(num_rows, std::max(fewest, wanted));
    return ceil_div(std::max(size, 1L), 2 * kTileRows) * (2 * kTileRows);
  }
};

// Computes one task of x[num_rows][ins] * W transposed and calls finish(row, panel, sums) for each
// of its rows, with 64 sums. `packed_block` is the block of rows whose form for tiles, or the sums of
// whose groups, `scratch` holds, or -1; `scratch` is this thread's own, of scratch_size<T>() elements.
template <class T, class Finish>
void matmul_task(const T* x, const Matrix<T>& matrix, const Tasks<T>& tasks, long task,
                 long& packed_block, float* scratch, Finish&& finish) {
  const long first = tasks.first_row(task), count = tasks.rows(task), panel = tasks.panel(task);
  const Unit* rows = reinterpret_cast<const Unit*>(x) + first * matrix.depth();
  const MatmulScratch parts(scratch);
  if (tasks.by_tiles) {
    if (packed_block != tasks.block(task)) pack_rows(rows, count, matrix.depth(), parts.rows);
    packed_block = tasks.block(task);
    multiply_panel_by_tiles(
        count, parts.rows, matrix, matrix.panel(panel), parts,
        [&](long row, const float* sums) { finish(first + row, panel, sums); });
  } else {
    float* group_sums = reinterpret_cast<float*>(parts.rows);
    if (matrix.coding == kInt4 && packed_block != tasks.block(task))
      sum_groups<T>(rows, count, matrix.depth(), group_sums);
    packed_block = tasks.block(task);
    multiply_panel(count, rows, matrix, matrix.panel(panel), group_sums, parts.sums, parts.columns);
    for (long row = 0; row < count; ++row) finish(first + row, panel, parts.sums + row * kColumns);
  }
}

// Computes x[num_rows][ins] * W transposed and calls finish(row, panel, sums) for every row and
// panel, with 64 sums. All threads of the pool call this; `scratch` is this thread's own, of
// scratch_size<T>() elements.
template <class T, class Finish>
void matmul(ThreadPool& threads, const T* x, long num_rows, const Matrix<T>& matrix, float* scratch,
            Finish&& finish) {
  const Tasks<T> tasks(num_rows, matrix, threads.size());
  long packed_block = -1;
  threads.parallel_for(tasks.count(), [&](long task) {
    matmul_task(x, matrix, tasks, task, packed_block, scratch, finish);
  });
}

// Functions that store 64 sums. Each rounds where transformers' modules do.

// to[row] = sums (+ bias).
template <class T>
struct StoreOutput {
  T* to;
  long outs;
  const T* bias = nullptr;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      Vec value = load(sums + c);
      if (bias) value = value + Format<T>::load(bias + at, inside);
      Format<T>::store(to + row * outs + at, inside, value);
    }
  }
};

// to[row] += sums (+ bias): adds to the residual.
template <class T>
struct AddToResidual {
  T* to;
  long outs;
  const T* bias = nullptr;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      T* place = to + row * outs + at;
      Vec value = load(sums + c);
      if (bias) value = value + Format<T>::load(bias + at, inside);
      value = Format<T>::rounded(value);
      Format<T>::store(place, inside, Format<T>::load(place, inside) + value);
    }
  }
};

// to[row] = sums in FP32, but rounded to the format of the computation: logits.
template <class T>
struct StoreLogits {
  float* to;
  long outs;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kColumns; c += kLanes) {
      const long at = panel * kColumns + c;
      const Vec value = Format<T>::rounded(load(sums + c));
      store(to + row * outs + at, lanes(outs - at), value);
    }
  }
};

// The values must equal those in baton/engine/native/library.py.
enum Activation { kSilu = 0, kGeluTanh = 1 };

// SiLU, or GELU in its approximation by tanh (Hendrycks and Gimpel 2016), which is x / (1 + e^-2y)
// for y = sqrt(2 / pi) (x + 0.044715 x^3).
template <class T>
inline Vec activated(Activation activation, Vec x) {
  Vec exponent = x;
  if (activation == kGeluTanh) {
    const Vec cubic = fma(x * x * x, broadcast(0.044715f), x);
    exponent = cubic * broadcast(1.59576912160573071176f);
  }
  return x / (broadcast(1.0f) + Format<T>::power(exponent * broadcast(-Format<T>::kLogarithm)));
}

// to[row] = activated(gate) * up, for a gated matrix; `bias` has the gates' and then the ups'.
template <class T>
struct StoreGated {
  T* to;
  long outs;
  Activation activation = kSilu;
  const T* bias = nullptr;

  void operator()(long row, long panel, const float* sums) const {
    for (long c = 0; c < kHalf; c += kLanes) {
      const long at = panel * kHalf + c;
      const Lanes inside = lanes(outs - at);
      if (!inside) return;
      Vec gate = load(sums + c), up = load(sums + kHalf + c);
      if (bias) {
        gate = gate + Format<T>::load(bias + at, inside);
        up = up + Format<T>::load(bias + outs + at, inside);
      }
      gate = Format<T>::rounded(gate);
      up = Format<T>::rounded(up);
      const Vec own = Format<T>::rounded(activated<T>(activation, gate));
      Format<T>::store(to + row * outs + at, inside, own * up);
    }
  }
};

}  // namespace baton
