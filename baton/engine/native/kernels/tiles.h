// Products of BF16 numbers by tiles of sixteen rows, sixteen columns and 32 of depth.
//
// A sum runs over its depth in steps of 32, in the order that AMX defines, and each row of a tile is
// by itself. So a row's bits don't depend on the number of rows, on the other rows, or on the
// tiles' places; and a depth or a row that is filled up with zeros changes nothing.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>
#include <utility>

#include "number_formats.h"
#ifdef BATON_AMX
#include "tiles_amx.h"
#else
#include "tiles_emulated.h"
#endif

namespace baton {

template <class T>
constexpr bool kByTiles = kHasTiles && std::is_same<T, Bf16>::value;

constexpr long kTileRows = 16;
constexpr long kTileUnits = 16;  // units of depth in a step, and columns of a tile

inline long whole_tiles(long count) { return ceil_div(count, 16) * 16; }

// The rows of a product. All distances are in units: between rows, between steps of a row, and
// between tiles of sixteen rows. All sixteen rows of the last tile are read, and the whole of the
// last step.
struct TileRows {
  const Unit* first;
  long row_stride, step_stride, tile_stride;

  TileRows from_step(long step) const {
    return {first + step * step_stride, row_stride, step_stride, tile_stride};
  }
  // `row` must be a multiple of sixteen.
  TileRows from_row(long row) const {
    return {first + row / kTileRows * tile_stride, row_stride, step_stride, tile_stride};
  }
};

// Rows [num_rows][stride].
inline TileRows adjacent_rows(const Unit* rows, long stride) {
  return {rows, stride, kTileUnits, kTileRows * stride};
}

// Rows that pack_rows() has packed.
inline TileRows packed_rows(const Unit* packed, long steps) {
  constexpr long kTile = kTileRows * kTileUnits;
  return {packed, kTileUnits, kTile, steps * kTile};
}

// Packs rows [num_rows][depth] in the order in which tiles are loaded, and fills the last step with
// zeros. What is in the last tile's rows beyond num_rows is left as it is.
inline void pack_rows(const Unit* rows, long num_rows, long depth, Unit* to) {
  const long steps = ceil_div(depth, kTileUnits);
  for (long row = 0; row < num_rows; ++row) {
    const TileRows at = packed_rows(to, steps);
    Unit* place = to + row / kTileRows * at.tile_stride + row % kTileRows * at.row_stride;
    for (long step = 0; step < steps; ++step)
      store_words(place + step * at.step_stride, load_words(rows + row * depth + step * kTileUnits,
                                                            lanes(depth - step * kTileUnits)));
  }
}

// The columns of a product. All distances are in units: between a tile's sixteen units of depth,
// between steps, and between tiles of sixteen columns.
struct TileColumns {
  const Unit* first;
  long unit_stride, step_stride, tile_stride;

  TileColumns from_tile(long tile) const {
    return {first + tile * tile_stride, unit_stride, step_stride, tile_stride};
  }
};

// Columns [depth][stride].
inline TileColumns adjacent_columns(const Unit* columns, long stride) {
  return {columns, stride, kTileUnits * stride, kTileUnits};
}

// Cache lines that are prefetched during a product, `per_step` for each step.
struct TilePrefetch {
  const Unit* from = nullptr;
  long per_step = 0;
  bool first_level = false;

  void operator()(long step) const {
    for (long line = 0; line < per_step; ++line) {
      const Unit* place = from + (step * per_step + line) * kLanes;
      first_level ? prefetch<kFirstLevel>(place) : prefetch<kSecondLevel>(place);
    }
  }
  TilePrefetch after(long steps) const {
    return {from + steps * per_step * kLanes, per_step, first_level};
  }
};

// Calls body(integral_constant<int, 0>()) to body(integral_constant<int, Count - 1>()).
template <class Body, int... Index>
inline __attribute__((always_inline)) void for_each_of(std::integer_sequence<int, Index...>,
                                                       Body&& body) {
  (body(std::integral_constant<int, Index>()), ...);
}
template <int Count, class Body>
inline __attribute__((always_inline)) void for_constants(Body&& body) {
  for_each_of(std::make_integer_sequence<int, Count>(), body);
}

// sums[16 R][16 C] = rows * columns over `steps` steps, added to the previous sums unless `fresh`.
// The sums are in tiles 0 to 3, the rows in tiles 4 and 5, the columns in 6 and 7.
template <int R, int C>
inline void multiply_tiles_at_once(TileRows rows, TileColumns columns, long steps, float* sums,
                                   long sums_stride, bool fresh, TilePrefetch ahead = {}) {
  static_assert(R <= 2 && R * C <= 4, "there are eight tiles");
  const auto each_sum = [&](auto&& body) {
    for_constants<R>([&](auto r) {
      for_constants<C>([&](auto c) {
        body(std::integral_constant<int, r() * C + c()>(),
             sums + r() * kTileRows * sums_stride + c() * kTileUnits);
      });
    });
  };
  if (fresh) each_sum([](auto sum, float*) { tile_zero<sum()>(); });
  else each_sum([&](auto sum, float* place) { tile_load<sum()>(place, sums_stride); });
  for (long step = 0; step < steps; ++step) {
    ahead(step);
    const Unit* row = rows.first + step * rows.step_stride;
    const Unit* column = columns.first + step * columns.step_stride;
    for_constants<R>(
        [&](auto r) { tile_load<4 + r()>(row + r() * rows.tile_stride, rows.row_stride); });
    for_constants<C>([&](auto c) {
      tile_load<6 + c() % 2>(column + c() * columns.tile_stride, columns.unit_stride);
      for_constants<R>([&](auto r) { tile_multiply<r() * C + c(), 4 + r(), 6 + c() % 2>(); });
    });
  }
  each_sum([&](auto sum, float* place) { tile_store<sum()>(place, sums_stride); });
}

constexpr long kSumsStride = 64;

// sums[num_rows][64] = rows * columns, for at most 32 rows and 32 columns, added to the previous sums
// unless `fresh`. The sums of whole tiles are written.
inline void multiply_half(long num_rows, TileRows rows, TileColumns columns, long steps, float* sums,
                          bool fresh, TilePrefetch ahead = {}) {
  if (num_rows <= kTileRows)
    multiply_tiles_at_once<1, 2>(rows, columns, steps, sums, kSumsStride, fresh, ahead);
  else multiply_tiles_at_once<2, 2>(rows, columns, steps, sums, kSumsStride, fresh, ahead);
}

// sums[num_rows][64] = rows * columns[16 steps][64], added to the previous sums unless `fresh`.
// There are at most 32 rows. Those of the last tile beyond num_rows are computed, too, but their
// sums are not touched.
inline void multiply_two_tiles(long num_rows, TileRows rows, TileColumns columns, long steps,
                               float* sums, long sums_stride, bool fresh) {
  constexpr long kWidth = kSumsStride;
  const auto multiply = [&](auto r, float* to, long stride) {
    for (long half = 0; half < 2; ++half)
      multiply_tiles_at_once<r(), 2>(rows, columns.from_tile(2 * half), steps, to + half * kWidth / 2,
                                     stride, fresh);
  };
  const auto multiply_any = [&](float* to, long stride) {
    if (num_rows <= kTileRows) multiply(std::integral_constant<int, 1>(), to, stride);
    else multiply(std::integral_constant<int, 2>(), to, stride);
  };
  if (num_rows % kTileRows == 0) return multiply_any(sums, sums_stride);
  alignas(64) float own[2 * kTileRows * kWidth];
  const auto copy = [&](const float* from, long stride, float* to, long to_stride) {
    for (long i = 0; i < num_rows; ++i)
      std::memcpy(to + i * to_stride, from + i * stride, sizeof(float) * kWidth);
  };
  if (!fresh) {
    std::memset(own, 0, sizeof own);
    copy(sums, sums_stride, own, kWidth);
  }
  multiply_any(own, kWidth);
  copy(own, kWidth, sums, sums_stride);
}

// As above, for any number of rows.
inline void multiply_tiles(long num_rows, TileRows rows, TileColumns columns, long steps, float* sums,
                           long sums_stride, bool fresh) {
  constexpr long kTogether = 2 * kTileRows;
  for (long row = 0; row < num_rows; row += kTogether)
    multiply_two_tiles(std::min(kTogether, num_rows - row), rows.from_row(row), columns,
                               steps, sums + row * sums_stride, sums_stride, fresh);
}

}  // namespace baton
