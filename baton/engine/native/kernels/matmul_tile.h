// The product of a few rows and 64 columns, used for both weight matrices and attention.
#pragma once

#include <algorithm>
#include <type_traits>

#include "number_formats.h"

namespace baton {

constexpr long kColumns = 64;    // columns of a tile: four vectors
constexpr long kRowsAtOnce = 6;  // the rows' sums, the columns and a row's unit fit in registers
constexpr long kDepthBlock = 96;  // units of depth; their 64 columns fit the L1 cache
constexpr long kFirstLevelDistance =
    32 * kColumns;  // units; prefetches farther ahead go to the L2 cache

// sums[R][64] = rows[R][depth] * columns[depth][64], added to the previous sums unless `fresh`.
//
// `depth` counts units, which are contiguous in a row. Every sum runs over the depth in order,
// whatever R is, so that a row's result has the same bits in any batch. For each unit of depth,
// `Prefetched` vectors are prefetched from `prefetch_from` to the cache level `Level`.
template <class T, long R, long Prefetched, int Level>
inline __attribute__((always_inline)) void multiply_few(const Unit* rows, long row_stride,
                                                        const Unit* columns, long column_stride,
                                                        long depth, float* sums, long sums_stride,
                                                        bool fresh, const Unit* prefetch_from) {
  constexpr long kVectors = vectors_at_once(R);
  for (long part = 0; part < kColumns; part += kVectors * kLanes) {
    Vec sum[R][kVectors];
#pragma GCC unroll 6
    for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v)
        sum[r][v] = fresh ? zeros() : load(sums + r * sums_stride + part + v * kLanes);
    for (long step = 0; step < depth; ++step) {
      const Unit* line = columns + step * column_stride + part;
      Words column[kVectors];
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v) column[v] = load_words(line + v * kLanes);
      if (part == 0)
#pragma GCC unroll 4
        for (long v = 0; v < Prefetched; ++v)
          prefetch<Level>(prefetch_from + step * column_stride + v * kLanes);
#pragma GCC unroll 6
      for (long r = 0; r < R; ++r) {
        const Words own = broadcast_word(rows[r * row_stride + step]);
#pragma GCC unroll 4
        for (long v = 0; v < kVectors; ++v)
          sum[r][v] = Format<T>::multiply_add(sum[r][v], own, column[v]);
      }
    }
#pragma GCC unroll 6
    for (long r = 0; r < R; ++r)
#pragma GCC unroll 4
      for (long v = 0; v < kVectors; ++v)
        store(sums + r * sums_stride + part + v * kLanes, sum[r][v]);
  }
}

template <class T, long Prefetched, int Level>
inline void multiply_group(long count, const Unit* rows, long row_stride, const Unit* columns,
                           long column_stride, long depth, float* sums, long sums_stride,
                           bool fresh, const Unit* prefetch_from) {
  const auto few = [&](auto number) {
    multiply_few<T, decltype(number)::value, Prefetched, Level>(
        rows, row_stride, columns, column_stride, depth, sums, sums_stride, fresh, prefetch_from);
  };
  switch (count) {
    case 1: return few(std::integral_constant<long, 1>());
    case 2: return few(std::integral_constant<long, 2>());
    case 3: return few(std::integral_constant<long, 3>());
    case 4: return few(std::integral_constant<long, 4>());
    case 5: return few(std::integral_constant<long, 5>());
    default: return few(std::integral_constant<long, 6>());
  }
}

// As above, for any number of rows, a few at a time. Memory is prefetched `Ahead` units before it
// is used (0: not at all), because the hardware prefetcher stops at the end of each page. The first
// group of rows prefetches all of it, or up to four groups share the work: a core can only wait for
// a few cache lines at a time.
template <class T, long Ahead = 0>
void multiply(long num_rows, const Unit* rows, long row_stride, const Unit* columns,
              long column_stride, long depth, float* sums, long sums_stride, bool fresh) {
  constexpr int kLevel = Ahead > kFirstLevelDistance ? kSecondLevel : kFirstLevel;
  constexpr long kVectors = kColumns / kLanes;
  const long parts = ceil_div(num_rows, kRowsAtOnce), prefetched = parts < 2   ? 4
                                                                   : parts < 4 ? 2
                                                                               : 1;
  for (long part = 0, first = 0; part < parts; ++part) {
    const long count = ceil_div(num_rows - first, parts - part);
    const Unit* prefetch_from = columns + Ahead + part * prefetched * kLanes;
    const auto some = [&](auto number) {
      multiply_group<T, decltype(number)::value, kLevel>(
          count, rows + first * row_stride, row_stride, columns, column_stride, depth,
          sums + first * sums_stride, sums_stride, fresh, prefetch_from);
    };
    if (!Ahead || part * prefetched >= kVectors)
      some(std::integral_constant<long, 0>());
    else if (prefetched == 1)
      some(std::integral_constant<long, 1>());
    else if (prefetched == 2)
      some(std::integral_constant<long, 2>());
    else some(std::integral_constant<long, kVectors>());
    first += count;
  }
}

// Transposes 64 rows of `depth` units to columns[depth][64]; a null row gives zeros. Meanwhile the
// next rows, `prefetch_from`, are prefetched little by little: a core can only wait for a few cache
// lines at a time.
inline void transpose_rows(const Unit* const rows[kColumns], long depth, Unit* columns,
                           const Unit* const* prefetch_from = nullptr) {
  for (long first = 0; first < kColumns; first += kLanes)
    for (long step = 0; step < depth; step += kLanes) {
      const Lanes inside = lanes(depth - step);
      Words block[kLanes];
#pragma GCC unroll 16
      for (long r = 0; r < kLanes; ++r) {
        const Unit* row = rows[first + r];
        block[r] = row ? load_words(row + step, inside) : zero_words();
        if (prefetch_from) prefetch<kSecondLevel>(prefetch_from[first + r] + step);
      }
      transpose(block);
      const long count = std::min(kLanes, depth - step);
      for (long s = 0; s < count; ++s)
        store_words(columns + (step + s) * kColumns + first, block[s]);
    }
}

}  // namespace baton
