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

// Cache lines that are prefetched during a product, `per_step` for each step; steps are `stride`
// lines apart.
struct TilePrefetch {
  const Unit* from = nullptr;
  long per_step = 0, stride = 0;
  bool first_level = false;

  void operator()(long step) const {
    for (long line = 0; line < per_step; ++line) {
      const Unit* place = from + (step * stride + line) * kLanes;
      first_level ? prefetch<kFirstLevel>(place) : prefetch<kSecondLevel>(place);
    }
  }
  TilePrefetch skip(long lines) const {
    return {from + lines * kLanes, per_step, stride, first_level};
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
inline void multiply_tiles_at_once(TileRows rows, const Unit* columns, long column_stride,
                                   long steps, float* sums, long sums_stride, bool fresh,
                                   TilePrefetch ahead = {}) {
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
    const Unit* column = columns + step * kTileUnits * column_stride;
    for_constants<R>(
        [&](auto r) { tile_load<4 + r()>(row + r() * rows.tile_stride, rows.row_stride); });
    for_constants<C>([&](auto c) {
      tile_load<6 + c() % 2>(column + c() * kTileUnits, column_stride);
      for_constants<R>([&](auto r) { tile_multiply<r() * C + c(), 4 + r(), 6 + c() % 2>(); });
    });
  }
  each_sum([&](auto sum, float* place) { tile_store<sum()>(place, sums_stride); });
}

// sums[num_rows][64] = rows * columns[16 steps][64], added to the previous sums unless `fresh`.
// Rows of the last tile beyond num_rows are computed, but their sums are not touched.
inline void multiply_tiles(long num_rows, TileRows rows, const Unit* columns, long column_stride,
                           long steps, float* sums, long sums_stride, bool fresh,
                           TilePrefetch ahead = {}) {
  constexpr long kWidth = 64, kHalfWidth = 32;
  const auto multiply = [&](auto r, auto c, long row, long column) {
    TileRows from = rows;
    from.first += row / kTileRows * rows.tile_stride;
    float* to = sums + row * sums_stride + column;
    const long there = std::min<long>(kTileRows * r(), num_rows - row);
    if (there == kTileRows * r()) {
      multiply_tiles_at_once<r(), c()>(from, columns + column, column_stride, steps, to,
                                       sums_stride, fresh, ahead);
    } else {
      alignas(64) float own[kTileRows * r() * kWidth] = {};
      const auto copy = [&](const float* source, long stride, float* target, long target_stride) {
        for (long i = 0; i < there; ++i)
          std::memcpy(target + i * target_stride, source + i * stride, sizeof(float) * 16 * c());
      };
      if (!fresh) copy(to, sums_stride, own, kWidth);
      multiply_tiles_at_once<r(), c()>(from, columns + column, column_stride, steps, own, kWidth,
                                       fresh, ahead);
      copy(own, kWidth, to, sums_stride);
    }
    ahead = ahead.skip(ahead.per_step);
  };
  constexpr std::integral_constant<int, 1> one;
  constexpr std::integral_constant<int, 2> two;
  constexpr std::integral_constant<int, 4> four;
  if (num_rows <= kTileRows) return multiply(one, four, 0, 0);
  for (long column = 0; column < kWidth; column += kHalfWidth)
    for (long row = 0; row < num_rows; row += 2 * kTileRows)
      num_rows - row > kTileRows ? multiply(two, two, row, column) : multiply(one, two, row, column);
}

}  // namespace baton
